"""The pieces of a fit: fresh copies with the same weights, the strategy's own settings, whole rows by replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_longctx import LongContextFSDPStrategy
from lightning_longctx.tools.doctor.fits import Rows, fresh, strategy_like
from tests.strategies.own_model import OwnModule


class Late(OwnModule):
    """Makes a layer in ``configure_model``, from whatever the global generator gives; has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None
        self.dropout = nn.Dropout(0.5)

    def configure_model(self) -> None:
        if self.late is None:
            self.late = nn.Linear(4, 4)


def test_fresh_modules_are_equal_and_leave_the_template_alone() -> None:
    template = Late()
    torch.manual_seed(5)
    first = fresh(template)
    torch.manual_seed(6)
    second = fresh(template, rate=0.25)
    assert template.late is None
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.dropout.p == 0.0
    assert template.dropout.p == 0.5
    optimizer = second.configure_optimizers()
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("SGD", 0.25)


def test_a_strategy_keeps_its_settings_and_gets_other_sizes() -> None:
    template = LongContextFSDPStrategy(
        sequence_parallel_size=8, sharding={"blocks": ["Block"], "reshard_after_forward": False}
    )
    strategy = strategy_like(template, 2)
    assert (strategy.sequence_parallel_size, strategy.sharding.blocks) == (2, ["Block"])
    assert not strategy.sharding.reshard_after_forward
    assert template.sequence_parallel_size == 8
    assert strategy_like("ddp", 4).sequence_parallel_size == 4
    assert strategy_like(None, 1).sharding.blocks is None


def test_rows_have_no_length() -> None:
    rows = Rows([{"a": 1}, {"a": 2}])  # type: ignore[list-item]
    assert [row["a"] for row in rows] == [1, 2]
    assert not hasattr(rows, "__len__")
