"""Keeps metadata of a batch away from the model: steps get a copy without it, everybody else the whole batch.

The strategy's step methods are wrapped, on the object, for the length of a run. Any number of callbacks may ask; the
last one that leaves takes the wrappers off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightning_longctx.batch import PackedBatch, is_packed_batch

__all__ = ["BatchFilter", "without"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def without(batch: Any, keys: Iterable[str]) -> Any:
    """Return a batch without some keys: a shallow copy of the same class, or the batch itself if it has none of them.

    The keys of a packed batch stay: they are the contract with the module, whose model gets ``model_inputs(batch)``.
    """
    if not isinstance(batch, MutableMapping):
        return batch
    drop = [key for key in dict.fromkeys(keys) if key in batch]
    if is_packed_batch(batch):
        drop = [key for key in drop if key not in PackedBatch.__required_keys__]
    if not drop:
        return batch
    rest = copy.copy(batch)
    for key in drop:
        del rest[key]
    return rest


class BatchFilter:
    """Drops keys from what a strategy hands to the module's steps, until :meth:`close`.

    Args:
        strategy: a Lightning strategy.
        keys: what steps must not see.
    """

    def __init__(self, strategy: Any, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        wrappers = _installed.get(strategy)
        if wrappers is None or not wrappers.users:
            wrappers = _installed[strategy] = _Wrappers(strategy)
        wrappers.users.append(self)
        self._wrappers = wrappers

    def close(self) -> None:
        """Give the strategy its own methods back, unless another filter is open."""
        if self in self._wrappers.users:
            self._wrappers.users.remove(self)
            if not self._wrappers.users:
                self._wrappers.remove()


class _Wrappers:
    """The wrappers around one strategy's steps."""

    def __init__(self, strategy: Any) -> None:
        self.users: list[BatchFilter] = []
        self._attributes = vars(strategy)  # holds no reference to the strategy itself, or it would never be freed
        self._before = {name: self._attributes[name] for name in _STEPS if name in self._attributes}
        self._own = {name: partial(self._step, getattr(strategy, name)) for name in _STEPS if hasattr(strategy, name)}
        self._attributes.update(self._own)

    def _step(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        keys = [key for user in self.users for key in user.keys]
        return step(without(batch, keys), *args, **kwargs)

    def remove(self) -> None:
        for name, own in self._own.items():
            # Somebody who wrapped the same method before us may have taken both off already.
            if self._attributes.get(name) is own:
                del self._attributes[name]
                if name in self._before:
                    self._attributes[name] = self._before[name]
        self._own = {}


_installed: WeakKeyDictionary[Any, _Wrappers] = WeakKeyDictionary()
