"""Data-parallel ranks as threads of this process, fed and stopped as Lightning feeds and stops a fit.

The rows, the agreement and the ledger are those of training; only the collectives are replaced by a rendezvous of
threads, and the Trainer by the few facts that matter here: one row is fetched ahead of a loader without a length, a
step is done after so many micro-batches or at the last row of an epoch, and what is not done is lost with the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, thread
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Lock, current_thread, local
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import PackedBatch, validate_packed_batch
from lightning_longctx.datamodules import DynamicBatchingDataModule, agreement
from lightning_longctx.datamodules.loader import TrainingLoader
from lightning_longctx.datamodules.runtime import BackgroundRows
from lightning_longctx.datamodules.state import saved_state
from lightning_longctx.topology import Topology

__all__ = ["Ranks", "Step", "threaded_collectives"]

# A process that is forked from a thread of a pool would join that thread, itself, when it ends, and so end with code 1.
os.register_at_fork(after_in_child=thread._threads_queues.clear)  # type: ignore[attr-defined]

_LIMIT = 60.0  # seconds that a rank waits for the others
_this = local()


class _Group:
    """Stands for a process group of threads."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size)
        self._given: list[Tensor] = []

    def all_reduce(self, values: Tensor) -> None:
        assert current_thread().name != "longctx-rows", "no collective beside the thread that trains"
        self._given.append(values)
        self._barrier.wait(_LIMIT)
        largest = torch.stack(self._given).amax(0)
        self._barrier.wait(_LIMIT)
        values.copy_(largest)
        self._given = []
        self._barrier.wait(_LIMIT)

    def broadcast(self, values: Tensor, source: int) -> None:
        if _this.rank == source:
            self._given = [values.clone()]
        self._barrier.wait(_LIMIT)
        values.copy_(self._given[0])
        self._barrier.wait(_LIMIT)
        self._given = []


@contextmanager
def threaded_collectives() -> Iterator[None]:
    """Make the agreement of ranks use groups of threads, and processes start one at a time.

    A process that is forked while another thread starts one inherits the pipes of that one, so that its end goes unseen
    for seconds. Outside of these tests only the main thread starts processes.
    """
    starting, start = Lock(), BackgroundRows._start

    def start_alone(rows: BackgroundRows) -> None:
        with starting:
            start(rows)

    def all_reduce(values: Tensor, op: Any, group: _Group) -> None:
        assert op is dist.ReduceOp.MAX
        group.all_reduce(values)

    def broadcast(values: Tensor, src: int, group: _Group) -> None:
        group.broadcast(values, src)

    fake = SimpleNamespace(all_reduce=all_reduce, broadcast=broadcast, ReduceOp=dist.ReduceOp)
    with patch.object(agreement, "dist", fake), patch.object(BackgroundRows, "_start", start_alone):
        yield


@dataclass
class Step:
    """What one optimizer step trained on: of each micro-batch, the row of each rank, as the ids of its real tokens."""

    epoch: int
    rows: list[list[list[int]]] = field(default_factory=list)


class Ranks:
    """The ranks of one process group, from a start or a resume until they are stopped.

    Args:
        modules: the data module of each rank, by rank.
        accumulate: micro-batches of a step.
        saved: gathered state to continue from; None for a start.
    """

    def __init__(
        self, modules: list[DynamicBatchingDataModule], accumulate: int, saved: Mapping[str, Any] | None
    ) -> None:
        size = len(modules)
        group: Any = _Group(size) if size > 1 else None
        self._modules = modules
        self._accumulate = accumulate
        self._done = 0
        self.steps: list[Step] = []
        self._threads = ThreadPoolExecutor(size)
        self._loaders: list[TrainingLoader] = []
        for rank, data in enumerate(modules):
            data._topology = Topology(rank=rank, world_size=size, dp_rank=rank, dp_size=size, host_group=group)
            if saved is not None:
                data.load_state_dict(dict(saved))
            loader = data.train_dataloader()
            loader._use_at_once = None
            self._loaders.append(loader)

    @property
    def epoch(self) -> int:
        """Passes that are complete at the last row taken."""
        return self._modules[0]._ledger.used.epoch  # type: ignore[union-attr]

    def run(self, epochs: int, micro_batches: int | None = None) -> None:
        """Train until so many passes are complete, or until so many micro-batches were taken."""
        left = -1 if micro_batches is None else micro_batches
        while left and not self._complete(epochs):
            left = self._epoch(left)

    def stop(self) -> dict[str, Any]:
        """End without any notice, and return the state that a checkpoint holds."""
        merged: dict[str, Any] = {}
        for data in self._modules:
            assert data._ledger is not None
            state = saved_state(data._ledger.state(self._done), data._training_settings())
            merged = {**state, "ranks": {**merged.get("ranks", {}), **state["ranks"]}}
        for loader in self._loaders:
            loader.close()
        self._threads.shutdown()
        return merged

    def _complete(self, epochs: int) -> bool:
        used = self._modules[0]._ledger.used  # type: ignore[union-attr]
        return used.epoch + used.finished >= epochs

    def _epoch(self, left: int) -> int:
        rows = [iter(loader) for loader in self._loaders]
        ahead = self._next(rows)
        step = Step(self.epoch)
        while ahead is not None and left:
            row, ahead = ahead, self._next(rows)
            for data in self._modules:
                data._ledger.use(self._done)  # type: ignore[union-attr]
            step.rows.append([_real_tokens(entry) for entry in row])
            left -= 1
            if len(step.rows) == self._accumulate or ahead is None:
                self._done += 1
                self.steps.append(step)
                step = Step(step.epoch)
        return left

    def _next(self, rows: list[Iterator[PackedBatch]]) -> list[PackedBatch] | None:
        """The next row of each rank; None where all have ended."""

        def one(rank: int) -> PackedBatch | None:
            _this.rank = rank
            return next(rows[rank], None)

        found = list(self._threads.map(one, range(len(rows))))
        ended = [row is None for row in found]
        assert len(set(ended)) == 1, "ranks end together"
        return None if ended[0] else found  # type: ignore[return-value]


def _real_tokens(row: PackedBatch) -> list[int]:
    validate_packed_batch(row)
    return row["input_ids"][0][row["source_ids"][0] >= 0].tolist()
