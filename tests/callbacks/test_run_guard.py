"""``RunGuard`` in a run: hangs on two processes, losses that jump, and that it waits for nothing."""

from __future__ import annotations

import math
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx import LongContextFSDPStrategy
from lightning_longctx.callbacks import ExactTokenMean, MaxTokens, RunGuard, TrainingMetrics
from lightning_longctx.callbacks.run_guard import HANG_EXIT_CODE
from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.errors import ConfigurationError, DivergenceError
from tests.callbacks.host_reads import ReadingSteps, with_host_keys
from tests.callbacks.toy import ToyLM, make_batch, make_trainer, run_fit
from tests.helpers.pool import RankError, run_ranks
from tests.strategies.own_model import OwnModule

BATCHES = [make_batch(seed, 5) for seed in range(4)] * 8


class _Spoiled(ToyLM):
    """Changes the loss of the tokens of one document in one step."""

    def __init__(self, step: int, factor: float, document: int = 1) -> None:
        super().__init__(lr=0.0)
        self.step, self.factor, self.document = step, factor, document

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == self.step:
            start, end = batch["cu_seqlens"][self.document : self.document + 2].tolist()
            factor = torch.ones_like(output["per_token_loss"])
            factor[:, start:end] = self.factor
            output["per_token_loss"] = output["per_token_loss"] * factor
        return output


def fit(guard: RunGuard, module: ToyLM, batches: Any = BATCHES, **settings: Any) -> Any:
    return run_fit([guard], module, batches, log_every_n_steps=settings.pop("log_every_n_steps", 10), **settings)


@pytest.mark.parametrize("every", [1, 10, 1000], ids=str)
def test_a_loss_that_is_no_number_ends_the_run_and_names_its_document(tmp_path: Path, every: int) -> None:
    guard = RunGuard(dirpath=str(tmp_path), documents=1)
    with pytest.raises(DivergenceError, match=r"nan in step 13.*source 0, document 1 \(nan over") as caught:
        fit(guard, _Spoiled(12, math.nan), log_every_n_steps=every)
    assert caught.value.field == "train/loss"
    assert "source 0, document 1" in (tmp_path / "loss_step13.txt").read_text()
    assert all(thread.name != "watchdog" for thread in threading.enumerate())


def test_a_warning_is_enough_if_asked_for(tmp_path: Path) -> None:
    guard = RunGuard(dirpath=str(tmp_path), on_nan="warn")
    with pytest.warns(UserWarning, match=r"the loss of step 13 is nan. Documents with") as caught:
        trainer = fit(guard, _Spoiled(12, math.nan))
    assert trainer.global_step == len(BATCHES)
    assert len([warning for warning in caught if "RunGuard" in str(warning.message)]) == 1


def test_a_spike_names_the_documents_behind_it(tmp_path: Path) -> None:
    guard = RunGuard(dirpath=str(tmp_path))
    with pytest.warns(UserWarning, match=r"the loss of step 28 is .*, where .* is usual"):
        fit(guard, _Spoiled(27, 50.0, document=0))
    (report,) = tmp_path.iterdir()
    names = report.read_text().partition("over targets): ")[2]
    assert names.startswith("source 0, document 0 (")


def test_a_quiet_run_stays_quiet(tmp_path: Path) -> None:
    fit(RunGuard(dirpath=str(tmp_path)), ToyLM(lr=0.1), accumulate_grad_batches=2, max_epochs=2)
    assert list(tmp_path.iterdir()) == []


def test_documents_of_each_micro_batch_of_the_step_are_looked_at(tmp_path: Path) -> None:
    keys = [torch.tensor([[0, 2 * i], [0, 2 * i + 1], [-1, -1]]) for i in range(len(BATCHES))]
    batches = [{**batch, "document_keys": own} for batch, own in zip(BATCHES, keys, strict=True)]
    guard = RunGuard(dirpath=str(tmp_path), documents=1)
    with pytest.raises(DivergenceError, match=r"step 4.*document 15 \(nan"):
        fit(guard, _Spoiled(7, math.nan), batches, accumulate_grad_batches=2)


def test_losses_of_many_steps_between_two_checks_are_not_all_kept(tmp_path: Path) -> None:
    guard = RunGuard(dirpath=str(tmp_path))
    with pytest.raises(DivergenceError, match="nan in step 13.*Its documents are not known"):
        fit(guard, _Spoiled(12, math.nan), BATCHES * 8, log_every_n_steps=1000)


def test_callbacks_go_to_other_processes() -> None:
    for callback in (RunGuard(), TrainingMetrics(), MaxTokens(target=5)):
        trainer = run_fit([callback], ToyLM(), BATCHES[:2])
        assert pickle.loads(pickle.dumps(callback)).state_dict() == trainer.callbacks[0].state_dict()


class _Bare(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (math.nan if batch_idx == 3 else 1.0)


def test_without_token_losses_no_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="Its documents are not known"):
        fit(RunGuard(dirpath=str(tmp_path)), _Bare())


class _Recorded(ReadingSteps, RunGuard):
    """Notes at which steps something was read from the device."""


def test_only_logged_steps_read_on_the_host(tmp_path: Path) -> None:
    batches = with_host_keys(BATCHES)
    guard = _Recorded(dirpath=str(tmp_path))
    fit(guard, ToyLM(), batches)
    assert guard.read_at == [10, 20, 30]


def test_files_and_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text("".join(f'{{"input_ids": [{", ".join(["1"] * 10)}]}}\n' for _ in range(8)))
    data = DynamicBatchingDataModule({"books": str(path)}, max_seq_len=24, loading={"shuffle": False})
    assert data.describe_document(0, 3) == f"{path}:4 (books)"
    assert data.describe_document(5, 3) == "source 5, document 3"
    guard = RunGuard(dirpath=str(tmp_path))
    trainer = make_trainer([ExactTokenMean(), guard])
    with pytest.raises(DivergenceError, match=rf"{path}:\d+ \(books\) \(nan over"):
        trainer.fit(_Spoiled(2, math.nan, document=0), datamodule=data)


@pytest.mark.parametrize(
    "settings",
    [
        {"dirpath": "s3://bucket/run"},
        {"hang_factor": 1.0},
        {"hang_least_s": 0.0},
        {"spike_factor": 0.5},
        {"on_nan": "ignore"},
        {"documents": 0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        RunGuard(**settings)


class _Hangs(OwnModule):
    """Rank 1 stops before the exchange of its tenth micro-batch, where rank 0 waits for it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 9 and self.trainer.global_rank == 1:
            self.blocks[0].qkv.register_forward_hook(_sleep)


def _sleep(*args: Any) -> None:
    time.sleep(600)


class _Saving(TrainingMetrics):
    def hang_report(self) -> str:
        return "step 5 is being written"


def _hang(folder: str, end: bool) -> None:
    guard = RunGuard(dirpath=folder, hang_least_s=3.0, end_on_hang=end)
    strategy = LongContextFSDPStrategy(sequence_parallel_size=2)
    trainer = make_trainer([guard, _Saving()], devices=2, strategy=strategy, limit_val_batches=0)
    trainer.fit(_Hangs(rows=40))


@pytest.mark.distributed
def test_every_rank_writes_its_report_and_ends(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_hang, 2, str(tmp_path), True, timeout=60)
    reports = caught.value.reports
    assert sorted(reports) == [0, 1]
    assert all(f"exit code {HANG_EXIT_CODE}" in report for report in reports.values()), reports
    waiting, stuck = ((tmp_path / f"hang_rank{rank}.txt").read_text() for rank in (0, 1))
    for text in (waiting, stuck):
        assert "has finished no micro-batch for" in text
        assert "Step 9, micro-batch 9" in text
        assert "_Saving: step 5 is being written" in text
        assert "LongContextFSDPStrategy: " in text
        assert "Documents of the last batch that this rank started: " in text
        assert "  source 0, document " in text
    assert "test_run_guard.py" in stuck
    assert "in _sleep" in stuck
    assert "18 attention calls began to exchange, 18 have" in stuck
    assert "19 attention calls began to exchange, 18 have" in waiting
    assert "ulysses.py" in waiting


def _no_number(folder: str, sp: int) -> None:
    guard = RunGuard(dirpath=folder, documents=2)
    strategy = LongContextFSDPStrategy(sequence_parallel_size=sp)
    trainer = make_trainer([guard], devices=2, strategy=strategy, limit_val_batches=0)
    trainer.fit(_Poisoned(rows=40))


class _Poisoned(OwnModule):
    """A loss near the start of a row is no number on the rank that holds its beginning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == 3 and self.trainer.global_rank == 0:
            losses = output["per_token_loss"].clone()
            losses[0, 1] = math.nan
            output["per_token_loss"] = losses
        return output


@pytest.mark.distributed
@pytest.mark.parametrize("sp", [1, 2], ids=str)
def test_all_ranks_name_the_same_document(tmp_path: Path, sp: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_no_number, 2, str(tmp_path), sp)
    first, second = (caught.value.causes[rank] for rank in (0, 1))
    assert isinstance(first, DivergenceError)
    assert str(first) == str(second)
    assert "(nan over" in str(first)
