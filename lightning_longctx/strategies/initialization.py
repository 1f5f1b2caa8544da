"""Real weights for a module that was built on the meta device, the same ones in every layout.

A module of billions of parameters is built without memory and filled one FSDP unit at a time, so no rank ever holds it
whole. The random state of each submodule follows from the seed and the submodule's name alone: not from the order in
which units are filled, from what was drawn before, or from the rank. (``to_empty`` and ``reset_parameters`` after
sharding, the recipe that is found most often, gives each rank the same numbers for different rows of a matrix.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = ["fill_meta", "get_tensor", "init_by_name", "meta_names", "reset_parameters", "set_tensor"]


def meta_names(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the parameters and buffers that are on the meta device, tied ones once."""
    named = [*module.named_parameters(prefix), *module.named_buffers(prefix)]
    return [name for name, tensor in named if tensor.is_meta]


def fill_meta(module: nn.Module, names: Sequence[str], fill: Callable[[Sequence[str]], None]) -> None:
    """Replace meta tensors by real ones and keep ties.

    Args:
        module: the whole module.
        names: tensors of it that are on the meta device, tied ones once.
        fill: puts a real tensor in the place of each name that it gets.

    Raises:
        ConfigurationError: ``fill`` left one out.
    """
    tied: dict[int, list[str]] = {}
    trained: dict[str, bool] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            tied.setdefault(id(parameter), []).append(name)
            trained[name] = parameter.requires_grad
    fill(names)
    for group in tied.values():
        real = [value for name in group if not (value := module.get_parameter(name)).is_meta]
        for name in group if real else ():
            set_tensor(module, name, real[0].requires_grad_(trained[group[0]]))
    missing = [name for name in names if get_tensor(module, name).is_meta]
    if missing:
        raise ConfigurationError(
            f"model.{missing[0]}",
            "must get a value (the model was built on the meta device)",
            f"{counted(len(missing), 'tensor')} without one",
            "Fill every name that `fill_weights(names)` is given.",
        )


def init_by_name(
    module: nn.Module, names: Iterable[str], seed: int, initialize: Callable[[nn.Module], None] | None = None
) -> None:
    """Draw values for meta tensors, on the host, one submodule at a time.

    Args:
        module: the whole module.
        names: tensors of it that are on the meta device.
        seed: of the run; with the submodule's name it decides what is drawn.
        initialize: sets all tensors that a submodule owns itself. Default: :func:`reset_parameters`.

    Raises:
        ConfigurationError: a submodule that cannot be initialized, or a tensor that was not.
    """
    owned: dict[str, list[str]] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        owned.setdefault(path, []).append(key)
    for path, keys in owned.items():
        owner = module.get_submodule(path)
        for key in keys:
            _allocate(owner, key)
        # The host's generator alone: `torch.manual_seed` would reseed devices too.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(_seed_of(seed, path))
            (initialize or reset_parameters)(owner)
        for key in keys:
            _check_filled(owner, path, key)


def reset_parameters(module: nn.Module) -> None:
    """Initialize the tensors of one submodule as PyTorch's own layers do.

    Raises:
        ConfigurationError: it has no ``reset_parameters``.
    """
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigurationError(
            f"model ({type(module).__name__})",
            "must have `reset_parameters()` to be built on the meta device",
            "a module with tensors of its own and without it",
            "Write the method, or build the module with real tensors, or fill it in `fill_weights(self, names)`.",
        )
    reset()


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a qualified name."""
    path, _, key = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), key)
    return tensor


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of a qualified name."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    if key not in owner._parameters:
        owner._buffers[key] = tensor
        return
    owner._parameters[key] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _allocate(owner: nn.Module, key: str) -> None:
    old = getattr(owner, key)
    new = torch.empty_like(old, device="cpu")
    # What no initialization writes must show, and memory that was just freed often looks right.
    new.fill_(_unset(new.dtype))
    if key in owner._parameters:
        parameter = nn.Parameter(new, requires_grad=old.requires_grad)
        parameter.__dict__.update(old.__dict__)
        owner._parameters[key] = parameter
    else:
        owner._buffers[key] = new


def _unset(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _check_filled(owner: nn.Module, path: str, key: str) -> None:
    tensor = getattr(owner, key)
    unset = _unset(tensor.dtype)
    unfilled = tensor.isnan() if math.isnan(unset) else tensor == unset
    if tensor.dtype != torch.bool and bool(unfilled.any()):
        raise ConfigurationError(
            f"model.{path}.{key}",
            f"must be set by the initialization of {type(owner).__name__}",
            "values that it leaves as they are",
            "Set the tensor in `reset_parameters()`, or build the module with real tensors.",
        )


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
