"""The launch files: they are shell that parses, and two groups of processes on one machine train by them.

Each "node" is the script itself, started alone as on a cluster. SLURM is played by a small ``srun`` that starts the
tasks of one node with the variables that SLURM gives them.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.examples.runs import EXAMPLES, LIMIT, column
from tests.helpers.pool import free_port
from tests.helpers.processes import outputs_of, start

LAUNCH = EXAMPLES / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

#: A row shared by four processes, two on each node.
RUN = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "strategy": {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
    },
    "model": {"config": "tiny-llama"},
    "data": {"max_seq_len": 256, "sources": {"notes": "notes/*.txt"}},
}

_SRUN = """#!{python}
import os, subprocess, sys
node, tasks = int(os.environ["NODE"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
started = []
for local in range(tasks):
    rank = {{"SLURM_PROCID": node * tasks + local, "SLURM_LOCALID": local, "SLURM_NODEID": node}}
    variables = {{name: str(value) for name, value in rank.items()}}
    started.append(subprocess.Popen(sys.argv[2:], env={{**os.environ, **variables}}))
sys.exit(max(child.wait() for child in started))
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell_that_says_what_is_missing(script: Path) -> None:
    assert {path.name for path in SCRIPTS} == {"slurm.sh", "torchrun.sh"}
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(script)], check=True)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage: " in done.stderr


def _fake_srun(folder: Path) -> str:
    """A folder for the path in which ``srun`` starts the tasks of one node."""
    script = folder / "bin" / "srun"
    script.parent.mkdir()
    script.write_text(_SRUN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return f"{script.parent}{os.pathsep}"


def _variables(script: str, node: int, port: int) -> dict[str, str]:
    if script == "torchrun.sh":
        return {
            "NODES": "2",
            "NODE_RANK": str(node),
            "DEVICES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    slurm = {
        "JOB_ID": "17",
        "JOB_NAME": "train",
        "JOB_NUM_NODES": "2",
        "NTASKS": "4",
        "NTASKS_PER_NODE": "2",
        "NODELIST": "localhost",
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE": str(node)}
    return {**address, **{f"SLURM_{name}": value for name, value in slurm.items()}}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_two_launch_groups_train_together(script: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(8):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}: " + "words to learn from. " * 20)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    tools, port = _fake_srun(tmp_path), free_port()
    python = f"{Path(sys.executable).parent}{os.pathsep}"
    nodes = [
        start(
            ["bash", str(LAUNCH / script), "run.yaml", "--trainer.log_every_n_steps", "2"],
            tmp_path,
            PATH=tools + python + os.environ["PATH"],
            **_variables(script, node, port),
        )
        for node in range(2)
    ]
    printed = outputs_of(nodes, LIMIT)
    assert "Starting with 4 processes" in printed[0]
    assert "on 2 data-parallel x 2 sequence-parallel = 4 devices" in printed[0]
    assert len(column(tmp_path, "train/loss")) == 1, "the flag behind the configuration was passed on"
