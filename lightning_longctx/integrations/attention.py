"""Attention over packed, sequence-parallel rows for Hugging Face models, under the name ``longctx``.

It goes in through transformers' own ``AttentionInterface``: no model code is touched, and a model takes it by
``attn_implementation="longctx"``. Document bounds reach it as the keyword ``packed_sequence`` of the model's forward.
Sliding windows are computed. Whatever the attention cores do not compute (sinks, caps, dropout, masks, biases) is
refused here, because a model that trains without it would look fine and be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.strategies.attention import AUTO, CORES
from lightning_longctx.strategies.refusals import LAYER_TYPES
from lightning_longctx.strategies.ulysses import running_exchange, ulysses_attention, untraced

require_transformers()

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

__all__ = [
    "ATTENTION_NAME",
    "AttentionProbe",
    "attention_name",
    "is_longctx",
    "longctx_attention",
    "longctx_mask",
    "register_attention",
]

#: The value of ``attn_implementation`` with the fastest core that can.
ATTENTION_NAME = "longctx"

# Arguments that change what attention computes, with what to do about each. Models pass None where they do not use
# them.
_REFUSED = {
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
        windows: the sliding window that each of them asked for, None for full attention.
    """

    calls: list[str] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)


# Layers whose positions were right in their first call. Later calls are not looked at: that would wait for the device.
_positions_seen: WeakSet[nn.Module] = WeakSet()


def attention_name(core: str = AUTO) -> str:
    """Return the value of ``attn_implementation`` for a core: ``longctx``, ``longctx_documents`` ...

    Args:
        core: as ``ulysses_attention`` takes it.

    Raises:
        ConfigurationError: an unknown core.
    """
    if core not in (AUTO, *CORES):
        fix = "Correct the name."
        raise ConfigurationError("model.attention_core", f"must be one of {', '.join([AUTO, *CORES])}", core, fix)
    # transformers prepares masks of its own wherever a name has "flash" in it.
    return ATTENTION_NAME if core == AUTO else f"{ATTENTION_NAME}_{core.replace('flash_attn', 'fa')}"


def is_longctx(name: object) -> bool:
    """Whether ``name`` is an ``attn_implementation`` of this module."""
    return name in [attention_name(core) for core in (AUTO, *CORES)]


# Opaque to a compiled block, as the exchange inside it: what it checks is Python, and rows differ in their documents.
@untraced
def longctx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_sequence: PackedSequence | AttentionProbe | None = None,
    core: str = AUTO,
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
        core: as ``ulysses_attention`` takes it.
        kwargs: what else a model passes on. ``sliding_window`` is the number of tokens that a token sees, itself
            included. Other arguments that change the result are refused unless None. ``position_ids`` are compared with
            the document bounds in the first call of each layer.

    Returns:
        The output ``[1, T/S, H, Dv]``, local, and None for the weights.

    Raises:
        ConfigurationError: no ``packed_sequence``, positions that are not those of the documents, or an argument that
            the core does not implement, or a kind of layer that it does not.
    """
    name = type(module).__name__
    if packed_sequence is None:
        _refuse(
            name, "needs the keyword `packed_sequence`", "a call without it", "Call `model(**model_inputs(batch))`."
        )
    _check_arguments(module, attention_mask, dropout, kwargs)
    window: int | None = kwargs.get("sliding_window")
    if isinstance(packed_sequence, AttentionProbe):
        packed_sequence.calls.append(name)
        packed_sequence.windows.append(window)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    if module not in _positions_seen:
        _check_layer(module, window)
        _check_positions(name, kwargs.get("position_ids"), packed_sequence)
        _positions_seen.add(module)
    out = ulysses_attention(query, key, value, packed_sequence, scale=scaling, window=window, core=core)
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
    """Register attention and mask under their names, one a core. Importing this module does it; again is harmless."""
    for core in (AUTO, *CORES):
        attend = longctx_attention if core == AUTO else partial(longctx_attention, core=core)
        AttentionInterface.register(attention_name(core), attend)
        AttentionMaskInterface.register(attention_name(core), longctx_mask)


def _check_arguments(module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    name = type(module).__name__
    if mask is not None:
        fix = "Leave `attention_mask` out: packed rows have no padding to mask."
        _refuse(name, "takes no attention mask", "one", fix)
    if dropout:
        _refuse(name, "takes no attention dropout", dropout, "Write `config_overrides: {attention_dropout: 0.0}`.")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        _refuse(name, "must be causal", "is_causal=False", "Take a causal language model.")
    for argument, fix in _REFUSED.items():
        if others.get(argument) is not None:
            got = others[argument]
            shown = f"a tensor {list(got.shape)}" if isinstance(got, Tensor) else got
            _refuse(name, f"takes no `{argument}`", shown, fix)


def _check_layer(module: nn.Module, window: int | None) -> None:
    """Refuse a layer that restricts attention by its mask alone: with this attention there is none."""
    config = getattr(module, "config", None)
    kinds, place = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
    if not isinstance(place, int) or place >= len(kinds):
        return
    size = getattr(config, "sliding_window", None)
    if kinds[place] not in LAYER_TYPES:
        got = f"a layer of `{kinds[place]}`"
        _refuse(type(module).__name__, "must be full or sliding attention", got, "Take another model.")
    if kinds[place] == "sliding_attention" and size is not None and window is None:
        got = f"a window of {size} in the configuration and none in the call"
        _refuse(type(module).__name__, "must get its sliding window with the call", got, "Take another model.")


def _check_positions(name: str, positions: Tensor | None, packed: PackedSequence) -> None:
    """A model that is not given positions counts them from 0 on every shard and through all documents."""
    if positions is None or positions.dim() != 2:  # not passed on to attention, or several axes (images)
        return
    if isinstance(positions, FakeTensor):  # a simulation, which has no values to check
        return
    exchange = running_exchange()
    rank, group = (0, None) if exchange is None else (exchange.rank, exchange.group)
    bounds = packed.cu_seqlens.long()
    places = torch.arange(positions.shape[1], device=bounds.device) + rank * positions.shape[1]
    starts = bounds[torch.bucketize(places, bounds[1:-1], right=True)]
    wrong = (positions[0] != places - starts).nonzero()
    count = torch.tensor([wrong.numel()], device=positions.device)
    if group is not None:  # the first shard of a row may be right where the others are not: nobody waits for them
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    if not int(count):
        return
    got = "others on another rank of the row"
    if wrong.numel():
        at = int(wrong[0])
        got = f"{int(positions[0, at])} at token {int(places[at])} of the row"
    fix = "Pass `position_ids` of the whole row's documents: `model(**model_inputs(batch))`."
    _refuse(name, "needs positions that restart at 0 in each document of the whole row", got, fix)


def _refuse(layer: str, rule: str, got: object, fix: str) -> NoReturn:
    raise ConfigurationError(f"{layer} with attention `{ATTENTION_NAME}`", rule, got, fix)


register_attention()
