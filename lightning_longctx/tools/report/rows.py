"""Rows of a CSV file that may be being written."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

__all__ = ["read_rows"]

_CHUNK = 2000  # rows that are given out at once


def read_rows(path: Path) -> Iterator[list[list[str]]]:
    """Read a file in chunks of rows: first the names of the columns alone (empty in an empty file), then whole rows.

    A last line without an end is left out, whatever it holds: half a number is a number too. A mark of the byte order,
    which editors leave at the beginning, is no part of the first name.

    Args:
        path: the file.
    """
    torn = _is_torn(path)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        yield [names]
        held: list[list[str]] = []
        while rows := list(islice(reader, _CHUNK)):
            rows = held + rows
            held = [rows.pop()] if torn else []
            yield [row for row in rows if len(row) == len(names)]


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, 2) - 1, 0))
        return file.read(1) not in (b"\n", b"")
