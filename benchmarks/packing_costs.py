"""What packing costs the main process: choosing out of pools of many sizes, and whole rows of a million real tokens.

Processor time, of which a busy machine only ever adds some; so medians, and the lowest of three of them where noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import log
from statistics import mean, median
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.packing_streams import STREAMS
from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    Budget,
    DynamicBatchingDataModule,
    LoadingSettings,
)
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.pool import Candidate, DocumentPool

__all__ = ["POOLS", "PoolCost", "RowCost", "pool_costs", "row_costs", "worst_growth"]

POOLS = (24, 200, 1000, 4096, 20_000)
WINDOW = 2**20


@dataclass(frozen=True)
class PoolCost:
    """Processor milliseconds of a row that is chosen out of a pool: the lowest of three medians.

    Attributes:
        documents: in the pool before the row.
        usual: at the default target: greedy or a first repair is good enough.
        repaired: where no row is ever full enough, so that each look repairs, and reading and looking go on.
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


def pool_costs(sizes: tuple[int, ...] = POOLS, rows: int = 15) -> list[PoolCost]:
    """Choose rows of 1M tokens out of pools of mid-size documents (24 of them hold a row and a half).

    Args:
        sizes: documents in the pool before each row.
        rows: that are timed in each of three turns, after one that is not.
    """
    ways = ((0.998, False), (1.0, False), (1.0, True))
    times = {size: [[_choose(size, rows, *way) for way in ways] for _ in range(3)] for size in sizes}
    return [PoolCost(size, *map(min, zip(*turns, strict=True))) for size, turns in times.items()]


def _choose(size: int, rows: int, target: float, hard: bool) -> float:
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
class RowCost:
    """Processor milliseconds of the main process for a row of 1M real tokens, after the first row.

    Attributes:
        median: over the rows.
        mean: the same.
        worst: of them.
        tokens: in a row, mean.
    """

    median: float
    mean: float
    worst: float
    tokens: float


def row_costs(rows: int = 30, num_workers: int = 2) -> RowCost:
    """Take rows from a data module: its pool, policy, packing and the state that a checkpoint would save.

    Torch gets one thread, as under torchrun: with more, threads that wait for each other would be counted as work.

    Args:
        rows: that are timed.
        num_workers: processes that read. With 0 reading is part of the time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
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
    torch.set_num_threads(threads)
    return RowCost(median(times), mean(times), max(times), mean(tokens))
