"""Policies and pool: which documents make a row."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    Budget,
    BufferPolicy,
    ContextAwareBufferPolicy,
    Document,
    DynamicBatchingDataModule,
    FixedBufferPolicy,
    PackingFacts,
    PackingSettings,
    PoolView,
    simulate_packing,
)
from lightning_longctx.datamodules.choosing import POLICIES, plan_row, resolve_policy
from lightning_longctx.datamodules.pool import Candidate, DocumentPool, candidates_from_state, candidates_to_state
from lightning_longctx.errors import ConfigurationError


def _candidate(length: int, number: int = 0) -> Candidate:
    return Candidate(0, number, 0, length, length - 1, None)


def _view(lengths: list[int]) -> PoolView:
    return PoolView(lengths, lengths, [0] * len(lengths), 0, sum(lengths), sum(lengths))


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

    rows: list[list[int]] = []
    while chosen := plan_row(pool, policy, Budget(budget, budget, 4096), len(rows), draw):
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
    policy, budget = FixedBufferPolicy(3), Budget(64, 64, 4096)
    assert not policy.is_ready(_view([50, 50]), budget)
    assert not policy.is_ready(_view([5, 5, 5]), budget)
    assert policy.is_ready(_view([30, 30, 4]), budget)


def test_the_first_is_always_taken_and_larger_ones_are_skipped() -> None:
    assert FixedBufferPolicy(1).select(_view([60, 10, 4, 1]), Budget(64, 64, 4096)) == [0, 2]
    assert FixedBufferPolicy(1).select(_view([64, 1]), Budget(64, 64, 4096)) == [0]


def test_an_empty_draw_is_no_end() -> None:
    draws: list[list[Candidate] | None] = [[], [_candidate(3)], [], [_candidate(61)], None]
    row = plan_row(DocumentPool(), FixedBufferPolicy(1), Budget(64, 64, 4096), 0, lambda: draws.pop(0))
    assert [candidate.length for candidate in row] == [3, 61]


def test_unknown_policies_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'fixed'"):
        resolve_policy("fixd", PackingFacts(4096))
    with pytest.raises(ConfigurationError, match=r"buffer_policy\.size"):
        FixedBufferPolicy(0)
    policy = FixedBufferPolicy(7)
    copy = resolve_policy(policy, PackingFacts(4096))
    assert copy is not policy
    assert isinstance(copy, FixedBufferPolicy)
    assert copy.size == 7


def test_the_pool_keeps_order_and_tokens() -> None:
    pool = DocumentPool([_candidate(n, i) for i, n in enumerate([5, 6, 7, 8])])
    assert [c.number for c in pool.take([2, 0])] == [2, 0]
    view = pool.view(5)
    assert (view.lengths, view.counts, view.tokens, view.counted, view.row) == ([6, 8], [6, 8], 14, 14, 5)
    pool.add([_candidate(1, 9)], row=3)
    assert pool.view(5).arrivals == [0, 0, 3]
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


# -- context_aware -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [524_288, 1_048_576])
def test_context_aware_chooses_as_a_gate_of_24(window: int) -> None:
    lengths = np.random.default_rng(3).integers(1000, 90_000, 400).tolist()
    fixed = simulate_packing(lengths, FixedBufferPolicy(24), max_tokens_per_batch=window, micro_batches=15)
    aware = simulate_packing(lengths, "context_aware", max_tokens_per_batch=window, micro_batches=15)
    assert aware.selected == fixed.selected
    assert aware.first_documents == fixed.first_documents >= 24


def test_context_aware_is_a_minimum_and_no_capacity() -> None:
    # 24 short documents do not make a row's tokens: reading goes on.
    lengths = [100] * 40 + [500_000] * 4
    report = simulate_packing(lengths, "context_aware", max_tokens_per_batch=524_288, micro_batches=1)
    assert report.first_documents == 42


def test_context_aware_resolves_once_and_says_so() -> None:
    facts = PackingFacts(max_seq_len=1_048_576)
    policy = ContextAwareBufferPolicy().resolve(facts)
    assert policy.resolve(facts) is policy
    assert policy.describe() == "context_aware: at least 24 documents and the tokens of a row"
    assert FixedBufferPolicy(7).resolve(facts).describe() == "fixed: at least 7 documents and the tokens of a row"


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        (PackingFacts(4096), "max_seq_len"),
        (PackingFacts(786_432), "max_seq_len"),
        (PackingFacts(524_288, micro_batch_size=2), "micro_batch_size"),
        (PackingFacts(524_288, count_mode="effective"), "count_mode"),
        (PackingFacts(524_288, runtime="worker"), "runtime"),
        (PackingFacts(524_288, modalities=("text", "multimodal")), "modality"),
        (PackingFacts(524_288, dynamic=False), "dynamic"),
    ],
)
def test_context_aware_refuses_what_it_was_not_measured_for(facts: PackingFacts, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}.*adaptive") as caught:
        resolve_policy("context_aware", facts)
    assert "context_aware" in str(caught.value)


def test_context_aware_refuses_through_the_data_module_and_when_it_is_not_resolved() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.max_seq_len"):
        DynamicBatchingDataModule({"a": [{"text": "x"}]}, max_seq_len=4096, buffer_policy="context_aware")
    with pytest.raises(ConfigurationError, match=r"data\.packing\.count_mode"):
        DynamicBatchingDataModule(
            {"a": [{"text": "x"}]},
            max_seq_len="512K",
            buffer_policy=ContextAwareBufferPolicy(),
            packing=PackingSettings(count_mode="effective"),
        )
    with pytest.raises(ConfigurationError, match=r"data\.sources\.modality"):
        DynamicBatchingDataModule(
            {"a": {"records": [{"text": "x"}], "modality": "multimodal"}},
            max_seq_len="1M",
            buffer_policy="context_aware",
        )
    with pytest.raises(ConfigurationError, match="must be resolved"):
        ContextAwareBufferPolicy().is_ready(_view([1]), Budget(8, 8, 8))


# -- what holds for every policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_keeps_every_document_and_the_budget(name: str) -> None:
    window = 524_288  # the one window that all three work at
    lengths = np.random.default_rng(1).integers(1, window, 150).tolist()
    report = simulate_packing(lengths, name, max_tokens_per_batch=window)
    assert sorted(number for row in report.selected for number in row) == list(range(150))
    assert all(sum(lengths[number] for number in row) <= window for row in report.selected)
    assert simulate_packing(lengths, name, max_tokens_per_batch=window).selected == report.selected


@pytest.mark.parametrize("policy", [FixedBufferPolicy(5), AdaptiveBufferPolicy()])
@pytest.mark.parametrize("seed", range(5))
def test_effective_counting_never_exceeds_the_physical_cap(policy: BufferPolicy, seed: int) -> None:
    rng = np.random.default_rng(seed)
    budget = Budget(counted=100, physical=150, documents=4096)
    lengths = rng.integers(1, 100, 200)
    targets = np.where(rng.random(200) < 0.5, 0, lengths - 1)  # half of the documents have no target at all
    source = iter(
        [Candidate(0, i, 0, int(n), int(t), None) for i, (n, t) in enumerate(zip(lengths, targets, strict=True))]
    )
    pool, seen = DocumentPool(count_targets=True), []
    policy = resolve_policy(policy, PackingFacts(100, count_mode="effective"))
    for row in range(1000):
        chosen = plan_row(pool, policy, budget, row, lambda: [c] if (c := next(source, None)) else None)
        if not chosen:
            break
        assert sum(candidate.length for candidate in chosen) <= 150
        assert sum(candidate.targets for candidate in chosen) <= 100
        seen += [candidate.number for candidate in chosen]
    assert sorted(seen) == list(range(200))


def test_a_row_has_at_most_so_many_documents() -> None:
    pool, source = DocumentPool(), iter([_candidate(1, i) for i in range(50)])
    rows = []
    while chosen := plan_row(
        pool, AdaptiveBufferPolicy(), Budget(64, 64, 7), len(rows), lambda: [c] if (c := next(source, None)) else None
    ):
        rows.append(len(chosen))
    assert rows == [7] * 7 + [1]
