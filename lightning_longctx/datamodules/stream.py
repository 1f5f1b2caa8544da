"""The documents of one data-parallel rank in the order of its mixer, read and tokenized by worker processes.

The workers decide nothing: they are sent what to read, and answer in the order of the requests. So any number of them,
also another one after a resume, gives the same documents. After a resume they are sent the documents that wait, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_longctx.datamodules.documents import DocumentReader, Draw, Pieces
from lightning_longctx.datamodules.forking import garbage_left_alone
from lightning_longctx.datamodules.helper_process import obey_the_parent_only
from lightning_longctx.datamodules.mixing import Drawn, Mixer, Request
from lightning_longctx.datamodules.reread import Reread, Rereads
from lightning_longctx.datamodules.sources import IndexableSource

__all__ = ["DocumentStream"]

# Requests that a worker has beside its share of the results: one that it works on, and one that waits for it.
_REQUESTS_EACH = 2


class DocumentStream:
    """Draws, one after another.

    Args:
        reader: reads and tokenizes.
        mixer: decides the order; owned by this stream.
        num_workers: processes; 0 reads in this one.
        seed: of the workers' own random numbers.
        rereads: what waits and has to be read again. Default: nothing.
    """

    def __init__(
        self, reader: DocumentReader, mixer: Mixer, num_workers: int, seed: int, rereads: Rereads | None = None
    ) -> None:
        self.mixer = mixer
        self._rereads = rereads or Rereads()
        self._reader = reader
        self._num_workers = num_workers
        self._seed = seed
        self._results: Any = None  # the iterator of a loader

    def peek(self) -> Drawn | None:
        """The next draw, which stays; waits for it. None at the end."""
        while (head := self.mixer.head()) is None and not self.mixer.exhausted:
            self._receive()
        return head

    def reread(self) -> None:
        """Wait for something to be read again: without workers what comes next is read here, when a row needs it."""
        if self._num_workers:
            self._receive()
        elif (request := self._rereads.request()) is not None:
            self._rereads.arrived(self._reader.reread(*request))

    def take(self) -> None:
        """Take the draw that was peeked at."""
        self.mixer.take()

    def start(self) -> None:
        """Start the worker processes now, so that they read ahead. Does nothing if they run already."""
        if self._results is not None or (self.mixer.exhausted and not (self._num_workers and self._rereads.open)):
            return
        for source in self._reader.sources:
            if isinstance(source, IndexableSource):
                len(source)  # makes its index here, once, and not in every worker
        requests = _Requests(self.mixer, self._rereads if self._num_workers else Rereads(), self._num_workers)
        with garbage_left_alone():
            self._results = iter(_loader(_Reading(self._reader), requests, self._num_workers, self._seed))

    def close(self) -> None:
        """End the worker processes.

        Not left to the garbage collector: an error that was raised here holds their iterator, and one that is collected
        in a cycle waits 5 s for each worker, since its queues are finalized before it says goodbye through them.
        """
        if self._results is not None and self._num_workers:
            with suppress(RuntimeError):  # a worker that ends badly now: nothing is asked of it any more
                self._results._shutdown_workers()
        self._results = None

    def _receive(self) -> None:
        """Wait for one result. At the end of the requests the processes end; other weights may start them again."""
        self.start()
        assert self._results is not None
        result = next(self._results, None)
        if result is None:
            self._results = None
        elif isinstance(result, Pieces):
            self._rereads.arrived(result)
        else:
            self.mixer.arrived(result)


class _Requests(Iterator[Request | Reread]):
    """What the loader sends to its workers. It asks for one more whenever a result was taken.

    Waiting documents that a row needs come first; else they and new ones take turns, since a row takes about as many
    out of the pool as come into it. While a row waits for its documents no more new ones are read than without it.
    """

    def __init__(self, mixer: Mixer, rereads: Rereads, num_workers: int) -> None:
        self._mixer = mixer
        self._rereads = rereads
        self._most_ahead = num_workers * _REQUESTS_EACH
        self._is_turn = True  # of a waiting document

    def __next__(self) -> Request | Reread:
        rereads = self._rereads
        crowded = rereads.awaited and self._mixer.ahead >= self._most_ahead
        again = rereads.request() if self._is_turn or rereads.urgent or crowded else None
        request = again or self._mixer.request() or rereads.request()
        if request is None:
            raise StopIteration
        self._is_turn = not isinstance(request, Reread)
        return request


class _Reading(Dataset[Draw | Pieces]):
    """The reader as a dataset whose index is a request."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request | Reread) -> Draw | Pieces:
        if isinstance(request, Reread):
            return self._reader.reread(*request)
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
            worker_init_fn=_begin,
            prefetch_factor=_REQUESTS_EACH if num_workers else None,
            snapshot_every_n_steps=0,  # what counts is the state of the mixer
            generator=torch.Generator().manual_seed(seed),  # else each start would draw from the model's numbers
        )


def _begin(worker: int) -> None:
    obey_the_parent_only()


def _as_it_is(result: Draw | Pieces) -> Draw | Pieces:
    return result
