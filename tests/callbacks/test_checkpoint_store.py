"""``AsyncDCPCheckpoint`` at an address: a run, its resume, and every tool that looks at it."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_longctx import AsyncDCPCheckpoint, DynamicBatchingDataModule
from lightning_longctx.callbacks import checkpoint_run
from lightning_longctx.callbacks.checkpoint_loggers import refer_in_wandb
from lightning_longctx.callbacks.run_metrics import own_folder
from lightning_longctx.checkpoint.address import as_folder
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.layout import COMMIT
from lightning_longctx.cli import main
from lightning_longctx.errors import CheckpointError, ConfigurationError
from lightning_longctx.tools.before_start import check_checkpoint_path
from tests.callbacks.checkpoint_toy import DOCUMENTS, Recorder, assert_same, fit
from tests.checkpoint import objects  # noqa: F401 - registers the store, on each rank
from tests.checkpoint.helpers import leftovers, put, save, steps, writer
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Training waited")  # on a busy machine

ROOT = "memory://bucket/run"
EVERY_2 = {"every_n_train_steps": 2}


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    yield
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    assert not [name for name in Path().iterdir() if name.name.startswith("memory")], "an address was taken for a path"


@pytest.mark.parametrize("sp", [None, 1])
def test_a_resumed_run_is_an_unbroken_one(sp: int | None) -> None:
    whole = fit("whole", 10, sp=sp, checkpoint=EVERY_2)
    first = fit(ROOT, 5, sp=sp, checkpoint=EVERY_2)
    second = fit(ROOT, 10, sp=sp, checkpoint=EVERY_2, ckpt_path="last")
    assert_same(second, whole)
    assert first["notes"] + second["notes"] == whole["notes"]
    assert steps(ROOT) == [10, 8, 5], "the one that was resumed from stays"


@pytest.mark.parametrize("sp", [None, 1])
def test_the_address_of_one_checkpoint(sp: int | None) -> None:
    whole = fit(ROOT, 6, sp=sp, checkpoint={**EVERY_2, "keep_last": 9})
    fourth = next(one.path for one in scan(ROOT) if one.path.name.startswith("step-00000004"))
    assert_same(fit("memory://bucket/other", 6, sp=sp, ckpt_path=str(fourth)), whole)
    put(fourth / COMMIT, b"{")
    with pytest.raises(Exception, match="must be intact"):
        fit("memory://bucket/other", 6, sp=sp, ckpt_path=str(fourth))


def test_a_damaged_record_falls_back() -> None:
    whole = fit("whole", 6, checkpoint=EVERY_2)
    fit(ROOT, 4, checkpoint=EVERY_2)
    put(scan(ROOT)[0].path / COMMIT, b"{")
    with pytest.warns(UserWarning, match="Falling back to step-00000002"):
        assert_same(fit(ROOT, 6, ckpt_path="last"), whole)


def test_a_first_start_says_that_there_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    put(as_folder(ROOT) / "step-00000001-aaaaaaaa" / "weights" / "__0_0.distcp", b"left by a dead run")
    with caplog.at_level(logging.INFO):
        fit(ROOT, 2, ckpt_path="last")
    assert f"No checkpoint in {ROOT}: this is a fresh start." in caplog.text


class _Score(Callback):
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("score", torch.tensor({4: 0.1}.get(trainer.global_step, 1.0)), sync_dist=True)


def test_the_best_by_a_monitored_metric_stays() -> None:
    callback = AsyncDCPCheckpoint(ROOT, 2, keep_last=1, monitor="score")
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings |= {"accelerator": "cpu", "max_steps": 8, "val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = pl.Trainer(callbacks=[_Score(), callback], num_sanity_val_steps=0, **settings)
    data = DynamicBatchingDataModule({"a": DOCUMENTS}, max_seq_len=64, validation_sources={"v": DOCUMENTS[:3]})
    trainer.fit(Recorder(), data)
    assert steps(ROOT) == [8, 4]
    assert callback.best_model_path.startswith(f"{ROOT}/step-00000004-")
    newest, best = callback.closing_lines()
    assert newest.startswith(f"Checkpoint: {ROOT}/step-00000008-")
    assert best == f"Best by score: {callback.best_model_path}"
    trainer.validate(Recorder(), datamodule=data, ckpt_path="best")
    trainer.validate(Recorder(), datamodule=data, ckpt_path="last")


def test_a_score_that_cannot_be_noted_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the first rank alone, with the others in their next step."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_run, "write_score", full)
    data = {"validation_sources": {"v": DOCUMENTS[:3]}}
    with pytest.warns(UserWarning, match=r"score of step-00000002-\w+ could not be noted \(No space left on device\)"):
        fit(ROOT, 2, data=data, checkpoint={"monitor": "score"}, callbacks=[_Score()], val_check_interval=2)
    assert steps(ROOT) == [2]


def test_weights_into_a_plain_module() -> None:
    trained = fit(ROOT, 4, checkpoint={**EVERY_2, "optimizer_every_n_saves": 2, "keep_last": 9})["weights"]
    assert [found.commit is not None and found.commit.resumable for found in scan(ROOT)] == [True, True]
    path = AsyncDCPCheckpoint.find_latest(ROOT)
    assert isinstance(path, str)
    module = AsyncDCPCheckpoint.load_weights(path, Recorder())
    assert all(torch.equal(value, trained[key]) for key, value in module.state_dict().items())


def test_the_root_of_the_run_may_be_an_address() -> None:
    """Its default folder is there too, and what no store can hold goes to the working folder."""
    trainer = pl.Trainer(default_root_dir="memory://bucket/root", logger=False, accelerator="cpu", barebones=False)
    assert str(AsyncDCPCheckpoint()._folder(trainer)) == "memory://bucket/root/checkpoints"
    assert own_folder("memory://bucket/root") == Path()
    whole = fit("whole", 4)
    logger = CSVLogger("memory://bucket/root")
    settings: dict[str, Any] = {"default_root_dir": "memory://bucket/root", "logger": logger}
    fit(None, 2, **settings)  # type: ignore[arg-type]
    assert_same(fit(None, 4, ckpt_path="last", **settings), whole)  # type: ignore[arg-type]
    assert steps("memory://bucket/root/checkpoints") == [4, 2]


def test_the_tools_take_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    fit(ROOT, 6, checkpoint={**EVERY_2, "keep_last": 9})
    capsys.readouterr()
    assert main(["checkpoint", "list", ROOT, "--json", "list.json"]) == 0
    rows = json.loads(Path("list.json").read_text())
    assert [row["step"] for row in rows] == [6, 4, 2]
    assert rows[0]["path"] == f"{ROOT}/{rows[0]['name']}"
    assert main(["checkpoint", "verify", ROOT, "--deep"]) == 0
    file = as_folder(rows[0]["path"]) / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    put(file, bytes(content))
    assert main(["checkpoint", "verify", rows[0]["path"], "--deep"]) == 1
    assert main(["checkpoint", "verify", rows[1]["path"], "--deep"]) == 0
    assert main(["checkpoint", "export", rows[1]["path"], "--to", "torch", "--output", "out.pt"]) == 0
    assert torch.load("out.pt")["state_dict"]["head.weight"].shape == (257, 32)
    capsys.readouterr()
    assert main(["checkpoint", "prune", ROOT, "--keep-last", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would remove") == 2
    assert main(["checkpoint", "prune", ROOT, "--keep-last", "1"]) == 0
    assert steps(ROOT) == [6]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["list", "memory://nothing/here"], "must hold checkpoints, but got no checkpoint"),
        (
            ["list", "oci://bucket/run"],
            "`DIR` needs a package for such addresses, but got oci://bucket/run. Install ocifs",
        ),
        (["export", ROOT, "--output", "memory://out"], "`memory://out` must be a path of this machine"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(writer(ROOT), 1)
    assert main(["checkpoint", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


def test_a_path_to_start_from_must_be_there() -> None:
    save(writer(ROOT), 1)
    check_checkpoint_path(str(scan(ROOT)[0].path))
    check_checkpoint_path("last")
    with pytest.raises(ConfigurationError, match="`ckpt_path` must exist, but got 'memory://bucket/run/step-2'"):
        check_checkpoint_path(f"{ROOT}/step-2")
    with pytest.raises(CheckpointError, match="`memory://bucket/run` must be one checkpoint, but got the folder of 1"):
        check_checkpoint_path(ROOT)
    check_checkpoint_path("best", ROOT)
    with pytest.raises(ConfigurationError, match="`ckpt_path` must find a checkpoint, but got `best`, and none in mem"):
        check_checkpoint_path("best", "memory://bucket/other")


@pytest.mark.parametrize("field", ["stage_dir", "export_hf_at_end"])
def test_what_stays_here_is_no_address(field: str) -> None:
    from lightning_longctx import CheckpointOptions

    with pytest.raises(ConfigurationError, match=f"options.{field}` must be a folder of this machine"):
        CheckpointOptions(**{field: "s3://bucket/x"})


def test_wandb_is_told_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Error(Exception): ...

    class Artifact:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def add_reference(self, place: str, name: str | None, checksum: bool) -> None:
            if "step-3" in place:
                raise Error("requires the boto3 library")
            told.append(place)
            assert name == (None if place.startswith("file") else "step-1"), "schemes that it does not know need one"

    class WandbLogger:
        version = "abc"
        experiment = SimpleNamespace(log_artifact=lambda artifact, aliases: told.extend(aliases))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Artifact=Artifact, Error=Error))
    trainer: Any = SimpleNamespace(loggers=[WandbLogger()])
    refer_in_wandb(trainer, as_folder("memory://bucket/run/step-1"))
    refer_in_wandb(trainer, as_folder("step-2"))
    with pytest.warns(UserWarning, match="no reference to memory://bucket/run/step-3: requires the boto3 library"):
        refer_in_wandb(trainer, as_folder("memory://bucket/run/step-3"))
    assert told == ["memory://bucket/run/step-1", "step-1", f"file://{Path('step-2').resolve()}", "step-2"]


def test_a_report_needs_no_store_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_longctx.tools.report.kept import kept_checkpoints

    def fails(*_: Any, **__: Any) -> None:
        raise TimeoutError("slow")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "ls", fails)
    run: Any = SimpleNamespace(path=Path(), callback=lambda name: {"dirpath": ROOT}, setting=lambda *names: None)
    found = kept_checkpoints(run)
    assert found is not None
    assert f"In <code>{ROOT}</code> (cannot be read: " in str(found[0])


# -- two ranks ---------------------------------------------------------------------------------------------------------


def _two_ranks(root: str, max_steps: int, ckpt_path: str | None) -> dict[str, Any]:
    return fit(root, max_steps, sp=2, devices=2, checkpoint=EVERY_2, ckpt_path=ckpt_path)


@pytest.mark.distributed
def test_two_ranks_resume_from_one_store(tmp_path: Path) -> None:
    root = f"objects://{tmp_path}/run"
    (whole, _) = run_ranks(_two_ranks, 2, str(tmp_path / "whole"), 6, None)
    run_ranks(_two_ranks, 2, root, 3, None)
    for again in run_ranks(_two_ranks, 2, root, 6, "last"):
        assert_same(again, whole)
    assert steps(root) == [6, 4, 3]
    assert leftovers(root) == []
    assert_same(fit(f"{root}-2", 6, sp=1, ckpt_path=str(scan(root)[0].path)), whole, exact=False)
