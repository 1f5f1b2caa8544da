"""Floating-point operations of training a model, from its parameters and the lengths of its documents.

Counted is what the mathematics needs, not what a run spends: recomputed activations and padding are no progress. A
matrix of n parameters takes 2n operations a token forward and 4n backward (2n where it is frozen: the gradient of its
input alone). Causal attention over a document of L tokens takes 2 x L^2 x width operations a layer forward, half of
the full square, and twice that backward; width is query heads x head dimension. Counting by parameters is that of
PaLM (arXiv 2204.02311, appendix B), whose attention term is the full square of one constant length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["ModelFlops", "model_flops"]

# Names under which configurations hold the number of routed experts, and of those that a token takes.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward and backward, as a linear function of what a batch holds.

    Args:
        per_token: of the matrices, for each token.
        per_squared_length: of causal attention, for each document, times its squared length.

    Example:
        >>> ModelFlops(per_token=60.0, per_squared_length=6.0).of(tokens=10, squares=52)
        912.0
    """

    per_token: float
    per_squared_length: float

    def of(self, tokens: float, squares: float) -> float:
        """Operations for ``tokens`` tokens whose documents' squared lengths sum to ``squares``."""
        return self.per_token * tokens + self.per_squared_length * squares


def model_flops(module: nn.Module) -> ModelFlops | None:
    """Count for a module, sharded or whole.

    Args:
        module: all of its matrices are taken to be used once for each token, except lookup tables (``nn.Embedding``
            that shares its weight with no other layer) and the routed experts that a token does not take: parameters
            below a name ``experts``, scaled by experts a token / experts. The size of attention is that of the first
            ``config`` found (layers x query heads x head dimension, as Hugging Face names them, all of them full causal
            attention), or the module's own ``attention_width``, an int: the sum over its layers of heads x head
            dimension.

    Returns:
        None where nothing tells the size of attention, without which numbers at long context would be wrong.

    Example:
        >>> module = nn.Linear(4, 8)
        >>> module.attention_width = 16
        >>> model_flops(module)
        ModelFlops(per_token=192.0, per_squared_length=96.0)
    """
    config = _find_config(module)
    width = getattr(module, "attention_width", None)
    if width is None:
        width = None if config is None else _attention_width(config)
    if width is None:
        return None
    tables, share = _lookup_tables(module), _active_share(config)
    per_token = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in tables:
            active = share if "experts" in name.split(".") else 1.0
            per_token += (6 if parameter.requires_grad else 4) * active * parameter.numel()
    return ModelFlops(per_token, float(_FORWARD_AND_BACKWARD * 2 * width))


def _find_config(module: nn.Module) -> Any:
    for part in module.modules():
        config = getattr(part, "config", None)
        config = getattr(config, "text_config", config)
        if isinstance(getattr(config, "num_hidden_layers", None), int):
            return config
    return None


def _attention_width(config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    latent = [getattr(config, name, None) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    # Latent attention has queries and keys that are wider than values; elsewhere all have one width.
    plain = getattr(config, "head_dim", None) or config.hidden_size // heads
    dim = sum(latent) / 2 if all(latent) else plain
    return int(config.num_hidden_layers * heads * dim)


def _active_share(config: Any) -> float:
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
    active = next((getattr(config, name) for name in _ACTIVE if getattr(config, name, None)), None)
    return active / experts if experts and active else 1.0


def _lookup_tables(module: nn.Module) -> set[int]:
    """Weights that are looked up and never multiplied: those of embeddings, unless an output layer shares them."""
    owners = [(part, parameter) for part in module.modules() for parameter in part.parameters(recurse=False)]
    multiplied = {id(parameter) for part, parameter in owners if not isinstance(part, nn.Embedding)}
    looked_up = {id(parameter) for part, parameter in owners if isinstance(part, nn.Embedding)}
    return looked_up - multiplied
