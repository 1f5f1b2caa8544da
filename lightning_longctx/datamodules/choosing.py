"""From a policy's name to rows: resolve the policy once, and fill the pool until it gives a row."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from lightning_longctx.datamodules.adaptive import AdaptiveBufferPolicy
from lightning_longctx.datamodules.policies import (
    BufferPolicy,
    ContextAwareBufferPolicy,
    FixedBufferPolicy,
    PackingFacts,
)
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.settings import known_names
from lightning_longctx.errors import ConfigurationError

__all__ = ["POLICIES", "likely_next", "plan_row", "resolve_policy"]

#: Policies by the names that YAML takes.
POLICIES: dict[str, Callable[[], BufferPolicy]] = {
    "adaptive": AdaptiveBufferPolicy,
    "context_aware": ContextAwareBufferPolicy,
    "fixed": FixedBufferPolicy,
}


def resolve_policy(policy: str | BufferPolicy, facts: PackingFacts) -> BufferPolicy:
    """Turn a name into a policy, and copy a given one, so that two loaders never share its memory; then resolve it.

    Raises:
        ConfigurationError: an unknown name, or a policy that was not made for such a run.
    """
    if isinstance(policy, BufferPolicy):
        return deepcopy(policy).resolve(facts)
    if not isinstance(policy, str) or policy not in POLICIES:
        fix = f"{known_names(str(policy), sorted(POLICIES))} Or give a BufferPolicy."
        raise ConfigurationError("data.buffer_policy", "must be a known policy", repr(policy), fix)
    return POLICIES[policy]().resolve(facts)


def plan_row(
    pool: DocumentPool,
    policy: BufferPolicy,
    budget: Budget,
    row: int,
    draw: Callable[[], list[Candidate] | None],
) -> list[Candidate]:
    """Fill the pool until the policy is ready, and take the next row out of it.

    Args:
        pool: candidates that wait; changed in place.
        policy: chooses; resolved.
        budget: of the row.
        row: how many rows have been given.
        draw: gives the candidates of the next document (possibly none), or None once the source is exhausted.

    Returns:
        The chosen candidates; empty once source and pool are exhausted.
    """
    while not policy.is_ready(pool.view(row), budget):
        new = draw()
        if new is None:
            break
        pool.add(new, row)
    if not len(pool):
        return []
    view, indices = pool.offer(row, budget.physical)
    return pool.take([indices[index] for index in policy.select(view, budget)])


def likely_next(pool: DocumentPool, policy: BufferPolicy, budget: Budget, row: int, rows: int) -> list[Candidate]:
    """What the next rows would be made of if no further document came, in order. Changes nothing.

    Args:
        pool: candidates that wait.
        policy: chooses; resolved.
        budget: of a row.
        row: how many rows have been given.
        rows: how many to look ahead.
    """
    rest, found = pool.copy(), list[Candidate]()
    policy = deepcopy(policy)
    for ahead in range(rows):
        found += plan_row(rest, policy, budget, row + ahead, lambda: None)
    return found
