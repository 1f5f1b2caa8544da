"""A hook can tell the first forward from its repetition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_longctx import is_recomputing


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_told_from_the_first_forward(reentrant):
    layer, seen = nn.Linear(2, 2), []
    # before the layer: recompute stops early, at the last tensor that backward needs
    layer.register_forward_pre_hook(lambda *args: seen.append(is_recomputing()))
    x = torch.ones(1, 2, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=reentrant)
    out.sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()
