"""The adaptive policy with single pieces taken away or changed, to show what each of them earns.

The pieces are reached through the policy's own modules for the time of a run, so that they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from lightning_longctx.datamodules import (
    AdaptiveBufferPolicy,
    Budget,
    BufferPolicy,
    FixedBufferPolicy,
    PoolView,
    adaptive,
    selection,
)
from lightning_longctx.datamodules.adaptive import PoolDepth
from lightning_longctx.datamodules.selection import Selection, ordered_greedy

__all__ = ["CHANGED", "LADDER", "WITHOUT", "Variant"]


@dataclass(frozen=True)
class Variant:
    """A policy, and what is changed in its modules while it runs.

    Args:
        make: a new policy for rows of so many tokens.
        changes: constants and functions by module and name.
    """

    make: Callable[[int], BufferPolicy]
    changes: Mapping[str, object] = field(default_factory=dict)

    @contextmanager
    def policy(self, window: int) -> Iterator[BufferPolicy]:
        """A new policy; the changes hold inside the context."""
        with ExitStack() as stack:
            for name, value in self.changes.items():
                module = selection if name == "REPAIR_CANDIDATES" else adaptive
                stack.enter_context(patch.object(module, name, value))
            yield self.make(window)


class _FlatPool(PoolDepth):
    """Never deepens the pool, never turns to long documents."""

    def after_row(self, selection: Selection, goal: float, left: int, window: int, cap: int) -> None:
        return


class _OldestFirst(PoolDepth):
    """Deepens the pool, but always prefers old documents."""

    def after_row(self, selection: Selection, goal: float, left: int, window: int, cap: int) -> None:
        super().after_row(selection, goal, left, window, cap)
        self.hard = False


class _NeverFutile(PoolDepth):
    """Goes on deepening where that gains nothing."""

    def _look_for_gain(self, average: float) -> None:
        return


def _adaptive(**settings: Any) -> Callable[[int], BufferPolicy]:
    return lambda window: AdaptiveBufferPolicy(**settings)


def _greedy_row(view: PoolView, budget: Budget, target: float, first: list[int], longest_first: bool) -> Selection:
    return ordered_greedy(view, budget, first)


#: A row is given as soon as the pool holds its tokens.
_NO_EXTRA = {"_EXTRA_DOCUMENTS": 0, "_EXTRA_WINDOW": -1.0}
_FLAT = {"PoolDepth": _FlatPool}

#: From the token gate alone to the whole policy, a piece at a time.
LADDER: dict[str, Variant] = {
    "token gate, greedy": Variant(lambda window: FixedBufferPolicy(1)),
    "+ repair, waiting limit": Variant(_adaptive(), _NO_EXTRA | _FLAT),
    "+ extra documents": Variant(_adaptive(), _FLAT),
    "+ depth": Variant(_adaptive(), {"PoolDepth": _OldestFirst}),
    "+ long documents first: all": Variant(_adaptive()),
}

#: The whole policy without one piece.
WITHOUT: dict[str, Variant] = {
    "repair": Variant(_adaptive(), {"best_row": _greedy_row}),
    "waiting limit": Variant(_adaptive(max_wait=10**9)),
    "extra documents": Variant(_adaptive(), _NO_EXTRA),
    "depth": Variant(_adaptive(), _FLAT),
    "long documents first": Variant(_adaptive(), {"PoolDepth": _OldestFirst}),
    "futility": Variant(_adaptive(), {"PoolDepth": _NeverFutile}),
    "pauses between looks": Variant(_adaptive(), {"_LOOK_AGAIN_SHARE": 10**9}),
}

#: The whole policy with one number changed.
CHANGED: dict[str, Variant] = {
    "fill_target 0.985": Variant(_adaptive(fill_target=0.985)),
    "fill_target 0.995": Variant(_adaptive(fill_target=0.995)),
    "fill_target 0.9995": Variant(_adaptive(fill_target=0.9995)),
    "first_fill_target 0.995": Variant(_adaptive(first_fill_target=0.995)),
    "max_wait 1": Variant(_adaptive(max_wait=1)),
    "max_wait 8": Variant(_adaptive(max_wait=8)),
    "max_wait 128": Variant(_adaptive(max_wait=128)),
    "max_pool_documents 1024": Variant(_adaptive(max_pool_documents=1024)),
    "pool of 16 windows": Variant(lambda window: AdaptiveBufferPolicy(max_pool_tokens=16 * window)),
    "32 candidates": Variant(_adaptive(), {"REPAIR_CANDIDATES": 32}),
    "1024 candidates": Variant(_adaptive(), {"REPAIR_CANDIDATES": 1024}),
    "0 extra documents, 0.25 windows": Variant(_adaptive(), {"_EXTRA_DOCUMENTS": 0}),
    "16 extra documents": Variant(_adaptive(), {"_EXTRA_DOCUMENTS": 16}),
    "4 extra documents, 1 window": Variant(_adaptive(), {"_EXTRA_WINDOW": 1.0}),
}
