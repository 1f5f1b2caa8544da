"""The pages of the documentation, their fenced blocks and their tables, as data for the tests."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.source import ROOT

DOCS = ROOT / "docs"
#: README.md and CONTRIBUTING.md are documentation too.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

_FENCE = re.compile(r"^ *(```+|~~~+)(.*)$")
#: A word in backticks inside a table's cell.
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its opening fence, its language ('' for none) and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Page and first line: what a block is called in lists, since line numbers change."""
        return f"{self.page}: {self.text.strip().splitlines()[0].strip()[:60]}"


def page_name(page: Path) -> str:
    """The name of a page as tests show it: from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str, page: str) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: a block that is not closed.
    """
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, inside = (number, fence[1], fence[2].strip()), []
        elif fence and fence[1].startswith(opened[1]) and not fence[2].strip():
            found.append(Block(page, opened[0], opened[2], textwrap.dedent("\n".join(inside)) + "\n"))
            opened = None
        else:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is not closed")
    return found


def all_blocks() -> list[Block]:
    """All fenced blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page.read_text(), page_name(page))]


def tables_of(text: str) -> list[list[list[str]]]:
    """All tables of a page outside of fenced blocks: rows of cells, the head first, without the ruler."""
    fenced, tables, rows = False, [], []
    for line in [*text.splitlines(), ""]:
        fenced ^= bool(_FENCE.match(line))
        if line.startswith("|") and not fenced:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rows.append(cells)
        elif rows:
            tables.append(rows)
            rows = []
    return tables
