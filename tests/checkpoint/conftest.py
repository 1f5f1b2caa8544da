"""A folder of checkpoints on each of two stores without rename."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_longctx.checkpoint.address import Address, as_folder
from tests.checkpoint import objects  # noqa: F401 - registers the store


@pytest.fixture(params=["objects", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Address]:
    folder = as_folder(f"{request.param}://{tmp_path}/run")
    assert isinstance(folder, Address)
    yield folder
    fsspec.filesystem("memory").store.clear()
