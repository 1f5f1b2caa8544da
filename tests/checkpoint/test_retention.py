"""What is kept, what is removed at a start, and that the last one never goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.discovery import find_latest, reading, scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import LATEST, STAGING, Commit, owner_file
from lightning_longctx.checkpoint.notes import owner_note
from lightning_longctx.checkpoint.retention import Retention, best_first, collect_garbage, prune, superfluous
from lightning_longctx.checkpoint.scores import read_scores, write_score
from lightning_longctx.errors import ConfigurationError
from tests.checkpoint.helpers import save, steps, writer


def _commit(step: int, sequence: int | None = None, resumable: bool = True) -> Commit:
    return Commit(step, f"{step:08x}", sequence or step, "run", ["weights"], resumable, False, [[0, 0]], 1)


def _gone(commits: list[Commit], rules: Retention, **more: object) -> list[int]:
    return sorted(commit.step for commit in superfluous(commits, rules, **{"scores": {}, **more}))  # type: ignore[arg-type]


def test_the_newest_are_those_committed_last() -> None:
    commits = [_commit(10, 1), _commit(20, 2), _commit(15, 3)]
    assert _gone(commits, Retention(keep_last=2)) == [10]
    assert _gone(commits, Retention(keep_last=1)) == [10, 20]


def test_weights_alone_do_not_push_out_what_can_be_resumed() -> None:
    commits = [_commit(1), _commit(2), *(_commit(n, resumable=False) for n in range(3, 9))]
    assert _gone(commits, Retention(keep_last=2)) == [3, 4, 5, 6]


def test_periodic_best_and_protected_ones_stay() -> None:
    commits = [_commit(n) for n in range(1, 11)]
    scores = {commits[2].name: 0.1, commits[3].name: 0.2, commits[4].name: 0.3}
    rules = Retention(keep_last=1, keep_every_n_steps=6, save_top_k=2)
    assert _gone(commits, rules, scores=scores, protected=[commits[0].name]) == [2, 5, 7, 8, 9]
    assert best_first(scores, scores, "max")[0] == commits[4].name


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every_n_steps": -1}, {"save_top_k": -1}, {"mode": "up"}])
def test_wrong_rules_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Retention(**wrong)  # type: ignore[arg-type]


def test_dead_and_unfinished_directories_do_not_count(tmp_path: Path) -> None:
    """torchtitan#4197: retention counted {7 in flight, 10 dead}, so that keep 2 removed 5, the only complete one."""
    save(writer(tmp_path), 5)
    (tmp_path / STAGING / "step-00000007-aaaaaaaa").mkdir()
    (tmp_path / "step-00000010-bbbbbbbb").mkdir()
    assert prune(FileSystem(), tmp_path, Retention(keep_last=2), {}) == []
    save(writer(tmp_path, keep=1), 11)
    assert steps(tmp_path) == [11, 5], "another run's checkpoint is not this run's to remove"


def test_what_is_being_read_stays(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path, keep=1)
    save(checkpoints, 1)
    with reading(scan(tmp_path)[0].path):
        save(checkpoints, 2)
        assert steps(tmp_path) == [2, 1]
    save(checkpoints, 3)
    assert steps(tmp_path) == [3]


def test_scores_follow_the_checkpoints(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path, keep=1)
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.6)):
        save(checkpoints, step)
        write_score(FileSystem(), tmp_path, scan(tmp_path)[0].path.name, score)
    save(checkpoints, 5)
    assert steps(tmp_path) == [5, 2]
    write_score(FileSystem(), tmp_path, scan(tmp_path)[0].path.name, 0.9)
    assert sorted(read_scores(tmp_path).values()) == [0.1, 0.9]


def test_a_start_removes_what_dead_owners_left(tmp_path: Path) -> None:
    staging = tmp_path / STAGING
    for name, owner in {
        "step-00000001-aaaaaaaa": {"pid": 2**22 + 1},  # no such process
        "step-00000002-aaaaaaaa": {"boot": "another boot"},
        "step-00000003-aaaaaaaa": {"pid": os.getppid()},  # alive
        "step-00000004-aaaaaaaa": {"host": "elsewhere"},  # cannot be asked
    }.items():
        (staging / name).mkdir(parents=True)
        (staging / owner_file(name)).write_text(json.dumps({**json.loads(owner_note()), **owner}))
    (staging / "del-step-00000005-aaaaaaaa").mkdir()
    (staging / "step-00000006-aaaaaaaa").mkdir()  # its note is about to be written
    removed = collect_garbage(FileSystem(), tmp_path)
    wanted = ["step-00000001-aaaaaaaa", "step-00000002-aaaaaaaa", "del-step-00000005-aaaaaaaa"]
    assert sorted(removed) == sorted([*wanted, *(owner_file(name) for name in wanted[:2])])
    hour_ago = time.time() - 4000
    for entry in staging.iterdir():
        os.utime(entry, (hour_ago, hour_ago))
    assert {name[:13] for name in collect_garbage(FileSystem(), tmp_path)} == {"step-00000004", "step-00000006"}


def test_a_file_that_was_to_replace_another_goes_an_hour_after_a_kill(tmp_path: Path) -> None:
    save(writer(tmp_path), 1)

    class Killed(FileSystem):
        def before(self, operation: str, path: Folder) -> None:
            if operation == "replace":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Killed().replace(tmp_path / LATEST, b"{}")
    (left,) = tmp_path.glob(f"{LATEST}.*")
    save(writer(tmp_path), 2)
    assert left.exists()  # somebody may be at it
    os.utime(left, (time.time() - 4000,) * 2)
    save(writer(tmp_path), 3)
    assert not left.exists()


def test_a_run_that_went_back_is_continued_where_it_is_now(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path, keep=5)
    for step in (10, 20, 30, 15):
        save(checkpoints, step)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.commit is not None
    assert found.commit.step == 15


def test_the_order_goes_on_after_a_restart(tmp_path: Path) -> None:
    save(writer(tmp_path), 10)
    save(writer(tmp_path), 5)
    assert steps(tmp_path) == [5, 10]
