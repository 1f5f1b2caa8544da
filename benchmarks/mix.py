"""Whether packing bends the mix: the share of each source of the packed tokens, against its weight.

Sources of very different lengths are mixed by tokens, wait in the pool and are chosen by each policy: the code of
training on lengths alone. The same runs with a pool in order of arrival show what the order of the pool is for. Exit
status 1 if a share is 2 points or more off after 50 rows.

    python -m benchmarks.mix [--seeds N] [--rows N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure
from benchmarks.packing_tables import percent, table
from lightning_longctx.datamodules import FixedBufferPolicy, PoolView, SourceSettings
from lightning_longctx.datamodules.choosing import plan_row, resolve_policy
from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import Draw
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.policies import BufferPolicy, PackingFacts
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.settings import MAX_DOCS_PER_PACK
from lightning_longctx.datamodules.sources import SequenceSource

WINDOWS = {"32K": 32_768, "1M": 1_048_576}
POLICIES: dict[str, Callable[[], str | BufferPolicy]] = {
    "adaptive": lambda: "adaptive",
    "fixed 200": lambda: "fixed",
    "fixed 24": lambda: FixedBufferPolicy(24),  # context_aware, at any window
}
#: Rows after which a mix is looked at, and how far a share may be off then.
SETTLED, BAR = 50, 0.02


@dataclass(frozen=True)
class Length:
    """A document that has a length and no tokens."""

    tokens: int

    def __len__(self) -> int:
        return self.tokens


class ArrivalPool(DocumentPool):
    """A pool in order of arrival, from which everything is offered."""

    def offer(self, row: int, budget: int) -> tuple[PoolView, Sequence[int]]:
        """Everything."""
        return self.view(row), range(len(self))

    def _fair(self, candidates: list[Candidate]) -> list[Candidate]:
        return candidates


@dataclass(frozen=True)
class Outcome:
    """What a run gave: the largest distance of a share from its goal at any row from the 50th on, and the mean fill."""

    off: float
    fill: float


def mixes(window: int, seed: int) -> dict[str, dict[str, tuple[float, NDArray[np.int64]]]]:
    """Weights and lengths by the name of the mix and of the source."""
    random = np.random.default_rng(seed)

    def wide(median: float, sigma: float, count: int = 20_000) -> NDArray[np.int64]:
        lengths = median * np.exp(sigma * random.standard_normal(count))
        return np.clip(lengths, 16, window).astype(np.int64)

    def between(low: float, high: float, count: int = 4_000) -> NDArray[np.int64]:
        return (window * random.uniform(low, high, count)).astype(np.int64)

    return {
        "books 0.9 W and chats": {
            "books": (0.5, between(0.85, 0.95)),
            "chats": (0.5, random.integers(100, 900, 20_000)),
        },
        "three lognormals": {
            "short": (0.2, wide(window / 200, 1.0)),
            "middle": (0.3, wide(window / 20, 1.0)),
            "long": (0.5, wide(window / 4, 0.7)),
        },
        "rare long documents": {"rare": (0.05, between(0.6, 0.99)), "web": (0.95, wide(window / 60, 1.2))},
        "just over half a window": {"halves": (0.6, between(0.5, 0.6)), "code": (0.4, wide(window / 100, 1.2))},
    }


def run_mix(
    mix: dict[str, tuple[float, NDArray[np.int64]]],
    policy: str | BufferPolicy,
    window: int,
    rows: int,
    pool: DocumentPool,
    mixing: str = "token",
) -> Outcome:
    """Pack ``rows`` rows. The goal is the weights, or under ``mixing: sample`` the shares of the tokens that came."""
    lengths = [found for _, found in mix.values()]
    sources = [
        SequenceSource(name, SourceSettings(records=found, weight=weight), found)
        for name, (weight, found) in mix.items()
    ]
    mixer = open_mixer(sources, SequenceSettings(mixing=mixing, stop_mode="forever"), Share())
    chosen_policy = resolve_policy(policy, PackingFacts(max_seq_len=window))
    budget = Budget(window, window, MAX_DOCS_PER_PACK)
    came, given = np.zeros(len(lengths)), np.zeros(len(lengths))

    def draw() -> list[Candidate]:
        while (head := mixer.head()) is None:
            request = mixer.request()
            mixer.arrived(Draw([Length(int(lengths[request.source_id][request.number]))]))
        mixer.take()
        length = len(head.draw.documents[0])
        came[head.source_id] += length
        return [Candidate(head.source_id, 0, 0, length, length - 1, None)]

    weights = np.array([source.weight for source in sources])
    offs, fills = [0.0], []
    for row in range(rows):
        chosen = plan_row(pool, chosen_policy, budget, row, draw)
        for candidate in chosen:
            given[candidate.source_id] += candidate.length
        fills.append(sum(candidate.length for candidate in chosen) / window)
        if row + 1 >= SETTLED:
            goal = weights / weights.sum() if mixing == "token" else came / came.sum()
            offs.append(float(np.abs(given / given.sum() - goal).max()))
    return Outcome(max(offs), float(np.mean(fills)))


def measure(window: int, name: str, policy: str, rows: int, seeds: int, pool: Callable[[], DocumentPool]) -> Outcome:
    """The worst distance and the mean fill over seeds."""
    found = [run_mix(mixes(window, seed)[name], POLICIES[policy](), window, rows, pool()) for seed in range(seeds)]
    return Outcome(max(one.off for one in found), sum(one.fill for one in found) / seeds)


def figures(results: dict[str, Any]) -> list[Figure]:
    """How far shares are off, against a pool in order of arrival."""
    return [
        Figure(
            f"{name}: share off", 100 * one["fair"]["off"], "points", "order of arrival", 100 * one["arrival"]["off"], 2
        )
        for name, one in results.items()
    ]


def main() -> int:
    """Run, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numbers, lines = {}, []
    for label, window in WINDOWS.items():
        for name in mixes(window, 0):
            for policy in POLICIES:
                ours, arrival = (
                    measure(window, name, policy, options.rows, options.seeds, pool)
                    for pool in (DocumentPool, ArrivalPool)
                )
                numbers[f"{name}, {label}, {policy}"] = {"fair": asdict(ours), "arrival": asdict(arrival)}
                cells = [percent(value) for one in (ours, arrival) for value in (one.off, one.fill)]
                lines.append([f"{name}, {label}", policy, *cells])
    print(table(["mix, window", "policy", "off", "fill %", "off by arrival", "fill % by arrival"], lines))
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return int(any(found["fair"]["off"] >= BAR for found in numbers.values()))


if __name__ == "__main__":
    raise SystemExit(main())
