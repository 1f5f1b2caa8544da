"""Settings of the command-line tests: a run changes the environment and the path, which must not reach other tests."""

from __future__ import annotations

import os
import sys

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of LightningCLI's calls: none is ours to change

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import yaml  # noqa: E402


@pytest.fixture(autouse=True)
def _same_process_after() -> Iterator[None]:
    environment, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a configuration file and return its name."""

    def _write(content: dict[str, Any] | str, name: str = "run.yaml") -> str:
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (tmp_path / name).write_text(text)
        return name

    return _write


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A folder of four text files; its glob."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "some words to learn from. " * 12)
    return "texts/*.txt"
