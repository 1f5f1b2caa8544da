"""Tensors and plain values of modules and optimizers, by name: what goes into a slot, and back.

Optimizer state is stored by the name of its parameter and not by its number, so a parameter that was added, removed or
moved to another group is noticed instead of taking somebody else's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_longctx.checkpoint.reading import SavedTensor, TensorDirectory
from lightning_longctx.errors import CheckpointError

__all__ = [
    "expected_optimizer_tensors",
    "load_named_optimizer_state",
    "load_optimizer",
    "optimizer_state",
    "parameter_names",
    "plain_name",
    "saved_optimizer_state",
    "split_tensors",
    "trainable_names",
]


def split_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the rest (extra state of modules)."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def parameter_names(module: Module) -> dict[Parameter, str]:
    """Name of each parameter, as :func:`plain_name` has it; tied ones have their first name."""
    return {parameter: plain_name(name) for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """A name without what ``torch.compile`` adds: whether a part is compiled is no matter of what is saved.

    Example:
        >>> plain_name("net._orig_mod.0.weight")
        'net.0.weight'
    """
    return name.replace("_orig_mod.", "")


def trainable_names(module: Module) -> set[str]:
    """Plain names of what training may change: trainable parameters, and all buffers."""
    frozen = {name for name, value in module.named_parameters(remove_duplicate=False) if not value.requires_grad}
    return {plain_name(key) for key in module.state_dict() if key not in frozen}


def optimizer_state(module: Module, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State of all optimizers.

    Args:
        module: the module whose parameters they step.
        optimizers: in their order.

    Returns:
        The tensors, by names such as ``optimizer_0.state.head.weight.exp_avg``; and for each optimizer ``state``
        (values that are no tensors, by parameter) and ``param_groups`` (settings, with the names of their parameters).

    Raises:
        CheckpointError: an optimizer steps a parameter that is not the module's.
    """
    names = parameter_names(module)
    tensors: dict[str, Tensor] = {}
    rest = []
    for number, optimizer in enumerate(optimizers):
        by_number = _names_by_number(number, optimizer, names)
        saved = optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, entry in saved["state"].items():
            found, other = split_tensors(entry)
            tensors |= {f"optimizer_{number}.state.{by_number[index]}.{key}": value for key, value in found.items()}
            if other:
                plain[by_number[index]] = other
        groups = [
            {**group, "params": [by_number[index] for index in group["params"]]} for group in saved["param_groups"]
        ]
        rest.append({"class": type(optimizer).__name__, "state": plain, "param_groups": groups})
    return tensors, rest


def expected_optimizer_tensors(module: Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Tensors of the sizes and layouts that the state will have after the first step, for allocating buffers early.

    What an optimizer keeps is known for Adam's family and for momentum; others are allocated at their first save.
    """
    tensors, _ = optimizer_state(module, optimizers)
    names = parameter_names(module)
    for number, optimizer in enumerate(optimizers):
        if optimizer.state:
            continue
        for group in optimizer.param_groups:
            keys = _state_keys(group)
            for parameter in (one for one in group["params"] if one.requires_grad):
                prefix = f"optimizer_{number}.state.{names.get(parameter, '')}"
                tensors |= {f"{prefix}.{key}": torch.zeros(()) if key == "step" else parameter for key in keys}
    return tensors


def load_optimizer(
    directory: TensorDirectory,
    number: int,
    saved: Mapping[str, Any],
    optimizer: Optimizer,
    module: Module,
    changed: Collection[str] = (),
) -> list[str]:
    """Load the state of one optimizer, onto any layout.

    Args:
        directory: the optimizer slot.
        number: which optimizer.
        saved: its entry of what :func:`optimizer_state` returned beside the tensors.
        optimizer: what to load into.
        module: the module whose parameters it steps.
        changed: names of parameters that start anew.

    Returns:
        What does not fit: parameters that only one side has, or groups that were divided otherwise. They keep their
        fresh state.
    """
    names = _names_by_number(number, optimizer, parameter_names(module))
    if problem := _other_kind(number, optimizer, saved):
        return [problem]
    groups, problems = _fit_groups(number, optimizer, names, saved["param_groups"])
    found = {name: entry for name, entry in _saved_entries(directory, number).items() if name not in changed}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {key: _template(parameters[index], directory[path]) for key, path in found[name].items()}
        for index, name in names.items()
        if name in found
    }
    targets = {found[names[index]][key]: value for index, entry in state.items() for key, value in entry.items()}
    directory.read_into(targets)
    plain = {name: entry for name, entry in saved["state"].items() if name not in changed}
    complete = {
        index: {**state.get(index, {}), **plain.get(name, {})}
        for index, name in names.items()
        if index in state or name in plain
    }
    optimizer.load_state_dict({"state": complete, "param_groups": groups})
    _restore_types(optimizer, parameters, state)
    return problems


def load_named_optimizer_state(directory: TensorDirectory, number: int, optimizer: Optimizer, module: Module) -> None:
    """Load the state of one optimizer from a sharded directory of stock Lightning.

    Args:
        directory: with names such as ``optimizer_0.state.<parameter>.exp_avg``, and values such as
            ``optimizer_0.param_groups.0.lr``.
        number: which optimizer.
        optimizer: what to load into.
        module: the module whose parameters it steps.

    Raises:
        CheckpointError: there is no state for a trainable parameter.
    """
    names = _names_by_number(number, optimizer, parameter_names(module))
    found = _saved_entries(directory, number)
    missing = sorted(set(names.values()) - set(found))
    # Plain SGD keeps nothing; whoever keeps moments has found some at least for one parameter.
    keeps = bool(found) or any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)
    if missing and keeps:
        fix = "Resume the run that was saved, with the same optimizer."
        got = f"none for {missing[:8]}"
        raise CheckpointError(f"optimizer_{number}", "must have state for every parameter", got, fix)
    groups: dict[int, dict[str, Any]] = {}
    for key, value in directory.values_below(f"optimizer_{number}.param_groups.").items():
        index, _, setting = key.partition(".")
        groups.setdefault(int(index), {})[setting] = value
    in_order = [groups[index] for index in sorted(groups)]
    load_optimizer(directory, number, {"state": {}, "param_groups": in_order}, optimizer, module)


def saved_optimizer_state(directory: TensorDirectory, number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    """One optimizer's state as ``optimizer.state_dict()`` would give it, whole, on the host.

    Args:
        directory: the optimizer slot.
        number: which optimizer.
        saved: its entry of what :func:`optimizer_state` returned beside the tensors.
    """
    found, plain = _saved_entries(directory, number), saved["state"]
    state, groups, index = dict[int, Any](), [], 0
    for group in saved["param_groups"]:
        members = list(range(index, index + len(group["params"])))
        groups.append({**group, "params": members})
        index += len(members)
        for member, name in zip(members, group["params"], strict=True):
            tensors = {key: directory.read(path) for key, path in found.get(name, {}).items()}
            if entry := {**tensors, **plain.get(name, {})}:
                state[member] = entry
    return {"state": state, "param_groups": groups}


def _names_by_number(number: int, optimizer: Optimizer, names: Mapping[Parameter, str]) -> dict[int, str]:
    found = {}
    for index, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        if parameter not in names:
            fix = "Register it in the module, so that it has a name that a checkpoint can keep."
            got = f"parameter {index} of shape {tuple(parameter.shape)}"
            raise CheckpointError(f"optimizer_{number}", "must step parameters of the module", got, fix)
        found[index] = names[parameter]
    return found


def _fit_groups(
    number: int, optimizer: Optimizer, names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Present groups with the saved settings of their parameters, and what does not fit."""
    owner = {name: index for index, group in enumerate(saved) for name in group["params"]}
    problems = _differences(number, set(names.values()), set(owner))
    groups = []
    for index, group in enumerate(optimizer.state_dict()["param_groups"]):
        sources = {owner[names[member]] for member in group["params"] if names[member] in owner}
        if len(sources) > 1:
            problems.append(f"optimizer_{number}: parameter group {index} was divided otherwise")
        source = saved[min(sources)] if sources else group
        groups.append({**source, "params": group["params"]})
    return groups, problems


def _other_kind(number: int, optimizer: Optimizer, saved: Mapping[str, Any]) -> str:
    """Why the saved state is that of another optimizer; empty if it is not. Another class with the same settings fits.

    Not every optimizer fails of another one's state: it could also go on with moments that mean something else.
    """
    kind, present = saved.get("class"), type(optimizer).__name__
    settings = set().union(*(group.keys() for group in saved["param_groups"]))
    if kind is None or kind == present or set(optimizer.defaults) <= settings:
        return ""
    return f"optimizer_{number} is {present}, and {kind} was saved"


def _differences(number: int, present: set[str], saved: set[str]) -> list[str]:
    problems = [f"optimizer_{number} has no saved state for `{name}`" for name in sorted(present - saved)]
    return problems + [f"optimizer_{number} no longer steps `{name}`" for name in sorted(saved - present)]


def _saved_entries(directory: TensorDirectory, number: int) -> dict[str, dict[str, str]]:
    prefix = f"optimizer_{number}.state."
    found: dict[str, dict[str, str]] = {}
    for path in directory:
        if path.startswith(prefix):
            name, _, key = path.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[key] = path
    return found


def _template(parameter: Parameter, saved: SavedTensor) -> Tensor:
    """An empty tensor with the layout of its parameter, or a whole one on the host."""
    if tuple(parameter.shape) == saved.size:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.dtype)


def _restore_types(
    optimizer: Optimizer, parameters: Sequence[Parameter], state: Mapping[int, Mapping[str, Tensor]]
) -> None:
    # `load_state_dict` casts to the parameter's type, which would round float32 moments of bfloat16 weights.
    for index, entry in state.items():
        kept = optimizer.state[parameters[index]]
        for key, value in entry.items():
            if isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)


def _state_keys(group: Mapping[str, Any]) -> Iterable[str]:
    if "betas" in group:
        return ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
    return ["momentum_buffer"] if group.get("momentum") else []
