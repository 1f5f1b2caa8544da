"""Finding submodules by class name or by a pattern of their dotted path."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_longctx.errors import ConfigurationError

__all__ = ["match_modules"]


def match_modules(module: nn.Module, names: Sequence[str], field: str) -> list[nn.Module]:
    """Find submodules by name, in the module's order and none inside another.

    Args:
        module: the whole module.
        names: class names (``LlamaMLP``), or patterns with a dot or a star, compared part by part with the end of a
            path: ``layers.*.mlp`` finds ``model.layers.7.mlp`` but not ``model.layers.7.mlp.up_proj``.
        field: of the configuration, for the error.

    Raises:
        ConfigurationError: a name that fits no submodule.

    Example:
        >>> len(match_modules(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), ["Linear"], "modules"))
        2
    """
    for entry in names:
        if not any(_fits(path, child, entry) for path, child in module.named_modules() if path):
            classes = sorted({type(child).__name__ for child in module.modules()})
            fix = f"Name a class, such as one of {classes[:12]}, or a pattern such as `layers.*`."
            raise ConfigurationError(field, "must name submodules", repr(entry), fix)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for path, child in module.named_modules():
        if path and child not in inside and any(_fits(path, child, entry) for entry in names):
            found.append(child)
            inside.update(child.modules())
    return found


def _fits(path: str, child: nn.Module, entry: str) -> bool:
    if "." not in entry and "*" not in entry:
        return type(child).__name__ == entry
    # torch.compile and checkpoint wrappers put parts of their own into a path
    parts = [part for part in path.split(".") if part not in {"_orig_mod", "_checkpoint_wrapped_module"}]
    wanted = entry.split(".")
    tail = parts[-len(wanted) :]
    return len(tail) == len(wanted) and all(map(fnmatchcase, tail, wanted))
