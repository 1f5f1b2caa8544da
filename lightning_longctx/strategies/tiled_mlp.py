"""Tiled MLP: the position-wise part of a layer in tiles of tokens, computed again in backward.

An MLP widens each token several times, so on long rows its intermediate tensors are the largest of a layer, although no
token needs another. In tiles only those of one tile exist. Idea: Arctic Long Sequence Training (arXiv 2506.13996). Two
things differ from there. Gradients of weights are added up over tiles in float32 and handed to autograd once, so that
they are reduced once. And the input is saved before the tiles run: activation checkpointing stops its repetition there,
and the tiles are computed twice in all, as with checkpointing alone, where three times would be needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.matching import match_modules
from lightning_longctx.strategies.settings import as_settings

__all__ = ["TiledMLP", "apply_tiles", "as_tiled_mlp", "find_mlps"]

_FIELD = "strategy.tiled_mlp"
_NAMES = ("mlp", "ffn", "feedforward", "feed_forward")
#: A tile has at least so many tokens by default: with fewer, matrix products do not fill a device.
_MIN_TILE_TOKENS = 1024
_MAX_TILES = 2**16


@dataclass(frozen=True)
class TiledMLP:
    """Which modules run in tiles of tokens.

    Args:
        modules: ``auto`` (default): plain and gated MLPs, found by name and by the shapes of their weights; routers and
            experts are left alone. Or class names and path patterns of modules that map ``[..., T, H]`` to
            ``[..., T, H']`` token by token, from one argument. ``none``: none.
        tiles: number of tiles, the same on every rank whatever its tokens (some may be empty). Give it for modules that
            communicate inside, or ranks with other rows would wait for one another. Default 0: as many as make tiles of
            as many tokens as the module's input is wide, at least 1,024.

    Raises:
        ConfigurationError: not a name or a list, or a number of tiles below 0 or absurdly large.
    """

    modules: Literal["none", "auto"] | list[str] = "auto"
    tiles: int = 0

    def __post_init__(self) -> None:
        named = isinstance(self.modules, (list, tuple)) and self.modules
        if not named and self.modules not in ("none", "auto"):
            fix = "Write `auto`, or a list such as [LlamaMLP]."
            raise ConfigurationError(
                _FIELD, "must be none, auto or a list of names or patterns", repr(self.modules), fix
            )
        tiles = self.tiles
        if isinstance(tiles, bool) or not isinstance(tiles, int) or not 0 <= tiles <= _MAX_TILES:
            rule = f"must be a whole number from 0 to {_MAX_TILES}"
            raise ConfigurationError(f"{_FIELD}.tiles", rule, repr(tiles), "0 chooses by the width of the input.")


def as_tiled_mlp(value: str | list[str] | TiledMLP | Mapping[str, Any]) -> TiledMLP:
    """Turn ``none``, ``auto``, a list of names, a mapping or settings into settings.

    Raises:
        ConfigurationError: anything else.
    """
    if isinstance(value, (str, list)):
        return TiledMLP(modules=value)  # type: ignore[arg-type]  # it checks
    return as_settings(TiledMLP, value, "tiled_mlp")


def find_mlps(module: nn.Module) -> list[nn.Module]:
    """Find plain and gated MLPs: two or three matrices, the last of which undoes the widening of the others.

    Their class or attribute is named like one, and their forward needs one argument. Experts are not taken: each sees
    few tokens already.
    """
    return [
        child for path, child in module.named_modules() if "experts" not in path.split(".") and _is_mlp(path, child)
    ]


def apply_tiles(module: nn.Module, settings: TiledMLP) -> list[nn.Module]:
    """Let modules run in tiles, in place; before they are sharded.

    Args:
        module: the whole module.
        settings: which of them, and how many tiles.

    Returns:
        The modules that run in tiles now.

    Raises:
        ConfigurationError: none was found, or one routes tokens to experts.
    """
    if settings.modules == "none":
        return []
    if settings.modules == "auto":
        chosen = find_mlps(module)
        if not chosen:
            fix = "Name classes or patterns of modules that work token by token: `tiled_mlp: [MyMLP]`."
            raise ConfigurationError(_FIELD, "must find MLPs", f"{type(module).__name__} without any it knows", fix)
    else:
        chosen = match_modules(module, settings.modules, _FIELD)
    for mlp in chosen:
        _check_no_router(mlp)
        run: Callable[..., Any] = torch.compiler.disable(_tiled)
        mlp.forward = partial(run, mlp, mlp.forward, settings.tiles)
    return chosen


def _is_mlp(path: str, module: nn.Module) -> bool:
    name = f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
    if not any(word in name for word in _NAMES):
        return False
    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    owners = [child for child in module.children() if next(child.parameters(), None) is not None]
    weights = [getattr(child, "weight", None) for child in owners]
    shapes = [tuple(weight.shape) for weight in weights if isinstance(weight, nn.Parameter)]
    if len(required) != 1 or len(owners) != len(shapes) or not 2 <= len(shapes) <= 3 or next(_direct(module), None):
        return False
    if any(len(shape) != 2 for shape in shapes):
        return False
    *wide, last = shapes
    fused = len(wide) == 1 and wide[0] == (2 * last[1], last[0])  # gate and up in one matrix
    return fused or all(shape == last[::-1] for shape in wide)


def _direct(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _check_no_router(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == "experts" or "Router" in type(child).__name__:
            fix = "Use `auto`, which leaves it alone; experts see few tokens each, and their loss needs the whole row."
            got = f"{type(module).__name__} with {name} ({type(child).__name__})"
            raise ConfigurationError(_FIELD, "must not name modules that route tokens to experts", got, fix)


def _tiled(mlp: nn.Module, forward: Callable[[Tensor], Tensor], tiles: int, /, *args: Any, **kwargs: Any) -> Tensor:
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
        rule = "must name modules that take one tensor [..., T, H]"
        raise ConfigurationError(_FIELD, rule, f"{type(mlp).__name__} with {len(given)} arguments", "Leave it out.")
    x = given[0]
    if any(isinstance(child, FSDPModule) for child in mlp.modules() if child is not mlp):
        # Their parameters would be gathered anew in each tile, and their gradients end in tensors of that moment.
        fix = "Shard the module whole, or its block: leave `sharding.blocks` out, or name the module there."
        raise ConfigurationError(_FIELD, "must name modules without FSDP units inside", type(mlp).__name__, fix)
    if tiles == 0:
        tiles = -(-x.shape[-2] // max(x.shape[-1], _MIN_TILE_TOKENS))
    parameters = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _run(forward, x, tiles)
    if tiles <= 1:
        return forward(x)
    held = _Hold.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
    output: Tensor = _Tiled.apply(forward, mlp, tiles, held, *parameters)  # type: ignore[no-untyped-call]
    return output


def _tiles(x: Tensor, count: int) -> Sequence[Tensor]:
    """Views of ``[..., T, H]``, one after another along T. The planner takes a few of them."""
    return x.tensor_split(count, dim=-2)


def _run(forward: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
    """The output ``[..., T, H']``, tile by tile, without a graph."""
    output: Tensor | None = None
    start = 0
    for tile in _tiles(x, max(tiles, 1)):
        part = forward(tile)
        if part.shape[:-1] != tile.shape[:-1]:
            rule = f"must keep the shape {list(tile.shape[:-1])} of its tokens"
            raise ConfigurationError(_FIELD, rule, list(part.shape[:-1]), "Name modules that work token by token.")
        if output is None:
            output = part.new_empty((*x.shape[:-1], part.shape[-1]))
        output.narrow(-2, start, tile.shape[-2]).copy_(part)
        start += tile.shape[-2]
    assert output is not None
    return output


class _Hold(torch.autograd.Function):
    """Saves the input of the tiles before they run, so that a checkpoint's repetition can stop before them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Tiled(torch.autograd.Function):
    """Tiles without a graph; in backward each is computed again, with one."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensor], Tensor], mlp: nn.Module, tiles: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.mlp, ctx.tiles = forward, mlp, tiles
        ctx.holder = x.grad_fn if x.requires_grad else None
        if ctx.holder is None:
            ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.host_random, ctx.device_random = torch.get_rng_state(), get_device_states(x)
        return _run(forward, x, tiles)

    @staticmethod
    @once_differentiable  # a second derivative is an error, not a wrong number
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors if ctx.holder is None else ctx.holder.saved_tensors
        parameters = [parameter for parameter in ctx.mlp.parameters() if parameter.requires_grad]
        sums: list[Tensor | None] = [None] * len(parameters)
        grad_x = torch.empty_like(x) if ctx.holder is not None else None
        start = 0
        with _as_in_forward(ctx, x):
            for tile, grad in zip(_tiles(x, ctx.tiles), _tiles(grads[0], ctx.tiles), strict=True):
                found = _tile_gradients(ctx.run, tile, grad, parameters, grad_x is not None)
                if grad_x is not None:
                    grad_x.narrow(-2, start, tile.shape[-2]).copy_(found.pop(0))  # type: ignore[arg-type]
                start += tile.shape[-2]
                sums = [_add(total, part) for total, part in zip(sums, found, strict=True)]
        cast = [total if total is None else total.to(like.dtype) for total, like in zip(sums, parameters, strict=True)]
        return (None, None, None, grad_x, *cast)


def _tile_gradients(
    forward: Callable[[Tensor], Tensor], tile: Tensor, grad: Tensor, parameters: list[nn.Parameter], of_input: bool
) -> list[Tensor | None]:
    with torch.enable_grad():
        tile = tile.detach().requires_grad_(of_input)
        output = forward(tile)
    wanted = [*([tile] if of_input else []), *parameters]
    return list(torch.autograd.grad(output, wanted, grad, allow_unused=not of_input or bool(parameters)))


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add a tile's gradient, in float32 if the gradient is coarser: a sum of many bfloat16 numbers loses their tail."""
    if part is None:
        return total
    if total is None:
        return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part.clone()
    return total.add_(part)


@contextmanager
def _as_in_forward(ctx: Any, x: Tensor) -> Iterator[None]:
    """Autocast and random numbers of the forward, tile after tile."""
    kind, dtype, enabled = ctx.autocast
    devices, states = ctx.device_random
    with torch.random.fork_rng(devices=devices, device_type=kind if devices else "cuda"):
        torch.set_rng_state(ctx.host_random)
        if devices:
            set_device_states(devices, states, device_type=kind)
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            yield
