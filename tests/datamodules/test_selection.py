"""The pure choice of documents: optimal against brute force, within the budget, the oldest first."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.datamodules import Budget, PoolView
from lightning_longctx.datamodules.selection import REPAIR_CANDIDATES, best_row, ordered_greedy, subset_sum


def view_of(lengths: list[int]) -> PoolView:
    return PoolView(lengths, lengths, [0] * len(lengths), 0, sum(lengths), sum(lengths))


def best_sum(sizes: list[int], high: int) -> int:
    return max(sum(part) for count in range(len(sizes) + 1) for part in combinations(sizes, count) if sum(part) <= high)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 150))
def test_the_subset_is_optimal(sizes: list[int], high: int) -> None:
    chosen = subset_sum(sizes, high, high)
    assert sum(sizes[index] for index in chosen) == best_sum(sizes, high)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(10, 150), st.integers(0, 40))
def test_the_subset_is_the_first_in_order_that_is_good_enough(sizes: list[int], high: int, slack: int) -> None:
    low = min(max(high - slack, 0), best_sum(sizes, high))
    good = [
        part
        for count in range(len(sizes) + 1)
        for part in combinations(range(len(sizes)), count)
        if low <= sum(sizes[index] for index in part) <= high
    ]
    # Taking an element where possible, position by position, is the largest membership vector.
    expected = max(good, key=lambda part: [index in part for index in range(len(sizes))])
    assert subset_sum(sizes, high - slack, high) == list(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=40), st.floats(0.5, 1.0), st.booleans())
def test_a_row_keeps_to_the_budget_and_is_no_worse_than_greedy(lengths: list[int], target: float, hard: bool) -> None:
    budget = Budget(1_048_576, 1_048_576, 4096)
    row = best_row(view_of(lengths), budget, target, [0], hard)
    assert len(set(row.indices)) == len(row.indices)
    assert 0 in row.indices
    used = sum(lengths[index] for index in row.indices)
    assert used <= budget.physical
    assert row.fill == pytest.approx(used / budget.physical)
    assert row.fill >= ordered_greedy(view_of(lengths), budget, [0]).fill


def test_a_large_pool_is_repaired_around_what_greedy_took() -> None:
    lengths = np.random.default_rng(0).integers(900, 1100, 3 * REPAIR_CANDIDATES).tolist()
    budget = Budget(300_000, 300_000, 4096)
    greedy = ordered_greedy(view_of(lengths), budget)
    row = best_row(view_of(lengths), budget, 1.0, [], False)
    assert greedy.fill < 1.0
    assert row.fill > 0.99999
    assert row.indices[:100] == list(range(100)), "the oldest stay"


def test_greedy_that_is_good_enough_is_kept() -> None:
    budget = Budget(100, 100, 4096)
    assert best_row(view_of([50, 49, 2, 51]), budget, 0.98, [], False).indices == [0, 1]
    assert sorted(best_row(view_of([50, 49, 2, 51]), budget, 1.0, [], False).indices) == [1, 3]
