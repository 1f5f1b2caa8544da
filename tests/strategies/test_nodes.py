"""Several nodes, as far as one machine allows: two groups of processes that meet over a network address.

Each "node" is started alone, as on a cluster, by one of the three launchers that users have; a row is shared across
both, so every exchange crosses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.pool import free_port, run_ranks
from tests.helpers.processes import outputs_of, start
from tests.strategies.test_sharding_run import train

LIMIT = 150  # seconds; a start takes about 15 on a quiet machine

SCRIPT = """
import warnings, sys, torch
import lightning.pytorch as pl
from lightning_longctx import LongContextFSDPStrategy
from tests.parity.layouts import whole
from tests.strategies.own_model import OwnModule

module = OwnModule(rows=8)
strategy = LongContextFSDPStrategy(sequence_parallel_size=2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
size = dict(accelerator="cpu", num_nodes=2, devices=1, max_steps=2, limit_val_batches=0)
trainer = pl.Trainer(strategy=strategy, **size, **quiet)
print(trainer.strategy.describe_layout())
trainer.fit(module)
weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
torch.save(weights, f"rank{trainer.global_rank}.pt")
"""

SCHEDULER = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NODELIST": "localhost",
    "SLURM_LOCALID": "0",
}


def command(launcher: str, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What is typed on one node, and its variables."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "torchrun":
        flags = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1", f"--master_port={port}"]
        return [sys.executable, "-m", "torch.distributed.run", *flags, "--master_addr=127.0.0.1", "run.py"], {}
    if launcher == "lightning":
        return [sys.executable, "run.py"], {**address, "NODE_RANK": str(node)}
    return [sys.executable, "run.py"], {**address, **SCHEDULER, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "lightning", "slurm"])
def test_two_launch_groups_train_as_one_process(launcher):
    Path("run.py").write_text(SCRIPT)
    port = free_port()
    nodes = []
    for node in range(2):
        words, variables = command(launcher, node, port)
        nodes.append(start(words, **variables))
    printed = outputs_of(nodes, LIMIT)
    assert "2 processes on 2 nodes" in printed[0]
    assert "warning: ranks 0-1 share a row across nodes" in printed[0]
    warning = (
        "1 sequence-parallel group, the first of ranks [0, 1], on several nodes: the exchanges of every layer wait"
    )
    assert warning in " ".join(printed[0].split())
    expected = run_ranks(train, 1, 1, {})[0]["weights"]
    for rank in range(2):
        weights = torch.load(f"rank{rank}.pt", weights_only=True)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)
