"""How long training waits for rows, and how long until the first one, in both runtimes.

The peer makes each row on demand; the floor ("ready") is a row that is there already, so its waits are the noise of the
machine.

The tokenizer sleeps, as a slow one would compute, and so do the steps; sleeping needs no processor, so the figures hold
on a small machine too. Each is a ratio to what the same run cannot do without: a step, or the sleep of the documents
that the first row must have, divided among the workers.

    python benchmarks/data_wait.py [--json PATH] [--rows N] [--seconds S] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from lightning_longctx.datamodules import DynamicBatchingDataModule, FixedBufferPolicy, LoadingSettings
from lightning_longctx.datamodules.rows import RowBuilder, RowState
from lightning_longctx.datamodules.state import saved_state
from lightning_longctx.topology import Topology

WINDOW = 2**17
WORKERS = 4
#: How much longer a step takes than its documents need on average: "the transform keeps up".
HEADROOM = 1.3
#: Documents that wait in the pool of the run that is resumed.
POOL = 200
WAYS = ("ready", "on demand", "main", "worker")
#: Rows that are timed after a resume.
RESUMED_ROWS = 5
#: Turns for first rows; the median is reported.
TURNS = 3


def sleeping_tokenizer(seconds: float) -> Callable[[str], Any]:
    """A tokenizer that gives as many tokens as the text says, after a sleep of so many seconds."""

    def tokenize(text: str) -> Any:
        time.sleep(seconds)
        return np.ones(int(text), np.int32)

    return tokenize


@dataclass(frozen=True)
class Figures:
    """What one way of making rows gives.

    Attributes:
        first: time to the first row, over the sleep that it must have at least.
        wait_p50: median wait of the later rows, over a step.
        wait_p99: the same, 99th percentile.
        longest: the longest wait, over a step.
    """

    first: float
    wait_p50: float
    wait_p99: float
    longest: float


def lengths(stream: str, count: int) -> list[int]:
    """Documents of an eighth of a window each (so that the first row needs eight), or of many lengths."""
    if stream == "eighths":
        return [WINDOW // 8] * count
    draw = np.random.default_rng(0).lognormal(np.log(WINDOW / 16), 1.0, count)
    return [int(length) for length in draw.clip(64, WINDOW)]


@dataclass(frozen=True)
class ResumeFigures:
    """A resume with :data:`POOL` documents in the pool.

    The least is the sleep of the waiting documents that the rows take and of the new ones that the policy reads before
    it chooses, divided among the workers.

    Attributes:
        first_seconds: time to the first row.
        first: the same, over the least.
        later: time to row number :data:`RESUMED_ROWS`, over the least.
        pool_seconds: sleep of all documents in the pool, divided among the workers.
    """

    first_seconds: float
    first: float
    later: float
    pool_seconds: float


def make_data(
    found: list[int], tokenize: Any, runtime: str, policy: Any = "adaptive", workers: int = WORKERS
) -> DynamicBatchingDataModule:
    """A data module over documents of given lengths."""
    return DynamicBatchingDataModule(
        {"a": [{"text": str(length)} for length in found]},
        tokenizer=tokenize,
        max_seq_len=WINDOW,
        buffer_policy=policy,
        loading=LoadingSettings(num_workers=workers, shuffle=False, runtime=runtime),  # type: ignore[arg-type]
    )


def rows_of(way: str, found: list[int], seconds: float) -> Iterator[Any]:
    """Rows of a way: a runtime, a builder that is asked for each row when it is needed, or one row again and again."""
    if way == "ready":
        row = next(iter(make_data(found, sleeping_tokenizer(0), "main").train_dataloader()))
        while True:
            yield row
    data = make_data(found, sleeping_tokenizer(seconds), "main" if way == "on demand" else way)
    if way != "on demand":
        yield from data.train_dataloader()
        return
    builder: RowBuilder = data.row_builder(Topology())
    try:
        while (row := builder.next_row()) is not None:
            yield row
    finally:
        builder.close()


def measure(way: str, stream: str, rows: int, seconds: float) -> Figures:
    """Train by sleeping: the time of the documents of a mean row, with :data:`HEADROOM`."""
    documents = lengths(stream, 40 * (rows + 1))
    step = HEADROOM * seconds / WORKERS * WINDOW / statistics.mean(documents)
    waits, start = [], time.perf_counter()
    source = rows_of(way, documents, seconds)
    next(source)
    first = time.perf_counter() - start
    for _ in range(rows):
        time.sleep(step)
        start = time.perf_counter()
        next(source)
        waits.append((time.perf_counter() - start) / step)
    source.close()  # type: ignore[attr-defined]
    oracle = -(-8 // WORKERS) * seconds if stream == "eighths" else float("nan")
    waits = waits or [float("nan")]
    return Figures(first / oracle, statistics.median(waits), float(np.quantile(waits, 0.99)), max(waits))


def resume(runtime: str, stream: str, workers: int, seconds: float) -> ResumeFigures:
    """Stop after a row, with about :data:`POOL` documents waiting, and go on."""
    found = lengths(stream, 2 * POOL)
    data = make_data(found, sleeping_tokenizer(0), runtime, FixedBufferPolicy(POOL))
    next(iter(data.train_dataloader()))
    assert data._ledger is not None
    saved = saved_state(data._ledger.used, data._training_settings())
    read = data.counters["documents_read"]
    waiting = {candidate.number for candidate in RowState.from_plain(saved["ranks"][0]).waiting}
    assert len(waiting) >= 0.8 * POOL
    resumed = make_data(found, sleeping_tokenizer(seconds), runtime, FixedBufferPolicy(POOL), workers)
    resumed.load_state_dict(saved)
    given, times, ratios = 0, [], []
    start = time.perf_counter()
    rows = iter(resumed.train_dataloader())
    for row in islice(rows, RESUMED_ROWS if workers else 1):
        times.append(time.perf_counter() - start)
        given += sum(number in waiting for number in row["document_keys"][:, 1].tolist())
        needed = given + resumed.counters["documents_read"] - read
        ratios.append(times[-1] / (needed * seconds / max(workers, 1)))
    rows.close()  # type: ignore[attr-defined]
    return ResumeFigures(times[0], ratios[0], ratios[-1], POOL * seconds / max(workers, 1))


def print_resumes(runtimes: Sequence[str], seconds: float) -> dict[str, Any]:
    """Measure resumes and print their table."""
    print(f"\nResume with {POOL} documents in the pool, {seconds:g} s each; later: row {RESUMED_ROWS}.\n")
    print("| documents | runtime | workers | first row, s | first row / least | later / least | the whole pool, s |")
    print("|---|---|---|---|---|---|---|")
    results = {}
    cases = [("eighths", 0), ("eighths", WORKERS), ("mixed", WORKERS)]
    for (stream, workers), runtime in product(cases, runtimes):
        figures = resume(runtime, stream, workers, seconds)
        results[f"{stream}, {runtime}, {workers} workers"] = asdict(figures)
        later = f"{figures.later:.2f}" if workers else ""
        cells = [f"{figures.first_seconds:.1f}", f"{figures.first:.2f}", later, f"{figures.pool_seconds:.0f}"]
        print(f"| {stream} | `{runtime}` | {workers} | {' | '.join(cells)} |", flush=True)
    return results


def figures(results: dict[str, Any]) -> list[Figure]:
    """First rows, waits and resumes of both runtimes, against rows made on demand."""
    found = []
    peer = results.get("on demand", {})
    for way in (name for name in ("main", "worker") if name in results):
        mine = results[way]
        first, wait = peer.get("first"), peer.get("wait_p99")
        found.append(Figure(f"first row, runtime {way}", mine["first"], "x least", "rows on demand", first, 1.2))
        wait = None if wait is None else 100 * wait
        found.append(
            Figure(f"wait p99, runtime {way}", 100 * mine["wait_p99"], "% of a step", "rows on demand", wait, 1)
        )
    for name, one in results.get("resume", {}).items():
        whole = one["pool_seconds"]
        found.append(Figure(f"resume to the first row, {name}", one["first_seconds"], "s", "the whole pool", whole))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all ways and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--rows", type=int, default=100, help="rows after the first (default: 100)")
    parser.add_argument("--seconds", type=float, default=1.0, help="sleep of a document (default: 1)")
    parser.add_argument("--first-seconds", type=float, default=3.0, help="the same for first rows (default: 3)")
    parser.add_argument("--only", nargs="*", default=list(WAYS), help="ways to run")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: they sleep
    print(f"{date.today()}, {os.cpu_count()} CPU cores, {WORKERS} workers, window {WINDOW}\n")
    print("| rows are made | first row / least | wait p50 | wait p99 | longest |\n|---|---|---|---|---|")
    results: dict[str, Any] = {}
    measure("main", "eighths", 0, 0.01)  # what is imported when first needed
    for way in chosen.only:
        turns = range(TURNS if way != "ready" else 0)
        firsts = [measure(way, "eighths", 0, chosen.first_seconds).first for _ in turns]
        first = statistics.median(firsts or [float("nan")])
        figures = Figures(first, *list(asdict(measure(way, "mixed", chosen.rows, chosen.seconds)).values())[1:])
        results[way] = asdict(figures)
        cells = [f"{figures.first:.2f}", *(f"{100 * value:.2f} %" for value in list(asdict(figures).values())[1:])]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)
    print("\nWaits are parts of a step.")
    runtimes = [way for way in chosen.only if way in ("main", "worker")]
    results["resume"] = print_resumes(runtimes, chosen.seconds)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
