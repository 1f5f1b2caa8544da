"""Stores without rename: what has no record is no checkpoint, and what has one is never taken for garbage."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_longctx.checkpoint.address import Address, as_folder
from lightning_longctx.checkpoint.discovery import reading, scan
from lightning_longctx.checkpoint.layout import COMMIT, STAGING, checkpoint_name, done_marker, owner_file
from lightning_longctx.checkpoint.notes import leased
from lightning_longctx.checkpoint.object_store import ObjectStore
from lightning_longctx.checkpoint.retention import Retention, collect_garbage, prune
from lightning_longctx.checkpoint.scores import read_scores, write_score
from lightning_longctx.checkpoint.writer import CheckpointWriter
from lightning_longctx.errors import CheckpointError
from tests.checkpoint.helpers import GONE, check_pure, leftovers, owners_note, put, request, save, steps, writer
from tests.checkpoint.objects import watched
from tests.helpers.pool import run_ranks

# -- writing -----------------------------------------------------------------------------------------------------------


def test_saves_are_found_and_pure(root: Address) -> None:
    checkpoints = writer(root)
    for step in range(1, 5):
        save(checkpoints, step, slots=("weights", "optimizer") if step % 2 else ("weights",))
    save(checkpoints, 5, slots=())
    assert check_pure(root) == [5, 4, 3][: len(check_pure(root))]
    assert leftovers(root) == []
    assert json.loads((root / "LATEST.json").read_text())["step"] == 5


def test_before_the_record_there_is_nothing_and_after_it_everything(root: Address) -> None:
    """The order of requests: whatever a reader finds, it finds whole."""
    seen: list[tuple[str, list[int]]] = []

    class Watching(ObjectStore):
        def before(self, operation: str, path: Any) -> None:
            seen.append((f"{operation} {path.name}", steps(root)))

    checkpoints = writer(root, Watching(), keep=1)
    save(checkpoints, 1)
    save(checkpoints, 2)
    operations = [text for text, _ in seen]
    first, second = [at for at, text in enumerate(operations) if text == f"replace {COMMIT}"]
    assert all(found == [] for _, found in seen[: first + 1])
    assert all(found == [1] for _, found in seen[first + 1 : second + 1])
    assert operations[second + 1 :][:2] == [f"remove {owner_file(scan(root)[0].path.name)}", "replace LATEST.json"]
    note, record = second + 3, second + 4
    assert operations[note].startswith("create step-00000001")
    assert operations[record] == f"remove {COMMIT}"
    assert seen[record][1] == [2, 1]
    assert all(found == [2] for _, found in seen[record + 1 :])
    for marker in (done_marker("weights"), done_marker("optimizer")):
        assert operations.index(f"replace {marker}") < first


class _Fails(ObjectStore):
    active = False

    def __init__(self, part: str, operation: str) -> None:
        self.part, self.operation = part, operation

    def before(self, operation: str, path: Any) -> None:
        if self.active and operation == self.operation and self.part in str(path):
            raise OSError(errno.EIO, "no answer")


@pytest.mark.parametrize(
    ("part", "operation"),
    [
        ("weights/__0", "write"),
        ("weights/__0", "commit"),
        ("extra/", "write"),
        (".metadata", "write"),
        (COMMIT, "replace"),
    ],
)
def test_an_error_while_writing_commits_nothing(root: Address, part: str, operation: str) -> None:
    filesystem = _Fails(part, operation)
    checkpoints = writer(root, filesystem)
    save(checkpoints, 1)
    filesystem.active = True
    checkpoints.save(request(2))
    assert not checkpoints.drain()
    with pytest.raises(CheckpointError, match="no answer"):
        checkpoints.raise_failure()
    filesystem.active = False
    assert steps(root) == [1]
    assert [name for name in leftovers(root) if "step-00000002" in name and not name.endswith(".owner")] == []
    save(checkpoints, 3)
    assert check_pure(root) == [3, 1]
    save(writer(root), 4)  # another start takes the note away
    assert leftovers(root) == []


def test_an_upload_that_fails_is_given_up(tmp_path: Path) -> None:
    """Else the store keeps its parts, and closing the file by chance would complete it."""
    told: list[str] = []
    address = as_folder(f"objects://{tmp_path}/x")

    def write() -> None:
        with ObjectStore().create(address) as stream:
            stream.write(b"x" * 2**20)
            raise ZeroDivisionError

    with watched(lambda operation, path: told.append(operation)):
        with pytest.raises(ZeroDivisionError):
            write()
        gc.collect()
    assert told == ["part", "abort"]
    assert not address.exists()


def test_a_failure_after_the_commit_removes_nothing(root: Address) -> None:
    """`LATEST.json` could not be written: the save is told as failed, and what it committed stays."""
    filesystem = _Fails("LATEST", "replace")
    checkpoints = writer(root, filesystem)
    filesystem.active = True
    checkpoints.save(request(1))
    checkpoints.drain()
    with pytest.raises(CheckpointError, match="no answer"):
        checkpoints.raise_failure()
    assert check_pure(root) == [1]


def test_a_store_that_cannot_be_written_is_told_before_the_first_step(root: Address) -> None:
    filesystem = _Fails("probe", "create")
    filesystem.active = True
    with pytest.raises(CheckpointError, match="must be a folder for checkpoints, but got OSError: .*no answer"):
        writer(root, filesystem)


@pytest.mark.parametrize("part", ["write weights/__0", "replace weights.done"])
def test_a_blocked_upload_cannot_commit_later_and_is_collected(root: Address, part: str) -> None:
    class Blocked(ObjectStore):
        release = threading.Event()

        def before(self, operation: str, path: Any) -> None:
            where = f"{operation} {str(path).partition('/step-00000001-')[2].partition('/')[2]}"
            if where.startswith(part):
                self.release.wait()

    checkpoints = writer(root, Blocked(), timeout=timedelta(seconds=0.2))
    checkpoints.save(request(1, slots=("weights",)))
    stalled = checkpoints.slots["weights"].pending
    assert not checkpoints.drain(0.1)
    with pytest.raises(CheckpointError, match="not written before the end"):
        checkpoints.raise_failure()
    save(checkpoints, 2)
    Blocked.release.set()
    assert stalled is not None
    assert stalled.finished.wait(10)
    assert check_pure(root) == [2]
    assert [found.problem for found in scan(root)] == [""]
    save(writer(root), 3)  # its upload may have ended after it was given up; the note was kept for that
    assert leftovers(root) == []


def test_a_node_local_folder_first(root: Address, tmp_path: Path) -> None:
    checkpoints = writer(root, stage_dir=tmp_path / "local")
    save(checkpoints, 1)
    assert check_pure(root) == [1]
    assert list((tmp_path / "local").iterdir()) == []


# -- what goes ---------------------------------------------------------------------------------------------------------


def test_a_start_collects_what_dead_owners_left(root: Address) -> None:
    save(writer(root), 9)
    committed = scan(root)[0].path
    day_ago = time.time() - 25 * 3600
    kinds = {
        "gone": owners_note(**GONE),
        "other boot": owners_note(boot="another"),
        "alive": owners_note(pid=os.getppid()),
        "elsewhere": owners_note(host="elsewhere"),
        "elsewhere, long ago": owners_note(host="elsewhere", time=day_ago),
    }
    names = {kind: checkpoint_name(number, "aaaaaaaa") for number, kind in enumerate(kinds, start=1)}
    for kind, note in kinds.items():
        put(root / STAGING / owner_file(names[kind]), note)
        put(root / names[kind] / "weights" / "__0_0.distcp", b"x")
    nobodys = root / checkpoint_name(8, "aaaaaaaa") / "weights" / "__0_0.distcp"  # being copied here, for one
    put(nobodys, b"x")
    put(root / STAGING / owner_file(committed.name), owners_note(**GONE))  # killed between the record and the note
    put(root / STAGING / ".owner", owners_note(**GONE))
    removed = collect_garbage(ObjectStore(), root)
    dead = [names[kind] for kind in ("gone", "other boot", "elsewhere, long ago")]
    assert sorted(removed) == sorted([owner_file(name) for name in [*dead, committed.name, ""]])
    assert {name for name in root.names() if name.startswith("step-")} == {
        *(names[kind] for kind in ("alive", "elsewhere")),
        nobodys.parent.parent.name,
        committed.name,
    }
    assert check_pure(root) == [9]


def test_a_removal_that_was_cut_off_is_finished_or_forgotten(root: Address) -> None:
    checkpoints = writer(root, keep=3)
    for step in (1, 2, 3):
        save(checkpoints, step)
    third, second, first = (found.path for found in scan(root))
    for path in (first, second):
        put(root / STAGING / owner_file(path.name), owners_note(**GONE))
    (first / COMMIT).system.rm_file((first / COMMIT).path)  # type: ignore[union-attr]
    collect_garbage(ObjectStore(), root)
    assert check_pure(root) == [3, 2], "as long as it has its record, it is a checkpoint"
    assert leftovers(root) == []
    assert third.name in root.names()


def test_retention_keeps_its_hands_off_other_runs_and_readers(root: Address) -> None:
    save(writer(root), 1)
    checkpoints = writer(root, keep=1)
    save(checkpoints, 2)
    with reading(scan(root)[0].path):
        assert leased(root) == {scan(root)[0].path.name}
        save(checkpoints, 3)
        assert steps(root) == [3, 2, 1]
    save(checkpoints, 4)
    assert steps(root) == [4, 1]
    assert prune(ObjectStore(), root, Retention(keep_last=1), {}) == []
    (root / STAGING).system.pipe_file((root / STAGING / "lease-x-1").path, json.dumps({"time": 1.0}).encode())  # type: ignore[union-attr]
    assert leased(root) == set()
    assert collect_garbage(ObjectStore(), root) == ["lease-x-1"]


def test_scores_follow_the_checkpoints(root: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = writer(root, keep=1)
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.7)):
        save(checkpoints, step)
        write_score(ObjectStore(), root, scan(root)[0].path.name, score)
    save(checkpoints, 5)
    assert steps(root) == [5, 2]
    write_score(ObjectStore(), root, scan(root)[0].path.name, 0.9)
    assert sorted(read_scores(root).values()) == [0.1, 0.9]

    def fails(*_: Any, **__: Any) -> None:
        raise TimeoutError("slow")

    with monkeypatch.context() as patch:
        patch.setattr(type(root.system), "cat_file", fails)
        with pytest.raises(TimeoutError):
            write_score(ObjectStore(), root, scan(root)[0].path.name, 0.2)
    assert sorted(read_scores(root).values()) == [0.1, 0.9], "scores that could not be read are not written over"


# -- ranks -------------------------------------------------------------------------------------------------------------


def _one_rank_fails(root: str, part: str, operation: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    filesystem = _Fails(part, operation)
    checkpoints: CheckpointWriter = writer(root, filesystem)
    save(checkpoints, 1)
    filesystem.active = dist.get_rank() == 1
    failed = ""
    try:
        save(checkpoints, 2)
    except CheckpointError as error:
        failed = str(error)
    filesystem.active = False
    dist.barrier()
    between = steps(root)
    save(checkpoints, 3)
    dist.barrier()
    return {"failed": failed, "between": between, "steps": check_pure(root), "left": leftovers(root)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("part", "operation"),
    [("weights/__1", "write"), ("optimizer/__1", "commit"), ("extra/", "write"), ("probe", "create")],
)
def test_an_error_on_one_rank_commits_nothing(tmp_path: Path, part: str, operation: str) -> None:
    for result in run_ranks(_one_rank_fails, 2, f"objects://{tmp_path}/run", part, operation):
        assert "rank 1: OSError: [Errno 5] no answer" in result["failed"]
        assert result["between"] == [1]
        assert result["steps"] == [3, 1]
        assert [name for name in result["left"] if not name.endswith(".owner")] == []
