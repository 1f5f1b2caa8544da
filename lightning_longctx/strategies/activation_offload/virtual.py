"""A device made of host memory: copies that happen as late as is allowed, and a record of every order between them.

It serves training on CPU, where it shows what would be moved. In tests it is the adversary: a copy runs only when
somebody waits for it, what it reads may have been given up by then, and memory starts and ends as poison (bytes 0xFF:
NaN in every floating dtype). A missing order turns into wrong numbers on any laptop.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_longctx.strategies.activation_offload.backend import DeviceBackend, Event

__all__ = ["Edge", "VirtualBackend"]

_POISON = 0xFF


class Edge(NamedTuple):
    """``after`` starts when ``before`` is done. Copies are named by direction and number, as ``out 3``."""

    before: str
    after: str


@dataclass(eq=False)
class _Copy:
    name: str
    source: weakref.ref[Tensor] | Tensor
    target: weakref.ref[Tensor] | Tensor
    after: list[_Copy] = field(default_factory=list)
    done: bool = False


class VirtualBackend(DeviceBackend):
    """Copies on the CPU, in the order of two virtual streams.

    Args:
        device: of activations; ``cpu`` but for simulations.
        late: run a copy when somebody waits for it, and not before. Default false: at once.
        poison: fill new device memory and freed host memory with NaN. Default false.
        host_device: where host buffers live. Default ``cpu``; ``meta`` tells host from device memory in a simulation
            on fake tensors.

    Attributes:
        edges: with ``late`` or ``poison``, every order that was asked for.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        late: bool = False,
        poison: bool = False,
        host_device: str = "cpu",
    ) -> None:
        super().__init__(torch.device(device))
        self.late, self.poison, self.host_device = late, poison, host_device
        self.edges: list[Edge] = []
        self._queues: dict[str, list[_Copy]] = {"out": [], "in": []}
        self._count = 0

    @override
    def empty_host(self, nbytes: int) -> tuple[Tensor, bool]:
        return self._empty(nbytes, self.host_device), True

    @override
    def free_host(self, buffer: Tensor) -> None:
        if self.poison:
            buffer.fill_(_POISON)

    @override
    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        # As on a device, a stream does not keep alive what it reads: it is read later, from wherever it was.
        return self._enqueue("out", weakref.ref(source), host, after)

    @override
    def copy_in(self, host: Tensor, after: Sequence[Event]) -> tuple[Tensor, Event]:
        memory = self._empty(host.numel(), str(self.device))
        return memory, self._enqueue("in", host, weakref.ref(memory), after)

    @override
    def wait(self, event: Event) -> None:
        self._record(event.name, "compute")
        self._run(event)

    @override
    def is_done(self, event: Event) -> bool:
        return bool(event.done)

    @override
    def finish(self, event: Event) -> None:
        self._record(event.name, "host")
        self._run(event)

    @override
    def abandon(self, memory: Tensor, event: Event) -> None:
        self._record(event.name, "reuse")
        self._run(event)

    def _empty(self, nbytes: int, device: str) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer.fill_(_POISON) if self.poison else buffer

    def _record(self, before: str, after: str) -> None:
        if self.late or self.poison:
            self.edges.append(Edge(before, after))

    def _enqueue(
        self,
        stream: str,
        source: weakref.ref[Tensor] | Tensor,
        target: weakref.ref[Tensor] | Tensor,
        after: Sequence[Event],
    ) -> _Copy:
        self._count += 1
        copy = _Copy(f"{stream} {self._count}", source, target, list(after))
        for name in ("compute", *(event.name for event in after)):
            self._record(name, copy.name)
        self._queues[stream].append(copy)
        if not self.late:
            self._run(copy)
        return copy

    def _run(self, copy: _Copy) -> None:
        """Run a copy, and before it those ahead of it in its stream and those it waits for."""
        queue = self._queues[copy.name.partition(" ")[0]]
        while not copy.done:
            first = queue.pop(0)
            for other in first.after:
                self._run(other)
            first.after.clear()
            source, target = (x() if isinstance(x, weakref.ref) else x for x in (first.source, first.target))
            if target is not None and source is not None:
                target.copy_(source)
            elif target is not None:
                target.fill_(_POISON)  # the source was given up before it was read
            first.done = True
