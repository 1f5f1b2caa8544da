"""The checkpoint benchmark runs at a small size, and its bars fail where they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint

GOOD: dict[str, Any] = {
    "pause": {checkpoint.Ours.name: 1.1},
    "step": {f"{checkpoint.Ours.name}, 5,000 tensors": 1.1},
    "slot_wait_s": 0.0,
    "optimizer_was_writing": True,
    "memory": 1.0,
    "growth": 0.0,
}


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, []),
        ({"pause": {checkpoint.Ours.name: 1.4}}, ["pause"]),
        ({"step": {f"{checkpoint.Ours.name}, 5,000 tensors": 1.3}}, ["step"]),
        ({"slot_wait_s": 0.1}, ["slots"]),
        ({"optimizer_was_writing": False}, ["slots"]),
        ({"memory": 2.0}, ["memory"]),
        ({"growth": 0.5}, ["growth"]),
    ],
)
def test_bars_fail_where_they_should(change: dict[str, Any], failing: list[str]) -> None:
    assert [name for name, held in checkpoint.bars({**GOOD, **change}).items() if not held] == failing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_every_way_saves(tmp_path: Path) -> None:
    times = checkpoint.pauses(4, 1, tmp_path)
    assert times.keys() == {way.name for way in checkpoint.WAYS}
    assert all(len(pause.blocked) == 2 and pause.total >= pause.blocked for pause in times.values())
    assert checkpoint.pause_ratio(times, "memcpy") == 1
    added, growth = checkpoint.memory(30, 4, tmp_path / "memory")
    assert added < 2
    assert abs(growth) < 1
