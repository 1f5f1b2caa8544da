"""What Lightning does to a loader: lengths, validation, limits, reloading, several fits, and stops of real fits."""

from __future__ import annotations

from itertools import chain
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.data import has_len_all_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.datamodules.helpers import Recorder, Stream, data_module, records, trainer

DOCUMENTS = 32


def _keys(rows: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return list(chain(*rows))


def test_no_length_is_claimed_to_lightning() -> None:
    """axolotl#3152: a schedule must not be told a length that packing does not keep."""
    module = Recorder(estimate=True)
    fit = trainer(max_steps=5, max_epochs=-1)
    fit.fit(module, data_module())
    assert fit.estimated_stepping_batches == 5
    assert fit.num_training_batches == inf
    assert not has_len_all_ranks(data_module().train_dataloader(), fit.strategy)
    unknown = trainer(max_epochs=2)
    unknown.fit(Recorder(), data_module())
    assert unknown.estimated_stepping_batches == -1, "Lightning's word for a number of steps that is not known"


@pytest.mark.parametrize(
    "setting",
    [{"val_check_interval": 0.5}, {"limit_val_batches": 0.5}, {"limit_train_batches": 0.5}],
)
def test_a_part_of_an_unknown_length_is_refused_by_name(setting: dict[str, Any]) -> None:
    data = data_module(validation_sources={"v": records(5)})
    with pytest.raises(MisconfigurationException, match=next(iter(setting))):
        trainer(**setting, num_sanity_val_steps=0).fit(Recorder(), data)


@pytest.mark.parametrize("runtime", ["main", "worker"])
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"val_check_interval": 1.0}, 3),
        ({"check_val_every_n_epoch": 2}, 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 10}, 4),
    ],
)
def test_validation_neither_takes_nor_loses_rows(runtime: str, settings: dict[str, Any], passes: int) -> None:
    """Lightning#20404, #6798: validation inside and after epochs, beside rows that are made ahead."""

    def fit(**more: Any) -> Recorder:
        module = Recorder()
        held_out = {"validation_sources": {"v": records(9, seed=2)}} if more else {}
        trainer(max_epochs=3, **more).fit(module, data_module(runtime=runtime, **held_out))
        return module

    plain, validated = fit(), fit(num_sanity_val_steps=2, **settings)
    assert validated.seen == plain.seen
    sanity, rest = validated.evaluated[:2], validated.evaluated[2:]
    assert sanity == rest[:2]
    assert sorted(_keys(rest)) == sorted([(2, number) for number in range(9)] * passes)


def test_limited_validation_starts_anew_each_time() -> None:
    module = Recorder()
    data = data_module(validation_sources={"v": records(30, seed=2)})
    trainer(max_epochs=2, limit_val_batches=2, num_sanity_val_steps=1).fit(module, data)
    first, *passes = module.evaluated
    assert passes[:2] == passes[2:4]
    assert first == passes[0]
    assert len(passes) == 4


@pytest.mark.parametrize("limit", [None, 4])
def test_reloading_goes_on_where_training_was(limit: int | None) -> None:
    module, plain = Recorder(), Recorder()
    settings = {"max_epochs": 4, "limit_train_batches": limit}
    trainer(reload_dataloaders_every_n_epochs=1, **settings).fit(module, data_module())
    trainer(**settings).fit(plain, data_module())
    assert module.seen == plain.seen
    assert len(_keys(module.seen)) == len(set(_keys(module.seen))) * (4 if limit is None else 1)


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before")  # ours need no loader state
def test_a_limit_that_ends_with_the_pass_leaves_no_epoch_empty(limit: int) -> None:
    """The last row of a pass was the last one of an epoch, so the next epoch had none; a resume is no exception."""
    module, ends = Recorder(), []
    each = [{"input_ids": [number] * 30} for number in range(4)]  # one in a row
    notes = LambdaCallback(on_train_epoch_end=lambda *args: ends.append(len(module.seen)))
    every = ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {
        "max_epochs": 5,
        "limit_train_batches": limit,
        "callbacks": [notes, every],
        "enable_checkpointing": True,
    }
    trainer(**settings).fit(module, data_module({"a": each}))
    assert ends == [limit * epoch for epoch in range(1, 6)]
    for first in range(0, 4 * (len(module.seen) // 4), 4):
        assert sorted(_keys(module.seen[first : first + 4])) == [(0, number) for number in range(4)]
    for step in (1, 3, 4):
        if step == 5 * limit:
            continue
        again = Recorder()
        trainer(**settings).fit(again, data_module({"a": each}), ckpt_path=f"steps/step={step}.ckpt")
        assert again.seen == module.seen[step:], step


@pytest.mark.parametrize(("rows", "runtime"), [(2, "main"), (2, "worker"), (1.0, "main")])
def test_overfitting_sees_the_same_rows_in_every_epoch(rows: float, runtime: str) -> None:
    """Each epoch went on where the one before was, and a model that cannot overfit is what the option looks for."""
    whole, module = Recorder(), Recorder()
    trainer().fit(whole, data_module())
    data = data_module(runtime=runtime)
    trainer(max_epochs=3, overfit_batches=rows).fit(module, data)
    once = whole.seen if rows == 1.0 else whole.seen[:2]
    assert module.seen == once * 3
    assert data.counters["rows"] == len(once)
    trainer(max_epochs=1, overfit_batches=rows).fit(module, data)
    assert module.seen == once * 4, "a second fit too"


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before")  # ours need no loader state
def test_a_resume_of_overfitting_goes_on_within_the_rows() -> None:
    module, again = Recorder(), Recorder()
    every = ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"max_epochs": 2, "overfit_batches": 3, "enable_checkpointing": True}
    trainer(callbacks=[every], **settings).fit(module, data_module())
    for step in (2, 3, 4):
        again.seen.clear()
        trainer(callbacks=[every], **settings).fit(again, data_module(), ckpt_path=f"steps/step={step}.ckpt")
        assert again.seen == module.seen[step:], step


def test_a_second_fit_goes_on_and_repeats_nothing() -> None:
    whole = Recorder()
    trainer(max_epochs=2).fit(whole, data_module())
    data, module = data_module(), Recorder()
    trainer(max_steps=5).fit(module, data)
    assert module.seen == whole.seen[:5]
    trainer(max_steps=7).fit(module, data)
    assert module.seen == whole.seen[:12]
    fit = trainer(max_epochs=1)
    fit.fit(module, data)
    assert sorted(_keys(module.seen)) == sorted(_keys(whole.seen)[:DOCUMENTS])


def test_a_fit_that_was_interrupted_goes_on_in_the_same_process() -> None:
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    whole, data, module = Recorder(), data_module(), Recorder()
    trainer().fit(whole, data_module())
    trainer(callbacks=[Interrupt()]).fit(module, data)
    trainer().fit(module, data)
    assert module.seen == whole.seen


@pytest.mark.parametrize("row", [4, 6])
def test_rows_of_a_window_that_broke_off_come_again_in_the_same_process(row: int) -> None:
    """Their gradients are gone: a notebook's Ctrl-C, or an error in the step, must not lose them."""

    class Fail(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == row:
                raise RuntimeError("stop")

    whole, data, broken, again = Recorder(), data_module(), Recorder(), Recorder()
    trainer(accumulate_grad_batches=3).fit(whole, data_module())
    with pytest.raises(RuntimeError, match="stop"):
        trainer(accumulate_grad_batches=3, callbacks=[Fail()]).fit(broken, data)
    trainer(accumulate_grad_batches=3).fit(again, data)
    assert again.seen == whole.seen[row // 3 * 3 :]


@pytest.mark.distributed  # slower: processes of loaders
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("runtime", ["main", "worker"])
def test_real_fits_with_random_stops(seed: int, runtime: str) -> None:
    """Lightning#20550, #19764, torchdata#1520, KempnerForge#57: with and without a touched estimate of steps."""
    draw = Random(seed)
    workers, accumulate, epochs = draw.choice([0, 2]), draw.choice([1, 4]), draw.randint(2, 3)
    kind = draw.choice([list, Stream])

    def fit(steps: int | None, start: str | None) -> Recorder:
        sources = {"a": kind(records(20)), "b": records(12, seed=1)}
        module = Recorder(estimate=draw.random() < 0.5)
        every = ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)
        settings = {} if steps is None else {"max_steps": steps}
        run = trainer(
            callbacks=[every],
            enable_checkpointing=True,
            max_epochs=epochs,
            accumulate_grad_batches=accumulate,
            **settings,
        )
        run.fit(module, data_module(sources, num_workers=workers, runtime=runtime), ckpt_path=start)
        module.steps = run.global_step  # type: ignore[assignment]
        return module

    whole = fit(None, None)
    total = whole.steps
    for path in Path("steps").iterdir():
        path.unlink()
    stops = sorted(draw.sample(range(1, int(total)), 3))
    seen: list[Any] = []
    start = None
    for stop in [*stops, None]:
        seen += fit(stop, start).seen
        start = f"steps/step={stop}.ckpt"
    assert seen == whole.seen
    assert len(_keys(seen)) == DOCUMENTS * epochs


def test_a_checkpoint_inside_a_window_begins_the_window_again() -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:  # the second micro-batch of the second window
                trainer.save_checkpoint("inside.ckpt")

    whole, resumed = Recorder(), Recorder()
    trainer(accumulate_grad_batches=4, callbacks=[Save()]).fit(whole, data_module())
    state = torch.load("inside.ckpt", weights_only=True)["DynamicBatchingDataModule"]
    data = data_module()
    data.load_state_dict(state)
    trainer(accumulate_grad_batches=4).fit(resumed, data)
    assert resumed.seen == whole.seen[4:]


class _Steps(Recorder):
    """Notes in which optimizer step each row was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, list[list[tuple[int, int]]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.steps.setdefault(self.trainer.global_step, []).append(self.seen[-1])
        return output


class _SaveAfter(Callback):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.rows:
            trainer.save_checkpoint("inside.ckpt")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # ours need no loader state
@pytest.mark.parametrize("limit", [None, 8])
@pytest.mark.parametrize("rows", [1, 3, 5, 6, 7])
def test_steps_after_a_resume_inside_a_window_are_those_of_the_unbroken_run(rows: int, limit: int | None) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "limit_train_batches": limit}
    whole, resumed = _Steps(), _Steps()
    trainer(callbacks=[_SaveAfter(rows)], **settings).fit(whole, data_module())
    again = trainer(**settings)
    again.fit(resumed, data_module(), ckpt_path="inside.ckpt", weights_only=False)
    # The axis of loggers counts steps, too.
    assert again.fit_loop.epoch_loop._batches_that_stepped == again.global_step
    first = (rows - 1) // 4 if rows % 4 == 0 else rows // 4
    assert resumed.steps == {step: seen for step, seen in whole.steps.items() if step >= first}
    assert again.global_step == max(whole.steps) + 1


def test_a_window_of_a_second_fit_does_not_hold_the_rows_of_the_first() -> None:
    """Both are trained on at step 0 of their Trainer: a fit of one step, such as a dry run, and the first window."""
    data, first, resumed = data_module(), Recorder(), Recorder()
    trainer(max_steps=1).fit(first, data)
    trainer(accumulate_grad_batches=4, max_steps=1, callbacks=[_SaveAfter(2)]).fit(first, data)
    again = trainer(accumulate_grad_batches=4, max_steps=1)
    again.fit(resumed, data_module(), ckpt_path="inside.ckpt", weights_only=False)
    assert resumed.seen == first.seen[1:5]


def test_an_iterator_that_has_ended_stays_ended() -> None:
    """VeOmni#864: the stop is latched; a loader that is asked again begins the next pass, never half of one."""

    data = data_module()
    loader = data.train_dataloader()
    rows = iter(loader)
    assert len(list(rows)) > 3
    assert [next(rows, None) for _ in range(3)] == [None] * 3
    assert data.counters["documents_packed"] == DOCUMENTS
    assert len(list(loader)) > 3
    assert data.counters["documents_packed"] == 2 * DOCUMENTS
