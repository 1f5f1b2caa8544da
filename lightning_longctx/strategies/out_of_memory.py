"""A device that runs out of memory: the error says in which phase, what is switched on, and what to switch on next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from lightning_longctx.strategies.memory import MemorySettings, next_switches, switches_of_weights

__all__ = ["advice", "explaining", "is_out_of_memory"]

Phase = Literal["forward", "backward", "optimizer step"]

# How PyTorch's allocator of host memory says it, which serves runs on CPU; it has no class of its own.
_HOST_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_MARK = "__longctx_phase__"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device has no memory left."""
    told = isinstance(error, RuntimeError) and any(message in str(error) for message in _HOST_MESSAGES)
    return told or isinstance(error, torch.OutOfMemoryError)


@contextmanager
def explaining(phase: Phase, settings: Callable[[], MemorySettings]) -> Iterator[None]:
    """Add advice below the message of an out-of-memory error that passes; its class and traceback stay.

    The innermost phase tells: a backward runs inside of the optimizer's step in Lightning.

    Args:
        phase: what runs inside.
        settings: asked when it happens.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not hasattr(error, _MARK):
            setattr(error, _MARK, phase)
            error.args = (f"{error}\n\n{advice(phase, settings())}",)
        raise


def advice(phase: Phase, settings: MemorySettings) -> str:
    """What to do.

    Args:
        phase: in which memory ran out.
        settings: of the run.

    Example:
        >>> print(advice("backward", MemorySettings()).splitlines()[-2])
        Try next: `activation_checkpointing: full` (trainer.strategy.init_args.activation_checkpointing).
    """
    on = ", ".join(f"`{name}`" for name in settings.switched_on())
    lines = [f"LongContextFSDPStrategy: out of memory in the {phase}.", f"Switched on: {on or 'nothing'}."]
    updating = phase == "optimizer step"  # backward is over: no activation is left, whatever the row's length
    switches = switches_of_weights(settings) if updating else next_switches(settings)
    if switches:
        lines.append(f"Try next: `{switches[0].name}` ({next(iter(switches[0].changes))}).")
    elif updating:
        lines.append("Parameters, gradients and optimizer states alone are too much: take more or larger devices.")
        if not settings.sharding.offload_parameters:
            lines.append("Or keep them on the host, which slows each step: `sharding: {offload_parameters: true}`.")
    else:
        lines.append("Every switch is on: shorten `data.max_seq_len`, or take more or larger devices.")
    lines.append("`longctx plan --config run.yaml --device-gb 80` tells what fits, without a device.")
    return "\n".join(lines)
