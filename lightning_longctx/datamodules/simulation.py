"""What a policy does with a stream of lengths, without any token: the code of training on candidates without text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from lightning_longctx.datamodules.choosing import plan_row, resolve_policy
from lightning_longctx.datamodules.policies import BufferPolicy, PackingFacts
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.settings import MAX_DOCS_PER_PACK
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import TokenCountLike, parse_token_count

__all__ = ["PackingReport", "simulate_packing"]


@dataclass(frozen=True)
class PackingReport:
    """What one data-parallel rank sees.

    Attributes:
        first_documents: documents read before the first row.
        first_fill: part of the budget that the first row fills.
        steady_fill: mean fill of all later rows; the first fill if there is only one row.
        fills: of each row.
        max_wait: most rows that a document waited.
        peak_pool_tokens: most tokens that waited before a row.
        selected: for each row the numbers of its documents in the stream, in order of packing.
        documents: documents read in all.
        seconds: processor-bound time of the policy and the pool in all.
    """

    first_documents: int
    first_fill: float
    steady_fill: float
    fills: list[float]
    max_wait: int
    peak_pool_tokens: int
    selected: list[list[int]]
    documents: int
    seconds: float


def simulate_packing(
    lengths: Iterable[int],
    policy: str | BufferPolicy = "adaptive",
    *,
    max_tokens_per_batch: TokenCountLike,
    micro_batches: int | None = None,
) -> PackingReport:
    """Run a policy on the lengths of a stream of documents.

    Args:
        lengths: tokens of each document, in order, each at most ``max_tokens_per_batch``. May be endless.
        policy: a name or a policy.
        max_tokens_per_batch: the budget of a row.
        micro_batches: rows to make. Default None: until the lengths end.

    Returns:
        A :class:`PackingReport`.

    Raises:
        ConfigurationError: no length at all, one that is not from 1 to the budget, or a policy that does not fit.

    Example:
        >>> simulate_packing([3, 5, 4, 4, 2, 6], "fixed", max_tokens_per_batch=8).selected
        [[0, 1], [2, 3], [4, 5]]
    """
    window = parse_token_count(max_tokens_per_batch, "max_tokens_per_batch")
    chosen_policy = resolve_policy(policy, PackingFacts(max_seq_len=window))
    stream = _Stream(iter(lengths), window)
    pool, budget = DocumentPool(), Budget(window, window, MAX_DOCS_PER_PACK)
    fills: list[float] = []
    selected: list[list[int]] = []
    first_documents = max_wait = peak = 0
    start = perf_counter()
    for row in range(micro_batches) if micro_batches is not None else count():
        chosen = plan_row(pool, chosen_policy, budget, row, stream.draw)
        if not chosen:
            break
        used = sum(candidate.length for candidate in chosen)
        first_documents = first_documents or stream.read
        peak = max(peak, pool.tokens + used)
        max_wait = max(max_wait, *(row - candidate.arrival for candidate in chosen))
        fills.append(used / window)
        selected.append([candidate.number for candidate in chosen])
    if not fills:
        raise ConfigurationError("lengths", "must have at least one document", "none", "Give their lengths in tokens.")
    steady = fills[1:] or fills
    return PackingReport(
        first_documents=first_documents,
        first_fill=fills[0],
        steady_fill=sum(steady) / len(steady),
        fills=fills,
        max_wait=max_wait,
        peak_pool_tokens=peak,
        selected=selected,
        documents=stream.read,
        seconds=perf_counter() - start - stream.seconds,
    )


class _Stream:
    """Candidates of given lengths, numbered in order; times its source apart."""

    def __init__(self, lengths: Iterable[int], window: int) -> None:
        self._lengths = iter(lengths)
        self._window = window
        self.read = 0
        self.seconds = 0.0

    def draw(self) -> list[Candidate] | None:
        start = perf_counter()
        length = next(self._lengths, None)
        self.seconds += perf_counter() - start
        if length is None:
            return None
        if not 1 <= length <= self._window:
            fix = "Split or leave out longer documents first."
            rule = f"must be from 1 to max_tokens_per_batch = {self._window}"
            raise ConfigurationError(f"lengths[{self.read}]", rule, length, fix)
        self.read += 1
        return [Candidate(0, self.read - 1, 0, int(length), int(length) - 1, None)]
