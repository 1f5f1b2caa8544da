"""Attention over packed, sequence-parallel rows for Hugging Face models, under the name ``longctx``.

It goes in through transformers' own ``AttentionInterface``: no model code is touched, and a model takes it by
``attn_implementation="longctx"``. Document bounds reach it as the keyword ``packed_sequence`` of the model's forward.
Whatever the attention core does not compute (windows, sinks, caps, dropout, masks) is refused here, because a model
that trains without it would look fine and be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.strategies.ulysses import ulysses_attention

require_transformers()

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

__all__ = ["ATTENTION_NAME", "AttentionProbe", "longctx_attention", "longctx_mask", "register_attention"]

#: The value of ``attn_implementation``.
ATTENTION_NAME = "longctx"

# Arguments that change what attention computes, with what to do about each. Models pass None where they do not use
# them.
_REFUSED = {
    "sliding_window": "Write `config_overrides: {sliding_window: null}` to train with full attention.",
    "s_aux": "Attention sinks are not implemented: take another model.",
    "sinks": "Attention sinks are not implemented: take another model.",
    "softcap": "Write `config_overrides: {attn_logit_softcapping: null}`, or take another model.",
    "position_bias": "Biases on attention scores are not implemented: take a model with rotary positions.",
    "head_mask": "Head masks are not implemented: leave it out.",
    "indices": "Sparse attention is not implemented: take a model with full attention.",
    "block_indices": "Sparse attention is not implemented: take a model with full attention.",
}


@dataclass
class AttentionProbe:
    """Stands in for ``packed_sequence`` at set-up: attention is recorded and gives zeros instead of being computed.

    With it a forward on a few tokens shows which layers call our attention, without any other rank taking part.

    Attributes:
        calls: the class name of each module that called, in order.
    """

    calls: list[str] = field(default_factory=list)


def longctx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_sequence: PackedSequence | AttentionProbe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of the whole row, in the signature of transformers' attention functions.

    Args:
        module: the attention layer that calls.
        query: ``[1, H, T/S, D]``, local.
        key: ``[1, Hkv, T/S, D]``, local.
        value: ``[1, Hkv, T/S, Dv]``, local.
        attention_mask: must be None; bounds come with ``packed_sequence``.
        scaling: factor of the scores. None: ``D ** -0.5``.
        dropout: must be 0: no core here drops attention weights, and ranks would need the same random numbers.
        packed_sequence: document bounds of the whole row, from ``model_inputs(batch)``.
        kwargs: what else a model passes on. Arguments that change the result are refused unless None.

    Returns:
        The output ``[1, T/S, H, Dv]``, local, and None for the weights.

    Raises:
        ConfigurationError: no ``packed_sequence``, or an argument that the core does not implement.
    """
    name = type(module).__name__
    if packed_sequence is None:
        _refuse(
            name, "needs the keyword `packed_sequence`", "a call without it", "Call `model(**model_inputs(batch))`."
        )
    if attention_mask is not None:
        _refuse(
            name, "takes no attention mask", "one", "Leave `attention_mask` out: packed rows have no padding to mask."
        )
    if dropout:
        _refuse(name, "takes no attention dropout", dropout, "Write `config_overrides: {attention_dropout: 0.0}`.")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        _refuse(name, "must be causal", "is_causal=False", "Take a causal language model.")
    for argument, fix in _REFUSED.items():
        if kwargs.get(argument) is not None:
            got = kwargs[argument]
            shown = f"a tensor {list(got.shape)}" if isinstance(got, Tensor) else got
            _refuse(name, f"takes no `{argument}`", shown, fix)
    if isinstance(packed_sequence, AttentionProbe):
        packed_sequence.calls.append(name)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    out = ulysses_attention(query, key, value, packed_sequence, scale=scaling)
    return out.transpose(1, 2).contiguous(), None  # [1, H, T/S, Dv] -> [1, T/S, H, Dv]


def longctx_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask of the attention ``longctx``: none, since the document bounds say it all.

    Args:
        attention_mask: the padding mask a caller gave to the model; must be None.
        kwargs: sizes and mask functions, unused.

    Raises:
        ConfigurationError: a padding mask. It would be ignored, and padding attended to.
    """
    if attention_mask is not None:
        fix = "Pack the rows: `model(**model_inputs(batch))`, without `attention_mask`."
        raise ConfigurationError(
            "attention_mask", "must be absent with attention `longctx`", list(attention_mask.shape), fix
        )


def register_attention() -> None:
    """Register attention and mask under :data:`ATTENTION_NAME`. Importing this module does it; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, longctx_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, longctx_mask)


def _refuse(layer: str, rule: str, got: object, fix: str) -> NoReturn:
    raise ConfigurationError(f"{layer} with attention `{ATTENTION_NAME}`", rule, got, fix)


register_attention()
