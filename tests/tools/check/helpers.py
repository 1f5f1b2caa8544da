"""A run that nothing stands in the way of, and ``longctx check`` of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from lightning_longctx.cli import main
from lightning_longctx.tools.check.command import CHECKS
from tests.tools.plan.helpers import TINY

CONFIG: dict[str, Any] = {
    "ckpt_path": "last",
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "strategy": {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
        "callbacks": ["AsyncDCPCheckpoint"],
    },
    "model": {"config": {**TINY, "num_hidden_layers": 2}},
    "data": {"max_seq_len": 64, "loading": {"shuffle": False, "num_workers": 2}, "sources": {"a": "texts/*.txt"}},
}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for name, changes in sections.items():
        config[name].update(changes)
    return config


def check(config: dict[str, Any], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run; return the exit code and the checks by name."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    code = main(["check", "--config", "run.yaml", "--json", "found/check.json", *words])
    found = json.loads(Path("found/check.json").read_text())
    checks = {one["name"]: one for one in found["checks"]}
    assert list(checks) == ["configuration", *CHECKS]
    assert found["findings"] == sum(one["verdict"] == "finding" for one in checks.values())
    assert code == (1 if found["findings"] else 0)
    return code, checks


def findings(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, one in checks.items() if one["verdict"] == "finding"]
