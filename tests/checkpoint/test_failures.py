"""What goes wrong with files on one process: nothing is committed, it is told once, and the next save works."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lightning_longctx.checkpoint.discovery import find_latest, scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import COMMIT, STAGING, done_marker
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.writer import CheckpointWriter, SaveRequest
from lightning_longctx.errors import CheckpointError
from tests.checkpoint.helpers import (
    GONE,
    FailingFileSystem,
    check_pure,
    owners_note,
    request,
    save,
    state,
    steps,
    writer,
)


def _assert_fails_once(checkpoints: CheckpointWriter, step: int, text: str) -> None:
    checkpoints.save(request(step))
    assert not checkpoints.drain()
    with pytest.raises(CheckpointError, match=text):
        checkpoints.raise_failure()
    checkpoints.raise_failure()  # told once


@pytest.mark.parametrize("part", ["weights/__0", "optimizer/__0", "extra/", "/.metadata", "packed.json", COMMIT])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error"), OSError(errno.ENOSPC, "No space left on device")], ids=["EIO", "ENOSPC"]
)
def test_an_error_while_writing_commits_nothing(tmp_path: Path, part: str, error: OSError) -> None:
    """pytorch#191391: an error of a writer thread was swallowed, and success reported."""
    filesystem = FailingFileSystem(error, part)
    filesystem.active = False
    checkpoints = writer(tmp_path, filesystem)
    save(checkpoints, 1)
    filesystem.active = True
    _assert_fails_once(checkpoints, 2, error.strerror or "")
    assert steps(tmp_path) == [1]
    assert list((tmp_path / STAGING).iterdir()) == []
    filesystem.active = False
    save(checkpoints, 3)
    assert check_pure(tmp_path) == [3, 1]


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    class Full(FileSystem):
        def free_bytes(self, path: Path) -> int:
            return 1000

    checkpoints = writer(tmp_path, Full())
    with pytest.raises(CheckpointError, match="1,000 free"):
        checkpoints.save(request(1))
    assert list((tmp_path / STAGING).iterdir()) == []


def test_a_read_only_folder_is_told_at_once(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, "Read-only file system")
    checkpoints = writer(tmp_path, FailingFileSystem(error, "probe", "create"))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        checkpoints.save(request(1))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        writer(tmp_path, FailingFileSystem(error, STAGING, "mkdir"))


def test_an_error_that_is_no_os_error_does_not_pass_as_success(tmp_path: Path) -> None:
    """pytorch: an exception that cannot be pickled made the other ranks wait for the time limit."""

    class Odd(Exception):
        def __reduce__(self) -> str:
            raise TypeError("not picklable")

    checkpoints = writer(tmp_path, FailingFileSystem(Odd("odd"), "weights/__0"))
    _assert_fails_once(checkpoints, 1, "Odd: odd")
    assert steps(tmp_path) == []


class _Blocked(FileSystem):
    """A store that does not answer until it is released."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.release = threading.Event()

    def before(self, operation: str, path: Path) -> None:
        if self.part in str(path) and operation in ("write", "replace"):
            self.release.wait()


def test_a_blocked_writer_ends_the_wait_and_cannot_commit_later(tmp_path: Path) -> None:
    """Megatron-LM#2422, pytorch#162828: a stalled writer; the next save works, and the end comes within its bound."""
    filesystem = _Blocked("weights/__0")
    checkpoints = writer(tmp_path, filesystem, timeout=timedelta(seconds=0.2))
    checkpoints.save(request(1, slots=("weights",)))
    stalled = checkpoints.slots["weights"].pending
    begin = time.monotonic()
    assert not checkpoints.drain(0.1)
    assert time.monotonic() - begin < 5
    with pytest.raises(CheckpointError, match="not written before the end"):
        checkpoints.raise_failure()
    filesystem.part = "nothing"
    save(checkpoints, 2)
    filesystem.release.set()
    assert stalled is not None
    assert stalled.finished.wait(10)
    time.sleep(0.05)
    assert check_pure(tmp_path) == [2]


def test_a_slot_waits_for_its_own_write_only(tmp_path: Path) -> None:
    filesystem = _Blocked("optimizer/__0")
    checkpoints = writer(tmp_path, filesystem, timeout=timedelta(seconds=30))
    checkpoints.save(request(1))
    receipt = checkpoints.save(request(2, slots=("weights",), resumable=False))
    assert receipt.waited["weights"] < 1
    assert checkpoints.pending.keys() >= {"optimizer"}
    filesystem.release.set()
    assert checkpoints.drain()
    assert check_pure(tmp_path) == [1, 2] or check_pure(tmp_path) == [2, 1]


def test_while_a_write_is_under_way_the_one_before_is_found(tmp_path: Path) -> None:
    """torchtitan#930: a load right after an asynchronous save found nothing."""
    filesystem = _Blocked("weights/__0")
    filesystem.release.set()
    checkpoints = writer(tmp_path, filesystem)
    save(checkpoints, 1)
    filesystem.release.clear()
    checkpoints.save(request(2))
    found = find_latest(tmp_path)
    assert found is not None
    assert found.path.name.startswith("step-00000001")
    filesystem.release.set()
    assert checkpoints.drain()
    assert check_pure(tmp_path) == [2, 1]


def test_thousands_of_small_tensors_are_written_as_one(tmp_path: Path) -> None:
    """pytorch#147039: writing many tensors starves the trainer of the interpreter; the benchmark measures it."""
    checkpoints = writer(tmp_path)
    tensors = {f"norm.{number}": torch.full((16,), float(number)) for number in range(5000)}
    checkpoints.save(SaveRequest(1, {"weights": tensors}, {}))
    assert len(checkpoints.slots["weights"].buffers.stage(tensors).tensors) == 1
    checkpoints.drain()
    checkpoints.raise_failure()
    folder = TensorDirectory(scan(tmp_path)[0].path / "weights")
    assert len(folder) == 5000
    targets = {key: torch.empty(16) for key in tensors}
    folder.read_into(targets)
    assert all(torch.equal(targets[key], value) for key, value in tensors.items())


def test_staged_values_stay_what_they_were(tmp_path: Path) -> None:
    """pytorch#144657, Megatron-LM#2288: later values were written, or a buffer that was in use was reused."""
    filesystem = _Blocked("weights/__0")
    checkpoints = writer(tmp_path, filesystem)
    tensors = state(1)
    checkpoints.save(SaveRequest(1, {"weights": tensors}, {"step": 1, "rank": 0}))
    for tensor in tensors.values():
        tensor.fill_(2)
    second = threading.Timer(0.2, filesystem.release.set)
    second.start()
    checkpoints.save(SaveRequest(2, {"weights": tensors}, {"step": 2, "rank": 0}))  # waits for the first
    checkpoints.drain()
    assert check_pure(tmp_path) == [2, 1]


def test_all_staged_tensors_are_on_the_host(tmp_path: Path) -> None:
    """VeOmni#791: placeholders on the accelerator made the save run out of its memory."""
    checkpoints = writer(tmp_path)
    staged = checkpoints.slots["weights"].buffers.stage(state(1))
    assert {tensor.device.type for tensor in staged.tensors.values()} == {"cpu"}
    assert sorted(staged.tensors) == ["packed.00000.float32", "weights.large", "weights.table"]


@pytest.mark.parametrize("gone", [done_marker("weights"), done_marker("optimizer"), COMMIT, "weights/.metadata"])
def test_without_any_one_marker_it_is_incomplete(tmp_path: Path, gone: str) -> None:
    """NeMo#7952 and #14994: an incomplete checkpoint was picked; Megatron-LM#1154: a file of a rank was missing."""
    checkpoints = writer(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = scan(tmp_path)[0].path
    (newest / gone).unlink()
    with pytest.warns(UserWarning, match="Falling back to step-00000001"):
        found = find_latest(tmp_path)
    assert found is not None
    assert found.commit is not None
    assert found.commit.step == 1


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """torchtitan#4011: a flipped bit loaded in silence."""
    checkpoints = writer(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    file = scan(tmp_path)[0].path / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="wrong checksum"):
        found = find_latest(tmp_path)
    assert found is not None
    assert found.path.name.startswith("step-00000001")


def test_directories_of_which_none_can_be_used_are_an_error(tmp_path: Path) -> None:
    save(writer(tmp_path), 1)
    (scan(tmp_path)[0].path / COMMIT).write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a checkpoint that can be used"):
        find_latest(tmp_path)
    assert find_latest(tmp_path / "empty") is None


def test_weights_alone_are_for_evaluation_and_never_for_resume(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2, slots=("weights",), resumable=False)
    resume, evaluate = find_latest(tmp_path), find_latest(tmp_path, resumable=False)
    assert resume is not None
    assert evaluate is not None
    assert (resume.path.name[:13], evaluate.path.name[:13]) == ("step-00000001", "step-00000002")


def test_a_run_that_trains_nothing_saves_its_progress(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    save(checkpoints, 7, slots=())
    found = find_latest(tmp_path)
    assert found is not None
    assert found.commit is not None
    assert found.commit.slots == []
    assert check_pure(tmp_path) == [7]


def test_many_saves_do_not_grow_the_buffers(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    save(checkpoints, 1)
    addresses = [tensor.data_ptr() for tensor in checkpoints.slots["weights"].buffers.stage(state(1)).tensors.values()]
    for step in range(2, 12):
        save(checkpoints, step)
    after = [tensor.data_ptr() for tensor in checkpoints.slots["weights"].buffers.stage(state(1)).tensors.values()]
    assert addresses == after


def test_a_node_local_folder_first(tmp_path: Path) -> None:
    local = tmp_path / "local"
    checkpoints = writer(tmp_path / "shared", stage_dir=local)
    save(checkpoints, 1)
    assert check_pure(tmp_path / "shared") == [1]
    assert list(local.iterdir()) == []


def test_a_start_removes_what_dead_processes_left_on_the_node(tmp_path: Path) -> None:
    """Each kill left a part of a checkpoint there, until the disk was full."""
    local, names = tmp_path / "local", ["step-00000001-0000000a-1-2", "step-00000001-0000000b-1-2"]
    for name, owner in zip(names, (owners_note(**GONE), owners_note(pid=os.getppid())), strict=True):
        (local / name / "weights").mkdir(parents=True)
        (local / f"{name}.owner").write_text(json.dumps(owner))
    long_ago = time.time() - 7200
    (local / "step-00000001-0000000c").mkdir()  # of others: a checkpoint that somebody keeps here
    os.utime(local / "step-00000001-0000000c", (long_ago, long_ago))
    save(writer(tmp_path / "shared", stage_dir=local), 1)
    assert sorted(path.name for path in local.iterdir()) == [names[1], f"{names[1]}.owner", "step-00000001-0000000c"]


def test_the_record_of_another_directory_does_not_count(tmp_path: Path) -> None:
    save(writer(tmp_path), 1)
    path = scan(tmp_path)[0].path
    path.rename(path.with_name("step-00000002-00000000"))
    assert scan(tmp_path)[0].problem


def test_state_that_cannot_be_staged_is_told(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    checkpoints.save(SaveRequest(1, {"weights": {"w": torch.empty(2, device="meta")}}, {}))
    checkpoints.drain()
    with pytest.raises(CheckpointError, match="a meta tensor"):
        checkpoints.raise_failure()
