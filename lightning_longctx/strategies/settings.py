"""Groups of settings of the strategy, small enough to write in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.spelling import nearest

__all__ = ["ProcessSettings", "ReduceGradients", "ShardingSettings", "as_settings"]

ReduceGradients = Literal["every_micro_batch", "last_micro_batch"]

Settings = TypeVar("Settings")


def as_settings(kind: type[Settings], value: Settings | Mapping[str, Any], name: str) -> Settings:
    """Turn a mapping, as YAML and Python users write it, into settings.

    Raises:
        ConfigurationError: neither settings nor a mapping, or an unknown key (the nearest one is named).
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        fix = f"Give {kind.__name__} or a mapping of its fields."
        raise ConfigurationError(f"strategy.{name}", f"must be {kind.__name__}", repr(value), fix)
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            near = nearest(str(key), known)
            fix = f"Did you mean `{near}`?" if near else f"It has: {', '.join(known)}."
            raise ConfigurationError(
                f"strategy.{name}.{key}", f"must be a field of {kind.__name__}", "an unknown key", fix
            )
    return kind(**value)


@dataclass(frozen=True)
class ShardingSettings:
    """How FSDP2 cuts, gathers and reduces.

    Args:
        blocks: the FSDP units: class names (``LlamaDecoderLayer``) or path patterns (``model.layers.*``, with a dot or
            a star). Default None: found, see :func:`~lightning_longctx.strategies.shard.find_blocks`.
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again in backward.
            Default True: at long context memory is what runs out. The root is never resharded.
        forward_methods: further methods of the module that gather the root's parameters when called. The four step
            methods always do.
        reduce_gradients: ``every_micro_batch`` (default) keeps one shard of the gradients; ``last_micro_batch`` reduces
            once a step and keeps whole gradients of all parameters on each rank meanwhile (4 bytes x parameters, also
            in bf16): worth it for small models or slow networks.
        prefetch: how many blocks are gathered ahead of the one that computes. Default 1, FSDP2's own; each more hides
            more latency and holds one more block.
        offload_parameters: keep shards of parameters, gradients and optimizer states in host memory and update there.
            Default False: each step then waits for the bus and for the CPU.
        unsharded_parameters: path patterns of parameters that every rank keeps whole, such as small ones of a layer
            that FSDP2 cannot cut. Their gradients are averaged over all ranks once a step.

    Raises:
        ConfigurationError: an unknown choice, or a prefetch depth below 1.
    """

    blocks: list[str] | None = None
    reshard_after_forward: bool = True
    forward_methods: list[str] = field(default_factory=list)
    reduce_gradients: ReduceGradients = "every_micro_batch"
    prefetch: int = 1
    offload_parameters: bool = False
    unsharded_parameters: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        choices = get_args(ReduceGradients)
        if self.reduce_gradients not in choices:
            got, fix = repr(self.reduce_gradients), "`every_micro_batch` needs less memory."
            raise ConfigurationError("strategy.sharding.reduce_gradients", f"must be one of {list(choices)}", got, fix)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 1:
            got = repr(self.prefetch)
            raise ConfigurationError("strategy.sharding.prefetch", "must be a positive int", got, "1 is the default.")


@dataclass(frozen=True)
class ProcessSettings:
    """How processes talk.

    Args:
        backend: of the process groups. Default None: nccl on CUDA, gloo on CPU; with ``offload_parameters`` on CUDA
            both, ``cpu:gloo,cuda:nccl``, because gradient norms are then computed on the host.
        timeout: of the training collectives. Default 30 minutes, PyTorch's own for gloo. Waiting for data has its own,
            longer one.
    """

    backend: str | None = None
    timeout: timedelta = timedelta(minutes=30)
