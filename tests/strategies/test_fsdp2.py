"""The strategy in real fits: what it refuses, second fits, own modules, manual optimization, evaluation."""

from __future__ import annotations

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FSDPModule

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy, TrainingMetrics
from lightning_longctx.errors import FieldError
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.parity.layouts import whole
from tests.strategies.own_model import OwnModule


def trainer_for(world, sp, **options):
    settings = {"max_steps": 2, "callbacks": [TrainingMetrics()], "num_sanity_val_steps": 0, "limit_val_batches": 1}
    settings["strategy"] = LongContextFSDPStrategy(sequence_parallel_size=sp)
    return quiet_trainer(
        devices=world,
        **{**settings, **options},
    )


def fit(world, sp, module_options=None, trainer_options=None):
    """Fit and return the whole weights, or the error's type and message."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    module = OwnModule(**(module_options or {}))
    try:
        trainer = trainer_for(world, sp, **(trainer_options or {}))
        trainer.fit(module)
    except FieldError as error:
        return type(error).__name__, str(error)
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


# -- before any process group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "sp", "arithmetic"), [(2, 3, "2 / 3 leaves 2"), (4, 8, "4 / 8 leaves 4"), (3, 2, "3 / 2 leaves 1")]
)
def test_a_world_that_sp_does_not_divide_is_refused_when_the_trainer_is_built(devices, sp, arithmetic):
    with pytest.raises(ConfigurationError, match="must divide the number of processes") as caught:
        trainer_for(devices, sp)
    assert arithmetic in str(caught.value)


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2"])
def test_a_size_that_is_no_positive_int_is_refused(size):
    with pytest.raises(ConfigurationError, match="must be a positive int"):
        LongContextFSDPStrategy(sequence_parallel_size=size)


def test_heads_that_sp_does_not_divide_are_refused_with_the_arithmetic():
    strategy = LongContextFSDPStrategy(sequence_parallel_size=4)
    module = OwnModule()
    module.config = type("Config", (), {"num_attention_heads": 6})()
    with pytest.raises(ConfigurationError, match=r"4 for 6 heads \(6 / 4 leaves 2\)"):
        strategy.connect(module)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_other_precisions_are_refused_also_for_a_strategy_by_name(precision):
    with pytest.raises(ConfigurationError, match="32-true"):
        pl.Trainer(accelerator="cpu", strategy="longctx_fsdp", precision=precision, logger=False)


def test_the_strategy_is_registered_by_name():
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="longctx_fsdp", logger=False)
    assert isinstance(trainer.strategy, LongContextFSDPStrategy)
    assert trainer.strategy.sequence_parallel_size == 1


def test_topology_before_the_processes_are_connected_is_an_error():
    with pytest.raises(ConfigurationError, match="exists once the processes are connected"):
        _ = LongContextFSDPStrategy().topology


# -- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_an_own_module_trains_alike_in_every_layout():
    alone = run_ranks(fit, 1, 1, 1)[0]
    for world in (2, 4):
        shared = run_ranks(fit, world, world, world)[0]
        for name, value in alone.items():
            torch.testing.assert_close(shared[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.distributed
def test_manual_optimization_with_one_optimizer_gives_the_exact_mean():
    # Two micro-batches a step by hand equal accumulate_grad_batches=2: the same rows, the same mean.
    automatic = run_ranks(fit, 2, 2, 2, None, {"accumulate_grad_batches": 2})[0]
    manual = run_ranks(fit, 2, 2, 2, {"manual": 1})[0]
    for name, value in automatic.items():
        torch.testing.assert_close(manual[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module_options", "message"),
    [
        ({"exchanges": False}, "a step without any exchange"),
        ({"exchanges until": 1}, "a step without any exchange"),
        ({"output": "mean only"}, "must return a dict with `loss` and `per_token_loss`"),
        ({"output": "wrong loss"}, "must equal per_token_loss.sum() / loss_divisor"),
        ({"own rows": True}, "must give the ranks of a sequence-parallel group the same row"),
        ({"manual": 2}, "must return one optimizer in manual optimization"),
        ({"heads": 1}, "must divide the number of query heads"),
    ],
)
def test_what_would_train_silently_wrong_is_refused_on_every_rank(module_options, message):
    for name, text in run_ranks(fit, 2, 2, 2, module_options):
        assert name == "ConfigurationError"
        assert message in text


def fit_unequal_weights(world, sp):
    import os

    return fit(world, sp, {"seed": int(os.environ["RANK"])})


@pytest.mark.distributed
def test_unequal_initial_weights_are_named():
    for name, text in run_ranks(fit_unequal_weights, 2, 2, 1):
        assert name == "ConfigurationError"
        assert "model.embedding.weight" in text


def fit_padded_batches():
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    module = OwnModule()
    try:
        trainer_for(2, 2).fit(module, train_dataloaders=[{"input_ids": torch.zeros(1, 4).long()}])
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_batch_that_is_not_packed_is_refused_at_sp_2():
    assert all("must be a packed batch" in text for text in run_ranks(fit_padded_batches, 2))


def fit_a_mean_of_means():
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer_for(1, 1).fit(OwnModule(output="mean only"))
    return [str(entry.message) for entry in seen if "mean of means" in str(entry.message)]


@pytest.mark.distributed
def test_without_sequence_parallelism_a_plain_loss_trains_with_one_warning():
    assert len(run_ranks(fit_a_mean_of_means, 1)[0]) >= 1


class Flags(Callback):
    """Notes in evaluation whether tensors would be inference tensors."""

    def __init__(self):
        self.inference = []

    def on_validation_batch_start(self, *args):
        self.inference.append(torch.is_inference_mode_enabled())


def again_and_again():
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    flags = Flags()
    module = OwnModule(rows=16)
    trainer = trainer_for(2, 2, callbacks=[TrainingMetrics(), flags])
    before = trainer.validate(module, verbose=False)[0]["val/loss"]
    trainer.fit(module)
    first = {name: whole(parameter) for name, parameter in module.named_parameters()}
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    second_trainer = trainer_for(2, 2)
    second_trainer.fit(module)
    predictions = second_trainer.predict(module)
    after = second_trainer.validate(module, verbose=False)[0]["val/loss"]
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop)
    return {
        "before": before,
        "after": after,
        "moved": any(not torch.equal(first[n], whole(p)) for n, p in module.named_parameters()),
        "sharded": isinstance(module, FSDPModule) and all(hasattr(p, "full_tensor") for p in module.parameters()),
        "predictions": len(predictions),
        "flags": [loop.inference_mode for loop in loops] + flags.inference,
    }


@pytest.mark.distributed
def test_validate_before_fit_fit_again_and_predict_after_fit():
    for seen in run_ranks(again_and_again, 2):
        assert seen["after"] < seen["before"]
        assert seen["moved"]
        assert seen["sharded"]
        assert seen["predictions"] == 16
        assert not any(seen["flags"])


def fit_again_with(options, precision):
    """Two fits of one module, the second under a strategy of its own; returns the message of what it refused."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    module = OwnModule()
    trainer_for(2, 2).fit(module)
    again = trainer_for(2, 2, precision=precision, strategy=LongContextFSDPStrategy(2, **options))
    try:
        again.fit(module)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "precision", "message"),
    [
        ({}, "32-true", None),
        ({"activation_checkpointing": "full"}, "32-true", "`strategy.activation_checkpointing` must stay"),
        ({"sharding": {"prefetch": 2}}, "32-true", "`strategy.sharding` must stay.*'?prefetch'?: 2"),
        ({}, "bf16-mixed", "`trainer.precision` must stay.*bf16-mixed where .* 32-true"),
    ],
)
def test_settings_that_a_sharded_module_cannot_change_are_refused(options, precision, message):
    for found in run_ranks(fit_again_with, 2, options, precision):
        assert found == "" if message is None else re.search(message, found), found
