"""What tools write: tables that read well in a terminal and in a file, sizes, JSON, and folders before long work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_longctx.errors import ConfigurationError

__all__ = ["human_bytes", "make_folders", "markdown_table", "write_json"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table. A row with fewer cells ends in a sentence, which may be longer than its column.

    Example:
        >>> for line in markdown_table(("what", "n"), [("documents", "12")]):
        ...     print(line)
        | what      | n  |
        |-----------|----|
        | documents | 12 |
    """
    cells = [tuple(head), *map(tuple, rows)]
    whole = [row for row in cells if len(row) == len(head)]
    widths = [max(len(row[column]) for row in (whole if column else cells)) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def make_folders(folders: Mapping[str, Path | None]) -> None:
    """Make folders before the work, so that it is not in vain.

    Args:
        folders: by the flag that names them; None where it was not given.

    Raises:
        ConfigurationError: one cannot be made.
    """
    for flag, folder in folders.items():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(flag, "must be in a folder that can be made", str(error), "Change it.") from None


def write_json(path: Path | None, content: Any) -> None:
    """Write all numbers to the file of ``--json``, if one was named."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def human_bytes(size: float | None) -> str:
    """A size in decimal units; ``?`` for None.

    Example:
        >>> human_bytes(16_800_000), human_bytes(812)
        ('16.8 MB', '812 B')
    """
    if size is None:
        return "?"
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} B"
