"""The load-balancing loss of a mixture of experts over the tokens of a whole row, whoever holds them.

For E experts it is ``E * sum_e f_e * P_e``: the share of the row's tokens that chose expert e times its mean routing
probability (Switch Transformer, arXiv 2101.03961, equations 4 to 6; transformers takes both over all layers together).
A product of two means is no mean of products: computed on each shard and averaged it would be another loss. Here the
counts are summed over the ranks of the row; the loss is linear in the probabilities, so each rank adds its own part of
the sum and gradients need no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import PAD_SOURCE_ID, count_targets
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.attention import AttentionProbe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RouterLoss", "find_router_loss", "wants_router_loss"]

_PROBE_TOKENS = 16
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a row, weighted for the exact token mean.

    Args:
        experts: E.
        top_k: experts of a token.
        coefficient: its weight beside the language-model loss.
    """

    experts: int
    top_k: int
    coefficient: float

    def __call__(
        self, logits: Sequence[Tensor], batch: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Return this rank's part of the term, to add to ``loss`` and to return in ``extra_terms``.

        Over a step the parts make the mean of the rows' losses weighted by their targets, times ``coefficient``:
        ``weighted_term`` for a fact of the whole row. One all-reduce of E + 2 integers; padding is left out.

        Args:
            logits: of each layer, ``[T/S, E]``, with the graph.
            batch: the packed batch of the same shard.
            group: the ranks that share the row; None for one.
        """
        valid = batch["source_ids"].flatten() != PAD_SOURCE_ID
        counts, probabilities = self._sums(logits, valid)
        facts = torch.cat([counts, (valid.sum() * len(logits))[None], count_targets(batch)[None]])
        if group is not None:
            dist.all_reduce(facts, group=group)
        tokens = facts[-2].clamp(min=1).float()  # of the row, once for each layer
        chosen = facts[: self.experts].float() / tokens  # f_e of the row
        part: Tensor = self.experts * (chosen * probabilities).sum() / tokens
        share: Tensor = facts[-1] / batch["loss_divisor"]
        return self.coefficient * part * share

    def _sums(self, logits: Sequence[Tensor], valid: Tensor) -> tuple[Tensor, Tensor]:
        """Over this rank's valid tokens and all layers: how often each expert was chosen, and summed probabilities."""
        counts = torch.zeros(self.experts, dtype=torch.int64, device=valid.device)
        probabilities = torch.zeros(self.experts, device=valid.device)
        for layer in logits:
            weights = layer.float().softmax(dim=-1)
            chosen = weights.topk(self.top_k, dim=-1).indices  # [T/S, k]
            counts.scatter_add_(0, chosen.flatten(), valid.long().repeat_interleave(self.top_k))
            probabilities = probabilities + (weights * valid[:, None]).sum(0)
        return counts, probabilities


def wants_router_loss(config: Any, *given: Mapping[str, Any]) -> bool:
    """Whether the loss is asked for: by ``output_router_logits``, as in transformers, or by a coefficient of its own.

    Args:
        config: the final configuration.
        given: what the user wrote. A published configuration has a coefficient also where it is not used.
    """
    if getattr(config, "output_router_logits", False):
        return True
    return any(values.get("router_aux_loss_coef") and "output_router_logits" not in values for values in given)


def find_router_loss(model: PreTrainedModel) -> RouterLoss:
    """Return the router loss of a model, after comparing it with the model's own on a few tokens.

    Needs whole weights: call it before sharding. No other rank takes part.

    Args:
        model: a Hugging Face causal language model with attention ``longctx``.

    Raises:
        ConfigurationError: no experts or coefficient in the configuration, or a model whose own loss is another.
    """
    config: Any = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not experts or coefficient is None:
        fix = "Leave `output_router_logits` out, or take a mixture of experts."
        got = f"{type(model).__name__} without experts or coefficient"
        raise ConfigurationError("model.config.output_router_logits", "needs a router loss", got, fix)
    loss = RouterLoss(int(experts), int(config.num_experts_per_tok), float(coefficient))
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] * 7 % config.vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    with torch.no_grad():
        out = model(
            input_ids=tokens,
            position_ids=positions,
            packed_sequence=AttentionProbe(),
            use_cache=False,
            output_router_logits=True,
        )
    batch = {"source_ids": tokens * 0, "shift_labels": tokens, "loss_divisor": _PROBE_TOKENS}
    theirs = float(out.aux_loss) if getattr(out, "aux_loss", None) is not None else float("nan")
    ours = float(RouterLoss(loss.experts, loss.top_k, 1.0)(out.router_logits, batch)) if out.router_logits else 0.0
    if not abs(ours - theirs) <= _TOLERANCE * abs(theirs):
        fix = "Write `config_overrides: {output_router_logits: false}`: routing then trains by the main loss alone."
        got = f"{type(model).__name__}, whose loss is {theirs:.6g} where this suite computes {ours:.6g}"
        raise ConfigurationError("model", "must have the load-balancing loss of Switch Transformer", got, fix)
    return loss
