"""Host memory for copies: buffers of exact size from a few slabs, never more than a limit.

A buffer of 1.25 GiB takes 1.25 GiB. The limit counts slabs, so it bounds live copies, idle memory and the rest of
half-used slabs together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_longctx.strategies.activation_offload.backend import DeviceBackend, Event
from lightning_longctx.units import MIB

__all__ = ["HostArena", "HostBuffer"]

_ALIGNMENT = 512
#: Smallest slab. Registering memory with a device costs milliseconds, so small buffers share one.
_SLAB_BYTES = 64 * MIB


@dataclass(eq=False)
class _Slab:
    memory: Tensor
    pinned: bool
    free: list[tuple[int, int, tuple[Event, ...]]] = field(default_factory=list)  # start, stop, what still uses it

    @property
    def idle(self) -> bool:
        return len(self.free) == 1 and self.free[0][:2] == (0, self.memory.numel())


@dataclass(eq=False)
class HostBuffer:
    """A piece of host memory.

    Attributes:
        memory: uint8 ``[nbytes]``.
        after: events that must have happened before it is written.
        span: bytes it takes, rounded up to the alignment.
    """

    memory: Tensor
    after: tuple[Event, ...]
    span: tuple[int, int]
    slab: _Slab


class HostArena:
    """Hands out host memory.

    Args:
        backend: makes slabs, and knows whether an event has happened.
        limit: bytes of all slabs together.
        slab_bytes: smallest slab. Default 64 MiB.

    Attributes:
        peak: largest number of bytes in use so far.
        reserved: bytes of all slabs.
        pageable: whether some slab could not be pinned.
    """

    def __init__(self, backend: DeviceBackend, limit: int, slab_bytes: int = _SLAB_BYTES) -> None:
        self._backend = backend
        self.limit = limit
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        # Buffers come back when autograd drops a node: in any thread, and by the garbage collector even in the middle
        # of `reserve`. So coming back is one append, and the books are done by the next call.
        self._returned: deque[tuple[HostBuffer, tuple[Event, ...]]] = deque()
        self._lock = threading.Lock()
        self._live = self.peak = self.reserved = 0
        self.pageable = False

    def reserve(self, nbytes: int) -> HostBuffer | None:
        """Return a buffer of ``nbytes``, or None if the limit does not allow it."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._settle()
            slab, place = self._best_fit(size)
            if slab is None:
                slab, place = self._grow(size), 0
            if slab is None:
                return None
            start, stop, after = slab.free.pop(place)
            if stop > start + size:
                slab.free.insert(place, (start + size, stop, after))
            self._live += size
            self.peak = max(self.peak, self._live)
            return HostBuffer(slab.memory[start : start + nbytes], after, (start, start + size), slab)

    def release(self, buffer: HostBuffer, last: Sequence[Event]) -> None:
        """Take a buffer back, to be written again after the events in ``last``."""
        self._returned.append((buffer, tuple(last)))

    @property
    def live(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._settle()
            return self._live

    def close(self) -> None:
        """Give idle slabs back to the system; those in use stay."""
        with self._lock:
            self._settle()
            self._drop_idle()

    def _settle(self) -> None:
        while self._returned:
            buffer, last = self._returned.popleft()
            start, stop = buffer.span
            self._live -= stop - start
            self._merge(buffer.slab, start, stop, _unfinished(last, self._backend))

    def _drop_idle(self) -> None:
        for slab in [slab for slab in self._slabs if slab.idle]:
            self._drop(slab)

    def _best_fit(self, size: int) -> tuple[_Slab | None, int]:
        fits = [
            (stop - start, number, place)
            for number, slab in enumerate(self._slabs)
            for place, (start, stop, _) in enumerate(slab.free)
            if stop - start >= size
        ]
        if not fits:
            return None, 0
        _, number, place = min(fits)
        return self._slabs[number], place

    def _grow(self, size: int) -> _Slab | None:
        if self.reserved + size > self.limit:
            self._drop_idle()
        room = self.limit - self.reserved
        if size > room:
            return None
        nbytes = max(size, min(self._slab_bytes, room // _ALIGNMENT * _ALIGNMENT))
        memory, pinned = self._backend.empty_host(nbytes)
        slab = _Slab(memory, pinned, [(0, nbytes, ())])
        self.pageable |= not pinned
        self.reserved += nbytes
        self._slabs.append(slab)
        return slab

    def _drop(self, slab: _Slab) -> None:
        for event in slab.free[0][2]:
            self._backend.finish(event)
        if slab.pinned:
            self._backend.free_host(slab.memory)
        self._slabs.remove(slab)
        self.reserved -= slab.memory.numel()

    def _merge(self, slab: _Slab, start: int, stop: int, events: tuple[Event, ...]) -> None:
        free = [*slab.free, (start, stop, events)]
        free.sort(key=lambda piece: piece[0])
        slab.free = [free[0]]
        for piece in free[1:]:
            first, last, before = slab.free[-1]
            if last == piece[0]:
                slab.free[-1] = (first, piece[1], _unfinished((*before, *piece[2]), self._backend))
            else:
                slab.free.append(piece)


def _unfinished(events: tuple[Event, ...], backend: DeviceBackend) -> tuple[Event, ...]:
    return tuple(event for event in dict.fromkeys(events) if not backend.is_done(event))
