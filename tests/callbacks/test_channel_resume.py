"""ChannelLoss after a resume: the same values as without a stop, and sources that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean
from tests.callbacks.channels import BATCHES, NAMES, Doc, channel_rows, fit, per_source, row
from tests.callbacks.toy import ToyLM, run_fit


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    settings: Any = {"source_names": NAMES, "every_n_steps": 4, "average_over": "interval"}
    batches = [*BATCHES, *BATCHES[:3]]
    whole = ChannelLoss(**settings)
    expected = channel_rows(fit(whole, batches=batches))
    first = ChannelLoss(**settings)
    trainer = run_fit([ExactTokenMean(), first, _Save(2, tmp_path / "two.ckpt")], ToyLM(lr=0.0), batches, max_steps=3)
    assert trainer.global_step == 3
    second = ChannelLoss(**settings)
    rows = channel_rows(fit(second, batches=batches[2:], ckpt_path=tmp_path / "two.ckpt", max_steps=8))
    assert rows == [(step, pytest.approx(values, rel=1e-12)) for step, values in expected]
    assert second.history.steps == whole.history.steps == [4, 8]


class _Save(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path, weights_only=False)
            state = torch.load(self.path, weights_only=True)["callbacks"]["ChannelLoss"]
            assert state["steps_since"] == self.step
            assert state["window"]


def test_sources_may_be_added_and_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "two.ckpt"
    settings: Any = {"every_n_steps": 4, "average_over": "interval"}
    first = ChannelLoss(source_names=["my data", "b", "c"], **settings)
    run_fit([ExactTokenMean(), first, _Save(2, path)], ToyLM(lr=0.0), BATCHES, max_steps=2)
    batches = [row(7, [Doc(0, 8), Doc(1, 8)]), row(8, [Doc(2, 8)])]
    # `b` is gone, `c` has another id, and `my_data` is new: it must not take the key of `my data`.
    second = ChannelLoss(source_names=["c", "my_data", "my data"], **settings)
    ((_, found),) = channel_rows(fit(second, batches=batches, ckpt_path=path, max_steps=4))
    before, after = per_source(BATCHES[:2]), per_source(batches)
    tokens = {key.rpartition("/")[2]: value for key, value in found.items() if "tokens" in key}
    (new,) = tokens.keys() - {"c", "my_data"}
    assert new.startswith("my_data-")
    assert tokens["c"] == before[2][1] + after[0][1]
    assert tokens["my_data"] == before[0][1] + after[2][1]
    assert tokens[new] == after[1][1]
