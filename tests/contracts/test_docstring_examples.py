"""Each example in a docstring of the package runs and gives what it says."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.contracts.source import package_sources

WITH_EXAMPLES = [name.removesuffix(".__init__") for name, source in package_sources().items() if ">>> " in source]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_it_is_right(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
