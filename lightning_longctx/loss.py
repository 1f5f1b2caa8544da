"""The causal language-model loss in chunks, with the loss of each token as an output.

A row of 1M tokens times a vocabulary of 128K is 512 GB of logits, so the head and the cross entropy run chunk by
chunk and only one chunk exists at a time. The gradients are formed in the same pass: a sum of token losses has a
gradient that is known up to one factor, so recomputing the logits in backward (a fourth matrix product) would buy
nothing. ``benchmarks/loss.py`` compares time and memory with plain cross entropy and with PyTorch's
``linear_cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.batch import IGNORE_INDEX, count_targets
from lightning_longctx.errors import BatchContractError, ConfigurationError

__all__ = ["TokenLoss", "capped_lm_loss", "causal_lm_loss", "weighted_term"]

# Elements of one chunk of logits: 64 MiB in fp32. Chosen by benchmarks/loss.py (docs/loss.md has the table): smaller
# chunks add a pass over the weight gradient for each chunk, larger ones gain no speed.
_CHUNK_ELEMENTS = 2**24
# A chunk never has fewer tokens than this, or the weight gradient is read and written more often than it is computed.
_MIN_CHUNK_TOKENS = 256
# Kernels elsewhere index logits with 32 bits; a chunk beyond that was silently wrong (Liger-Kernel issue 803).
_MAX_CHUNK_ELEMENTS = 2**31 - 1


class TokenLoss(NamedTuple):
    """The loss of one micro-batch on this rank.

    Attributes:
        loss: 0-d float32 with the graph, for backward only: ``per_token_loss.sum() / loss_divisor``. The strategy (or
            ``ExactTokenMean``) turns the gradients of a step into those of the exact token mean.
        mean: 0-d float32, detached: the mean over this rank's targets, 0 without any. Log this one; the exact mean
            over all ranks and micro-batches is logged for you as ``train/loss``.
        per_token_loss: float32 ``[1, T/S]``, detached, 0 where there is no target.
    """

    loss: Tensor
    mean: Tensor
    per_token_loss: Tensor


def causal_lm_loss(
    hidden_states: Tensor | None,
    lm_head_weight: Tensor | None,
    batch: Mapping[str, Any],
    *,
    bias: Tensor | None = None,
    logits: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> TokenLoss:
    """Cross entropy of the next token from hidden states and head weight, or from logits.

    Args:
        hidden_states: ``[1, T/S, H]``, local, any floating dtype; products accumulate in float32.
        lm_head_weight: ``[V, H]``, whole (inside ``training_step`` FSDP2 has gathered it). May be a tied embedding.
        batch: the packed batch of the same shard; ``shift_labels`` and ``loss_divisor`` are read.
        bias: ``[V]``, of the head.
        logits: ``[1, T/S, V]`` instead of the first two, for models that change their logits (soft caps).
        chunk_tokens: tokens of one chunk. Default: as many as make 2^24 logits (64 MiB in float32), at least 256.

    Returns:
        A :class:`TokenLoss`. Without any target the loss is 0 and so are the gradients.

    Raises:
        ConfigurationError: neither or both of the two forms; a chunk of more than 2^31 - 1 logits; a sharded weight.
        BatchContractError: labels whose shape is not that of the tokens.

    Example:
        >>> import torch
        >>> batch = {"shift_labels": torch.tensor([[1, 2, -100]]), "loss_divisor": 3}
        >>> out = causal_lm_loss(torch.zeros(1, 3, 4), torch.zeros(8, 4), batch)
        >>> round(out.mean.item(), 4), out.per_token_loss.shape
        (2.0794, torch.Size([1, 3]))
    """
    source = _check_form(hidden_states, lm_head_weight, logits, bias)
    _check_labels(source, batch["shift_labels"])
    if logits is None:
        assert hidden_states is not None
        assert lm_head_weight is not None
        return _linear_loss(hidden_states, lm_head_weight, batch, bias, chunk_tokens, None)
    flat, chunk = logits.flatten(0, -2), _chunk_tokens(chunk_tokens, logits.shape[-1])
    summed, per_token = _CrossEntropy.apply(flat, batch["shift_labels"].flatten(), chunk)  # type: ignore[no-untyped-call]
    return _token_loss(summed, per_token, batch)


def capped_lm_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    batch: Mapping[str, Any],
    cap: float,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> TokenLoss:
    """:func:`causal_lm_loss` for a head whose logits are bounded: ``cap * tanh(product / cap)``, as in Gemma.

    Args:
        hidden_states: ``[1, T/S, H]``, local.
        lm_head_weight: ``[V, H]``, whole.
        batch: the packed batch of the same shard.
        cap: bound of the logits.
        bias: ``[V]``, of the head.
        chunk_tokens: as of :func:`causal_lm_loss`.

    Raises:
        ConfigurationError: a chunk of more than 2^31 - 1 logits; a sharded weight.
        BatchContractError: labels whose shape is not that of the tokens.
    """
    _check_labels(_check_form(hidden_states, lm_head_weight, None, bias), batch["shift_labels"])
    return _linear_loss(hidden_states, lm_head_weight, batch, bias, chunk_tokens, cap)


def _linear_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: Mapping[str, Any],
    bias: Tensor | None,
    chunk_tokens: int | None,
    cap: float | None,
) -> TokenLoss:
    flat, weight, bias = _autocast(hidden.flatten(0, -2), weight, bias)
    chunk, labels = _chunk_tokens(chunk_tokens, weight.shape[0]), batch["shift_labels"].flatten()
    summed, per_token = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, labels, chunk, cap, torch.is_grad_enabled()
    )
    return _token_loss(summed, per_token, batch)


def _token_loss(summed: Tensor, per_token: Tensor, batch: Mapping[str, Any]) -> TokenLoss:
    mean = summed.detach() / count_targets(batch).clamp(min=1)
    return TokenLoss(summed / batch["loss_divisor"], mean, per_token.view(batch["shift_labels"].shape))


def weighted_term(term: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Weigh an extra loss term (router auxiliary loss, z-loss, multi-token prediction) so that it keeps its strength.

    The gradients of a step are multiplied by ``loss_divisor / valid targets``. A term weighted by this shard's
    targets over ``loss_divisor`` comes out of that as its token-weighted mean over micro-batches and ranks;
    unweighted it would be too strong wherever targets are sparse.

    Args:
        term: 0-d, the mean of the term on this rank, with the graph.
        batch: the packed batch it came from.

    Returns:
        The term to add to ``loss`` and to return in ``extra_terms``, so that the first-step check can tell them apart.

    Example:
        >>> loss = out.loss + weighted_term(0.01 * router_loss, batch)  # doctest: +SKIP
    """
    share: Tensor = count_targets(batch) / batch["loss_divisor"]
    return term * share


def _check_form(hidden: Tensor | None, weight: Tensor | None, logits: Tensor | None, bias: Tensor | None) -> Tensor:
    given = [
        name
        for name, value in (("hidden_states", hidden), ("lm_head_weight", weight), ("logits", logits))
        if value is not None
    ]
    if given not in (["hidden_states", "lm_head_weight"], ["logits"]):
        fix = "Pass `hidden_states` and `lm_head_weight`, or `logits` alone."
        raise ConfigurationError("causal_lm_loss", "takes one of two forms", f"{given}", fix)
    if isinstance(weight, DTensor) or isinstance(bias, DTensor):
        raise ConfigurationError(
            "lm_head_weight",
            "must be whole",
            "a sharded DTensor",
            "Call the loss inside `training_step` or one of `forward_methods`, where FSDP2 has gathered the head.",
        )
    source = logits if logits is not None else hidden
    assert source is not None
    return source


def _check_labels(source: Tensor, labels: Tensor) -> None:
    if source.shape[:-1] != labels.shape:
        fix = "Pass the hidden states and the labels of the same shard."
        rule = f"must have the shape of the tokens {list(source.shape[:-1])}"
        raise BatchContractError("batch['shift_labels']", rule, list(labels.shape), fix)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunk_tokens(asked: int | None, vocabulary: int) -> int:
    chunk = max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS // vocabulary) if asked is None else asked
    if chunk < 1 or chunk * vocabulary > _MAX_CHUNK_ELEMENTS:
        raise ConfigurationError(
            "chunk_tokens",
            "must be at least 1 and chunk_tokens x vocabulary at most 2^31 - 1",
            f"{chunk} x {vocabulary} = {chunk * vocabulary}",
            f"Use at most {_MAX_CHUNK_ELEMENTS // vocabulary}.",
        )
    return chunk


def _token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn float32 logits [C, V] in place into exp(logits - max); return losses, targets, valid and the sums [C, 1]."""
    valid = labels != IGNORE_INDEX
    # Only the mark of "no target" gets a place: any other id that the vocabulary lacks fails in `gather`.
    targets = labels.masked_fill(~valid, 0).unsqueeze(1)  # [C, 1]
    highest = logits.amax(1, keepdim=True)
    at_target = logits.gather(1, targets)
    sums = logits.sub_(highest).exp_().sum(1, keepdim=True)
    losses = (highest + sums.log() - at_target).squeeze(1).masked_fill(~valid, 0.0)
    return losses, targets, valid.unsqueeze(1), sums


def _logit_gradient(exponentials: Tensor, targets: Tensor, valid: Tensor, sums: Tensor) -> Tensor:
    """Gradient of the summed losses with respect to the logits, in place of the exponentials: softmax - one-hot."""
    exponentials.mul_(valid / sums)
    return exponentials.scatter_add_(1, targets, -valid.to(exponentials.dtype))


def _cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Bend float32 logits in place to ``cap * tanh(logits / cap)``; return the slope of that, of the same shape."""
    bent = logits.div_(cap).tanh_()
    slope = bent.square().neg_().add_(1)
    logits.mul_(cap)
    return slope


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed and per-token cross entropy of ``hidden @ weight.T + bias``; gradients are made in forward.

    Inputs: hidden [N, H], weight [V, H], bias [V] or None, labels int64 [N], chunk, the bound of the logits or None,
    whether gradients are wanted (autograd does not say so inside forward). The gradients stay unscaled until backward,
    so that float16 does not underflow at a divisor of a million.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        cap: float | None,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = [needed and wants_grad for needed in ctx.needs_input_grad[:3]]
        per_token = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        # Accumulated in float32 over the chunks; a bfloat16 sum would lose each chunk's share beyond 8 bits.
        grad_weight = torch.zeros_like(weight, dtype=_accumulate_dtype(weight)) if needs[1] else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=_accumulate_dtype(weight)) if needs[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, labels.numel(), chunk):
                part = slice(start, start + chunk)
                tokens = hidden[part]
                logits = _project(tokens, weight, bias)
                slope = None if cap is None else _cap_logits(logits, cap)
                per_token[part], targets, valid, sums = _token_losses(logits, labels[part])
                if not any(needs):
                    continue
                grad = _logit_gradient(logits, targets, valid, sums)  # [C, V]
                if slope is not None:
                    grad.mul_(slope)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[part])
                if grad_weight is not None:
                    _accumulate(grad_weight, grad, tokens)
                del logits, grad, slope  # or one chunk would outlive the next one's first product
        ctx.gradients = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(per_token)
        return per_token.sum(), per_token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "`causal_lm_loss` hands over its gradients once, but backward ran a second time. They are formed in"
                " forward and scaled in place, so that no second copy exists: call the loss again for another backward."
            )
        for gradient in gradients:
            if gradient is not None:
                # One dimension, so that the product is taken in float32: a bfloat16 factor is off by up to 0.4 %.
                torch.mul(gradient, grads[0].view(1), out=gradient)
        return (*gradients, None, None, None, None)


class _CrossEntropy(torch.autograd.Function):
    """Summed and per-token cross entropy of given logits [N, V], in chunks, with float32 arithmetic."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        per_token = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        for start in range(0, labels.numel(), chunk):
            part = slice(start, start + chunk)
            per_token[part] = _token_losses(_upcast(logits[part], copy=True), labels[part])[0]
        ctx.save_for_backward(logits, labels)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(per_token)
        return per_token.sum(), per_token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, labels.numel(), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            exponentials = _upcast(logits[part], copy=True)
            _, targets, valid, sums = _token_losses(exponentials, labels[part])
            gradient[part] = _logit_gradient(exponentials, targets, valid, sums) * grads[0]
        return gradient, None, None


def _accumulate_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _upcast(logits: Tensor, copy: bool = False) -> Tensor:
    return logits.to(_accumulate_dtype(logits), copy=copy)


def _project(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [C, V] of one chunk in float32 (float64 for float64 inputs)."""
    logits = tokens @ weight.t() if bias is None else torch.addmm(bias, tokens, weight.t())
    return _upcast(logits)


def _accumulate(total: Tensor, grad: Tensor, tokens: Tensor) -> None:
    """Add ``grad.T @ tokens`` to the float32 total."""
    if total.dtype == tokens.dtype:
        total.addmm_(grad.t(), tokens)
    else:
        total += grad.t() @ tokens
