"""Rows beyond the plain budget: cut documents, a fixed count, warm-up, balance, and the lines at the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_longctx.batch import validate_packed_batch
from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    Budget,
    DynamicBatchingDataModule,
    FixedBufferPolicy,
    LoadingSettings,
    PackingSettings,
)
from lightning_longctx.datamodules.balance import PLANNED_ROWS, pick_rows, planning_depth
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowState, RowWarmup
from lightning_longctx.datamodules.settings import WarmupSettings
from lightning_longctx.errors import ConfigurationError
from tests.callbacks.toy import ToyLM, make_trainer
from tests.datamodules.helpers import data_module, records


def _builder(data: DynamicBatchingDataModule, state: RowState | None = None, **changes: Any) -> RowBuilder:
    settings: RowSettings = replace(data._training_settings(), **changes)
    return RowBuilder(settings, AdaptiveBufferPolicy(), state or RowState())


def _rows(builder: RowBuilder) -> list[Any]:
    rows = []
    while (row := builder.next_row()) is not None:
        validate_packed_batch(row)
        rows.append(row)
    return rows


def _tokens(rows: list[Any]) -> Counter[int]:
    return Counter(token for row in rows for token in row["input_ids"][row["source_ids"] >= 0].tolist())


# -- cut_to_fill -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_cutting_fills_rows_that_whole_documents_cannot(shuffle: bool) -> None:
    sources = {"a": records(60, 17, 20)}  # a window of 32 holds one of them
    whole = data_module(sources, shuffle=shuffle)
    cut = data_module(sources, shuffle=shuffle, packing=PackingSettings(cut_to_fill=True))
    whole_rows, cut_rows = _rows(_builder(whole)), _rows(_builder(cut))
    assert max(row["input_ids"].shape[1] for row in whole_rows) <= 20
    assert all(row["input_ids"].shape[1] == 32 for row in cut_rows[:-1])
    assert _tokens(cut_rows) == _tokens(whole_rows), "no token is lost or doubled"


def test_cut_documents_survive_a_resume() -> None:
    data = data_module({"a": records(60, 17, 20)}, packing=PackingSettings(cut_to_fill=True))
    unbroken = [row["input_ids"].tolist() for row in _rows(_builder(data))]
    builder = _builder(data)
    before = [builder.next_row()["input_ids"].tolist() for _ in range(5)]
    saved = RowState.from_plain(builder.state().to_plain([False]))
    after = [row["input_ids"].tolist() for row in _rows(_builder(data, saved))]
    assert before + after == unbroken
    assert builder.state().counters["documents_cut"] > 0


def test_nothing_is_cut_where_whole_documents_fill() -> None:
    data = data_module({"a": records(64, 8, 8)}, packing=PackingSettings(cut_to_fill=True))
    builder = _builder(data)
    assert len(_rows(builder)) == 16
    assert not builder.state().counters.get("documents_cut")


# -- dynamic: false ----------------------------------------------------------------------------------------------------


def test_a_fixed_number_of_documents() -> None:
    data = data_module(
        {"a": records(7, 3, 30)}, shuffle=False, packing=PackingSettings(dynamic=False, documents_per_batch=3)
    )
    rows = list(data.train_dataloader())
    assert [len(row["document_keys"]) for row in rows] == [3, 3, 1]
    assert {row["loss_divisor"] for row in rows} == {32}
    for row in rows:
        validate_packed_batch(row)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"documents_per_batch": 2}, "documents_per_batch"),
        ({"dynamic": False, "cut_to_fill": True}, "cut_to_fill"),
        ({"count_mode": "effective", "cut_to_fill": True}, "cut_to_fill"),
        ({"physical_overflow_ratio": 0.9}, "physical_overflow_ratio"),
        ({"max_docs_per_pack": 0}, "max_docs_per_pack"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"packing\.{field}"):
        PackingSettings(**settings)


def test_which_budget_closed_a_row_is_counted() -> None:
    items = [{"input_ids": [1] * 16, "labels": [-100] * 16}, {"input_ids": [1] * 16}] * 12
    few, many = items[::2] * 2, items[1::2] * 2
    effective = PackingSettings(count_mode="effective")
    for sources, by_cap in ((few, 8), (many, 0)):
        builder = _builder(data_module({"a": sources}, shuffle=False, packing=effective))
        rows = _rows(builder)
        assert max(row["input_ids"].shape[1] for row in rows) <= 48
        assert builder.state().counters.get("rows_closed_by_cap", 0) == by_cap


# -- warm-up -----------------------------------------------------------------------------------------------------------


def test_a_last_row_that_is_full_of_targets_is_not_left_out() -> None:
    """Its tokens are fewer than the cap on them: what a row has to hold is targets."""
    items = [{"input_ids": [1] * 13, "labels": [-100] * 3 + [1] * 10} for _ in range(7)]
    packing = PackingSettings(count_mode="effective", physical_overflow_ratio=2.0)
    data = data_module({"a": items}, size=20, max_seq_len=30, packing=packing, drop_last=True)
    rows = list(data.train_dataloader())
    assert [int((row["shift_labels"] != -100).sum()) for row in rows] == [30, 30]
    assert data.counters["documents_left_over"] == 1


def test_the_budget_grows_and_readiness_uses_it() -> None:
    warmup = RowWarmup(rows=4, initial_tokens=8)
    full = Budget(32, 32, 4096)
    assert [warmup.budget(full, row, 2).counted for row in range(6)] == [8, 14, 20, 26, 32, 32]
    data = data_module({"a": records(60, 2, 4)}, shuffle=False)
    builder = RowBuilder(replace(data._training_settings(), warmup=warmup), FixedBufferPolicy(1), RowState())
    first = builder.next_row()
    assert first is not None
    assert first["input_ids"].shape[1] <= 8
    assert first["loss_divisor"] == 32, "the divisor is the full budget, also while the budget grows"
    assert builder.state().counters["documents_read"] <= 4, "the full budget is not waited for"
    lengths = [row["input_ids"].shape[1] for row in _rows(builder)]
    assert max(lengths[:3]) <= 26
    assert 29 <= lengths[3] <= 32


def test_a_document_longer_than_the_growing_budget_goes_alone() -> None:
    data = data_module({"a": records(6, 20, 30)})
    rows = _rows(_builder(data, warmup=RowWarmup(rows=10, initial_tokens=4)))
    assert sorted(len(row["document_keys"]) for row in rows) == [1] * 6


def test_warm_up_goes_on_in_the_next_epoch() -> None:
    state = RowState(rows=3).next_epoch()
    assert state.earlier_rows == 3
    data = data_module({"a": records(60, 2, 4)}, shuffle=False)
    first = _builder(data, state, warmup=RowWarmup(rows=4, initial_tokens=8)).next_row()
    assert first is not None
    assert 20 < first["input_ids"].shape[1] <= 26


def test_warm_up_is_counted_in_steps() -> None:
    loading = LoadingSettings(warmup=WarmupSettings(steps=5, initial_tokens=16))
    data = DynamicBatchingDataModule({"a": records(9)}, max_seq_len=64, loading=loading)
    assert data._training_settings().warmup == RowWarmup(rows=5, initial_tokens=16)


# -- balance -----------------------------------------------------------------------------------------------------------


def test_the_oldest_row_anywhere_sets_the_cost() -> None:
    assert pick_rows([[(0, 9.0), (1, 2.0)], [(1, 3.0), (1, 8.0)]]) == [0, 1]
    assert pick_rows([[(3, 5.0)], [(2, 1.0), (2, 5.0)], []]) == [0, 0, 0]
    assert pick_rows([[], []]) == [0, 0]


def test_planning_grows_and_never_delays_the_first_row() -> None:
    assert [planning_depth(row) for row in (0, 1, 2, 3, 30, 99)] == [1, 1, 2, 2, PLANNED_ROWS, PLANNED_ROWS]


def test_balanced_ranks_take_rows_of_like_cost_and_lose_nothing() -> None:
    ranks, window = 4, 10_000
    lengths = np.minimum(np.exp(6 + 1.5 * np.random.default_rng(0).standard_normal(1500)), window).astype(int) + 1
    items = [{"input_ids": np.full(min(int(n), window), i % 250)} for i, n in enumerate(lengths)]

    def run(balance: bool) -> tuple[float, list[tuple[int, int]]]:
        data = data_module({"a": items}, max_seq_len=window, shuffle=False)
        builders = [_builder(data, RowState(dp_rank=r, dp_size=ranks), balance=balance) for r in range(ranks)]
        ratios, keys = [], []
        while True:
            for builder in builders:
                builder.plan()
            offers = [builder.offers() for builder in builders]
            if not any(offers):
                break
            picked = pick_rows(offers)
            costs = []
            for builder, index, offer in zip(builders, picked, offers, strict=True):
                if offer:
                    costs.append(offer[index][1])
                    keys += [tuple(key) for key in builder.give(index)["document_keys"].tolist()]
            if all(offers):
                ratios.append(max(costs) / (sum(costs) / ranks))
        return float(np.mean(ratios)), sorted(keys)

    untreated, all_keys = run(False)
    balanced, balanced_keys = run(True)
    assert all_keys == balanced_keys == [(0, number) for number in range(len(items))]
    assert untreated > 1.4
    assert balanced < 1.0 + (untreated - 1.0) / 2


def test_planned_rows_survive_a_resume_and_go_back_when_balance_is_switched_off() -> None:
    data = data_module({"a": records(80)})
    builder = _builder(data, balance=True)
    for _ in range(8):
        builder.plan()
        builder.give(len(builder.offers()) - 1)
    saved = RowState.from_plain(builder.state().to_plain([False]))
    assert len(saved.planned) == 3
    resumed = _builder(data, saved, balance=True)
    for _ in range(4):
        builder.plan()
        resumed.plan()
        assert builder.offers() == resumed.offers()
        assert builder.give()["input_ids"].tolist() == resumed.give()["input_ids"].tolist()
    again = _builder(data, saved)
    rest = [tuple(key) for row in _rows(again) for key in row["document_keys"].tolist()]
    given = {tuple(key) for key in _keys_before(data)}
    assert len(rest) == len(set(rest)) == 80 - len(given)


def _keys_before(data: DynamicBatchingDataModule) -> list[list[int]]:
    builder, keys = _builder(data, balance=True), []
    for _ in range(8):
        builder.plan()
        keys += builder.give(len(builder.offers()) - 1)["document_keys"].tolist()
    return keys


# -- what is said ------------------------------------------------------------------------------------------------------


def test_fixed_warns_once_at_long_context() -> None:
    sources = {"a": [{"text": "x"}]}
    with pytest.warns(UserWarning, match="at least 200 documents before the first row"):
        DynamicBatchingDataModule(sources, max_seq_len="128K", buffer_policy="fixed")._announce()


@pytest.mark.parametrize("options", [{"max_seq_len": "64K", "buffer_policy": "fixed"}, {"max_seq_len": "1M"}])
def test_nothing_is_warned_of_otherwise(options: dict[str, Any]) -> None:
    DynamicBatchingDataModule({"a": [{"text": "x"}]}, **options)._announce()


def test_the_start_says_what_a_row_waits_for_and_what_the_first_one_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        make_trainer([], max_steps=2).fit(ToyLM(), datamodule=data_module({"a": [{"input_ids": [1] * 8}] * 40}))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "Step: 32 tokens x 1 micro-batch x 1 data-parallel rank = 32 tokens, on 1 data-parallel x" in said
    assert "Rows: 32 tokens x 1 data-parallel rank; fixed: at least 4 documents and the tokens of a row." in said
    assert said.count("First row: 4 documents read (8 tokens on average), filled to 100.0%.") == 1
