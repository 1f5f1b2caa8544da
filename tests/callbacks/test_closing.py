"""The last lines of a fit: every part that has some, once, whatever ends it."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_longctx import DynamicBatchingDataModule
from lightning_longctx.callbacks import AsyncDCPCheckpoint, ChannelLoss, ExactTokenMean, TrainingMetrics
from lightning_longctx.callbacks.closing import closing_of
from lightning_longctx.callbacks.run_totals import RunTotals
from lightning_longctx.callbacks.step_sums import Field
from lightning_longctx.datamodules.messages import closing_lines
from lightning_longctx.datamodules.policies import FixedBufferPolicy
from tests.callbacks.channels import BATCHES, NAMES
from tests.callbacks.toy import TOKENS, ToyLM, loader, make_batch, make_trainer, plain_loop, run_fit

ROWS = [make_batch(seed, 5) for seed in range(6)]


@pytest.fixture(autouse=True)
def _hears(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        yield
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored after Ctrl-C


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def closing(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the one message that has them."""
    (found,) = [text for text in messages(caplog) if "\nRun: " in text]
    return found.strip().splitlines()


class Speaker(Callback):
    """Has something to say, and ends the run with ``error`` after step 4."""

    def __init__(self, lines: list[str], error: BaseException | None = None) -> None:
        self.lines, self.error = lines, error

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4 and self.error is not None:
            raise self.error

    def closing_lines(self) -> list[str]:
        return self.lines


def test_the_run_comes_first_and_every_part_once(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [Speaker(["one", "two"]), ExactTokenMean(), TrainingMetrics(), Speaker([]), Speaker(["three"])]
    run_fit(callbacks, batches=ROWS)
    first, *rest = closing(caplog)
    losses = plain_loop([[row] for row in ROWS])["loss"]
    fill = (TOKENS - 3) / 24
    assert re.fullmatch(
        rf"Run: 6 steps, {6 * (TOKENS - 3)} tokens in [\d.]+ s \([\d,]+ a second\), rows filled to {fill:.1%};"
        rf" loss {losses[0]:.3f} -> {losses[-1]:.3f}\.",
        first,
    )
    assert rest == ["one", "two", "three"]
    assert messages(caplog)[-1].endswith("three"), "the last thing that is said"


def test_steps_after_the_last_logged_one_count_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    run_fit([ExactTokenMean(), TrainingMetrics()], batches=ROWS, log_every_n_steps=4)
    assert f"Run: 6 steps, {6 * (TOKENS - 3)} tokens" in closing(caplog)[0]


def test_ctrl_c_tells_what_was_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_fit([TrainingMetrics(), ExactTokenMean(), Speaker(["here"], KeyboardInterrupt())], batches=ROWS)
    assert closing(caplog)[0].startswith(f"Run: 4 steps, {4 * (TOKENS - 3)} tokens")
    assert closing(caplog)[1:] == ["here"]


def test_after_an_error_nothing_hides_it(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        run_fit([TrainingMetrics(), ExactTokenMean(), Speaker(["here"], RuntimeError("broken"))], batches=ROWS)
    assert not any("here" in text for text in messages(caplog))


def test_each_fit_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = make_trainer([ExactTokenMean(), TrainingMetrics()], max_epochs=1, limit_val_batches=0), ToyLM()
    trainer.fit(module, loader(ROWS), loader(ROWS))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(ROWS[:2]), loader(ROWS))
    trainer.test(module, loader(ROWS), verbose=False)
    found = [text for text in messages(caplog) if "\nRun: " in text]
    assert [re.findall(r"Run: (\d) steps", text) for text in found] == [["6"], ["2"]]


def test_only_the_first_rank_is_asked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([])
    told = closing_of(trainer)
    told.begin()
    monkeypatch.setattr(type(trainer), "is_global_zero", property(lambda self: False))
    told.tell(trainer, Speaker(["here"]))
    assert not told.is_open
    assert not any("here" in text for text in messages(caplog))


def test_the_table_of_sources_and_the_picture_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [ChannelLoss(source_names=NAMES), ExactTokenMean(), TrainingMetrics()]
    trainer = run_fit(callbacks, batches=BATCHES, logger=CSVLogger("."))
    lines = closing(caplog)
    assert lines[1] == "Loss by source:"
    assert {line.split("  ")[0] for line in lines[3:6]} == {*NAMES}
    assert lines[6] == f"Picture: {Path(str(trainer.log_dir)) / 'channel_loss.png'}"
    assert sum("Loss by source" in text for text in messages(caplog)) == 1


def test_without_a_summary_the_table_is_told_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    run_fit([ChannelLoss(source_names=NAMES), ExactTokenMean()], batches=BATCHES)
    assert [text.splitlines()[0] for text in messages(caplog) if "Loss by" in text] == ["Loss by source:"]


def test_checkpoints_are_named(caplog: pytest.LogCaptureFixture) -> None:
    saver = AsyncDCPCheckpoint("saved", monitor="val/loss")
    callbacks = [ExactTokenMean(), TrainingMetrics(), saver]
    run_fit(callbacks, batches=ROWS, validation=loader(ROWS), enable_checkpointing=True)
    *_, newest, best = closing(caplog)
    assert re.fullmatch(r"Checkpoint: saved/step-00000006-\w+; `ckpt_path: last` goes on from there\.", newest)
    assert re.fullmatch(r"Best by val/loss: saved/step-00000006-\w+", best)
    assert ", in validation " in closing(caplog)[0]


@pytest.mark.filterwarnings("ignore:AsyncDCPCheckpoint. `monitor` 'val/typo' was not logged")
def test_without_a_score_no_checkpoint_is_called_the_best(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [ExactTokenMean(), TrainingMetrics(), AsyncDCPCheckpoint("saved", monitor="val/typo")]
    run_fit(callbacks, batches=ROWS, validation=loader(ROWS), enable_checkpointing=True)
    assert closing(caplog)[-1].startswith("Checkpoint: saved/step-00000006-")


def test_the_checkpoint_of_lightning_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [ExactTokenMean(), TrainingMetrics(), ModelCheckpoint("stock", save_top_k=1)]
    run_fit(callbacks, batches=ROWS, enable_checkpointing=True)
    assert re.fullmatch(r"Checkpoint: .*/stock/epoch=0-step=6\.ckpt", closing(caplog)[-1])


def test_the_first_row_is_compared_with_the_count_gate(caplog: pytest.LogCaptureFixture) -> None:
    data = DynamicBatchingDataModule({"a": [{"input_ids": [1, 2, 3, 4]}] * 40}, max_seq_len=16)
    trainer = make_trainer([ExactTokenMean(), TrainingMetrics()], max_steps=3)
    trainer.fit(ToyLM(), datamodule=data)
    assert closing(caplog)[1] == (
        "First row: 4 documents read, filled to 100.0%; `buffer_policy: fixed` would have read at least 200."
    )


def test_no_comparison_where_there_is_none() -> None:
    counters = {"rows": 1, "documents_read": 250, "tokens_packed": 12}
    assert closing_lines(counters, 16, FixedBufferPolicy()) == ["First row: 250 documents read, filled to 75.0%."]
    assert closing_lines({**counters, "rows": 7}, 16, FixedBufferPolicy()) == [], "the data went on"
    assert closing_lines({}, 16, FixedBufferPolicy()) == []


def test_totals_over_ranks_that_share_rows() -> None:
    totals = RunTotals(devices=4, sp_size=2, step=10)
    assert totals.line() is None
    sums = [0.0] * len(Field)
    sums[Field.TOKENS], sums[Field.BUDGET], sums[Field.SECONDS] = 30.0, 80.0, 40.0
    totals.add(sums, 11, 2.0)
    totals.add(sums, 13)
    totals.validation_loss = 1.5
    expected = "Run: 3 steps, 60 tokens in 20 s (3 a second), rows filled to 75.0%; loss 2.000, in validation 1.500."
    assert totals.line() == expected


def test_totals_hide_no_loss_that_is_no_number() -> None:
    totals = RunTotals(devices=1, sp_size=1, step=0)
    sums = [0.0] * len(Field)
    totals.add(sums, 1, logged=False)
    assert totals.line() == "Run: 1 step; no loss was logged: see `log_every_n_steps`."
    totals.add(sums, 1)  # logged, by a module that returns no loss
    assert totals.line() == "Run: 1 step."
    totals.add(sums, 2, 2.0)
    totals.add(sums, 3, math.nan)
    assert totals.line() == "Run: 3 steps; loss 2.000 -> nan."
