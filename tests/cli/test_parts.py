"""One part of a run from its configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx import DynamicBatchingDataModule, LongContextFSDPStrategy, TrainingMetrics
from lightning_longctx.callbacks import ChannelLoss, ChannelOptions
from lightning_longctx.cli import build_from_config, load_config
from lightning_longctx.errors import ConfigurationError
from tests.cli import toys
from tests.cli.test_app import TOYS

CONFIG: dict[str, Any] = {
    "ckpt_path": "last",
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
        "callbacks": ["ExactTokenMean"],
    },
    "model": {"class_path": "tests.cli.toys.ToyModel"},
    "data": {"max_seq_len": 4096, "sources": {"a": "texts/*.txt"}},
}


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(CONFIG)


def test_each_part(config: dict[str, Any], texts: str) -> None:
    data = build_from_config(config, "data")
    assert isinstance(data, DynamicBatchingDataModule)
    assert data.max_seq_len == 4096
    assert isinstance(build_from_config(config, "model"), toys.ToyModel)
    strategy = build_from_config(config, "strategy")
    assert isinstance(strategy, LongContextFSDPStrategy)
    assert strategy.sequence_parallel_size == 2
    trainer = build_from_config(config, "trainer")
    assert trainer.num_devices == 2
    assert any(isinstance(callback, TrainingMetrics) for callback in trainer.callbacks)


def test_a_part_does_not_need_the_others(config: dict[str, Any], texts: str) -> None:
    config["trainer"] = {**config["trainer"], "callbacks": ["tests.cli.toys.BrokenCallback"]}
    assert isinstance(build_from_config(config, "data"), DynamicBatchingDataModule)
    config["data"] = {"sources": {"a": "no/such/*.txt"}}
    assert isinstance(build_from_config(config, "model"), toys.ToyModel)


def test_a_file_with_overrides(config: dict[str, Any], texts: str, write: Callable[..., str], tmp_path: Path) -> None:
    name = write(config)
    data = build_from_config(tmp_path / name, "data", {"data.max_seq_len": "8K", "data.loading.shuffle": False})
    assert data.max_seq_len == 8192
    assert build_from_config(name, "strategy", {"trainer.strategy": "ddp"}) == "ddp"


def test_load_config_is_plain_and_complete() -> None:
    found = load_config(TOYS, {"trainer.max_steps": 7})
    assert found["trainer"]["max_steps"] == 7
    assert found["model"] == {
        "class_path": "tests.cli.toys.ToyModel",
        "init_args": {"width": 2, "optimizer": {"lr": 0.5, "momentum": 0.0}},
    }
    assert found["data"]["init_args"]["max_seq_len"] == 4096


def test_mistakes_are_told_as_by_the_command_line(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean `data.max_seq_len`\?"):
        build_from_config(config, "data", {"data.max_seqlen": 1})
    with pytest.raises(ConfigurationError, match="must be a part of a configuration"):
        build_from_config(config, "loader")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be a file that exists"):
        load_config("missing.yaml")


def test_nothing_of_the_command_line_of_the_caller_is_read(
    config: dict[str, Any], texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["longctx", "probe", "--config=other.yaml"])
    assert build_from_config(config, "data").max_seq_len == 4096


def test_yaml_fills_channel_loss() -> None:
    settings = {
        "source_names": {7: "web", 90210: "code"},
        "every_n_steps": 5,
        "average_over": "interval",
        "prefix": "rare",
        "options": {"counters": ["samples"], "plot": False},
    }
    callbacks = ["ChannelLoss", {"class_path": "lightning_longctx.ChannelLoss", "init_args": settings}]
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "callbacks": callbacks}
    config = {"trainer": trainer, "model": {"config": "tiny-llama"}, "data": {"sources": {"a": "python-stdlib"}}}
    plain, filled = [one for one in build_from_config(config, "trainer").callbacks if isinstance(one, ChannelLoss)]
    assert plain.options == ChannelOptions()
    assert filled.source_names == {7: "web", 90210: "code"}
    assert filled.options == ChannelOptions(counters=["samples"], plot=False)
    assert (filled.every_n_steps, filled.average_over) == (5, "interval")
