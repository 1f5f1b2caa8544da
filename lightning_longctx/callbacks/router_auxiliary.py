"""Whether the balancing loss of a Hugging Face model is dead: computed, logged, and without any gradient."""

from __future__ import annotations

from functools import partial

from torch import nn

__all__ = ["has_dead_auxiliary_loss"]


def has_dead_auxiliary_loss(model: nn.Module) -> bool:
    """Whether router logits are recorded under reentrant checkpointing, whose first forward keeps no graph.

    Args:
        model: any module; only Hugging Face ones can be told.
    """
    asks = any(
        getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
        for config in (getattr(module, "config", None) for module in model.modules())
    )
    return asks and any(_is_reentrant(module) for module in model.modules())


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    enabled = bool(getattr(module, "gradient_checkpointing", False))
    return enabled and isinstance(function, partial) and function.keywords.get("use_reentrant", False) is True
