"""Replayed policies against the rows that are really made under them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules import AdaptiveBufferPolicy, FixedBufferPolicy, simulate_packing
from lightning_longctx.datamodules.choosing import resolve_policy
from lightning_longctx.tools.probe.replay import replay
from tests.tools.probe.helpers import data_module, lengths_of, measured, settings_of

LENGTHS = np.random.default_rng(0).integers(1, 60, 400).tolist()


def _replayed(data: Any, streams: Any, policy: Any, rows: int) -> Any:
    return replay(partial(resolve_policy, policy, data.packing_facts), streams, settings_of(data), rows)


@pytest.mark.parametrize("policy", ["adaptive", FixedBufferPolicy(5)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"cut_to_fill": True}, {"count_mode": "effective"}, {"drop_last": True}, {"long_document": "drop"}],
    ids=str,
)
@pytest.mark.parametrize("rows", [20, 1000])
def test_the_configured_policy_again_gives_the_very_same_rows(policy: Any, settings: Any, rows: int) -> None:
    data = data_module(LENGTHS, 50, policy, **settings)
    streams = measured(data, rows, dp_size=2)
    again = _replayed(data, streams, policy, rows)
    assert [stream.rows for stream in again] == [stream.rows for stream in streams]
    assert [stream.first_documents for stream in again] == [stream.first_documents for stream in streams]
    assert all(stream.first_seconds <= other.first_seconds for stream, other in zip(again, streams, strict=True))


@pytest.mark.parametrize("policy", [FixedBufferPolicy(5), FixedBufferPolicy(40), AdaptiveBufferPolicy(max_wait=2)])
def test_another_policy_gives_the_rows_of_its_own_run(policy: Any) -> None:
    configured = data_module(LENGTHS, 60)
    (stream,) = _replayed(configured, measured(configured, 60), policy, 60)
    (own,) = measured(data_module(LENGTHS, 60, policy), 60)
    assert 30 < len(stream.rows) <= 60  # the record ends earlier for a policy that waits for more
    assert stream.rows == own.rows[: len(stream.rows)]
    assert stream.first_documents == own.first_documents


def test_it_agrees_with_the_simulator() -> None:
    data = data_module(LENGTHS, 60)
    (stream,) = _replayed(data, measured(data, 1000), "fixed", 1000)
    report = simulate_packing(LENGTHS, "fixed", max_tokens_per_batch=60)
    assert [[number for _, number, _ in row.documents] for row in stream.rows] == report.selected
    assert [row.fill for row in stream.rows] == report.fills
    assert max(row.wait for row in stream.rows) == report.max_wait
    assert max(row.pool_tokens for row in stream.rows) == report.peak_pool_tokens
    assert stream.first_documents == report.first_documents == 200


def test_a_record_that_is_too_short_gives_no_row() -> None:
    data = data_module(LENGTHS, 60)
    streams = measured(data, 3)
    (stream,) = _replayed(data, streams, "fixed", 3)
    assert stream.rows == []
    assert stream.first_documents == sum(len(draw.entries) for draw in streams[0].draws) < 200


def test_documents_that_really_ended_are_drained() -> None:
    data = data_module([6, 5, 4], 10, "adaptive")
    (stream,) = _replayed(data, measured(data, 10), "fixed", 10)
    assert lengths_of(stream.rows) == [[6, 4], [5]]
    assert [row.tail for row in stream.rows] == [True, True]
