"""Which checkpoints may go, and how they go: never the last one, never before its replacement is committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.checkpoint.address import Folder, names_in
from lightning_longctx.checkpoint.discovery import Found, scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import (
    LATEST,
    LEASE,
    OWNER,
    SCORES,
    STAGING,
    TEMPORARY,
    Commit,
    is_owner_file,
    is_stage_of_rank,
    parse_name,
)
from lightning_longctx.checkpoint.notes import is_abandoned, leased
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import check_whole

__all__ = ["Retention", "best_first", "collect_garbage", "collect_local", "prune", "superfluous"]


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
    root: Folder,
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
                filesystem.remove_checkpoint(root, commit.name)
                removed.append(commit.name)
    return removed


def collect_garbage(filesystem: FileSystem, root: Folder) -> list[str]:
    """Remove what writers that are gone have left, with their notes, tombstones, and files that replace others.

    Call it before the first save of a process.

    Returns:
        Names of what was removed from the staging folder.
    """
    staging = root / STAGING
    gone = [name for name in sorted(names_in(staging)) if is_abandoned(staging / name)]
    gone.sort(key=is_owner_file)  # a directory goes before the note that says it may
    for name in gone:
        if is_owner_file(name) and parse_name(name.removesuffix(OWNER)):
            filesystem.sweep(root, name.removesuffix(OWNER))
        if is_owner_file(name) or name.startswith(LEASE):
            filesystem.remove_file(staging / name)
        else:
            filesystem.remove_tree(staging / name)
    for name in names_in(root):
        if name.startswith((f"{LATEST}{TEMPORARY}", f"{SCORES}{TEMPORARY}")) and is_abandoned(root / name):
            filesystem.remove_file(root / name)
    return gone


def collect_local(folder: Path) -> None:
    """Remove what writers that are gone have left in a node-local folder; whatever else is there stays.

    Several ranks of a node may call it at once.
    """
    filesystem = FileSystem()
    ours = sorted(filter(is_stage_of_rank, names_in(folder)), key=is_owner_file)  # a folder goes before its note
    for name in ours:
        if is_abandoned(folder / name):
            filesystem.remove_tree(folder / name)


def _of_run(usable: Sequence[Found], run: str) -> list[Commit]:
    return [found.commit for found in usable if found.commit is not None and found.commit.run == run]
