"""Speeds from sums, the line after the first steps, and what other parts of a run tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_longctx.callbacks import TrainingMetrics, run_metrics
from lightning_longctx.callbacks.flops import ModelFlops
from lightning_longctx.callbacks.run_metrics import data_metrics, percentile, slowest_rank_metrics
from lightning_longctx.callbacks.speed import Pace, Speed
from lightning_longctx.callbacks.step_sums import Field, StepSums, squared_lengths
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology
from tests.callbacks.toy import TOKENS, make_batch


def _sums(**values: float) -> list[float]:
    sums = [0.0] * len(Field)
    for name, value in values.items():
        sums[Field[name]] = value
    return sums


def test_speeds_are_per_second_of_the_mean_clock() -> None:
    # Two replicas of two ranks each: four clocks of 2 s; squares are met on both ranks of a row.
    speed = Speed(Topology(world_size=4, sp_size=2, dp_size=2), ModelFlops(1e9, 1e6), peak_tflops=0.01)
    found = speed.metrics(_sums(TOKENS=1000.0, SQUARES=2 * 5000.0, SECONDS=8.0))
    operations = 1000 * 1e9 + 5000 * 1e6
    assert found == pytest.approx(
        {
            "train/tokens_per_s": 500.0,
            "train/tokens_per_s_per_device": 125.0,
            "train/tflops_per_device": operations / 2.0 / 4 / 1e12,
            "train/mfu": operations / 2.0 / 4 / 1e10,
        }
    )


def test_what_is_not_known_is_left_out() -> None:
    sums = _sums(TOKENS=10.0, SQUARES=100.0, SECONDS=1.0)
    assert Speed(Topology(), None, 100.0).metrics(sums).keys() == {
        "train/tokens_per_s",
        "train/tokens_per_s_per_device",
    }
    assert "train/mfu" not in Speed(Topology(), ModelFlops(1.0, 1.0), None).metrics(sums)
    assert Speed(Topology(), None, None).metrics(_sums(SECONDS=1.0)) == {}


def test_the_line_tells_tokens_a_day() -> None:
    speed = Speed(Topology(), ModelFlops(1e9, 0.0), peak_tflops=10.0)
    line = speed.line(_sums(TOKENS=20_000.0, SECONDS=10.0))
    assert line == "Speed: 2,000 tokens/s, 173 M tokens a day, 2 TFLOP/s per device, 20.0% of its peak."


def test_the_pace_leaves_the_first_steps_out_and_is_told_once() -> None:
    pace, told = Pace(skip=2, until=5), []
    for step in range(8):
        told.append(pace.after(torch.tensor([10.0**step])))
    assert told == [None] * 4 + [[10.0**2 + 10.0**3 + 10.0**4]] + [None] * 3


def test_squares_are_those_of_documents_without_padding() -> None:
    batch = make_batch(0, 3)  # documents of 5 and 8 tokens, padding of 3
    assert squared_lengths(batch, torch.float64) == 5**2 + 8**2
    assert squared_lengths({"input_ids": torch.zeros(3, 7)}, torch.float64) == 3 * 49
    assert squared_lengths({"text": "a"}, torch.float64) is None
    assert squared_lengths(torch.zeros(2), torch.float64) is None
    sums = StepSums(torch.device("cpu"))
    sums.add({}, batch)
    sums.add({}, batch)
    assert sums.values[Field.SQUARES] == 2 * (25 + 64)
    assert sums.values[Field.TOKENS] == 2 * (TOKENS - 3)


@pytest.mark.parametrize(("part", "expected"), [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_percentile_is_the_nearest_rank(part: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), part) == expected


def test_no_wait_is_no_time() -> None:
    assert percentile([], 0.99) == 0.0


class _Data:
    def __init__(self) -> None:
        self.asked = 0

    def global_counters(self) -> dict[str, int]:
        return {"rows": 3}

    def global_mix(self) -> dict[str, float]:
        return {"books": 0.25, "code": 0.75}

    def wait_seconds(self) -> list[float]:
        self.asked += 1
        return [0.1, 0.3, 0.2]


def _trainer(**parts: Any) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), **parts)


def test_what_a_data_module_tells() -> None:
    assert data_metrics(_Data()) == {"data/rows": 3.0, "data/mix/books": 0.25, "data/mix/code": 0.75}
    assert data_metrics(None) == {}
    assert data_metrics(SimpleNamespace(global_counters=lambda: {"rows": 1})) == {"data/rows": 1.0}


def test_waits_are_asked_for_once_a_log() -> None:
    data = _Data()
    assert slowest_rank_metrics(_trainer(datamodule=data), Topology()) == {
        "data/wait_s_p50": 0.2,
        "data/wait_s_p99": 0.3,
    }
    assert data.asked == 1
    assert slowest_rank_metrics(_trainer(), Topology()) == {}


def test_peak_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(max_memory_allocated=lambda device: 3 * 2**29)
    monkeypatch.setattr(run_metrics.torch, "get_device_module", lambda device: module)
    assert slowest_rank_metrics(_trainer(), Topology()) == {"train/memory_peak_gib": 1.5}


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan")])
def test_a_peak_must_be_positive(peak: float) -> None:
    with pytest.raises(ConfigurationError, match="must be positive"):
        TrainingMetrics(device_peak_tflops=peak)
