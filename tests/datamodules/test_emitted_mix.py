"""Packing must not bend the mix: shares of packed tokens within 2 points after 50 rows, under every policy."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.mix import BAR, POLICIES, ArrivalPool, mixes, run_mix
from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from tests.datamodules.helpers import data_module, keys_of, records

WINDOW = 32_768
NAMES = list(mixes(WINDOW, 0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_the_packed_mix_is_that_of_the_weights(name: str, policy: str) -> None:
    found = run_mix(mixes(WINDOW, 0)[name], POLICIES[policy](), WINDOW, 120, DocumentPool())
    assert found.off < BAR
    assert found.fill > 0.88


@pytest.mark.parametrize("policy", ["adaptive", "fixed 200"])
def test_in_order_of_arrival_it_would_be_bent(policy: str) -> None:
    mix = mixes(WINDOW, 0)["just over half a window"]
    assert run_mix(mix, POLICIES[policy](), WINDOW, 120, ArrivalPool()).off > 2 * BAR


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaptive", "fixed", "context_aware"])
@pytest.mark.parametrize("name", NAMES)
def test_the_packed_mix_at_a_million_tokens(name: str, policy: str) -> None:
    assert run_mix(mixes(2**20, 1)[name], policy, 2**20, 80, DocumentPool()).off < BAR


@pytest.mark.parametrize("name", NAMES)
def test_mixed_by_documents_the_goal_is_what_came(name: str) -> None:
    assert run_mix(mixes(WINDOW, 0)[name], "adaptive", WINDOW, 120, DocumentPool(), "sample").off < BAR


def _candidates(*lengths: tuple[int, int]) -> list[Candidate]:
    return [Candidate(source, number, 0, length, length - 1, None) for number, (source, length) in enumerate(lengths)]


def test_the_source_of_which_most_waits_comes_first() -> None:
    pool = DocumentPool()
    pool.add(_candidates((0, 10), (0, 10), (1, 10), (1, 10), (1, 10), (0, 10)), 0)
    pool.take([0, 1])
    # Of source 0 a third waits; of source 1 all, then two thirds, then one third (it came sooner than source 0's).
    assert [(c.source_id, c.number) for c in pool.candidates] == [(1, 2), (1, 3), (1, 4), (0, 5)]


def test_a_source_is_offered_as_far_as_it_may_be_ahead() -> None:
    pool = DocumentPool()
    pool.add(_candidates((0, 10), (0, 10), (0, 10), (1, 10), (1, 10), (1, 10)), 0)
    pool.take([0, 1])  # source 0 is 10 tokens ahead: half a row of 20
    # Half of a row and 0.3 rows are 16 tokens: less 10 none of source 0 fits, and with 10 two of source 1.
    view, indices = pool.offer(40, budget=20)
    assert [pool.candidates[index].source_id for index in indices] == [1, 1]
    assert (view.lengths, view.tokens) == ([10, 10], 20)
    # Where a row is a small part of what was given there is room for all.
    assert len(pool.offer(200, budget=20)[0].lengths) == 4


def test_one_source_keeps_its_order_of_arrival() -> None:
    pool = DocumentPool()
    pool.add(_candidates(*((0, length) for length in (30, 1, 20, 5))), 0)
    pool.take([1])
    assert [c.length for c in pool.candidates] == [30, 20, 5]
    assert list(pool.offer(0, 1)[1]) == [0, 1, 2]


def test_the_order_of_the_pool_survives_a_resume() -> None:
    def data() -> DynamicBatchingDataModule:
        sources = {"long": {"records": records(60, 17, 20), "weight": 0.6}, "short": {"records": records(300, 2, 5)}}
        return data_module(sources, size=24, max_seq_len=32)

    whole = [keys_of(row) for row in data().train_dataloader()]
    for stop in (3, 17, 40):
        first, second = data(), data()
        before = [keys_of(row) for row in islice(first.train_dataloader(), stop)]
        second.load_state_dict(first.state_dict())
        assert before + [keys_of(row) for row in second.train_dataloader()] == whole
