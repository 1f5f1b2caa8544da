"""Imports a script that is in no package as a module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.contracts.source import ROOT


def load_script(path: str) -> ModuleType:
    """The module of a file, freshly run; its path is from the root of the repository."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
