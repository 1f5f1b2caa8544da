"""Imports a script of ``examples/`` as a module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.contracts.source import ROOT


def load_example(name: str) -> ModuleType:
    """The module of ``examples/<name>.py``, freshly run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
