"""What the two progress bars show of a run."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_longctx import DynamicBatchingDataModule
from lightning_longctx.callbacks import ExactTokenMean, TrainingMetrics
from tests.callbacks.toy import ToyLM, make_trainer

pytest.importorskip("rich", reason="Lightning's other bar needs it")

SHOWN = ("train/loss", "train/tokens_per_s", "data/source_fill", "data/wait_s_p50")


class _Terminal(io.StringIO):
    """A wide one, so that nothing is broken into lines."""

    def isatty(self) -> bool:
        return True


def watch(
    bar: ProgressBar, monkeypatch: pytest.MonkeyPatch, ckpt_path: str | None = None, **settings: int
) -> tuple[str, dict[str, Any]]:
    """Fit with a bar, saving each step; return what a terminal got, and the numbers behind it."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")
    data = DynamicBatchingDataModule({"a": [{"input_ids": [1, 2, 3, 4, 5]}] * 40}, max_seq_len=16)
    saving = ModelCheckpoint("saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [ExactTokenMean(), TrainingMetrics(), bar, saving]
    trainer = make_trainer(
        callbacks,
        **{"max_steps": 4, "max_epochs": 1, "enable_progress_bar": True, "enable_checkpointing": True, **settings},
    )
    trainer.fit(ToyLM(), datamodule=data, ckpt_path=ckpt_path)
    return terminal.getvalue(), trainer.progress_bar_metrics


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
def test_a_bar_shows_loss_speed_fill_and_wait(kind: type[ProgressBar], monkeypatch: pytest.MonkeyPatch) -> None:
    text, numbers = watch(kind(), monkeypatch)
    assert set(SHOWN) <= numbers.keys()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for key in SHOWN:
        shown = [float(value) for value in re.findall(rf"{key}(?:=|: )\s*([\d.e+-]+)", plain)]
        assert shown, f"{key} is not on the screen"
        assert shown[-1] == pytest.approx(numbers[key], rel=0.01, abs=0.001)


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize(("epochs", "shown"), [({"max_epochs": -1}, "Epoch 0 "), ({}, "Epoch 0/0 ")])
def test_a_bar_counts_no_epochs_where_there_is_no_end_of_them(
    kind: type[ProgressBar], epochs: dict[str, int], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = watch(bar := kind(), monkeypatch, **epochs)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "/-2" not in plain
    assert (shown if kind is RichProgressBar else "Epoch 0:") in plain
    assert "_get_train_description" not in vars(bar), "what is borrowed is given back"


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize("epochs", [-1, 1])
def test_a_bar_ends_where_the_run_does(kind: type[ProgressBar], epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 steps of 2 micro-batches it showed 6/3, and after a resume 6/2 or 6/?."""
    settings = {"accumulate_grad_batches": 2, "max_epochs": epochs}
    whole, _ = watch(kind(), monkeypatch, max_steps=3, **settings)
    rest, _ = watch(kind(), monkeypatch, "saved/step=1.ckpt", max_steps=3, **settings)
    for text, first in ((whole, 1), (rest, 3)):
        shown = re.findall(r" (\d+)/(\S+) ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
        done = [int(n) for n, total in shown if total == "6"]
        assert [total for n, total in shown if int(n) >= first and total != "6"] == []
        assert done[-1] == 6
        assert min(n for n in done if n) >= first - 1
    assert "Epoch 0" in rest
