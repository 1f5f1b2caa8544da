"""Which versions a run was made with, from the installed packages, without importing them."""

from __future__ import annotations

import platform
from importlib import metadata

__all__ = ["installed_versions"]

#: What changes numbers or formats.
_PACKAGES = ("lightning-longctx", "lightning", "torch", "numpy", "transformers", "datasets", "tokenizers")


def installed_versions() -> dict[str, str]:
    """Versions by name of the distribution, ``python`` last; those that are not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version()}
