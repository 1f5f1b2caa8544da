"""Sharding a module with FSDP2: which blocks become units, what stays whole, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.settings import ShardingSettings

__all__ = ["find_blocks", "find_unsharded", "register_forward_methods", "shard_module"]


def find_blocks(module: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module]:
    """Find the repeated blocks that become FSDP units of their own.

    Args:
        module: the whole module.
        names: class names of the blocks, or patterns of their paths (those with a dot or a star, such as
            ``model.layers.*``; what stands before it in the path need not be written). None finds them: the classes in
            a Hugging Face model's ``_no_split_modules``, else the children of the ``ModuleList`` with the most
            parameters that lies in no other ``ModuleList``: a list of experts can be longer than the list of layers.

    Returns:
        The blocks in the module's order, none inside another; none for a module without repeated blocks (the root then
        holds everything).

    Raises:
        ConfigurationError: a name in ``names`` that no submodule has.
    """
    if names is not None:
        _check_names(module, names)
        return _outermost(module, lambda name, child: any(_is_named(name, child, entry) for entry in names))
    announced: set[str] = set()
    for child in module.modules():
        announced.update(getattr(child, "_no_split_modules", None) or ())
    blocks = _outermost(module, lambda name, child: type(child).__name__ in announced)
    if blocks:
        return blocks
    lists = _outermost(module, lambda name, child: isinstance(child, nn.ModuleList))
    largest = max(lists, key=_num_parameters, default=None)
    return [] if largest is None else list(largest.children())


def find_unsharded(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that stay whole on every rank, by name.

    Raises:
        ConfigurationError: a pattern that matches no parameter.
    """
    named = dict(module.named_parameters())
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            fix = f"Parameters have names such as {next(iter(named), 'none')}."
            raise ConfigurationError(
                "strategy.sharding.unsharded_parameters", "must match names of parameters", repr(pattern), fix
            )
    return {name: value for name, value in named.items() if any(_matches(name, pattern) for pattern in patterns)}


def shard_module(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    settings: ShardingSettings,
    prepare: Callable[[str, nn.Module], None],
) -> None:
    """Shard the blocks, then the root with all that is left, in place.

    The root is never resharded after its forward: its parameters (embedding, final norm, head) are used at both ends
    of the step.

    Args:
        module: the whole module.
        blocks: its FSDP units.
        mesh: one axis to shard over, or an axis of replicas and one to shard over.
        policy: of precision.
        settings: the rest.
        prepare: called with name and module of each unit just before it is sharded; whole tensors that it makes exist
            for one unit at a time.
    """
    _check_ties(module, blocks)
    names = {child: name for name, child in module.named_modules()}
    cuda = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=cuda) if settings.offload_parameters else OffloadPolicy()
    for unit in (*blocks, module):
        if isinstance(unit, FSDPModule):
            continue
        prepare(names[unit], unit)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=settings.reshard_after_forward and unit is not module,
            # Looked up each time: a parameter on the meta device is another object once it is real.
            ignored_params=set(find_unsharded(module, settings.unsharded_parameters).values()),
        )
    assert isinstance(module, FSDPModule)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
        # An expert that no token of this rank reached has no gradient here; the ranks would reduce other tensors each.
        module.set_reduce_scatter_unused_params(True)
    _set_prefetch([block for block in blocks if isinstance(block, FSDPModule)], settings.prefetch)


def register_forward_methods(module: nn.Module, names: Iterable[str]) -> None:
    """Let methods other than ``forward`` gather the root's parameters when called.

    Raises:
        ConfigurationError: a name that is no method.
    """
    for name in names:
        if not callable(getattr(module, name, None)):
            rule = f"must name methods of {type(module).__name__}"
            raise ConfigurationError("strategy.sharding.forward_methods", rule, repr(name), "Check the name.")
        register_fsdp_forward_method(module, name)


def _check_ties(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """FSDP2 keeps a parameter that two modules share only inside one unit; across units it would become two."""
    unit_of = {child: place for place, block in enumerate(blocks) for child in block.modules()}
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for path, child in module.named_modules():
        place = unit_of.get(child, -1)
        for key, parameter in child._parameters.items():
            name, first = seen.setdefault(parameter, (f"{path}.{key}", place)) if parameter is not None else ("", place)
            if first != place:
                fix = "Name blocks that contain both in `sharding.blocks`, or untie them."
                got = f"{name} and {path}.{key} in two units"
                raise ConfigurationError("model", "must tie parameters inside one FSDP unit only", got, fix)


def _set_prefetch(blocks: Sequence[FSDPModule], depth: int) -> None:
    if depth == 1:  # what FSDP2 does by itself, in the order in which the blocks really ran
        return
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + depth]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, place - depth) : place])))


def _check_names(module: nn.Module, names: Sequence[str]) -> None:
    found = dict(module.named_modules())
    unknown = [entry for entry in names if not any(_is_named(name, child, entry) for name, child in found.items())]
    if unknown:
        classes = {type(child).__name__ for child in found.values()}
        likely = sorted(name for name in classes if "Layer" in name or "Block" in name)
        fix = f"Name classes of repeated blocks, such as {likely}, or patterns of their paths."
        rule = "must name classes of submodules or match their paths"
        raise ConfigurationError("strategy.sharding.blocks", rule, unknown, fix)


def _is_named(name: str, child: nn.Module, entry: str) -> bool:
    return _matches(name, entry) if "." in entry or "*" in entry else type(child).__name__ == entry


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _outermost(module: nn.Module, chosen: Callable[[str, nn.Module], bool], prefix: str = "") -> list[nn.Module]:
    found: list[nn.Module] = []
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        found += [child] if chosen(name, child) else _outermost(child, chosen, f"{name}.")
    return found


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
