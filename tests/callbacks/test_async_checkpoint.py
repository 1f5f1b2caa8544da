"""AsyncDCPCheckpoint in a Trainer: how it is found, when it saves, what it tells, what it refuses."""

from __future__ import annotations

import errno
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_longctx import AsyncDCPCheckpoint, CheckpointOptions, ConfigurationError, DynamicBatchingDataModule
from lightning_longctx.callbacks.checkpoint_resume import realign_windows
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import LATEST
from lightning_longctx.errors import CheckpointError
from tests.callbacks.checkpoint_toy import DOCUMENTS, Recorder, fit
from tests.callbacks.toy import MemoryLogger
from tests.helpers.trainers import quiet_trainer


def _steps(folder: str | Path) -> list[int]:
    return [found.commit.step for found in scan(folder) if found.commit and not found.problem]


def _trainer(callback: Any, **settings: Any) -> pl.Trainer:
    return quiet_trainer(callbacks=callback, **({"enable_checkpointing": True} | settings))


def _data(**more: Any) -> DynamicBatchingDataModule:
    return DynamicBatchingDataModule(
        **{"sources": {"a": DOCUMENTS}, "validation_sources": {"v": DOCUMENTS[:3]}, "max_seq_len": 64, **more}
    )


# -- finding -----------------------------------------------------------------------------------------------------------


def test_one_line_in_a_plain_trainer(caplog: pytest.LogCaptureFixture) -> None:
    """verl#7952: after an asynchronous run nothing was found. The first ``last`` is one line and a fresh start."""
    caplog.set_level(logging.INFO)
    _trainer([AsyncDCPCheckpoint()], max_steps=2).fit(Recorder(), _data(), ckpt_path="last")
    lines = [record.getMessage() for record in caplog.records if "No checkpoint" in record.getMessage()]
    assert len(lines) == 1
    assert "this is a fresh start" in lines[0]
    trainer = _trainer([AsyncDCPCheckpoint()], max_steps=3)
    trainer.fit(Recorder(), _data(), ckpt_path="last")
    assert trainer.global_step == 3
    assert any("Resumed at step 2" in record.getMessage() for record in caplog.records)
    assert any("nothing is repeated or lost" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
@pytest.mark.parametrize("path", ["last", "best", "directory"])
@pytest.mark.parametrize("strategy", ["auto", "longctx_fsdp"])
def test_evaluation_finds_the_weights(command: str, path: str, strategy: str) -> None:
    trained = fit("checkpoints", 3)["weights"]
    module = _Evaluated()
    with torch.no_grad():
        module.head.weight.zero_()
    trainer = _trainer([AsyncDCPCheckpoint("checkpoints")], strategy=strategy)
    where = str(AsyncDCPCheckpoint.find_latest("checkpoints")) if path == "directory" else path
    getattr(trainer, command)(module, datamodule=_data(), ckpt_path=where)
    head = module.head.weight
    assert torch.equal(head.full_tensor() if hasattr(head, "full_tensor") else head, trained["head.weight"])


@pytest.mark.parametrize("strategy", ["auto", "longctx_fsdp"])
def test_the_folder_of_checkpoints_is_no_checkpoint(strategy: str) -> None:
    fit("checkpoints", 1)
    trainer = _trainer([AsyncDCPCheckpoint("checkpoints")], strategy=strategy)
    with pytest.raises(
        CheckpointError, match="`checkpoints` must be one checkpoint, but got the folder of 1 checkpoint"
    ):
        trainer.validate(_Evaluated(), datamodule=_data(), ckpt_path="checkpoints")


class _Evaluated(Recorder):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch).per_token_loss


def test_last_falls_back_and_never_starts_anew_in_silence() -> None:
    fit("c", 10, checkpoint={"keep_last": 2})
    newest = scan("c")[0].path
    (newest / "weights" / "__0_0.distcp").unlink()
    with pytest.warns(UserWarning, match="Falling back to step-00000005"):
        assert fit("c", 6, ckpt_path="last")["step"] == 6
    for found in scan("c"):
        (found.path / "COMMIT.json").unlink()
    with pytest.raises(CheckpointError, match="must hold a checkpoint that can be used"):
        fit("c", 7, ckpt_path="last")


def test_weights_into_a_plain_module() -> None:
    trained = fit("c", 2)["weights"]
    module = Recorder()
    AsyncDCPCheckpoint.load_weights(AsyncDCPCheckpoint.find_latest("c"), module)  # type: ignore[arg-type]
    for key, value in module.state_dict().items():
        assert torch.equal(value, trained[key])
    module.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"no weights were saved for `extra\.weight`"):
        AsyncDCPCheckpoint.load_weights(AsyncDCPCheckpoint.find_latest("c"), module)  # type: ignore[arg-type]


def test_beside_a_stock_checkpoint_callback() -> None:
    """Lightning#19251, #19325: a link named ``last`` that dangled. Both callbacks save; ours is found by its folder."""
    fit("c", 4, callbacks=[ModelCheckpoint("stock", every_n_train_steps=4, save_top_k=1)])
    assert _steps("c") == [4]
    assert [path.suffix for path in Path("stock").iterdir()] == [".ckpt"]


def test_a_stock_file_resumes_here() -> None:
    whole = fit("whole", 6)
    keeper = ModelCheckpoint("stock", every_n_train_steps=3, save_top_k=1)
    fit("c", 3, callbacks=[keeper])
    (stock,) = Path("stock").iterdir()
    keeper = ModelCheckpoint("stock", every_n_train_steps=3, save_top_k=1)
    resumed = fit("d", 6, ckpt_path=str(stock), callbacks=[keeper])
    assert resumed["optimizer"].keys() == whole["optimizer"].keys()
    assert resumed["step"] == 6


# -- when --------------------------------------------------------------------------------------------------------------


def test_saves_by_steps_and_at_the_end() -> None:
    fit("c", 7, checkpoint={"every_n_train_steps": 3, "keep_last": 9})
    assert _steps("c") == [7, 6, 3]


def test_saves_by_epochs() -> None:
    data = {"sources": {"a": DOCUMENTS[:12]}}
    fit("c", -1, max_epochs=3, data=data, checkpoint={"every_n_train_steps": None, "every_n_epochs": 2, "keep_last": 9})
    assert len(_steps("c")) == 2


def test_saves_by_time() -> None:
    checkpoint = {"every_n_train_steps": None, "train_time_interval": timedelta(0), "keep_last": 9}
    fit("c", 3, checkpoint=checkpoint)
    assert _steps("c") == [3, 2, 1]


def test_the_best_by_a_monitored_metric_stays() -> None:
    class Score(Callback):
        def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            values = {2: 0.5, 4: 0.1, 6: 0.9, 8: 0.7}
            pl_module.log("score", torch.tensor(values.get(trainer.global_step, 1.0)), sync_dist=True)

    callback = AsyncDCPCheckpoint("c", 2, keep_last=1, monitor="score")
    trainer = _trainer([Score(), callback], max_steps=8, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(Recorder(), _data())
    assert sorted(_steps("c")) == [4, 8]
    assert Path(callback.best_model_path).name.startswith("step-00000004")
    trainer.validate(Recorder(), datamodule=_data(), ckpt_path="best")


def test_stopped_early_is_saved() -> None:
    stopper = EarlyStopping("val/loss", patience=1, mode="max")
    fit(
        "c",
        50,
        callbacks=[stopper],
        val_check_interval=2,
        check_val_every_n_epoch=None,
        data={"validation_sources": {"v": DOCUMENTS[:3]}},
    )
    assert _steps("c")[0] < 50


def test_dry_runs_save_nothing() -> None:
    _trainer([AsyncDCPCheckpoint("c")], fast_dev_run=2).fit(Recorder(), _data())
    assert not Path("c").exists()


# -- what it tells -----------------------------------------------------------------------------------------------------


class _Noting(CSVLogger):
    def __init__(self) -> None:
        super().__init__(".", name="runs")
        self.told: list[list[int]] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.told.append(_steps("c"))


def test_loggers_hear_of_a_checkpoint_once_it_is_there() -> None:
    """Lightning#17915: a logger was told of a file that was not there yet. composer#3376: so was the pointer."""
    logger = _Noting()
    fit("c", 6, logger=logger, checkpoint={"every_n_train_steps": 3, "keep_last": 9})
    assert len(logger.told) == 2
    assert 3 in logger.told[0]
    assert logger.told[1] == [6, 3]
    assert '"step": 6' in Path("c", LATEST).read_text()


@pytest.mark.filterwarnings("error:Experiment logs directory")  # that the old ones will be deleted, which is not true
@pytest.mark.parametrize("again", ["last", "the path"])
def test_csv_goes_on_as_one_curve(again: str) -> None:
    def losses() -> list[str]:
        rows = Path("runs/version_0/metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("step")
        return [row.split(",")[column] for row in rows[1:]]

    class Log(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            pl_module.log("loss", 1.0)

    def run(steps: int, save_at: int, path: str = "last") -> None:
        logger = CSVLogger(".", name="runs")
        fit(
            "c",
            steps,
            path,
            logger=logger,
            log_every_n_steps=1,
            callbacks=[Log()],
            checkpoint={"every_n_train_steps": save_at},
        )

    run(4, 4)
    Path("runs/version_0/picture.png").touch()  # as most runs leave something beside the metrics
    run(6, 4, again if again == "last" else str(scan(Path("c"))[0].path))
    assert not Path("runs/version_1/metrics.csv").exists()
    assert [step for step in range(6) if str(step) not in losses()] == []


def test_tensorboard_goes_on_in_its_folder() -> None:
    fit("c", 2, "last", logger=TensorBoardLogger(".", name="boards"))
    fit("c", 4, "last", logger=TensorBoardLogger(".", name="boards"))
    assert [path.name for path in Path("boards").iterdir()] == ["version_0"]


def test_wandb_goes_on_in_its_run() -> None:
    class WandbLogger(MemoryLogger):  # found by its name, so that the package is not needed
        def __init__(self) -> None:
            super().__init__()
            self._wandb_init: dict[str, Any] = {}
            self._id, self._experiment = "fresh", None

        @property
        def version(self) -> str:  # type: ignore[override]
            return self._id

    first, second = WandbLogger(), WandbLogger()
    first._id = "abc123"
    fit("c", 2, "last", logger=first)
    fit("c", 4, "last", logger=second)
    assert second._wandb_init == {"id": "abc123", "resume": "allow"}
    assert second.version == "abc123"


def test_what_is_logged() -> None:
    logger = MemoryLogger()
    fit("c", 6, logger=logger, log_every_n_steps=1, checkpoint={"every_n_train_steps": 2})
    keys = {key for _, row in logger.rows for key in row if key.startswith("checkpoint/")}
    wanted = {
        f"checkpoint/{key}/{slot}" for key in ("stall_s", "write_s", "bytes") for slot in ("weights", "optimizer")
    }
    assert wanted <= keys


@pytest.mark.filterwarnings("ignore:Training waited")
def test_the_progress_bar_shows_a_write_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            if operation == "create" and path.suffix == ".distcp":
                time.sleep(0.2)

    class Bar(ProgressBar):
        shown: list[float] = []
        said: set[str] = set()

        def disable(self) -> None: ...

        def enable(self) -> None: ...

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            self.shown.append(float(self.get_metrics(trainer, pl_module).get("saving_s", -1.0)))
            saving = next(one for one in trainer.callbacks if isinstance(one, AsyncDCPCheckpoint))
            self.said.add(saving.hang_report())  # what RunGuard would write of it
            time.sleep(0.05)

    monkeypatch.setattr("lightning_longctx.checkpoint.object_store.FileSystem", Slow)
    bar = Bar()
    fit("c", 14, callbacks=[bar], enable_progress_bar=True, checkpoint={"every_n_train_steps": 2, "keep_last": 1})
    assert max(bar.shown) > 0.05
    assert any(line.startswith("writing weights for 0 s") for line in bar.said)
    assert AsyncDCPCheckpoint("d").hang_report() == "no run"
    assert _steps("c") == [14]


# -- failures ----------------------------------------------------------------------------------------------------------


class _Full(FileSystem):
    active = True

    def before(self, operation: str, path: Path) -> None:
        if operation == "write" and "weights/__0" in str(path) and self.active:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_raises_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_longctx.checkpoint.object_store.FileSystem", _Full)

    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.1)

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        fit("c", 50, checkpoint={"every_n_train_steps": 1}, callbacks=[Slow()])
    assert "step-00000001" in str(caught.value)
    assert _steps("c") == []


def test_an_error_in_training_stays_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError("the user's")

    with pytest.raises(ZeroDivisionError, match="the user's"):
        fit("c", 9, checkpoint={"every_n_train_steps": 3}, callbacks=[Fails()])
    assert _steps("c") == [3], "the write that was under way was waited for"
    monkeypatch.setattr("lightning_longctx.checkpoint.object_store.FileSystem", _Full)
    with pytest.raises(ZeroDivisionError) as caught:
        fit("d", 9, checkpoint={"every_n_train_steps": 3}, callbacks=[Fails()])
    assert "a checkpoint was not written" in "".join(getattr(caught.value, "__notes__", []))


def test_state_that_could_not_be_loaded_is_named() -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

    with pytest.raises(CheckpointError, match=r"lightning\['callbacks'\]\['.*Odd'\]\['path'\]"):
        fit("c", 2, callbacks=[Odd()])


def test_the_lossy_plugin_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AsyncCheckpointIO"):
        fit("c", 2, plugins=[AsyncCheckpointIO()])


@pytest.mark.parametrize(
    "wrong", [{"keep_last": 0}, {"every_n_train_steps": 0}, {"mode": "up"}, {"dirpath": "nowhere://run"}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        AsyncDCPCheckpoint(**wrong)


def test_a_second_fit_in_the_same_process() -> None:
    """Its first save holds the optimizer, like that of each fit."""
    callback = AsyncDCPCheckpoint("c", 2, optimizer_every_n_saves=2, options=CheckpointOptions(keep_every_n_steps=2))
    trainer = _trainer([callback], max_steps=2)
    trainer.fit(Recorder(), _data())
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(trainer.lightning_module, _data(), ckpt_path="last")
    assert [(found.commit.step, found.commit.resumable) for found in scan("c") if found.commit] == [
        (6, True),
        (4, True),
        (2, True),
    ]


@pytest.mark.parametrize(
    ("ready", "last", "expected"),
    [(6, False, 12), (7, False, 13), (7, True, 16)],
    ids=["at_a_step", "inside_a_window", "short_last_window"],
)
def test_windows_are_counted_anew(ready: int, last: bool, expected: int) -> None:
    """Rows of an open window stay beyond: the data module gives them again, and takes so many off."""
    progress: dict[str, Any] = {
        "current": {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1},
        "total": {"ready": 10 + ready, "started": 10 + ready, "processed": 10 + ready, "completed": 9 + ready},
        "is_last_batch": last,
    }
    realign_windows({"fit_loop": {"epoch_loop.batch_progress": progress}}, 2, 4)
    for name, more in (("current", 0), ("total", 10)):
        wanted = expected + more
        assert progress[name] == {"ready": wanted, "started": wanted, "processed": wanted, "completed": wanted - 1}
