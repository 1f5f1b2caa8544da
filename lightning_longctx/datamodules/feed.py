"""What fills the pool: candidates in the order of the mix, and their tokens once a row needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lightning_longctx.datamodules.bad_record import BadRecord
from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import Document, DocumentReader
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import SequenceSettings, SourceState
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.row_state import RowState
from lightning_longctx.datamodules.sources import IndexableSource
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

    # B027: nothing to start or close without processes, so these are no abstract methods.
    def start(self) -> None:  # noqa: B027
        """Begin to read ahead."""

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
        self._stream: DocumentStream | None = None  # opened when first needed: that may fail, and takes time

    def head(self) -> Head | None:
        """Wait for the next document, and say where it is from."""
        found = self._opened().peek()
        return None if found is None else Head(self._reader.carried_id(found.source_id), found.passes)

    def draw(self) -> list[Candidate] | None:
        """Take the next document."""
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
        """Read again the tokens of candidates of which only the place was saved."""
        for candidate in candidates:
            if candidate.document is None:
                candidate.document = self._read_again(candidate)

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
        """Start the worker processes."""
        self._opened().start()

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
            self._stream = DocumentStream(self._reader, mixer, self._num_workers, self._sequence.seed)
        return self._stream

    def _read_again(self, candidate: Candidate) -> Document:
        source = self._reader.sources[candidate.source_id]
        assert isinstance(source, IndexableSource)
        stop = candidate.start + candidate.length
        try:
            whole = self._reader.read_whole(candidate.source_id, candidate.number)
        except DataError as error:
            found = str(error)
        except BadRecord as error:
            found = f"{error.rule}, got {error.got} it"
        else:
            if stop <= len(whole):
                return whole.part(candidate.start, stop)
            found = f"{len(whole)} tokens instead of at least {stop}"
        got = f"{source.describe(candidate.number)}: {found}"
        fix = "Resume with the same files and tokenizer, or start anew."
        raise DataError(source.field, "must give the tokens it gave before the stop", got, fix)
