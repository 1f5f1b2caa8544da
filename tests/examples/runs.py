"""Runs the command line as a user does: a process of its own, in a folder with the files that a recipe names."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from tests.contracts.source import ROOT

EXAMPLES = ROOT / "examples"
LIMIT = 400  # seconds; a start of two processes takes about 20 on a quiet machine

_LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def environment(**more: str) -> dict[str, str]:
    """This process's variables, without a launcher's, and with this checkout on the path."""
    known = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, "MASTER_PORT")}
    mine = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**known, **mine, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def start(command: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    """Start a command in ``folder``, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def longctx(folder: Path, *words: str) -> str:
    """Run ``longctx``; what it printed.

    Raises:
        AssertionError: it ended with another exit code than 0.
    """
    process = start([sys.executable, "-m", "lightning_longctx", *words], folder)
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    return printed


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of the only run's ``metrics.csv``."""
    (found,) = (folder / "runs").rglob("metrics.csv")
    with found.open() as file:
        return list(csv.DictReader(file))


def column(folder: Path, key: str) -> list[float]:
    """The values of one key, in the order of the steps."""
    return [float(row[key]) for row in metrics(folder) if row.get(key)]
