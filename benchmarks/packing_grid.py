"""Runs packers over streams and windows, and says what a rank sees: the figures of the packing benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from statistics import mean, median
from time import process_time

import numpy as np

from benchmarks.packing_peers import PEERS, Packer, run_peer
from benchmarks.packing_pieces import Variant
from benchmarks.packing_streams import STREAMS, oracle_documents
from lightning_longctx.datamodules import FixedBufferPolicy, PackingReport, simulate_packing
from lightning_longctx.datamodules.balance import pick_rows, planning_depth

__all__ = [
    "OURS",
    "POLICIES",
    "RUNS",
    "Cell",
    "Figures",
    "Grid",
    "Run",
    "half_windows",
    "measure",
    "oracle",
    "overview",
    "run_variant",
]

#: Rows of a run that the drift of order is measured over: what a reader of short runs gets to see.
DRIFT_ROWS = 100
FIRST_FILL = 0.985  # of the oracle: the mark that the published gates were accepted with


class Lengths:
    """The lengths of one stream, drawn once, so that making them is not timed with any packer."""

    def __init__(self, stream: str, seed: int, window: int, tokens: int) -> None:
        self._more = STREAMS[stream](seed, window)
        self.values: list[int] = []
        drawn = 0
        while drawn < tokens:
            self.values.append(next(self._more))
            drawn += self.values[-1]

    def __iter__(self) -> Iterator[int]:
        for index in count():
            if index == len(self.values):
                self.values.append(next(self._more))
            yield self.values[index]


@dataclass(frozen=True)
class Cell:
    """A stream of documents packed into rows of ``window`` tokens."""

    stream: str
    window: int

    @property
    def name(self) -> str:
        """Such as ``mid-size 512K``."""
        return f"{self.stream} {self.size}"

    @property
    def size(self) -> str:
        """The window as people write it."""
        return f"{self.window // 2**20}M" if self.window >= 2**20 else f"{self.window // 2**10}K"


@dataclass(frozen=True)
class Grid:
    """What to run.

    Args:
        seeds: one stream, as of one data-parallel rank, for each.
        micro_batches: rows of each run.
        streams: names.
        windows: in tokens.
    """

    seeds: tuple[int, ...]
    micro_batches: int
    streams: tuple[str, ...] = tuple(STREAMS)
    windows: tuple[int, ...] = (2**15, 2**17, 2**19, 2**20)

    def cells(self) -> list[Cell]:
        """Every stream at every window."""
        return [Cell(stream, window) for stream in self.streams for window in self.windows]

    def lengths(self, cell: Cell) -> list[Lengths]:
        """The streams of a cell, one for each seed: enough for all rows and most pools."""
        tokens = (self.micro_batches + 60) * cell.window
        return [_lengths(cell.stream, seed, cell.window, tokens) for seed in self.seeds]


@cache
def _lengths(stream: str, seed: int, window: int, tokens: int) -> Lengths:
    return Lengths(stream, seed, window, tokens)


@dataclass(frozen=True)
class Figures:
    """What the ranks of a cell see under one packer; fills are parts of the budget.

    Attributes:
        documents: read before the first row, mean over ranks.
        documents_worst: the same of the slowest rank.
        first: fill of the first row, mean over ranks.
        steady: fill of all later rows, mean over rows and ranks.
        worst: the emptiest row of any rank.
        max_wait: most rows that a packed document waited.
        pool: most tokens that waited, in windows.
        drift: mean length of the documents of the first 100 rows against that of the stream, as a relative difference.
        imbalance: attention work (sum of squared lengths), the largest of the ranks over their mean; mean over steps.
        lost: part of the time of attention in which a rank waits for the dearest, mean over ranks and steps.
        balanced: ``imbalance`` under ``loading.balance: true``, without the last steps of a run.
        lost_balanced: ``lost`` of the same.
        cpu_ms: processor time a row.
    """

    documents: float
    documents_worst: int
    first: float
    steady: float
    worst: float
    max_wait: int
    pool: float
    drift: float
    imbalance: float
    lost: float
    balanced: float
    lost_balanced: float
    cpu_ms: float


#: Lengths, tokens of a row, number of rows.
Run = Callable[[Iterable[int], int, int], PackingReport]


def run_variant(variant: Variant) -> Run:
    """A run of one of our policies."""

    def run(lengths: Iterable[int], window: int, rows: int) -> PackingReport:
        with variant.policy(window) as policy:
            return simulate_packing(lengths, policy, max_tokens_per_batch=window, micro_batches=rows)

    return run


def _peer(packer: Packer) -> Run:
    return lambda lengths, window, rows: run_peer(packer, lengths, window, rows)


def _gate(size: int) -> Run:
    return run_variant(Variant(lambda window: FixedBufferPolicy(size)))


def _ours(lengths: Iterable[int], window: int, rows: int) -> PackingReport:
    return simulate_packing(lengths, max_tokens_per_batch=window, micro_batches=rows)  # the default policy, by name


OURS = "adaptive"
#: Our policies, the default first.
POLICIES: dict[str, Run] = {OURS: _ours, "fixed 24": _gate(24), "fixed 200": _gate(200)}
#: Everything that is compared.
RUNS: dict[str, Run] = {
    **POLICIES,
    **{name: _peer(packer) for name, packer in PEERS.items()},
}


def measure(run: Run, grid: Grid, cell: Cell) -> Figures:
    """Run a packer on every stream of a cell."""
    streams = grid.lengths(cell)
    start = process_time()
    reports = [run(lengths, cell.window, grid.micro_batches) for lengths in streams]
    seconds = process_time() - start
    costs = [_costs(report, lengths.values) for report, lengths in zip(reports, streams, strict=True)]
    plain, even = [list(step) for step in zip(*costs, strict=True)], _balanced(costs)
    return Figures(
        documents=mean(report.first_documents for report in reports),
        documents_worst=max(report.first_documents for report in reports),
        first=mean(report.first_fill for report in reports),
        steady=mean(report.steady_fill for report in reports),
        worst=min(min(report.fills) for report in reports),
        max_wait=max(report.max_wait for report in reports),
        pool=max(report.peak_pool_tokens for report in reports) / cell.window,
        drift=mean(_drift(report, lengths.values) for report, lengths in zip(reports, streams, strict=True)),
        imbalance=mean(max(step) / mean(step) for step in plain),
        lost=mean(1 - mean(step) / max(step) for step in plain),
        balanced=mean(max(step) / mean(step) for step in even),
        lost_balanced=mean(1 - mean(step) / max(step) for step in even),
        cpu_ms=1000 * seconds / (len(reports) * grid.micro_batches),
    )


def half_windows(run: Run, rows: int, window: int = 131_072) -> PackingReport:
    """Run a packer on documents of 0.5 to 0.6 windows, of which no two fit together: reading on never helps."""

    def lengths() -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield int(rng.integers(window // 2 + 1, int(0.6 * window)))

    return run(lengths(), window, rows)


def oracle(grid: Grid, cell: Cell) -> float:
    """Fewest documents that can fill a first row to 98.5 %, mean over the streams of a cell."""
    return mean(oracle_documents(lengths, cell.window, FIRST_FILL) for lengths in grid.lengths(cell))


def overview(figures: Sequence[Figures]) -> dict[str, float]:
    """A packer over many cells."""
    return {
        "documents": mean(cell.documents for cell in figures),
        "first": mean(cell.first for cell in figures),
        "steady": mean(cell.steady for cell in figures),
        "worst_cell": min(cell.steady for cell in figures),
        "cells_above_99.5": sum(cell.steady >= 0.995 for cell in figures),
        "max_wait": max(cell.max_wait for cell in figures),
        "median_wait": median(cell.max_wait for cell in figures),
        "max_pool": max(cell.pool for cell in figures),
        "median_pool": median(cell.pool for cell in figures),
        "drift": mean(abs(cell.drift) for cell in figures),
        "imbalance": mean(cell.imbalance for cell in figures),
        "balanced": mean(cell.balanced for cell in figures),
        "cpu_ms": mean(cell.cpu_ms for cell in figures),
    }


def _drift(report: PackingReport, lengths: Sequence[int]) -> float:
    packed = [lengths[number] for row in report.selected[:DRIFT_ROWS] for number in row]
    return mean(packed) / mean(lengths) - 1


def _costs(report: PackingReport, lengths: Sequence[int]) -> list[float]:
    return [float(sum(lengths[number] ** 2 for number in row)) for row in report.selected]


def _balanced(costs: Sequence[Sequence[float]]) -> list[list[float]]:
    """What the ranks give at each step if they pick among planned rows, until one of them has none left to plan."""
    planned: list[list[tuple[int, float]]] = [[] for _ in costs]
    taken, steps = 0, []
    while (wanted := taken + planning_depth(taken)) <= len(costs[0]):
        for rank, own in zip(planned, costs, strict=True):
            rank += [(taken, cost) for cost in own[taken + len(rank) : wanted]]
        picks = pick_rows(planned)
        steps.append([rank.pop(pick)[1] for rank, pick in zip(planned, picks, strict=True)])
        taken += 1
    return steps
