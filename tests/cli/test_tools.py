"""How a tool is found, and what it gets of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_longctx.cli import main, tools
from lightning_longctx.cli.tools import Configuration
from lightning_longctx.errors import ConfigurationError
from tests.cli import toys
from tests.cli.test_app import TOYS


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_tools(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = SimpleNamespace(main=lambda words, read: seen.append((words, read)) or code)
    monkeypatch.setattr(tools, "importlib", SimpleNamespace(import_module=lambda name: module))
    assert main(["probe", "--config", "run.yaml", "--dp", "2"]) == code
    assert seen == [(["--config", "run.yaml", "--dp", "2"], Configuration)]


def test_a_misspelt_tool_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prob"]) == 2
    assert "Did you mean `probe`?" in capsys.readouterr().err


def test_a_part_is_built_once_from_the_words(write: Callable[..., str]) -> None:
    configuration = Configuration(["--config", write(TOYS), "--trainer.devices=4", "--data.width=3"])
    data = configuration.build("data")
    assert isinstance(data, toys.ToyData)
    assert data.width == 3
    assert configuration.build("data") is data
    assert isinstance(configuration.build("model"), toys.ToyModel)
    assert configuration.settings["trainer"]["devices"] == "4"  # as written: the Trainer reads it
    assert configuration.settings["data"]["init_args"]["width"] == 3


def test_a_missing_file_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match="must be a file that exists"):
        Configuration(["--config", "missing.yaml"])
