"""The shapes of configuration that users write, and what each builds."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_longctx import (
    CausalLMModule,
    DynamicBatchingDataModule,
    ExactTokenMean,
    LongContextFSDPStrategy,
    MaxTokens,
    RunGuard,
    TrainingMetrics,
)
from lightning_longctx.cli import LongContextCLI, main
from tests.cli import toys

TOYS: dict[str, Any] = {
    "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_progress_bar": False},
    "model": {"class_path": "tests.cli.toys.ToyModel", "init_args": {"optimizer": {"lr": 0.5}}},
    "data": {"class_path": "tests.cli.toys.ToyData"},
}


def build(config: dict[str, Any], *flags: str) -> LongContextCLI:
    return LongContextCLI([f"--config={yaml.safe_dump(config)}", *flags], run=False)


def with_trainer(**settings: Any) -> dict[str, Any]:
    config = copy.deepcopy(TOYS)
    config["trainer"].update(settings)
    return config


def printed(config: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(["fit", f"--config={yaml.safe_dump(config)}", *flags, "--print_config"])
    assert end.value.code == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


# -- our classes directly, anybody's by class path --------------------------------------------------------------------


def test_callbacks_take_numbers_of_tokens_as_people_write_them() -> None:
    limit = {"class_path": "MaxTokens", "init_args": {"target": "2e10", "source": "512M"}}
    guard = {"class_path": "RunGuard", "init_args": {"hang_least_s": 900, "on_nan": "warn"}}
    callbacks = build(with_trainer(callbacks=[limit, guard, "TrainingMetrics"])).trainer.callbacks
    (limited,) = [callback for callback in callbacks if isinstance(callback, MaxTokens)]
    assert (limited.target, limited.source, limited.token_horizon) == (20_000_000_000, 2**29, 2**29)
    assert any(isinstance(callback, RunGuard) for callback in callbacks)


def test_flat_keys_are_the_settings_of_our_classes(texts: str) -> None:
    cli = build(
        {
            "trainer": TOYS["trainer"],
            "model": {"config": "tiny-llama", "optimizer": {"lr": 3e-3}, "schedule": {"kind": "cosine"}},
            "data": {
                "max_seq_len": "1K",
                "global_batch_tokens": "4K",
                "tokenizer": "bytes",
                "loading": {"shuffle": False},
                "sources": {"a": texts, "b": {"path": texts, "weight": 0.5, "min_tokens": "1K"}},
            },
        }
    )
    assert isinstance(cli.model, CausalLMModule)
    assert cli.model.optimizer_settings.lr == 3e-3
    assert cli.model.schedule_settings.kind == "cosine"
    assert isinstance(cli.datamodule, DynamicBatchingDataModule)
    assert cli.datamodule.max_seq_len == 1024
    assert cli.datamodule.source_names == ["a", "b"]


@pytest.mark.parametrize("path", ["CausalLMModule", "lightning_longctx.CausalLMModule"])
def test_our_classes_by_class_path(path: str, texts: str) -> None:
    data = {"class_path": "DynamicBatchingDataModule", "init_args": {"sources": {"a": texts}, "max_seq_len": "2K"}}
    model = {"class_path": path, "init_args": {"config": "tiny-llama"}}
    cli = build({"trainer": TOYS["trainer"], "model": model, "data": data})
    assert isinstance(cli.model, CausalLMModule)
    assert cli.datamodule.max_seq_len == 2048


def test_foreign_classes_by_class_path() -> None:
    cli = build(TOYS)
    assert type(cli.model) is toys.ToyModel
    assert cli.model.optimizer_settings == toys.ToyOptimizer(lr=0.5)
    assert type(cli.datamodule) is toys.ToyData


def test_a_flag_replaces_our_class_by_a_foreign_one(texts: str) -> None:
    config = {"trainer": TOYS["trainer"], "model": {"config": "tiny-llama"}, "data": {"sources": {"a": texts}}}
    cli = build(config, "--model=tests.cli.toys.FailingModel", "--model.width=5")
    assert cli.model.layer.in_features == 5
    cli = build(config, "--model.class_path=tests.cli.toys.FailingModel", "--model.init_args.width=6")
    assert cli.model.layer.in_features == 6


def test_a_model_with_its_own_loaders_needs_no_data() -> None:
    cli = build({"trainer": TOYS["trainer"], "model": {"class_path": "tests.cli.toys.SelfFedModel"}})
    assert cli.datamodule is None


# -- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "LongContextFSDPStrategy",
        "longctx_fsdp",
        "lightning_longctx.strategies.LongContextFSDPStrategy",
        "lightning_longctx.LongContextFSDPStrategy",
        {"class_path": "LongContextFSDPStrategy"},
        {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 1}},
    ],
)
def test_our_strategy_in_every_form(strategy: Any) -> None:
    assert isinstance(build(with_trainer(strategy=strategy)).trainer.strategy, LongContextFSDPStrategy)


@pytest.mark.parametrize("strategy", ["ddp", "DDPStrategy", "lightning.pytorch.strategies.DDPStrategy"])
def test_strategies_of_lightning(strategy: str) -> None:
    assert isinstance(build(with_trainer(strategy=strategy)).trainer.strategy, DDPStrategy)


def test_foreign_strategy_by_class_path_without_arguments() -> None:  # Lightning#19682
    strategy = build(with_trainer(strategy={"class_path": "tests.cli.toys.ToyStrategy"})).trainer.strategy
    assert type(strategy) is toys.ToyStrategy


def test_strategy_by_flags() -> None:
    flags = ["--trainer.devices=2", "--trainer.strategy=LongContextFSDPStrategy"]
    strategy = build(TOYS, *flags, "--trainer.strategy.sequence-parallel-size=2").trainer.strategy
    assert isinstance(strategy, LongContextFSDPStrategy)
    assert strategy.sequence_parallel_size == 2


# -- callbacks and loggers --------------------------------------------------------------------------------------------


def names(cli: LongContextCLI) -> list[str]:
    return [type(callback).__name__ for callback in cli.trainer.callbacks]


def test_bare_names_of_callbacks() -> None:
    callbacks = ["ExactTokenMean", {"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}}]
    cli = build(with_trainer(callbacks=callbacks))
    assert {"ExactTokenMean", "LearningRateMonitor", "TrainingMetrics"} <= set(names(cli))
    monitor = next(item for item in cli.trainer.callbacks if isinstance(item, LearningRateMonitor))
    assert monitor.logging_interval == "step"


@pytest.mark.parametrize(
    "callbacks", [None, "TrainingMetrics", ["lightning_longctx.TrainingMetrics", "ExactTokenMean"]]
)
def test_metrics_are_added_once(callbacks: Any) -> None:
    assert names(build(with_trainer(callbacks=callbacks))).count("TrainingMetrics") == 1


def test_callbacks_are_appended_by_flag() -> None:
    config = with_trainer(callbacks=["ExactTokenMean"])
    cli = build(config, "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every-n-train-steps=3")
    assert any(isinstance(item, ExactTokenMean) for item in cli.trainer.callbacks)
    checkpoints = [item for item in cli.trainer.callbacks if isinstance(item, ModelCheckpoint)]
    assert [item._every_n_train_steps for item in checkpoints] == [3]


def test_logs_go_to_runs() -> None:
    trainer = build(TOYS).trainer
    assert isinstance(trainer.logger, CSVLogger)
    assert Path(trainer.log_dir or "") == Path("runs/version_0")


@pytest.mark.parametrize("logger", ["TensorBoardLogger", {"class_path": "TensorBoardLogger"}])
def test_another_logger_by_bare_name(logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    assert isinstance(build(with_trainer(logger=logger)).trainer.logger, TensorBoardLogger)


def test_no_logger() -> None:
    assert build(with_trainer(logger=False)).trainer.loggers == []


# -- what is printed and saved ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "echoed"), [("512K", 524288), ("1M", 1048576), (2e10, 20000000000), ("2e10", 20000000000), (4096, 4096)]
)
def test_token_counts_are_echoed_as_integers(written: Any, echoed: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**TOYS, "data": {"class_path": "tests.cli.toys.ToyData", "init_args": {"max_seq_len": written}}}
    assert printed(config, capsys)["data"]["init_args"]["max_seq_len"] == echoed


def test_token_count_by_flag_and_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model": {"config": "tiny-llama", "schedule": {"over": "tokens"}}, "data": {"sources": {"a": "x"}}}
    found = printed(config, capsys, "--data.max-seq-len", "512K", "--model.schedule.warmup-tokens=2e8")
    assert found["data"]["init_args"]["max_seq_len"] == 524288
    assert found["model"]["init_args"]["schedule"]["warmup_tokens"] == 200_000_000


def test_print_config_without_a_file_shows_our_settings(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed({}, capsys, "--data.sources.code=python-stdlib")
    assert found["trainer"]["max_steps"] == -1
    assert found["model"]["init_args"]["optimizer"]["lr"] == 3e-4
    assert found["data"]["init_args"]["max_seq_len"] == 4096
    assert found["seed_everything"] == 42


@pytest.mark.parametrize(
    ("flag", "said"), [("--model.help", "--model.config_overrides"), ("--data.help", "--data.loading.num_workers")]
)
def test_help_of_a_section_is_that_of_our_class(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", flag])
    assert end.value.code == 0
    assert said in capsys.readouterr().out


def test_a_printed_configuration_builds_the_same(texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "trainer": {**TOYS["trainer"], "strategy": "LongContextFSDPStrategy", "callbacks": ["ExactTokenMean"]},
        "model": {"config": "tiny-llama"},
        "data": {"max_seq_len": "2K", "sources": {"a": {"path": texts, "min_tokens": "1K"}}},
    }
    first = printed(config, capsys)
    assert printed(first, capsys) == first


def test_a_run_leaves_metrics_and_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"--config={yaml.safe_dump(with_trainer(log_every_n_steps=1))}"]) == 0
    lines = Path("runs/version_0/metrics.csv").read_text().splitlines()
    assert "train/loss" in lines[0]
    assert len(lines) == 3
    text = Path("runs/version_0/config.yaml").read_text()
    for name in ("torch", "lightning"):
        assert f"# {name}=={version(name)}\n" in text
    assert f"# python=={platform.python_version()}\n" in text
    saved = yaml.safe_load(text)
    assert saved["model"]["init_args"]["optimizer"]["lr"] == 0.5
    assert saved["trainer"]["max_steps"] == 2


def test_a_second_run_overwrites_the_saved_configuration() -> None:
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "name": "mine", "version": 0}}
    config = f"--config={yaml.safe_dump(with_trainer(logger=logger))}"
    assert main(["fit", config, "--trainer.max_steps=1"]) == 0
    assert main(["fit", config, "--trainer.max_steps=3"]) == 0
    assert yaml.safe_load(Path("mine/version_0/config.yaml").read_text())["trainer"]["max_steps"] == 3


def test_validate_logs_the_validation_loss() -> None:
    assert main(["validate", f"--config={yaml.safe_dump(TOYS)}"]) == 0
    assert "val/loss" in Path("runs/version_0/metrics.csv").read_text().splitlines()[0]


def test_steps_alone_set_no_limit_on_epochs() -> None:
    config = with_trainer(max_steps=6, log_every_n_steps=1)
    assert main(["fit", f"--config={yaml.safe_dump(config)}"]) == 0  # two passes over four rows
    assert Path("runs/version_0/metrics.csv").read_text().splitlines()[-1].startswith("1,5,")


def test_files_are_joined_and_later_ones_win(write: Callable[..., str]) -> None:
    first, second = write(TOYS), write({"trainer": {"max_steps": 9}}, "more.yaml")
    cli = LongContextCLI(["--config", first, "--config", second], run=False)
    assert cli.trainer.max_steps == 9


def test_runs_start_from_the_same_seed() -> None:
    def weights(*flags: str) -> Any:
        model = build(TOYS, *flags).model
        assert isinstance(model, LightningModule)
        return model.layer.weight.detach().clone()

    assert weights().equal(weights())
    assert not weights().equal(weights("--seed_everything=7"))


def test_metrics_class_is_the_public_one() -> None:
    assert any(type(item) is TrainingMetrics for item in build(TOYS).trainer.callbacks)


def test_numbers_of_tokens_under_lightnings_own_command_line(texts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that takes the data module only has the stock parser."""
    monkeypatch.setattr("sys.argv", ["main.py"])  # Lightning warns of words besides `args`
    args = {"model": {"class_path": "tests.cli.toys.ToyModel"}, "data": {"sources": {"a": texts}, "max_seq_len": "2K"}}
    settings: dict[str, Any] = {"subclass_mode_model": True, "seed_everything_default": 1, "run": False}
    cli = LightningCLI(LightningModule, DynamicBatchingDataModule, args=args, **settings)
    assert cli.datamodule.max_seq_len == 2048
