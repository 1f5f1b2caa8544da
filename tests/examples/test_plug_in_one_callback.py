"""The example of one callback in a project of one's own: the right numbers, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_longctx import ChannelLoss
from tests.callbacks.toy import make_trainer
from tests.contracts.source import ROOT
from tests.helpers.scripts import load_script


def _fit(example: Any, callbacks: list[Any], steps: int) -> Any:
    seed_everything(0)
    project = example.Project()
    loader = example.DataLoader(example.TwoDataSets(), batch_size=16)
    make_trainer(callbacks, max_steps=steps, log_every_n_steps=1).fit(project, loader)
    return project


def test_three_lines_are_new() -> None:
    lines = (ROOT / "examples" / "plug_in_one_callback.py").read_text().splitlines()
    assert sum("# new" in line for line in lines) == 3


def test_training_is_the_same_bit_for_bit_without_it() -> None:
    example = load_script("examples/plug_in_one_callback.py")
    channel = ChannelLoss(source_key="dataset_id", source_names=["counting", "chance"])
    plain, watched = _fit(example, [], 3), _fit(example, [channel], 3)
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_losses_are_those_of_the_rows_of_each_data_set() -> None:
    example = load_script("examples/plug_in_one_callback.py")
    channel = ChannelLoss(source_key="dataset_id", source_names=["counting", "chance"])
    _fit(example, [channel], 1)
    seed_everything(0)
    project = example.Project()
    batch = next(iter(example.DataLoader(example.TwoDataSets(), batch_size=16)))
    for number, name in enumerate(["counting", "chance"]):
        rows = batch["dataset_id"] == number
        logits = project.model(batch["input_ids"][rows])[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batch["labels"][rows][:, 1:].flatten())
        assert channel.latest[name].loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_the_example_shows_which_data_set_can_be_learned() -> None:
    losses = load_script("examples/plug_in_one_callback.py").main(100)
    assert losses["counting"] < 1 < 3 < losses["chance"]
