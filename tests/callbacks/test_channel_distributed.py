"""ChannelLoss on several processes: one set of values for every layout, the same keys everywhere, and nobody waits."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_longctx import ChannelLoss, LongContextFSDPStrategy
from lightning_longctx.callbacks import ChannelOptions, ExactTokenMean, TrainingMetrics
from lightning_longctx.errors import BatchContractError
from tests.callbacks.channels import BATCHES, NAMES, Doc, channel_rows, expected_metrics, loader, row
from tests.callbacks.test_distributed import _SlicedRow
from tests.callbacks.test_loss_hook import Bare, batch, by_row, hooked, model
from tests.callbacks.toy import ToyLM, make_trainer
from tests.helpers.pool import RankError, run_ranks
from tests.strategies.own_model import OwnModule

pytestmark = pytest.mark.distributed

COUNTERS: Any = ["samples", "input_tokens", "label_tokens"]


def _rank() -> int:
    return int(os.environ["RANK"])


def _layout(world: int, sp: int, average_over: Any) -> dict[str, Any]:
    """Two steps of four rows each, validated on the same eight, in any cut."""
    accumulate = 4 * sp // world
    source = ChannelLoss(average_over=average_over, every_n_steps=1, options=ChannelOptions(counters=COUNTERS))
    callbacks = [source, ChannelLoss(group_by="position"), TrainingMetrics()]
    trainer = make_trainer(
        callbacks,
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp),
        accumulate_grad_batches=accumulate,
        max_steps=2,
        val_check_interval=2 * accumulate,
        num_sanity_val_steps=1,
    )
    trainer.fit(OwnModule(rows=8))
    rows = {prefix: channel_rows(trainer.logger, prefix) for prefix in ("channel", "val_channel", "position")}
    monitored = {key: value.item() for key, value in trainer.callback_metrics.items() if "val_channel" in key}
    return {
        "rows": rows if trainer.is_global_zero else {},
        "latest": source.latest,
        "monitored": monitored,
        "loss": trainer.logger.column("train/loss"),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (result,) = run_ranks(_layout, 1, 1, 1, "step")
    return result


@pytest.mark.parametrize(("world", "sp"), [(2, 1), (2, 2), (4, 2), (4, 4)], ids=["dp 2", "sp 2", "dp 2 sp 2", "sp 4"])
def test_every_layout_logs_the_same(alone: dict[str, Any], world: int, sp: int) -> None:
    """torchtitan#3329, #3280; ms-swift#9152, #9380; axolotl#3033: one process's values, in training and validation."""
    results = run_ranks(_layout, world, world, sp, "interval")
    for prefix, rows in alone["rows"].items():
        found = results[0]["rows"][prefix]
        assert [step for step, _ in found] == [step for step, _ in rows]
        for (_, values), (_, expected) in zip(found, rows, strict=True):
            assert list(values) == list(expected)
            assert values == pytest.approx(expected, rel=1e-5)
            # Counts are not only close.
            assert {k: v for k, v in values.items() if "loss" not in k} == {
                k: v for k, v in expected.items() if "loss" not in k
            }
    for result in results:
        assert result["latest"] == results[0]["latest"]
        assert list(result["monitored"].items()) == list(results[0]["monitored"].items())


def test_the_layouts_have_something_to_compare(alone: dict[str, Any]) -> None:
    assert len(alone["rows"]["channel"]) == 2
    assert len(alone["rows"]["val_channel"]) == 1
    assert {"val_channel_loss/source_0", "val_channel_samples/source_1"} < alone["rows"]["val_channel"][0][1].keys()
    for (_, found), loss in zip(alone["rows"]["channel"], alone["loss"], strict=True):
        assert sum(value for key, value in found.items() if "_weighted/" in key) == pytest.approx(loss, rel=1e-6)


def _sliced(world: int) -> list[Any]:
    batch = row(0, [Doc(0, 4), Doc(1, 6), Doc(2, 6)], padding=4)  # 20 tokens: shards end inside and at a border
    batch["shift_labels"][0, 9] = batch["input_ids"][0, 10]  # over the border, and over the shards' border at world 2
    settings = {} if world == 1 else {"strategy": _SlicedRow(), "devices": world, "use_distributed_sampler": False}
    trainer = make_trainer([ExactTokenMean(), ChannelLoss(source_names=NAMES)], limit_val_batches=0, **settings)
    trainer.fit(ToyLM(lr=0.0), loader([batch]), loader([batch]))
    return channel_rows(trainer.logger)


def test_a_target_over_the_border_of_shards_belongs_to_the_target_token() -> None:
    """ms-swift#9973, #7204: sequence parallel 2 equals 1, without a second shift."""
    ((_, alone),) = run_ranks(_sliced, 1, 1)[0]
    ((_, halves),) = run_ranks(_sliced, 2, 2)[0]
    assert alone["channel_tokens/web"] == 6  # five of its own, and the one over the border
    assert halves == pytest.approx(alone, rel=1e-6)


def _ddp(batches: list[list[Any]], channel: ChannelLoss, **settings: Any) -> dict[str, Any]:
    path = settings.pop("save_to", None)
    module = settings.pop("module", None) or ToyLM(lr=0.0)
    validation = settings.pop("validation", None)
    fit = {"ckpt_path": settings.pop("ckpt_path", None)}
    defaults = {"strategy": "ddp", "devices": len(batches), "use_distributed_sampler": False}
    trainer = make_trainer([ExactTokenMean(), channel], **({"limit_val_batches": 0} | defaults | settings))
    trainer.fit(module, loader(batches[_rank()]), loader((validation or batches)[_rank()]), **fit)
    if path is not None:
        trainer.save_checkpoint(path)
    return {
        "rows": channel_rows(trainer.logger),
        "validation": channel_rows(trainer.logger, "val_channel"),
        "latest": channel.latest,
        "keys": list(trainer.callback_metrics),
    }


def _disjoint() -> dict[str, Any]:
    batches = [[row(0, [Doc(0, 16)])], [row(1, [Doc(1, 16)])]]
    validation = [[row(0, [Doc(0, 16)]), row(2, [Doc(2, 16)])], []]  # a rank without any
    return _ddp(batches, ChannelLoss(source_names=NAMES), validation=validation, limit_val_batches=1.0)


def test_ranks_with_other_sources_log_the_same_keys() -> None:
    """Lightning#19106: keys that differ per rank made the run hang."""
    first, second = run_ranks(_disjoint, 2)
    expected = expected_metrics([row(0, [Doc(0, 16)]), row(1, [Doc(1, 16)])])
    assert first["rows"] == [(0, pytest.approx(expected, rel=1e-6))]
    expected = expected_metrics([row(0, [Doc(0, 16)]), row(2, [Doc(2, 16)])], prefix="val_channel")
    assert first["validation"][0][1] == pytest.approx(expected, rel=1e-6)
    assert first["keys"] == second["keys"]
    assert first["latest"] == second["latest"]


def _one_bad_rank(strict: bool, bad: str) -> dict[str, Any]:
    batches = [[BATCHES[0], BATCHES[1]], [BATCHES[2], BATCHES[3]]]
    if bad == "none":
        batches[1][0] = batches[1][0] | {"source_ids": None}
    elif bad == "unknown":
        batches[1][0] = batches[1][0] | {"source_ids": batches[1][0]["source_ids"] + 100}
    return _ddp(batches, ChannelLoss(source_names=NAMES, strict=strict))


@pytest.mark.parametrize("bad", ["none", "unknown"])
def test_strict_errors_are_agreed_on_before_anybody_waits(bad: str) -> None:
    """Seen elsewhere: one rank failed in its metric and its peers waited until the group timed out."""
    with pytest.raises(RankError) as caught:
        run_ranks(_one_bad_rank, 2, True, bad)
    assert {type(cause) for cause in caught.value.causes.values()} == {BatchContractError}
    assert caught.value.causes.keys() == {0, 1}


def _loose(bad: str) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", message="ChannelLoss does not see all targets")
    return _one_bad_rank(False, bad)


def test_without_strict_the_coverage_shows_what_is_missing() -> None:
    for bad in ("none", "unknown"):
        (_, first), (_, second) = run_ranks(_loose, 2, bad)[0]["rows"]
        known = sum(1 for label in BATCHES[0]["shift_labels"][0] if label != -100)
        every = known + sum(1 for label in BATCHES[2]["shift_labels"][0] if label != -100)
        assert first["channel_loss/coverage"] == pytest.approx(known / every)
        assert second["channel_loss/coverage"] == 1.0


class _Named(ToyLM):
    def _step(self, batch: Any) -> Any:
        assert not {"channel_id", "channel_name"} & batch.keys()
        return super()._step(batch)


def _names() -> dict[str, Any]:
    batch, ids, names = BATCHES[0], [[3, 4, 5, 3, 0], [7, 4, 9, 4, 0]], [list("abcap"), list("xbybp")]
    mine = [batch | {"channel_id": torch.tensor(ids[_rank()]), "channel_name": names[_rank()]}] * 2
    return _ddp([mine, mine], ChannelLoss(source_name_key="channel_name"), module=_Named(lr=0.0))


def test_names_that_ranks_find_in_batches_are_told_to_all() -> None:
    first, second = run_ranks(_names, 2)
    assert first["latest"] == second["latest"]
    assert first["latest"].keys() == {"a", "b", "c", "x", "y"}  # `p`, which only padding has, is missing
    assert [metrics.keys() for _, metrics in first["rows"]] == [first["rows"][0][1].keys()] * 2


def _save_inside_of_an_interval(folder: str) -> Any:
    channel = ChannelLoss(source_names=NAMES, every_n_steps=4, average_over="interval")

    class Stop(ToyLM):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(Path(folder) / "two.ckpt")

    return _ddp([BATCHES[:4], BATCHES[1:]], channel, module=Stop(lr=0.0))


def _resume(folder: str, world: int) -> Any:
    channel = ChannelLoss(source_names=NAMES, every_n_steps=4, average_over="interval")
    ranks = [BATCHES[2:4], BATCHES[3:]]
    settings: dict[str, Any] = {"ckpt_path": Path(folder) / "two.ckpt", "max_epochs": 2}
    if world == 2:
        return _ddp(ranks, channel, **settings)
    ranks = [[batch for pair in zip(*ranks, strict=True) for batch in pair]]
    return _ddp(ranks, channel, accumulate_grad_batches=2, **settings)


@pytest.mark.parametrize("world", [2, 1])
def test_an_interval_goes_on_after_a_resume_on_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    whole = run_ranks(_save_inside_of_an_interval, 2, str(tmp_path))[0]["rows"]
    assert [step for step, _ in whole] == [3]
    assert whole[0][1] == pytest.approx(expected_metrics([*BATCHES[:4], *BATCHES[1:]]), rel=1e-6)
    resumed = run_ranks(_resume, world, str(tmp_path), world)[0]["rows"]
    assert resumed[0][1] == pytest.approx(whole[0][1], rel=1e-12)


class _Counting:
    """Counts collectives, and the objects among them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> _Counting:
        self.before = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_gather_object")}
        for name in self.before:
            setattr(dist, name, partial(self._call, name))
        return self

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return self.before[name](*args, **kwargs)

    def __exit__(self, *_: Any) -> None:
        for name, function in self.before.items():
            setattr(dist, name, function)


class _Watched(ChannelLoss):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        with _Counting() as counting:
            super().on_train_batch_end(*args)
        self.seen.append(counting.calls)


def _collectives() -> list[list[list[str]]]:
    found = []
    for average_over in ("step", "interval"):
        channel = _Watched(source_names=NAMES, every_n_steps=2, average_over=average_over)
        _ddp([BATCHES[:4], BATCHES[1:]], channel)
        found.append(channel.seen)
    return found


def test_one_all_reduce_for_a_log_and_none_without() -> None:
    for found in run_ranks(_collectives, 2):
        assert found == [[[], ["all_reduce"], [], ["all_reduce"]]] * 2


PADDED = [(seed, (seed % 2, 0, 1)) for seed in range(4)]  # two steps of two ranks: seed, and the source of each row


class _Sharded(Bare):
    """Its own loss alone; FSDP2 as one writes it for Lightning's strategy."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.network.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def _hooked_fit(kind: str) -> list[tuple[int, dict[str, float]]]:
    strategies: dict[str, Any] = {
        "ddp": lambda: "ddp",
        "FSDP2": lambda: ModelParallelStrategy(2, 1),
        "ours": LongContextFSDPStrategy,
    }
    settings = {"devices": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
    trainer = make_trainer([hooked()], strategy=strategies[kind](), **settings)
    rows = loader([batch(*one) for one in PADDED[_rank() :: 2]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*mean of means")  # which is what such a module has
        trainer.fit((_Sharded if kind == "FSDP2" else Bare)(model()), rows, rows)
    return channel_rows(trainer.logger)


@pytest.mark.parametrize("kind", ["ddp", "FSDP2", "ours"])
def test_a_module_that_returns_only_a_loss_is_watched_over_all_ranks(kind: str) -> None:
    found, _ = run_ranks(_hooked_fit, 2, kind)
    network = model()
    assert len(found) == 2
    for number, (_, logged) in enumerate(found):
        sums, counts = [0.0, 0.0], [0, 0]
        for data in (batch(*one) for one in PADDED[2 * number : 2 * number + 2]):
            for source, total, count in zip(data["dataset_id"].tolist(), *by_row(network, data), strict=True):
                sums[source] += total
                counts[source] += count
        for source, name in enumerate(("code", "web")):
            assert logged[f"channel_tokens/{name}"] == counts[source] > 0
            assert logged[f"channel_loss/{name}"] == pytest.approx(sums[source] / counts[source], rel=1e-6)
