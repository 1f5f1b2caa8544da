"""JSON lines: by number where the files are here and plain, as a stream where they are compressed or elsewhere.

Plain files are indexed by byte offset, so that a line can be read at random and again after a resume, without holding
text. Compressed data has no random access: to read a line, everything before it must be decompressed. And an index of a
file elsewhere would cost the whole download before the first row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import SEEK_END
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.paths import READ_ERRORS, compression_of, open_bytes
from lightning_longctx.datamodules.sources import FileSource, IndexableSource, RecordStream, StreamingSource, skip
from lightning_longctx.errors import ConfigurationError, DataError

__all__ = ["JsonLinesSource", "JsonLinesStream"]

# Bytes read at a time while an index is made: large enough for the disk, small beside a row of 1M tokens.
_INDEX_CHUNK = 2**24
# Bytes read at a time from a stream: the codecs' own buffers are smaller, a long line takes several.
_STREAM_CHUNK = 2**20
# A line of one or two bytes is a line break: "{}" has no text and would be refused anyway.
_BLANK = 2

_SKIP = "Repair it, or set `loading.on_bad_record: skip`."


class JsonLinesSource(FileSource, IndexableSource):
    """JSON lines over one or more plain files; blank lines do not count."""

    # Made when first needed: only ranks that read pay for it.
    @cached_property
    def _offsets(self) -> list[NDArray[np.int64]]:
        """For each file int64 ``[lines, 2]``: start and stop byte."""
        return [_line_offsets(path, self.field) for path in self.paths]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Number of the first record of each file, and the number of records."""
        return np.cumsum([0, *(len(offsets) for offsets in self._offsets)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def describe(self, number: int, record: Mapping[str, Any] | None = None) -> str:
        """The file's path and the line number."""
        path, start, _ = self._locate(number)
        with open(path, "rb") as file:
            line = sum(chunk.count(b"\n") for chunk in _chunks(file, _INDEX_CHUNK, start)) + 1
        return f"{path}:{line}"

    def read(self, number: int) -> Mapping[str, Any]:
        """Read one line."""
        path, start, stop = self._locate(number)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                line = file.read(stop - start)
        except OSError as error:
            raise DataError(self.field, "must be readable", f"{path}: {error}", _SKIP) from None
        return _parse(line, self.field, lambda: self.describe(number))

    def _locate(self, number: int) -> tuple[str, int, int]:
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        start, stop = self._offsets[file][number - self._firsts[file]]
        return self.paths[file], int(start), int(stop)


class JsonLinesStream(FileSource, StreamingSource):
    """JSON lines over files of which some are compressed or elsewhere; blank lines do not count.

    Who reads the stream only finds the lines; they are parsed where documents are made, in the workers.
    """

    def describe(self, number: int, record: Mapping[str, Any] | None = None) -> str:
        """The file's path and the line number."""
        return super().describe(number) if record is None else str(record["place"])

    def open(self, taken: int = 0, state: Any = None) -> RecordStream:
        """Start a pass.

        Raises:
            DataError: the state belongs to other files.
        """
        if state is None:
            return skip(_Lines(self.paths, self.field, 0, 0, 0), taken, self.field)
        file = state["file"]
        names = [PurePosixPath(path).name for path in self.paths]
        if file and names[file - 1 : file] != [state["after"]]:
            got = f"{names[file - 1 : file] or 'none'} where {state['after']!r} was read before"
            raise DataError(
                self.field, "must have the same files as before the stop", got, "Start anew, or put it back."
            )
        return _Lines(self.paths, self.field, file, state["line"], state["byte"])

    def decode(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a line."""
        return _parse(record["line"], self.field, lambda: str(record["place"]))


class _Lines(RecordStream):
    """The lines from a place on, as ``{"line": bytes, "place": file and line number}``."""

    def __init__(self, paths: Sequence[str], field: str, file: int, line: int, byte: int) -> None:
        self.paths = paths
        self._field = field
        self._file, self._line, self._byte = file, line, byte
        self._records = self._read()

    def __next__(self) -> Mapping[str, Any]:
        try:
            return next(self._records)
        except READ_ERRORS as error:
            got = f"{self.paths[self._file]}, after line {self._line}: {error}"
            self._file, self._line, self._byte = self._file + 1, 0, 0
            self._records = self._read()  # where bad records are skipped, the files behind it are still read
            raise DataError(self._field, "must be readable", got, "Repair the file, or leave it out.") from None

    def state(self) -> dict[str, Any]:
        """File, and lines and (decompressed) bytes of it that were read; and the name of the file before."""
        after = PurePosixPath(self.paths[self._file - 1]).name if self._file else None
        return {"file": self._file, "line": self._line, "byte": self._byte, "after": after}

    def _read(self) -> Iterator[Mapping[str, Any]]:
        while self._file < len(self.paths):
            yield from self._read_file(self.paths[self._file])
            self._file, self._line, self._byte = self._file + 1, 0, 0

    def _read_file(self, path: str) -> Iterator[Mapping[str, Any]]:
        with open_bytes(path) as file:
            if compression_of(path) is None:
                reached = file.seek(min(self._byte, file.seek(0, SEEK_END)))
            else:
                reached = sum(len(chunk) for chunk in _chunks(file, _STREAM_CHUNK, self._byte))
            if reached < self._byte:
                got = f"{path}: {reached:,} of {self._byte:,}"
                fix = "Resume with the same files, give changed data another name, or start anew."
                raise ConfigurationError(self._field, "must have the bytes that were read before the stop", got, fix)
            for line in _split(file):
                self._line += 1
                self._byte += len(line)
                if len(line) > _BLANK:
                    yield {"line": line, "place": f"{path}:{self._line}"}


def _split(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file with their ends. Not by the file's own method, which is slow or missing in some codecs."""
    begun: list[bytes] = []  # pieces of a line that is longer than a chunk
    while chunk := file.read(_STREAM_CHUNK):
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*begun, line, b"\n"])
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last


def _chunks(file: IO[bytes], size: int, count: int) -> Iterator[bytes]:
    """The next ``count`` bytes in pieces; fewer if the file ends."""
    while count > 0 and (chunk := file.read(min(size, count))):
        count -= len(chunk)
        yield chunk


def _parse(line: bytes, field: str, describe: Callable[[], str]) -> Mapping[str, Any]:
    try:
        record = json.loads(line) if line.strip() else {"input_ids": []}  # a line of spaces is an empty document
    except (ValueError, RecursionError) as error:  # broken JSON, broken UTF-8, brackets without end
        raise DataError(field, "must have one JSON object a line", f"{describe()}: {error}", _SKIP) from None
    if not isinstance(record, dict):
        got = f"{describe()}: a {type(record).__name__}"
        raise DataError(field, "must have one JSON object a line", got, _SKIP)
    return record


def _line_offsets(path: str, field: str) -> NDArray[np.int64]:
    """First and last byte of each line that is not blank: int64 ``[lines, 2]``."""
    ends, position, last = [], 0, b"\n"
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_INDEX_CHUNK):
                ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + position + 1)
                position += len(chunk)
                last = chunk[-1:]
    except OSError as error:
        raise ConfigurationError(field, "must be readable", f"{path}: {error}", "Check it.") from None
    if last != b"\n":
        ends.append(np.array([position]))
    stops = np.concatenate([np.empty(0, np.int64), *ends]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
    offsets = np.stack([starts, stops], axis=1)
    filled: NDArray[np.int64] = offsets[offsets[:, 1] - offsets[:, 0] > _BLANK]
    return filled
