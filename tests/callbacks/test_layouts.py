"""``TrainingMetrics`` under ``LongContextFSDPStrategy``: the same numbers for each cut of the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_longctx import LongContextFSDPStrategy, MaxTokens, TrainingMetrics
from tests.callbacks.toy import make_trainer
from tests.helpers.pool import run_ranks
from tests.strategies.own_model import OwnModule

KEYS = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/target_tokens",
    "train/source_tokens",
    "data/source_fill",
    "val/loss",
)


def _logged(world: int, sp: int, accumulate: int) -> dict[str, list[float]]:
    trainer = make_trainer(
        [TrainingMetrics()],
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp),
        accumulate_grad_batches=accumulate,
        max_steps=2,
        val_check_interval=accumulate,
        num_sanity_val_steps=1,
    )
    module = OwnModule(rows=8)
    module.attention_width = 32
    trainer.fit(module)
    logged = {key: trainer.logger.column(key) for key in KEYS}
    # Without the clock: operations of a token, which depend on the documents of the step.
    speeds = [trainer.logger.column(f"train/{name}") for name in ("tflops_per_device", "tokens_per_s_per_device")]
    logged["operations"] = [tflops / tokens for tflops, tokens in zip(*speeds, strict=True)]
    return logged


@pytest.mark.distributed
def test_sequence_parallel_and_data_parallel_log_the_same() -> None:
    # Steps of two rows, validated on eight: by one process, by two with a row each, by two with half a row each.
    (alone,) = run_ranks(_logged, 1, 1, 1, 2)
    data_parallel = run_ranks(_logged, 2, 2, 1, 1)[0]
    sequence_parallel = run_ranks(_logged, 2, 2, 2, 2)[0]
    assert len(alone["train/loss"]) == len(alone["train/grad_norm"]) == 2
    assert alone["train/target_tokens"][1] > alone["train/target_tokens"][0] > 0
    assert alone["operations"][0] != alone["operations"][1]  # other documents
    for key in alone:
        assert data_parallel[key] == pytest.approx(alone[key], rel=1e-5), key
        assert sequence_parallel[key] == pytest.approx(alone[key], rel=1e-5), key
    # Counts are not only close.
    assert (
        alone["train/target_tokens"] == data_parallel["train/target_tokens"] == sequence_parallel["train/target_tokens"]
    )


def _stopped(world: int, sp: int, accumulate: int, folder: str, resumed: bool) -> dict[str, Any]:
    """Train to a number of targets; a resumed run starts from another layout's checkpoint."""
    limit = MaxTokens(target=400 if resumed else 200)
    trainer = make_trainer(
        [limit, TrainingMetrics()],
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp),
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        max_epochs=-1,
    )
    path = f"{folder}/half.ckpt"
    trainer.fit(OwnModule(rows=8), ckpt_path=path if resumed else None)
    if not resumed and sp == 4:
        trainer.save_checkpoint(path)
    return {
        "step": trainer.global_step,
        "seen": tuple(limit.seen),
        "logged": trainer.logger.column("train/target_tokens"),
    }


@pytest.mark.distributed
def test_max_tokens_stops_each_layout_at_the_same_step_also_after_a_resume(tmp_path: Path) -> None:
    # Steps of four rows, over one epoch of eight and then the next.
    layouts = [(1, 1, 4), (2, 2, 4), (4, 2, 2), (4, 4, 4)]
    first = [run_ranks(_stopped, world, world, sp, count, str(tmp_path), False) for world, sp, count in layouts]
    assert [rank for ranks in first for rank in ranks] == [first[0][0]] * sum(world for world, _, _ in layouts)
    assert first[0][0]["seen"][1] >= 200 > first[0][0]["logged"][-2]
    # The checkpoint is of four ranks that share a row.
    others = [(2, 1, 2), (4, 1, 1)]
    second = [run_ranks(_stopped, world, world, sp, count, str(tmp_path), True) for world, sp, count in others]
    assert [rank for ranks in second for rank in ranks] == [second[0][0]] * 6
    assert second[0][0]["seen"][1] >= 400 > second[0][0]["logged"][-2]
