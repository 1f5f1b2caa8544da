"""Whether packing bends the mix of sources: the emitted share of tokens of each source against its weight.

Documents are mixed by tokens, wait in the pool, and are chosen by each policy, on lengths alone. The same runs with a
pool in order of arrival show what the order of the pool is for.

    python -m benchmarks.mix [--rows N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from lightning_longctx.datamodules.choosing import plan_row, resolve_policy
from lightning_longctx.datamodules.cursors import Share
from lightning_longctx.datamodules.documents import Draw
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import Mixer, SequenceSettings
from lightning_longctx.datamodules.policies import BufferPolicy, FixedBufferPolicy, PackingFacts
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.settings import MAX_DOCS_PER_PACK
from lightning_longctx.datamodules.sources import IndexableSource, SourceSettings


@dataclass(frozen=True)
class Length:
    """A document without tokens."""

    source_id: int
    number: int
    length: int

    def __len__(self) -> int:
        return self.length


class LengthSource(IndexableSource):
    """Documents of given lengths."""

    def __init__(self, name: str, weight: float, lengths: Sequence[int]) -> None:
        super().__init__(name, SourceSettings(records=[], weight=weight))
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int) -> Any:
        raise NotImplementedError


class ArrivalPool(DocumentPool):
    """A pool in order of arrival."""

    def _fair(self, candidates: list[Candidate]) -> list[Candidate]:
        return candidates


def emitted(
    sources: Sequence[LengthSource],
    policy: str | BufferPolicy,
    window: int,
    rows: int,
    pool: DocumentPool,
    mixing: Any = "token",
    note: Callable[[np.ndarray], None] | None = None,
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Shares of emitted and drawn tokens by source after ``rows`` rows, and the fills."""
    mixer = open_mixer(sources, SequenceSettings(mixing=mixing, stop_mode="forever"), Share())
    chosen_policy = resolve_policy(policy, PackingFacts(max_seq_len=window))
    budget = Budget(window, window, MAX_DOCS_PER_PACK)
    given, drawn = np.zeros(len(sources)), np.zeros(len(sources))
    fills = []

    def draw() -> list[Candidate]:
        length, source = next_length(mixer, sources)
        drawn[source] += length
        return [Candidate(source, 0, 0, length, length - 1, None)]

    for row in range(rows):
        chosen = plan_row(pool, chosen_policy, budget, row, draw)
        for candidate in chosen:
            given[candidate.source_id] += candidate.length
        fills.append(sum(candidate.length for candidate in chosen) / window)
        if note is not None:
            note(given / given.sum())
    return given / given.sum(), drawn / drawn.sum(), fills


def next_length(mixer: Mixer, sources: Sequence[LengthSource]) -> tuple[int, int]:
    """The next document of a mix: its length, and its source."""
    while (head := mixer.head()) is None:
        request = mixer.request()
        assert request is not None
        document: Any = Length(request.source_id, request.number, int(sources[request.source_id].lengths[request.number]))
        mixer.arrived(Draw([document]))
    mixer.take()
    return len(head.draw.documents[0]), head.source_id


def mixes(window: int, seed: int) -> dict[str, list[LengthSource]]:
    """Sources of very different lengths."""
    random = np.random.default_rng(seed)

    def lognormal(median: float, sigma: float, number: int) -> np.ndarray:
        return np.clip(np.exp(np.log(median) + sigma * random.standard_normal(number)), 16, window).astype(int)

    return {
        "books and chats": [
            LengthSource("books", 0.5, (window * random.uniform(0.85, 0.95, 2000)).astype(int)),
            LengthSource("chats", 0.5, random.integers(100, 900, 20_000)),
        ],
        "three lognormals": [
            LengthSource("short", 0.2, lognormal(window / 200, 1.0, 20_000)),
            LengthSource("middle", 0.3, lognormal(window / 20, 1.0, 20_000)),
            LengthSource("long", 0.5, lognormal(window / 4, 0.7, 20_000)),
        ],
        "half windows and code": [
            LengthSource("halves", 0.6, (window * random.uniform(0.5, 0.6, 4000)).astype(int)),
            LengthSource("code", 0.4, lognormal(window / 100, 1.2, 20_000)),
        ],
        "rare long": [
            LengthSource("rare", 0.05, (window * random.uniform(0.6, 0.99, 2000)).astype(int)),
            LengthSource("web", 0.95, lognormal(window / 60, 1.2, 20_000)),
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50)
    options = parser.parse_args()
    for window in (32_768, 1_048_576):
        for name in mixes(window, 0):
            for policy in ("fixed", "fixed 24", "adaptive"):
                for pool in (DocumentPool, ArrivalPool):
                  for mixing in ("token", "sample"):
                    worst, dr, fill = [], [], []
                    for seed in range(3):
                        sources = mixes(window, seed)[name]
                        p = FixedBufferPolicy(24) if policy == "fixed 24" else policy
                        shares, drawn, fills = emitted(sources, p, window, options.rows, pool(), mixing)
                        weights = np.array([s.weight for s in sources])
                        goal = weights if mixing == "token" else drawn
                        worst.append(np.abs(shares - goal).max())
                        dr.append(np.abs(drawn - goal).max())
                        fill.append(np.mean(fills[1:]))
                    print(f"{window:8d} {name:24s} {policy:9s} {pool.__name__:13s} {mixing} emitted off {100*max(worst):5.2f} drawn off {100*max(dr):5.2f} fill {100*np.mean(fill):.2f}", flush=True)
