"""Offload and tiles in a run of the strategy: the report, logged keys, refusals, and the page that lists them."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy, TrainingMetrics
from tests.contracts.source import ROOT
from tests.helpers.pool import RankError, run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.strategies.own_model import OwnModule

pytestmark = pytest.mark.distributed

BASE = {"mode": "async", "min_tensor_mib": 0}


class _Memory(CSVLogger):
    """Keeps what is logged."""

    def log_metrics(self, metrics, step=None):
        self.rows = [*getattr(self, "rows", []), dict(metrics)]

    def save(self):
        pass


def _fit(options, validate=False):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    logger = _Memory("logs")
    trainer = quiet_trainer(
        strategy=LongContextFSDPStrategy(**options),
        max_steps=3,
        callbacks=[TrainingMetrics()],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    module = OwnModule()
    trainer.fit(module)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(handler)
    rows = [{key: value for key, value in row.items() if key.startswith("offload/")} for row in logger.rows]
    return messages, [row for row in rows if row], trainer.strategy._offload.host_bytes[:1]


def test_report_and_keys_of_a_run():
    (found,) = run_ranks(_fit, 1, {"activation_offload": {**BASE, "level": "all", "keep_last_blocks": 0}})
    messages, rows, (left,) = found
    reports = [message for message in messages if message.startswith("activation offload")]
    assert len(reports) == 1
    assert "out" in reports[0]
    assert "first step" in reports[0]
    assert left == 0
    assert [row["offload/gib_out"] for row in rows] == sorted(row["offload/gib_out"] for row in rows)
    assert rows[0]["offload/gib_out"] > 0
    page = (ROOT / "docs" / "activation_offload.md").read_text()
    assert set(re.findall(r"^\| `(offload/[^`]+)` \|", page, flags=re.MULTILINE)) == rows[0].keys()


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({"mode": "sync", "level": "all"}, "lower `min_tensor_mib`"),
        ({"mode": "sync"}, "add `activation_checkpointing`"),
        ({**BASE, "level": "all", "keep_last_blocks": 5}, "covers all chosen modules"),
        ({**BASE, "modules": ["DecoderLayer"]}, "must name submodules"),
        ({**BASE, "device_limit_gib": 1, "level": "all"}, "fits into `device_limit_gib`"),
    ],
    ids=str,
)
def test_a_run_that_moves_nothing_ends_with_the_reason(offload, words):
    with pytest.raises(Exception, match=re.escape(words)):
        run_ranks(_fit, 1, {"activation_offload": offload})


class _ShortOnOneRank(OwnModule):
    """Rank 1 gets rows of one short document."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def train_dataloader(self):
        length = self.lengths[self.trainer.global_rank]
        ids = torch.arange(length)[None] % 7
        row = {
            "input_ids": ids,
            "shift_labels": torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1),
            "position_ids": torch.arange(length)[None],
            "source_ids": torch.zeros_like(ids),
            "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
            "max_seqlen": length,
            "document_keys": torch.zeros(1, 2, dtype=torch.int64),
            "loss_divisor": 64,
        }
        return torch.utils.data.DataLoader([row] * 4, batch_size=None, sampler=range(4))

    def val_dataloader(self):
        return []


def _fit_short(lengths):
    trainer = quiet_trainer(
        devices=2,
        strategy=LongContextFSDPStrategy(
            activation_offload={"mode": "sync", "level": "all", "keep_last_blocks": 0, "min_tensor_mib": 0.002}
        ),
        max_steps=3,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(_ShortOnOneRank(lengths))
    except ConfigurationError as error:
        return str(error)
    return trainer.global_step, trainer.strategy._offload.counters.bytes_out > 0


def test_a_rank_whose_row_is_too_short_does_not_end_alone():
    """Alone it would leave the others waiting for it."""
    assert run_ranks(_fit_short, 2, (64, 8)) == [(3, True), (3, False)]
    assert all("lower `min_tensor_mib`" in text for text in run_ranks(_fit_short, 2, (8, 8)))


def _fit_twice(second):
    module, first = OwnModule(), {"activation_offload": {**BASE, "level": "all", "keep_last_blocks": 0}}
    moved = []
    for options in (first, second or first):
        trainer = quiet_trainer(
            strategy=LongContextFSDPStrategy(**options),
            max_steps=2,
            limit_val_batches=0,
        )
        trainer.fit(module)
        moved.append(trainer.strategy.step_metrics()["offload/gib_out"])
    return moved


def test_a_second_strategy_goes_on_with_what_is_built_into_the_module():
    ((first, second),) = run_ranks(_fit_twice, 1, None)
    assert second == 2 * first > 0


@pytest.mark.parametrize("second", [{"activation_checkpointing": "full"}, {"activation_offload": "none"}], ids=str)
def test_a_second_strategy_whose_settings_would_do_nothing_is_refused(second):
    with pytest.raises(RankError) as raised:
        run_ranks(_fit_twice, 1, second)
    (cause,) = raised.value.causes.values()
    assert isinstance(cause, ConfigurationError)
    assert "must stay as it was when the module was sharded" in str(cause)
