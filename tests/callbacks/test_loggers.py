"""The quickstart's callbacks with real loggers at once: each one's files hold the same keys, values and pictures.

CSV is always there; TensorBoard, W&B (offline) and MLflow (a store of files) where their packages are.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.callbacks.logged import Logged, read_csv, read_mlflow, read_tensorboard, read_wandb
from tests.contracts.source import ROOT
from tests.helpers.processes import run_python

LOGGERS = {
    "CSVLogger": {"save_dir": ".", "name": "runs"},
    "TensorBoardLogger": {"save_dir": ".", "name": "events"},
    "WandbLogger": {"save_dir": ".", "project": "test", "offline": True},
    "MLFlowLogger": {"tracking_uri": "file:./mlruns"},
}
#: One run for all tests; its process imports every logger's package.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGES = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
STEPS = 4

#: The quickstart on one process: two windows of expert load, a save inside of the run and one at its end.
CHANGES = f"""
trainer:
  devices: 1
  max_steps: {STEPS}
  strategy: {{class_path: LongContextFSDPStrategy, init_args: {{sequence_parallel_size: 1}}}}
  enable_progress_bar: false
  callbacks:
  - ChannelLoss
  - {{class_path: MoERouterHeatmap, init_args: {{every_n_steps: 2}}}}
  - {{class_path: AsyncDCPCheckpoint, init_args: {{every_n_train_steps: 2}}}}
data: {{max_seq_len: 256}}
"""


def is_there(name: str) -> bool:
    return name not in PACKAGES or find_spec(PACKAGES[name]) is not None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run with all loggers; in a process of its own, since W&B starts a service that outlives it."""
    folder = tmp_path_factory.mktemp("loggers")
    loggers = [{"class_path": name, "init_args": given} for name, given in LOGGERS.items() if is_there(name)]
    (folder / "changes.yaml").write_text(CHANGES)
    words = ["-m", "lightning_longctx", "fit", f"--config={ROOT}/examples/quickstart.yaml", "--config=changes.yaml"]
    words.append(f"--trainer.logger={json.dumps(loggers)}")
    quiet = {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    code, out, err = run_python(words, folder, limit=500, **quiet)
    assert code == 0, out + err
    return folder


@pytest.fixture
def expected(run_folder: Path) -> Logged:
    return read_csv(run_folder / "runs" / "version_0" / "metrics.csv")


def assert_same(found: Logged, expected: Logged) -> None:
    assert {step: set(values) for step, values in found.items()} == {
        step: set(values) for step, values in expected.items()
    }
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-6), step  # TensorBoard keeps float32


def test_csv_has_what_every_callback_logs(run_folder: Path, expected: Logged) -> None:
    for step in range(STEPS):
        assert {"train/loss", "train/grad_norm", "train/tokens_per_s", "data/source_fill", "data/wait_s_p99"} <= set(
            expected[step]
        )
        sources = [name for name in ("code", "prose") if f"channel_loss/{name}" in expected[step]]
        parts = [expected[step][f"channel_loss_weighted/{name}"] for name in sources]
        assert sum(parts) == pytest.approx(expected[step]["train/loss"], rel=1e-6)
    assert [step for step, values in expected.items() if "moe/max_vio" in values] == [1, 3]
    assert {step for step, values in expected.items() if "checkpoint/stall_s/weights" in values} == {2, 4}
    folder = run_folder / "runs" / "version_0"
    pictures = {path.relative_to(folder).as_posix() for path in folder.rglob("*.png")}
    windows = {f"moe_router/steps_{first:08d}-{first + 1:08d}.png" for first in (1, 3)}
    assert pictures == {*windows, "moe_router/heatmap_over_time.png", "channel_loss.png"}


def test_tensorboard_has_the_same(run_folder: Path, expected: Logged) -> None:
    if not is_there("TensorBoardLogger"):
        pytest.skip("no tensorboard here")
    found, pictures = read_tensorboard(run_folder / "events" / "version_0")
    assert_same(found, expected)
    assert pictures == {"moe/expert_load": [1, 3], "moe/expert_load_over_time": [3]}


def test_wandb_offline_has_the_same(run_folder: Path, expected: Logged) -> None:
    if not is_there("WandbLogger"):
        pytest.skip("no wandb here")
    (run,) = run_folder.glob("wandb/offline-run-*/*.wandb")
    found, pictures = read_wandb(run)
    assert_same(found, expected)
    assert pictures == {"moe/expert_load": [1, 3], "moe/expert_load_over_time": [3]}
    files = [path for path in run.parent.rglob("*.png") if path.is_file()]
    assert len(files) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_mlflow_has_the_same(run_folder: Path, expected: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there("MLFlowLogger"):
        pytest.skip("no mlflow here")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found, artifacts = read_mlflow(f"file:{run_folder}/mlruns")
    assert_same(found, expected)
    pictures = [f"moe/expert_load/step_{step:08d}.png" for step in (1, 3)]
    assert sorted(artifacts) == [*pictures, f"moe/expert_load_over_time/step_{STEPS - 1:08d}.png"]
