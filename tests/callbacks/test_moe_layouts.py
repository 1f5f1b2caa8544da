"""Expert load on several processes equals that of one: DDP, a shared row, our strategy with a Hugging Face model."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

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


class _Recount(Callback):
    """Every decision once more, from the logits of the first forwards: top-k of the tokens that are not padding."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self._valid: Tensor | None = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for path, part in module.named_modules():
            if path.endswith("mlp.gate"):
                part.register_forward_hook(partial(self._add, path))

    def _add(self, path: str, gate: Any, args: Any, output: Any) -> None:
        if self._valid is not None:
            chosen = output[0].detach().float().topk(gate.top_k, dim=-1).indices[self._valid]
            found = torch.bincount(chosen.flatten(), minlength=output[0].shape[-1])
            self.counts[path] = self.counts.get(path, torch.zeros_like(found)) + found

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._valid = batch["source_ids"].flatten() != -1

    def on_before_backward(self, *args: Any) -> None:
        self._valid = None  # what runs from here on is a repetition


def _ours(
    world: int, sp: int, accumulate: int, directory: str, checkpointing: Any = "none"
) -> tuple[list[list[int]], dict[str, float], list[list[int]]]:
    heatmap, recounted = MoERouterHeatmap(100), _Recount()
    # One document a row, so that any layout takes the same rows, in groups of two rows a step.
    texts = [{"text": f"document {number} says " + "word " * (4 + number % 5)} for number in range(8)]
    data = DynamicBatchingDataModule(
        {"a": texts}, max_seq_len=64, packing={"dynamic": False, "pad_to_multiple_of": 8}, loading={"shuffle": False}
    )
    trainer = make_trainer(
        [heatmap, recounted],
        default_root_dir=directory,
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp, activation_checkpointing=checkpointing),
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )
    # Without learning the counts of a layout depend on nothing but its tokens.
    trainer.fit(CausalLMModule(config="tiny-qwen3-moe", optimizer={"lr": 1e-12}, init_seed=1), datamodule=data)
    assert heatmap.latest is not None
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("moe/")}
    own = [counts.tolist() for counts in recounted.counts.values()]
    return [counts.tolist() for counts in heatmap.latest.tokens], metrics, own


def test_ddp_and_a_shared_row_count_what_one_process_counts(tmp_path: Path) -> None:
    expected, _ = recount(BATCHES)
    assert run_ranks(_ddp, 2, 2, str(tmp_path / "ddp")) == [expected] * 2
    assert run_ranks(_sliced, 2, 2, str(tmp_path / "sliced")) == [expected] * 2


def _sum(counts: list[list[list[int]]]) -> list[list[int]]:
    """Of all ranks."""
    return torch.tensor(counts).sum(0).tolist()


def test_every_layout_of_our_strategy_counts_the_same(tmp_path: Path) -> None:
    (alone,) = run_ranks(_ours, 1, 1, 1, 2, str(tmp_path / "one"))
    assert sum(map(sum, alone[0])) > 0
    assert alone[0] == alone[2]
    assert alone[1]["moe/padding_share"] > 0
    for world, sp, accumulate in ((2, 1, 1), (2, 2, 2), (4, 2, 1)):
        directory = tmp_path / f"{world}-{sp}"
        results = run_ranks(_ours, world, world, sp, accumulate, str(directory))
        for counts, metrics, _ in results:
            assert counts == alone[0]
            assert metrics == pytest.approx(alone[1])
        assert _sum([own for _, _, own in results]) == alone[0]
        # Only one rank writes.
        with next(directory.rglob("tokens_per_expert.csv")).open() as file:
            assert sum(int(row["tokens"]) for row in csv.DictReader(file)) == sum(map(sum, alone[0]))


@pytest.mark.parametrize("checkpointing", ["full", "every_n", "selective"])
@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 1), (2, 2), (4, 2)], ids=["one", "dp 2", "sp 2", "dp 2 sp 2"])
def test_checkpointing_in_every_layout_counts_each_decision_once(
    world: int, sp: int, checkpointing: str, tmp_path: Path
) -> None:
    for accumulate in (1, 2):
        results = run_ranks(_ours, world, world, sp, accumulate, str(tmp_path / str(accumulate)), checkpointing)
        expected = _sum([own for _, _, own in results])
        assert sum(map(sum, expected)) > 0
        for counts, metrics, _ in results:
            assert counts == expected
            assert metrics["moe/padding_share"] > 0


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
