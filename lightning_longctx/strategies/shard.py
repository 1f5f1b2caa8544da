"""Sharding a module with FSDP2: which blocks become units, and what is checked before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_longctx.errors import ConfigurationError

__all__ = ["check_equal_parameters", "find_blocks", "shard_module"]

# Words hashed at a time: 2^22 of them need 96 MiB of int64 scratch, whatever the size of the parameter.
_HASH_CHUNK = 2**22


def find_blocks(module: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module]:
    """Find the repeated blocks that become FSDP units of their own.

    Args:
        module: the whole module.
        names: class names of the blocks. None finds them: the classes in a Hugging Face model's
            ``_no_split_modules``, else the children of the ``ModuleList`` with the most parameters that lies in no
            other ``ModuleList``.

    Returns:
        The blocks in the module's order; none for a module without repeated blocks (the root then holds everything).

    Raises:
        ConfigurationError: a name in ``names`` that no submodule's class has.
    """
    if names is not None:
        classes = {type(child).__name__ for child in module.modules()}
        unknown = sorted(set(names) - classes)
        if unknown:
            likely = sorted(name for name in classes if "Layer" in name or "Block" in name)
            fix = f"Name classes of repeated blocks, such as {likely}."
            raise ConfigurationError("strategy.blocks", "must name classes of submodules", unknown, fix)
        return _outermost(module, set(names))
    announced: set[str] = set()
    for child in module.modules():
        announced.update(getattr(child, "_no_split_modules", None) or ())
    blocks = _outermost(module, announced)
    if blocks:
        return blocks
    lists = _outermost(module, {"ModuleList"})
    largest = max(lists, key=_num_parameters, default=None)
    return [] if largest is None else list(largest.children())


def shard_module(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    forward_methods: Iterable[str],
) -> None:
    """Shard the blocks, then the root with all that is left, in place.

    The root is never resharded after its forward: its parameters (embedding, final norm, head) are used at both ends
    of the step. ``forward_methods`` are entry points other than ``forward`` that gather the root's parameters when
    called.
    """
    for block in blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for name in forward_methods:
        if not callable(getattr(module, name, None)):
            raise ConfigurationError(
                "strategy.forward_methods",
                f"must name methods of {type(module).__name__}",
                repr(name),
                "Check the name.",
            )
        register_fsdp_forward_method(module, name)


def check_equal_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare a hash of every parameter and buffer over the ranks of ``group``, since sharding does not broadcast.

    Raises:
        ConfigurationError: the first tensor that differs, by name, on every rank.
    """
    if group is None:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    if not named:
        return
    hashes = torch.stack([_hash(tensor) for _, tensor in named]).to(named[0][1].device)
    counts = torch.tensor([len(named)], dtype=torch.int64, device=hashes.device)
    if not _equal(counts, group):
        fix = "Build the same model on every rank."
        raise ConfigurationError("model", "must have the same parameters on every rank", f"{len(named)} here", fix)
    if _equal(hashes, group):
        return
    low, high = _extremes(hashes, group)
    first = int((low != high).nonzero()[0])
    raise ConfigurationError(
        f"model.{named[first][0]}",
        "must start equal on every rank (sharding does not broadcast)",
        f"{int((low != high).sum())} of {len(named)} tensors that differ",
        "Seed every rank alike before the model is built: `L.seed_everything(0)`, or `seed_everything: 0` in YAML.",
    )


def _outermost(module: nn.Module, class_names: set[str]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if type(child).__name__ in class_names else _outermost(child, class_names)
    return found


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _hash(tensor: Tensor) -> Tensor:
    """Position-dependent checksum of a tensor's bits: int64, 0-d, on the host."""
    flat = tensor.detach().contiguous().flatten()
    width = torch.int32 if flat.numel() * flat.element_size() % 4 == 0 and flat.element_size() <= 4 else torch.uint8
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in torch.split(flat.view(width), _HASH_CHUNK):
        # Weights in 1..65,521 (a prime), so that exchanged values show; int64 sums may wrap, alike on every rank.
        places = torch.arange(part.numel(), device=part.device).remainder_(65_521).add_(1)
        total = total * 31 + (part.to(torch.int64) * places).sum()
    return total.cpu()


def _extremes(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return low, high


def _equal(values: Tensor, group: dist.ProcessGroup) -> bool:
    low, high = _extremes(values, group)
    return bool(torch.equal(low, high))
