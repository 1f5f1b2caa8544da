"""What does not fit a run is named, and state of any kind goes on where it was: with loaders and modules of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from lightning_longctx import AsyncDCPCheckpoint, CheckpointOptions, ConfigurationError
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.errors import CheckpointError
from tests.callbacks.checkpoint_plain import Plain, loader, trainer
from tests.callbacks.logged import read_csv

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*returned no `per_token_loss`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


def _run(
    folder: str,
    steps: int,
    resume: bool = False,
    module: Plain | None = None,
    extra: Callable[[], list[pl.Callback]] = list,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Plain:
    pl.seed_everything(3, verbose=False)
    module = module or Plain()
    saving = AsyncDCPCheckpoint(folder, every_n_train_steps=100, options=CheckpointOptions(**(options or {})))
    run = trainer(saving, *extra(), **{"max_steps": steps, **settings})
    run.fit(module, loader(shuffle=True), ckpt_path="last" if resume else None)
    return module


class _ByHand(Plain):
    """Steps after each second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss: Any = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.log("loss", loss, batch_size=4)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_optimization_by_hand_keeps_its_rows_over_a_resume() -> None:
    """Loggers number micro-batches then, and rows beyond the number of steps were dropped."""
    for steps in (4, 6):
        _run("saves", steps, steps > 4, _ByHand(), logger=CSVLogger("runs", name=""), log_every_n_steps=1)
    rows = read_csv(Path("runs/version_0/metrics.csv"))
    assert sorted(step for step, values in rows.items() if "loss" in values) == list(range(12))
    assert sorted(step for step, values in rows.items() if "checkpoint/stall_s/weights" in values) == [8, 12]


# -- exact, with anybody's loader --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 2},
        {"extra": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
    ],
    ids=["plain", "64-true", "accumulate", "other accumulation later"],
)
def test_a_plain_shuffled_loader_at_the_end_of_an_epoch(settings: dict[str, Any]) -> None:
    """Lightning makes the iterator of the next epoch before random numbers are back: another order, another run."""
    first, last = (2, 6) if "accumulate_grad_batches" in settings else (4, 8)
    whole = _run("whole", last, **settings)
    before = _run("parts", first, **settings)
    after = _run("parts", last, resume=True, **settings)
    assert before.notes + after.notes == whole.notes
    for key, value in whole.state_dict().items():
        assert torch.equal(after.state_dict()[key], value), key


def test_a_run_without_optimizers_goes_on() -> None:
    class Counting(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.notes.append((batch[0].tolist(), 0.0))

    def go(epochs: int) -> Counting:
        module = Counting(lambda module: None)
        with pytest.warns(UserWarning, match="returned `None`"):
            trainer(AsyncDCPCheckpoint("c"), max_epochs=epochs).fit(module, loader(), ckpt_path="last")
        return module

    assert len(go(1).notes) == 4
    assert len(go(2).notes) == 4


def test_whether_a_part_is_compiled_does_not_matter() -> None:
    """The names that ``torch.compile`` adds were saved, and no plain module could load them."""

    def compiled() -> Plain:
        module = Plain()
        module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
        return module

    trained = _run("c", 2, module=compiled()).net.state_dict()
    found = AsyncDCPCheckpoint.find_latest("c")
    assert found is not None
    for module in (Plain(), compiled()):
        AsyncDCPCheckpoint.load_weights(found, module)
        loaded = {key.replace("_orig_mod.", ""): value for key, value in module.net.state_dict().items()}
        assert all(torch.equal(loaded[key.replace("_orig_mod.", "")], value) for key, value in trained.items())
    _run("c", 3, resume=True)
    _run("c", 4, resume=True, module=compiled())


# -- what does not fit -------------------------------------------------------------------------------------------------


def _momentum(module: Any) -> Any:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def _stepped(module: Any) -> Any:
    optimizer = AdamW(module.parameters(), lr=0.01)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2), "interval": "step"}]


def _cosine(module: Any) -> Any:
    optimizer = AdamW(module.parameters(), lr=0.01)
    return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, 10), "interval": "step"}]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, _momentum, "optimizer_0 is SGD, and AdamW was saved"),
        (_momentum, None, "optimizer_0 is AdamW, and SGD was saved"),
        (_stepped, None, "1 learning rate schedulers were saved and there are 0"),
        (None, _stepped, "0 learning rate schedulers were saved and there are 1"),
        (_stepped, _cosine, "scheduler 0 is CosineAnnealingLR, and StepLR was saved"),
    ],
)
def test_other_optimizers_and_schedulers_are_named(before: Any, after: Any, text: str) -> None:
    """They were loaded in silence, or failed with a KeyError in the first step."""
    _run("c", 2, module=Plain(before))
    with pytest.raises(CheckpointError, match=text):
        _run("c", 4, resume=True, module=Plain(after))
    with pytest.warns(UserWarning, match=text):
        module = _run("c", 4, resume=True, module=Plain(after), options={"on_missing": "warn"})
    assert len(module.notes) == 2
    schedulers = module.trainer.lr_scheduler_configs
    if after is _cosine:  # it starts anew, without a trace of the other
        assert schedulers[0].scheduler.last_epoch == 2
        assert not hasattr(schedulers[0].scheduler, "step_size")


class _Larger(Plain):
    """One more layer, one less, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.Linear(8, 16, bias=False)
        self.net[3] = torch.nn.Linear(16, 5)
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("strategy", ["auto", "longctx_fsdp"])
def test_weights_that_do_not_fit_are_named_or_start_anew(strategy: str) -> None:
    """On one device it was Lightning's error whatever ``on_missing`` said; another size was an error with ``warn``."""
    trained = _run("c", 2)
    with pytest.raises(CheckpointError) as raised:
        _run("c", 4, resume=True, module=_Larger(), strategy=strategy)
    for text in (
        "for `more.weight`",
        "has no `net.0.bias`",
        "`net.3.weight` has the size (5, 16), and (4, 16) was saved",
    ):
        assert text in str(raised.value)
    with pytest.warns(UserWarning, match="does not fit") as warned:
        module = _run("c", 2, resume=True, module=_Larger(), options={"on_missing": "warn"}, strategy=strategy)
    assert any("no weights were saved for `more.bias`" in str(one.message) for one in warned)
    assert torch.equal(_whole(module.net[0].weight), _whole(trained.net[0].weight))
    with pytest.warns(UserWarning, match="does not fit"):
        module = _run("c", 4, resume=True, module=_Larger(), options={"on_missing": "warn"}, strategy=strategy)
    assert len(module.notes) == 2


def _whole(value: Any) -> torch.Tensor:
    return torch.as_tensor(value.full_tensor() if hasattr(value, "full_tensor") else value)


def test_a_hook_may_rename_what_was_saved() -> None:
    class Renamed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.net
            del self.net

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.body(batch[1])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {key.replace("net.", "body."): value for key, value in state.items()}

    trained = _run("c", 2)
    module = Renamed()
    trainer(AsyncDCPCheckpoint("c")).validate(module, loader(), ckpt_path="last", verbose=False)
    assert torch.equal(module.body[0].weight, trained.net[0].weight)


def test_another_class_with_the_same_settings_fits() -> None:
    class Ours(AdamW):
        pass

    _run("c", 4)
    whole = _run("whole", 8)
    after = _run("c", 8, resume=True, module=Plain(lambda module: Ours(module.parameters(), lr=0.01)))
    assert after.notes == whole.notes[4:]


@pytest.mark.parametrize(
    "callback",
    [
        lambda: OnExceptionCheckpoint("."),
        lambda: ModelCheckpoint("other", save_on_exception=True),
        lambda: StochasticWeightAveraging(0.1),
    ],
)
def test_callbacks_that_break_the_promise_are_refused(callback: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        _run("c", 2, extra=lambda: [callback()])


def test_an_export_that_would_fail_at_the_end_is_refused_at_the_start() -> None:
    Path("out").mkdir()
    module = Plain()
    with pytest.raises(ConfigurationError, match="export_hf_at_end` must not exist yet"):
        _run("c", 2, module=module, options={"export_hf_at_end": "out"})
    assert not module.notes


def test_last_that_is_a_file_of_another_callback_is_told() -> None:
    def stock() -> list[pl.Callback]:
        return [ModelCheckpoint("stock", every_n_train_steps=2, save_last=True)]

    _run("c", 2)
    _run("other", 2, extra=stock)  # newer
    with pytest.warns(UserWarning, match="took the newer file of another callback"):
        _run("c", 3, resume=True, extra=stock)


# -- evaluation, and what follows it -----------------------------------------------------------------------------------


def test_a_fit_after_an_evaluation_is_a_fresh_one(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint of the evaluation was taken for the start: its random numbers, its loggers, its run."""
    _run("c", 4)
    (saved,) = scan("c")
    caplog.set_level(logging.INFO)
    run = trainer(AsyncDCPCheckpoint("c"), max_steps=2)
    module = Plain()
    run.validate(module, loader(), ckpt_path="last", verbose=False)
    run.fit(module, loader())
    assert not any("Resumed" in record.getMessage() for record in caplog.records)
    newest = scan("c")[0].commit
    assert newest is not None
    assert saved.commit is not None
    assert newest.step == 2
    assert newest.run != saved.commit.run


def test_best_in_a_new_process() -> None:
    """Lightning asks before any hook has told the callback of its trainer."""
    trainer(AsyncDCPCheckpoint(monitor="val/loss"), max_steps=2).fit(Plain(), loader(), loader())
    trainer(AsyncDCPCheckpoint(monitor="val/loss")).test(Plain(), loader(), ckpt_path="best", verbose=False)


def test_best_says_what_it_needs() -> None:
    with pytest.warns(UserWarning, match="needs `dirpath`"), pytest.raises(ValueError, match="ckpt_path"):
        trainer(AsyncDCPCheckpoint()).test(Plain(), loader(), ckpt_path="best")


def test_a_monitored_metric_that_is_not_logged_is_told_once() -> None:
    saving = AsyncDCPCheckpoint("c", monitor="vall/loss")
    with pytest.warns(UserWarning, match="`monitor` 'vall/loss' was not logged") as warned:
        trainer(saving, max_steps=4, val_check_interval=2).fit(Plain(), loader(), loader())
    told = [str(one.message) for one in warned if "vall/loss" in str(one.message)]
    assert len(told) == 1
    assert "Logged are ['val/loss'" in told[0]


def test_what_is_no_number_is_never_best() -> None:
    class Broken(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", torch.tensor({2: float("nan"), 4: 0.5, 6: 0.7}[self.global_step]))

    saving = AsyncDCPCheckpoint("c", monitor="val/loss", keep_last=9)
    trainer(saving, max_steps=6, val_check_interval=2, num_sanity_val_steps=0).fit(Broken(), loader(), loader())
    assert Path(saving.best_model_path).name.startswith("step-00000004")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every_n_train_steps": 1.5}, "every_n_train_steps` must be a whole number"),
        ({"optimizer_every_n_saves": True}, "optimizer_every_n_saves` must be a whole number"),
        ({"train_time_interval": 5}, "train_time_interval` must be a length of time"),
        ({"dirpath": ""}, "dirpath` must be a folder"),
        ({"options": {"save_top_k": 2}}, "options` must be CheckpointOptions"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        AsyncDCPCheckpoint(**settings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_missing": "ignore"}, "must be `error` or `warn`"),
        ({"save_top_k": -1}, "must be at least 0"),
        ({"timeout": timedelta(0)}, "must be longer than nothing"),
        ({"timeout": 5}, "must be a length of time"),
        ({"drain_timeout": timedelta(seconds=-1)}, "must be a length of time"),
        ({"trust_pickle": "yes"}, "must be true or false"),
        ({"stage_dir": ""}, "must be a folder"),
        ({"trainable_only": True, "export_hf_at_end": "out"}, "cannot be used together"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        CheckpointOptions(**options)


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named ``~`` was made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _run("~/c", 1)
    assert len(scan(tmp_path / "home" / "c")) == 1


def test_trusted_pickles_may_be_saved() -> None:
    """Refused without ``trust_pickle``, also at the load of what was saved with it."""

    class Sets(Plain):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {1, 2}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["mine"] == {1, 2}

    with pytest.raises(CheckpointError, match="'mine'"):
        _run("c", 1, module=Sets())
    _run("c", 1, module=Sets(), options={"trust_pickle": True})
    with pytest.raises(CheckpointError, match="trust_pickle"):
        _run("c", 2, resume=True, module=Sets())
    _run("c", 2, resume=True, module=Sets(), options={"trust_pickle": True})
