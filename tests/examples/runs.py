"""Runs the command line as a user does: a process of its own, in a folder with the files that a recipe names."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tests.contracts.source import ROOT
from tests.helpers.processes import outputs_of, start

EXAMPLES = ROOT / "examples"
LIMIT = 400  # seconds; a start of two processes takes about 20 on a quiet machine


def longctx(folder: Path, *words: str) -> str:
    """Run ``longctx``; what it printed.

    Raises:
        AssertionError: it ended with another exit code than 0.
    """
    (printed,) = outputs_of([start([sys.executable, "-m", "lightning_longctx", *words], folder)], LIMIT)
    return printed


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of the only run's ``metrics.csv``."""
    (found,) = (folder / "runs").rglob("metrics.csv")
    with found.open() as file:
        return list(csv.DictReader(file))


def column(folder: Path, key: str) -> list[float]:
    """The values of one key, in the order of the steps."""
    return [float(row[key]) for row in metrics(folder) if row.get(key)]
