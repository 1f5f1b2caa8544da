"""Longest rows and smallest sets, against models of memory that are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

from lightning_longctx.strategies.memory import MemorySettings, Switch, next_switches
from lightning_longctx.tools.plan import search
from lightning_longctx.tools.plan.peaks import Peaks
from lightning_longctx.tools.plan.reading import Run
from lightning_longctx.tools.plan.search import Planner, all_changes, combine, nested, with_margin
from lightning_longctx.tools.plan.step import Step
from lightning_longctx.tools.plan.storages import Segment
from lightning_longctx.units import GIB
from tests.tools.plan.helpers import settings, shapes


def planner(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Callable[[MemorySettings, int], int], tokens: int = 4096, **options: Any
) -> Planner:
    """A planner whose simulation is a formula."""

    def peaks(template: Any, wanted: MemorySettings, step: Step) -> Peaks:
        return Peaks([Segment("forward", bytes_of(wanted, step.tokens), {}, tokens)], (1, (1,)))

    monkeypatch.setattr(search, "phase_peaks", peaks)
    module = shapes()
    return Planner(Run(module, settings(module, 8), Step(tokens), 8, ""), 80 * GIB, **options)


@pytest.mark.parametrize(
    "formula",
    [
        lambda tokens: GIB + 100_000 * tokens,
        lambda tokens: max(60 * GIB, 40 * GIB + 7_000 * tokens),  # flat, then rising
        lambda tokens: 5 * GIB + 30_000 * tokens + tokens**2 // 1000,
        lambda tokens: 2_000 * tokens,
        lambda tokens: 70 * GIB + 10_000_000 * tokens,
    ],
)
@pytest.mark.parametrize("start", [256, 4096, 2**20, 2**27])
def test_the_longest_row_fits_and_a_little_more_does_not(
    monkeypatch: pytest.MonkeyPatch, formula: Callable[[int], int], start: int
) -> None:
    found = planner(monkeypatch, lambda _, tokens: formula(tokens), start)
    longest = found.longest(found.run.settings)
    assert with_margin(formula(longest)) <= 80 * GIB
    assert with_margin(formula(int(longest * 1.06) + 512)) > 80 * GIB
    assert len(found._known) <= 16


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planner(monkeypatch, lambda *_: 90 * GIB)
    assert found.longest(found.run.settings) == 0
    assert found.smallest_fit(found.run.settings) is None


def test_the_longest_row_is_a_multiple_that_the_ranks_can_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planner(monkeypatch, lambda _, tokens: 100_000 * tokens)
    assert found.longest(settings(found.run.template, 8, sequence_parallel_size=8)) % (8 * 256) == 0


def test_a_smaller_set_goes_first_and_a_cheaper_one_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def need(wanted: MemorySettings, tokens: int) -> int:
        saved = 40 * (wanted.activation_checkpointing.mode == "full") + 12 * (wanted.sequence_parallel_size - 1)
        return (100 - saved) * GIB

    found = planner(monkeypatch, need)
    fit = found.smallest_fit(found.run.settings)
    assert fit is not None
    assert [switch.name for switch in fit] == ["activation_checkpointing: full"]
    found = planner(monkeypatch, lambda wanted, tokens: need(wanted, tokens) + 50 * GIB)
    fit = found.smallest_fit(found.run.settings)
    assert fit is not None
    assert [switch.name for switch in fit] == ["sequence_parallel_size: 8"]
    found = planner(monkeypatch, lambda wanted, tokens: need(wanted, tokens) - 50 * GIB)
    assert found.smallest_fit(found.run.settings) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_switches_are_found_without_trying_all(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Against all combinations, for models of memory in which no switch costs any."""
    saves = Random(seed)
    weights = {name: saves.randint(0, 30) for name in ("checkpointing", "parallel", "offload", "tiles")}

    def need(wanted: MemorySettings, tokens: int) -> int:
        saved = weights["checkpointing"] * (wanted.activation_checkpointing.mode == "full")
        saved += weights["parallel"] * (wanted.sequence_parallel_size - 1) // 4
        saved += weights["offload"] * wanted.is_offloaded + weights["tiles"] * wanted.is_tiled
        return (74 + (seed * 7) % 60 - saved) * GIB

    tried, brute = (planner(monkeypatch, need) for _ in range(2))
    base = tried.run.settings
    kinds: dict[str, list[Switch]] = {}
    for switch in next_switches(base):
        kinds.setdefault(next(iter(switch.changes)), []).append(switch)
    wanted = next(
        (
            [switch.name for switch in chosen]
            for size in range(len(kinds) + 1)
            for some in combinations(kinds.values(), size)
            for chosen in product(*some)
            if brute.fits(combine(base, chosen))
        ),
        None,
    )
    found = tried.smallest_fit(base)
    assert (None if found is None else [switch.name for switch in found]) == wanted
    assert len(tried._known) <= len(brute._known) + 6
    assert len(tried._known) <= 20


def test_host_memory_of_a_node_can_be_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, not_quite = (
        planner(monkeypatch, lambda *_: GIB, tokens=4096, host_bytes=size) for size in (8 * 4096, 8 * 4096 - 1)
    )
    assert fits.fits(fits.run.settings)
    assert not not_quite.fits(not_quite.run.settings)


def test_changes_add_up() -> None:
    base = MemorySettings(8, heads=8)
    switches = {switch.name: switch for switch in next_switches(base)}
    first, last = switches["activation_checkpointing: full"], switches["sequence_parallel_size: 8"]
    both = combine(base, [last, first])
    assert both == combine(base, [first, last])
    assert both.sequence_parallel_size == 8
    assert nested(all_changes([first, last])) == {
        "trainer": {
            "strategy": {"init_args": {"activation_checkpointing": "full", "sequence_parallel_size": 8}},
        }
    }
