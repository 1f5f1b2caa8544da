"""From settings to hooks that are in place: for a module whose blocks offload, or for any code inside of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.activation_offload.arena import HostArena
from lightning_longctx.strategies.activation_offload.backend import CudaBackend, DeviceBackend
from lightning_longctx.strategies.activation_offload.blocks import attach
from lightning_longctx.strategies.activation_offload.host_memory import host_limit
from lightning_longctx.strategies.activation_offload.offloader import Offloader
from lightning_longctx.strategies.activation_offload.policy import checkpoint_contexts
from lightning_longctx.strategies.activation_offload.report import OffloadCounters, describe, refuse_nothing_moved
from lightning_longctx.strategies.activation_offload.settings import ActivationOffload, OffloadMode, as_offload
from lightning_longctx.strategies.activation_offload.virtual import VirtualBackend
from lightning_longctx.strategies.matching import match_modules

__all__ = ["RunningOffload", "backend_for", "check_with_checkpointing", "offload_activations", "start_offload"]

_FIELD = "strategy.activation_offload"


def backend_for(device: torch.device) -> DeviceBackend:
    """The backend of a device.

    Raises:
        ConfigurationError: neither CUDA nor CPU.
    """
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "cpu":
        return VirtualBackend(device)
    fix = "Write `activation_offload: none`, or add a DeviceBackend for it."
    raise ConfigurationError(_FIELD, "works on cuda and cpu", device.type, fix)


def check_with_checkpointing(settings: ActivationOffload, checkpointing: str) -> None:
    """Refuse levels that could not act, before anything is built.

    Args:
        settings: of the offload.
        checkpointing: mode of the strategy's activation checkpointing.

    Raises:
        ConfigurationError: ``all`` where each block is computed again, or ``policy`` where nothing is kept selectively.
    """
    if settings.mode == "none":
        return
    if settings.level == "all" and checkpointing in ("full", "selective"):
        fix = "Leave the level out: block inputs move. Or write `level: policy` with `selective`."
        rule = f"cannot see inside of blocks with activation_checkpointing {checkpointing}"
        raise ConfigurationError(f"{_FIELD}.level", rule, "all", fix)
    if settings.level == "policy" and checkpointing != "selective":
        fix = "Write `activation_checkpointing: selective`, or leave the level out."
        rule = "moves what activation_checkpointing selective keeps"
        raise ConfigurationError(f"{_FIELD}.level", rule, f"policy with {checkpointing}", fix)


def start_offload(settings: ActivationOffload, device: torch.device, ranks_per_node: int) -> RunningOffload | None:
    """A running offload, or None for mode none; arguments as of :class:`RunningOffload`."""
    return None if settings.mode == "none" else RunningOffload(settings, device, ranks_per_node)


class RunningOffload:
    """Offload as it runs in one process.

    Args:
        settings: what moves and when; a mode other than none.
        device: of the computation.
        ranks_per_node: processes that share the host's memory. Default 1.
        backend: who copies; None for the device's own.

    Raises:
        ConfigurationError: a device without backend, or a host limit beyond what there is.
    """

    def __init__(
        self,
        settings: ActivationOffload,
        device: torch.device,
        ranks_per_node: int = 1,
        backend: DeviceBackend | None = None,
    ) -> None:
        self.settings = settings
        self._backend = backend or backend_for(device)
        self._arena = HostArena(self._backend, host_limit(settings, ranks_per_node))
        self._offloader = Offloader(settings, self._backend, self._arena)
        self._reported = False

    @property
    def counters(self) -> OffloadCounters:
        """What was moved since the start."""
        return self._offloader.counters

    @property
    def host_bytes(self) -> tuple[int, int, int]:
        """Host memory in bytes: in use now, in use at most so far, and taken from the system."""
        return self._arena.live, self._arena.peak, self._arena.reserved

    def attach(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Callable[[], None]:
        """Let modules offload, see :func:`~lightning_longctx.strategies.activation_offload.blocks.attach`.

        Args:
            module: the whole module.
            blocks: the repeated ones, used unless ``modules`` names others.

        Raises:
            ConfigurationError: names without a match, or no repeated blocks.
        """
        names = self.settings.modules
        chosen = blocks if names is None else match_modules(module, names, f"{_FIELD}.modules")
        if not chosen:
            fix = "Name the modules whose activations move in `modules`."
            raise ConfigurationError(_FIELD, "needs repeated blocks", f"{type(module).__name__} without any", fix)
        return attach(module, chosen, self._offloader)

    def watch(
        self, optimizers: Iterable[Optimizer], say: Callable[[str], None], group: dist.ProcessGroup | None = None
    ) -> None:
        """Report after the first step.

        Args:
            optimizers: one of them steps first, on all ranks the same.
            say: takes the report.
            group: CPU group of the ranks, which raise together or not at all; None for one.
        """

        def after_step(*_: Any) -> None:
            text = self.report(group)
            if text is not None:
                say(text)

        for optimizer in optimizers:
            optimizer.register_step_post_hook(after_step)

    @contextmanager
    def everywhere(self, module: nn.Module | None) -> Iterator[None]:
        """Offload whatever is saved inside; see :func:`offload_activations`."""
        if module is not None:
            self._offloader.weights.add(module.modules())
        self.counters.calls += 1
        with self._offloader.hooks(None):
            yield

    def checkpoint_contexts(self, policy: Callable[..., Any]) -> Callable[[], tuple[Any, Any]]:
        """A ``context_fn`` for PyTorch's non-reentrant checkpoint that offloads what ``policy`` says.

        Args:
            policy: see :func:`~lightning_longctx.strategies.activation_offload.policy.checkpoint_contexts`.
        """
        return partial(checkpoint_contexts, policy, self._offloader)

    def report(self, group: dist.ProcessGroup | None = None) -> str | None:
        """The report after the first step; None later.

        Args:
            group: CPU group of ranks that all ask at this point; None for one.

        Raises:
            ConfigurationError: nothing moved, on none of these ranks.
        """
        if self._reported:
            return None
        self._reported = True
        self._offloader.watching = False
        if not _any_moved(self.counters.bytes_out, group):
            refuse_nothing_moved(self.counters, self.settings)
        host = (self._arena.peak, self._arena.limit)
        waited, peak = self._backend.waited_seconds(), self._backend.peak_allocated()
        return describe(self.counters, self.settings, host, waited, peak)

    def metrics(self) -> dict[str, float]:
        """What a logged step shows: this rank, since the start. Does not wait for the device."""
        return self.counters.as_metrics(self._arena.peak, self._backend.waited_seconds())

    def close(self) -> None:
        """Give host memory back that no graph needs."""
        self._arena.close()


@contextmanager
def offload_activations(
    mode: OffloadMode | ActivationOffload | dict[str, Any] = "async",
    module: nn.Module | None = None,
    device: torch.device | str | None = None,
    backend: DeviceBackend | None = None,
) -> Iterator[RunningOffload]:
    """Move what autograd saves inside to host memory, whoever trains.

    Backward may run inside or after it, once or several times: each graph owns its copies. Inside there are no blocks:
    every saved tensor moves that is large enough and no weight, in the order in which it was saved, so
    ``keep_last_blocks`` is 0 and ``level`` is ``all``; ``device_limit_gib`` keeps the newest on the device. Around
    ``checkpoint(block, x)`` it moves the inputs of the checkpoints.

    Args:
        mode: ``sync``, ``async``, or settings.
        module: whose weights and buffers never move, whatever view of them is saved. Default None: only parameters and
            their views are recognized.
        device: of the computation. Default None: the module's first parameter's, else ``cuda`` where there is one.
        backend: who copies; None for the device's own.

    Yields:
        The running offload, with ``counters`` and ``report()``.

    Raises:
        ConfigurationError: settings that cannot act here.

    Example:
        >>> x = torch.randn(512, 512, requires_grad=True)
        >>> with offload_activations({"mode": "sync", "min_tensor_mib": 0}) as offload:
        ...     loss = x.sin().exp().sum()
        >>> loss.backward()
        >>> offload.counters.bytes_out == offload.counters.bytes_in == 2 * 4 * 512 * 512
        True
    """
    settings = _without_blocks(as_offload(mode))
    if settings is None:
        raise ConfigurationError("mode", "must be sync or async", "none", "Leave the context out.")
    if device is None:
        first = next(module.parameters(), None) if module is not None else None
        device = first.device if first is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    running = RunningOffload(settings, torch.device(device), backend=backend)
    with running.everywhere(module):
        yield running


def _any_moved(nbytes: int, group: dist.ProcessGroup | None) -> bool:
    """Whether some rank moved something: the row of one may be too short, and it must not end alone."""
    most = torch.tensor([nbytes])
    if group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return bool(most)


def _without_blocks(settings: ActivationOffload) -> ActivationOffload | None:
    """The same settings where there are no blocks.

    Raises:
        ConfigurationError: settings of blocks that were changed.
    """
    if settings.mode == "none":
        return None
    default = ActivationOffload(mode=settings.mode)
    if settings.modules is not None or settings.level == "policy" or settings.keep_last_blocks > 1:
        fix = "Use LongContextFSDPStrategy(activation_offload=...), or leave modules, level and keep_last_blocks out."
        raise ConfigurationError("mode", "has no blocks in a context", repr(settings), fix)
    assert default.keep_last_blocks == 1
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    return ActivationOffload(**{**values, "level": "all", "keep_last_blocks": 0})
