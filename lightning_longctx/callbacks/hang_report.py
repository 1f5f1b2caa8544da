"""What is written down when a run hangs: who waits where, for what, with which documents.

Parts of a run are asked by capability: a strategy, data module, callback or logger may have a method
``hang_report() -> str``, one line about what it is in the middle of. It is called from another thread while the run
hangs, so it may read attributes and nothing else: no device, no lock, no collective.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["document_lines", "part_lines", "write_report"]

# A row may hold thousands; those at the beginning and the number of all tell enough.
_DOCUMENTS_NAMED = 50


def part_lines(parts: Iterable[Any]) -> Iterator[str]:
    """One line for each part that has something to say."""
    for part in parts:
        report = getattr(part, "hang_report", None)
        if callable(report):
            yield f"{type(part).__name__}: {report()}"


def document_lines(keys: Tensor | None, source_names: Sequence[str]) -> Iterator[str]:
    """The documents of the batch at hand, by their numbers: to look up a line would open files that may hang too.

    Args:
        keys: int64 ``[D, 2]`` on the host: source id and number; None if the batch does not tell.
        source_names: by source id, as far as they are known.
    """
    documents = [] if keys is None else [(source, number) for source, number in keys.tolist() if source >= 0]
    yield f"Documents of the last batch that this rank started: {len(documents) if keys is not None else 'not known'}"
    for source, number in documents[:_DOCUMENTS_NAMED]:
        name = source_names[source] if source < len(source_names) else f"source {source}"
        yield f"  {name}, document {number}"
    if len(documents) > _DOCUMENTS_NAMED:
        yield f"  ... and {len(documents) - _DOCUMENTS_NAMED} more"


def write_report(path: Path, first: str, lines: Iterable[str]) -> None:
    """Write a first line, the stack of each thread, then further lines, each as soon as it is known.

    Args:
        path: written anew; its folder is made.
        first: what happened.
        lines: made while they are written, so that one that cannot be made takes nothing else with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        print(first, "", "Stacks, the most recent call first:", sep="\n", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        print(file=file, flush=True)
        for line in lines:
            print(line, file=file, flush=True)
