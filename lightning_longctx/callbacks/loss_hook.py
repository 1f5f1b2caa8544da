"""Per-token losses of models that return only a mean: watches the calls of a Hugging Face style ``loss_function``.

The model's own call runs as it would, and what it returns is passed on untouched. On sampled steps the same inputs then
go through a cross entropy of our own, detached and in chunks. The attribute is set on one model object, not on its
class, and taken off again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.callbacks.channel_batch import TokenLosses
from lightning_longctx.errors import BatchContractError, ConfigurationError

__all__ = ["LossHook"]

# Elements of one chunk of float32 logits: 64 MiB, as in `causal_lm_loss`.
_CHUNK_ELEMENTS = 2**24

# Relative difference between two ways to sum the same losses in low precision; label smoothing shows 1e-1.
_TOLERANCE = 1e-2

# Words in the name of a loss that is no next-token cross entropy, so that a value per token would be made up.
_OTHER_LOSSES = (
    *("classification", "regression", "questionanswering", "detection", "segmentation", "masked", "ctc", "rnnt", "tdt"),
    *("dpo", "ipo", "kto", "orpo", "cpo", "simpo", "grpo", "ppo", "preference", "reward", "ranking"),
    *("diffusion", "denois", "flowmatch", "flow_match", "contrastive", "mse", "vae"),
)
# Positional arguments, in Hugging Face's order. A fused loss has hidden states and the head's weight in front.
_PLAIN = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
_FUSED = ("hidden_states", "weight", "labels", "hidden_size", "num_items_in_batch", "ignore_index", "shift_labels")
_WEIGHTS = ("weight", "weights", "lm_head_weight")


class LossHook:
    """Watches the loss calls of the models in a module, until :meth:`close`.

    Args:
        module: searched for submodules with a ``loss_function``.

    Attributes:
        active: whether calls are recorded. Off, a call costs one comparison.
        calls: the recorded calls since :meth:`start`, in order; several in one forward for multi-token prediction.
        problem: why a call could not be recorded.

    Raises:
        ConfigurationError: no submodule has a ``loss_function``, or one that is no next-token cross entropy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.active = False
        self.calls: list[TokenLosses] = []
        self.problem: BatchContractError | None = None
        self._compared = False
        self._first: tuple[TokenLosses, Any, Any] | None = None
        self._restore: list[tuple[nn.Module, dict[str, Any]]] = []
        models = _outermost_models(module)
        if not models:
            fix = "Return `per_token_loss` from the step, or call a model that has one."
            got = f"{type(module).__name__} without one"
            raise ConfigurationError("ChannelLoss.loss_function", "needs a model with a `loss_function`", got, fix)
        for model in models:
            _refuse_other_losses(model)
        for model in models:
            self._wrap(model)

    def start(self, active: bool) -> None:
        """Forget earlier calls, and record the next ones or not."""
        self.active, self.calls, self.problem = active, [], None

    def compare(self) -> None:
        """Warn, once and after the step, if a model's loss is not the mean cross entropy of its targets. Reads it."""
        if self._first is not None:
            _compare(*self._first)
            self._first, self._compared = None, True

    def close(self) -> None:
        """Give the models their own attribute back."""
        self.start(False)
        while self._restore:
            model, before = self._restore.pop()
            for name in ("_loss_function", "loss_function"):
                vars(model).pop(name, None)
            vars(model).update(before)

    def _wrap(self, model: nn.Module) -> None:
        names = ("_loss_function", "loss_function")
        self._restore.append((model, {name: vars(model)[name] for name in names if name in vars(model)}))
        own: Callable[..., Any] = getattr(model, "loss_function")  # noqa: B009 - a property to mypy's nn.Module

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            if self.active:
                self._record(_named(args, kwargs), result)
            return result

        setattr(model, "loss_function", watched)  # noqa: B010

    @torch.no_grad()
    def _record(self, call: Mapping[str, Any], result: Any) -> None:
        try:
            recorded = _token_losses(call)
        except BatchContractError as error:
            # Raised later, where all ranks can agree on it.
            self.problem = self.problem or error
            return
        self.calls.append(recorded)
        if not self._compared and self._first is None:
            # Not compared here: a model may be compiled as one graph, which no look at a value may break.
            loss = result[0] if isinstance(result, tuple) else result
            self._first = (
                recorded,
                call.get("num_items_in_batch"),
                loss.detach() if isinstance(loss, Tensor) else loss,
            )


def _compare(recorded: TokenLosses, items: Any, loss: Any) -> None:
    """Warn if a model's loss is not the mean (or the sum / items) of its token losses. Reads the loss on the host."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return
    total = recorded.losses[recorded.is_target].double().sum().item()
    expected = total / max(float(items if items is not None else recorded.is_target.sum()), 1.0)
    if abs(loss.item() - expected) > _TOLERANCE * abs(expected):
        warnings.warn(
            f"The loss of the model ({loss.item():.6g}) is not the mean cross entropy of its targets ({expected:.6g})."
            " ChannelLoss shows the cross entropy; the other terms belong to no source.",
            stacklevel=2,
        )


def _outermost_models(module: nn.Module) -> list[nn.Module]:
    """Models below a module that have a loss function; parts of such a model have one too, but do not call it."""
    found: list[nn.Module] = []
    for child in module.children():
        # Its own, and not one that a wrapper such as PEFT's passes through: the model inside would not call that.
        own = any("loss_function" in vars(part) for part in (child, *type(child).__mro__))
        found += [child] if own and callable(getattr(child, "loss_function", None)) else _outermost_models(child)
    return found


def _refuse_other_losses(model: nn.Module) -> None:
    loss: Any = model.loss_function
    names = (getattr(loss, "__name__", type(loss).__name__), str(getattr(model, "loss_type", "") or ""))
    for name in names:
        plain = name.lower()
        if any(word in plain for word in _OTHER_LOSSES) and "causal" not in plain:
            fix = "Use ChannelLoss for language models, or return `per_token_loss` from your own step."
            got = f"`{name}` of {type(model).__name__}"
            raise ConfigurationError("ChannelLoss.loss_function", "must be a next-token cross entropy", got, fix)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Bring the arguments of a call under the names that we read."""
    second_is_weight = len(args) > 1 and isinstance(args[1], Tensor) and args[1].dtype.is_floating_point
    named = {**dict(zip(_FUSED if second_is_weight else _PLAIN, args, strict=False)), **kwargs}
    for name in _WEIGHTS:
        if isinstance(named.get(name), Tensor):
            named["weight"] = named[name]
    return named


def _token_losses(call: Mapping[str, Any]) -> TokenLosses:
    hidden, weight, logits = call.get("hidden_states"), call.get("weight"), call.get("logits")
    fused = isinstance(hidden, Tensor) and isinstance(weight, Tensor)
    source = hidden if fused else logits
    labels, shift = call.get("shift_labels"), False
    if not isinstance(labels, Tensor):
        labels, shift = call.get("labels"), True
    if not isinstance(source, Tensor) or not isinstance(labels, Tensor):
        fix = "Return `per_token_loss` from the step instead."
        raise BatchContractError(
            "loss_function", "must be called with labels, and with logits or hidden states", sorted(call), fix
        )
    ignored = call.get("ignore_index", IGNORE_INDEX)
    rows = labels.reshape(-1, labels.shape[-1])
    if shift:  # as Hugging Face's own loss: the label of a token is the target of the one before
        rows = torch.cat([rows[:, 1:], rows.new_full((rows.shape[0], 1), ignored)], 1)
    flat = source.detach().reshape(-1, source.shape[-1])
    if flat.shape[0] != rows.numel():
        got = f"{list(source.shape)} and labels {list(labels.shape)}"
        fix = "Return `per_token_loss` from the step instead."
        raise BatchContractError("loss_function", "must get one row of logits for each label", got, fix)
    head = (weight.detach(), call.get("bias")) if fused and isinstance(weight, Tensor) else None
    targets = rows.reshape(-1).to(flat.device)
    losses = _cross_entropy(flat, targets, ignored, head, call.get("final_logit_softcapping"))
    return TokenLosses(losses.view(rows.shape), (targets != ignored).view(rows.shape))


def _cross_entropy(
    source: Tensor, targets: Tensor, ignored: int, head: tuple[Tensor, Tensor | None] | None, cap: float | None
) -> Tensor:
    """Cross entropy [N] of logits [N, V], or of hidden states [N, H] and a head, one chunk at a time."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=source.device)
    vocabulary = source.shape[1] if head is None else head[0].shape[0]
    chunk = max(256, _CHUNK_ELEMENTS // vocabulary)
    for start in range(0, targets.numel(), chunk):
        part = source[start : start + chunk]
        logits = (part if head is None else F.linear(part, *head)).float()
        if cap and head is not None:
            logits = cap * torch.tanh(logits / cap)
        losses[start : start + chunk] = F.cross_entropy(
            logits, targets[start : start + chunk], ignore_index=ignored, reduction="none"
        )
    return losses
