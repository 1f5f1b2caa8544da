"""A tiny Mixture-of-Experts module in every kind of checkpointing, and a recount of its routing without any hook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_longctx.batch import PAD_SOURCE_ID
from lightning_longctx.loss import causal_lm_loss
from tests.callbacks.toy import VOCABULARY

HIDDEN, EXPERTS, CHOICES, LAYERS = 8, 5, 2, 3
CHECKPOINTING = ("none", "non-reentrant", "reentrant", "selective")


class Router(nn.Module):
    """Gives what routers of the field give: logits, weights, indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, indices = logits.softmax(-1).topk(CHOICES, dim=-1)
        return logits, weights, indices


class Experts(nn.Module):
    """Fused experts; takes the indices, as those of the field do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.einsum("th,ehd->ted", hidden, self.up)
        out = torch.where(out > 0, out, torch.zeros_like(out))  # saved by the selective policy, and used in counting
        return (out.gather(1, indices[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


class Block(nn.Module):
    """Router and experts, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, indices = self.gate(hidden)
        return hidden + self.experts(hidden, indices, weights)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = operation in (torch.ops.aten.mm.default, torch.ops.aten.where.self)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class MoEModule(LightningModule):
    """Language model of :class:`Block`. Does not learn (``lr`` 0), so that a recount sees the same weights.

    Args:
        checkpointing: one of :data:`CHECKPOINTING`.
        lr: learning rate.
    """

    def __init__(self, checkpointing: str = "none", lr: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        self.lr = lr

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)[0]
        for layer in self.layers:
            hidden = self._run(layer, hidden)
        return hidden[None]

    def _run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        if self.checkpointing == "none" or not self.training:
            return layer(hidden)
        if self.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        return checkpoint(layer, hidden, use_reentrant=self.checkpointing == "reentrant")

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        out = causal_lm_loss(self(batch["input_ids"]), self.head.weight, batch)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@torch.no_grad()
def recount(batches: Sequence[Any], module: MoEModule | None = None) -> tuple[list[list[int]], int]:
    """Tokens per expert of each layer by recomputing every decision, and the number of padding choices in all."""
    module = module or MoEModule()
    counts, padding = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64), 0
    for batch in batches:
        valid = batch["source_ids"][0] != PAD_SOURCE_ID
        hidden = module.embedding(batch["input_ids"])[0]
        for number, layer in enumerate(module.layers):
            chosen = (hidden @ layer.gate.weight.T).topk(CHOICES, dim=-1).indices
            counts[number] += one_hot(chosen, EXPERTS).sum(1)[valid].sum(0)
            padding += int((~valid).sum()) * CHOICES
            hidden = layer(hidden)
    return counts.tolist(), padding
