"""Policies and pool: which documents make a row."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lightning_longctx.datamodules import BufferPolicy, Document, FixedBufferPolicy
from lightning_longctx.datamodules.policies import plan_row, resolve_policy
from lightning_longctx.datamodules.pool import Candidate, DocumentPool, candidates_from_state, candidates_to_state
from lightning_longctx.errors import ConfigurationError


def _candidate(length: int, number: int = 0) -> Candidate:
    return Candidate(0, number, 0, length, length - 1, None)


def _naive_rows(lengths: list[int], size: int, budget: int) -> list[list[int]]:
    """Ordered greedy behind both gates, written the slow way: one document fetched at a time, removed one by one."""
    waiting: list[int] = []
    rest, rows = list(range(len(lengths))), []
    while rest or waiting:
        while rest and not (len(waiting) >= size and sum(lengths[i] for i in waiting) >= budget):
            waiting.append(rest.pop(0))
        row, total = [], 0
        for i in list(waiting):
            if total + lengths[i] <= budget:
                row.append(i)
                total += lengths[i]
                waiting.remove(i)
        rows.append(row)
    return rows


def _rows(lengths: list[int], policy: BufferPolicy, budget: int) -> list[list[int]]:
    pool, source = DocumentPool(), iter([_candidate(n, i) for i, n in enumerate(lengths)])

    def draw() -> list[Candidate] | None:
        found = next(source, None)
        return None if found is None else [found]

    rows = []
    while chosen := plan_row(pool, policy, budget, draw):
        rows.append([candidate.number for candidate in chosen])
    assert len(pool) == pool.tokens == 0
    return rows


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("seed", range(20))
def test_fixed_chooses_as_ordered_greedy_does(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 65, rng.integers(0, 60)).tolist()
    assert _rows(lengths, FixedBufferPolicy(size), 64) == _naive_rows(lengths, size, 64)


def test_both_gates_must_be_open() -> None:
    policy = FixedBufferPolicy(3)
    assert not policy.is_ready([50, 50], 100, 64)
    assert not policy.is_ready([5, 5, 5], 15, 64)
    assert policy.is_ready([30, 30, 4], 64, 64)


def test_the_first_is_always_taken_and_larger_ones_are_skipped() -> None:
    assert FixedBufferPolicy(1).select([60, 10, 4, 1], 64) == [0, 2]
    assert FixedBufferPolicy(1).select([64, 1], 64) == [0]


def test_an_empty_draw_is_no_end() -> None:
    draws: list[list[Candidate] | None] = [[], [_candidate(3)], [], [_candidate(61)], None]
    assert [c.length for c in plan_row(DocumentPool(), FixedBufferPolicy(1), 64, lambda: draws.pop(0))] == [3, 61]


def test_cost_grows_with_the_pool_and_not_with_its_square() -> None:
    def seconds(count: int) -> float:
        lengths = np.random.default_rng(0).integers(1, 100, count).tolist()
        start = time.process_time()
        rows = _rows(lengths, FixedBufferPolicy(count), sum(lengths))
        assert len(rows) == 1
        return time.process_time() - start

    seconds(1000)
    assert min(seconds(20_000) for _ in range(3)) < 0.5  # 15 ms of processor time; a quadratic rule takes minutes


def test_unknown_policies_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'fixed'"):
        resolve_policy("fixd")
    with pytest.raises(ConfigurationError, match=r"buffer_policy\.size"):
        FixedBufferPolicy(0)
    policy = FixedBufferPolicy(7)
    copy = resolve_policy(policy)
    assert copy is not policy
    assert isinstance(copy, FixedBufferPolicy)
    assert copy.size == 7


def test_the_pool_keeps_order_and_tokens() -> None:
    pool = DocumentPool([_candidate(n, i) for i, n in enumerate([5, 6, 7, 8])])
    assert [c.number for c in pool.take([2, 0])] == [2, 0]
    assert (pool.lengths, pool.tokens) == ([6, 8], 14)
    pool.add([_candidate(1, 9)])
    assert ([c.number for c in pool.candidates], pool.tokens, len(pool)) == ([1, 3, 9], 15, 3)


def test_candidates_count_targets_and_survive_their_state() -> None:
    ids = np.arange(5, dtype=np.int32)
    plain = Candidate.of(Document(0, 3, 0, ids))
    masked = Candidate.of(Document(1, 4, 10, ids, np.array([7, -100, 2, -100, 4], np.int32)))
    assert (plain.targets, masked.targets) == (4, 2)
    restored = candidates_from_state(candidates_to_state([plain, masked], by_value=[False, True]))
    assert restored[0].document is None
    assert restored[1].document is not None
    assert restored[1].document.labels is not None
    assert restored[1].document.labels.tolist() == [7, -100, 2, -100, 4]
    for before, after in zip([plain, masked], restored, strict=True):
        assert (before.source_id, before.number, before.start) == (after.source_id, after.number, after.start)
        assert (before.length, before.targets) == (after.length, after.targets)
    assert candidates_from_state(candidates_to_state([], [])) == ()
