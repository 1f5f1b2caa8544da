"""A Hugging Face model as transformers computes it, to compare ours with: eager attention, one document at a time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID, PackedBatch
from lightning_longctx.integrations.router_loss import RouterLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PlainTwin"]


class PlainTwin(nn.Module):
    """The same weights, none of our parts in between: eager attention, experts one by one, plain cross entropy.

    Args:
        model: with attention ``longctx``; it is left alone.
        router_loss: whose strength the load-balancing loss has; None for none.
    """

    def __init__(self, model: PreTrainedModel, router_loss: RouterLoss | None) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)  # it is told the attention of the twin
        twin = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
        twin.load_state_dict(model.state_dict())
        if hasattr(twin, "set_experts_implementation") and twin._can_set_experts_implementation():
            twin.set_experts_implementation("eager")
        self.model = twin
        self._router_loss = router_loss

    def row_loss(self, row: PackedBatch) -> tuple[Tensor, Tensor]:
        """Add up the documents of a whole row.

        Args:
            row: a whole packed batch.

        Returns:
            The sum of its token losses and of its load-balancing loss times its targets, with the graph; and the loss
            of each token ``[T]``, detached.
        """
        options = {} if self._router_loss is None else {"output_router_logits": True}
        losses, routed = [], []
        bounds = row["cu_seqlens"].tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            part = slice(start, end)
            out = self.model(input_ids=row["input_ids"][:, part], use_cache=False, **options)
            labels = row["shift_labels"][0, part]
            losses.append(cross_entropy(out.logits[0].float(), labels, ignore_index=IGNORE_INDEX, reduction="none"))
            if self._router_loss is not None and int(row["source_ids"][0, start]) != PAD_SOURCE_ID:
                routed.append(out.router_logits)
        per_token = torch.cat(losses)
        total = per_token.sum()
        if self._router_loss is not None:
            total = total + self._balance(routed, int((row["shift_labels"] != IGNORE_INDEX).sum()))
        return total, per_token.detach()

    def _balance(self, routed: list[tuple[Tensor, ...]], targets: int) -> Tensor:
        assert self._router_loss is not None
        layers = [torch.cat(parts).float() for parts in zip(*routed, strict=True)]  # of each layer: [tokens, E]
        weights = torch.cat(layers).softmax(-1)  # [layers x tokens, E]
        chosen = nn.functional.one_hot(weights.topk(self._router_loss.top_k).indices, self._router_loss.experts)
        balance: Tensor = self._router_loss.experts * (chosen.sum(1).float().mean(0) * weights.mean(0)).sum()
        return balance * (self._router_loss.coefficient * targets)
