"""Hooks on saved tensors that decide what moves, and when it goes and comes back.

A saved tensor is resident at first. Once enough later blocks have begun and the device limit is passed, the oldest go
to the host: so the newest stay, which backward needs first. In backward the tensors that were saved just before the one
that is read are fetched ahead, within a budget of bytes.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_longctx.recompute import is_recomputing
from lightning_longctx.strategies.activation_offload.arena import HostArena
from lightning_longctx.strategies.activation_offload.backend import DeviceBackend
from lightning_longctx.strategies.activation_offload.identity import (
    StorageRange,
    Weights,
    flat_bytes,
    is_movable,
    range_of,
    storage_key,
)
from lightning_longctx.strategies.activation_offload.report import OffloadCounters
from lightning_longctx.strategies.activation_offload.settings import ActivationOffload
from lightning_longctx.strategies.activation_offload.stash import Kept, Saved, Stash
from lightning_longctx.units import GIB, MIB

__all__ = ["Offloader"]

_MANY = 4096  # references to ended handles are looked through no earlier


class Offloader:
    """Moves what autograd saves on one device.

    It holds no saved tensor itself: see :mod:`~lightning_longctx.strategies.activation_offload.stash`.

    Args:
        settings: what moves and when.
        backend: who copies.
        arena: host memory.

    Attributes:
        counters: what was moved.
        weights: what never moves.
        watching: whether device memory is looked at, which costs some time: true until the first report.
    """

    def __init__(self, settings: ActivationOffload, backend: DeviceBackend, arena: HostArena) -> None:
        self.settings, self.backend, self.arena = settings, backend, arena
        self.counters = OffloadCounters()
        self.weights = Weights()
        self.watching = True
        self._untraced_pack, self._untraced_unpack = map(torch.compiler.disable, (self.pack, self.unpack))
        self._min_bytes = int(settings.min_tensor_mib * MIB)
        self._device_limit = int(settings.device_limit_gib * GIB)
        self._keep = settings.keep_last_blocks
        self._number = self._group = 0
        self._known: dict[StorageRange, tuple[StorageWeakRef, int, weakref.ref[Stash]]] = {}
        self._resident: deque[weakref.ref[Stash]] = deque()  # oldest first, not on the host
        self._resident_bytes = 0
        self._leaving: deque[weakref.ref[Stash]] = deque()  # on both, the copy to the host under way
        self._saved: list[tuple[int, weakref.ref[Saved]]] = []  # in rising order of numbers
        self._ahead_bytes = 0
        self._cursor = sys.maxsize  # handles with this number and above were looked at for fetching ahead
        self._many = _MANY
        self._backward = -1
        self._warned: set[str] = set()

    # -- forward -----------------------------------------------------------------------------------------------------

    @contextmanager
    def block(self, modules: Iterable[nn.Module], inputs: Any) -> Iterator[None]:
        """Offload what is saved inside, as one block.

        Args:
            modules: the block's, whose weights exist now.
            inputs: its arguments; at the levels ``boundary`` and ``policy`` only these move.
        """
        self._group += 1
        self._forget_ended()
        self.weights.add(modules)
        self._evict()
        self._sample()
        only = None
        if self.settings.level != "all":
            only = {storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and is_movable(leaf)}
        try:
            with self.hooks(only):
                yield
        finally:
            self._give_up_leaving()

    def hooks(self, only: set[int] | None) -> saved_tensors_hooks:
        """The pair of hooks; out of a compiler's sight, or it would trace them where compiled code saves a tensor.

        Args:
            only: storages that may move; None for any.
        """
        return saved_tensors_hooks(partial(self._untraced_pack, only), self._untraced_unpack)

    def pack(self, only: set[int] | None, tensor: Tensor) -> Any:
        """Turn a tensor that autograd saves into a handle.

        Args:
            only: storages that may move; None for any.
            tensor: the user's own object, not changed and not kept once its bytes are out.
        """
        if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
            return _Traced(tensor)
        reason = self._why_it_stays(tensor, only)
        if reason is not None:
            self.counters.stay(reason, tensor.numel() * tensor.element_size())
            return Kept(tensor)
        return self.save(tensor)

    def save(self, tensor: Tensor) -> Saved | Kept:
        """Take a movable tensor, unless it is too small."""
        span = range_of(tensor)
        if span.nbytes < max(self._min_bytes, 1):
            self.counters.stay("small", span.nbytes)
            return Kept(tensor)
        self._number += 1
        saved = Saved(self._find(tensor, span) or self._new(tensor, span), tensor, self._number)
        self._saved.append((saved.number, weakref.ref(saved)))
        return saved

    def _why_it_stays(self, tensor: Tensor, only: set[int] | None) -> str | None:
        if not is_movable(tensor):
            return "wrapped"
        if tensor in self.weights:
            return "weights"
        if tensor.device != self.backend.device:
            return "elsewhere"
        if is_recomputing():
            return "recomputed"
        return "inner" if only is not None and storage_key(tensor) not in only else None

    def _find(self, tensor: Tensor, span: StorageRange) -> Stash | None:
        """The stash that holds these bytes already."""
        whole = StorageRange(span.storage, 0, tensor.untyped_storage().nbytes())
        for place in (span, whole):
            entry = self._known.get(place)
            # A storage's identity is its own while it is referenced weakly; the version tells what was in it.
            stash = entry[2]() if entry is not None and entry[1] == tensor._version else None
            if stash is not None:
                self.counters.duplicate_bytes += span.nbytes
                return stash
        return None

    def _new(self, tensor: Tensor, span: StorageRange) -> Stash:
        stash = Stash(flat_bytes(tensor, span), span, self.arena, self.backend, self._ended)
        stash.group = self._group
        ref = weakref.ref(stash)
        self._known[span] = (StorageWeakRef(tensor.untyped_storage()), tensor._version, ref)
        self._resident.append(ref)
        self._resident_bytes += stash.nbytes
        if self._keep == 0:
            self._evict()
        return stash

    def _ended(self, stash: Stash) -> None:
        """Nobody needs a stash any more. It may end in any thread, so this only corrects the books."""
        entry = self._known.get(stash.span)
        if entry is not None and entry[2]() is None:
            self._known.pop(stash.span, None)
        if not stash.on_host:
            self._resident_bytes -= stash.nbytes
        if stash.ahead:
            self._ahead_bytes -= stash.nbytes

    def _forget_ended(self) -> None:
        self.weights.prune()
        while self._resident and self._resident[0]() is None:
            self._resident.popleft()
        if len(self._saved) > self._many:
            self._saved = [(number, ref) for number, ref in self._saved if ref() is not None]
            self._many = max(_MANY, 2 * len(self._saved))

    def _evict(self) -> None:
        while self._resident and self._resident_bytes > self._device_limit:
            stash = self._resident[0]()
            if stash is not None and stash.group > self._group - self._keep:
                break
            self._resident.popleft()
            if stash is not None:
                self._move_out(stash)

    def _move_out(self, stash: Stash) -> None:
        if not stash.start_out():
            self.counters.stay("no_room", stash.nbytes)
            self._trouble("host memory for saved activations is full; what does not fit stays on the device")
            return
        if self.arena.pageable:
            self._trouble("host memory could not be pinned; copies to and from it are slower and hold up the host")
        self._resident_bytes -= stash.nbytes
        self.counters.bytes_out += stash.nbytes
        self.counters.copies_out += 1
        if self.settings.mode == "sync":
            stash.give_up_device()
            return
        self._leaving.append(weakref.ref(stash))
        self._give_up_leaving(self.settings.prefetch_bytes)

    def _give_up_leaving(self, window: int = 0, reading: Stash | None = None) -> None:
        """Free device memory of copies under way beyond ``window`` bytes; the computation waits for those."""
        under_way = [stash for ref in self._leaving if (stash := ref()) is not None]
        excess = sum(stash.nbytes for stash in under_way) - window
        self._leaving.clear()
        for place, stash in enumerate(under_way):
            if excess <= 0 or (window and place == len(under_way) - 1):
                self._leaving.append(weakref.ref(stash))
                continue
            excess -= stash.nbytes
            if stash is not reading:
                stash.give_up_device()

    def _trouble(self, what: str) -> None:
        if self.settings.strict:
            raise RuntimeError(f"activation offload (strict): {what}")
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"activation offload: {what}", stacklevel=2)

    # -- backward ----------------------------------------------------------------------------------------------------

    def unpack(self, saved: Any) -> Tensor:
        """Turn a handle back into its tensor, and fetch what will be asked for next."""
        if not isinstance(saved, Saved):
            tensor: Tensor = saved.rebuild()
            return tensor
        stash = saved.stash
        if self._leaving:
            self._give_up_leaving(reading=stash)
        if not stash.on_device:
            self._fetch(stash)
            self._cursor = max(self._cursor, saved.number)
        elif stash.ahead:
            stash.ahead = False
            self._ahead_bytes -= stash.nbytes
        self._sample()
        rebuilt = saved.rebuild()
        self._fetch_ahead(saved.number)
        self._note_backward()
        return rebuilt

    def _fetch(self, stash: Stash) -> None:
        stash.start_in()
        self.counters.bytes_in += stash.nbytes
        self.counters.copies_in += 1

    def _fetch_ahead(self, number: int) -> None:
        budget = self.settings.prefetch_bytes
        if self._ahead_bytes >= budget or not is_recomputing():
            return
        # By handles, not by stashes: one that all blocks share would lead to the first block.
        place = bisect_left(self._saved, min(number, self._cursor), key=lambda entry: entry[0])
        while place:
            place -= 1
            other, ref = self._saved[place]
            saved = ref()
            stash = None if saved is None else saved.stash
            if stash is not None and not stash.on_device:
                if self._ahead_bytes and self._ahead_bytes + stash.nbytes > budget:
                    return
                self._fetch(stash)
                stash.ahead = True
                self._ahead_bytes += stash.nbytes
            self._cursor = other

    def _note_backward(self) -> None:
        """Have leftovers dropped when this backward ends: branches that it does not use are never asked for."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._saved = [(number, ref) for number, ref in self._saved if ref() is not None]
        for _, ref in self._saved:
            saved = ref()
            if saved is not None and saved.stash.on_host:
                saved.stash.give_up_device()
                saved.stash.ahead = False
        self._ahead_bytes = 0
        self._cursor = sys.maxsize
        self._backward = -1

    def _sample(self) -> None:
        allocated = self.backend.allocated() if self.watching else None
        if allocated is not None:
            self.counters.peak_without = max(self.counters.peak_without, allocated + self.arena.live)


class _Traced:
    """A tensor that a compiler saves while it traces: passed through as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def rebuild(self) -> Tensor:
        return self._tensor
