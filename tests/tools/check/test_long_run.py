"""What would fail or waste a run of days, and can be told before: sources, folders, the end, the rate, the start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.cli import main
from lightning_longctx.tools.check import run
from tests.tools.check.helpers import changed, check, findings
from tests.tools.plan.helpers import TINY

# -- sources, all at once ---------------------------------------------------------------------------------------------


def test_all_sources_that_are_not_there_are_told_at_once() -> None:
    sources = {"a": "texts/*.txt", "b": "no/b.txt", "c": {"path": ["no/c1.txt", "texts/0.txt", "no/c2.txt"]}}
    _, checks = check(changed(data={"sources": sources, "validation_sources": {"v": "no/v.jsonl"}}))
    assert findings(checks) == ["sizes"]
    text = checks["sizes"]["text"]
    for missing in ("no/b.txt", "no/c1.txt", "no/c2.txt", "`data.sources.c`", "`data.validation_sources.v`"):
        assert missing in text
    assert "`data.sources.a`" not in text


def test_all_sources_that_cannot_be_read_or_are_empty_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    access = SimpleNamespace(access=lambda path, mode: not path.endswith("2.txt"), R_OK=os.R_OK, path=os.path)
    monkeypatch.setattr(run, "os", access)  # permissions do not stop an administrator
    Path("empty.txt").touch()
    sources = {"a": "texts/*.txt", "b": "empty.txt"}
    _, checks = check(changed(data={"sources": sources, "validation_sources": {"v": "texts/2.txt"}}))
    assert findings(checks) == ["sources"]
    for said in (
        "texts/2.txt (1 of 4 files)",
        "`data.sources.b`",
        "1 file without a byte",
        "`data.validation_sources.v`",
    ):
        assert said in checks["sources"]["text"]


def test_the_first_record_of_each_source_is_read() -> None:
    for name in ("b", "v"):
        Path(f"{name}.jsonl").write_text('{"content": "words"}\n' * 9)
    sources = {"a": "texts/*.txt", "b": "b.jsonl"}
    _, checks = check(changed(data={"sources": sources, "validation_sources": {"v": "v.jsonl", "w": "texts/1.txt"}}))
    assert findings(checks) == ["first row"]
    text = checks["first row"]["text"]
    assert "`data.sources.b` must have a text under 'text'" in text
    assert "`data.validation_sources.v` must have a text under 'text'" in text
    assert "validation: v: " in checks["sources"]["text"]


# -- where it writes --------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_written_to() -> None:
    Path("runs").write_text("a file in the place of the folder")
    Path("c").write_text("another")
    callback = {"class_path": "AsyncDCPCheckpoint", "init_args": {"dirpath": "c/run"}}
    config = changed(trainer={"callbacks": [callback]})
    _, checks = check(config)
    assert findings(checks) == ["folders"]
    text = checks["folders"]["text"]
    assert (
        f"`trainer.logger` must be in a folder that can be written to, but got the file {Path('runs').absolute()}"
        in text
    )
    assert "`callbacks.AsyncDCPCheckpoint.dirpath` must be in a folder that can be written to" in text
    assert main(["fit", "--config", "run.yaml"]) == 2, "and a fit tells it before it starts"


@pytest.mark.parametrize(
    ("logger", "said"),
    [
        (False, "no logs"),
        (True, "logs in lightning_logs"),
        ({"class_path": "TensorBoardLogger", "init_args": {"save_dir": "boards"}}, "logs in boards/runs"),
        (
            [
                {"class_path": "CSVLogger", "init_args": {"save_dir": "x", "name": "y"}},
                {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "z", "name": ""}},
            ],
            "logs in x/y, z",
        ),
    ],
)
def test_where_it_writes(logger: Any, said: str) -> None:
    _, checks = check(changed(trainer={"logger": logger}))
    assert checks["folders"]["text"] == f"{said}, checkpoints in checkpoints"


# -- how long it is ---------------------------------------------------------------------------------------------------


def odd(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: one["text"] for name, one in checks.items() if one["verdict"] == "warning"}


SAVES = "AsyncDCPCheckpoint"


def saving(**settings: Any) -> dict[str, Any]:
    return {"class_path": SAVES, "init_args": settings}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": -1}, "no end is set, 64 tokens a step; Lightning makes 1,000 epochs"),
        ({"callbacks": [SAVES, {"class_path": "MaxTokens", "init_args": {"target": 60}}]}, "within the first step"),
        ({"callbacks": []}, "nothing is saved before an epoch is over: add AsyncDCPCheckpoint"),
        ({"callbacks": [], "enable_checkpointing": False}, "nothing is saved (`enable_checkpointing: false`)"),
        ({"callbacks": [saving(every_n_train_steps=3)]}, "`every_n_train_steps: 3` saves its end alone"),
        ({"log_every_n_steps": 3}, "`trainer.log_every_n_steps: 3` logs nothing"),
    ],
)
def test_what_is_odd_about_the_length(changes: dict[str, Any], said: str) -> None:
    code, checks = check(changed(trainer={"log_every_n_steps": 1, **changes}))
    assert code == 0
    assert list(odd(checks)) == ["length"]
    assert said in odd(checks)["length"]


def test_a_warning_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    check(changed(trainer={"callbacks": []}))
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing stands in the way, 1 warning; 2 of 14 checks skipped."
    assert json.loads(Path("found/check.json").read_text())["warnings"] == 1


def test_the_steps_of_a_run_in_tokens() -> None:
    callbacks = [SAVES, {"class_path": "MaxTokens", "init_args": {"target": 1000, "source": 900}}]
    config = changed(trainer={"callbacks": callbacks, "max_steps": -1, "devices": 4}, data={"global_batch_tokens": 256})
    _, checks = check(config)
    assert (checks["length"]["steps"], checks["length"]["step_tokens"]) == (4, 256)
    config = changed(trainer={"devices": 4, "accumulate_grad_batches": 3})
    _, checks = check(config)
    assert (checks["length"]["steps"], checks["length"]["step_tokens"]) == (2, 64 * 2 * 3)


def test_a_metric_that_nobody_logs() -> None:
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    callbacks = [saving(), stop]
    _, checks = check(changed(trainer={"callbacks": callbacks}))
    assert findings(checks) == ["length"]
    assert (
        "`callbacks.EarlyStopping.monitor` must be a metric that is logged, but got 'val/loss'"
        in checks["length"]["text"]
    )
    sources = {"v": "texts/1.txt"}
    _, checks = check(
        changed(trainer={"callbacks": callbacks, "log_every_n_steps": 1}, data={"validation_sources": sources})
    )
    assert (findings(checks), odd(checks)) == ([], {})
    trainer = {"callbacks": callbacks, "log_every_n_steps": 1, "val_check_interval": 3}
    _, checks = check(changed(trainer=trainer, data={"validation_sources": sources}))
    assert "`trainer.val_check_interval: 3` validates never" in odd(checks)["length"]
    data = {"validation_sources": sources, "global_batch_tokens": 256}  # four micro-batches a step
    for interval, warned in ((8, False), (9, True)):
        _, checks = check(changed(trainer={**trainer, "val_check_interval": interval}, data=data))
        assert ("validates never" in odd(checks).get("length", "")) is warned


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"warmup_steps": 9}, None),
        ({"warmup_steps": 10}, "the run of 10 steps ends before the warm-up: the rate never reaches its peak"),
        ({"kind": "cosine", "total_steps": 10}, None),
        ({"kind": "cosine", "total_steps": 8}, "decay until 8; the run goes on to 10 steps, at the lowest rate"),
        ({"kind": "linear", "total_steps": 12}, "the run ends at 10 steps, before the lowest rate"),
        ({"kind": "cosine", "over": "tokens", "total_tokens": 600}, None),  # within a step of the end
        ({"kind": "cosine", "over": "tokens", "total_tokens": 2000}, "the run ends at 640 tokens, before"),
        ({"over": "tokens", "warmup_tokens": 700}, "the run of 640 tokens ends before the warm-up"),
    ],
)
def test_what_is_odd_about_the_learning_rate(schedule: dict[str, Any], said: str | None) -> None:
    trainer = {"max_steps": 10, "log_every_n_steps": 1}
    code, checks = check(changed(trainer=trainer, model={"schedule": schedule}))
    assert code == 0
    assert list(odd(checks)) == ([] if said is None else ["learning rate"])
    assert (said or "") in checks["learning rate"]["text"]


def test_a_decay_that_ends_before_its_warm_up() -> None:
    _, checks = check(changed(model={"schedule": {"kind": "cosine", "warmup_steps": 10}}))
    assert findings(checks) == ["learning rate"]
    assert (
        "must lie after the warm-up, but got an end at 2 and a warm-up of 10 steps" in checks["learning rate"]["text"]
    )


# -- where it starts --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_odd_about_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one = {"devices": 1, "strategy": "LongContextFSDPStrategy", "logger": False, "log_every_n_steps": 1}
    config = changed(trainer=one)
    check(config)
    assert main(["fit", "--config", "run.yaml"]) == 0
    monkeypatch.delenv("MASTER_PORT", raising=False)  # that run set it
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        assert main(["fit", "--config", "run.yaml"]) == 0
    assert "Nothing was left to train: the checkpoint is that of step 2, and `max_steps` is 2." in caplog.text
    _, checks = check(config)
    assert "goes on after step 2" in odd(checks)["start"]
    assert "nothing is left to train" in odd(checks)["start"]
    _, checks = check({**config, "ckpt_path": None})
    assert "`ckpt_path: last` would go on from checkpoints/step-00000002" in odd(checks)["start"]
    other = changed(trainer=one, model={"config": {**TINY, "num_hidden_layers": 3}})
    for path in ("last", str(scan("checkpoints")[0].path)):
        _, checks = check({**other, "ckpt_path": path})
        assert findings(checks) == ["start"]
        assert "no weights were saved for `model.model.layers.2" in checks["start"]["text"]
    check({**changed(trainer={**one, "max_steps": 3}), "ckpt_path": None})
    assert main(["fit", "--config", "run.yaml"]) == 0
    monkeypatch.delenv("MASTER_PORT", raising=False)
    _, checks = check(changed(trainer={**one, "max_steps": 9}))
    assert "checkpoints of 2 runs" in odd(checks)["start"]


def test_checkpoints_that_are_kept_for_ever_need_their_disk() -> None:
    callback = saving(options={"keep_every_n_steps": 10})
    _, checks = check(changed(trainer={"callbacks": [callback], "max_steps": 45}))
    assert checks["disk"]["needed_bytes"] == (3 + 4) * checks["disk"]["checkpoint_bytes"]
