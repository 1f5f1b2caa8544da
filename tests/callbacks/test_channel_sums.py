"""Sums by slot: a plain loop's values, exact counts, nothing lost of what has no slot, and saved states."""

from __future__ import annotations

import pytest
import torch

from lightning_longctx.callbacks.channel_sums import ChannelSums, Count, SlotTotals, all_reduce_totals
from tests.helpers.pool import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_a_loop(count: int, dtype: torch.dtype) -> None:
    losses, is_target = torch.rand(1, count).to(dtype), torch.rand(1, count) < 0.7
    slots = torch.randint(-3, 6, (1, count))  # four slots; the rest is unknown
    sums = ChannelSums(4, CPU)
    sums.add(losses, is_target, slots)
    totals = sums.totals()
    expected, counts = [0.0] * 5, [0] * 5
    for loss, valid, slot in zip(losses[0].tolist(), is_target[0].tolist(), slots[0].tolist(), strict=True):
        if valid:
            expected[slot if 0 <= slot < 4 else 4] += loss
            counts[slot if 0 <= slot < 4 else 4] += 1
    assert totals.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert totals.losses.dtype == torch.float64
    assert totals.counts[Count.TARGETS].tolist() == counts
    assert totals.counts.dtype == torch.int64


def test_what_is_no_target_may_hold_anything() -> None:
    sums = ChannelSums(2, CPU)
    sums.add(
        torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([True, False, False]), torch.tensor([0, 0, 1])
    )
    assert sums.totals().losses.tolist() == [1.0, 0.0, 0.0]


def test_slots_beyond_32_bits_are_unknown() -> None:
    sums = ChannelSums(2, CPU)
    sums.add(torch.ones(2), torch.tensor([True, True]), torch.tensor([2**32, -(2**32)]))
    assert sums.totals().counts[Count.TARGETS].tolist() == [0, 0, 2]


def test_a_source_that_diverged_does_not_hide_the_others() -> None:
    sums = ChannelSums(2, CPU)
    sums.add(torch.tensor([1.0, float("nan")]), torch.tensor([True, True]), torch.tensor([0, 1]))
    losses = sums.totals().losses
    assert losses[0] == 1.0
    assert losses[1].isnan()


def test_inputs_other_than_int32_slots_stay_as_they_are() -> None:
    slots, is_target = torch.tensor([1, -1, 0]), torch.tensor([True, False, True])
    sums = ChannelSums(2, CPU)
    sums.add(torch.ones(3, requires_grad=True) * 2, is_target, slots)
    assert slots.tolist() == [1, -1, 0]
    assert is_target.tolist() == [True, False, True]
    assert not sums.totals().losses.requires_grad


def test_one_slot_for_all_tokens_may_be_a_view_of_one_number() -> None:
    sums = ChannelSums(2, CPU)
    sums.add(torch.ones(1, 40), torch.ones(1, 40, dtype=torch.bool), torch.ones(1, 1, dtype=torch.int32).expand(1, 40))
    assert sums.totals().losses.tolist() == [0.0, 40.0, 0.0]


def test_counts_are_exact_beyond_float32() -> None:
    sums = ChannelSums(1, CPU)
    sums.add_unknown_targets(2**24)
    sums.add_unknown_targets(torch.tensor(1))
    sums.count(Count.SAMPLES, torch.tensor([0, 0]))
    totals = SlotTotals.sum([sums.totals(), sums.totals()])
    assert totals.counts.tolist() == [[0, 2**25 + 2], [0, 0], [4, 0]]


def test_state_goes_by_name() -> None:
    totals = SlotTotals(3, CPU)
    totals.losses[:] = torch.tensor([1.5, 0.0, 2.5, 4.0])
    totals.counts[0] = torch.tensor([3, 0, 2**30, 1])
    state = totals.state_dict(["a", "b", "c"])
    assert state == {"a": [1.5, 3, 0, 0], "c": [2.5, 2**30, 0, 0], "": [4.0, 1, 0, 0]}
    other = SlotTotals(3, CPU)
    other.load_state_dict(state, ["c", "new", "a"])
    assert other.losses.tolist() == [2.5, 0.0, 1.5, 4.0]
    assert other.counts[0].tolist() == [2**30, 0, 3, 1]


def _reduced(parts: int) -> tuple[list[list[float]], list[list[int]], list[int]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    totals = [SlotTotals(2, CPU) for _ in range(parts)]
    for number, part in enumerate(totals):
        part.losses[rank] = 0.1 * (number + 1)
        part.counts[0, rank] = 2**30 + rank  # float32 would round these
    flags = torch.tensor([rank, 1])
    all_reduce_totals(totals, flags, dist.group.WORLD)
    return [part.losses.tolist() for part in totals], [part.counts[0].tolist() for part in totals], flags.tolist()


@pytest.mark.distributed
def test_one_reduction_joins_parts_and_flags_exactly() -> None:
    for losses, counts, flags in run_ranks(_reduced, 2, 2):
        assert losses == [[0.1, 0.1, 0.0], [0.2, 0.2, 0.0]]
        assert counts == [[2**30, 2**30 + 1, 0]] * 2
        assert flags == [1, 2]
