"""States between processes: equal on the other side, with each document of a stream sent once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_longctx.datamodules.documents import Document
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.row_state import PlannedRow, RowState
from lightning_longctx.datamodules.sent_documents import ReceivedDocuments, SentDocuments, StrippedState
from tests.datamodules.helpers import Stream, data_module, records


def _candidate(source: int, number: int) -> Candidate:
    return Candidate.of(Document(source, number, 0, np.full(number + 2, number, np.int32)))


def _state(pool: Sequence[Candidate], planned: Sequence[Candidate] = ()) -> RowState:
    return RowState(candidates=tuple(pool), planned=(PlannedRow(0, tuple(planned)),) if planned else ())


def test_documents_of_streams_are_sent_once_and_others_never() -> None:
    reader = data_module({"a": Stream(records(3)), "b": records(3)})._training_settings().reader
    sent, received = SentDocuments(reader), ReceivedDocuments()
    stream, indexable = [_candidate(0, i) for i in range(4)], [_candidate(1, i) for i in range(2)]
    counts = []

    def through(state: RowState) -> RowState:
        stripped: StrippedState = sent.strip(state)
        assert all(candidate.document is None for candidate in stripped.state.waiting)
        counts.append(len(stripped.new))
        return received.restore(stripped)

    first = _state([stream[0], indexable[0], stream[1]], planned=[stream[2], indexable[1]])
    for state in (first, first, _state([stream[1], stream[3]]), _state([stream[0]])):
        found = through(state)
        assert len(found.waiting) == len(state.waiting)
        for mine, theirs in zip(found.waiting, state.waiting, strict=True):
            kept = theirs.document if theirs.source_id == 0 else None
            assert replace(mine, document=None) == replace(theirs, document=None)
            assert mine.document is kept
    assert counts == [3, 0, 1, 1], "what left the pool is forgotten on both sides"


def test_equal_documents_are_not_one() -> None:
    reader = data_module({"a": Stream(records(3))})._training_settings().reader
    sent, received = SentDocuments(reader), ReceivedDocuments()
    twins = [_candidate(0, 1), _candidate(0, 1)]
    stripped = sent.strip(_state(twins))
    assert len(stripped.new) == 2
    found = received.restore(stripped).waiting
    assert all(one.document is two.document for one, two in zip(found, twins, strict=True))
