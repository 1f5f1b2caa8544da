"""What ``TrainingMetrics`` logs on one device: values, steps, resumes, and that unlogged steps wait for nothing."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx.callbacks import ExactTokenMean, TrainingMetrics, step_tally, training_metrics
from tests.callbacks.host_reads import HostReads, with_host_keys
from tests.callbacks.toy import (
    DIVISOR,
    TOKENS,
    MemoryLogger,
    ToyLM,
    loader,
    make_batch,
    make_trainer,
    plain_loop,
    run_fit,
    token_mean,
)

TARGETS = [3, 9, 0, 5, 8, 1, 7]
BATCHES = [make_batch(seed, targets) for seed, targets in enumerate(TARGETS)]


def _seen(steps: int) -> dict[str, int]:
    """What a run has counted after so many micro-batches."""
    return {"source_tokens": steps * (TOKENS - 3), "target_tokens": sum(TARGETS[:steps])}


def fit(metrics: TrainingMetrics, module: ToyLM | None = None, batches: Any = BATCHES, **settings: Any) -> MemoryLogger:
    callbacks = settings.pop("callbacks", [ExactTokenMean(), metrics])
    trainer = run_fit(callbacks, module, batches, **settings)
    assert isinstance(trainer.logger, MemoryLogger)
    return trainer.logger


@pytest.mark.parametrize("order", [1, -1], ids=["mean_first", "metrics_first"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (3, 0.1)], ids=str)
def test_loss_and_norm_are_those_of_the_token_mean(accumulate: int, clip: float | None, order: int) -> None:
    metrics = TrainingMetrics()
    callbacks = [ExactTokenMean(), metrics][::order]
    logger = fit(metrics, callbacks=callbacks, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    steps = [BATCHES[start : start + accumulate] for start in range(0, len(BATCHES), accumulate)]
    expected = plain_loop(steps, clip=clip)
    assert logger.column("train/loss") == pytest.approx(expected["loss"], rel=1e-5)
    assert logger.column("train/grad_norm") == pytest.approx(expected["norm"], rel=1e-5)  # before clipping
    seen = [sum(TARGETS[: start + accumulate]) for start in range(0, len(BATCHES), accumulate)]
    assert logger.column("train/target_tokens") == seen
    assert logger.column("data/source_fill") == pytest.approx([(TOKENS - 3) / DIVISOR] * len(steps))


def test_a_logged_step_stands_for_itself_and_fill_for_all_since_the_last() -> None:
    batches = [make_batch(seed, 3, padding) for seed, padding in enumerate([1, 2, 3, 4, 5, 6])]
    logger = fit(TrainingMetrics(), batches=batches, log_every_n_steps=2)
    expected = plain_loop([[batch] for batch in batches])
    assert logger.column("train/loss") == pytest.approx(expected["loss"][1::2], rel=1e-5)
    assert logger.column("train/target_tokens") == [6, 12, 18]
    fill = [(2 * TOKENS - paddings) / (2 * DIVISOR) for paddings in (3, 7, 11)]
    assert logger.column("data/source_fill") == pytest.approx(fill)


def test_never_logging_is_possible() -> None:
    metrics = TrainingMetrics()
    assert fit(metrics, log_every_n_steps=0).rows == []
    assert metrics.target_tokens == sum(TARGETS)


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def test_the_step_that_stops_a_run_is_logged() -> None:
    metrics = TrainingMetrics()
    logger = fit(metrics, callbacks=[ExactTokenMean(), _StopAt(3), metrics], log_every_n_steps=100)
    assert logger.column("train/target_tokens") == [sum(TARGETS[:3])]
    assert logger.column("train/loss") == pytest.approx(plain_loop([[b] for b in BATCHES[:3]])["loss"][-1:], rel=1e-5)


class _Scheduled(ToyLM):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_learning_rate_is_the_one_of_the_step() -> None:
    logger = fit(TrainingMetrics(), _Scheduled(lr=0.4))
    assert logger.column("train/lr") == pytest.approx([0.4 * 0.5**step for step in range(len(BATCHES))])


class _TensorRate(ToyLM):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.25))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_learning_rate_may_be_a_tensor() -> None:
    assert fit(TrainingMetrics(), _TensorRate()).column("train/lr")[:3] == [0.25, 0.125, 0.0625]


def test_target_tokens_go_on_after_a_resume(tmp_path: Path) -> None:
    metrics, path = TrainingMetrics(), tmp_path / "half.ckpt"
    trainer = run_fit([ExactTokenMean(), metrics], batches=BATCHES, max_steps=3, log_every_n_steps=2)
    trainer.save_checkpoint(path)  # step 3, which was not logged
    assert torch.load(path, weights_only=True)["callbacks"]["TrainingMetrics"] == _seen(3)

    settings = {"max_steps": 5, "max_epochs": 2, "ckpt_path": path}
    resumed = run_fit([ExactTokenMean(), TrainingMetrics()], batches=BATCHES[3:], **settings)
    assert resumed.logger.column("train/target_tokens") == [sum(TARGETS[:4]), sum(TARGETS[:5])]


def test_target_tokens_are_exact_beyond_float32() -> None:
    metrics = TrainingMetrics()
    metrics.load_state_dict({"source_tokens": 2**41 + 1, "target_tokens": 2**40 + 1})
    logger = fit(metrics)
    assert logger.column("train/target_tokens")[0] == 2**40 + 1 + TARGETS[0]
    grown = {name: count + 1 for name, count in _seen(len(TARGETS)).items()}
    assert metrics.state_dict() == {
        "source_tokens": grown["source_tokens"] + 2**41,
        "target_tokens": grown["target_tokens"] + 2**40,
    }


def test_accumulation_counts_only_finished_steps() -> None:
    seen: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(metrics.state_dict()["target_tokens"])

    metrics = TrainingMetrics()
    fit(metrics, callbacks=[ExactTokenMean(), metrics, Look()], batches=BATCHES[:4], accumulate_grad_batches=2)
    assert seen == [0, 12, 12, 17]


def test_validation_loss_is_the_token_mean_and_sanity_batches_do_not_count() -> None:
    logger = fit(TrainingMetrics(), ToyLM(lr=0.0), validation=loader(BATCHES[:3]), num_sanity_val_steps=1)
    assert logger.column("val/loss") == pytest.approx([token_mean(BATCHES[:3])], rel=1e-6)
    assert logger.rows[0][1].keys() >= {"train/loss"}  # nothing was logged before training


def test_only_a_sanity_check_logs_nothing() -> None:
    logger = fit(TrainingMetrics(), batches=[], validation=loader(BATCHES[:2]), num_sanity_val_steps=2, max_steps=0)
    assert logger.column("val/loss") == []


def test_several_validation_loaders() -> None:
    loaders = [loader(BATCHES[:2]), loader(BATCHES[2:3]), loader(BATCHES[3:])]
    logger = fit(TrainingMetrics(), ToyLM(lr=0.0), validation=loaders)
    assert logger.column("val/loss") == pytest.approx([token_mean(BATCHES)], rel=1e-6)
    parts = [logger.column(f"val/loss/dataloader_idx_{index}")[0] for index in range(3)]
    assert parts == pytest.approx([token_mean(BATCHES[:2]), 0.0, token_mean(BATCHES[3:])], rel=1e-6)


def test_validate_and_test_entry_points() -> None:
    trainer = make_trainer([TrainingMetrics()])
    (validated,) = trainer.validate(ToyLM(), loader(BATCHES[:3]), verbose=False)
    (tested,) = trainer.test(ToyLM(), loader(BATCHES[3:]), verbose=False)
    assert validated == pytest.approx({"val/loss": token_mean(BATCHES[:3])}, rel=1e-6)
    assert tested == pytest.approx({"test/loss": token_mean(BATCHES[3:])}, rel=1e-6)


def test_loss_without_token_losses_is_the_mean_of_means_with_one_warning() -> None:
    metrics, module = TrainingMetrics(), ToyLM(per_token=False, lr=0.0)
    settings = {"callbacks": [metrics], "accumulate_grad_batches": 2, "validation": loader(BATCHES[:2])}
    with pytest.warns(UserWarning, match="`train/loss` is the mean over micro-batches") as caught:
        logger = fit(metrics, module, batches=BATCHES[:4], **settings)
    assert len([warning for warning in caught if "mean over micro-batches" in str(warning.message)]) == 1
    means = [token_mean([batch]) for batch in BATCHES]
    expected = [(means[0] + means[1]) / 2, (means[2] + means[3]) / 2]
    assert logger.column("train/loss") == pytest.approx(expected, rel=1e-6)
    assert logger.column("val/loss") == pytest.approx(expected[:1], rel=1e-6)


class _Plain(ToyLM):
    """Somebody's module: batches without our keys, a bare loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).square().mean()


def test_keys_without_numbers_are_left_out() -> None:
    metrics = TrainingMetrics()
    with pytest.warns(UserWarning, match="mean over micro-batches"):
        logger = fit(metrics, _Plain(), batches=[torch.tensor([[1, 2]])] * 2, callbacks=[metrics])
    assert set(logger.rows[0][1]) == {"train/loss", "train/grad_norm", "train/lr", "epoch"}


class _Manual(ToyLM):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        output = self._step(batch)
        self.manual_backward(output["loss"])
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return output


def test_manual_optimization() -> None:
    logger = fit(TrainingMetrics(), _Manual(every=2), batches=BATCHES[:6])
    expected = plain_loop([BATCHES[:2], BATCHES[2:4], BATCHES[4:6]])
    rows = {row["train/target_tokens"]: row for _, row in logger.rows if "train/target_tokens" in row}
    assert [rows[key]["train/loss"] for key in (12, 17, 26)] == pytest.approx(expected["loss"], rel=1e-5)
    assert [rows[key]["train/grad_norm"] for key in (12, 17, 26)] == pytest.approx(expected["norm"], rel=1e-5)


class _Skips(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch) if batch_idx % 3 else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_micro_batch_that_the_step_skipped_counts_nowhere(accumulate: int) -> None:
    metrics = TrainingMetrics()
    # Without `ExactTokenMean`, which is settled by the first micro-batch: learning nothing makes losses comparable.
    logger = fit(metrics, _Skips(lr=0.0), batches=BATCHES[:6], callbacks=[metrics], accumulate_grad_batches=accumulate)
    steps = [[1, 2], [4, 5]] if accumulate == 3 else [[1], [2], [4], [5]]
    expected = [token_mean([BATCHES[n] for n in step]) for step in steps]
    logged = dict.fromkeys(logger.column("train/loss"))  # Lightning writes a step's value again until there is another
    assert list(logged) == pytest.approx(expected, rel=1e-5)
    assert metrics.target_tokens == sum(TARGETS[n] for n in (1, 2, 4, 5))
    assert metrics.source_tokens == 4 * (TOKENS - 3)


class _Silent(_Manual):
    """Logs by itself and returns nothing, as many do."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", torch.tensor(7.0), batch_size=1)
        return {"predictions": batch["input_ids"]}


def test_where_steps_return_no_loss_there_is_none_and_what_the_module_logs_stays() -> None:
    metrics = TrainingMetrics()
    settings: Any = {"validation": loader(BATCHES[:1]), "callbacks": [metrics]}
    with pytest.warns(UserWarning, match="leaves") as told:
        logger = fit(metrics, _Silent(every=2), batches=BATCHES[:4], **settings)
    texts = [str(one.message) for one in told if "leaves" in str(one.message)]
    assert [text.split("`")[1:4:2] for text in texts] == [
        ["train/loss", "training_step"],
        ["val/loss", "validation_step"],
    ]
    assert not logger.column("train/loss")
    assert logger.column("train/target_tokens")[-1] == sum(TARGETS[:4])
    assert logger.column("val/loss") == [7.0]
    assert metrics.closing_lines()[0].endswith("%.")  # no loss in the closing line either


class _SkipRest(ToyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_micro_batches_without_a_step_are_forgotten() -> None:
    # Each epoch ends at its fourth batch, inside the second window; Lightning drops the third batch's gradient.
    metrics = TrainingMetrics()
    logger = fit(metrics, _SkipRest(), accumulate_grad_batches=2, max_epochs=2)
    expected = plain_loop([BATCHES[:2], BATCHES[:2]])
    assert logger.column("train/loss") == pytest.approx(expected["loss"], rel=1e-5)
    assert logger.column("train/grad_norm") == pytest.approx(expected["norm"], rel=1e-5)
    assert metrics.target_tokens == 2 * sum(TARGETS[:2])


class _Recorded(TrainingMetrics):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        with HostReads() as mode:
            super().on_before_optimizer_step(*args)
        self.reads.append(mode.reads)

    def on_train_batch_end(self, *args: Any) -> None:
        with HostReads() as mode:
            super().on_train_batch_end(*args)
        self.reads[-1] += mode.reads


def test_unlogged_steps_read_nothing_on_the_host() -> None:
    metrics = _Recorded()
    batches = with_host_keys(BATCHES)
    fit(metrics, batches=batches, log_every_n_steps=3)
    assert [bool(reads) for reads in metrics.reads] == [False, False, True, False, False, True, False]


def test_speed_is_source_tokens_per_second_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_tally, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(ToyLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 2.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            now[0] += 100.0
            return super().validation_step(batch, batch_idx)

    settings = {"validation": loader(BATCHES[:2]), "val_check_interval": 3, "log_every_n_steps": 2}
    logger = fit(TrainingMetrics(), Slow(), batches=BATCHES[:6], **settings)
    assert len(logger.column("val/loss")) == 2
    assert logger.column("train/tokens_per_s") == pytest.approx([(TOKENS - 3) / 2.0] * 3)


def test_progress_bar_shows_loss_speed_and_fill() -> None:
    validation = loader(BATCHES[:2])
    trainer = run_fit([ExactTokenMean(), TrainingMetrics()], None, BATCHES, validation, logger=False)
    shown = {"train/loss", "train/tokens_per_s", "data/source_fill", "val/loss"}
    assert shown <= trainer.progress_bar_metrics.keys()
    assert trainer.progress_bar_metrics.keys().isdisjoint({"train/grad_norm", "train/lr", "train/target_tokens"})
    assert math.isfinite(trainer.callback_metrics["val/loss"])  # can be monitored


def test_a_second_fit_goes_on() -> None:
    metrics = TrainingMetrics()
    fit(metrics)
    logger = fit(metrics, batches=BATCHES[:1])
    assert logger.column("train/target_tokens") == [sum(TARGETS) + TARGETS[0]]


def test_no_gradient_norm_where_gradients_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_metrics, "_shows_gradients", lambda strategy: False)
    logger = fit(TrainingMetrics())
    assert logger.column("train/grad_norm") == []
    assert len(logger.column("train/loss")) == len(BATCHES)


@pytest.mark.parametrize(
    ("name", "shows"),
    [("SingleDeviceStrategy", True), ("DDPStrategy", True), ("ModelParallelStrategy", True)]
    + [("FSDPStrategy", False), ("DeepSpeedStrategy", False)],
)
def test_which_strategies_show_gradients(name: str, shows: bool) -> None:
    base = type(name, (), {})
    assert training_metrics._shows_gradients(type("Mine", (base,), {})()) == shows
