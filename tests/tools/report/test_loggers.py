"""Runs that other loggers than CSVLogger wrote: real files of TensorBoard and W&B, and MLflow's store of files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_output import publish_window, run_folder
from lightning_longctx.cli import main
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.wandb_file import read
from lightning_longctx.tools.report.run import Run, read_runs
from lightning_longctx.tools.report.series import Series
from tests.helpers.processes import run_python
from tests.tools.report.helpers import CONFIGURATION, Page, write_metrics, write_run

#: Two starts of a run: the second goes back to step 2.
STARTS: tuple[Mapping[int, float], ...] = ({0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}, {2: 2.5, 3: 1.5, 4: 1.25})
JOINED = ([0, 1, 2, 3, 4], [5.0, 4.0, 2.5, 1.5, 1.25])

WANDB_START = """
import json, sys
from lightning.pytorch.loggers import WandbLogger
import wandb
logger = WandbLogger(project="p", offline=True, id="abc", save_dir=".")
for step, loss in json.loads(sys.argv[1]).items():
    logger.log_metrics({"train/loss": loss, "channel_loss/a<b>": loss, "my/nan": float("nan")}, step=int(step))
wandb.finish()
"""


def loss_of(run: Run) -> tuple[list[int], list[float]]:
    found = run.get("train/loss")
    return found.steps.tolist(), found.values.tolist()


def write_events(version: int = 0, starts: tuple[Mapping[int, float], ...] = STARTS) -> Path:
    """A file of events for each start."""
    pytest.importorskip("tensorboard")
    for start in starts:
        logger = TensorBoardLogger(".", name="runs", version=version)
        for step, loss in start.items():
            logger.log_metrics({"train/loss": loss, "channel_loss/a<b>": loss, "epoch": 0}, step=step)
        logger.finalize("success")
    return Path(f"runs/version_{version}")


def write_store(start: Mapping[int, float], path: Path = Path("mlruns/1/f00"), started: int = 10) -> Path:
    """What MLflow's store of files holds of a run: a line of milliseconds, value and step for each value."""
    (path / "metrics/train").mkdir(parents=True)
    (path / "meta.yaml").write_text(f"run_name: x\nstart_time: {started}\n")
    (path / "metrics/train/loss").write_text("".join(f"{started} {loss} {step}\n" for step, loss in start.items()))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_runs([path])
    return str(caught.value)


def test_event_files_of_two_starts_are_one_run_and_the_later_value_counts() -> None:
    path = write_events()
    assert len(list(path.glob("events.*"))) == 2
    (run,) = read_runs([path])
    assert loss_of(run) == JOINED
    assert (run.logger, run.aside) == ("TensorBoardLogger", ())
    assert set(run.series) == {"train/loss", "channel_loss/a<b>"}


def test_what_a_run_logged_beyond_the_checkpoint_that_it_went_back_to_is_left_out() -> None:
    path = write_events(starts=STARTS[:1])
    logger = TensorBoardLogger(".", name="runs", version=0, purge_step=2)  # as AsyncDCPCheckpoint sets it
    logger.log_metrics({"train/loss": 2.5}, step=2)
    logger.finalize("success")
    (run,) = read_runs([path])
    assert loss_of(run) == ([0, 1, 2], [5.0, 4.0, 2.5])
    assert run.series["channel_loss/a<b>"].steps.tolist() == [0, 1]


def test_a_page_of_events_has_sources_experts_and_settings_and_escapes_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_events()
    (path / "config.yaml").write_text(CONFIGURATION)
    load = RouterLoad(1, 4, ("m.0",), ("layer_00",), (torch.tensor([3, 1]),), padding=0, dropped=0)
    publish_window(load, run_folder(path, resumed=False), [], 1)
    assert main(["report", str(path)]) == 0
    page = Page((path / "report.html").read_text())
    assert page.all("input", type="range") or page.all("div", class_="heat")
    assert page.curve("Loss", "training")[-1] == pytest.approx((4, 1.25), abs=0.01)
    assert "a<b>" in "".join(one.text for one in page.all("figure"))
    assert not page.all("b")
    assert "read from the files of TensorBoardLogger" in page.source
    assert "also there" not in capsys.readouterr().out


def test_an_event_that_is_being_written_is_left_out() -> None:
    path = write_events(starts=STARTS[:1])
    (file,) = path.glob("events.*")
    os.truncate(file, file.stat().st_size - 3)
    (run,) = read_runs([path])
    assert loss_of(run) == ([0, 1, 2, 3], [5, 4, 3, 2])
    assert set(run.series["channel_loss/a<b>"].steps.tolist()) <= {0, 1, 2, 3}
    os.truncate(file, 5)
    assert "must have values, but got none yet" in refusal(path)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_events()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    assert "needs the package tensorboard" in refusal(path)
    assert "pip install tensorboard" in refusal(path)
    write_metrics(path, [{"step": 0, "train/loss": 3.0}])
    assert loss_of(read_runs([path])[0]) == ([0], [3.0]), "another logger's files need no package"


def test_of_several_loggers_the_one_that_was_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_events()
    write_run(path)
    assert main(["report", str(path)]) == 0
    assert "read from the files of CSVLogger; also there: TensorBoardLogger." in capsys.readouterr().out
    (path / "metrics.csv").write_text("step,train/loss\n")
    assert main(["report", str(path)]) == 0
    told = capsys.readouterr().out
    assert "read from the files of TensorBoardLogger; also there: CSVLogger (" in told
    assert "must have values" in told


def test_no_logger_is_told_with_all_that_was_looked_for() -> None:
    Path("empty").mkdir()
    told = refusal(Path("empty"))
    for word in ("metrics.csv", "events.out.tfevents", "run-*.wandb", "meta.yaml", "logger: [CSVLogger]"):
        assert word in told
    write_store(STARTS[0])
    assert "Did you mean mlruns/1/f00?" in refusal(Path("mlruns"))


def test_the_store_of_mlflow_is_read_without_its_package() -> None:
    path = write_store({**STARTS[0], 4: float("nan")})
    file = path / "metrics/train/loss"
    file.write_text(file.read_text() + "12 7.5 1\n13 1.2")  # gone back; being written
    (run,) = read_runs([path])
    steps, values = loss_of(run)
    assert steps == [0, 1, 2, 3, 4]
    assert values[:4] == [5, 7.5, 3, 2]
    assert np.isnan(values[4])
    assert run.logger == "MLFlowLogger"
    file.write_text("what is this\n")
    assert "must have lines of time, value and step" in refusal(path)


def test_a_configuration_in_a_shared_folder_belongs_to_the_newest_run() -> None:
    older, newer = write_store(STARTS[0]), write_store(STARTS[1], Path("mlruns/1/f01"), started=20)
    Path("mlruns/config.yaml").write_text(CONFIGURATION)
    assert [bool(run.configuration) for run in read_runs([older, newer])] == [False, True]


def test_expert_load_in_a_shared_folder_belongs_to_the_run_that_logged_it() -> None:
    own, other = write_store(STARTS[0]), write_store(STARTS[0], Path("mlruns/1/f01"))
    load = RouterLoad(1, 4, ("m.0",), ("layer_00",), (torch.tensor([3, 1]),), padding=0, dropped=0)
    publish_window(load, run_folder(Path("mlruns"), resumed=False), [], 1)
    for path, most in ((own, 3), (other, 4)):
        (path / "metrics/moe").mkdir()
        (path / "metrics/moe/tokens_max").write_text(f"10 {most} 3\n")
    assert [run.experts is not None for run in read_runs([own, other])] == [True, False]


@pytest.mark.slow
def test_files_of_wandb_of_two_starts_are_one_run() -> None:
    pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for start in STARTS:
        code, _, err = run_python(["-c", WANDB_START, json.dumps(start)], Path(), limit=100, WANDB_SILENT="true")
        assert code == 0, err
    paths = sorted(Path("wandb").glob("offline-run-*-abc"))
    assert len(paths) == 2
    for path in paths:
        (run,) = read_runs([path])
        assert loss_of(run) == JOINED
        assert set(run.series) == {"train/loss", "channel_loss/a<b>", "my/nan"}
        assert len(run.series["my/nan"].bad_steps) == 5
    shutil.rmtree(paths[0])
    (file,) = paths[1].glob("*.wandb")
    data = file.read_bytes()
    for size in range(len(data) // 2, len(data), 97):  # while it is being written
        file.write_bytes(data[:size])
        steps = read([file]).get("train/loss", Series.empty()).steps.tolist()
        assert steps == [2, 3, 4][: len(steps)]
    file.write_bytes(b"something else")
    assert "must be a file of W&B" in refusal(paths[1])
