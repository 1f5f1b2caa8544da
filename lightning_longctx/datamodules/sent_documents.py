"""States on their way between processes, without the tokens that the other side has.

A pool may hold gigabytes, and a state follows each row. So a waiting document of a stream is sent once, and one that
can be read again never.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lightning_longctx.datamodules.documents import Document, DocumentReader
from lightning_longctx.datamodules.row_state import PlannedRow, RowState
from lightning_longctx.datamodules.sources import IndexableSource

__all__ = ["ReceivedDocuments", "SentDocuments", "StrippedState"]


class StrippedState(NamedTuple):
    """A state without tokens, the handle of each waiting document, and the documents that were not sent before."""

    state: RowState
    handles: list[int | None]
    new: dict[int, Document]


class SentDocuments:
    """The side that sends.

    Args:
        reader: knows which sources can be read again.
    """

    def __init__(self, reader: DocumentReader) -> None:
        carried = range(len(reader.sources)) if reader.source_ids is None else reader.source_ids
        pairs = zip(carried, reader.sources, strict=True)
        self._by_value = {number for number, source in pairs if not isinstance(source, IndexableSource)}
        self._sent: dict[int, tuple[int, Document]] = {}  # by identity, which holds while it is kept here
        self._count = 0

    def strip(self, state: RowState) -> StrippedState:
        """Take the documents out, and keep those that the other side does not have yet."""
        known, self._sent = self._sent, {}
        handles: list[int | None] = []
        new: dict[int, Document] = {}
        for candidate in state.waiting:
            document = candidate.document
            if document is None or document.source_id not in self._by_value:
                handles.append(None)
                continue
            entry = known.get(id(document))
            if entry is None:
                entry = self._count, document
                new[self._count] = document
                self._count += 1
            self._sent[id(document)] = entry
            handles.append(entry[0])
        return StrippedState(_with_documents(state, [None] * len(handles)), handles, new)


class ReceivedDocuments:
    """The side that receives; keeps the documents of the last state."""

    def __init__(self) -> None:
        self._documents: dict[int, Document] = {}

    def restore(self, stripped: StrippedState) -> RowState:
        """Put the documents back in."""
        known = self._documents | stripped.new
        self._documents = {handle: known[handle] for handle in stripped.handles if handle is not None}
        return _with_documents(
            stripped.state, [None if handle is None else known[handle] for handle in stripped.handles]
        )


def _with_documents(state: RowState, documents: list[Document | None]) -> RowState:
    """The state with other documents in its waiting candidates, in that order."""
    rest = iter(documents)
    planned = [
        PlannedRow(row, tuple(replace(candidate, document=next(rest)) for candidate in candidates))
        for row, candidates in state.planned
    ]
    waiting = tuple(replace(candidate, document=next(rest)) for candidate in state.candidates)
    return replace(state, planned=tuple(planned), candidates=waiting)
