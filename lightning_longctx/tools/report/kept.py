"""The checkpoints that a run's folder holds now, by their own records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_longctx.checkpoint.address import Folder, folder_of_run
from lightning_longctx.checkpoint.discovery import Found, scan
from lightning_longctx.checkpoint.scores import read_scores
from lightning_longctx.errors import CheckpointError, ConfigurationError
from lightning_longctx.tools.output import human_bytes
from lightning_longctx.tools.report.html import Markup, join, tag
from lightning_longctx.tools.report.numbers import short, whole
from lightning_longctx.tools.report.run import Run

__all__ = ["kept_checkpoints"]


def kept_checkpoints(run: Run) -> tuple[Markup, list[str], list[list[str]]] | None:
    """Title, head and rows of a table; None where ``AsyncDCPCheckpoint`` is not configured, or nothing is found.

    Args:
        run: its configuration names the folder, from where the run was started: where we are, or above the run.
    """
    settings = run.callback("AsyncDCPCheckpoint")
    if settings is None:
        return None
    named = settings.get("dirpath") or run.setting("trainer", "default_root_dir")
    try:
        given = folder_of_run(settings.get("dirpath"), run.setting("trainer", "default_root_dir"))
        folder = _found_at(given, run)
        found = scan(folder) if folder is not None else []
    except (CheckpointError, ConfigurationError) as error:  # a page of a run needs no store that answers
        return join("In ", tag("code", str(named)), f" (cannot be read: {error.got})"), [], []
    if folder is None or not found:
        return None
    scores = read_scores(folder)
    pick = max if settings.get("mode") == "max" else min
    best = pick(scores, key=lambda name: scores[name]) if scores else ""
    title = join("In ", tag("code", str(given)), " now")
    return title, ["", "step", "content", "size", "score", ""], [_row(one, scores, best) for one in found]


def _found_at(given: Folder, run: Run) -> Folder | None:
    if not isinstance(given, Path):
        return given
    return next((base / given for base in (Path(), run.start) if (base / given).is_dir()), None)


def _row(found: Found, scores: dict[str, float], best: str) -> list[str]:
    commit, name = found.commit, found.path.name
    notes: Sequence[str] = [found.problem, "best" if name == best else ""]
    score = short(scores[name]) if name in scores else "-"
    known = ["?", "?"] if commit is None else [whole(commit.step), " + ".join(commit.slots)]
    size = human_bytes(None if commit is None else commit.size)
    return [name, *known, size, score, "; ".join(note for note in notes if note)]
