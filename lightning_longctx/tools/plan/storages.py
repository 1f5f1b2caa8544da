"""Counting the storages that are alive while code runs, by what they are for: the memory of a step without a device.

Works on fake tensors and on real ones alike. What a kernel allocates for itself inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CATEGORIES", "HOST", "Segment", "StorageCounter"]

#: Instead of a category: not on the device.
HOST = "host"
#: What device memory is for, in the order of the tables.
CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "exchange")

# Regions that FSDP2 and this suite name for the profiler, and what is allocated inside of them.
_REGIONS = {
    "FSDP::all_gather": "gathered",
    "FSDP::all_gather_copy_out": "gathered",
    "FSDP::post_backward_reshard": "gradients",  # whole ones, where they are reduced later
    "FSDP::post_backward_reduce": "gradients",
    "longctx::exchange": "exchange",
}
_ENTER, _EXIT = torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit
_ALL_TO_ALL = torch.ops.c10d.alltoall_base_


@dataclass
class Segment:
    """The largest use between two marks.

    Attributes:
        name: of the mark.
        peak: largest sum of live bytes on the device.
        parts: the bytes of each category at that moment.
        host: largest sum of live bytes on the host.
    """

    name: str
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    host: int = 0


class _Storage:
    """Bytes of one storage and what they are for."""

    __slots__ = ("category", "nbytes", "ref")

    def __init__(self, nbytes: int, category: str) -> None:
        self.nbytes, self.category = nbytes, category
        self.ref: weakref.ref[Any] | None = None


class StorageCounter(TorchDispatchMode):
    """Counts live storages while it is entered.

    Args:
        device_type: of the device: ``cpu`` stands for it in a simulation.
        vocab_size: tensors of activations whose last dimension is this are logits; None for no such category.

    Attributes:
        segments: finished and running ones, in order.
        live: bytes on the device by category, now.
        host: bytes in host memory, now: on the ``meta`` device, which stands for it, or counted as :data:`HOST`.
        largest: elements and shape of the largest tensor that was made.
    """

    def __init__(self, device_type: str = "cpu", vocab_size: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.host = 0
        self.total = 0
        self.segments = [Segment("start")]
        self.largest: tuple[int, tuple[int, ...]] = (0, ())
        self._device, self._vocabulary = device_type, vocab_size
        self._known: dict[int, _Storage] = {}
        self._scopes: list[str | None] = []
        self._default = "activations"
        self._blocks: list[str] = []

    # -- what the caller says ----------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Start a segment."""
        self.segments.append(Segment(name))
        self._note_peak()

    def watch_blocks(self, names: Sequence[str]) -> None:
        """Start a segment whenever one of these FSDP units begins its forward or backward, and after the last one's."""
        self._blocks = list(names)

    @contextmanager
    def filling(self, category: str) -> Iterator[None]:
        """Count what is allocated inside, and in no narrower region, as ``category``."""
        before, self._default = self._default, category
        try:
            yield
        finally:
            self._default = before

    def count(self, tensor: Tensor, category: str | None = None) -> None:
        """Count the storage of a tensor, or count it as something else from now on."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self._see(local, category)

    # -- what torch calls --------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        counter, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            counter._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # FSDP2 frees gathered weights with it
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shard comes here by itself
        packet = func.overloadpacket
        if packet is _ENTER:
            self._enter_region(str(args[0]))
        elif packet is _EXIT and self._scopes:
            self._scopes.pop()
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self._see(output)
        else:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._see(leaf)
        if packet is _ALL_TO_ALL:
            self._see(args[0], "exchange")  # whatever region it is in
        return output

    def _enter_region(self, name: str) -> None:
        region, _, rest = name.partition(" ")
        self._scopes.append(_REGIONS.get(region))
        block = rest.strip("()")
        if block not in self._blocks:
            return
        if region == "FSDP::pre_forward":
            self.mark(f"forward {block}")
        elif region == "FSDP::pre_backward":
            self.mark(f"backward {block}")
        elif region == "FSDP::post_forward" and block == self._blocks[-1]:
            self.mark("loss")

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, category: str | None = None) -> None:
        kind = tensor.device.type
        if kind not in (self._device, "meta"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            known = _Storage(0, HOST if kind == "meta" != self._device else category or self._category(tensor))
            known.ref = weakref.ref(storage, lambda _, key=key: self._gone(key))  # type: ignore[misc]
            self._known[key] = known
            self._change(known, storage.nbytes())
            if tensor.numel() > self.largest[0]:
                self.largest = (tensor.numel(), tuple(tensor.shape))
        elif category is not None and category != known.category:
            nbytes = known.nbytes
            self._change(known, 0)
            known.category = category
            self._change(known, nbytes)

    def _category(self, tensor: Tensor) -> str:
        scope = next((name for name in reversed(self._scopes) if name is not None), None)
        if scope is not None:
            return scope
        vocabulary = self._vocabulary
        if self._default == "activations" and vocabulary and tensor.dim() > 1 and tensor.shape[-1] == vocabulary:
            return "logits"
        return self._default

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is not None:
            if known.nbytes == 0:
                scope = next((name for name in reversed(self._scopes) if name is not None), None)
                known.category = scope or known.category
            self._change(known, storage.nbytes())

    def _gone(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._change(known, 0)

    def _change(self, known: _Storage, nbytes: int) -> None:
        difference, known.nbytes = nbytes - known.nbytes, nbytes
        if known.category == HOST:
            self.host += difference
            self.segments[-1].host = max(self.segments[-1].host, self.host)
            return
        self.live[known.category] += difference
        self.total += difference
        if difference > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        segment = self.segments[-1]
        if self.total > segment.peak:
            segment.peak, segment.parts = self.total, dict(self.live)
        segment.host = max(segment.host, self.host)
