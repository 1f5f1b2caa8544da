"""Expert load on several processes equals that of one: DDP, a shared row, our strategy with a Hugging Face model."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_longctx import CausalLMModule, DynamicBatchingDataModule, LongContextFSDPStrategy
from lightning_longctx.callbacks import MoERouterHeatmap
from lightning_longctx.errors import ConfigurationError
from tests.callbacks.moe import MoEModule, recount
from tests.callbacks.test_distributed import _SlicedRow
from tests.callbacks.toy import loader, make_batch, make_trainer
from tests.helpers.pool import RankError, run_ranks

pytestmark = pytest.mark.distributed

BATCHES = [make_batch(seed, 5, padding=seed % 5) for seed in range(8)]


def _ddp(world: int, directory: str) -> list[list[int]]:
    rank = int(os.environ["RANK"])
    heatmap = MoERouterHeatmap(100)
    trainer = make_trainer([heatmap], default_root_dir=directory, devices=world, strategy="ddp", limit_val_batches=0)
    trainer.fit(MoEModule(), loader(BATCHES[rank::world]), loader(BATCHES[:1]))
    assert heatmap.latest is not None
    return [counts.tolist() for counts in heatmap.latest.tokens]


def _sliced(world: int, directory: str) -> list[list[int]]:
    heatmap = MoERouterHeatmap(100)
    strategy = _SlicedRow(process_group_backend="gloo")
    trainer = make_trainer([heatmap], default_root_dir=directory, devices=world, strategy=strategy, limit_val_batches=0)
    trainer.fit(MoEModule(), loader(BATCHES), loader(BATCHES[:1]))
    assert heatmap.latest is not None
    return [counts.tolist() for counts in heatmap.latest.tokens]


def _ours(world: int, sp: int, accumulate: int, directory: str) -> tuple[list[list[int]], dict[str, float]]:
    heatmap = MoERouterHeatmap(100)
    # One document a row, so that any layout takes the same rows, in groups of two rows a step.
    texts = [{"text": f"document {number} says " + "word " * (4 + number % 5)} for number in range(8)]
    data = DynamicBatchingDataModule(
        {"a": texts}, max_seq_len=64, packing={"dynamic": False, "pad_to_multiple_of": 8}, loading={"shuffle": False}
    )
    trainer = make_trainer(
        [heatmap],
        default_root_dir=directory,
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp),
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )
    # Without learning the counts of a layout depend on nothing but its tokens.
    trainer.fit(CausalLMModule(config="tiny-qwen3-moe", optimizer={"lr": 1e-12}, init_seed=1), datamodule=data)
    assert heatmap.latest is not None
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("moe/")}
    return [counts.tolist() for counts in heatmap.latest.tokens], metrics


def test_ddp_and_a_shared_row_count_what_one_process_counts(tmp_path: Path) -> None:
    expected, _ = recount(BATCHES)
    assert run_ranks(_ddp, 2, 2, str(tmp_path / "ddp")) == [expected] * 2
    assert run_ranks(_sliced, 2, 2, str(tmp_path / "sliced")) == [expected] * 2


def test_every_layout_of_our_strategy_counts_the_same(tmp_path: Path) -> None:
    (alone,) = run_ranks(_ours, 1, 1, 1, 2, str(tmp_path / "one"))
    assert sum(map(sum, alone[0])) > 0
    assert alone[1]["moe/padding_share"] > 0
    for world, sp, accumulate in ((2, 1, 1), (2, 2, 2), (4, 2, 1)):
        directory = tmp_path / f"{world}-{sp}"
        for counts, metrics in run_ranks(_ours, world, world, sp, accumulate, str(directory)):
            assert counts == alone[0]
            assert metrics == pytest.approx(alone[1])
        # Only one rank writes.
        with next(directory.rglob("tokens_per_expert.csv")).open() as file:
            assert sum(int(row["tokens"]) for row in csv.DictReader(file)) == sum(map(sum, alone[0]))


def _starved(world: int, directory: str) -> list[list[int]]:
    """One rank pauses: it still enters the reduction."""
    heatmap = MoERouterHeatmap(2)
    if os.environ["RANK"] == "1":
        heatmap.pause()
    trainer = make_trainer([heatmap], default_root_dir=directory, devices=world, strategy="ddp", limit_val_batches=0)
    trainer.fit(MoEModule(), loader(BATCHES[:4]), loader(BATCHES[:1]))
    assert heatmap.latest is not None
    return [counts.tolist() for counts in heatmap.latest.tokens]


def test_a_rank_that_counted_nothing_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    assert run_ranks(_starved, 2, 2, str(tmp_path)) == [recount(BATCHES[2:4])[0]] * 2


class _Save(Callback):
    """A stock checkpoint after three steps."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "middle.ckpt")


def _until_the_checkpoint(world: int, directory: str) -> None:
    rank = int(os.environ["RANK"])
    settings: Any = {"strategy": "ddp", "devices": world, "limit_val_batches": 0, "max_steps": 3}
    trainer = make_trainer([MoERouterHeatmap(100), _Save()], default_root_dir=directory, **settings)
    trainer.fit(MoEModule(), loader(BATCHES[rank::world]), loader(BATCHES[:1]))


def _resumed(world: int, directory: str, saved: str) -> list[list[int]]:
    """Six rows are done; the last two follow."""
    heatmap, rank, rows = MoERouterHeatmap(100), int(os.environ["RANK"]), BATCHES[6:]
    settings: Any = {"strategy": "ddp", "devices": world, "limit_val_batches": 0, "max_steps": 3 + len(rows) // world}
    trainer = make_trainer([heatmap], default_root_dir=directory, max_epochs=2, **settings)
    trainer.fit(MoEModule(), loader(rows[rank::world]), loader(rows), ckpt_path=saved, weights_only=False)
    assert heatmap.latest is not None
    assert heatmap.latest.first_step == 1
    return [counts.tolist() for counts in heatmap.latest.tokens]


@pytest.mark.parametrize("world", [2, 1])
def test_a_window_goes_on_from_a_stock_checkpoint_on_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    run_ranks(_until_the_checkpoint, 2, 2, str(tmp_path / "a"))
    saved = str(tmp_path / "a" / "middle.ckpt")
    assert run_ranks(_resumed, world, world, str(tmp_path / "b"), saved) == [recount(BATCHES)[0]] * world


def _outside(world: int, directory: str) -> None:
    rank = int(os.environ["RANK"])
    wrong = MoERouterHeatmap(1, routers="layers.*.gate", extract=lambda module, output: output[2] + 5 + 10 * rank)
    trainer = make_trainer([wrong], default_root_dir=directory, devices=world, strategy="ddp", limit_val_batches=0)
    trainer.fit(MoEModule(), loader(BATCHES[rank::world]), loader(BATCHES[:1]))


def test_an_index_that_is_no_expert_is_an_error_of_all_ranks_with_its_value(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        run_ranks(_outside, 2, 2, str(tmp_path))
    errors = failed.value.causes
    assert sorted(errors) == [0, 1]
    assert all(isinstance(error, ConfigurationError) for error in errors.values())
    assert {str(error) for error in errors.values()} == {str(errors[0])}
    assert any(f"such as {value}." in str(errors[0]) for value in (18, 19))  # the largest of rank 1, not a sum of both
