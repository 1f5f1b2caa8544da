"""The name that a misspelt one stands for, and none where a guess would only confuse."""

from __future__ import annotations

import pytest

from lightning_longctx.cli import COMMANDS
from lightning_longctx.cli.tools import TOOLS
from lightning_longctx.spelling import nearest

COMMAND_LINE = [*COMMANDS, *TOOLS]
PLUG_INS = ["AsyncDCPCheckpoint", "ChannelLoss", "MaxTokens", "MoERouterHeatmap", "TrainingMetrics"]


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("max_seqlen", ["max_seq_len", "tokenizer"], "max_seq_len"),
        ("SP_SIZE", ["sequence_parallel_size", "blocks"], "sequence_parallel_size"),
        ("zzz", ["max_seq_len"], None),
        ("x", [], None),
        ("chek", COMMAND_LINE, "check"),
        ("checkpoints", COMMAND_LINE, "checkpoint"),
        ("foo", COMMAND_LINE, None),  # "doctor" has 0.44
        ("trian", COMMAND_LINE, None),  # "plan" has 0.44
        ("chanelloss", PLUG_INS, "ChannelLoss"),
        ("LossByChannel", PLUG_INS, "ChannelLoss"),
        ("Checkpointer", PLUG_INS, "AsyncDCPCheckpoint"),
        ("DCPCheckpoint", PLUG_INS, "AsyncDCPCheckpoint"),
        ("RouterHeatMap", PLUG_INS, "MoERouterHeatmap"),
    ],
)
def test_nearest(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found
