"""Offload and tiles in a run of the strategy: the report, logged keys, refusals, and the page that lists them."""

from __future__ import annotations

import logging
import re

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_longctx import LongContextFSDPStrategy, TrainingMetrics
from tests.contracts.source import ROOT
from tests.helpers.pool import run_ranks
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
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=LongContextFSDPStrategy(**options),
        max_steps=3,
        callbacks=[TrainingMetrics()],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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
