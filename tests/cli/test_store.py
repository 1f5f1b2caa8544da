"""A run whose checkpoints are at an address, from its YAML to the page of its report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.cli import main
from tests.checkpoint.helpers import steps

ROOT = "memory://of-the-command-line/run"
CONFIG: dict[str, Any] = {
    "ckpt_path": "last",
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "enable_progress_bar": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "", "version": "a"}},
        "callbacks": [{"class_path": "AsyncDCPCheckpoint", "init_args": {"dirpath": ROOT}}],
    },
    "model": {"config": "tiny-llama"},
    "data": {"max_seq_len": 64, "loading": {"num_workers": 0}, "sources": {"a": "texts/*.txt"}},
}


@pytest.mark.usefixtures("texts")
def test_from_yaml_to_the_report(write: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write(CONFIG)
    assert main(["check", "--config", "run.yaml", "--json", "check.json"]) == 0
    found = {one["name"]: one for one in json.loads(Path("check.json").read_text())["checks"]}
    assert found["start"]["text"] == f"a fresh start: no checkpoint in {ROOT}"
    assert found["disk"]["verdict"] == "skipped"
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert steps(ROOT) == [2]
    assert main(["fit", "--config", "run.yaml", "--trainer.max_steps=4"]) == 0
    assert steps(ROOT) == [4, 2]
    assert f"Checkpoint: {ROOT}/step-00000004" in caplog.text
    root = "memory://of-the-command-line/root"
    moved = {**CONFIG, "trainer": {**CONFIG["trainer"], "default_root_dir": root, "callbacks": ["AsyncDCPCheckpoint"]}}
    moved["trainer"]["logger"] = {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": root, "name": "", "version": "b"},
    }
    write(moved, "moved.yaml")
    assert main(["fit", "--config", "moved.yaml"]) == 0
    assert steps(f"{root}/checkpoints") == [2]
    assert {path.name for path in Path().iterdir()} == {"texts", "runs", "run.yaml", "moved.yaml", "check.json"}
    assert main(["report", "runs/a", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert f"In <code>{ROOT}</code> now" in page
    assert scan(ROOT)[0].path.name in page
