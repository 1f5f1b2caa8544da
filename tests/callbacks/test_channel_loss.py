"""What ``ChannelLoss`` logs on one device, against a plain loop over tokens; when, and at what cost to training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.callbacks import ChannelLoss, ChannelOptions, ExactTokenMean, TrainingMetrics
from lightning_longctx.errors import BatchContractError, ConfigurationError
from tests.callbacks.channels import BATCHES, NAMES, Doc, channel_rows, expected_metrics, fit, loader, per_source, row
from tests.callbacks.test_training_metrics import _HostReads, _Manual, _SkipRest
from tests.callbacks.toy import ToyLM, ToyModel, make_trainer, plain_loop, run_fit


def channel(**settings: Any) -> ChannelLoss:
    return ChannelLoss(**({"source_names": NAMES} | settings))


@pytest.mark.parametrize("accumulate", [1, 2, 3], ids=str)
def test_values_are_those_of_a_plain_loop(accumulate: int) -> None:
    rows = channel_rows(fit(channel(), accumulate_grad_batches=accumulate))
    windows = [BATCHES[start : start + accumulate] for start in range(0, len(BATCHES), accumulate)]  # a short last one
    assert [step for step, _ in rows] == list(range(len(windows)))
    for (_, found), window in zip(rows, windows, strict=True):
        assert found == pytest.approx(expected_metrics(window), rel=1e-6)


def test_weighted_losses_add_up_to_the_logged_loss() -> None:
    callback = channel()
    logger = fit(callback, ToyLM(), callbacks=[ExactTokenMean(), TrainingMetrics(), callback])
    losses = logger.column("train/loss")
    sums = [sum(v for k, v in found.items() if "_weighted/" in k) for _, found in channel_rows(logger)]
    assert len(sums) == len(BATCHES)
    assert sums == pytest.approx(losses, rel=1e-6)


def test_ten_and_ninety_targets_make_one_mean() -> None:
    """mlx-lm#1413, composer#3273, xtuner#1101: not a mean of means."""
    split = [row(0, [Doc(0, 91)], 4, 256), row(1, [Doc(0, 11)], 4, 256)]
    whole = [row(0, [Doc(0, 91)], 4, 256)]
    ((_, found),) = channel_rows(fit(channel(), batches=split, accumulate_grad_batches=2))
    sums = [per_source([batch])[0] for batch in split]
    assert [count for _, count in sums] == [90, 10]
    assert found["channel_tokens/code"] == 100
    assert found["channel_loss/code"] == pytest.approx((sums[0][0] + sums[1][0]) / 100, rel=1e-6)
    assert found["channel_loss/code"] != pytest.approx(sum(loss / count for loss, count in sums) / 2, rel=1e-3)
    assert per_source(whole)[0][1] == 90


def _no_restart(batch: Any) -> Any:
    return batch | {"position_ids": batch["position_ids"] + 100}


def _zero_positions(batch: Any) -> Any:
    return batch | {"position_ids": torch.zeros_like(batch["position_ids"])}


def _image_axes(batch: Any) -> Any:
    positions = batch["position_ids"]
    return batch | {"position_ids": torch.stack([torch.zeros_like(positions), positions, positions])}


def _first_half_gone(batch: Any) -> Any:
    return batch | {"position_ids": torch.arange(100, 120)[None]}


@pytest.mark.parametrize("change", [_no_restart, _zero_positions, _image_axes, _first_half_gone])
def test_positions_never_decide_what_counts(change: Any) -> None:
    """VeOmni 4.2: rows that start inside a document, positions that do not restart, several axes: all counted."""
    rows = channel_rows(fit(channel(), batches=[change(batch) for batch in BATCHES]))
    for (_, found), batch in zip(rows, BATCHES, strict=True):
        assert found == pytest.approx(expected_metrics([batch]), rel=1e-6)


def test_a_target_over_a_border_belongs_to_the_target_token() -> None:
    """VeOmni 4.2: a label kept at a document's end was charged to the source before the border."""
    batch = row(0, [Doc(0, 5), Doc(1, 5)])
    batch["shift_labels"][0, 4] = batch["input_ids"][0, 5]
    ((_, found),) = channel_rows(fit(channel(), batches=[batch]))
    assert (found["channel_tokens/code"], found["channel_tokens/my_prose"]) == (4, 5)
    assert found == pytest.approx(expected_metrics([batch]), rel=1e-6)


def test_a_source_without_targets_has_no_value_and_no_old_one() -> None:
    rows = channel_rows(fit(channel(), batches=[BATCHES[0], row(1, [Doc(0, 16)])]))
    assert {key.rpartition("/")[2] for key in rows[0][1]} == {"code", "web", "coverage"}  # one token has no target
    assert {key.rpartition("/")[2] for key in rows[1][1]} == {"code", "coverage"}


def test_a_step_without_any_target_logs_nothing() -> None:
    empty = BATCHES[0] | {"shift_labels": torch.full_like(BATCHES[0]["shift_labels"], IGNORE_INDEX)}
    callback = channel()
    assert [step for step, _ in channel_rows(fit(callback, batches=[BATCHES[0], empty, BATCHES[1]]))] == [0, 2]


@pytest.mark.parametrize(("every", "log_every", "steps"), [(None, 2, [1, 3]), (2, 1, [1, 3]), (3, 50, [2])], ids=str)
def test_a_logged_step_stands_for_itself(every: int | None, log_every: int, steps: list[int]) -> None:
    rows = channel_rows(fit(channel(every_n_steps=every), log_every_n_steps=log_every))
    assert [step for step, _ in rows] == steps
    for step, found in rows:
        assert found == pytest.approx(expected_metrics([BATCHES[step]]), rel=1e-6)


def test_an_interval_holds_every_step_and_the_last_one_may_be_short() -> None:
    rows = channel_rows(fit(channel(every_n_steps=2, average_over="interval")))
    windows = [BATCHES[:2], BATCHES[2:4], BATCHES[4:]]
    assert [step for step, _ in rows] == [1, 3, 4]
    for (_, found), window in zip(rows, windows, strict=True):
        assert found == pytest.approx(expected_metrics(window), rel=1e-6)


def test_never_logging_is_possible() -> None:
    callback = channel()
    assert channel_rows(fit(callback, log_every_n_steps=0)) == []
    assert callback.latest == {}


class _Watched(ChannelLoss):
    """Counts what waits for the device, and what runs at all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.reads: list[bool] = []
        self.calls: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        with _HostReads() as mode, _Calls() as calls:
            super().on_train_batch_end(*args)
        self.reads.append(bool(mode.reads))
        self.calls.append(calls.count)


class _Calls(_HostReads):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counters", [[], ["samples", "input_tokens", "label_tokens"]], ids=["plain", "counters"])
def test_unlogged_steps_read_nothing_and_cost_nothing(counters: Any) -> None:
    settings = {"source_names": NAMES, "every_n_steps": 2, "options": ChannelOptions(counters=counters)}
    step, interval = _Watched(**settings), _Watched(**settings, average_over="interval")
    fit(step)
    fit(interval)
    assert step.reads == interval.reads == [False, True, False, True, False]
    assert [bool(calls) for calls in step.calls] == [False, True, False, True, False]
    assert all(interval.calls)


def test_training_is_bit_equal_with_and_without() -> None:
    """Liger#968, #678, #488, #1298: our path changes no reduction, gradient or random number."""
    results = []
    for callbacks in ([], [channel(average_over="interval"), ChannelLoss(group_by="position", every_n_steps=2)]):
        torch.manual_seed(3)
        module = ToyLM()
        trainer = run_fit([ExactTokenMean(), *callbacks], module, BATCHES, accumulate_grad_batches=2, logger=False)
        gradients = [tensor for step in module.seen_gradients for tensor in step]
        results.append((gradients, list(module.model.parameters()), torch.get_rng_state(), trainer.global_step))
    for off, on in zip(*results, strict=True):
        assert off == on if isinstance(off, int) else all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
    assert len(results[0][0]) == 3 * 2


def test_counters() -> None:
    options = ChannelOptions(counters=["samples", "input_tokens", "label_tokens"], log_weighted=False, log_tokens=False)
    ((_, found),) = channel_rows(fit(channel(options=options), batches=BATCHES[:1]))
    assert found.pop("channel_loss/code") > 0
    assert found.pop("channel_loss/web") > 0
    assert found == {
        "channel_loss/coverage": 1.0,
        "channel_samples/code": 2,
        "channel_samples/web": 1,
        "channel_input_tokens/code": 9,
        "channel_input_tokens/web": 6,
        "channel_label_tokens/code": 5,
        "channel_label_tokens/web": 5,
    }


def test_validation_covers_the_whole_loop_and_each_loader() -> None:
    loaders = [loader(BATCHES[:3]), loader(BATCHES[3:])]
    logger = fit(channel(), validation=loaders, num_sanity_val_steps=1)
    (found,) = [metrics for _, metrics in channel_rows(logger, "val_channel")]
    expected = expected_metrics(BATCHES, prefix="val_channel")
    for index, part in enumerate([BATCHES[:3], BATCHES[3:]]):
        values = expected_metrics(part, prefix="val_channel")
        expected |= {f"{key}/dataloader_idx_{index}": value for key, value in values.items()}
    assert found == pytest.approx(expected, rel=1e-6)


def test_validate_and_test_entry_points_return_the_values() -> None:
    callback = channel()
    trainer = make_trainer([callback])
    (validated,) = trainer.validate(ToyLM(), loader(BATCHES[:3]), verbose=False)
    (tested,) = trainer.test(ToyLM(), loader(BATCHES[3:]), verbose=False)
    assert validated == pytest.approx(expected_metrics(BATCHES[:3], prefix="val_channel"), rel=1e-6)
    assert tested == pytest.approx(expected_metrics(BATCHES[3:], prefix="test_channel"), rel=1e-6)
    assert set(callback.latest_validation) == {"code", "my prose", "web"}
    assert trainer.callback_metrics.keys() >= set(tested)  # can be monitored


def test_groups_by_position_in_the_document() -> None:
    batch = row(0, [Doc(0, 5000), Doc(1, 20_000)], 1, 2**15)
    ((_, found),) = channel_rows(fit(ChannelLoss(group_by="position"), batches=[batch]), "position")
    counts = {key: value for key, value in found.items() if key.startswith("position_tokens")}
    # Targets stand at positions 1 .. length - 1.
    assert counts == {
        "position_tokens/0-4K": 2 * 4095,
        "position_tokens/4K-16K": (5000 - 4096) + (16384 - 4096),
        "position_tokens/16K-64K": 20_000 - 16384,
    }
    with torch.no_grad():
        model = ToyModel()
        losses = torch.nn.functional.cross_entropy(
            model.head(model(batch["input_ids"]))[0], batch["shift_labels"][0], reduction="none"
        )
    assert found["position_loss/16K-64K"] == pytest.approx(
        losses[5000 + 16383 : 24_999].double().mean().item(), rel=1e-6
    )
    total = losses[batch["shift_labels"][0] != IGNORE_INDEX].double().mean().item()
    assert sum(v for k, v in found.items() if "_weighted/" in k) == pytest.approx(total, rel=1e-6)
    assert found["position_loss/coverage"] == 1


class _Foreign(ToyLM):
    """Somebody's module: padded [B, S] batches with labels that are not shifted."""

    def __init__(self, width: int = 0) -> None:
        super().__init__(lr=0.0)
        self.width, self.seen_keys = width, []

    def _step(self, batch: Any) -> Any:
        self.seen_keys.append(sorted(batch))
        logits = self.model.head(self.model(batch["input_ids"]))[:, :-1]
        labels = batch["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        mean = losses.sum() / (labels != IGNORE_INDEX).sum()
        return {"loss": mean, "per_token_loss": torch.nn.functional.pad(losses, (0, self.width))}


def padded(ids: Any, **extra: Any) -> dict[str, Any]:
    tokens = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, 3:] = IGNORE_INDEX
    labels[2, :2] = IGNORE_INDEX
    return {"input_ids": tokens, "labels": labels, "dataset_id": ids, **extra}


@pytest.mark.parametrize("width", [0, 1], ids=["S-1 losses", "S losses"])
@pytest.mark.parametrize(
    "ids",
    [torch.tensor([1, 0, 1]), torch.tensor([[1], [0], [1]]), [1, 0, 1], ["web", "code", "web"]],
    ids=["tensor", "column", "list", "names"],
)
def test_padded_batches_with_one_id_per_row(ids: Any, width: int) -> None:
    callback = ChannelLoss(source_key="dataset_id", source_names=["code", "web"])
    module = _Foreign(width)
    ((_, found),) = channel_rows(fit(callback, module, [padded(ids)], callbacks=[callback]))
    assert (found["channel_tokens/code"], found["channel_tokens/web"]) == (2, 5 + 4)
    assert found["channel_loss/coverage"] == 1
    assert module.seen_keys == [["input_ids", "labels"]]  # the id never reached the step
    batch = padded(ids)
    model = ToyModel()
    losses = torch.nn.functional.cross_entropy(
        model.head(model(batch["input_ids"]))[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    )
    assert found["channel_loss/code"] == pytest.approx(losses[1].sum().item() / 2, rel=1e-6)
    assert found["channel_loss/web"] == pytest.approx(losses[[0, 2]].sum().item() / 9, rel=1e-6)


def test_metadata_is_hidden_on_unsampled_steps_too_and_callbacks_see_it() -> None:
    seen: list[list[str]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
            seen.append(sorted(batch))

    batch = padded([1, 0, 1], url=["a", "b", "c"], name=["x", "y", "x"])
    options = ChannelOptions(extra_strip_keys=["url"])
    callback = ChannelLoss(source_name_key="name", every_n_steps=2, options=options)
    module = _Foreign()
    validation = loader([batch])
    fit(callback, module, [batch] * 3, callbacks=[callback, Look()], validation=validation, num_sanity_val_steps=1)
    assert module.seen_keys == [["input_ids", "labels"]] * 5
    assert seen == [["dataset_id", "input_ids", "labels", "name", "url"]] * 3
    assert callback.latest.keys() == {"x", "y"}


def test_ids_without_names_are_numbered() -> None:
    rows = channel_rows(fit(ChannelLoss(), batches=BATCHES[:1]))
    assert {"channel_loss/source_0", "channel_loss/source_2"} < rows[0][1].keys()


def test_ids_may_be_sparse() -> None:
    batch = padded(torch.tensor([90210, 7, 90210]))
    callback = ChannelLoss(source_key="dataset_id", source_names={90210: "web", 7: "code"})
    fit(callback, _Foreign(), [batch], callbacks=[callback])
    assert {name: value.targets for name, value in callback.latest.items()} == {"code": 2, "web": 9}


def test_unknown_ids_show_in_the_coverage_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="does not see all targets") as caught:
        rows = channel_rows(fit(ChannelLoss(source_names=NAMES[:2])))
    assert len([item for item in caught if "does not see" in str(item.message)]) == 1
    for (_, found), batch in zip(rows, BATCHES, strict=True):
        counts = {source: count for source, (_, count) in per_source([batch]).items()}
        known = sum(count for source, count in counts.items() if source < 2)
        assert found["channel_loss/coverage"] == pytest.approx(known / sum(counts.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_id": None}, "must hold source ids"),
        ({"dataset_id": torch.tensor([1, 2])}, "must have one id per row"),
        ({"dataset_id": torch.tensor([0.5, 1.0, 2.0])}, "integer source ids"),
        ({"dataset_id": torch.tensor([1, 5, 0])}, "must give each target a known source"),
    ],
    ids=["none", "shape", "floats", "unknown"],
)
def test_strict_refuses_what_cannot_be_told(change: Any, words: str) -> None:
    callback = ChannelLoss(source_key="dataset_id", source_names=["code", "web"], strict=True)
    with pytest.raises(BatchContractError, match=words):
        fit(callback, _Foreign(), [padded([0, 1, 0]) | change], callbacks=[callback])
    loose = ChannelLoss(source_key="dataset_id", source_names=["code", "web"])
    with pytest.warns(UserWarning, match=words):
        rows = channel_rows(fit(loose, _Foreign(), [padded([0, 1, 0]) | change], callbacks=[loose]))
    assert rows[0][1]["channel_loss/coverage"] < 1


def test_a_module_that_returns_only_a_loss_is_told_what_to_do() -> None:
    callback = channel()
    with pytest.warns(UserWarning, match="loss_function: true"):
        rows = channel_rows(fit(callback, ToyLM(per_token=False), callbacks=[callback]))
    assert rows[0][1] == {"channel_loss/coverage": 0.0}


def test_manual_optimization_and_forgotten_micro_batches() -> None:
    rows = channel_rows(fit(channel(), _Manual(every=2), batches=BATCHES[:4]))
    models = [ToyModel(), ToyModel()]
    trained = plain_loop([BATCHES[:2]])["weights"]
    for parameter, weight in zip(models[1].parameters(), trained, strict=True):
        parameter.data.copy_(weight)
    for index, (_, found) in enumerate(rows):
        window = BATCHES[2 * index : 2 * index + 2]
        assert found == pytest.approx(expected_metrics(window, models[index]), rel=1e-4)
    # Each epoch ends at its fourth batch, inside the second window; Lightning drops the third batch's gradient.
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2}
    rows = channel_rows(fit(channel(average_over="interval"), _SkipRest(lr=0.0), **settings))
    assert len(rows) == 2
    for _, found in rows:
        assert found == pytest.approx(expected_metrics(BATCHES[:2]), rel=1e-6)


def test_latest_history_summary_and_plot(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = channel()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(callback, ToyLM(), logger=CSVLogger(tmp_path, "run"))
    table = [
        line.split() for line in caplog.text.splitlines() if line.startswith(("source", "code", "my prose", "web"))
    ]
    assert [line[0] for line in table] == ["source", "code", "web", "my"]
    assert callback.history.steps == [1, 2, 3, 4, 5]
    assert sum(value.weighted_loss for value in callback.latest.values()) == pytest.approx(
        sum(value.loss * value.targets for value in callback.latest.values())
        / sum(value.targets for value in callback.latest.values())
    )
    assert (tmp_path / "run" / "version_0" / "channel_loss.png").read_bytes()[1:4] == b"PNG"
    assert callback.plot(tmp_path / "new" / "now.svg").read_text().count("my prose") >= 1


def test_without_a_logger_values_are_there_and_no_file_is_written() -> None:
    callback = channel()
    run_fit([ExactTokenMean(), callback], ToyLM(lr=0.0), BATCHES, logger=False)
    assert callback.latest.keys() == {"code", "my prose"}
    assert callback.history.targets["web"] > 0
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every_n_steps": 0}, "at least 1"),
        ({"average_over": "epoch"}, "step, interval"),
        ({"group_by": "length"}, "source, position"),
        ({"source_names": ["a", "a"]}, "differ"),
        ({"source_names": []}, "must hold names"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_at_once(settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ChannelLoss(**settings)


def test_options_may_be_a_mapping() -> None:
    assert ChannelLoss(options={"log_tokens": False}).options == ChannelOptions(log_tokens=False)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    settings: Any = {"source_names": NAMES, "every_n_steps": 4, "average_over": "interval"}
    batches = [*BATCHES, *BATCHES[:3]]
    whole = ChannelLoss(**settings)
    expected = channel_rows(fit(whole, batches=batches))
    first = ChannelLoss(**settings)
    trainer = run_fit([ExactTokenMean(), first, _Save(2, tmp_path / "two.ckpt")], ToyLM(lr=0.0), batches, max_steps=3)
    assert trainer.global_step == 3
    second = ChannelLoss(**settings)
    rows = channel_rows(fit(second, batches=batches[2:], ckpt_path=tmp_path / "two.ckpt", max_steps=8))
    assert rows == [(step, pytest.approx(values, rel=1e-12)) for step, values in expected]
    assert second.history.steps == whole.history.steps == [4, 8]


class _Save(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path, weights_only=False)
            state = torch.load(self.path, weights_only=True)["callbacks"]["ChannelLoss"]
            assert state["steps_since"] == self.step
            assert state["window"]


def test_sources_may_be_added_and_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "two.ckpt"
    settings: Any = {"every_n_steps": 4, "average_over": "interval"}
    first = ChannelLoss(source_names=["my data", "b", "c"], **settings)
    run_fit([ExactTokenMean(), first, _Save(2, path)], ToyLM(lr=0.0), BATCHES, max_steps=2)
    batches = [row(7, [Doc(0, 8), Doc(1, 8)]), row(8, [Doc(2, 8)])]
    # `b` is gone, `c` has another id, and `my_data` is new: it must not take the key of `my data`.
    second = ChannelLoss(source_names=["c", "my_data", "my data"], **settings)
    ((_, found),) = channel_rows(fit(second, batches=batches, ckpt_path=path, max_steps=4))
    before, after = per_source(BATCHES[:2]), per_source(batches)
    tokens = {key.rpartition("/")[2]: value for key, value in found.items() if "tokens" in key}
    (new,) = tokens.keys() - {"c", "my_data"}
    assert new.startswith("my_data-")
    assert tokens["c"] == before[2][1] + after[0][1]
    assert tokens["my_data"] == before[0][1] + after[2][1]
    assert tokens[new] == after[1][1]
