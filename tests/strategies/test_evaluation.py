"""Evaluation in every layout, also before any fit, whole rows on request, and generation refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy, TrainingMetrics, gather_row, topology_of
from lightning_longctx.strategies.evaluation import allow_generate, refuse_generate
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.strategies.own_model import OwnModule

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2), (4, 4, 1)]
ROWS = 4


class Scorer(OwnModule):
    """Predicts the losses and logits of whole rows."""

    def predict_step(self, batch, batch_idx):
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = block(x, batch)
        topology = topology_of(self.trainer)
        losses = self.loss_of(batch).per_token_loss
        return gather_row(losses, topology), gather_row(self.head(x), topology)

    test_step = OwnModule.validation_step
    test_dataloader = OwnModule.train_dataloader


def evaluate(world, sp, replicas):
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    module = Scorer(rows=ROWS)
    trainer = quiet_trainer(
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp, data_parallel_replicate_size=replicas),
        callbacks=[TrainingMetrics()],
        max_steps=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    predicted = trainer.predict(module)
    tested = trainer.test(module, verbose=False)[0]["test/loss"]
    trainer.fit(module)
    trainer.limit_val_batches = 1.0
    again = trainer.predict(module)
    topology = trainer.strategy.topology
    rows = range(topology.dp_rank, ROWS, topology.dp_size)
    return {
        "predicted": dict(zip(rows, predicted, strict=True)),
        "again": dict(zip(rows, again, strict=True)),
        "tested": tested,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sp", "replicas"), LAYOUTS[1:])
def test_scores_of_whole_rows_are_the_same_before_and_after_a_fit(world, sp, replicas):
    alone = run_ranks(evaluate, 1, 1, 1, 1)[0]
    seen = set()
    for rank in run_ranks(evaluate, world, world, sp, replicas):
        assert rank["tested"] == pytest.approx(alone["tested"], rel=1e-6)
        for row, (losses, logits) in rank["predicted"].items():
            seen.add(row)
            assert losses.shape == (1, 48)
            torch.testing.assert_close(losses, alone["predicted"][row][0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(logits, alone["predicted"][row][1], rtol=1e-5, atol=1e-6)
            assert not torch.equal(rank["again"][row][0], losses), "the fit must have changed the weights"
    assert seen == set(range(ROWS))


class Generator(nn.Module):
    """A model that could generate."""

    def generate(self, tokens: int) -> int:
        return tokens


def test_generation_is_refused_while_the_strategy_runs_and_free_afterwards():
    model = nn.ModuleDict({"inner": Generator()})
    refuse_generate(model, allowed=[])
    with pytest.raises(ConfigurationError, match="`generate` is not supported while LongContextFSDPStrategy runs"):
        model["inner"].generate(1)
    allow_generate(model)
    assert model["inner"].generate(1) == 1
    refuse_generate(model, allowed=["generate"])
    assert model["inner"].generate(2) == 2


class Writer(OwnModule):
    """Generates in validation, as many training scripts do."""

    def __init__(self):
        super().__init__()
        self.writer = Generator()

    def validation_step(self, batch, batch_idx):
        self.writer.generate(3)


def generate_in_validation():
    trainer = quiet_trainer(
        strategy="longctx_fsdp",
    )
    try:
        trainer.validate(Writer())
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_generation_in_a_validation_step_is_refused():
    assert "generate from it on one device" in run_ranks(generate_in_validation, 1)[0]
