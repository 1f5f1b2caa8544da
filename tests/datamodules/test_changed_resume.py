"""A resume with another configuration: the new one wins and says so once, and no document is lost or doubled."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest

from lightning_longctx.datamodules import DynamicBatchingDataModule, PackingSettings
from lightning_longctx.errors import ConfigurationError
from tests.datamodules.helpers import Stream, data_module, keys_of, records

Named = tuple[str, int]


def _named(data: DynamicBatchingDataModule, rows: list[Any]) -> list[Named]:
    return [(data.source_names[source], number) for row in rows for source, number in keys_of(row)]


def _stop_after(rows: int, data: DynamicBatchingDataModule) -> tuple[list[Named], dict[str, Any]]:
    given = list(islice(data.train_dataloader(), rows))
    return _named(data, given), data.state_dict()


def _rest(state: dict[str, Any], data: DynamicBatchingDataModule) -> list[Named]:
    data.load_state_dict(state)
    return _named(data, list(data.train_dataloader()))


@pytest.mark.parametrize("mixing", ["token", "sample"])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_source_may_be_added(mixing: str, stop: int, caplog: pytest.LogCaptureFixture) -> None:
    first, state = _stop_after(stop, data_module({"b": records(12, seed=1)}, size=3, mixing=mixing))
    with caplog.at_level("INFO"):
        rest = _rest(state, data_module({"a": records(20), "b": records(12, seed=1)}, mixing=mixing))
    assert sorted(first + rest) == [("a", n) for n in range(20)] + [("b", n) for n in range(12)]
    said = [record.getMessage() for record in caplog.records if "resumed with" in record.getMessage()]
    assert len(said) == 1
    assert "source a is new" in said[0]


def test_a_source_that_comes_late_is_read_though_the_others_have_ended() -> None:
    first, state = _stop_after(1, data_module({"b": records(6)}, size=6))
    assert state["ranks"][0]["exhausted"] or len(first) < 6
    rest = _rest(state, data_module({"b": records(6), "c": records(9)}))
    assert sorted(first + rest) == [("b", n) for n in range(6)] + [("c", n) for n in range(9)]


@pytest.mark.parametrize("kind", [list, Stream])
def test_a_source_may_be_removed_and_what_waits_of_it_is_counted(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    sources = {"a": kind(records(20)), "b": records(12, seed=1), "c": kind(records(9, seed=2))}
    before = data_module(sources, size=8)
    first, state = _stop_after(3, before)
    after = data_module({"c": sources["c"], "a": sources["a"]}, size=8)
    with caplog.at_level("INFO"):
        rest = _rest(state, after)
    assert "source b is gone" in caplog.text
    found = sorted(key for key in first + rest if key[0] != "b")
    assert found == [("a", n) for n in range(20)] + [("c", n) for n in range(9)]
    assert not any(name == "b" for name, _ in rest)
    waited = [entry for entry in state["ranks"][0]["candidates"]["index"].tolist() if entry[0] == 1]
    assert waited
    counters = after.counters
    assert counters["documents_left_over"] == len(waited)
    assert counters["tokens_read"] == counters["tokens_packed"] + counters["tokens_left_over"]


def test_new_weights_apply_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def data(weight: float) -> DynamicBatchingDataModule:
        sources = {"a": {"records": records(200, 8, 8), "weight": weight}, "b": {"records": records(200, 8, 8)}}
        return data_module(sources)

    first, state = _stop_after(20, data(1.0))
    with caplog.at_level("INFO"):
        rest = _rest(state, data(3.0))
    assert "sources.a.weight is 3.0 instead of 1.0" in caplog.text
    assert 38 <= Counter(name for name, _ in first)["a"] <= 42
    assert 58 <= Counter(name for name, _ in rest[:80])["a"] <= 62
    assert len(set(first + rest)) == 400


def test_everything_that_changed_is_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    first, state = _stop_after(3, data_module(size=6))
    packing = PackingSettings(cut_to_fill=True)
    other = data_module(size=9, micro_batch_size=2, packing=packing, mixing="sample", balance=True)
    with caplog.at_level("INFO"):
        rest = _rest(state, other)
    said = [record.getMessage() for record in caplog.records if "resumed with" in record.getMessage()]
    assert len(said) == 1
    for change in ("a row is 64 instead of 32", "cut_to_fill is True", "mixing is sample instead of token", "balance"):
        assert change in said[0]
    assert "at least 9 documents" in said[0]
    assert len(set(first + rest)) == 32


def test_nothing_is_said_where_nothing_changed(caplog: pytest.LogCaptureFixture) -> None:
    _, state = _stop_after(3, data_module())
    with caplog.at_level("INFO"):
        _rest(state, data_module())
    assert "resumed with" not in caplog.text


def test_planned_rows_that_no_longer_fit_are_chosen_again() -> None:
    def data(micro_batch_size: int) -> DynamicBatchingDataModule:
        return data_module({"a": records(90)}, micro_batch_size=micro_batch_size, balance=True)

    first, state = _stop_after(9, data(2))
    assert len(state["ranks"][0]["planned"]) >= 3
    rest = _rest(state, data(1))
    assert sorted(first + rest) == [("a", n) for n in range(90)]


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("long_document", ["split", "truncate", "drop"])
def test_a_smaller_window_cuts_what_waits_as_the_setting_says(kind: Any, long_document: Any) -> None:
    sources = {"a": kind(records(20, 20, 30))}
    before = data_module(sources, size=8)
    first, state = _stop_after(3, before)
    waiting = state["ranks"][0]["candidates"]["index"].tolist()
    assert min(entry[3] for entry in waiting) > 16
    after = data_module(sources, max_seq_len=16, packing=PackingSettings(long_document=long_document))
    rest = _rest(state, after)
    keys = {("a", n) for n in range(20)}
    assert set(first) | set(rest) == (keys if long_document != "drop" else set(first))
    counters = after.counters
    parts = ("packed", "dropped", "truncated", "left_over")
    assert counters["tokens_read"] == sum(counters[f"tokens_{part}"] for part in parts)


def test_a_smaller_window_is_refused_where_long_documents_are_errors() -> None:
    packing = PackingSettings(long_document="error")
    _, state = _stop_after(1, data_module({"a": records(20, 20, 30)}, size=8, packing=packing))
    with pytest.raises(ConfigurationError, match=r"max_seq_len.*waits"):
        _rest(state, data_module({"a": records(20, 20, 30)}, max_seq_len=16, packing=packing))


@pytest.mark.parametrize("window", [8, 64])
def test_pieces_of_a_document_are_found_again_under_another_window(window: int) -> None:
    def tokens(data: DynamicBatchingDataModule, rows: Any) -> list[int]:
        return sorted(chain.from_iterable(row["input_ids"][0].tolist() for row in rows))

    items = [{"input_ids": list(range(100 * i, 100 * i + 50 + i))} for i in range(12)]
    before = data_module({"a": items}, size=6)
    first = tokens(before, islice(before.train_dataloader(), 4))
    after = data_module({"a": items}, size=6, max_seq_len=window)
    after.load_state_dict(before.state_dict())
    assert sorted(first + tokens(after, after.train_dataloader())) == sorted(chain(*(i["input_ids"] for i in items)))


def test_at_the_end_of_an_epoch_sources_may_change() -> None:
    data = data_module({"a": records(9)})
    _, state = _stop_after(99, data)
    assert state["ranks"][0]["finished"]
    assert sorted(_rest(state, data_module({"a": records(13)}, seed=7))) == [("a", n) for n in range(13)]


@pytest.mark.parametrize("mixing", ["token", "sample"])
@pytest.mark.parametrize("kind", [list, Stream])
def test_a_source_that_had_ended_begins_again_under_forever(mixing: str, kind: Any) -> None:
    def data(mode: str) -> DynamicBatchingDataModule:
        return data_module({"a": kind(records(6, 8, 8)), "b": records(60, 8, 8)}, stop_mode=mode, mixing=mixing)

    first, state = _stop_after(8, data("all_exhausted"))
    assert Counter(name for name, _ in first)["a"] == 6
    after = data("forever")
    after.load_state_dict(state)
    rest = _named(after, list(islice(after.train_dataloader(), 60)))
    assert 115 <= Counter(name for name, _ in rest)["a"] <= 125
    times = Counter(number for name, number in first + rest if name == "b")
    assert set(times) == set(range(60))
    assert max(times.values()) - min(times.values()) <= 1  # the other one goes on where it was


@pytest.mark.parametrize("mixing", ["token", "sample"])
def test_what_first_exhausted_left_is_read_under_all_exhausted(mixing: str) -> None:
    def data(mode: str) -> DynamicBatchingDataModule:
        return data_module({"a": records(6, 8, 8), "b": records(60, 8, 8)}, 20, stop_mode=mode, mixing=mixing)

    first, state = _stop_after(1, data("first_exhausted"))
    assert state["ranks"][0]["exhausted"]
    rest = _rest(state, data("all_exhausted"))
    assert sorted(first + rest) == [("a", n) for n in range(6)] + [("b", n) for n in range(60)]


def test_planned_rows_above_a_lower_cap_are_chosen_again() -> None:
    items = [{"input_ids": [n + 1] * 13, "labels": [-100] * 8 + [n + 1] * 5} for n in range(60)]

    def data(ratio: float) -> DynamicBatchingDataModule:
        packing = PackingSettings(count_mode="effective", physical_overflow_ratio=ratio)
        return data_module({"a": items}, max_seq_len=30, balance=True, packing=packing)

    first, state = _stop_after(6, data(2.0))
    rest = _rest(state, data(1.5))
    assert sorted(first + rest) == [("a", n) for n in range(60)]
