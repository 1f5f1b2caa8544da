"""A tokenized document, and how a record of a source becomes one.

Token arrays are numpy int32: they travel through worker queues by value (tensors would take one file descriptor each,
and hundreds of documents wait in a pool), and half the size of int64 matters at a million tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.bad_record import BadRecord, NamedRecord
from lightning_longctx.datamodules.formats import encode_record
from lightning_longctx.datamodules.settings import LongDocument, OnBadRecord
from lightning_longctx.datamodules.sources import IndexableSource, Source, StreamingSource
from lightning_longctx.datamodules.tokenizers import Tokenize
from lightning_longctx.errors import DataError
from lightning_longctx.units import counted

__all__ = ["Document", "DocumentReader", "Draw", "Pieces", "Tokens"]

Tokens: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole document, or one piece of a document that was longer than the window.

    Attributes:
        source_id: which source it came from.
        number: which record of that source.
        start: first token within the record: 0, or where this piece begins.
        input_ids: int32 ``[L]``.
        labels: int32 ``[L]``, aligned with ``input_ids`` (not shifted), -100 where masked; None means ``input_ids``.
        record_tokens: tokens of the whole record, if this is a part of it; None if it is all of it.
    """

    source_id: int
    number: int
    start: int
    input_ids: Tokens
    labels: Tokens | None = None
    record_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def part(self, start: int, stop: int) -> Document:
        """Tokens ``start`` to ``stop`` as a document; this one if that is all of it."""
        if (start, stop) == (0, len(self)):
            return self
        # Copies: a view would keep the whole document in memory while one piece waits in the pool.
        labels = None if self.labels is None else self.labels[start:stop].copy()
        ids, whole = self.input_ids[start:stop].copy(), self.record_tokens or len(self)
        return Document(self.source_id, self.number, self.start + start, ids, labels, whole)


@dataclass(slots=True)
class Draw:
    """What one record gave: documents, or the reason why there are none.

    Every record gives exactly one draw, also where its document was dropped.
    """

    documents: list[Document] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    error: DataError | None = None


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a record gave when it was read again.

    Attributes:
        source_id: place of the source.
        number: which record of it.
        documents: the pieces that were asked for, as far as the record goes.
        tokens: of the whole record.
        error: why it could not be read; None if it could.
    """

    source_id: int
    number: int
    documents: tuple[Document, ...] = ()
    tokens: int = 0
    error: str | None = None

    def part(self, start: int, stop: int, whole: int) -> Document | str:
        """Tokens ``start`` to ``stop`` of the record, all within one piece; or what is wrong with them.

        Args:
            start: first token.
            stop: the one after the last.
            whole: tokens that the record had before: with another number they are other tokens.
        """
        if self.error is None and self.tokens != whole:
            return f"{counted(self.tokens, 'token')} instead of {whole}"
        for piece in self.documents:
            if piece.start <= start and stop <= piece.start + len(piece):
                return piece.part(start - piece.start, stop - piece.start)
        assert self.error is not None
        return self.error


@dataclass(frozen=True)
class DocumentReader:
    """Reads, tokenizes and cuts records. Runs in worker processes, if there are any.

    Args:
        sources: by source id.
        tokenize: text to token ids; None if every record is tokenized already.
        window: longest document in tokens (``max_seq_len``).
        long_document: what to do with a longer one.
        on_bad_record: raise, or skip and count.
        source_ids: the id that documents of each source carry; None for its place in ``sources``. Validation sources
            keep the ids of the training sources of the same name.
        vocab_size: number of token ids that the model has; None if unknown. An id beyond it is a bad record: the model
            would fail in the middle of a step, on one rank.
    """

    sources: Sequence[Source]
    tokenize: Tokenize | None
    window: int
    long_document: LongDocument = "split"
    on_bad_record: OnBadRecord = "error"
    source_ids: tuple[int, ...] | None = None
    vocab_size: int | None = None

    def draw(self, source_id: int, number: int, record: Mapping[str, Any] | DataError | None = None) -> Draw:
        """Turn a record into documents. Never raises for bad data: the error is part of the draw.

        Args:
            source_id: place of the source in ``sources``.
            number: which record.
            record: the record of a stream, or why it has none there; None for an indexable source, which is read here.
        """
        source = self.sources[source_id]
        draw = Draw()
        try:
            if isinstance(record, DataError):
                raise record
            document = self.read_whole(source_id, number, record)
            draw.counts["documents_read"] += 1
            draw.counts["tokens_read"] += len(document)
            if self._is_wanted(source, len(document), draw.counts):
                draw.documents.extend(self._cut(document, draw.counts))
        except (BadRecord, DataError) as error:
            if self.on_bad_record == "skip" and error.rule != _TOO_LONG:
                draw.counts["bad_records_skipped"] += 1
            else:
                if isinstance(error, BadRecord):
                    place = source.describe(number, record if isinstance(record, Mapping) else None)
                    error = error.at(source.field, place)  # only now: telling the place may read the file
                draw.error = error
        return draw

    def carried_id(self, source_id: int) -> int:
        """The source id that documents of a source carry."""
        return source_id if self.source_ids is None else self.source_ids[source_id]

    def reread(self, source_id: int, number: int, spans: Sequence[tuple[int, int]]) -> Pieces:
        """Read a record of an indexable source again. Never raises for bad data: the error is part of the result.

        Args:
            source_id: place of the source in ``sources``.
            number: which record.
            spans: first token and the one after the last of each piece that is wanted.
        """
        try:
            whole = self.read_whole(source_id, number)
        except DataError as error:
            return Pieces(source_id, number, error=str(error))
        except BadRecord as error:
            return Pieces(source_id, number, error=f"{error.rule}, got {error.got} it")
        length = len(whole)
        pieces = tuple(whole.part(start, min(stop, length)) for start, stop in spans if start < length)
        return Pieces(source_id, number, pieces, length)

    def read_whole(self, source_id: int, number: int, record: Mapping[str, Any] | None = None) -> Document:
        """Turn a record into one document, however long it is and whatever the limits of its source.

        Args:
            source_id: place of the source in ``sources``.
            number: which record.
            record: the record of a stream; None for an indexable source, which is read here.

        Raises:
            BadRecord: the record cannot be used; the place is not told yet.
            DataError: the record cannot be read.
        """
        source = self.sources[source_id]
        with NamedRecord(lambda: source.describe(number, record)):
            found = _read(source, number, record)
            return Document(self.carried_id(source_id), number, 0, *self._encode(source, found))

    def _encode(self, source: Source, record: Mapping[str, Any]) -> tuple[Tokens, Tokens | None]:
        if not isinstance(record, Mapping):
            fix = "Give records such as {'text': ...}."
            raise BadRecord("must give mappings (dicts)", f"a {type(record).__name__} in", fix)
        values, labels = encode_record(source.settings, record, self.tokenize)
        ids = self._as_ids(values)
        if labels is None:
            return ids, None
        aligned = _as_tokens(labels, lowest=IGNORE_INDEX)
        self._as_ids(aligned[aligned != IGNORE_INDEX], "the labels of")
        if len(aligned) != len(ids):
            got = f"{counted(len(aligned), 'label')} for {counted(len(ids), 'token')} in"
            raise BadRecord("must have one label for each token (aligned, not shifted)", got, "Mask with -100.")
        return ids, aligned

    def _as_ids(self, values: Any, part: str = "") -> Tokens:
        ids = _as_tokens(values)
        if self.vocab_size is not None and ids.size and ids.max() >= self.vocab_size:
            rule = f"must have token ids below {self.vocab_size:,}, the model's vocabulary"
            raise BadRecord(rule, f"{ids.max():,} in {part}".rstrip(), "Use the tokenizer of the model.")
        return ids

    def _is_wanted(self, source: Source, length: int, counts: Counter[str]) -> bool:
        """Whether the document passes the limits of its source; counts why not."""
        if length == 0:
            counts["documents_without_tokens"] += 1
            return False
        reason = None
        if source.min_tokens is not None and length < source.min_tokens:
            reason = "documents_below_min_tokens"
        elif source.max_tokens is not None and length > source.max_tokens:
            reason = "documents_above_max_tokens"
        elif length > self.window and self.long_document == "drop":
            reason = "documents_longer_than_window_dropped"
        if reason is None:
            return True
        counts[reason] += 1
        counts["tokens_dropped"] += length
        return False

    def _cut(self, document: Document, counts: Counter[str]) -> Iterator[Document]:
        length = len(document)
        if length <= self.window:
            yield document
            return
        if self.long_document == "error":
            fix = "Raise `max_seq_len`, or set `packing.long_document` to split, truncate or drop."
            raise BadRecord(_TOO_LONG, f"{counted(length, 'token')} in", fix)
        if self.long_document == "truncate":
            counts["documents_truncated"] += 1
            counts["tokens_truncated"] += length - self.window
            yield document.part(0, self.window)
            return
        counts["documents_split"] += 1
        for start in range(0, length, self.window):
            yield document.part(start, min(start + self.window, length))


_TOO_LONG = "must not be longer than `max_seq_len` under long_document: error"


def _read(source: Source, number: int, record: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The record itself: read by number, or what a stream gave, which its source may have to decode."""
    if record is None:
        assert isinstance(source, IndexableSource)
        return source.read(number)
    return source.decode(record) if isinstance(source, StreamingSource) else record


def _as_tokens(values: Any, lowest: int = 0) -> Tokens:
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        got = f"{array.dtype} {list(array.shape)} in"
        raise BadRecord("must give one list of integer token ids", got, "Give a flat list of ints.")
    least, most = int(array.min()), int(array.max())
    if least < lowest or most > np.iinfo(np.int32).max:
        got = f"{least} to {most} in"
        raise BadRecord(f"must give token ids from {lowest} that fit 32 bits", got, "Check the tokenizer.")
    return array.astype(np.int32)
