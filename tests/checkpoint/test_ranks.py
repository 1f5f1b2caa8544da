"""Several ranks: one rank's failure is everybody's, at once; slots do not disturb each other or training."""

from __future__ import annotations

import errno
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import STAGING, extra_file
from lightning_longctx.checkpoint.plain import load_plain
from lightning_longctx.checkpoint.slots import Job, Slot
from lightning_longctx.checkpoint.writer import SaveRequest
from lightning_longctx.errors import CheckpointError
from tests.checkpoint.helpers import FailingFileSystem, check_pure, request, save, state, steps, writer
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.distributed


def _failure(function: Any) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        function()
    except CheckpointError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def _one_rank_fails(root: str, part: str, operation: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    filesystem: FileSystem = FileSystem()
    if rank == 1:
        filesystem = FailingFileSystem(OSError(errno.EIO, "I/O error"), part, operation)
        filesystem.active = False
    checkpoints = writer(Path(root), filesystem)
    save(checkpoints, 1)
    if isinstance(filesystem, FailingFileSystem):
        filesystem.active = True
    failed = _failure(lambda: save(checkpoints, 2))
    if isinstance(filesystem, FailingFileSystem):
        filesystem.active = False
    save(checkpoints, 3)
    dist.barrier()
    return {"failed": failed, "steps": check_pure(Path(root)), "left": len(list((Path(root) / STAGING).iterdir()))}


@pytest.mark.parametrize(
    ("part", "operation"),
    [("weights/__1", "write"), ("optimizer/__1", "create"), ("extra/", "fsync"), ("probe", "create")],
)
def test_an_error_on_one_rank_is_everybodys_at_once(tmp_path: Path, part: str, operation: str) -> None:
    for result in run_ranks(_one_rank_fails, 2, str(tmp_path), part, operation):
        message, seconds = result["failed"]
        assert "rank 1: OSError: [Errno 5] I/O error" in message
        assert seconds < 5
        assert result["steps"] == [3, 1]
        assert result["left"] == 0


class _Stalls(FileSystem):
    def __init__(self, part: str) -> None:
        self.part = part

    def before(self, operation: str, path: Path) -> None:
        if self.part in str(path) and operation == "write":
            time.sleep(4)


def _one_rank_stalls(root: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    filesystem = _Stalls("weights/__1" if dist.get_rank() == 1 else "nothing")
    checkpoints = writer(Path(root), filesystem, timeout=timedelta(seconds=1))
    failed = _failure(lambda: save(checkpoints, 1))
    filesystem.part = "nothing"
    dist.barrier()
    save(checkpoints, 2)  # through groups that were made anew
    dist.barrier()
    time.sleep(4)  # the stalled writer wakes up, and must do no harm
    save(checkpoints, 3)
    dist.barrier()
    return {"failed": failed, "steps": check_pure(Path(root))}


def test_a_rank_that_stalls_is_not_waited_for_and_the_next_save_works(tmp_path: Path) -> None:
    """Megatron-LM#2422: a blocked writer left files behind for good; torch's own group is dead after a time limit."""
    for result in run_ranks(_one_rank_stalls, 2, str(tmp_path)):
        message, seconds = result["failed"]
        assert message
        assert seconds < 4
        assert result["steps"] == [3, 2]


def _ranks_disagree(root: str) -> list[str]:
    dist.init_process_group("gloo")
    checkpoints = writer(Path(root))
    rank = dist.get_rank()
    messages = [_failure(lambda: checkpoints.save(request(1 + rank, rank)))[0]]
    slots = ("weights",) if rank else ("weights", "optimizer")
    messages.append(_failure(lambda: checkpoints.save(request(5, rank, slots=slots)))[0])
    dist.barrier()
    return [*messages, str(list((Path(root) / STAGING).iterdir()))]


def test_ranks_that_save_different_things_all_raise_before_anything_is_written(tmp_path: Path) -> None:
    for first, second, left in run_ranks(_ranks_disagree, 2, str(tmp_path)):
        assert "ranks save different things" in first
        assert "ranks save different things" in second
        assert left.count("del-") == 0


def _staging_fails_on_one_rank(root: str) -> tuple[str, float]:
    dist.init_process_group("gloo")
    checkpoints = writer(Path(root))
    tensors = state(1)
    if dist.get_rank() == 1:
        tensors["weights.large"] = torch.empty(8, 32, device="meta")

    def run() -> None:
        checkpoints.save(SaveRequest(1, {"weights": tensors}, {}))
        checkpoints.drain()
        checkpoints.raise_failure()

    return _failure(run)


def test_a_staging_error_on_one_rank_keeps_nobody_waiting(tmp_path: Path) -> None:
    for message, seconds in run_ranks(_staging_fails_on_one_rank, 2, str(tmp_path)):
        assert "a meta tensor" in message
        assert seconds < 5


def _lost_shard(root: str) -> str:
    """Rank 1 believes that somebody else writes its shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(10, 100), mesh, [Shard(0)])
    checkpoints = writer(Path(root))
    if dist.get_rank() == 1:
        checkpoints.slots["weights"].buffers._writes = lambda *_: False  # type: ignore[method-assign]

    def run() -> None:
        checkpoints.save(SaveRequest(1, {"weights": {"w": tensor}}, {}))
        checkpoints.drain()
        checkpoints.raise_failure()

    return _failure(run)[0]


def test_a_shard_that_nobody_wrote_prevents_the_commit(tmp_path: Path) -> None:
    """Megatron-LM#1154: 123 of 128 shards were written. No commit, and an error that names the tensor."""
    for message in run_ranks(_lost_shard, 2, str(tmp_path)):
        assert "`w` must be written whole, but got 500 of 1,000 values" in message
    assert steps(tmp_path) == []


def _double_saves(root: str, saves: int) -> list[int]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoints = writer(Path(root), keep=3)
    if rank == 1:
        _swap_order(checkpoints.slots["weights"], checkpoints.slots["optimizer"])
    traffic = torch.ones(1000)
    for step in range(1, saves + 1):
        checkpoints.save(request(step, rank))
        for _ in range(5):  # training goes on over the default group
            dist.all_reduce(traffic)
            dist.all_to_all_single(torch.empty(4), torch.ones(4))
            traffic /= 2
        checkpoints.raise_failure()
    checkpoints.drain()
    checkpoints.raise_failure()
    dist.barrier()
    return check_pure(Path(root))


def _swap_order(weights: Slot, optimizer: Slot) -> None:
    held: list[Job] = []
    submit_weights, submit_optimizer = weights.submit, optimizer.submit

    def later(job: Job) -> None:
        held.append(job)

    def first(job: Job) -> None:
        submit_optimizer(job)
        submit_weights(held.pop())

    weights.submit, optimizer.submit = later, first  # type: ignore[method-assign]


def test_a_hundred_double_saves_with_swapped_order_beside_training(tmp_path: Path) -> None:
    """VeOmni#107, KempnerForge#104, xtuner#1852, UniRL#157: shared groups hang."""
    for found in run_ranks(_double_saves, 2, str(tmp_path), 100):
        assert found == [100, 99, 98]


def _own_extra(root: str) -> Any:
    dist.init_process_group("gloo")
    checkpoints = writer(Path(root))
    rank = dist.get_rank()
    checkpoints.save(SaveRequest(1, {"weights": state(1)}, {"position": 10 + rank}, place=(rank, 0)))
    checkpoints.drain()
    checkpoints.raise_failure()
    dist.barrier()
    found = scan(root)[0]
    assert found.commit is not None
    return load_plain(found.path / extra_file(rank)), found.commit.ranks


def test_each_rank_has_its_own_extra_state(tmp_path: Path) -> None:
    """pytorch#120356 and #146566, torchtitan#291: values of ranks under one key were mixed."""
    for rank, (extra, ranks) in enumerate(run_ranks(_own_extra, 2, str(tmp_path))):
        assert extra == {"position": 10 + rank}
        assert ranks == [[0, 0], [1, 0]]
