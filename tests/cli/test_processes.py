"""Real processes: the console script and ``python -m`` under Lightning's launcher, and what is left after a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer

from lightning_longctx.cli import app
from tests.helpers.processes import environment

# The script that pip makes of `longctx = "lightning_longctx.cli:main"`, by its content.
CONSOLE_SCRIPT = """import sys
from lightning_longctx.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""

TWO_PROCESSES: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_steps": 3,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# A start of two processes takes about 15 s on two cores; the rest is for a busy machine.
LIMIT = 150


def run(
    start: list[str], config: dict[str, Any], *flags: str, command: str = "fit"
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process group of its own; nothing of it may be left when it ends."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [*start, command, "--config", "run.yaml", *flags],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)  # also waits until no child holds the pipes
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {LIMIT} s\n{out[-3000:]}\n{err[-3000:]}")
    assert alive(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def alive(group: int) -> list[str]:
    """Processes of a group that still run; those that ended and were not asked for their exit code do not count."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, process_group = rest.split()[:3]
        if int(process_group) == group and state not in "ZX":
            found.append(f"{name}) {state}")
    return found


@pytest.fixture
def script() -> list[str]:
    Path("longctx").write_text(CONSOLE_SCRIPT)
    return [sys.executable, "longctx"]


def errors(finished: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in finished.stderr.splitlines() if "longctx: error:" in line]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["console script", "python -m"])
def test_two_processes_share_a_run(module: bool, script: list[str], texts: str) -> None:
    config = {
        "trainer": {**TWO_PROCESSES, "strategy": {"class_path": "LongContextFSDPStrategy"}},
        "model": {"config": "tiny-llama"},
        "data": {"max_seq_len": 64, "sources": {"a": texts}},
    }
    start = [sys.executable, "-m", "lightning_longctx"] if module else script
    finished = run(start, config, "--trainer.strategy.sequence-parallel-size=2")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]
    lines = Path("runs/version_0/metrics.csv").read_text().splitlines()
    assert "train/loss" in lines[0]
    assert len(lines) == 4
    saved = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())
    assert saved["trainer"]["strategy"]["init_args"]["sequence_parallel_size"] == 2


def failing(rank: int, how: str) -> dict[str, Any]:
    model = {"class_path": "tests.cli.toys.FailingModel", "init_args": {"rank": rank, "how": how}}
    return {"trainer": {**TWO_PROCESSES, "strategy": "ddp"}, "model": model}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("data", 2), ("bug", 1)])
def test_a_failing_main_process_takes_its_child_along(how: str, code: int, script: list[str]) -> None:
    finished = run(script, failing(0, how))
    assert finished.returncode == code
    assert len(errors(finished)) == (1 if how == "data" else 0)
    assert ("toys.jsonl line 7" if how == "data" else "RuntimeError: a bug of the user") in finished.stderr
    assert ("Traceback" in finished.stderr) == (how == "bug")


def test_the_watching_thread_leaves_a_failing_main_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's thread kills the main process over a dead child, also over one that the main process has ended."""
    monkeypatch.setattr(app, "_CHILD_GRACE", 0.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    launcher = SimpleNamespace(procs=[child])
    watching = _ChildProcessObserver(os.getpid(), launcher.procs)
    killed: list[bool] = []
    monkeypatch.setattr(watching, "_terminate_all", lambda: killed.append(True))
    app._end_children(cast("Trainer", SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))))
    assert child.returncode == -signal.SIGKILL
    assert watching._run()  # True: nothing is left to watch
    assert killed == []


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("how", ["data", "bug"])
def test_a_failing_child_ends_the_run_and_says_why(how: str, script: list[str]) -> None:
    finished = run(script, failing(1, how))
    assert finished.returncode != 0
    if how == "data":
        assert [line.startswith("[rank 1] longctx: error: `data.sources.toys`") for line in errors(finished)] == [True]
    else:
        assert "RuntimeError: a bug of the user" in finished.stderr


@pytest.mark.distributed
@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(script: list[str]) -> None:
    finished = run(script, failing(-1, "data"))
    assert finished.returncode == 2
    assert [line.startswith("longctx: error:") for line in errors(finished)] == [True]


@pytest.mark.slow
def test_an_impossible_size_starts_no_process(script: list[str], texts: str) -> None:
    config = {
        "trainer": {**TWO_PROCESSES, "strategy": "LongContextFSDPStrategy"},
        "model": {"config": "tiny-llama"},
        "data": {"max_seq_len": 63, "sources": {"a": texts}},
    }
    finished = run(script, config, "--trainer.strategy.sequence_parallel_size=2")
    assert finished.returncode == 2
    assert len(errors(finished)) == 1
    assert "Initializing distributed" not in finished.stderr + finished.stdout
    assert "Traceback" not in finished.stderr
