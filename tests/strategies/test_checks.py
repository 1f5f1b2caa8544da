"""What is refused before a process is started, and ranks that belong to different runs."""

from __future__ import annotations

import os
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EMAWeightAveraging,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)

from lightning_longctx import ConfigurationError, DynamicBatchingDataModule, ExactTokenMean, LongContextFSDPStrategy
from lightning_longctx.strategies.agreement import check_equal_facts, package_versions, stable_text
from lightning_longctx.strategies.checks import CheckingLauncher, run_facts
from lightning_longctx.strategies.settings import ShardingSettings
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.strategies.own_model import OwnModule


def two_devices(*callbacks: Callback, **settings) -> pl.Trainer:
    return quiet_trainer(
        devices=2,
        strategy=LongContextFSDPStrategy(**settings),
        callbacks=list(callbacks),
        max_steps=2,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
    )


@pytest.fixture
def no_process(monkeypatch):
    """Starting a child is a failure."""

    def start(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr("lightning.pytorch.strategies.launchers.subprocess_script.subprocess.Popen", start)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "must not copy the module.*StochasticWeightAveraging"),
        (WeightAveraging(), "must not copy the module.*WeightAveraging"),
        (EMAWeightAveraging(), "must not copy the module.*EMAWeightAveraging"),
        (ModelPruning("l1_unstructured"), "must not mask parameters one by one.*prune the exported model"),
        (OnExceptionCheckpoint("."), "must not save when one rank fails.*Use AsyncDCPCheckpoint"),
        (ThroughputMonitor(lambda batch: 1), "must not take the rows of one rank.*Use TrainingMetrics"),
        (ExactTokenMean(), "applies the exact token mean by itself"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("start", ["fit", "validate"])
def test_callbacks_that_cannot_work_start_no_process(callback, message, start, no_process):
    trainer = two_devices(callback)
    with pytest.raises(ConfigurationError, match=message):
        getattr(trainer, start)(OwnModule())


def test_heads_that_do_not_divide_start_no_process(no_process):
    module = OwnModule()
    module.config = type("Config", (), {"num_attention_heads": 3})()
    with pytest.raises(ConfigurationError, match="3 / 2 leaves 1"):
        two_devices(sequence_parallel_size=2).fit(module)


def test_sizes_of_the_data_that_do_not_divide_start_no_process(no_process):
    data = DynamicBatchingDataModule({"a": [{"text": "a"}]}, max_seq_len=64, global_batch_tokens=192)
    rule = "64 tokens x 2 data-parallel ranks = 128, but got 192 = 1 x 128 . 64"
    for arguments in ((OwnModule(), data), (OwnModule(), None, None, data)):
        with pytest.raises(ConfigurationError, match=rule):
            two_devices().fit(*arguments)
    with pytest.raises(AssertionError, match="a process was started"):
        two_devices(sequence_parallel_size=2).fit(OwnModule(), data)  # one row of both


def test_a_fine_run_is_launched(no_process):
    trainer = two_devices()
    assert isinstance(trainer.strategy.launcher, CheckingLauncher)
    with pytest.raises(AssertionError, match="a process was started"):
        trainer.fit(OwnModule())


def fit_with_an_averaging_callback():
    try:
        two_devices(WeightAveraging()).fit(OwnModule())
    except ConfigurationError as error:
        return str(error), dist.is_initialized()
    return "no error", True


@pytest.mark.distributed
def test_processes_that_others_started_are_told_before_they_connect():
    for text, connected in run_ranks(fit_with_an_averaging_callback, 2):
        assert "must not copy the module" in text
        assert not connected


# -- ranks of one run ------------------------------------------------------------------------------------------------


def test_text_of_settings_has_no_addresses_and_no_order():
    assert stable_text({"b": 1, "a": [None, 2.5, "x"]}) == "{a: [None, 2.5, 'x'], b: 1}"
    assert stable_text({"a": object()}) == stable_text({"a": object()})
    assert stable_text(ShardingSettings(prefetch=2)) != stable_text(ShardingSettings())


def test_versions_are_those_of_what_is_installed():
    versions = package_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "lightning", "transformers", "lightning-longctx"} <= versions.keys()


def compare(differing_rank, name, value):
    dist.init_process_group("gloo")
    facts = {"version of torch": "2.13.0", "trainer.max_steps": 10, "model's text": "x" * 500}
    if dist.get_rank() == differing_rank:
        facts[name] = value
    try:
        check_equal_facts(facts, dist.group.WORLD, torch.device("cpu"))
    except ConfigurationError as error:
        return str(error)
    return "equal"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "name", "value", "message"),
    [
        (3, "version of torch", "2.12.1", "`version of torch` .*rank 3 has 2.12.1; the others have 2.13.0"),
        (0, "trainer.max_steps", 20, "`trainer.max_steps` .*rank 0 has 20; the others have 10"),
        (2, "model's text", "x" * 499 + "y", "`model's text` .*rank 2 has another"),
    ],
)
def test_the_rank_that_differs_is_named_on_every_rank(rank, name, value, message):
    import re

    assert all(re.match(message, text) for text in run_ranks(compare, 4, rank, name, value))


@pytest.mark.distributed
def test_equal_ranks_pass():
    assert run_ranks(compare, 2, -1, "", "") == ["equal"] * 2


def fit_with_another_setting(name):
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    odd = os.environ["RANK"] == "1"
    trainer = two_devices(sequence_parallel_size=2 if odd and name == "sequence_parallel_size" else 1)
    if name == "max_steps":
        trainer.fit_loop.epoch_loop.max_steps = 3 + odd
    module = OwnModule()
    if name == "hyperparameters":
        module.save_hyperparameters({"lr": 0.1 + odd})
    loading, length = {"seed": 7 if odd and name == "loading" else 42}, 64 if odd and name == "max_seq_len" else 32
    sources = {"b" if odd and name == "sources" else "a": [{"text": "some words"}] * 40}
    data = DynamicBatchingDataModule(sources=sources, max_seq_len=length, loading=loading)
    try:
        trainer.fit(module, None if name == "data" and not odd else data)
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    ["sequence_parallel_size", "max_steps", "hyperparameters", "data", "sources", "max_seq_len", "loading"],
)
def test_a_rank_with_another_configuration_is_named_before_the_first_step(name):
    for text in run_ranks(fit_with_another_setting, 2, name):
        assert name in text.partition("`")[2].partition("`")[0]
        assert "rank 1 has" in text


def test_the_facts_hold_versions_layout_trainer_and_model():
    trainer, module = two_devices(sequence_parallel_size=2), OwnModule()
    module.trainer = trainer
    facts = run_facts(module, trainer.strategy)
    assert facts["strategy.sequence_parallel_size"] == 2
    assert facts["trainer.precision"] == "32-true"
    assert facts["model"] == "OwnModule"
    assert {f"version of {name}" for name in package_versions()} <= facts.keys()
