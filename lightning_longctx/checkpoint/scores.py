"""Values of the monitored metric by checkpoint: known after validation, when the checkpoint is immutable already."""

from __future__ import annotations

import json
import math

from lightning_longctx.checkpoint.address import Folder, names_in
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import SCORES, STAGING

__all__ = ["read_scores", "write_score"]


def read_scores(root: Folder) -> dict[str, float]:
    """Scores by name of the checkpoint; empty if there are none, or none that can be read."""
    try:
        return _read(root)
    except OSError:
        return {}


def write_score(filesystem: FileSystem, root: Folder, name: str, value: float) -> None:
    """Add a score, and drop those of checkpoints that are gone. What is no number is no score: it is never best."""
    if math.isnan(value):
        return
    there = {*names_in(root), *names_in(root / STAGING)}
    scores = {known: score for known, score in _read(root).items() if known in there}
    filesystem.replace(root / SCORES, json.dumps({**scores, name: value}).encode())


def _read(root: Folder) -> dict[str, float]:
    """Raises an OSError if there may be scores and they cannot be read: what is written then would lose them."""
    try:
        content = json.loads((root / SCORES).read_text())
        scores = {str(name): float(value) for name, value in content.items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
    return {name: value for name, value in scores.items() if not math.isnan(value)}
