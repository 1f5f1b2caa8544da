"""What a saved tensor is: a range of one storage with a view on it, a weight, or something that cannot move.

The unit of memory is the storage, so the unit of copying is too: a range of bytes, from which every view (transposed,
partial, expanded) is rebuilt with its own shape and strides. Keys of a view's address alone merge ``x`` with ``x.t()``
or meet freed memory again; here a key is a living storage, a range and a version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["InPlaceCheck", "StorageRange", "Weights", "flat_bytes", "is_movable", "range_of", "storage_key", "view_of"]

_ALIGNMENT = 512  # bytes; what the caching allocators align to, so a view meets the same alignment after its return


class StorageRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of a storage.

    Attributes:
        storage: identity of the storage; unique while somebody holds a (weak) reference to it.
        start: first byte.
        stop: byte after the last.
    """

    storage: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


def storage_key(tensor: Tensor) -> int:
    """Identity of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def is_movable(tensor: Tensor) -> bool:
    """Whether the tensor is plain memory: strided, no wrapper around other tensors, nothing left to be conjugated."""
    plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def range_of(tensor: Tensor) -> StorageRange:
    """The bytes to copy for a view: its own extent, or its whole storage if the extent covers half of it.

    Other views of a storage mostly follow (q, k and v of one product; documents of one row), and without offload any
    of them would hold the whole storage too.
    """
    item = tensor.element_size()
    whole = tensor.untyped_storage().nbytes() // item * item
    if tensor.numel() == 0:
        return StorageRange(storage_key(tensor), 0, 0)
    first = int(tensor.storage_offset()) * item
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if 2 * extent * item >= whole:
        return StorageRange(storage_key(tensor), 0, whole)
    start = first // _ALIGNMENT * _ALIGNMENT
    return StorageRange(storage_key(tensor), start, first + extent * item)


def flat_bytes(tensor: Tensor, span: StorageRange) -> Tensor:
    """The range as uint8 ``[nbytes]``: an alias, without the graph."""
    item = tensor.element_size()
    flat = tensor.detach().as_strided((span.nbytes // item,), (1,), span.start // item)
    return flat.view(torch.uint8)


def view_of(flat: Tensor, start: int, like: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]) -> Tensor:
    """Rebuild a view from the bytes of its range.

    Args:
        flat: uint8 ``[nbytes]``.
        start: where the range starts in the original storage, in bytes.
        like: dtype, shape, strides and storage offset of the original, all but the dtype in elements.
    """
    dtype, size, stride, offset = like
    usable = flat.numel() // dtype.itemsize * dtype.itemsize
    elements = flat[:usable].view(dtype)
    return elements.as_strided(size, stride, elements.storage_offset() + offset - start // dtype.itemsize)


class InPlaceCheck:
    """Autograd's check that a saved tensor was not changed in place, which saved-tensor hooks switch off.

    Keeps the version counter that the tensor shares with its views, and none of its memory.

    Args:
        tensor: as it is saved.
    """

    __slots__ = ("_probe", "_shape", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._probe = tensor.detach()
        if is_movable(tensor):
            # On our own alias, not on the tensor: new data under the old counter.
            self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = tensor._version
        self._shape = tuple(tensor.shape)

    def check(self) -> None:
        """Raise what autograd would.

        Raises:
            RuntimeError: the tensor, or a view that shares its memory, was changed in place after it was saved.
        """
        if self._probe._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{self._probe.dtype} {list(self._shape)}] is at version {self._probe._version}; expected version"
                f" {self._version} instead. (It was saved for backward under activation offload.)"
            )


class Weights:
    """Parameters and buffers, found by their storage: views, frozen weights and those that FSDP2 gathered, too.

    FSDP2 gives a gathered weight a storage of its own, which exists from just before the forward of its unit on. So
    :meth:`add` is called then, each time.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Learn the weights of modules as they are now, without those of their children."""
        for tensor in (t for module in modules for t in (*module._parameters.values(), *module._buffers.values())):
            if tensor is not None and not is_traceable_wrapper_subclass(tensor):
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def prune(self) -> None:
        """Forget storages that are gone."""
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}

    def __contains__(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        return storage_key(tensor) in self._storages
