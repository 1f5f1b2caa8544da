"""Who holds which tokens: one process, DDP, strategies that know more and strategies that tell too little."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_longctx import topology as topology_module
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, new_host_group, topology_of
from tests.helpers.pool import run_ranks
from tests.helpers.processes import outputs_of, start


class _Strategy:
    """A strategy with just what the test gives it; a plain namespace cannot be referred to weakly."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _trainer(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(strategy=_Strategy(**attributes))


def test_default_is_one_process() -> None:
    topology = Topology()
    numbers = [topology.world_size, topology.dp_size, topology.sp_size, topology.ranks_averaged]
    assert numbers == [1, 1, 1, 1]
    assert [topology.rank, topology.dp_rank, topology.sp_rank] == [0, 0, 0]
    assert [topology.sp_group, topology.token_group, topology.sp_host_group, topology.host_group] == [None] * 4
    assert topology.is_reader


def test_only_the_first_rank_of_a_row_reads() -> None:
    assert [Topology(world_size=4, sp_size=2, sp_rank=rank).is_reader for rank in (0, 1)] == [True, False]


def test_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology().rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("trainer", [None, _trainer(), _trainer(world_size=1)])
def test_one_process_needs_no_group(trainer: object) -> None:
    assert topology_of(trainer) == Topology()


def test_a_strategy_that_knows_is_believed() -> None:
    own = Topology(rank=3, world_size=4, dp_rank=1, dp_size=2, sp_rank=1, sp_size=2)
    assert topology_of(_trainer(topology=own, world_size=4)) is own


def test_asking_before_the_processes_are_connected_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="2 processes without a process group. Ask in `setup` or later"):
        topology_of(_trainer(world_size=2, global_rank=0))


def test_single_device_trainer() -> None:
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False)
    assert topology_of(trainer) == Topology()


def _ddp() -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def setup(self, stage: str) -> None:
            self.seen = topology_of(self.trainer)
            assert topology_of(self.trainer) is self.seen, "groups are made once"

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(module, DataLoader(torch.ones(2, 1)))
    rank = torch.tensor(module.seen.rank)
    dist.all_reduce(rank, group=module.seen.token_group)
    host = torch.tensor(1)
    dist.all_reduce(host, group=module.seen.host_group)
    plain = {f.name: getattr(module.seen, f.name) for f in dataclasses.fields(Topology) if not f.name.endswith("group")}
    return {
        **plain,
        "rank_sum": rank.item(),
        "host_sum": host.item(),
        "sp_groups": (module.seen.sp_group, module.seen.sp_host_group),
    }


@pytest.mark.distributed
def test_ddp_is_data_parallel_over_all_ranks() -> None:
    for rank, seen in enumerate(run_ranks(_ddp, 2)):
        assert seen == {
            "rank": rank,
            "world_size": 2,
            "dp_rank": rank,
            "dp_size": 2,
            "sp_rank": 0,
            "sp_size": 1,
            "ranks_averaged": 2,
            "rank_sum": 1,
            "host_sum": 2,
            "sp_groups": (None, None),
        }


def _replicas(with_mesh: bool) -> tuple[int, int, int, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel")) if with_mesh else None
    sampler = {"num_replicas": 2, "rank": rank // 2}
    trainer = _trainer(world_size=4, global_rank=rank, distributed_sampler_kwargs=sampler, device_mesh=mesh)
    topology = topology_of(trainer)
    distinct = torch.tensor(float(rank))
    dist.all_reduce(distinct, group=topology.token_group)
    return topology.dp_rank, topology.dp_size, topology.ranks_averaged, distinct.item()


@pytest.mark.distributed
def test_replicas_of_a_mesh_count_once() -> None:
    assert run_ranks(_replicas, 4, True) == [(0, 2, 2, 2.0), (0, 2, 2, 4.0), (1, 2, 2, 2.0), (1, 2, 2, 4.0)]


@pytest.mark.distributed
def test_a_strategy_that_does_not_tell_its_replicas_is_refused() -> None:
    from tests.helpers.pool import RankError

    with pytest.raises(RankError, match="_Strategy with 2 data-parallel replicas on 4 processes") as caught:
        run_ranks(_replicas, 4, False)
    assert all(isinstance(cause, ConfigurationError) for cause in caught.value.causes.values())
    assert len(caught.value.causes) == 4


def _second_world() -> tuple[float, float]:
    results = []
    strategy = _Strategy(world_size=2, global_rank=0)
    for world in (
        "first",
        "second",
    ):  # a place of its own for each: the ranks meet before the old one is gone everywhere
        rank, meeting = int(os.environ["RANK"]), f"file://{Path(world).resolve()}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        strategy.global_rank = dist.get_rank()
        one = torch.tensor(1.0)
        dist.all_reduce(one, group=topology_of(SimpleNamespace(strategy=strategy)).host_group)
        results.append(one.item())
        dist.barrier()
        dist.destroy_process_group()
    return results[0], results[1]


@pytest.mark.distributed
def test_groups_of_a_world_that_ended_are_not_used_again() -> None:
    assert run_ranks(_second_world, 2) == [(2.0, 2.0)] * 2


def test_a_process_pauses_once_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real groups: what is left of their threads would end processes that later tests fork."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *words: at_exit.append(words))
    monkeypatch.setattr(dist, "new_group", lambda *_, **options: options["backend"])
    topology_module._pause_at_exit.cache_clear()
    assert [new_host_group(), new_host_group([0])] == ["gloo", "gloo"]
    topology_module._pause_at_exit.cache_clear()
    assert at_exit == [(time.sleep, 0.2)]


_ENDS_AT_ONCE = """
import sys, torch, torch.distributed as dist
from lightning_longctx.topology import new_host_group
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
numbers = torch.ones(1000)
numbers.has_an_object_of_python = True
group = new_host_group()
for _ in range(20):
    dist.all_reduce(numbers, group=group)
del numbers  # a thread of gloo has the last reference for a moment, and an object of Python to release
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_that_ends_right_after_an_exchange_is_not_aborted(tmp_path: Path) -> None:
    """Every third was, with exit code -6."""
    for turn in range(3):
        command = [sys.executable, "-c", _ENDS_AT_ONCE, str(tmp_path / f"store{turn}")]
        outputs_of([start([*command, str(rank)]) for rank in range(2)], limit=60)
