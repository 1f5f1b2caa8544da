"""The device behind activation offload: two copy streams, their order, and host buffers. Nothing else names a device.

Six orders must hold, whatever runs when:

1. a copy out starts after what was computed before it;
2. device memory is given up after its copy out is done;
3. a copy in starts after the copy out of the same bytes;
4. memory for a copy in comes from the computing stream, so the copy waits for what that memory was used for before;
5. the computation waits for the copy in before it reads;
6. a host buffer is written again after the copy in from it is done.

Streams wait for one another through events; the host waits for none of them while training goes on.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError

__all__ = ["CudaBackend", "DeviceBackend", "Event", "check_pinned_settings"]

Event = Any

# Pairs of timing events that wait to be read.
_MOST_STALLS = 1024


class DeviceBackend(ABC):
    """Copies between a device and host memory.

    Args:
        device: where activations live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def empty_host(self, nbytes: int) -> tuple[Tensor, bool]:
        """Return uint8 ``[nbytes]`` of host memory, exactly so much, and whether it is pinned."""

    @abstractmethod
    def free_host(self, buffer: Tensor) -> None:
        """Undo the pinning of a buffer that nobody copies to or from any more."""

    @abstractmethod
    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Start to copy uint8 ``source`` to ``host``, after all computation so far and the given events."""

    @abstractmethod
    def copy_in(self, host: Tensor, after: Sequence[Event]) -> tuple[Tensor, Event]:
        """Start to copy ``host`` into new device memory, after the given events; returns it with its event."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the computation wait for an event; the host goes on."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether an event has happened."""

    @abstractmethod
    def finish(self, event: Event) -> None:
        """Let the host wait for an event."""

    @abstractmethod
    def abandon(self, memory: Tensor, event: Event) -> None:
        """Give up the memory of a copy in that nothing waited for, safely."""

    def allocated(self) -> int | None:
        """Bytes allocated on the device now; None if unknown. Does not wait."""
        return None

    def peak_allocated(self) -> int | None:
        """Largest :meth:`allocated` since the process, or whoever else, last reset it; None if unknown."""
        return None

    def waited_seconds(self) -> float:
        """How long the computation stood still for copies, as far as it is known now. Does not wait."""
        return 0.0


class CudaBackend(DeviceBackend):
    """CUDA: one stream for each direction, host memory pinned in exactly the size that is needed.

    PyTorch's own allocator of pinned memory rounds each buffer up to a power of two, at worst to twice its size. So
    memory is taken from the ordinary allocator and registered with CUDA.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
        check_pinned_settings(os.environ)
        self._out = torch.cuda.Stream(self.device)
        self._in = torch.cuda.Stream(self.device)
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0

    @override
    def empty_host(self, nbytes: int) -> tuple[Tensor, bool]:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        buffer.zero_()  # touches each page here, where the process runs, rather than inside of the registration
        pinned = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)) == 0
        if not pinned:
            self._forget_error()
        return buffer, pinned

    @override
    def free_host(self, buffer: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    @override
    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            self._out.wait_event(event)
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        return self._out.record_event()

    @override
    def copy_in(self, host: Tensor, after: Sequence[Event]) -> tuple[Tensor, Event]:
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)  # of the computing stream
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            self._in.wait_event(event)
        with torch.cuda.stream(self._in):
            memory.copy_(host, non_blocking=True)
        return memory, self._in.record_event()

    @override
    def wait(self, event: Event) -> None:
        compute = torch.cuda.current_stream(self.device)
        if event.query():
            return
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(event)
        behind.record(compute)
        self._stalls.append((before, behind))
        if len(self._stalls) >= _MOST_STALLS:  # nobody may ever ask how long they took
            self.waited_seconds()

    @override
    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    @override
    def finish(self, event: Event) -> None:
        event.synchronize()

    @override
    def abandon(self, memory: Tensor, event: Event) -> None:
        memory.record_stream(self._in)

    @override
    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    @override
    def peak_allocated(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)

    @override
    def waited_seconds(self) -> float:
        running = []
        for before, behind in self._stalls:
            if behind.query():
                self._waited += before.elapsed_time(behind) / 1000
            else:
                running.append((before, behind))
        self._stalls = running
        return self._waited

    def _forget_error(self) -> None:
        """Take note of a registration that failed; CUDA would report it at the next kernel, as if that had failed."""
        try:
            torch.empty(1, device=self.device).zero_()
        except RuntimeError:
            return


def check_pinned_settings(environment: Any) -> None:
    """Refuse a pair of settings of PyTorch's pinned allocator that hands out buffers smaller than asked for.

    Args:
        environment: a mapping such as ``os.environ``.

    Raises:
        ConfigurationError: ``pinned_max_round_threshold_mb`` below ``pinned_max_cached_size_mb``.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        pairs = (entry.partition(":") for entry in environment.get(name, "").split(","))
        values = {key.strip(): value.strip() for key, _, value in pairs}
        threshold, cached = (values.get(f"pinned_max_{key}_mb") for key in ("round_threshold", "cached_size"))
        if threshold is not None and cached is not None and float(threshold) < float(cached):
            got = f"{threshold} and {cached}"
            fix = "Raise `pinned_max_round_threshold_mb`, or leave both out: activation offload needs neither."
            rule = "must have pinned_max_round_threshold_mb of at least pinned_max_cached_size_mb (else: heap overflow)"
            raise ConfigurationError(name, rule, got, fix)
