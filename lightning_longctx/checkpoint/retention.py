"""Which checkpoints may go, and how they go: never the last one, never before its replacement is committed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_longctx.checkpoint.discovery import Found, leased, scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import STAGING, Commit, owner_file
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import check_whole

__all__ = ["Retention", "best_first", "collect_garbage", "owner_note", "prune", "superfluous"]

# Whether the owner still lives can only be asked on its own machine; elsewhere silence for so long means no.
_SILENCE_SECONDS = 3600.0


@dataclass(frozen=True)
class Retention:
    """What is kept.

    Args:
        keep_last: the newest checkpoints, at least 1. Default 2: one may turn out damaged.
        keep_every_n_steps: besides, those of steps that are multiples of this, for ever. Default 0: none.
        save_top_k: besides, the best by ``monitor``. Default 1.
        mode: whether the best score is the ``min`` (default) or the ``max``.
    """

    keep_last: int = 2
    keep_every_n_steps: int = 0
    save_top_k: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 1), ("keep_every_n_steps", 0), ("save_top_k", 0)):
            check_whole(name, getattr(self, name), least)
        if self.mode not in ("min", "max"):
            raise ConfigurationError("mode", "must be `min` or `max`", repr(self.mode), "Choose one.")


def superfluous(
    commits: Sequence[Commit], rules: Retention, scores: Mapping[str, float], protected: Iterable[str] = ()
) -> list[Commit]:
    """The checkpoints of one run that no rule keeps.

    Args:
        commits: of one run, all committed and intact.
        rules: what is kept.
        scores: values of the monitored metric by name.
        protected: names that stay whatever the rules say.
    """
    newest = sorted(commits, key=lambda commit: commit.sequence, reverse=True)
    kept = {commit.name for commit in newest[: rules.keep_last]} | set(protected)
    kept |= {commit.name for commit in [one for one in newest if one.resumable][: rules.keep_last]}
    if rules.keep_every_n_steps:
        kept |= {commit.name for commit in newest if commit.step % rules.keep_every_n_steps == 0}
    kept |= set(best_first([commit.name for commit in newest], scores, rules.mode)[: rules.save_top_k])
    return [commit for commit in newest if commit.name not in kept]


def best_first(names: Iterable[str], scores: Mapping[str, float], mode: str) -> list[str]:
    """Names that have a score, the best first; of equals the first given."""
    scored = [name for name in names if name in scores]
    return sorted(scored, key=lambda name: scores[name] if mode == "min" else -scores[name])


def prune(
    filesystem: FileSystem,
    root: Path,
    rules: Retention,
    scores: Mapping[str, float],
    run: str | None = None,
    protected: Iterable[str] = (),
) -> list[str]:
    """Remove what no rule keeps.

    Args:
        filesystem: what to remove through.
        root: the folder of checkpoints.
        rules: what is kept.
        scores: values of the monitored metric by name.
        run: only checkpoints of this run; None: of each run by itself.
        protected: names that stay.

    Returns:
        Names of the checkpoints removed.
    """
    usable = [found for found in scan(root) if found.commit is not None and not found.problem]
    runs = {found.commit.run for found in usable if found.commit is not None} if run is None else {run}
    keep = {*protected, *leased(root)}
    removed: list[str] = []
    for one in sorted(runs):
        commits = _of_run(usable, one)
        for commit in superfluous(commits, rules, scores, keep):
            if len(usable) - len(removed) > 1:
                _remove(filesystem, root, commit.name)
                removed.append(commit.name)
    return removed


def owner_note() -> bytes:
    """Who writes a staging directory: host, process, boot."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot_id()}).encode()


def collect_garbage(filesystem: FileSystem, root: Path) -> list[str]:
    """Remove staging directories whose owner is gone, with the notes of their owners, and tombstones.

    Call it before the first save of a process.

    Returns:
        Names of what was removed.
    """
    staging = root / STAGING
    entries = sorted(staging.iterdir()) if staging.is_dir() else []
    gone = [entry for entry in entries if _is_abandoned(entry)]
    gone.sort(key=lambda entry: entry.suffix == ".owner")  # a directory goes before the note that says it may
    for entry in gone:
        filesystem.remove_tree(entry)
    return [entry.name for entry in gone]


def _remove(filesystem: FileSystem, root: Path, name: str) -> None:
    tombstone = root / STAGING / f"del-{name}"
    filesystem.make_directory(tombstone.parent)
    filesystem.rename(root / name, tombstone)
    filesystem.sync_directory(root)
    filesystem.remove_tree(tombstone)


def _of_run(usable: Sequence[Found], run: str) -> list[Commit]:
    return [found.commit for found in usable if found.commit is not None and found.commit.run == run]


def _is_abandoned(entry: Path) -> bool:
    if entry.name.startswith("del-"):
        return True
    try:
        silent = time.time() - entry.stat().st_mtime > _SILENCE_SECONDS
    except FileNotFoundError:
        return False
    try:
        owner: dict[str, Any] = json.loads(_owner_of(entry).read_text())
    except (OSError, ValueError):
        return silent  # no note: another rank was ahead of the first one, or it is a lease
    if owner.get("host") != socket.gethostname():
        return silent
    return owner.get("boot") != _boot_id() or not _is_alive(int(owner.get("pid", -1)))


def _owner_of(entry: Path) -> Path:
    return entry if entry.suffix == ".owner" else entry.with_name(owner_file(entry.name))


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # nothing of this process is under way when it starts
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
