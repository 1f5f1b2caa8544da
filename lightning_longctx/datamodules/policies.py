"""Which documents make the next row.

A policy sees lengths, never tokens or ranks, so that it can be simulated, tested by properties, and gives the same
choice after a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.settings import nearest
from lightning_longctx.errors import ConfigurationError

__all__ = ["BufferPolicy", "FixedBufferPolicy", "plan_row", "resolve_policy"]


class BufferPolicy(ABC):
    """When the pool is ready, and which of its documents go into the next row."""

    @abstractmethod
    def is_ready(self, lengths: Sequence[int], tokens: int, budget: int) -> bool:
        """Whether a row may be chosen now. Not asked once the source is exhausted.

        Args:
            lengths: tokens of each candidate, oldest first.
            tokens: their sum.
            budget: most tokens of a row.
        """

    @abstractmethod
    def select(self, lengths: Sequence[int], budget: int) -> list[int]:
        """Choose a row: indices into ``lengths`` whose sum is at most ``budget``.

        Args:
            lengths: tokens of each candidate, oldest first; at least one, each at most ``budget``.
            budget: most tokens of a row.

        Returns:
            At least one index, each once, in the order of packing.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the policy remembers between rows. Nothing by default."""
        return {}

    # B027: a policy without memory has nothing to load, so this is no abstract method.
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from ``state``."""


class FixedBufferPolicy(BufferPolicy):
    """Waits for a fixed number of candidates and a budget of tokens, then takes them in order, each that still fits.

    The oldest candidate is always taken, so nothing waits for ever. One pass over the pool for a row.

    Args:
        size: least number of candidates. Default 200, the published default of the policy that it reproduces. At 128K
            tokens and more it delays the first row by many documents: set less.

    Raises:
        ConfigurationError: ``size`` below 1.

    Example:
        >>> FixedBufferPolicy(size=3).select([5, 6, 2], budget=8)
        [0, 2]
    """

    def __init__(self, size: int = 200) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError("buffer_policy.size", "must be a positive integer", repr(size), "Set 1 or more.")
        self.size = size

    def is_ready(self, lengths: Sequence[int], tokens: int, budget: int) -> bool:
        """Whether both gates are open: enough candidates, and enough tokens."""
        return len(lengths) >= self.size and tokens >= budget

    def select(self, lengths: Sequence[int], budget: int) -> list[int]:
        """Take in order, oldest first, each candidate that still fits."""
        chosen, left = [], budget
        for index, length in enumerate(lengths):
            if length <= left:
                chosen.append(index)
                left -= length
                if not left:
                    break
        return chosen


_POLICIES: dict[str, Callable[[], BufferPolicy]] = {"fixed": FixedBufferPolicy}


def resolve_policy(policy: str | BufferPolicy) -> BufferPolicy:
    """Turn a name into a policy, and copy a given one, so that two loaders never share its memory.

    Raises:
        ConfigurationError: an unknown name.
    """
    if isinstance(policy, BufferPolicy):
        return deepcopy(policy)
    if not isinstance(policy, str) or policy not in _POLICIES:
        fix = f"{nearest(str(policy), sorted(_POLICIES))} Or give a BufferPolicy."
        raise ConfigurationError("data.buffer_policy", "must be a known policy", repr(policy), fix)
    return _POLICIES[policy]()


def plan_row(
    pool: DocumentPool, policy: BufferPolicy, budget: int, draw: Callable[[], list[Candidate] | None]
) -> list[Candidate]:
    """Fill the pool until the policy is ready, and take the next row out of it.

    Args:
        pool: candidates that wait; changed in place.
        policy: chooses.
        budget: most tokens of a row.
        draw: gives the candidates of the next document (possibly none), or None once the source is exhausted.

    Returns:
        The chosen candidates; empty once source and pool are exhausted.
    """
    while not policy.is_ready(pool.lengths, pool.tokens, budget):
        new = draw()
        if new is None:
            break
        pool.add(new)
    return pool.take(policy.select(pool.lengths, budget)) if len(pool) else []
