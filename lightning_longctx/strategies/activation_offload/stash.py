"""One range of one storage on its way from the device to the host and back, owned by the graph that saved it.

Autograd nodes hold :class:`Saved` handles, handles hold their :class:`Stash`, and a stash holds its host buffer. When
the last node goes (after its backward, with an abandoned graph, by an exception), so does the buffer. There is no list
of what is out, so nothing can be left in it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.profiler import record_function

from lightning_longctx.strategies.activation_offload.arena import HostArena, HostBuffer
from lightning_longctx.strategies.activation_offload.backend import DeviceBackend, Event
from lightning_longctx.strategies.activation_offload.identity import InPlaceCheck, StorageRange, view_of

__all__ = ["Kept", "Saved", "Stash"]


class Stash:
    """The bytes of a storage range: on the device, on the host, or both.

    Args:
        flat: uint8 ``[nbytes]``, an alias of the memory on the device.
        span: the range.
        arena: where host buffers come from.
        backend: who copies.
        on_end: called with the stash when the last node that needs it is gone.
    """

    def __init__(
        self,
        flat: Tensor,
        span: StorageRange,
        arena: HostArena,
        backend: DeviceBackend,
        on_end: Callable[[Stash], None],
    ) -> None:
        self.span = span
        self.group = 0
        self.users = 0
        self.fetched = 0  # how often it came back
        self.ahead = False  # fetched, and not asked for yet
        self._awaited = False  # somebody waited for what came back
        self._waiting = 0  # handles that have not read it since
        self._device: Tensor | None = flat
        self._host: HostBuffer | None = None
        self._out: Event | None = None
        self._in: Event | None = None
        self._last: Event | None = None  # the last copy that touches the host buffer
        self._arena, self._backend, self._on_end = arena, backend, on_end

    @property
    def nbytes(self) -> int:
        """Length of the range in bytes."""
        return self.span.nbytes

    @property
    def on_device(self) -> bool:
        """Whether device memory holds it, or will when a copy that has been started is done."""
        return self._device is not None

    @property
    def on_host(self) -> bool:
        """Whether host memory holds it, or will when a copy that has been started is done."""
        return self._host is not None

    def start_out(self) -> bool:
        """Start the copy to the host; false if there is no room for it."""
        assert self._device is not None
        self._host = self._arena.reserve(self.nbytes)
        if self._host is None:
            return False
        with record_function("longctx::offload"):
            self._out = self._last = self._backend.copy_out(self._device, self._host.memory, self._host.after)
        self._host.after = ()
        return True

    def give_up_device(self) -> None:
        """Free the device memory, in the order of the computation: after the copy to the host."""
        if self._device is not None and self._out is not None and self._in is None:
            self._backend.wait(self._out)  # memory that came back was waited for when it was read
        self._forget_device()

    def start_in(self) -> None:
        """Start the copy back to the device."""
        assert self._host is not None
        assert self._out is not None
        with record_function("longctx::offload"):
            self._device, self._in = self._backend.copy_in(self._host.memory, (self._out,))
        self._last = self._in
        self.fetched += 1
        self._waiting = self.users
        self._awaited = False

    def read(self) -> Tensor:
        """Return the bytes on the device, which the computation may read from now on."""
        assert self._device is not None
        if self._in is not None:
            self._backend.wait(self._in)  # each time: the next reader may compute on another stream
            self._awaited = True
        return self._device

    def was_read(self) -> None:
        """Count one handle that has its tensor; after the last one the device memory is free again."""
        self._waiting -= 1
        if self._waiting <= 0 and self.fetched:
            self._forget_device()

    def _forget_device(self) -> None:
        if self._device is not None and self._in is not None and not self._awaited:
            self._backend.abandon(self._device, self._in)
        self._device = self._in = None

    def __del__(self) -> None:
        self._on_end(self)
        self._forget_device()
        if self._host is not None and self._last is not None:
            self._arena.release(self._host, (self._last,))


class Saved:
    """What an autograd node holds in place of a tensor that may move.

    Args:
        stash: its bytes.
        tensor: the one to rebuild.
        number: rises with each handle; backward asks for them roughly in falling order.
    """

    __slots__ = ("__weakref__", "_check", "_like", "_seen", "number", "stash")

    def __init__(self, stash: Stash, tensor: Tensor, number: int) -> None:
        self.stash, self.number = stash, number
        self._seen = -1
        stash.users += 1
        self._like = (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        self._check = InPlaceCheck(tensor)

    def rebuild(self) -> Tensor:
        """Return the tensor, equal in every bit, stride and offset within its range.

        Raises:
            RuntimeError: the original was changed in place after it was saved.
        """
        self._check.check()
        tensor = view_of(self.stash.read(), self.stash.span.start, self._like)
        if self._seen != self.stash.fetched:
            self._seen = self.stash.fetched
            self.stash.was_read()
        return tensor

    def __del__(self) -> None:
        self.stash.users -= 1
        if self._seen != self.stash.fetched:
            self.stash.was_read()


class Kept:
    """What an autograd node holds in place of a tensor that stays: an alias without the graph, to avoid a cycle.

    Args:
        tensor: the one to keep.
    """

    __slots__ = ("_alias", "_check")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        self._check = InPlaceCheck(tensor)

    def rebuild(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        self._check.check()
        return self._alias
