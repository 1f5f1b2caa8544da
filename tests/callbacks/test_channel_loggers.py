"""ChannelLoss with real loggers, whose files are read back: CSV, TensorBoard, W&B offline; and several at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean, TrainingMetrics
from tests.callbacks.channels import BATCHES, NAMES, expected_metrics, loader
from tests.callbacks.logged import read_csv, read_tensorboard, read_wandb
from tests.callbacks.toy import ToyLM, run_fit
from tests.helpers.processes import run_python

VALIDATION = BATCHES[:2]


def train(logger: Any) -> None:
    channel = ChannelLoss(source_names=NAMES, every_n_steps=2)
    run_fit([ExactTokenMean(), TrainingMetrics(), channel], ToyLM(lr=0.0), BATCHES, loader(VALIDATION), logger=logger)


def expected() -> dict[int, dict[str, float]]:
    """What must be in a logger, by step: two training steps, and the validation after the last one."""
    validation = expected_metrics(VALIDATION, prefix="val_channel")
    return {1: expected_metrics([BATCHES[1]]), 3: expected_metrics([BATCHES[3]]), 4: validation}


def channels(logged: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The values of sources alone."""
    kept = {step: {key: value for key, value in row.items() if "channel" in key} for step, row in logged.items()}
    return {step: row for step, row in kept.items() if row}


def test_csv(tmp_path: Path) -> None:
    train(CSVLogger(tmp_path, name="run"))
    found = read_csv(tmp_path / "run" / "version_0" / "metrics.csv")
    assert channels(found) == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert len([values for values in found.values() if "train/loss" in values]) == len(BATCHES)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(TensorBoardLogger(tmp_path, name="run"))
    found, _ = read_tensorboard(tmp_path / "run" / "version_0")
    assert channels(found) == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert (tmp_path / "run" / "version_0" / "channel_loss.png").exists()


def test_several_loggers_get_the_same(tmp_path: Path) -> None:
    train([CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")])
    first, second = ((tmp_path / name / "version_0" / "metrics.csv").read_text() for name in "ab")
    assert first == second
    assert "val_channel_loss/code" in first


def run_alone(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script in a process of its own: some loggers start services that outlive a run. Returns what it prints."""
    code, out, err = run_python(["-c", script, str(folder)], folder, limit=300, **environment)
    assert code == 0, out + err
    return out


WANDB_RUN = """
import sys
from pathlib import Path
from lightning.pytorch.loggers import WandbLogger
from tests.callbacks.test_channel_loggers import train
logger = WandbLogger(save_dir=sys.argv[1], project="test", offline=True)
train(logger)
logger.experiment.finish()
"""


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_alone(WANDB_RUN, tmp_path, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    found, _ = read_wandb(next(tmp_path.rglob("*.wandb")))
    assert channels(found) == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert list(tmp_path.rglob("channel_loss.png"))
