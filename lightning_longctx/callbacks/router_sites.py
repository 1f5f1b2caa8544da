"""Where a model routes tokens to experts, found by structure and not by class names.

A site is a module with experts below it and, beside them, whatever decides about them. Each site has one row of counts
for each place where its decisions may show: the output of a sibling of the experts, the experts' own input, and what
the model itself records. The first batch tells which of them speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_longctx.errors import ConfigurationError

__all__ = ["RouterSite", "find_sites", "plain_path"]

# Added to paths by torch.compile and by wrappers; users do not write them.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}


@dataclass(frozen=True)
class RouterSite:
    """One layer of experts.

    Attributes:
        path: dotted path of the module, without what wrappers add.
        module: the module that holds router and experts, or the router itself where the user named it.
        routers: modules whose output may carry the decisions.
        experts: the experts, whose input may carry them; None where the user named the router.
        num_experts: number of experts, from the router's weights.
    """

    path: str
    module: nn.Module
    routers: tuple[nn.Module, ...]
    experts: nn.Module | None
    num_experts: int


def find_sites(model: nn.Module, patterns: Sequence[str] = ()) -> list[RouterSite]:
    """Find the layers of experts, in the order of the model.

    Args:
        model: any module, also sharded or compiled.
        patterns: dotted paths of routers, with ``*``, instead of looking for experts.

    Raises:
        ConfigurationError: a pattern that matches nothing, or a router whose number of experts cannot be told.
    """
    if patterns:
        return _named_sites(model, patterns)
    found = []
    for path, module in model.named_modules():
        site = _site_of(plain_path(path), module)
        if site is not None:
            found.append(site)
    return found


def plain_path(path: str) -> str:
    """A dotted path without the segments that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _named_sites(model: nn.Module, patterns: Sequence[str]) -> list[RouterSite]:
    modules = {plain_path(path): module for path, module in model.named_modules()}
    sites = []
    for pattern in patterns:
        matched = [path for path in modules if fnmatchcase(path, pattern)]
        if not matched:
            likely = [path for path in modules if path.rsplit(".", 1)[-1] in ("gate", "router")][:3]
            fix = f"Paths here look like {likely or list(modules)[1:4]}."
            raise ConfigurationError("MoERouterHeatmap.routers", "must match modules of the model", pattern, fix)
        for path in matched:
            sites.append(RouterSite(path, modules[path], (modules[path],), None, _declared(path, modules[path])))
    return sites


def _declared(path: str, module: nn.Module) -> int:
    """Experts of a module that the user named: what it says itself, else the rows of its smallest matrix."""
    for name in ("num_experts", "n_experts", "num_local_experts", "n_routed_experts"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 1:
            return value
    rows = min(_rows(module, least=2), default=0)
    if not rows:
        fix = "Give the module an attribute `num_experts`."
        raise ConfigurationError(path, "must tell its number of experts", f"{type(module).__name__} without", fix)
    return rows


def _site_of(path: str, module: nn.Module) -> RouterSite | None:
    children = dict(module.named_children())
    for name, child in children.items():
        siblings = tuple(other for key, other in children.items() if key != name and not _fused(other))
        experts = _num_experts(name, child, siblings)
        if experts is None:
            continue
        # The router's matrix has a row for each expert, and maybe one more for "no expert"; other matrices beside it
        # have one for each hidden feature, which are more.
        rows = [count for other in siblings for count in _rows(other, least=experts)]
        return RouterSite(path, module, siblings, child, min(rows, default=experts))
    return None


def _num_experts(name: str, child: nn.Module, siblings: Sequence[nn.Module]) -> int | None:
    """Number of experts if ``child`` is a set of experts, else None."""
    fused = _fused(child)
    if fused and any(fused <= rows <= 2 * fused for other in siblings for rows in _rows(other, least=fused)):
        return fused
    listed = child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict) else ()
    members = [member for member in listed if next(member.parameters(), None) is not None]
    routed = {rows for other in siblings for rows in _rows(other, least=2)}
    # Equal modules in a list are experts where something beside them has a matrix with as many rows as they are.
    if len(members) > 1 and len({_signature(member) for member in members}) == 1 and len(members) in routed:
        return len(members)
    if name == "experts" and not members and _site_of("", child) is None:
        return min((rows for other in siblings for rows in _rows(other, least=2)), default=None)
    return None


def _fused(module: nn.Module) -> int:
    """Leading size of the three-dimensional parameters that a module owns itself; 0 without any.

    Convolutions have such weights too, and are no experts.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    sizes = [int(parameter.shape[0]) for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return sizes[0] if sizes and sizes[0] > 1 else 0


def _rows(module: nn.Module, least: int) -> list[int]:
    """Leading sizes, of at least ``least``, of the matrices in a module."""
    return [
        int(parameter.shape[0])
        for parameter in module.parameters()
        if parameter.dim() == 2 and parameter.shape[0] >= least
    ]


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module).__name__, *(tuple(parameter.shape) for parameter in module.parameters()))
