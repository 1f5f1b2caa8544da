"""The documents of one data-parallel rank in the order of its mixer, read and tokenized by worker processes.

The workers decide nothing: they are sent what to read, and answer in the order of the requests. So any number of them,
also another one after a resume, gives the same documents.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_longctx.datamodules.documents import DocumentReader, Draw
from lightning_longctx.datamodules.mixing import Drawn, Mixer, Request
from lightning_longctx.datamodules.sources import IndexableSource

__all__ = ["DocumentStream"]


class DocumentStream:
    """Draws, one after another.

    Args:
        reader: reads and tokenizes.
        mixer: decides the order; owned by this stream.
        num_workers: processes; 0 reads in this one.
        seed: of the workers' own random numbers.
    """

    def __init__(self, reader: DocumentReader, mixer: Mixer, num_workers: int, seed: int) -> None:
        self.mixer = mixer
        self._reader = reader
        self._num_workers = num_workers
        self._seed = seed
        self._results: Iterator[Draw] | None = None

    def peek(self) -> Drawn | None:
        """The next draw, which stays; waits for it. None at the end."""
        while (head := self.mixer.head()) is None and not self.mixer.exhausted:
            self._read()
        return head

    def take(self) -> None:
        """Take the draw that was peeked at."""
        self.mixer.take()

    def start(self) -> None:
        """Start the worker processes now, so that they read ahead. Does nothing if they run already."""
        if self._results is not None or self.mixer.exhausted:
            return
        for source in self._reader.sources:
            if isinstance(source, IndexableSource):
                len(source)  # makes its index here, once, and not in every worker
        self._results = iter(_loader(_Reading(self._reader), _Requests(self.mixer), self._num_workers, self._seed))

    def close(self) -> None:
        """End the worker processes."""
        self._results = None

    def _read(self) -> None:
        """Wait for one result. At the end of the requests the processes end; other weights may start them again."""
        self.start()
        assert self._results is not None
        draw = next(self._results, None)
        if draw is None:
            self._results = None
        else:
            self.mixer.arrived(draw)


class _Requests(Iterator[Request]):
    """What the loader sends to its workers. It asks for one more whenever a result was taken."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer

    def __next__(self) -> Request:
        request = self._mixer.request()
        if request is None:
            raise StopIteration
        return request


class _Reading(Dataset[Draw]):
    """The reader as a dataset whose index is a request."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> Draw:
        return self._reader.draw(*request)


def _loader(dataset: _Reading, requests: _Requests, num_workers: int, seed: int) -> Any:
    with warnings.catch_warnings():
        # torchdata 0.11 on torch 2.13, at each start; nothing a user could do about it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(
            dataset,
            sampler=requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            snapshot_every_n_steps=0,  # what counts is the state of the mixer
            generator=torch.Generator().manual_seed(seed),  # else each start would draw from the model's numbers
        )


def _as_it_is(draw: Draw) -> Draw:
    return draw
