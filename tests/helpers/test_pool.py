"""The pool itself: order of results, errors, hangs, deaths, clean state between tasks."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.errors import ConfigurationError
from tests.helpers import pool
from tests.helpers.pool import RankError, run_ranks

pytestmark = pytest.mark.distributed


def _rank_and_sum(value: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _raise_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        print("printed before the failure")
        raise ConfigurationError("field", "must be right", "wrong", "Do it.")
    dist.barrier()


def _hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def _die() -> None:
    os._exit(3)


def _exit() -> None:
    raise SystemExit(2)


def _leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    Path("left_behind").touch()


def _read_traces() -> tuple[object, ...]:
    random = torch.rand(1).item()
    return os.environ.get("LEFT_BEHIND"), torch.get_default_dtype(), torch.get_num_threads(), os.listdir(), random


def _mesh_sum(axes: tuple[str, str], extra_groups: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dist.init_process_group("gloo")
    for _ in range(extra_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    value = torch.full((2,), float(dist.get_rank()))
    by_axis = DTensor.from_local(value, mesh, [Replicate(), Partial()]) * 2
    return by_axis.redistribute(mesh, [Replicate(), Replicate()]).to_local().tolist()


def _warn() -> None:
    warnings.warn("ours", UserWarning, stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_are_ordered_by_rank(world_size: int) -> None:
    total = 1.5 * sum(range(1, world_size + 1))
    assert run_ranks(_rank_and_sum, world_size, 1.5) == [(rank, total) for rank in range(world_size)]


def test_workers_live_on_between_tasks() -> None:
    first = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 2) == first
    assert os.getpid() not in first


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_on_one_rank_is_raised_with_its_text(rank: int) -> None:
    workers = run_ranks(os.getpid, 2)
    with pytest.raises(RankError, match="`field` must be right, but got wrong") as caught:
        run_ranks(_raise_on, 2, rank)
    assert run_ranks(os.getpid, 2) == workers, "a plain exception does not cost a new pool"
    assert next(iter(caught.value.reports)) == rank
    assert "printed before the failure" in caught.value.reports[rank]
    assert isinstance(caught.value.causes[rank], ConfigurationError)


def test_hang_is_a_failure_that_shows_the_stack_and_ends_the_processes() -> None:
    workers = run_ranks(os.getpid, 2)
    start = time.monotonic()
    with pytest.raises(RankError, match="did not finish within 1 s") as caught:
        run_ranks(_hang_on, 2, 1, timeout=1)
    assert time.monotonic() - start < 20
    assert list(caught.value.reports) == [1]
    assert "_hang_on" in caught.value.reports[1]
    for process in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert run_ranks(_rank_and_sum, 2, 1.0) == [(0, 3.0), (1, 3.0)]


def test_death_of_a_rank_is_a_failure() -> None:
    with pytest.raises(RankError, match="died with exit code 3"):
        run_ranks(_die, 1)


def test_exit_of_a_command_line_is_a_failure() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_exit, 1)
    assert caught.value.causes[0].code == 2


def test_nothing_is_left_behind() -> None:
    run_ranks(_leave_traces, 1)
    first, second = run_ranks(_read_traces, 1)[0], run_ranks(_read_traces, 1)[0]
    assert first[:4] == (None, torch.float32, 1, [])
    assert first == second


def test_a_mesh_of_an_earlier_task_is_forgotten() -> None:
    for extra_groups in (0, 1, 0, 2):
        results = run_ranks(_mesh_sum, 4, ("outer", "inner"), extra_groups)
        assert results == [[2.0, 2.0], [2.0, 2.0], [10.0, 10.0], [10.0, 10.0]]


def test_warning_filters_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_warning_filters", [("error",)])
    with pytest.raises(RankError, match="UserWarning: ours"):
        run_ranks(_warn, 1)
    monkeypatch.setattr(pool, "_warning_filters", [("error",), ("ignore", "ours", UserWarning)])
    assert run_ranks(_warn, 1) == [None]


def test_warnings_are_errors_unless_they_are_listed(pytestconfig: pytest.Config) -> None:
    assert len(pool._warning_filters) == len(pytestconfig.getini("filterwarnings"))
    assert pool._warning_filters[0][0] == "error"


@pytest.mark.parametrize("world_size", [0, pool.MAX_RANKS + 1])
def test_refuses_sizes_beyond_the_machine(world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(_warn, world_size)


def test_refuses_a_local_function() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(lambda: None, 1)
