"""Measured streams against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_longctx.datamodules import FixedBufferPolicy
from lightning_longctx.datamodules.settings import WarmupSettings
from lightning_longctx.errors import DataError
from lightning_longctx.tools.probe.measures import policy_figures
from lightning_longctx.tools.probe.streams import MeasuredRows, advance_together, read_streams
from tests.tools.probe.helpers import data_module, lengths_of, measured, settings_of, topologies

# Ordered greedy with a gate of 2 at a window of 10: [6] as 5 does not fit; [5, 4]; [3, 7]; [2] at the end.
LENGTHS = [6, 5, 4, 3, 7, 2]


def test_rows_waits_and_pool_by_hand() -> None:
    (stream,) = measured(data_module(LENGTHS, 10, FixedBufferPolicy(2)), 10)
    assert lengths_of(stream.rows) == [[6], [5, 4], [3, 7], [2]]
    assert [row.fill for row in stream.rows] == [0.6, 0.9, 1.0, 0.2]
    assert [row.wait for row in stream.rows] == [0, 1, 1, 0]
    assert [(row.pool_documents, row.pool_tokens) for row in stream.rows] == [(2, 11), (3, 12), (2, 10), (1, 2)]
    assert [row.tail for row in stream.rows] == [False, False, False, True]
    assert (stream.first_documents, stream.ended) == (2, True)
    assert [entry for draw in stream.draws for entry in draw.entries] == [
        (0, number, 0, length, length - 1) for number, length in enumerate(LENGTHS)
    ]


def test_the_first_row_comes_after_the_fewest_documents() -> None:
    (stream,) = measured(data_module(LENGTHS, 10), 1)
    assert lengths_of(stream.rows) == [[6, 4]]
    assert (stream.first_documents, stream.ended) == (3, False)
    assert len(stream.draws) == 3
    assert 0 < stream.draws[0].seconds <= stream.draws[2].seconds <= stream.first_seconds


def test_each_rank_has_its_own_documents() -> None:
    first, second = measured(data_module(LENGTHS, 10, FixedBufferPolicy(1)), 10, dp_size=2)
    assert lengths_of(first.rows) == [[6, 4], [7]]
    assert lengths_of(second.rows) == [[5, 3, 2]]
    assert (first.rank, second.rank, first.seed) == (0, 1, 42)


def test_pieces_of_a_long_document_are_documents() -> None:
    (stream,) = measured(data_module([25], 10), 10)
    assert [len(draw.entries) for draw in stream.draws] == [3]
    assert [entry.start for entry in stream.draws[0].entries] == [0, 10, 20]
    assert lengths_of(stream.rows) == [[10], [10], [5]]


def test_padding_is_no_document_and_no_fill() -> None:
    (whole,), (sliced,) = (measured(data_module([5, 4], 12, FixedBufferPolicy(1)), 1, sp_size=sp) for sp in (1, 4))
    assert sliced.rows == whole.rows
    assert sliced.rows[0].fill == 9 / 12


def test_the_slice_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_module([5, 4], 12, FixedBufferPolicy(1))
    rows = data.row_builder(topologies(1, 4)[0], kind=MeasuredRows)
    shapes = []
    shard = rows.sharder.shard.__func__

    def note(self: object, batch: object, moved: object) -> object:
        local = shard(self, batch, moved)
        shapes.append(tuple(local["input_ids"].shape))
        return local

    monkeypatch.setattr("lightning_longctx.tools.probe.streams.RowSharder.shard", note)
    read_streams(data, topologies(1, 4), None, 1, keep=0)
    assert shapes == [(1, 3)]  # 9 tokens padded to 12, over 4 ranks


def test_effective_fill_counts_targets() -> None:
    records = [{"input_ids": [1] * 6, "labels": [-100] * 3 + [1] * 3} for _ in range(6)]
    data = data_module([], 6, FixedBufferPolicy(1), sources={"a": records}, count_mode="effective")
    (stream,) = measured(data, 1)
    assert lengths_of(stream.rows) == [[6]]  # two would have 12 tokens, and the cap is 9
    assert stream.rows[0].fill == 3 / 6


def test_rows_are_kept_on_demand() -> None:
    (stream,) = read_streams(data_module(LENGTHS, 10), topologies(1), None, 3, keep=2)
    assert len(stream.kept) == 2
    assert stream.kept[0]["cu_seqlens"].tolist() == [0, 6, 10]


def test_a_bad_record_is_told_as_in_training() -> None:
    data = data_module([], 10, sources={"a": [{"words": "x"}]})
    with pytest.raises(DataError, match="must have a text under 'text'"):
        measured(data, 1)


def test_worker_processes_change_nothing() -> None:
    alone, helped = (measured(data_module(LENGTHS * 4, 10, num_workers=workers), 6) for workers in (0, 2))
    assert helped[0].rows == alone[0].rows
    assert [draw.entries for draw in helped[0].draws] == [draw.entries for draw in alone[0].draws]


def test_fill_is_of_the_budget_that_grows() -> None:
    warmup = WarmupSettings(steps=2, initial_tokens=4)  # budgets 4, 7, 10
    (stream,) = measured(data_module([4, 3, 4, 6, 4], 10, FixedBufferPolicy(1), warmup=warmup), 3)
    assert lengths_of(stream.rows) == [[4], [3, 4], [6, 4]]
    assert [row.fill for row in stream.rows] == [1.0, 1.0, 1.0]


def test_two_seeds_read_in_two_orders() -> None:
    data = data_module([3, 4, 5, 6, 7, 8, 9], 10, shuffle=True)
    (one,), (same,), (other,) = (measured(data, 2, seed=seed) for seed in (1, 1, 2))
    assert one.rows == same.rows
    assert one.rows != other.rows
    assert (one.seed, other.seed) == (1, 2)


def test_balance_takes_rows_of_like_cost_together() -> None:
    lengths = torch.randint(2, 100, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    data = data_module([length if i % 3 else 6 for i, length in enumerate(lengths)], 100)
    ratios, totals = [], []
    for balance in (False, True):
        settings = replace(settings_of(data), balance=balance)
        built = [data.row_builder(topology, kind=MeasuredRows) for topology in topologies(4)]
        ranks = [MeasuredRows(settings, rows.policy, rows._state) for rows in built]
        advance_together(ranks, 60)
        streams = [_as_stream(rank, number) for number, rank in enumerate(ranks)]
        figures = policy_figures("adaptive", "", streams, 100, measured=True)
        assert figures.mean_imbalance is not None
        ratios.append(figures.mean_imbalance)
        totals.append([len(stream.rows) for stream in streams])
        assert all(row.wait >= 0 for stream in streams for row in stream.rows)
    assert totals == [[60] * 4, [60] * 4]
    assert ratios[1] - 1 < 0.6 * (ratios[0] - 1)


def _as_stream(rows: MeasuredRows, rank: int) -> object:
    from lightning_longctx.tools.probe.streams import Stream

    return Stream(42, rank, rows.rows, rows.first_documents, rows.first_seconds, rows.draws, rows.ended)
