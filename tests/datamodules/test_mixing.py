"""Which document comes next: by documents and by tokens, the same whatever is read ahead, and dealt to ranks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules import SourceSettings
from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import Drawn, Mixer, SequenceSettings
from lightning_longctx.datamodules.sources import SequenceSource, Source
from lightning_longctx.datamodules.stream import DocumentStream
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology
from tests.datamodules.helpers import Stream, data_module, records

MIXINGS = ("sample", "token")
WINDOW = 1000


def _sources(weights: dict[str, tuple[int, float]], stream: bool = False, **limits: Any) -> list[Source]:
    """Sources of so many documents and such weights."""
    kind = Stream if stream else list
    return [
        open_source(name, {"records": kind(records(count, seed=count)), "weight": weight, **limits})
        for name, (count, weight) in weights.items()
    ]


def _drive(mixer: Mixer, sources: list[Source], ahead: int = 1) -> Iterator[Drawn]:
    """What a pool of processes does, with ``ahead`` requests always open."""
    reader = DocumentReader(sources, None, WINDOW)
    results: deque[Any] = deque()

    def ask() -> None:
        while len(results) < ahead and (request := mixer.request()) is not None:
            results.append(reader.draw(*request))

    while True:
        while mixer.head() is None:
            ask()
            if not results:
                break
            mixer.arrived(results.popleft())
        head = mixer.head()
        if head is None:
            assert mixer.exhausted
            return
        mixer.take()
        yield head


def _drawn(
    sources: list[Source], share: Share | None = None, ahead: int = 1, state: Any = (None, 0), **settings: Any
) -> Iterator[Drawn]:
    mixer = open_mixer(sources, SequenceSettings(**settings), share or Share(), *state)
    return _drive(mixer, sources, ahead)


def _keys(drawn: Iterator[Drawn], count: int | None = None) -> list[tuple[int, int]]:
    return [(found.source_id, found.draw.documents[0].number) for found in islice(drawn, count)]


def _tokens(drawn: Drawn) -> int:
    return sum(len(document) for document in drawn.draw.documents)


# -- by documents ------------------------------------------------------------------------------------------------------


def test_counts_follow_the_weights_from_the_first_document_on() -> None:
    keys = _keys(_drawn(_sources({"a": (1000, 0.5), "b": (1000, 0.3), "c": (1000, 0.2)}), mixing="sample"), 1000)
    for taken in range(1, 1000):
        counts = Counter(source for source, _ in keys[:taken])
        assert all(abs(counts[i] - taken * share) < 1 for i, share in enumerate([0.5, 0.3, 0.2]))


def test_after_a_source_is_exhausted_the_others_keep_their_proportion() -> None:
    keys = _keys(_drawn(_sources({"a": (10, 0.5), "b": (600, 0.3), "c": (400, 0.2)}), mixing="sample"))
    rest = Counter(source for source, _ in keys[20:520])
    assert abs(rest[1] - 300) <= 1
    assert Counter(source for source, _ in keys) == {0: 10, 1: 600, 2: 400}
    assert len(set(keys)) == 1010


def test_the_sequence_of_documents_does_not_depend_on_the_number_of_ranks() -> None:
    sources = _sources({"a": (23, 1.0), "b": (10, 2.0)})
    whole = _keys(_drawn(sources, mixing="sample"))
    for size in (2, 3, 4):
        for rank in range(size):
            part = _keys(_drawn(sources, Share(rank, size), mixing="sample"))
            assert part == [key for key in whole if key in set(part)]


def test_a_limit_ends_the_sequence_on_any_layout() -> None:
    sources = _sources({"a": (9, 1.0), "b": (9, 1.0)})
    first = _keys(_drawn(sources, mixing="sample"))[:5]
    assert _keys(_drawn(sources, mixing="sample", limit=5)) == first
    parts = [_keys(_drawn(sources, Share(rank, 2), mixing="sample", limit=5)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(first)


# -- by tokens ---------------------------------------------------------------------------------------------------------


def _long_and_short(weights: tuple[float, ...], means: tuple[int, ...], count: int = 4000) -> list[Source]:
    random = np.random.default_rng(0)
    return [
        open_source(
            f"s{index}",
            {"records": [{"input_ids": [1] * int(n)} for n in random.integers(1, 2 * mean, count)], "weight": weight},
        )
        for index, (weight, mean) in enumerate(zip(weights, means, strict=True))
    ]


@pytest.mark.parametrize(
    ("weights", "means"),
    [((0.5, 0.5), (450, 4)), ((0.4, 0.6), (300, 20)), ((0.2, 0.3, 0.5), (5, 50, 400)), ((1.0,) * 8, (400, 3) * 4)],
)
def test_token_shares_hold_quickly_and_no_source_is_owed_more_than_a_document(
    weights: tuple[float, ...], means: tuple[int, ...]
) -> None:
    """Seen in a comparable system: 9 % of a source of 50 % after 20 documents."""
    shares = np.array(weights) / sum(weights)
    given = np.zeros(len(weights))
    for taken, drawn in enumerate(islice(_drawn(_long_and_short(weights, means)), 2000), 1):
        given[drawn.source_id] += _tokens(drawn)
        longest = 2 * max(means)
        assert (shares * given.sum() - given).max() <= longest
        if taken >= 200 and given.sum() > 50 * longest:
            assert np.abs(given / given.sum() - shares).max() < 0.02


def test_dropped_documents_do_not_count() -> None:
    items = [{"input_ids": [1] * (100 if number % 4 == 0 else 5)} for number in range(4000)]
    sources = [
        open_source("books", {"records": items, "min_tokens": 50, "weight": 1.0}),
        open_source("code", {"records": items, "weight": 1.0}),
    ]
    given = [0, 0]
    for drawn in islice(_drawn(sources), 2000):
        given[drawn.source_id] += _tokens(drawn)
    assert abs(given[0] - given[1]) <= 100


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stop_mode", ["all_exhausted", "first_exhausted", "forever"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_order_does_not_depend_on_what_is_read_ahead(mixing: str, stop_mode: str, stream: bool) -> None:
    sources = _sources({"a": (23, 1.0), "b": (10, 2.0), "c": (31, 1.0)}, stream)
    orders = [_keys(_drawn(sources, ahead=ahead, mixing=mixing, stop_mode=stop_mode), 150) for ahead in (1, 2, 7, 40)]
    assert orders[0] == orders[1] == orders[2] == orders[3]
    assert len(orders[0]) == 150 if stop_mode == "forever" else len(set(orders[0])) == len(orders[0])


def test_a_lane_does_not_grow_while_another_is_asked_for() -> None:
    sources = _long_and_short((0.5, 0.5), (450, 2), 20_000)
    mixer = open_mixer(sources, SequenceSettings(), Share())
    most = 0
    for _ in islice(_drive(mixer, sources, ahead=16), 10_000):
        most = max(most, *(lane.waits for lane in mixer._lanes))  # type: ignore[attr-defined]
    assert most <= 3 * 16


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", MIXINGS)
def test_streams_and_indexable_sources_are_mixed_alike(mixing: str) -> None:
    weights = {"a": (7, 1.0), "b": (12, 2.0)}
    plain = _keys(_drawn(_sources(weights), shuffle=False, mixing=mixing))
    assert plain == _keys(_drawn(_sources(weights, stream=True), mixing=mixing))


def test_order_changes_with_seed_and_epoch_but_not_with_other_sources() -> None:
    def order(**settings: Any) -> list[int]:
        return [number for _, number in _keys(_drawn(_sources({"a": (50, 1.0)}), **settings))]

    assert order() == order()
    assert sorted(order()) == list(range(50)) == order(shuffle=False)
    assert len({tuple(order()), tuple(order(seed=1)), tuple(order(epoch=1)), tuple(range(50))}) == 4
    with_other = [n for source, n in _keys(_drawn(_sources({"z": (3, 1.0), "a": (50, 1.0)}))) if source == 1]
    assert with_other == order()


def test_blocks_are_shuffled_and_read_one_after_another() -> None:
    class Blocks(SequenceSource):
        blocks = (7, 1, 12, 10)

    source = Blocks("a", SourceSettings(records=records(30)), records(30))
    numbers = [number for _, number in _keys(_drawn([source]))]
    assert sorted(numbers) == list(range(30))
    block = np.repeat(np.arange(4), Blocks.blocks)[numbers]
    changes = int((np.diff(block) != 0).sum())
    assert changes == 3, "each block is read once"
    assert numbers != sorted(numbers)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_first_exhausted_ends_when_a_turn_cannot_be_taken(mixing: str) -> None:
    sources = [open_source("a", records(3, 5, 5)), open_source("b", records(10, 5, 5))]
    keys = _keys(_drawn(sources, mixing=mixing, stop_mode="first_exhausted", ahead=4))
    assert Counter(source for source, _ in keys) == {0: 3, 1: 3}


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_forever_starts_again(mixing: str, stream: bool) -> None:
    found = list(islice(_drawn(_sources({"a": (20, 1.0)}, stream), mixing=mixing, stop_mode="forever", ahead=3), 60))
    passes = [[d.draw.documents[0].number for d in found if d.passes == number] for number in range(3)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert stream or passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("mixing", MIXINGS)
def test_forever_over_nothing_is_an_error_and_not_a_loop(mixing: str) -> None:
    with pytest.raises(DataError, match="at least one document"):
        next(_drawn(_sources({"a": (0, 1.0)}, stream=True), mixing=mixing, stop_mode="forever"))


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stop_mode", ["all_exhausted", "first_exhausted", "forever"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("share", [Share(), Share(1, 2)])
def test_a_mix_continues_from_its_state(mixing: str, stop_mode: str, stream: bool, share: Share) -> None:
    sources = _sources({"a": (70, 1.0), "b": (120, 2.0)}, stream)
    options: dict[str, Any] = {"mixing": mixing, "stop_mode": stop_mode}
    whole = _keys(_drawn(sources, share, **options), 200)
    for cut in (0, 1, 8, 19, 60, len(whole)):
        mixer = open_mixer(sources, SequenceSettings(**options), share)
        assert _keys(_drive(mixer, sources, ahead=9), cut) == whole[:cut]
        state = mixer.state()
        assert _keys(_drawn(sources, share, 4, state, **options), 200 - cut) == whole[cut:]


class _Positioned:
    """A stream that tells and finds its position, and counts what is read."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items, self.read = items, 0

    def open(self, taken: int = 0, state: Any = None) -> Iterator[dict[str, Any]]:
        return _PositionedRecords(self, taken if state is None else state["at"])


class _PositionedRecords(Iterator[dict[str, Any]]):
    def __init__(self, source: _Positioned, at: int) -> None:
        self.source, self.at = source, at

    def __next__(self) -> dict[str, Any]:
        if self.at == len(self.source.items):
            raise StopIteration
        self.at += 1
        self.source.read += 1
        return self.source.items[self.at - 1]

    def state(self) -> dict[str, int]:
        return {"at": self.at}


def test_a_stream_is_resumed_at_its_own_position() -> None:
    source = open_source("a", Stream(records(1000)))
    positioned = _Positioned(records(1000))
    source.open = positioned.open  # type: ignore[attr-defined]
    mixer = open_mixer([source], SequenceSettings(), Share())
    first = _keys(_drive(mixer, [source], ahead=9), 900)
    positioned.read = 0
    rest = _keys(_drawn([source], state=mixer.state()))
    assert first + rest == [(0, number) for number in range(1000)]
    assert positioned.read <= 100 + 64, "nothing before the last mark is read again"


class _Broken(_PositionedRecords):
    """Cannot give every seventh record, and goes on after it."""

    def __next__(self) -> dict[str, Any]:
        record = super().__next__()
        if self.at % 7 == 0:
            raise DataError("data.sources.a", "must be readable", f"record {self.at}", "Repair it.")
        return record


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_of_a_stream_takes_its_place_and_can_be_skipped(workers: int) -> None:
    source = open_source("a", Stream(records(20)))
    source.open = lambda *_: _Broken(_Positioned(records(20)), 0)  # type: ignore[attr-defined]
    for on_bad_record in ("skip", "error"):
        mixer = open_mixer([source], SequenceSettings(), Share())
        reader = DocumentReader([source], None, WINDOW, on_bad_record=on_bad_record)  # type: ignore[arg-type]
        stream = DocumentStream(reader, mixer, workers, 0)
        found = []
        while (head := stream.peek()) is not None and head.draw.error is None:
            found += [document.number for document in head.draw.documents]
            stream.take()
        good = [number for number in range(20) if (number + 1) % 7]
        assert found == (good if on_bad_record == "skip" else good[:6])


# -- ranks and processes -----------------------------------------------------------------------------------------------


def _through(sources: list[Source], share: Share, workers: int, count: int | None = None, **settings: Any) -> Any:
    mixer = open_mixer(sources, SequenceSettings(**settings), share)
    stream = DocumentStream(DocumentReader(sources, None, WINDOW), mixer, workers, 0)

    def draws() -> Iterator[Drawn]:
        while (head := stream.peek()) is not None:
            stream.take()
            yield head

    keys = _keys(draws(), count)
    stream.close()
    return keys


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_every_source_without_gap_or_repeat(mixing: str, stream: bool, shuffle: bool, ranks: int) -> None:
    """VeOmni#853 and its mixing without sharding: two ranks shared 487 of 1,000 documents and skipped a quarter."""
    sources = _sources({"a": (123, 0.3), "b": (40, 0.7)}, stream)
    parts = [_through(sources, Share(rank, ranks), 0, mixing=mixing, shuffle=shuffle) for rank in range(ranks)]
    keys = [key for part in parts for key in part]
    assert sorted(keys) == [(0, n) for n in range(123)] + [(1, n) for n in range(40)]
    for source, count in ((0, 123), (1, 40)):
        sizes = [sum(key[0] == source for key in part) for part in parts]
        assert max(sizes) - min(sizes) <= 1, "each rank has its part of each source"
        assert sum(sizes) == count


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_processes_change_nothing(mixing: str, stream: bool) -> None:
    """VeOmni#853 and #383: a part that is lost, or read twice, because a worker does not know what the others read."""
    sources = _sources({"a": (40, 1.0), "b": (23, 1.0)}, stream)
    for share in (Share(), Share(1, 2)):
        assert _through(sources, share, 2, mixing=mixing) == _through(sources, share, 0, mixing=mixing)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_two_ranks_and_two_sources_in_turn_do_not_give_each_rank_one_source(mixing: str) -> None:
    sources = [open_source("a", records(40, 5, 5)), open_source("b", records(40, 5, 5))]
    for rank in range(2):
        counts = Counter(source for source, _ in _through(sources, Share(rank, 2), 0, 20, mixing=mixing))
        assert counts == {0: 10, 1: 10}


# -- further passes ----------------------------------------------------------------------------------------------------


def _most_of_one_document(data: Any, rows: int) -> tuple[int, list[int]]:
    """The most copies of one document that wait or are given at once, and the documents of each row."""
    builder = data.row_builder(Topology())
    most, sizes = 0, []
    for _ in range(rows):
        builder.plan()
        waiting = Counter((c.source_id, c.number) for c in builder.state().waiting)
        most = max(most, *waiting.values())
        sizes.append(len(builder.give()["document_keys"]))
    builder.close()
    return most, sizes


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_a_second_pass_waits_until_the_first_is_served(mixing: str, workers: int, balance: bool) -> None:
    """VeOmni: 50 documents behind a gate of 200 were four copies of each in the buffer."""
    options = {"stop_mode": "forever", "mixing": mixing, "num_workers": workers, "balance": balance}
    most, sizes = _most_of_one_document(data_module({"a": records(50, 4, 8)}, size=200, **options), 60)
    assert most == 1
    assert sum(sizes) > 200, "and it goes on for ever"


def test_a_small_source_repeats_in_a_row_where_its_weight_asks_for_it() -> None:
    sources = {"small": records(3, 8, 8), "large": records(500, 8, 8)}
    data = data_module(sources, size=1, max_seq_len=256, stop_mode="forever")
    builder = data.row_builder(Topology())
    for _ in range(10):
        row = builder.next_row()
        assert row is not None
        assert row["input_ids"].shape[1] == 256
        assert abs((row["source_ids"] == 0).float().mean().item() - 0.5) < 0.05
