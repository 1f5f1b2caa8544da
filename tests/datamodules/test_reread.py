"""What waits is read again after a resume: by the workers, in order, once, and not before a row has time for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from lightning_longctx.datamodules import AdaptiveBufferPolicy, Budget, FixedBufferPolicy, PackingSettings
from lightning_longctx.datamodules.choosing import likely_next
from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import Document, DocumentReader, Draw, Pieces
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import Request, SequenceSettings
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.reread import Reread, Rereads
from lightning_longctx.datamodules.row_state import PlannedRow, RowState
from lightning_longctx.datamodules.rows import RowBuilder
from lightning_longctx.datamodules.stream import _REQUESTS_EACH, _Requests
from lightning_longctx.errors import DataError
from tests.datamodules.helpers import data_module

LENGTH = 8  # tokens of a document; a row holds four


def _candidate(number: int, start: int = 0, length: int = 4, record: int | None = None) -> Candidate:
    return Candidate(0, number, start, length, length - 1, None, record_tokens=record or length)


def _asked(rereads: Rereads) -> list[int]:
    found = []
    while (request := rereads.request()) is not None:
        found.append(request.number)
    return found


# -- the order ---------------------------------------------------------------------------------------------------------


def test_planned_rows_come_first_and_then_the_pool_in_its_order() -> None:
    planned = (PlannedRow(3, (_candidate(9), _candidate(2))),)
    rereads = Rereads(RowState(planned=planned, candidates=tuple(map(_candidate, [5, 1, 7]))))
    assert rereads.urgent
    assert rereads.awaited
    assert _asked(rereads) == [9, 2, 5, 1, 7]
    assert not rereads.open


def test_what_a_row_needs_overtakes_and_is_asked_for_once() -> None:
    rereads = Rereads(RowState(candidates=tuple(map(_candidate, range(6)))))
    assert not rereads.awaited
    assert rereads.request() == Reread(0, 0, ((0, 4),))
    rereads.want([_candidate(0), _candidate(4), _candidate(2)])
    assert rereads.urgent
    assert _asked(rereads) == [4, 2, 1, 3, 5]
    for number in (0, 2, 4):
        assert rereads.awaited
        rereads.arrived(Pieces(0, number))
    assert not rereads.awaited


def test_what_is_expected_comes_before_the_rest_of_the_pool() -> None:
    pool = tuple(map(_candidate, [5, 1, 7, 3]))
    planned = (PlannedRow(0, (_candidate(9),)),)
    rereads = Rereads(RowState(planned=planned, candidates=pool))
    rereads.expect([_candidate(9), pool[2], pool[1]])
    assert rereads.urgent
    assert _asked(rereads) == [9, 7, 1, 5, 3]


def test_the_next_rows_are_guessed_and_nothing_changes() -> None:
    pool = DocumentPool([_candidate(number, length=length) for number, length in enumerate([20, 20, 12, 5, 7])])
    policy = AdaptiveBufferPolicy()
    before = policy.state_dict()
    rows = likely_next(pool, policy, Budget(32, 32, 4096), 0, 2)
    assert {candidate.number for candidate in rows[:2]} == {0, 2}
    assert {candidate.number for candidate in rows[2:]} == {1, 3, 4}
    assert len(pool) == 5
    assert pool.tokens == 64
    assert policy.state_dict() == before


def test_documents_that_have_their_tokens_are_not_read_again() -> None:
    tokens = torch.ones(4, dtype=torch.int32).numpy()
    held = replace(_candidate(1), document=Document(0, 1, 0, tokens))
    assert _asked(Rereads(RowState(candidates=(_candidate(0), held)))) == [0]


def test_the_pieces_of_a_record_are_read_together_and_let_go_one_by_one() -> None:
    items = [{"input_ids": list(range(10))}]
    reader = DocumentReader(data_module({"a": items})._training_settings().reader.sources, None, window=4)
    pieces = [_candidate(0, 0, 4, 10), _candidate(0, 4, 4, 10), _candidate(0, 8, 2, 10)]
    rereads = Rereads(RowState(candidates=tuple(pieces)))
    request = rereads.request()
    assert request == Reread(0, 0, ((0, 4), (4, 8), (8, 10)))
    assert rereads.request() is None
    rereads.arrived(reader.reread(*request))
    head, tail = pieces[1].split(1)  # cut while its tokens were on their way
    for candidate in (pieces[2], tail, pieces[0], head):
        found = rereads.take(candidate)
        assert isinstance(found, Document)
        assert found.start == candidate.start
        assert found.input_ids.tolist() == list(range(candidate.start, candidate.start + candidate.length))
    assert not rereads._read
    assert not rereads._left


def test_a_record_of_another_length_gives_nothing() -> None:
    reader = DocumentReader(data_module({"a": [{"input_ids": [1] * 6}]})._training_settings().reader.sources, None, 4)
    pieces = reader.reread(0, 0, [(0, 4), (4, 8), (8, 10)])
    assert isinstance(pieces.part(0, 4, 6), Document)
    assert isinstance(pieces.part(4, 6, 6), Document)
    assert pieces.part(4, 6, 10) == "6 tokens instead of 10"
    assert pieces.part(0, 4, 5) == "6 tokens instead of 5"


def _requests(rereads: Rereads, workers: int = 2) -> tuple[_Requests, Any]:
    sources = data_module({"a": [{"input_ids": [1] * 4}] * 50}, shuffle=False)._training_settings().reader.sources
    mixer = open_mixer(sources, SequenceSettings(shuffle=False), Share())
    return _Requests(mixer, rereads, workers), mixer


def _kinds(requests: _Requests, count: int) -> str:
    return "".join("r" if isinstance(next(requests), Reread) else "n" for _ in range(count))


def test_new_and_waiting_documents_take_turns_until_one_kind_is_gone() -> None:
    requests, _ = _requests(Rereads(RowState(candidates=tuple(map(_candidate, range(3))))))
    assert _kinds(requests, 8) == "rnrnrnnn"
    requests, mixer = _requests(Rereads(RowState(candidates=tuple(map(_candidate, range(60))))))
    assert _kinds(requests, 110) == "rn" * 50 + "r" * 10
    assert mixer.ahead == 50
    with pytest.raises(StopIteration):
        next(requests)


def test_a_row_that_waits_goes_first_and_new_documents_do_not_pile_up() -> None:
    rereads = Rereads(RowState(candidates=tuple(map(_candidate, range(60)))))
    requests, mixer = _requests(rereads)
    assert _kinds(requests, 2) == "rn"
    rereads.want([_candidate(number) for number in (30, 31, 32)])
    assert [next(requests).number for _ in range(3)] == [30, 31, 32]
    assert _kinds(requests, 20) == "nrnrn" + "r" * 15
    assert mixer.ahead == 2 * _REQUESTS_EACH
    for number in (30, 31, 32):
        rereads.arrived(Pieces(0, number))
    assert _kinds(requests, 4) == "nrnr", "while new documents are waited for they have their turns"


@pytest.mark.parametrize("mixing", ["token", "sample"])
def test_a_mixer_knows_how_far_it_is_ahead(mixing: Any) -> None:
    sources = data_module({"a": [{"input_ids": [1] * 4}] * 9})._training_settings().reader.sources
    mixer = open_mixer(sources, SequenceSettings(mixing=mixing), Share())
    requests = [mixer.request() for _ in range(5)]
    assert all(isinstance(request, Request) for request in requests)
    assert mixer.ahead == 5
    mixer.arrived(Draw())
    assert mixer.ahead == 5
    mixer.head()
    mixer.take()
    assert mixer.ahead == 4


# -- with processes ----------------------------------------------------------------------------------------------------


def _tokenizer(log: Path, seconds: float = 0.0) -> Callable[[str], list[int]]:
    """Gives a text's number :data:`LENGTH` times, and notes which process was asked."""
    log.touch()

    def tokenize(text: str) -> list[int]:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {text}\n")
        time.sleep(seconds)
        return [int(text)] * LENGTH

    return tokenize


def _lines(log: Path) -> list[tuple[int, int]]:
    return [(int(process), int(number)) for process, number in map(str.split, log.read_text().splitlines())]


def _texts(count: int) -> dict[str, Any]:
    return {"a": [{"text": str(number)} for number in range(count)]}


def _stopped(count: int, rows: int, pool: int, **settings: Any) -> tuple[RowState, list[list[int]]]:
    """The state after some rows, and the rows after it."""
    settings = {"tokenizer": lambda text: [int(text)] * LENGTH, "size": pool, **settings}
    data = data_module(_texts(count), **settings)
    builder = RowBuilder(data._training_settings(), FixedBufferPolicy(pool), RowState())
    for _ in range(rows):
        builder.next_row()
    saved = RowState.from_plain(builder.state().to_plain([False]))
    assert all(candidate.document is None for candidate in saved.waiting)
    return saved, _rest(builder)


def _rest(builder: RowBuilder) -> list[list[int]]:
    found = []
    while (row := builder.next_row()) is not None:
        found.append(row["input_ids"][0].tolist())
    return found


def _resumed(state: RowState, count: int, pool: int, tokenizer: Any, **settings: Any) -> RowBuilder:
    data = data_module(_texts(count), size=pool, tokenizer=tokenizer, **settings)
    return RowBuilder(data._training_settings(), FixedBufferPolicy(pool), state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_the_workers_read_again_each_document_once(tmp_path: Path, workers: int, balance: bool) -> None:
    saved, wanted = _stopped(60, 3, 20, balance=balance)
    resumed = _resumed(saved, 60, 20, _tokenizer(tmp_path / "log"), num_workers=workers, balance=balance)
    resumed.open()
    assert _rest(resumed) == wanted
    resumed.close()
    read = _lines(tmp_path / "log")
    given = {number for row in wanted for number in row}
    assert sorted(number for _, number in read) == sorted(given), "each once"
    processes = {process for process, _ in read}
    assert (os.getpid() in processes) == (workers == 0)
    assert len(processes) == max(workers, 1)


def test_the_first_row_waits_for_its_own_documents_and_what_the_policy_lacks(tmp_path: Path) -> None:
    saved, wanted = _stopped(300, 2, 100)
    resumed = _resumed(saved, 300, 100, _tokenizer(tmp_path / "log"), num_workers=2)
    resumed.open()
    row = resumed.next_row()
    resumed.close()
    assert row is not None
    assert row["input_ids"][0].tolist() == wanted[0]
    # four new ones until the pool is full, the four of the row, and what the workers do meanwhile
    assert len(_lines(tmp_path / "log")) <= 4 + 4 + 2 * 2 * _REQUESTS_EACH
    assert resumed._pool.candidates[0].document is None, "what was read ahead is not part of the pool"


def test_workers_read_again_what_waits_at_the_end_of_data(tmp_path: Path) -> None:
    saved, wanted = _stopped(24, 2, 24)
    assert saved.exhausted
    resumed = _resumed(saved, 24, 24, _tokenizer(tmp_path / "log"), num_workers=2)
    resumed.open()
    assert _rest(resumed) == wanted
    processes = {process for process, _ in _lines(tmp_path / "log")}
    assert os.getpid() not in processes
    assert len(processes) == 2, "in parallel"
    assert resumed.state().sources == saved.sources
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pieces_of_a_long_document_come_from_one_reading(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"

    def tokenize(text: str) -> list[int]:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {text}\n")
        return [*range(100)]

    saved, wanted = _stopped(6, 1, 12, tokenizer=lambda text: [*range(100)], packing=PackingSettings(cut_to_fill=True))
    resumed = _resumed(saved, 6, 12, tokenize, num_workers=workers, packing=PackingSettings(cut_to_fill=True))
    assert _rest(resumed) == wanted
    resumed.close()
    numbers = [number for _, number in _lines(log)]
    assert len(numbers) == len(set(numbers))
    assert len(saved.waiting) > len({candidate.number for candidate in saved.waiting})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", ["shorter", "longer", "bad"])
def test_a_document_that_changed_is_an_error_when_its_row_is_planned(workers: int, change: str) -> None:
    saved, wanted = _stopped(60, 3, 20)
    changed = wanted[2][0]

    def tokenize(text: str) -> Any:
        if int(text) != changed:
            return [int(text)] * LENGTH
        lengths = {"shorter": LENGTH - 1, "longer": LENGTH + 1}
        return [1] * lengths[change] if change in lengths else "no tokens"

    resumed = _resumed(saved, 60, 20, tokenize, num_workers=workers)
    for row in wanted[:2]:
        found = resumed.next_row()
        assert found is not None
        assert found["input_ids"][0].tolist() == row
    with pytest.raises(DataError, match=f"tokens it gave before the stop, but got record {changed} of source 'a': "):
        resumed.next_row()
    resumed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_does_not_wait_for_the_whole_row(tmp_path: Path, workers: int) -> None:
    saved, _ = _stopped(60, 3, 20)
    resumed = _resumed(saved, 60, 20, _tokenizer(tmp_path / "log", seconds=0.2), num_workers=workers)
    resumed.open()
    Timer(0.1, resumed.stop).start()
    start = time.monotonic()
    with pytest.raises(InterruptedError):
        resumed.next_row()
    assert time.monotonic() - start < 0.9
    resumed.close()
