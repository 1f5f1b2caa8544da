"""The ledger: over random stops and resumes each token of each document is trained once an epoch, in the same order.

Every token of every document has an id of its own, so what was trained in a pass must be all ids, each once. Where the
number of ranks stays, the rows must also be those of a run that was never stopped, whatever runtime and number of
workers each part of it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any, get_type_hints

import pytest

from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    BufferPolicy,
    ContextAwareBufferPolicy,
    DynamicBatchingDataModule,
    FixedBufferPolicy,
    LoadingSettings,
    PackingSettings,
)
from tests.datamodules.helpers import Stream
from tests.datamodules.ranks import Ranks, threaded_collectives

WINDOW = 32
#: Token mixing joins as soon as there is such a setting.
MIXINGS = ("sample", "token") if "mixing" in get_type_hints(LoadingSettings) else (None,)


class SmallContextAware(ContextAwareBufferPolicy):
    """The published gate at the window of these tests."""

    GATES = {WINDOW: 24}


POLICIES: dict[str, Callable[[], BufferPolicy]] = {
    "adaptive": AdaptiveBufferPolicy,
    "context_aware": SmallContextAware,
    "fixed": lambda: FixedBufferPolicy(6),
    "one": lambda: FixedBufferPolicy(1),
}


@dataclass(frozen=True)
class Part:
    """One process of a run: from a start or a resume to a stop."""

    ranks: int
    runtime: str
    workers: int
    micro_batches: int | None


@dataclass(frozen=True)
class Scenario:
    """A run in parts. Small numbers: what matters are the borders between them."""

    seed: int
    streams: tuple[bool, ...]
    documents: tuple[int, ...]
    weights: tuple[float, ...]
    longest: int
    policy: str
    accumulate: int
    epochs: int
    parts: tuple[Part, ...]
    loading: dict[str, Any] = field(default_factory=dict)
    packing: dict[str, Any] = field(default_factory=dict)

    @property
    def keeps_its_ranks(self) -> bool:
        return len({part.ranks for part in self.parts}) == 1

    @property
    def is_exact(self) -> bool:
        """Whether every document is given in a pass, also where ranks end at different rows."""
        return self.loading["on_uneven_end"] == "pad" or all(part.ranks == 1 for part in self.parts)

    def lengths(self) -> list[list[int]]:
        draw = Random(self.seed)
        return [[draw.randint(1, self.longest) for _ in range(count)] for count in self.documents]

    def data(self, part: Part) -> DynamicBatchingDataModule:
        sources, token = {}, 0
        for i, lengths in enumerate(self.lengths()):
            items = []
            for length in lengths:
                items.append({"input_ids": list(range(token, token + length))})
                token += length
            records = Stream(items) if self.streams[i] else items
            sources[f"s{i}"] = {"records": records, "weight": self.weights[i]}
        return DynamicBatchingDataModule(
            sources,
            max_seq_len=WINDOW,
            buffer_policy=POLICIES[self.policy](),
            packing=PackingSettings(**self.packing),
            loading=LoadingSettings(num_workers=part.workers, runtime=part.runtime, **self.loading),  # type: ignore[arg-type]
        )

    def run(self, parts: tuple[Part, ...]) -> Iterator[Any]:
        """The steps of each part in turn."""
        saved = None
        for part in parts:
            ranks = Ranks([self.data(part) for _ in range(part.ranks)], self.accumulate, saved)
            ranks.run(self.epochs, part.micro_batches)
            saved = ranks.stop()
            yield from ranks.steps


def _scenario(seed: int, processes: bool) -> Scenario:
    draw = Random(seed)
    count = draw.randint(1, 3)
    policy = draw.choice(sorted(POLICIES))
    packing: dict[str, Any] = {"pad_to_multiple_of": draw.choice([1, 4])}
    if policy == "one" and draw.random() < 0.5:
        packing |= {"dynamic": False, "documents_per_batch": 1}
    elif draw.random() < 0.3:
        packing |= {"cut_to_fill": True}
    loading: dict[str, Any] = {
        "on_uneven_end": draw.choice(["pad", "pad", "pad", "stop"]),
        "shuffle": draw.random() < 0.7,
        "balance": draw.random() < 0.3,
        "seed": draw.randint(0, 99),
    }
    mixing = draw.choice(MIXINGS)
    if mixing is not None:
        loading["mixing"] = mixing
    ranks = draw.choice([1, 2, 3, 4])
    keeps = draw.random() < 0.5
    runtimes = [] if not processes else ["main"] if policy == "context_aware" else ["main", "worker"]
    parts = []
    for _ in range(draw.randint(1, 3)):
        parts.append(_part(draw, ranks, runtimes, draw.randint(1, 25)))
        ranks = ranks if keeps else draw.choice([1, 2, 4])
    return Scenario(
        seed=seed,
        streams=tuple(draw.random() < 0.4 for _ in range(count)),
        documents=tuple(draw.randint(5, 30) for _ in range(count)),
        weights=tuple(draw.choice([1.0, 1.0, 0.5, 3.0]) for _ in range(count)),
        longest=draw.choice([20, 32, 80]),
        policy=policy,
        accumulate=draw.choice([1, 4]),
        epochs=draw.randint(1, 3),
        parts=(*parts, _part(draw, ranks, runtimes, None)),
        loading=loading,
        packing=packing,
    )


def _part(draw: Random, ranks: int, runtimes: list[str], micro_batches: int | None) -> Part:
    if not runtimes:
        return Part(ranks, "main", 0, micro_batches)
    return Part(ranks, draw.choice(runtimes), draw.choice([0, 2]) if ranks < 3 else 0, micro_batches)


def check(scenario: Scenario) -> None:
    steps = list(scenario.run(scenario.parts))
    total = sum(map(sum, scenario.lengths()))
    for epoch in range(scenario.epochs):
        rows = chain.from_iterable(chain(*step.rows) for step in steps if step.epoch == epoch)
        trained = sorted(chain.from_iterable(rows))
        if scenario.is_exact:
            assert trained == list(range(total)), f"epoch {epoch}: each token once"
        else:
            assert len(trained) == len(set(trained)) > 0, f"epoch {epoch}: no token twice"
    if scenario.keeps_its_ranks:
        whole = replace(scenario.parts[0], runtime="main", workers=0, micro_batches=None)
        assert steps == list(scenario.run((whole,))), "the steps of the unbroken run"


@pytest.mark.parametrize("group", range(20))
def test_random_scenarios(group: int) -> None:
    _check_scenarios(range(group * 10, group * 10 + 10), processes=False)


@pytest.mark.distributed  # slower: some of the parts start processes
@pytest.mark.parametrize("group", range(10))
def test_random_scenarios_with_workers_and_runtimes(group: int) -> None:
    _check_scenarios(range(group * 4, group * 4 + 4), processes=True)


def _check_scenarios(seeds: Iterable[int], processes: bool) -> None:
    with threaded_collectives():
        for seed in seeds:
            scenario = _scenario(seed, processes)
            try:
                check(scenario)
            except BaseException:
                print(scenario)  # pytest shows it with the failure
                raise
