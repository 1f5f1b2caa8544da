"""The global sequence: one order for all, mixed by weight, the same on any number of ranks and workers."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.mixing import GlobalSequence, SequenceSettings
from lightning_longctx.datamodules.stream import Deal, DocumentStream, Share, open_stream
from lightning_longctx.errors import DataError
from tests.datamodules.helpers import Stream, records


def _sequence(weights: dict[str, tuple[int, float]], stream: bool = False, **settings: Any) -> GlobalSequence:
    kind = Stream if stream else list
    sources = [
        open_source(name, {"records": kind(records(count)), "weight": weight})
        for name, (count, weight) in weights.items()
    ]
    return GlobalSequence(sources, SequenceSettings(**settings))


def _pairs(sequence: GlobalSequence, count: int | None = None) -> list[tuple[int, int]]:
    return [(position.source_id, position.number) for position in islice(sequence, count)]


def test_counts_follow_the_weights_from_the_first_document_on() -> None:
    pairs = _pairs(_sequence({"a": (1000, 0.5), "b": (1000, 0.3), "c": (1000, 0.2)}), 1000)
    for taken in range(1, 1000):
        counts = Counter(source for source, _ in pairs[:taken])
        assert all(abs(counts[i] - taken * share) < 1 for i, share in enumerate([0.5, 0.3, 0.2]))


def test_after_a_source_is_exhausted_the_others_keep_their_proportion() -> None:
    pairs = _pairs(_sequence({"a": (10, 0.5), "b": (600, 0.3), "c": (400, 0.2)}))
    rest = Counter(source for source, _ in pairs[20:520])
    assert abs(rest[1] - 300) <= 1
    assert Counter(source for source, _ in pairs) == {0: 10, 1: 600, 2: 400}
    assert len(set(pairs)) == 1010


def test_streams_and_indexable_sources_are_mixed_alike() -> None:
    weights = {"a": (7, 1.0), "b": (12, 2.0)}
    assert _pairs(_sequence(weights, shuffle=False)) == _pairs(_sequence(weights, stream=True))


def test_order_changes_with_seed_and_epoch_but_not_with_other_sources() -> None:
    def order(**settings: Any) -> list[int]:
        return [number for source, number in _pairs(_sequence({"a": (50, 1.0)}, **settings))]

    assert order() == order()
    assert sorted(order()) == list(range(50)) == order(shuffle=False)
    assert len({tuple(order()), tuple(order(seed=1)), tuple(order(epoch=1)), tuple(range(50))}) == 4
    with_other = [number for source, number in _pairs(_sequence({"z": (3, 1.0), "a": (50, 1.0)})) if source == 1]
    assert with_other == order()


def test_first_exhausted_ends_when_a_turn_cannot_be_taken() -> None:
    pairs = _pairs(_sequence({"a": (3, 1.0), "b": (10, 1.0)}, stop_mode="first_exhausted"))
    assert Counter(source for source, _ in pairs) == {0: 3, 1: 3}


def test_forever_starts_again_in_a_new_order() -> None:
    numbers = [number for _, number in _pairs(_sequence({"a": (20, 1.0)}, stop_mode="forever"), 60)]
    passes = [numbers[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_forever_over_nothing_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(DataError, match="at least one document"):
        next(_sequence({"a": (0, 1.0)}, stream=True, stop_mode="forever"))


@pytest.mark.parametrize("stop_mode", ["all_exhausted", "forever"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 8, 19])
def test_a_sequence_continues_from_its_state(stop_mode: str, stream: bool, cut: int) -> None:
    def fresh() -> GlobalSequence:
        return _sequence({"a": (7, 1.0), "b": (12, 2.0)}, stream, stop_mode=stop_mode)

    whole = _pairs(fresh(), 40)
    first, second = fresh(), fresh()
    assert _pairs(first, cut) == whole[:cut]
    second.load_state_dict(first.state_dict())
    assert _pairs(second, 40 - cut) == whole[cut:]


def test_a_limit_ends_the_sequence() -> None:
    assert _pairs(_sequence({"a": (9, 1.0)}, limit=4)) == _pairs(_sequence({"a": (9, 1.0)}))[:4]


def _stream(share: Share, workers: int = 0, stream: bool = False) -> Any:
    kind = Stream if stream else list
    sources = [open_source("a", kind(records(23))), open_source("b", kind(records(10, seed=1)))]
    reader = DocumentReader(sources, None, 32)
    return open_stream(DocumentStream(reader, SequenceSettings(), share), workers, 0, None)


def _drawn(loader: Any, count: int | None = None) -> list[tuple[int, int]]:
    return [(d.source_id, d.number) for draw in islice(iter(loader), count) for d in draw.documents]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_ranks_share_the_sequence_and_workers_do_not_change_it(workers: int, stream: bool) -> None:
    whole = _drawn(_stream(Share(), stream=stream))
    assert len(set(whole)) == 33
    for rank in range(2):
        assert _drawn(_stream(Share(rank, 2), workers, stream)) == whole[rank::2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_snapshot_is_that_of_the_last_draw_taken(workers: int) -> None:
    loader = _stream(Share(), workers)
    draws = iter(loader)
    first = [next(draws).documents[0].number for _ in range(5)]
    again = _stream(Share(), workers)
    again.load_state_dict(loader.state_dict())
    rest = [draw.documents[0].number for draw in again]
    assert first + rest == [number for _, number in _drawn(_stream(Share()))]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_an_earlier_layout_left_is_dealt_anew(workers: int) -> None:
    whole = _drawn(_stream(Share()))
    deal = Deal((5, 2, 8))  # three ranks, which had drawn that many
    served = [key for rank, drawn in enumerate(deal.drawn) for key in whole[rank::3][:drawn]]
    rest = [_drawn(_stream(Share(rank, 2, (deal,)), workers)) for rank in range(2)]
    assert sorted([*served, *rest[0], *rest[1]]) == sorted(whole)
    second = Deal((3, 4))
    last = _drawn(_stream(Share(0, 1, (deal, second)), workers))
    assert sorted([*served, *rest[0][:3], *rest[1][:4], *last]) == sorted(whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_without_snapshot_skips_what_was_drawn(workers: int) -> None:
    whole = _drawn(_stream(Share(1, 2)))
    assert _drawn(_stream(Share(1, 2, start=4), workers)) == whole[4:]
