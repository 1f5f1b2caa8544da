"""The README's promises: its commands exist, its training command learns. Its blocks run in tests/docs."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.source import ROOT
from tests.helpers.scripts import load_script

README = (ROOT / "README.md").read_text()


def test_commands_install_with_the_tested_versions() -> None:
    commands = load_script(".ci/readme.py").commands()
    for command in commands.values():
        assert command.startswith("pip install -c constraints.txt -e ")
        assert "\n" not in command, "one line each"
    assert commands["train"].endswith("longctx fit --config examples/quickstart.yaml")
    assert commands["test"].endswith("&& pytest")


def test_fits_on_one_screen() -> None:
    assert len(README.splitlines()) <= 100


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_says_why_the_folders_are_not_top_level_packages() -> None:
    assert "site-packages" in README


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_training_command_learns(tmp_path: Path) -> None:
    """The mean of the last ten losses is at most 0.75 of that of the first five."""
    longctx = shutil.which("longctx", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if longctx is None:
        pytest.skip("the package is not installed in this environment")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = load_script(".ci/readme.py").commands()["train"].partition("&&")[2].split()
    assert command[0] == "longctx"
    subprocess.run([longctx, *command[1:]], cwd=tmp_path, check=True, timeout=800, stdin=subprocess.DEVNULL)
    (metrics,) = (tmp_path / "runs").rglob("metrics.csv")
    with metrics.open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
    assert len(losses) == 60
    assert sum(losses[-10:]) / 10 <= 0.75 * sum(losses[:5]) / 5
    assert list((tmp_path / "runs").rglob("config.yaml"))
