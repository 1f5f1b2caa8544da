"""Sources of documents by name: what can be read at any index, and what can only be read on.

The difference decides what a checkpoint holds. A document of an indexable source is stored by its number and read
again; a document of a stream that waits in the pool is stored by value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.errors import DataError
from lightning_longctx.units import counted

__all__ = ["FileSource", "IndexableSource", "RecordStream", "SequenceSource", "Source", "StreamingSource"]


class Source:
    """Records under a name.

    Args:
        name: what the user calls it.
        settings: what the user says about it.
        field: the setting it stands in, for errors. Default: ``data.sources.<name>``.

    Attributes:
        name: as given.
        field: as given.
        settings: as given.
        weight: share of this source against the others.
        format: what a record is.
        text_field: key of the text.
        min_tokens: shortest document to keep, or None.
        max_tokens: longest document to keep, or None.
        modality: what the tokens stand for.
        paths: files that it reads; none for records in memory.
    """

    paths: Sequence[str] = ()

    def __init__(self, name: str, settings: SourceSettings, field: str = "") -> None:
        self.name = name
        self.field = field or f"data.sources.{name}"
        self.settings = settings
        self.weight = float(settings.weight)
        self.format = settings.format
        self.text_field = settings.text_field
        self.min_tokens = settings.min_tokens
        self.max_tokens = settings.max_tokens
        self.modality = settings.modality

    @property
    def is_pretokenized(self) -> bool:
        """Whether it is known that every record has its ``input_ids``, so that no tokenizer is asked."""
        return self.format == "tokens"

    def describe(self, number: int, record: Mapping[str, Any] | None = None) -> str:
        """Where a record is, for an error message.

        Args:
            number: of the record.
            record: what the stream gave; None for an indexable source.
        """
        return f"record {number} of source {self.name!r}"


class IndexableSource(Source, ABC):
    """A source whose records can be read at any index, again and again, with the same result."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abstractmethod
    def read(self, number: int) -> Mapping[str, Any]:
        """Read record ``number``.

        Raises:
            DataError: it cannot be read; names file and line.
        """

    @property
    def blocks(self) -> Sequence[int] | None:
        """Lengths of consecutive blocks of records that are cheap to read together; None if all records cost alike."""
        return None


class FileSource(Source):
    """A source that is made of files.

    Args:
        name: of the source.
        settings: of the source.
        paths: the files, in order.
        field: the setting it stands in, for errors.
    """

    def __init__(self, name: str, settings: SourceSettings, paths: Sequence[str], field: str = "") -> None:
        super().__init__(name, settings, field)
        self.paths = list(paths)


class SequenceSource(IndexableSource):
    """Anything with ``__len__`` and ``__getitem__``: a list of dicts, a map-style dataset."""

    def __init__(
        self, name: str, settings: SourceSettings, records: Sequence[Mapping[str, Any]], field: str = ""
    ) -> None:
        super().__init__(name, settings, field)
        self._records = records

    @property
    def is_pretokenized(self) -> bool:
        """Whether the first record has ``input_ids``: records in memory need not say what they are."""
        if self.format != "text" or not len(self):
            return super().is_pretokenized
        first = self.read(0)
        return isinstance(first, Mapping) and "input_ids" in first

    def __len__(self) -> int:
        return len(self._records)

    def read(self, number: int) -> Mapping[str, Any]:
        """Read record ``number``."""
        return self._records[number]


class RecordStream(Iterator[Mapping[str, Any]], ABC):
    """One pass over a stream."""

    def state(self) -> dict[str, Any] | None:
        """The position after the last record given, in plain containers; None if the source cannot tell."""
        return None


class StreamingSource(Source, ABC):
    """A source that can only be read from its beginning on. Keeps its own order."""

    @abstractmethod
    def open(self, taken: int = 0, state: Any = None) -> RecordStream:
        """Start a pass.

        Args:
            taken: how many records to leave out.
            state: of an earlier stream after ``taken`` records, which is faster; None to read over them.

        Raises:
            DataError: a pass cannot be started, or not at that place.
        """

    def decode(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Turn what the stream gave into a record, where documents are made: in a worker, if there are any.

        Raises:
            DataError: it cannot be read; names file and line.
        """
        return record


def skip(stream: RecordStream, count: int, field: str) -> RecordStream:
    """Read over ``count`` records; a bad one is one of them.

    Args:
        stream: at its place.
        count: records that were read before a stop.
        field: of the source, for errors.

    Raises:
        DataError: the stream ends before: it is not the one that was read.
    """
    for done in range(count):
        try:
            next(stream)
        except DataError:
            continue
        except StopIteration:
            fix = "Resume with the same data, give changed data another name, or start anew."
            rule = "must have the records that were read before the stop"
            raise DataError(field, rule, f"an end {counted(count - done, 'record')} earlier", fix) from None
    return stream
