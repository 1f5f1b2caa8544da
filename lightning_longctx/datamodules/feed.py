"""What fills the pool: candidates in the order of the mix, and their tokens once a row needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import SequenceSettings, SourceState
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.reread import Rereads
from lightning_longctx.datamodules.row_state import RowState
from lightning_longctx.datamodules.stream import DocumentStream
from lightning_longctx.errors import DataError

__all__ = ["CandidateFeed", "DocumentFeed", "Head"]


class Head(NamedTuple):
    """What comes next: a document that carries this source id, of that pass over its source."""

    source_id: int
    passes: int


class CandidateFeed(ABC):
    """Where a row builder gets its candidates from."""

    @abstractmethod
    def head(self) -> Head | None:
        """What the next call of :meth:`draw` gives; None at the end."""

    @abstractmethod
    def draw(self) -> list[Candidate] | None:
        """The candidates of the next document, possibly none; None at the end.

        Raises:
            DataError: a bad record, under ``on_bad_record: error``.
        """

    @abstractmethod
    def fetch(self, candidates: Iterable[Candidate]) -> None:
        """Give candidates their tokens, where they have none.

        Raises:
            DataError: a document that changed since its place was saved.
        """

    def counts(self) -> Counter[str]:
        """What was counted since the last call."""
        return Counter()

    def state(self) -> tuple[dict[str, SourceState], int]:
        """Where the feed is in each source, by name, and how many documents the mix has given."""
        return {}, 0

    def reweight(self, weights: Mapping[str, float]) -> None:  # noqa: B027
        """Mix by other weights, by source name, from the next document on. Those that are not named keep theirs."""

    def expect(self, candidates: Iterable[Candidate]) -> None:  # noqa: B027
        """What will probably be fetched next, in order. Nothing depends on it but time."""

    # B027: nothing to start, stop or close without documents to read, so these are no abstract methods.
    def start(self) -> None:  # noqa: B027
        """Begin to read ahead."""

    def stop(self) -> None:  # noqa: B027
        """Make a call that runs in another thread fail before its next document."""

    def close(self) -> None:  # noqa: B027
        """End the worker processes."""


class DocumentFeed(CandidateFeed):
    """Reads, tokenizes and mixes the documents of one reader rank.

    Args:
        reader: reads and tokenizes.
        sequence: order of documents; its epoch is set by the state.
        num_workers: processes.
        state: where to start.
    """

    def __init__(self, reader: DocumentReader, sequence: SequenceSettings, num_workers: int, state: RowState) -> None:
        self._reader = reader
        self._sequence = replace(sequence, epoch=state.epoch)
        self._num_workers = num_workers
        self._start = state
        self._weights = {source.name: source.weight for source in reader.sources}
        self._counts: Counter[str] = Counter()
        self._rereads = Rereads(state)
        self._stopped = False
        self._stream: DocumentStream | None = None  # opened when first needed: that may fail, and takes time

    def head(self) -> Head | None:
        """Wait for the next document, and say where it is from."""
        found = self._opened().peek()
        return None if found is None else Head(self._reader.carried_id(found.source_id), found.passes)

    def draw(self) -> list[Candidate] | None:
        """Take the next document."""
        self._check()
        stream = self._opened()
        found = stream.peek()
        if found is None:
            return None
        if found.draw.error is not None:
            raise found.draw.error
        stream.take()
        self._counts.update(found.draw.counts)
        return [Candidate.of(document, found.passes) for document in found.draw.documents]

    def fetch(self, candidates: Iterable[Candidate]) -> None:
        """Wait for the tokens of candidates of which only the place was saved."""
        lacking = [candidate for candidate in candidates if candidate.document is None]
        self._rereads.want(lacking)
        while self._rereads.awaited:
            self._check()
            self._opened().reread()
        for candidate in lacking:
            self._restore(candidate)

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Read these again before the others."""
        self._rereads.expect(candidates)

    def counts(self) -> Counter[str]:
        """What was read, split and dropped since the last call."""
        found, self._counts = self._counts, Counter()
        return found

    def state(self) -> tuple[dict[str, SourceState], int]:
        """Where the feed is after the last document drawn; nothing read ahead is part of it."""
        if self._stream is None:
            return self._start.sources, self._start.count
        states, count = self._stream.mixer.state()
        return {source.name: state for source, state in zip(self._reader.sources, states, strict=True)}, count

    def start(self) -> None:
        """Start the worker processes, if there is anything to read."""
        self._opened().start()

    def stop(self) -> None:
        """Make a call that runs in another thread fail before its next document."""
        self._stopped = True

    def reweight(self, weights: Mapping[str, float]) -> None:
        """Mix by other weights from the next document on."""
        self._weights = {**self._weights, **weights}
        if self._stream is not None:
            self._stream.mixer.reweight([self._weights[source.name] for source in self._reader.sources])

    def close(self) -> None:
        """End the worker processes."""
        if self._stream is not None:
            self._stream.close()

    def _opened(self) -> DocumentStream:
        if self._stream is None:
            start, sources = self._start, self._reader.sources
            states = [start.sources.get(source.name, SourceState()) for source in sources]
            share = Share(start.dp_rank, start.dp_size)
            mixer = open_mixer(sources, self._sequence, share, states, start.count)
            mixer.reweight([self._weights[source.name] for source in sources])
            self._stream = DocumentStream(self._reader, mixer, self._num_workers, self._sequence.seed, self._rereads)
        return self._stream

    def _check(self) -> None:
        if self._stopped:
            raise InterruptedError("reading was stopped")

    def _restore(self, candidate: Candidate) -> None:
        found = self._rereads.take(candidate)
        if isinstance(found, str):
            source = self._reader.sources[candidate.source_id]
            got = f"{source.describe(candidate.number)}: {found}"
            fix = "Resume with the same files and tokenizer, or start anew."
            raise DataError(source.field, "must give the tokens it gave before the stop", got, fix)
        candidate.document = found
