"""Parquet files, here or elsewhere: a row is a document, read by number.

A row cannot be read alone: parquet is decoded a row group at a time. So a few decoded row groups are kept, and
``blocks`` tells who decides on the order that rows of one group should come together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.formats import columns_of
from lightning_longctx.datamodules.paths import is_remote, open_bytes
from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.sources import FileSource, IndexableSource
from lightning_longctx.errors import ConfigurationError, DataError

__all__ = ["ParquetSource"]

#: Bytes of decoded row groups that a process keeps for each source; the one in use is kept whatever its size. Waiting
#: documents that are read again after a resume come from groups beside the present one.
CACHE_BYTES = 2**28

Result = TypeVar("Result")


class ParquetSource(FileSource, IndexableSource):
    """Rows of parquet files. Only the columns that the format needs are read.

    Nothing stays open between two reads, so the source works in forked and in spawned workers.

    Args:
        name: of the source.
        settings: of the source.
        paths: the files, in order.
        field: the setting it stands in, for errors.

    Raises:
        ConfigurationError: pyarrow is missing, or the first file is no parquet or lacks a column. The others are
            checked when the reading rank first asks for the length, before the first row.
    """

    def __init__(self, name: str, settings: SourceSettings, paths: Sequence[str], field: str = "") -> None:
        super().__init__(name, settings, paths, field)
        self._decoded: OrderedDict[int, Any] = OrderedDict()  # row group -> pyarrow table, the last used one last
        _, self._names = self._opened(self.paths[0], self._describe_file)

    @property
    def is_pretokenized(self) -> bool:
        """Whether the files have ``input_ids`` and no text."""
        return super().is_pretokenized or (self.format == "text" and self.text_field not in self._names)

    @cached_property
    def _groups(self) -> list[tuple[int, int, int]]:
        """Of each row group that is not empty: file, number in the file, and rows."""
        found = [self._opened(path, self._describe_file)[0] for path in self.paths]
        if not any(map(sum, found)):
            fix = "Check the path, or leave the source out."
            raise ConfigurationError(self.field, "must have at least one document", "files without rows", fix)
        return [(file, group, rows) for file, sizes in enumerate(found) for group, rows in enumerate(sizes) if rows]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Number of the first record of each row group, and the number of records."""
        return np.cumsum([0, *self.blocks], dtype=np.int64)

    @property
    def blocks(self) -> list[int]:
        """Rows of each row group."""
        return [rows for _, _, rows in self._groups]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def describe(self, number: int, record: Mapping[str, Any] | None = None) -> str:
        """The file's path and the row, counted from 0 as pandas and pyarrow do."""
        group = self._group_of(number)
        file = self._groups[group][0]
        first = next(index for index, found in enumerate(self._groups) if found[0] == file)
        return f"{self.paths[file]}, row {number - self._firsts[first]}"

    def read(self, number: int) -> Mapping[str, Any]:
        """Read one row as a dict of the columns that the format needs.

        Raises:
            DataError: the row group cannot be read.
        """
        group = self._group_of(number)
        table, row = self._decode(group), number - int(self._firsts[group])
        return {name: _value(table.column(name)[row]) for name in table.column_names}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoded": OrderedDict()}

    def _group_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def _decode(self, group: int) -> Any:
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        file, inner, _ = self._groups[group]

        def read(opened: Any) -> Any:
            # One thread: workers are the parallelism, and Arrow's threads would be the parent's after a fork.
            return opened.read_row_group(inner, columns=self._columns(opened), use_threads=False)

        try:
            table = _with_file(self.paths[file], read)
        except (OSError, ValueError) as error:
            got = f"{self.paths[file]}, row group {inner}: {error}"
            raise DataError(self.field, "must be readable", got, "Repair the file, or leave it out.") from None
        self._decoded[group] = table
        while len(self._decoded) > 1 and sum(kept.nbytes for kept in self._decoded.values()) > CACHE_BYTES:
            self._decoded.popitem(last=False)
        return table

    def _columns(self, opened: Any) -> list[str]:
        return columns_of(self.settings, opened.schema_arrow.names)[0]

    def _opened(self, path: str, describe: Callable[[Any], Result]) -> Result:
        try:
            import pyarrow.parquet  # noqa: F401 - a clear error now, and not at the first row
        except ImportError:
            fix = "pip install 'lightning-longctx[hf]'."
            raise ConfigurationError(self.field, "needs pyarrow to read parquet", path, fix) from None
        try:
            return _with_file(path, describe)
        except ConfigurationError as error:
            raise ConfigurationError(error.field, error.rule, f"{error.got} in {path}", error.fix) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(self.field, "must be parquet", f"{path}: {error}", "Check the file.") from None

    def _describe_file(self, opened: Any) -> tuple[list[int], list[str]]:
        """Rows of each row group of a file, and its columns, which are checked."""
        schema, metadata = opened.schema_arrow, opened.metadata
        columns, missing = columns_of(self.settings, schema.names)
        if missing:
            fix = f"Known: {', '.join(schema.names)}. Name the right one with `{missing[1]}`, or set `format`."
            raise ConfigurationError(self.field, f"must have a column {missing[0]!r}", "none", fix)
        for name in columns:
            self._check_type(name, schema.field(name).type)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], schema.names

    def _check_type(self, name: str, kind: Any) -> None:
        if str(kind) == "null":
            return  # a file in which every cell is empty, or which has no row
        if name in ("input_ids", "labels"):
            wanted, fits = "integers in a list", str(kind).startswith(("list", "large_list", "fixed_size_list"))
        elif self.format == "chat":
            wanted, fits = "a list of messages", "list" in str(kind)
        else:
            wanted, fits = "text", "string" in str(kind)
        if not fits:
            fix = "Name another column, or convert this one."
            raise ConfigurationError(self.field, f"must have {wanted} in column {name!r}", str(kind), fix)


def _with_file(path: str, use: Callable[[Any], Result]) -> Result:
    from pyarrow.parquet import ParquetFile

    if not is_remote(path):
        with ParquetFile(path) as opened:
            return use(opened)
    with open_bytes(path, decompress=False) as raw, ParquetFile(raw) as opened:
        return use(opened)


def _value(scalar: Any) -> Any:
    """A cell in Python; long lists of numbers as an array, which is a hundred times faster than a list."""
    inner = getattr(scalar, "values", None)
    if inner is not None and not inner.null_count and str(inner.type).startswith(("int", "uint")):
        return inner.to_numpy(zero_copy_only=False)
    return scalar.as_py()
