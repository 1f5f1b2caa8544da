"""Ctrl-C and the same command again, in real processes: it says where it goes on, and nothing is repeated or lost."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.checkpoint.discovery import scan
from tests.cli.test_processes import CONSOLE_SCRIPT, LIMIT, TWO_PROCESSES, alive, run
from tests.helpers.processes import environment

CONFIG: dict[str, Any] = {
    "ckpt_path": "last",
    "trainer": {
        **TWO_PROCESSES,
        "max_steps": 400,
        "max_epochs": -1,
        "strategy": {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
        "callbacks": ["AsyncDCPCheckpoint"],
    },
    "model": {"config": "tiny-llama"},
    "data": {"max_seq_len": 64},
}


@pytest.fixture
def script() -> list[str]:
    Path("longctx").write_text(CONSOLE_SCRIPT)
    return [sys.executable, "longctx"]


def _interrupt(script: list[str], config: dict[str, Any], number: int, to_group: bool) -> tuple[int, str]:
    """Start a run, send it a signal once it has trained a little, and wait for its end."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    with Path("first.log").open("w") as log:
        process = subprocess.Popen(
            [*script, "fit", "--config", "run.yaml"],
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_for_steps(process)
            (os.killpg if to_group else os.kill)(process.pid, number)
            code = process.wait(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    deadline = time.monotonic() + 10
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(process.pid) == []
    return code, Path("first.log").read_text()


def _wait_for_steps(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if len(_losses()) >= 3:
            return
        time.sleep(0.1)
    pytest.fail(Path("first.log").read_text()[-3000:])


def _losses() -> list[int]:
    """Steps whose loss is in the log."""
    files = list(Path("runs").rglob("metrics.csv"))
    if not files:
        return []
    with files[0].open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("train/loss")]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "SIGTERM to the parent"]
)
def test_the_same_command_again_goes_on(number: int, to_group: bool, script: list[str], texts: str) -> None:
    config = {**CONFIG, "data": {**CONFIG["data"], "sources": {"a": texts}}}
    code, output = _interrupt(script, config, number, to_group)
    found = scan("checkpoints")
    assert found, output[-3000:]
    assert found[0].commit is not None
    stopped = found[0].commit.step
    assert stopped < 400
    assert code == (1 if number == signal.SIGINT else 0), output[-3000:]
    assert f"Stopped after step {stopped}" in output
    config["trainer"] = {**config["trainer"], "max_steps": stopped + 3}
    again = run(script, config)
    said = again.stdout + again.stderr
    assert again.returncode == 0, said[-3000:]
    assert f"Resumed at step {stopped} from checkpoints/" in said
    assert "nothing is repeated or lost" in said
    assert _losses() == list(range(stopped + 3)), "one curve, each step once"
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]
