"""ChannelLoss with real loggers, whose files are read back: CSV, TensorBoard, W&B offline; and several at once."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean, TrainingMetrics
from tests.callbacks.channels import BATCHES, NAMES, expected_metrics, loader
from tests.callbacks.toy import ToyLM, run_fit
from tests.contracts.source import ROOT

VALIDATION = BATCHES[:2]


def train(logger: Any) -> None:
    channel = ChannelLoss(source_names=NAMES, every_n_steps=2)
    run_fit([ExactTokenMean(), TrainingMetrics(), channel], ToyLM(lr=0.0), BATCHES, loader(VALIDATION), logger=logger)


def expected() -> dict[int, dict[str, float]]:
    """What must be in a logger, by step: two training steps, and the validation after the last one."""
    validation = expected_metrics(VALIDATION, prefix="val_channel")
    return {1: expected_metrics([BATCHES[1]]), 3: expected_metrics([BATCHES[3]]), 4: validation}


def test_csv(tmp_path: Path) -> None:
    train(CSVLogger(tmp_path, name="run"))
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found: dict[int, dict[str, float]] = {}
    for line in rows:
        values = {key: float(value) for key, value in line.items() if "channel" in key and value}
        if values:
            found.setdefault(int(line["step"]), {}).update(values)
    assert found == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert len([line for line in rows if line["train/loss"]]) == len(BATCHES)


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(TensorBoardLogger(tmp_path, name="run"))
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "version_0"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if "channel" in tag else ():
            found.setdefault(event.step, {})[tag] = event.value
    assert found == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert (tmp_path / "run" / "version_0" / "channel_loss.png").exists()


def test_several_loggers_get_the_same(tmp_path: Path) -> None:
    train([CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")])
    first, second = ((tmp_path / name / "version_0" / "metrics.csv").read_text() for name in "ab")
    assert first == second
    assert "val_channel_loss/code" in first


MLFLOW_RUN = """
import json, sys
from lightning.pytorch.loggers import MLFlowLogger
from lightning_longctx.callbacks import MoERouterHeatmap
from tests.callbacks.moe import MoEModule
from tests.callbacks.test_channel_loggers import train
from tests.callbacks.test_moe_router_heatmap import BATCHES
from tests.callbacks.toy import run_fit
logger = MLFlowLogger(tracking_uri="file:" + sys.argv[1] + "/runs", save_dir=sys.argv[1])
train(logger)
run_fit([MoERouterHeatmap(6)], MoEModule(), BATCHES, logger=logger, default_root_dir=sys.argv[1])
client, found = logger.experiment, {}
for key in client.get_run(logger.run_id).data.metrics:
    for metric in client.get_metric_history(logger.run_id, key) if "channel" in key or "moe/" in key else ():
        found.setdefault(metric.step, {})[key] = metric.value
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    lines = run_alone(MLFLOW_RUN, tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true"}).splitlines()
    rows = json.loads(next(line.removeprefix("FOUND ") for line in lines if line.startswith("FOUND ")))
    found = {int(step): {key: value for key, value in row.items() if "channel" in key} for step, row in rows.items()}
    assert {step: row for step, row in found.items() if row} == {
        step: pytest.approx(values, rel=1e-6) for step, values in expected().items()
    }
    assert [step for step, row in rows.items() if "moe/max_vio" in row] == ["5", "11"]
    pictures = [path.parent.name for path in tmp_path.rglob("artifacts/**/*.png")]
    assert sorted(pictures) == ["expert_load", "expert_load", "expert_load_over_time"]


def run_alone(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script in a process of its own: some loggers start services that outlive a run. Returns what it prints."""
    command = [sys.executable, "-c", script, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    found = read_wandb(next(tmp_path.rglob("*.wandb")))
    assert found == {step: pytest.approx(values, rel=1e-6) for step, values in expected().items()}
    assert list(tmp_path.rglob("channel_loss.png"))


def read_wandb(path: Path) -> dict[int, dict[str, float]]:
    """The channel values of an offline run, by Lightning's step."""
    from wandb.proto import wandb_internal_pb2

    found: dict[int, dict[str, float]] = {}
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        values = {key: value for key, value in items.items() if "channel" in key}
        if values:
            found.setdefault(items["trainer/global_step"], {}).update(values)
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a run's file, a log as of LevelDB: blocks of 32 KiB, pieces of (checksum, length, kind, bytes).

    Recent releases of W&B have no Python code that reads it.
    """
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # no header fits into the rest of a block
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""
