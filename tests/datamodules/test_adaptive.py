"""The adaptive policy on streams of lengths: the figures it was chosen for, its limits, and its state."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

import numpy as np
import pytest

from benchmarks.packing_streams import STREAMS, oracle_documents
from lightning_longctx.datamodules import AdaptiveBufferPolicy, Budget, FixedBufferPolicy, simulate_packing
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.errors import ConfigurationError


def reports(name: str, window: int, policy: object, seeds: range = range(8), rows: int = 100) -> list:
    return [
        simulate_packing(STREAMS[name](seed, window), policy, max_tokens_per_batch=window, micro_batches=rows)
        for seed in seeds
    ]


@pytest.mark.parametrize("window", [2**19, 2**20])
def test_mid_size_documents_at_long_windows(window: int) -> None:
    """VeOmni#994, Energon#18: the first row waited for a full buffer, whatever it needed."""
    runs = reports("mid-size", window, "adaptive")
    oracle = [oracle_documents(STREAMS["mid-size"](seed, window), window, 0.985) for seed in range(8)]
    assert mean(run.first_documents for run in runs) <= mean(oracle) + 1
    assert mean(run.first_fill for run in runs) >= 0.985
    assert mean(run.steady_fill for run in runs) >= 0.998
    assert max(run.peak_pool_tokens for run in runs) <= 6 * window
    assert max(run.max_wait for run in runs) <= 32


@pytest.mark.parametrize("name", sorted(STREAMS))
@pytest.mark.parametrize("window", [2**17, 2**20])
def test_no_stream_is_worse_off_than_behind_a_gate_of_24(name: str, window: int) -> None:
    gate = reports(name, window, FixedBufferPolicy(24), range(3))
    ours = reports(name, window, "adaptive", range(3))
    assert mean(run.first_documents for run in ours) <= mean(run.first_documents for run in gate)
    assert mean(run.steady_fill for run in ours) >= mean(run.steady_fill for run in gate)


def test_documents_of_just_over_half_a_window_do_not_stall_the_start() -> None:
    def lengths() -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield int(rng.integers(65_537, 78_000))

    report = simulate_packing(lengths(), "adaptive", max_tokens_per_batch=131_072, micro_batches=300)
    assert report.first_documents <= 6
    assert report.peak_pool_tokens <= 16 * 131_072, "the pool stops growing where growing is futile"
    assert report.max_wait <= 256 + 16


def test_no_document_waits_for_ever() -> None:
    lengths = [700] + [500, 500] * 400
    report = simulate_packing(lengths, "adaptive", max_tokens_per_batch=1000)
    assert report.max_wait <= 256
    assert sorted(number for row in report.selected for number in row) == list(range(len(lengths)))


def test_the_pool_stops_at_its_cap_and_loses_nothing() -> None:
    policy = AdaptiveBufferPolicy(max_pool_tokens=5000)
    assert AdaptiveBufferPolicy(max_pool_tokens="64K").max_pool_tokens == 65536
    lengths = np.random.default_rng(0).integers(501, 900, 300).tolist()
    report = simulate_packing(lengths, policy, max_tokens_per_batch=1000)
    assert report.peak_pool_tokens <= 5000 + 900
    assert sorted(number for row in report.selected for number in row) == list(range(300))
    few = simulate_packing(lengths, AdaptiveBufferPolicy(max_pool_documents=3), max_tokens_per_batch=1000)
    assert few.first_documents <= 3
    small = simulate_packing(lengths, AdaptiveBufferPolicy(max_pool_bytes=8 * 3000), max_tokens_per_batch=1000)
    assert small.peak_pool_tokens <= 3000 + 900


@pytest.mark.parametrize("stop", [1, 7, 30])
def test_a_policy_that_is_resumed_chooses_as_the_unbroken_one(stop: int) -> None:
    def rows(policy: AdaptiveBufferPolicy, pool: DocumentPool, first: int, last: int) -> list[list[int]]:
        found = []
        for row in range(first, last):
            chosen = plan_row(pool, policy, Budget(10_000, 10_000, 4096), row, lambda: [next(source)])
            found.append([candidate.number for candidate in chosen])
        return found

    def candidates() -> Iterator[Candidate]:
        for number, length in enumerate(np.random.default_rng(5).integers(100, 9000, 5000).tolist()):
            yield Candidate(0, number, 0, length, length - 1, None)

    source = candidates()
    unbroken = rows(AdaptiveBufferPolicy(), DocumentPool(), 0, 60)
    source, pool, policy = candidates(), DocumentPool(), AdaptiveBufferPolicy()
    before = rows(policy, pool, 0, stop)
    resumed, state = AdaptiveBufferPolicy(), policy.state_dict()
    resumed.load_state_dict(state)
    assert before + rows(resumed, DocumentPool(pool.candidates), stop, 60) == unbroken


@pytest.mark.parametrize(
    ("name", "value"), [("fill_target", 0), ("first_fill_target", 1.2), ("max_wait", 0), ("max_pool_tokens", -1)]
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"buffer_policy\.{name}"):
        AdaptiveBufferPolicy(**{name: value})
