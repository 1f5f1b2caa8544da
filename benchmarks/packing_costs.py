"""What packing costs the main process: choosing out of pools of many sizes, and whole rows of a million real tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import log
from statistics import mean, median
from time import process_time
from typing import Any

import numpy as np

from benchmarks.packing_streams import STREAMS
from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    Budget,
    DynamicBatchingDataModule,
    LoadingSettings,
    simulate_packing,
)
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.pool import Candidate, DocumentPool

__all__ = ["POOLS", "PoolCost", "half_windows", "pool_costs", "row_costs", "worst_growth"]

POOLS = (24, 200, 1000, 4096, 20_000)
WINDOW = 2**20


@dataclass(frozen=True)
class PoolCost:
    """Processor milliseconds of a row that is chosen out of a pool.

    Attributes:
        documents: in the pool before the row.
        usual: median at the default target: greedy or a first repair is good enough.
        repaired: median where no row is ever full enough, so that each look repairs, and reading and looking go on.
        longest_first: the same while long documents are preferred.
    """

    documents: int
    usual: float
    repaired: float
    longest_first: float

    @property
    def worst(self) -> float:
        """The dearest of the three."""
        return max(self.usual, self.repaired, self.longest_first)


def pool_costs(sizes: tuple[int, ...] = POOLS, rows: int = 31) -> list[PoolCost]:
    """Choose rows of 1M tokens out of pools of mid-size documents (24 of them hold a row and a half).

    Args:
        sizes: documents in the pool before each row.
        rows: that are timed, after one that is not.
    """
    return [
        PoolCost(size, _choose(size, rows, 0.998), _choose(size, rows, 1.0), _choose(size, rows, 1.0, hard=True))
        for size in sizes
    ]


def _choose(size: int, rows: int, target: float, hard: bool = False) -> float:
    # No limit of its own ends a row: the pool is as large as this benchmark makes it.
    policy = AdaptiveBufferPolicy(target, target, max_pool_documents=2**40, max_pool_bytes=2**60, max_pool_tokens=2**50)
    source = _candidates()
    pool, times = DocumentPool(), []
    for row in range(rows + 1):
        pool.add(islice(source, size - len(pool)), row)
        policy.load_state_dict({**policy.state_dict(), "hard": hard})
        start = process_time()
        plan_row(pool, policy, Budget(WINDOW, WINDOW, 4096), row, lambda: [next(source)])
        times.append(1000 * (process_time() - start))
        pool.take(range(max(0, len(pool) - size)))  # what was read beyond the size, from the oldest
    return median(times[1:])


def _candidates() -> Iterator[Candidate]:
    for number, length in enumerate(STREAMS["mid-size"](0, WINDOW)):
        yield Candidate(0, number, 0, length, length - 1, None)


def worst_growth(costs: list[PoolCost], start: int = 4096) -> float:
    """How much faster than ``n log n`` the dearest row grows from a pool of ``start`` on; at most 1 is the bar."""
    base = next(cost for cost in costs if cost.documents == start)
    larger = [cost for cost in costs if cost.documents > start]
    return max(
        cost.worst / base.worst * (start * log(start)) / (cost.documents * log(cost.documents)) for cost in larger
    )


@dataclass(frozen=True)
class HalfWindows:
    """Documents of 0.5 to 0.6 windows, of which no two fit together.

    Attributes:
        documents: read before the first row.
        pool_early: most windows that waited in the first 300 rows.
        pool_late: most windows that waited in 1,200 rows.
    """

    documents: int
    pool_early: float
    pool_late: float


def half_windows(window: int = 131_072) -> HalfWindows:
    """Run the stream for 300 and for 1,200 rows."""

    def lengths() -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield int(rng.integers(window // 2 + 1, int(0.6 * window)))

    early, late = (simulate_packing(lengths(), max_tokens_per_batch=window, micro_batches=rows) for rows in (300, 1200))
    return HalfWindows(early.first_documents, early.peak_pool_tokens / window, late.peak_pool_tokens / window)


@dataclass(frozen=True)
class RowCost:
    """Processor milliseconds of the main process for a row of 1M real tokens, after the first row.

    Attributes:
        mean: over the rows.
        worst: of them.
        tokens: in a row, mean.
    """

    mean: float
    worst: float
    tokens: float


def row_costs(rows: int = 30, num_workers: int = 2) -> RowCost:
    """Take rows from a data module: its pool, policy, packing and the state that a checkpoint would save.

    Args:
        rows: that are timed.
        num_workers: processes that read. With 0 reading is part of the time.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(40_000, 80_001, 200)
    records: list[dict[str, Any]] = [{"input_ids": rng.integers(0, 50_000, length, np.int32)} for length in lengths]
    loading = LoadingSettings(num_workers=num_workers, stop_mode="forever")
    data = DynamicBatchingDataModule({"documents": records}, max_seq_len=WINDOW, loading=loading)
    source = iter(data.train_dataloader())
    next(source)
    times, tokens = [], []
    for _ in range(rows):
        start = process_time()
        row = next(source)
        times.append(1000 * (process_time() - start))
        tokens.append(row["input_ids"].numel())
    data.teardown("fit")
    return RowCost(mean(times), max(times), mean(tokens))
