"""From hidden states to the loss: how a model turns ``hidden @ head`` into its logits, found out before training.

Most models take the product as it is. Some scale it (Cohere, Granite) or cap it (Gemma), and a loss on the bare product
would then train another model, silently. So the model's own logits are compared once, on a few tokens, with what this
file computes; what does not match is refused. The same forward shows whether any layer mixes tokens outside our
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.attention import AttentionProbe
from lightning_longctx.loss import TokenLoss, capped_lm_loss, causal_lm_loss
from lightning_longctx.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HeadTransform", "announced_transform", "head_loss", "inspect_model"]

# Eight tokens are enough to see a token reach its neighbours through a convolution or a recurrence.
_PROBE_TOKENS = 8
_CHANGED_TOKEN = 3
# Largest logit of the comparison: well above any cap in use (30 for Gemma), so that a cap bends it.
_PROBE_LOGIT = 60.0
# Relative difference that still counts as equal in float32. A token that moves to another expert changes the sizes of
# matrix products and with them the last bits of its neighbours (1e-6); a layer that mixes tokens shows 1e-2.
_TOLERANCE = 1e-4

_SCALE_KEYS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_CAP_KEYS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class HeadTransform:
    """What a model does to ``hidden @ head``: ``cap * tanh(scale * product / cap)``.

    Attributes:
        scale: factor of the logits.
        cap: bound of the logits; None for no bound.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits for a product of hidden states and head."""
        logits = product * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def inspect_model(model: PreTrainedModel) -> HeadTransform:
    """Run a model on a few tokens and find out how its head works and whether only our attention mixes tokens.

    Needs whole weights: call it before sharding. No other rank takes part. Mode and gradients are left as they were.

    Args:
        model: a Hugging Face causal language model with attention ``longctx``.

    Returns:
        How logits follow from ``hidden @ head``.

    Raises:
        ConfigurationError: no linear head, a head that does something else, attention that is not ours, a window that
            does not reach it, or a layer that mixes tokens by other means.
    """
    name, head = type(model).__name__, head_of(model)
    device = head.weight.device
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] * 7 % head.weight.shape[0]
    changed = tokens.clone()
    changed[0, _CHANGED_TOKEN] = (tokens[0, _CHANGED_TOKEN] + 1) % head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _PROBE_TOKENS, head.weight.shape[1], generator=generator).to(device, head.weight.dtype)
    with torch.no_grad():
        product = linear(hidden, head.weight, head.bias)
        largest = float(product.abs().max())
        if largest > 0:
            hidden = hidden * (_PROBE_LOGIT / largest)
            product = linear(hidden, head.weight, head.bias)
        before, logits, probe = _probe(model, tokens, hidden)
        after, _, _ = _probe(model, changed, hidden)
    _check_mixing(name, before, after)
    _check_windows(name, getattr(model, "config", None), probe.windows)
    return _find_transform(name, getattr(model, "config", None), product, logits)


def announced_transform(config: Any) -> HeadTransform:
    """What a configuration says about the logits, unproven: enough to count memory, not to train.

    Args:
        config: of a Hugging Face model.
    """
    scale = next((float(value) for key in _SCALE_KEYS if (value := getattr(config, key, None))), 1.0)
    cap = next((float(value) for key in _CAP_KEYS if (value := getattr(config, key, None))), None)
    return HeadTransform(scale, cap)


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Return the head of a Hugging Face model.

    Args:
        model: the model.

    Raises:
        ConfigurationError: it has no linear head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        fix = "Take a causal language model with a linear head."
        raise ConfigurationError(
            "model", "must have a linear head", f"{type(model).__name__} with {type(head).__name__}", fix
        )
    return head


def head_loss(
    transform: HeadTransform, head: nn.Linear, hidden: Tensor, batch: Mapping[str, Any], chunk_tokens: int | None = None
) -> TokenLoss:
    """Compute the loss from hidden states, never holding the logits of a whole row.

    A scale is applied to the hidden states, which is the same product; a cap to each chunk of logits.

    Args:
        transform: what the model does to its logits.
        head: the head, with whole weights.
        hidden: ``[1, T/S, H]``, local.
        batch: the packed batch of the same shard.
        chunk_tokens: tokens of a chunk. Default: as in ``causal_lm_loss``.

    Returns:
        The loss, as ``causal_lm_loss`` gives it.
    """
    bias: Tensor | None = head.bias
    if transform.scale != 1.0:
        hidden = hidden * transform.scale
        bias = None if bias is None else bias * transform.scale
    if transform.cap is None:
        return causal_lm_loss(hidden, head.weight, batch, bias=bias, chunk_tokens=chunk_tokens)
    return capped_lm_loss(hidden, head.weight, batch, transform.cap, bias=bias, chunk_tokens=chunk_tokens)


def _probe(model: PreTrainedModel, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, AttentionProbe]:
    """Run the model; hand ``hidden`` to its head in place of its own hidden states. Return those, logits and calls."""
    own: list[Tensor] = []

    def swap(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        own.append(output.last_hidden_state)
        output.last_hidden_state = hidden
        return output

    probe = AttentionProbe()
    was_training = model.training
    handle = model.base_model.register_forward_hook(swap)
    positions = torch.arange(_PROBE_TOKENS, device=tokens.device)[None]
    try:
        model.eval()
        logits = model(input_ids=tokens, position_ids=positions, packed_sequence=probe, use_cache=False).logits
    finally:
        handle.remove()
        model.train(was_training)
    if not probe.calls:
        fix = "Take a model whose attention goes through transformers' AttentionInterface."
        got = f"{type(model).__name__}, which never called it"
        raise ConfigurationError("model", "must use attention `longctx`", got, fix)
    return own[0].float(), logits.float(), probe


def _check_windows(name: str, config: Any, windows: list[int | None]) -> None:
    """A window that exists in the configuration alone would come from a mask, and packed rows have none."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    expected = [size if kind == "sliding_attention" else None for kind in kinds]
    if windows != expected:
        got = f"{name}, whose {counted(len(windows), 'layer')} ask for {sorted({str(window) for window in windows})}"
        fix = "Write `config_overrides: {sliding_window: null}` to train with full attention, or take another model."
        rule = f"must have layers that ask attention for the sliding window of its configuration ({size})"
        raise ConfigurationError("model", rule, got, fix)


def _check_mixing(name: str, before: Tensor, after: Tensor) -> None:
    """With attention giving zeros, a changed token must change nothing but itself."""
    moved = (before - after).abs().amax(dim=-1)[0]
    moved[_CHANGED_TOKEN] = 0
    worst = float(moved.max() / before.abs().max().clamp(min=1e-12))
    if worst > _TOLERANCE:
        fix = "Take a model of attention layers: others would see neither document bounds nor the other ranks."
        got = f"{name}, where a token changes others by {worst:.1e} (relative) without attention"
        raise ConfigurationError("model", "must mix tokens only in attention `longctx`", got, fix)


def _find_transform(name: str, config: Any, product: Tensor, logits: Tensor) -> HeadTransform:
    values = [getattr(config, key, None) for key in _SCALE_KEYS]
    scales = [1.0, *(factor for value in values if value for factor in (float(value), 1.0 / float(value)))]
    caps = [None, *(float(value) for key in _CAP_KEYS if (value := getattr(config, key, None)))]
    product = product.float()
    for cap in caps:
        for scale in scales:
            transform = HeadTransform(scale, cap)
            if logits.shape == product.shape and _equal(transform(product), logits):
                return transform
    fix = "Write your own LightningModule and pass its logits to `causal_lm_loss(None, None, batch, logits=...)`."
    difference = float((product - logits).abs().max()) if logits.shape == product.shape else float("nan")
    got = f"{name}, whose logits differ by up to {difference:.3g} where they reach {float(logits.abs().max()):.3g}"
    raise ConfigurationError("model", "must compute its logits as hidden @ head, scaled or capped", got, fix)


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= _TOLERANCE * float(theirs.abs().max().clamp(min=1e-12))
