"""Sources of documents by name: what can be read at any index, and what can only be read on.

The difference decides what a checkpoint holds. A document of an indexable source is stored by its number and read
again; a document of a stream that waits in the pool is stored by value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_longctx.datamodules.settings import nearest
from lightning_longctx.errors import ConfigurationError, DataError
from lightning_longctx.units import TokenCount, parse_token_count

__all__ = ["IndexableSource", "SequenceSource", "Source", "SourceSettings", "StreamingSource", "records_source"]


_INFINITY = float("inf")

Modality = Literal["text", "multimodal", "diffusion"]


@dataclass
class SourceSettings:
    """One source in YAML, or in Python with ``records``.

    Args:
        path: a built-in name (``python-stdlib``, ``package-metadata``), a file, or a glob. ``.jsonl`` files have one
            document a line, all others are one document each.
        records: instead of ``path``: any sequence or iterable of dicts.
        weight: share against the other sources, in tokens, or in documents under ``loading.mixing: sample``. Default 1
            for each: equal shares until one is exhausted.
        text_field: the key of the text in a record. Default ``text``, the usual one. Records with ``input_ids`` (and
            aligned ``labels``) need no tokenizer.
        min_tokens: shorter documents are dropped and counted. Default None: all are kept.
        max_tokens: longer documents are dropped and counted. Default None: all are kept.
        modality: what the tokens stand for: ``text`` (default), ``multimodal`` or ``diffusion``. Declared and not
            guessed; a buffer policy that was measured on text alone refuses the others.

    Raises:
        ConfigurationError: neither or both of ``path`` and ``records``, a weight that is not positive and finite, or an
            unknown modality.
    """

    path: str | None = None
    records: Any = None
    weight: float = 1.0
    text_field: str = "text"
    min_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    modality: Modality = "text"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.records is None):
            got = "both" if self.path else "neither"
            raise ConfigurationError("data.sources", "must have one of `path` and `records`", got, "Give one of them.")
        if (
            isinstance(self.weight, bool)
            or not isinstance(self.weight, (int, float))
            or not 0 < self.weight < _INFINITY
        ):
            fix = "Leave the source out instead."
            raise ConfigurationError(
                "data.sources", "must have a positive `weight`, and a finite one", repr(self.weight), fix
            )
        if self.modality not in get_args(Modality):
            fix = nearest(str(self.modality), list(get_args(Modality)))
            raise ConfigurationError("data.sources", "must have a known `modality`", repr(self.modality), fix)
        if self.min_tokens is not None:
            self.min_tokens = parse_token_count(self.min_tokens, "data.sources.min_tokens")
        if self.max_tokens is not None:
            self.max_tokens = parse_token_count(self.max_tokens, "data.sources.max_tokens")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            got = f"{self.min_tokens} above {self.max_tokens}"
            raise ConfigurationError("data.sources.min_tokens", "must be at most `max_tokens`", got, "Exchange them.")

    @classmethod
    def of(cls, name: str, value: Any) -> SourceSettings:
        """Read a source in any form that a user may write it.

        Args:
            name: of the source, for errors.
            value: settings, a mapping of them, a path or built-in name, or a sequence or iterable of dicts.

        Raises:
            ConfigurationError: an unknown key (the nearest one is named), or something that cannot be read.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, (str, Path)):
            return cls(path=str(value))
        if isinstance(value, Mapping):
            known = [entry.name for entry in fields(cls)]
            for key in value:
                if key not in known:
                    raise ConfigurationError(
                        f"data.sources.{name}", "must have known keys only", repr(key), nearest(str(key), known)
                    )
            try:
                return cls(**value)
            except ConfigurationError as error:
                field = error.field.replace("data.sources", f"data.sources.{name}", 1)
                raise ConfigurationError(field, error.rule, error.got, error.fix) from None
        if isinstance(value, Iterable) or _is_sequence(value):
            return cls(records=value)
        fix = "Give a path, a built-in name, or a sequence or iterable of dicts."
        raise ConfigurationError(f"data.sources.{name}", "must be a source", type(value).__name__, fix)


class Source:
    """Records under a name.

    Attributes:
        name: what the user calls it.
        weight: share of tokens, or of documents.
        text_field: key of the text.
        min_tokens: shortest document to keep, or None.
        max_tokens: longest document to keep, or None.
        modality: what the tokens stand for.
    """

    def __init__(self, name: str, settings: SourceSettings) -> None:
        self.name = name
        self.weight = float(settings.weight)
        self.text_field = settings.text_field
        self.min_tokens = settings.min_tokens
        self.max_tokens = settings.max_tokens
        self.modality = settings.modality

    def describe(self, number: int) -> str:
        """Where record ``number`` is, for an error message."""
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


class SequenceSource(IndexableSource):
    """Anything with ``__len__`` and ``__getitem__``: a list of dicts, a map-style dataset."""

    def __init__(self, name: str, settings: SourceSettings, records: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(name, settings)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, number: int) -> Mapping[str, Any]:
        """Read record ``number``."""
        return self._records[number]


class StreamingSource(Source):
    """Any iterable of dicts. Keeps its own order; a resume reads on from the start to where it was."""

    def __init__(self, name: str, settings: SourceSettings, records: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(name, settings)
        self._records = records
        self._opened = False

    def open(self, taken: int = 0, state: Any = None) -> Iterator[Mapping[str, Any]]:
        """Start a pass after ``taken`` records.

        Raises:
            DataError: the source is an iterator that was already started, so a second pass would silently be empty.
        """
        iterator = iter(self._records)
        if iterator is self._records and self._opened:
            got = f"a {type(iterator).__name__} that was read before"
            fix = "Give an object whose __iter__ starts anew, or a sequence."
            raise DataError(f"data.sources.{self.name}", "must be iterable more than once", got, fix)
        self._opened = True
        return islice(iterator, taken, None)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def records_source(name: str, settings: SourceSettings) -> Source:
    """The source of ``settings.records``: indexable if it has a length and items, a stream otherwise."""
    if _is_sequence(settings.records):
        return SequenceSource(name, settings, settings.records)
    return StreamingSource(name, settings, settings.records)
