"""What ``ChannelLoss`` logs on one device, against a plain loop over tokens; when, and at what cost to training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.callbacks import ChannelLoss, ChannelOptions, ExactTokenMean, TrainingMetrics
from lightning_longctx.errors import BatchContractError, ConfigurationError
from tests.callbacks.channels import BATCHES, NAMES, Doc, channel_rows, expected_metrics, fit, loader, per_source, row
from tests.callbacks.host_reads import HostReads
from tests.callbacks.test_training_metrics import _Manual, _SkipRest
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
        with HostReads() as mode, _Calls() as calls:
            super().on_train_batch_end(*args)
        self.reads.append(bool(mode.reads))
        self.calls.append(calls.count)


class _Calls(HostReads):
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


def test_ids_without_names_are_numbered() -> None:
    rows = channel_rows(fit(ChannelLoss(), batches=BATCHES[:1]))
    assert {"channel_loss/source_0", "channel_loss/source_2"} < rows[0][1].keys()


def test_unknown_ids_show_in_the_coverage_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="does not see all targets") as caught:
        rows = channel_rows(fit(ChannelLoss(source_names=NAMES[:2])))
    assert len([item for item in caught if "does not see" in str(item.message)]) == 1
    for (_, found), batch in zip(rows, BATCHES, strict=True):
        counts = {source: count for source, (_, count) in per_source([batch]).items()}
        known = sum(count for source, count in counts.items() if source < 2)
        assert found["channel_loss/coverage"] == pytest.approx(known / sum(counts.values()))


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
        ({"every_n_steps": 0}, "must be at least 1"),
        ({"every_n_steps": True}, "must be a whole number"),
        ({"every_n_steps": "5"}, "must be a whole number"),
        ({"source_names": "web"}, "must hold names"),
        ({"source_names": {-1: "web"}}, "ids from 0 on"),
        ({"source_names": {"web": "web"}}, "ids from 0 on"),
        ({"source_names": ["web"], "group_by": "position"}, "group_by: position"),
        ({"prefix": ""}, "every logger"),
        ({"prefix": "my stuff"}, "every logger"),
        ({"options": {"counters": ["sample"]}}, "samples, input_tokens, label_tokens"),
        ({"options": {"counters": "samples"}}, "list"),
        ({"options": {"extra_strip_keys": "url"}}, "list"),
        ({"options": {"log_token": False}}, "log_tokens"),
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


class _Skips(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self._step(batch)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_that_is_skipped_misses_nothing() -> None:
    """Lightning gives callbacks an empty mapping then, and no step follows."""
    callback = channel(average_over="interval", every_n_steps=10, strict=True)
    run_fit([callback], _Skips(lr=0.0), BATCHES)
    expected = per_source(BATCHES[::2])
    assert {name: value.targets for name, value in callback.latest.items()} == {
        NAMES[source]: count for source, (_, count) in expected.items()
    }


def named(number: int, name: str) -> dict[str, Any]:
    return {**BATCHES[0], "channel_id": torch.tensor(number), "channel_name": name}


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([named(7, "web"), named(7, "code")], "id 7 for 'web' and 'code'"),
        ([named(7, "web"), named(8, "web")], "'web' for the ids 7 and 8"),
    ],
    ids=["one id", "one name"],
)
@pytest.mark.parametrize("average_over", ["step", "interval"])
def test_names_that_contradict_each_other_are_told(batches: Any, words: str, average_over: Any) -> None:
    """Otherwise the sums of one source would silently be those of two."""
    settings: Any = {"source_name_key": "channel_name", "average_over": average_over}
    with pytest.raises(BatchContractError, match=words):
        run_fit([ChannelLoss(strict=True, **settings)], ToyLM(lr=0.0), batches)
    with pytest.warns(UserWarning, match=words):
        run_fit([ChannelLoss(**settings)], ToyLM(lr=0.0), batches)
