"""Values of the monitored metric by checkpoint: known after validation, when the checkpoint is immutable already."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import SCORES, STAGING

__all__ = ["read_scores", "write_score"]


def read_scores(root: Path) -> dict[str, float]:
    """Scores by name of the checkpoint; empty if there are none, or none that can be read."""
    try:
        content = json.loads((root / SCORES).read_text())
        scores = {str(name): float(value) for name, value in content.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: value for name, value in scores.items() if not math.isnan(value)}


def write_score(filesystem: FileSystem, root: Path, name: str, value: float) -> None:
    """Add a score, and drop those of checkpoints that are gone. What is no number is no score: it is never best."""
    if math.isnan(value):
        return
    scores = {
        known: score
        for known, score in read_scores(root).items()
        if (root / known).is_dir() or (root / STAGING / known).is_dir()
    }
    filesystem.replace(root / SCORES, json.dumps({**scores, name: value}).encode())
