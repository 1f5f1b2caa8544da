"""From counts of tokens per expert to the numbers that tell whether a router is fair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RouterLoad", "violations"]


def violations(counts: Tensor) -> Tensor:
    """How far each expert is from its fair share: ``D = E * P - 1``, with share ``P`` of ``E`` experts.

    0 is fair, -1 an expert without any token, ``E - 1`` an expert that takes all; the maximum over experts is MaxVio of
    https://arxiv.org/abs/2408.15664.

    Args:
        counts: int64 ``[E]``, tokens per expert.

    Returns:
        float64 ``[E]``; NaN where nothing was counted.

    Example:
        >>> violations(torch.tensor([3, 1, 0, 0])).tolist()
        [2.0, 0.0, -1.0, -1.0]
    """
    values = counts.double()
    return values * (len(counts) / values.sum()) - 1 if bool(counts.sum()) else torch.full_like(values, math.nan)


@dataclass(frozen=True)
class RouterLoad:
    """What one window counted, on the host.

    Attributes:
        first_step: first step counted, from 1.
        last_step: last step counted.
        paths: of the layers.
        labels: of the layers, in keys: ``layer_07``.
        tokens: for each layer int64 ``[E]``, tokens per expert; all zero for a layer that saw nothing.
        padding: choices of padding tokens, all layers.
        dropped: choices beyond an expert's capacity, all layers.
    """

    first_step: int
    last_step: int
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    tokens: tuple[Tensor, ...]
    padding: int
    dropped: int

    @property
    def is_empty(self) -> bool:
        """Whether no layer saw any token."""
        return not any(bool(counts.sum()) for counts in self.tokens)

    @property
    def caption(self) -> str:
        """The steps, for people."""
        return f"steps {self.first_step}-{self.last_step}"

    def metrics(self, full: bool) -> dict[str, float]:
        """Numbers by key.

        Args:
            full: whether each layer has keys of its own, besides those over all layers.
        """
        layers = {
            label: _of_layer(counts)
            for label, counts in zip(self.labels, self.tokens, strict=True)
            if bool(counts.sum())
        }
        found: dict[str, float] = {}
        for name, worst in _WORST.items():
            values = [layer[name] for layer in layers.values()]
            found[f"moe/{name}"] = worst(values)
            found[f"moe/{name}_mean"] = sum(values) / len(values)
            if full:
                found |= {f"moe/{name}/{label}": layer[name] for label, layer in layers.items()}
        choices = sum(int(counts.sum()) for counts in self.tokens)
        found["moe/padding_share"] = self.padding / (choices + self.dropped + self.padding)
        found["moe/dropped_share"] = self.dropped / (choices + self.dropped)
        return found


# Of each number, which value over the layers is the worst.
_WORST = {
    "max_vio": max,
    "min_vio": min,
    "avg_vio": max,
    "variation": max,
    "entropy": min,
    "dead_experts": max,
    "tokens_max": max,
    "tokens_min": min,
}


def _of_layer(counts: Tensor) -> dict[str, float]:
    difference = violations(counts)
    shares = counts.double() / counts.sum()
    entropy = float(torch.special.entr(shares).sum()) / math.log(len(counts))
    return {
        "max_vio": float(difference.max()),
        "min_vio": float(difference.min()),
        "avg_vio": float(difference.abs().mean()),
        # Standard deviation over mean: D has mean 0, so its root mean square.
        "variation": float(difference.square().mean().sqrt()),
        "entropy": entropy,
        "dead_experts": float((counts == 0).sum()),
        "tokens_max": float(counts.max()),
        "tokens_min": float(counts.min()),
    }
