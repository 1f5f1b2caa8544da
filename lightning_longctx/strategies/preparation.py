"""From the user's module to a sharded one: real weights, precision, recompute, FSDP2, all one unit at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing, apply_checkpointing
from lightning_longctx.strategies.activation_offload import RunningOffload
from lightning_longctx.strategies.agreement import check_equal_hashes, hash_tensors, named_tensors
from lightning_longctx.strategies.initialization import fill_meta, init_by_name, meta_names
from lightning_longctx.strategies.mesh import Layout
from lightning_longctx.strategies.settings import ShardingSettings
from lightning_longctx.strategies.shard import find_blocks, shard_module

__all__ = ["prepare_module"]


def prepare_module(
    module: nn.Module,
    layout: Layout,
    policy: MixedPrecisionPolicy,
    convert: Callable[[nn.Module], nn.Module],
    sharding: ShardingSettings,
    checkpointing: ActivationCheckpointing,
    seed: int,
    device: torch.device,
    offload: RunningOffload | None = None,
) -> None:
    """Shard a module in place.

    Args:
        module: real, or on the meta device in parts or whole.
        layout: over which ranks.
        policy: FSDP2's, of precision.
        convert: casts the parameters of a unit.
        sharding: units, gathering, reduction.
        checkpointing: which blocks are computed again in backward.
        seed: of weights that ``reset_parameters`` draws.
        device: of the computation.
        offload: moves saved activations of blocks; None for none.

    Raises:
        ConfigurationError: weights that cannot be made or differ between ranks, or settings that do not fit the module.
    """
    blocks = find_blocks(module, sharding.blocks)
    moves_kept = offload is not None and offload.settings.level == "policy"
    apply_checkpointing(module, blocks, checkpointing, offload.checkpoint_contexts if offload and moves_kept else None)
    if offload is not None:
        offload.attach(module, blocks)
    fill = getattr(module, "fill_weights", None) or partial(init_by_name, module, seed=seed)
    order = [name for name, _ in named_tensors(module)]
    hashes: dict[str, Tensor] = {}

    def prepare(name: str, unit: nn.Module) -> None:
        names = meta_names(unit, name)
        if names:
            fill_meta(module, names, fill)
        convert(unit)
        _move(unit, device)
        hashes.update(hash_tensors(named_tensors(unit, name)))

    shard_module(module, blocks, layout.shard_mesh, policy, sharding, prepare)
    check_equal_hashes({name: hashes[name] for name in order if name in hashes}, layout.topology.token_group, device)
    _settle(module, device, sharding.offload_parameters)


def _move(unit: nn.Module, device: torch.device) -> None:
    """Move what is not sharded: sharded parameters may have to stay in host memory."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
    for child in unit.modules():
        for key, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[key] = buffer.to(device)


def _settle(module: nn.Module, device: torch.device, offloaded: bool) -> None:
    """Tell the module its device, and move what lies beside parameters and buffers (the states of metrics)."""
    if not offloaded:
        module.to(device)
        return
    module._device = device  # type: ignore[assignment]  # what LightningModule.device returns
    for child in module.modules():
        if not isinstance(child, FSDPModule) and next(child.parameters(), None) is None:
            child.to(device)
