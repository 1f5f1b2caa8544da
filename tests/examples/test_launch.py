"""The launch files: they are shell that parses, and two groups of processes on one machine train by them.

Each "node" is the script itself, started alone as on a cluster. SLURM is played by a small ``srun`` that starts the
tasks of one node with the variables that SLURM gives them.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
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
import os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: None)  # srun outlives it; what it starts is as new
node, tasks = int(os.environ["NODE"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
assert os.environ["SRUN_CPUS_PER_TASK"] == os.environ["SLURM_CPUS_PER_TASK"]
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


def _put(script: Path, text: str) -> None:
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    script.chmod(script.stat().st_mode | stat.S_IEXEC)


def _path_with_srun(folder: Path) -> str:
    """The path, with a folder in which ``srun`` starts the tasks of one node and ``scontrol`` notes its words."""
    _put(folder / "bin" / "srun", _SRUN.format(python=sys.executable))
    _put(folder / "bin" / "scontrol", f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    return os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])


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
        "CPUS_PER_TASK": "12",
        "NODELIST": "localhost",
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE": str(node)}
    return {**address, **{f"SLURM_{name}": value for name, value in slurm.items()}}


def test_torchrun_gives_a_run_that_stops_the_time_to_save(tmp_path: Path) -> None:
    _put(tmp_path / "bin" / "python", '#!/bin/sh\necho "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"\n')
    variables = {**_variables("torchrun.sh", 0, 1), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for given, expected in (({}, "300"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, "9")):
        command = ["bash", str(LAUNCH / "torchrun.sh"), "run.yaml"]
        done = subprocess.run(command, env={**variables, **given}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_two_launch_groups_train_together(script: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(8):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}: " + "words to learn from. " * 20)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    path, port = _path_with_srun(tmp_path), free_port()
    nodes = [
        start(
            ["bash", str(LAUNCH / script), "run.yaml", "--trainer.log_every_n_steps", "2"],
            tmp_path,
            PATH=path,
            **_variables(script, node, port),
        )
        for node in range(2)
    ]
    printed = outputs_of(nodes, LIMIT)
    assert "Starting with 4 processes" in printed[0]
    assert "on 2 data-parallel x 2 sequence-parallel = 4 devices" in printed[0]
    assert len(column(tmp_path, "train/loss")) == 1, "the flag behind the configuration was passed on"


#: One node, an endless run, and one reading process that lives all through it: SLURM's signal reaches that one too.
_UNTIL_TOLD = {
    "ckpt_path": "last",
    "trainer": {**RUN["trainer"], "max_steps": -1, "max_epochs": -1, "callbacks": ["AsyncDCPCheckpoint"]},
    "model": RUN["model"],
    "data": {"max_seq_len": 256, "sources": {"code": "python-stdlib"}, "loading": {"num_workers": 1}},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("script", "number"), [("slurm.sh", signal.SIGUSR1), ("torchrun.sh", signal.SIGTERM)])
def test_a_run_that_is_told_to_stop_goes_on_in_its_next_job(script: str, number: int, tmp_path: Path) -> None:
    """SLURM's signal to all processes of a job, and SIGTERM to torchrun, which kills the groups of its processes."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(_UNTIL_TOLD))
    variables = {**_variables(script, 0, free_port()), "PATH": _path_with_srun(tmp_path)}
    variables |= {"NODES": "1"} if script == "torchrun.sh" else {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    process = start(["bash", str(LAUNCH / script), "run.yaml"], tmp_path, **variables)
    deadline = time.monotonic() + LIMIT
    while not any(tmp_path.glob("runs/*/metrics.csv")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if script == "slurm.sh":
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    printed, _ = process.communicate(timeout=LIMIT)
    assert "Stopped after step" in printed, printed
    steps = len(column(tmp_path, "train/loss"))
    assert steps >= 1
    if script == "slurm.sh":
        assert (tmp_path / "asked").read_text() == "requeue 17\n"
    more = ["--trainer.max_steps", str(steps + 2)]
    outputs_of([start(["bash", str(LAUNCH / script), "run.yaml", *more], tmp_path, **variables)], LIMIT)
    assert len(column(tmp_path, "train/loss")) == steps + 2
