"""The part of the global sequence that belongs to one data-parallel rank, read and tokenized by worker processes.

Rank r of n takes positions r, r + n, ...; worker w of W takes every W-th of those. Every position gives exactly one
:class:`Draw`, so reading the workers in turn gives the order of a single process, whatever their number.

A resume on another number of ranks cannot use those residues: rank A may have read further than rank B. The ``deals``
of earlier layouts say how far each rank came; what they left is numbered anew and dealt to the present ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_longctx.datamodules.documents import DocumentReader, Draw
from lightning_longctx.datamodules.mixing import GlobalSequence, SequenceSettings

__all__ = ["Deal", "DocumentStream", "Share", "open_stream"]


@dataclass(frozen=True)
class Deal:
    """How far an earlier layout came: rank ``r`` of ``len(drawn)`` took its first ``drawn[r]`` documents."""

    drawn: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """Which positions belong to this rank.

    Args:
        dp_rank: this data-parallel rank.
        dp_size: number of data-parallel ranks.
        deals: of earlier layouts in this epoch, oldest first.
        start: how many of its own documents this rank has drawn already, where no snapshot tells it.
    """

    dp_rank: int = 0
    dp_size: int = 1
    deals: tuple[Deal, ...] = ()
    start: int = 0


class DocumentStream(IterableDataset[Draw]):
    """The documents of one rank, as the dataset of a loader.

    Args:
        reader: reads and tokenizes.
        sequence: settings of the global sequence.
        share: which positions to take.
    """

    def __init__(self, reader: DocumentReader, sequence: SequenceSettings, share: Share) -> None:
        self._reader = reader
        self._sequence = sequence
        self._share = share

    def __iter__(self) -> Iterator[Draw]:
        return _StreamIterator(self._reader, self._sequence, self._share)


class _StreamIterator(Iterator[Draw]):
    """One worker's part; its state is what the loader snapshots."""

    def __init__(self, reader: DocumentReader, sequence: SequenceSettings, share: Share) -> None:
        self._reader = reader
        self._positions = GlobalSequence(reader.sources, sequence)
        self._share = share
        worker = get_worker_info()
        self._worker, self._workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._start = share.start
        self._seen = [0] * (len(share.deals) + 1)  # positions that reached each deal, and the present layout

    def __next__(self) -> Draw:
        position = next(position for position in self._positions if self._is_mine())
        return self._reader.draw(*position)

    def _is_mine(self) -> bool:
        for level, deal in enumerate(self._share.deals):
            index, rank = divmod(self._seen[level], len(deal.drawn))
            self._seen[level] += 1
            if index < deal.drawn[rank]:
                return False
        index, rank = divmod(self._seen[-1], self._share.dp_size)
        self._seen[-1] += 1
        mine = rank == self._share.dp_rank and index >= self._start
        return mine and (index - self._start) % self._workers == self._worker

    def state_dict(self) -> dict[str, Any]:
        return {"sequence": self._positions.state_dict(), "seen": list(self._seen), "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._positions.load_state_dict(state["sequence"])
        self._seen = list(state["seen"])
        self._start = state["start"]


def open_stream(stream: DocumentStream, num_workers: int, seed: int, snapshot: dict[str, Any] | None) -> Any:
    """Put a stream behind a :class:`StatefulDataLoader`, at its start or at a snapshot.

    Args:
        stream: what to read.
        num_workers: processes; 0 reads in this one.
        seed: of the workers' own random numbers.
        snapshot: ``state_dict()`` of such a loader with the same number of workers and the same share.

    Returns:
        The loader: iterate it for draws, and ask ``state_dict()`` for the state at the last draw that was taken.
    """
    with warnings.catch_warnings():
        # torchdata 0.11 on torch 2.13, at each start; nothing a user could do about it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        loader = StatefulDataLoader(
            stream,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            snapshot_every_n_steps=1,  # the state is that of each draw: nothing prefetched is lost
            generator=torch.Generator().manual_seed(seed),  # else each start would draw from the model's numbers
        )
    if snapshot is not None:
        loader.load_state_dict(snapshot)
    return loader


def _as_it_is(draw: Draw) -> Draw:
    return draw
