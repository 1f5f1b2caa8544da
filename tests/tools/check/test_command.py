"""The whole command: what each check finds and says, that one finding hides no other, and that nothing is started."""

from __future__ import annotations

import multiprocessing.process
import os
import shutil
import socket
import subprocess
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.cli import main
from lightning_longctx.tools.check import machine, run, subject
from lightning_longctx.tools.plan.command import plan
from lightning_longctx.tools.plan.options import PlanOptions
from lightning_longctx.tools.plan.reading import read_run
from tests.tools.check.helpers import CONFIG, changed, check, findings
from tests.tools.plan.helpers import TINY

GIB = 2**30


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)


@pytest.mark.usefixtures("_nothing_starts")
def test_a_run_that_nothing_stands_in_the_way_of(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = check(CONFIG)
    assert (code, findings(checks)) == (0, [])
    assert [name for name, one in checks.items() if one["verdict"] == "skipped"] == ["memory"]
    table = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in table[:-2]] == ["check", *checks]
    assert table[-1] == "Nothing stands in the way; 1 of 14 checks skipped."
    assert checks["sizes"]["data_parallel"] == 1
    assert "8 heads" in checks["sizes"]["text"]
    assert checks["sources"]["sources"] == {"a": 4}
    assert checks["start"]["text"] == "a fresh start: no checkpoint in checkpoints"


def test_the_first_row_is_that_of_the_first_rank() -> None:
    _, checks = check(CONFIG)
    row = checks["first row"]
    # bytes and an end: 13 + 1, 19 + 1 and 25 + 1 tokens; the fourth would not fit the 64
    assert [document["tokens"] for document in row["documents"]] == [13, 19, 31]
    assert row["documents"][1] == {"source": "a", "number": 1, "tokens": 19}
    assert row["fill"] == 63 / 64
    assert f"{row['read']} documents read" in row["text"]


def test_a_split_document_is_read_once() -> None:
    """As the first line of a fit counts it."""
    Path("texts/1.txt").write_text("words " * 50)
    _, checks = check(changed(data={"sources": {"a": "texts/1.txt"}}))
    assert checks["first row"]["read"] == 1
    assert "1 document read" in checks["first row"]["text"]


def test_one_finding_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = changed(model={"config": {**TINY, **shape}})
    config |= {"ckpt_path": "no/such/checkpoint"}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
    code, checks = check(config)
    assert (code, findings(checks)) == (1, ["sizes", "start", "disk"])
    assert "must divide the number of query heads" in checks["sizes"]["text"]
    assert "`ckpt_path` must exist" in checks["start"]["text"]
    assert checks["first row"]["verdict"] == "fine"


def test_data_that_is_not_there_is_told_once() -> None:
    _, checks = check(changed(data={"sources": {"a": "no/such/*.txt"}}))
    assert findings(checks) == ["sizes"], "the first check that asks for the data tells"
    assert "`data.sources.a`" in checks["sizes"]["text"]
    for name in ("sources", "first row"):
        assert (checks[name]["verdict"], checks[name]["text"]) == ("skipped", "`data` cannot be built: see above")
    assert checks["model"]["verdict"] == "fine"


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    access = SimpleNamespace(access=lambda path, mode: not path.endswith("2.txt"), R_OK=os.R_OK, path=os.path)
    monkeypatch.setattr(run, "os", access)  # permissions do not stop an administrator
    _, checks = check(CONFIG)
    assert findings(checks) == ["sources"]
    assert "texts/2.txt (1 of 4 files)" in checks["sources"]["text"]


def test_documents_that_make_no_row() -> None:
    packing = {"dynamic": False, "documents_per_batch": 9}
    config = changed(data={"packing": packing, "loading": {"drop_last": True}})
    _, checks = check(config)
    assert findings(checks) == ["first row"]
    assert "must give the first rank a row, but got 4 documents" in checks["first row"]["text"]


def test_token_ids_that_the_model_lacks() -> None:
    ids = [{"input_ids": [1, 2, 300]}] * 30
    _, checks = check(changed(data={"sources": {"a": {"records": ids, "format": "tokens"}}}))
    assert findings(checks) == ["first row"]
    assert "token ids below 264, the model's vocabulary, but got 300" in checks["first row"]["text"]


@pytest.mark.slow
def test_memory_is_what_plan_says() -> None:
    config = changed(trainer={"accelerator": "gpu", "precision": "bf16-true"}, data={"max_seq_len": "64K"})
    code, checks = check(config, "--device-gb", "80")
    assert (code, checks["memory"]["verdict"]) == (0, "fine")
    assert checks["devices"]["verdict"] == "skipped"
    from lightning_longctx.cli.tools import Configuration

    options = PlanOptions(80.0, brief=True)
    report, _ = plan(read_run(Configuration(["--config", "run.yaml"]), options), options)
    planned = report.to_plain()["variants"][0]
    assert checks["memory"]["needed_gib"] * GIB == pytest.approx(planned["with_margin_bytes"], rel=1e-3)
    code, checks = check(config, "--device-gb", "2.01")
    assert (code, findings(checks)) == (1, ["memory"])
    assert "`longctx plan --device-gb 2.01`" in checks["memory"]["text"]


def test_memory_of_another_strategy_is_not_known() -> None:
    _, checks = check(changed(trainer={"strategy": "ddp"}), "--device-gb", "80")
    assert checks["memory"]["verdict"] == "skipped"
    assert "must be LongContextFSDPStrategy" in checks["memory"]["text"]


def test_disk_is_what_a_checkpoint_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(trainer={"devices": 1, "strategy": "LongContextFSDPStrategy", "logger": False})
    _, checks = check(config)
    expected = checks["disk"]["checkpoint_bytes"]
    assert main(["fit", "--config", "run.yaml"]) == 0
    monkeypatch.delenv("MASTER_PORT")  # that run set it
    (saved,) = scan("checkpoints")
    assert saved.commit is not None
    assert 0 < saved.commit.size - expected < 0.2 * expected, "tensors, and a little about them"
    # the newest two, and the one being written
    assert checks["disk"]["needed_bytes"] == 3 * expected

    def of_disk(free: int, path: str | None = "last") -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(free))
        return findings(check({**config, "ckpt_path": path})[1])

    assert of_disk(3 * expected - 1, None) == ["disk"], "a fresh start leaves what is there"
    # A run that goes on replaces what it has there.
    for path in ("last", str(saved.path)):
        assert of_disk(3 * expected - saved.commit.size, path) == []
        assert of_disk(3 * expected - saved.commit.size - 1, path) == ["disk"]
    assert of_disk(expected - 1) == ["disk"], "the next one is written beside them"
    _, checks = check(config)
    assert checks["start"]["step"] == 2


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "cosine", "warmup_steps": 2000},
        {"kind": "cosine", "over": "tokens", "warmup_tokens": "1M"},
    ],
)
def test_a_long_warm_up_hinders_no_check(schedule: dict[str, Any]) -> None:
    end = {"class_path": "MaxTokens", "init_args": {"source": "2G"}}  # the recipe for chat ends so
    config = changed(trainer={"max_steps": 50_000}, model={"schedule": schedule})
    config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], end]
    _, checks = check(config, "--device-gb", "80")
    assert {checks[name]["verdict"] for name in ("memory", "disk")} == {"fine"}


@pytest.mark.parametrize(
    ("settings", "whole", "parts"),
    [
        ({}, 3, 0),
        ({"keep_last": 5}, 6, 0),
        ({"monitor": "val/loss"}, 4, 0),
        ({"monitor": "val/loss", "options": {"save_top_k": 3}}, 6, 0),
        ({"optimizer_every_n_saves": 4}, 3, 2),
    ],
)
def test_how_many_checkpoints_there_are_at_most(settings: dict[str, Any], whole: int, parts: int) -> None:
    callback = {"class_path": "AsyncDCPCheckpoint", "init_args": {"dirpath": "x", **settings}}
    _, checks = check(changed(trainer={"callbacks": [callback]}))
    one, needed = checks["disk"]["checkpoint_bytes"], checks["disk"]["needed_bytes"]
    weights = (needed - whole * one) / max(parts, 1)
    assert weights == (0 if not parts else pytest.approx(one / 3, rel=1e-3)), "AdamW keeps two more of each"


@pytest.mark.parametrize(("mode", "end"), [("total", "%"), ("effective", "% of the targets it may hold")])
def test_the_fill_says_what_it_counts(mode: str, end: str) -> None:
    _, checks = check(changed(data={"packing": {"count_mode": mode}}))
    assert checks["first row"]["text"].endswith(end)


def test_without_the_callback_no_disk_is_needed() -> None:
    _, checks = check(changed(trainer={"callbacks": None}))
    assert (checks["disk"]["verdict"], checks["start"]["verdict"]) == ("skipped", "fine")


@pytest.mark.slow
def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.Subject, "accelerators", property(lambda self: 1))
    monkeypatch.setattr(machine, "_device_gib", lambda _: 80.0)
    _, checks = check(changed(trainer={"accelerator": "gpu"}))
    assert findings(checks) == ["devices"]
    assert "asks for 2 accelerators, but got 1 on this machine" in checks["devices"]["text"]
    assert checks["memory"]["verdict"] == "fine"
    strategy = {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 1}}
    code, checks = check(changed(trainer={"accelerator": "gpu", "devices": "auto", "strategy": strategy}))
    assert (code, checks["devices"]["text"]) == (0, "1 of 1 accelerator")


@pytest.mark.slow
def test_devices_that_only_the_other_machine_knows() -> None:
    _, checks = check(changed(trainer={"accelerator": "gpu", "devices": "auto"}), "--device-gb", "80")
    assert checks["sizes"]["verdict"] == "skipped"
    code, checks = check(changed(trainer={"accelerator": "gpu", "devices": "auto"}), "--device-gb=80", "--devices=8")
    assert (code, checks["sizes"]["data_parallel"]) == (0, 4)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        _, checks = check(CONFIG)
        assert findings(checks) == ["port"]
        monkeypatch.setenv("MASTER_ADDR", "node7")
        _, checks = check(CONFIG)
        assert checks["port"]["verdict"] == "skipped"


def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.0.1" if name == "torch" else real(name))
    _, checks = check(CONFIG)
    assert findings(checks) == ["versions"]
    assert "`torch` must be >=2.11, but got 2.0.1." in checks["versions"]["text"]


def test_parts_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(trainer={"strategy": "auto", "devices": 1, "callbacks": None})
    config |= {"model": {"class_path": "tests.cli.toys.ToyModel"}, "data": {"class_path": "tests.cli.toys.ToyData"}}
    code, checks = check(config)
    assert (code, findings(checks)) == (0, [])
    for name in ("sources", "first row"):
        assert checks[name]["verdict"] == "skipped"
        assert "ToyData is not known here" in checks[name]["text"]


@pytest.mark.parametrize("name", ["Peeking", "PeekingLater", "AsksTheTrainer"])
def test_a_model_that_needs_values(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(trainer={"devices": 1, "strategy": "LongContextFSDPStrategy"})
    config["model"] = {"class_path": f"{__name__}.{name}"}
    code, checks = check(config, "--device-gb", "80")
    assert (code, findings(checks)) == (0, [])
    if name == "AsksTheTrainer":
        assert "no attribute 'max_epochs'" in checks["memory"]["text"]
        assert "no attribute 'max_epochs'" in checks["disk"]["text"]
        return
    assert "cannot be built by its shapes" in checks["model"]["text"]
    assert checks["disk"]["text"] == "`model` cannot be built: see above"
    capsys.readouterr()
    assert main(["plan", "--config", "run.yaml", "--device-gb", "80"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "`model` must be built by its shapes, on the meta device, but got" in said


def __getattr__(name: str) -> Any:
    if name in ("Peeking", "PeekingLater", "AsksTheTrainer"):
        return _peeking(name)  # made when asked for: other tests look for subclasses of LightningModule
    raise AttributeError(name)


def _peeking(name: str) -> type:
    from lightning.pytorch import LightningModule

    def peek(self: Any) -> None:
        self.size = int(torch.ones(3).sum().item())

    class Peeking(LightningModule):
        """Reads a value in its constructor, or later, or its Trainer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)
            if name == "Peeking":
                peek(self)

        def configure_model(self) -> None:
            if name == "PeekingLater":
                peek(self)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_epochs)

    return Peeking


def test_what_cannot_be_read_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(changed(data={"max_seqlen": 5})))
    assert main(["check", "--config", "run.yaml"]) == 2
    assert "Did you mean `data.max_seq_len`?" in capsys.readouterr().err
    assert main(["check", "--config", "missing.yaml"]) == 2
    assert main(["check", "--config", "run.yaml", "--device-gp", "80"]) == 2
    assert "Did you mean --device-gb?" in capsys.readouterr().err
