"""``TrainingMetrics`` under ``LongContextFSDPStrategy``: the same numbers for each cut of the same steps."""

from __future__ import annotations

import pytest

from lightning_longctx import LongContextFSDPStrategy, TrainingMetrics
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
    trainer.fit(OwnModule(rows=8))
    return {key: trainer.logger.column(key) for key in KEYS}


@pytest.mark.distributed
def test_sequence_parallel_and_data_parallel_log_the_same() -> None:
    # Steps of two rows, validated on eight: by one process, by two with a row each, by two with half a row each.
    (alone,) = run_ranks(_logged, 1, 1, 1, 2)
    data_parallel = run_ranks(_logged, 2, 2, 1, 1)[0]
    sequence_parallel = run_ranks(_logged, 2, 2, 2, 2)[0]
    assert len(alone["train/loss"]) == len(alone["train/grad_norm"]) == 2
    assert alone["train/target_tokens"][1] > alone["train/target_tokens"][0] > 0
    for key in KEYS:
        assert data_parallel[key] == pytest.approx(alone[key], rel=1e-5), key
        assert sequence_parallel[key] == pytest.approx(alone[key], rel=1e-5), key
    # Counts are not only close.
    assert (
        alone["train/target_tokens"] == data_parallel["train/target_tokens"] == sequence_parallel["train/target_tokens"]
    )
