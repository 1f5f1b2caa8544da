"""Sources in files: text (a file is a document) and JSON lines (a line is a document), read by position.

JSON lines are indexed by byte offset, so that a line can be read at random and again after a resume, without holding
text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.builtin_sources import BUILTIN_SOURCES
from lightning_longctx.datamodules.settings import nearest
from lightning_longctx.datamodules.sources import IndexableSource, Source, SourceSettings, records_source
from lightning_longctx.errors import ConfigurationError, DataError

__all__ = ["JsonLinesSource", "TextFilesSource", "open_source", "open_sources"]

_JSON_LINES = {".jsonl", ".ndjson"}
# Formats that would otherwise be read as text, silently wrong.
_NOT_TEXT = {".parquet", ".gz", ".zst", ".zip", ".xz", ".bz2", ".arrow", ".bin", ".npy", ".json"}
# Bytes read at a time while an index is made: large enough for the disk, small beside a row of 1M tokens.
_INDEX_CHUNK = 2**24


class TextFilesSource(IndexableSource):
    """UTF-8 text files, one document each.

    Args:
        name: of the source.
        settings: of the source.
        paths: the files, in order.
        errors: what to do with bytes that are not UTF-8, as in ``open``. Default ``strict``: a bad record.
    """

    def __init__(self, name: str, settings: SourceSettings, paths: Sequence[str], errors: str = "strict") -> None:
        super().__init__(name, settings)
        self._paths = list(paths)
        self._errors = errors

    def __len__(self) -> int:
        return len(self._paths)

    def describe(self, number: int) -> str:
        """The file's path."""
        return self._paths[number]

    def read(self, number: int) -> Mapping[str, Any]:
        """Read a file as ``{text_field: its text}``."""
        path = self._paths[number]
        try:
            return {self.text_field: Path(path).read_text(encoding="utf-8-sig", errors=self._errors)}
        except UnicodeDecodeError as error:
            got = f"{path}: byte {error.start} cannot be decoded"
            raise DataError(f"data.sources.{self.name}", "must be UTF-8 text", got, _SKIP) from None
        except OSError as error:
            raise DataError(f"data.sources.{self.name}", "must be readable", f"{path}: {error}", _SKIP) from None


class JsonLinesSource(IndexableSource):
    """JSON lines over one or more files; blank lines do not count."""

    def __init__(self, name: str, settings: SourceSettings, paths: Sequence[str]) -> None:
        super().__init__(name, settings)
        self._paths = list(paths)

    # Made when first needed: only ranks that read pay for it.
    @cached_property
    def _offsets(self) -> list[NDArray[np.int64]]:
        """For each file int64 ``[lines, 2]``: start and stop byte."""
        return [_line_offsets(path, self.name) for path in self._paths]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Number of the first record of each file, and the number of records."""
        return np.cumsum([0, *(len(offsets) for offsets in self._offsets)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def describe(self, number: int) -> str:
        """The file's path and the line number."""
        path, start, _ = self._locate(number)
        with open(path, "rb") as file:
            line = file.read(start).count(b"\n") + 1
        return f"{path}:{line}"

    def read(self, number: int) -> Mapping[str, Any]:
        """Read one line."""
        path, start, stop = self._locate(number)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                line = file.read(stop - start)
            record = json.loads(line) if line.strip() else {"input_ids": []}  # a line of spaces is an empty document
        except OSError as error:
            raise DataError(f"data.sources.{self.name}", "must be readable", f"{path}: {error}", _SKIP) from None
        except (ValueError, RecursionError) as error:  # broken JSON, broken UTF-8, brackets without end
            got = f"{self.describe(number)}: {error}"
            raise DataError(f"data.sources.{self.name}", "must have one JSON object a line", got, _SKIP) from None
        if not isinstance(record, dict):
            got = f"{self.describe(number)}: a {type(record).__name__}"
            raise DataError(f"data.sources.{self.name}", "must have one JSON object a line", got, _SKIP)
        return record

    def _locate(self, number: int) -> tuple[str, int, int]:
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        start, stop = self._offsets[file][number - self._firsts[file]]
        return self._paths[file], int(start), int(stop)


_CHECK = "Check the path, or leave the source out."
_SKIP = "Repair it, or set `loading.on_bad_record: skip`."


def open_source(name: str, value: Any) -> Source:
    """Make a source from what the user wrote under its name.

    Raises:
        ConfigurationError: an unknown name, an empty glob or source, a directory, or a format that cannot be read.
    """
    settings = SourceSettings.of(name, value)
    if settings.path is None:
        source = records_source(name, settings)
    elif settings.path in BUILTIN_SOURCES:
        source = _builtin(name, settings)
    else:
        source = _from_files(name, settings)
    if isinstance(source, IndexableSource) and not isinstance(source, JsonLinesSource) and len(source) == 0:
        got = settings.path or "no records"
        raise ConfigurationError(f"data.sources.{name}", "must have at least one document", got, _CHECK)
    return source


def _builtin(name: str, settings: SourceSettings) -> Source:
    found = BUILTIN_SOURCES[str(settings.path)]()
    if found and isinstance(found[0], str):
        # Nobody chose these files, so a file in an old encoding must not stop a first run.
        return TextFilesSource(name, settings, [str(path) for path in found], errors="replace")
    return records_source(name, SourceSettings(records=found, **_without(settings, "path", "records")))


def _without(settings: SourceSettings, *names: str) -> dict[str, Any]:
    return {key: value for key, value in vars(settings).items() if key not in names}


def _from_files(name: str, settings: SourceSettings) -> Source:
    field, pattern = f"data.sources.{name}", str(Path(str(settings.path)).expanduser())
    paths = sorted(path for path in glob(pattern, recursive=True) if Path(path).is_file())
    if not paths:
        if Path(pattern).is_dir():
            fix = f"Name the files, such as {pattern}/*.jsonl."
            raise ConfigurationError(field, "must be a file or a glob", f"the directory {pattern}", fix)
        fix = f"Paths start in {Path.cwd()}. {nearest(pattern, sorted(BUILTIN_SOURCES))}"
        raise ConfigurationError(field, "must be a built-in name, or match a file", repr(settings.path), fix)
    suffixes = {Path(path).suffix.lower() for path in paths}
    if suffixes <= _JSON_LINES:
        if not any(Path(path).stat().st_size for path in paths):
            raise ConfigurationError(field, "must have at least one document", f"empty files: {pattern}", _CHECK)
        return JsonLinesSource(name, settings, paths)
    refused = sorted(suffixes & (_NOT_TEXT | _JSON_LINES))
    if refused:
        fix = "Use .jsonl files alone, or text files alone; other formats can be given as a sequence of dicts."
        raise ConfigurationError(field, "must be text files or JSON lines", f"files with {refused}", fix)
    return TextFilesSource(name, settings, paths)


def _line_offsets(path: str, name: str) -> NDArray[np.int64]:
    """First and last byte of each line that is not blank: int64 ``[lines, 2]``."""
    ends, position, last = [], 0, b"\n"
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_INDEX_CHUNK):
                ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + position + 1)
                position += len(chunk)
                last = chunk[-1:]
    except OSError as error:
        raise ConfigurationError(f"data.sources.{name}", "must be readable", f"{path}: {error}", "Check it.") from None
    if last != b"\n":
        ends.append(np.array([position]))
    stops = np.concatenate([np.empty(0, np.int64), *ends]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
    offsets = np.stack([starts, stops], axis=1)
    filled: NDArray[np.int64] = offsets[offsets[:, 1] - offsets[:, 0] > _BLANK]
    return filled


# A line of one or two bytes is a line break: "{}" has no text and would be refused anyway.
_BLANK = 2


def open_sources(sources: Mapping[str, Any], field: str) -> list[Source]:
    """Open all sources of a mapping by name, in its order.

    Raises:
        ConfigurationError: no source at all, or one that cannot be opened.
    """
    if not isinstance(sources, Mapping) or not sources:
        fix = "Give at least one, such as {code: python-stdlib}."
        raise ConfigurationError(field, "must be a mapping of sources by name", repr(sources), fix)
    return [open_source(str(name), value) for name, value in sources.items()]
