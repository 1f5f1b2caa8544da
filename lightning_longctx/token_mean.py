"""The exact token mean of a step, by one multiplication of its gradients.

Wanted is the gradient of the mean over all targets of a step: over ranks with different rows, over accumulated
micro-batches of different length. Each micro-batch's loss is a sum over a constant, ``per_token_loss.sum() /
loss_divisor``; Lightning divides it by ``accumulate_grad_batches`` and the strategy averages gradients over ranks.
All three are constants, so after the last backward one factor repairs them::

    gradient *= accumulate * ranks_averaged * loss_divisor / valid_targets

``valid_targets`` is one all-reduced integer. No micro-batch has to be looked at ahead of time, a short last window is
right, and a rank without targets is harmless. ``LongContextFSDPStrategy`` and the callback ``ExactTokenMean`` share
this class.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.batch import count_targets
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.topology import Topology

__all__ = ["TokenMean"]

# Both sides are float32 sums of the same numbers; a user's loss may have summed them in another order.
_RELATIVE_TOLERANCE = 1e-3
_ABSOLUTE_TOLERANCE = 1e-6

# What a rank found in the first step; the highest of all ranks counts.
_EXACT, _INEXACT, _UNDECIDED, _PROBLEM = range(4)


class TokenMean:
    """Counts the targets of a step's micro-batches and scales its gradients once.

    Args:
        topology: who holds distinct tokens, and over how many ranks gradients are averaged.
        owner: who asks, for messages: ``"LongContextFSDPStrategy"``.
        required: whether a step without ``per_token_loss`` is an error; otherwise such a run keeps its mean of means,
            and one warning says so.

    Example:
        >>> mean = TokenMean(Topology(), "my loop", required=True)
        >>> output = mean.training_step(lambda: module.training_step(batch, 0), batch)  # doctest: +SKIP
        >>> output["loss"].backward()  # doctest: +SKIP
        >>> mean.scale_gradients(module.parameters(), accumulate=1)  # doctest: +SKIP
    """

    def __init__(self, topology: Topology, owner: str, required: bool) -> None:
        self._topology = topology
        self._owner = owner
        self._required = required
        self._targets: Tensor | None = None
        self._divisor = 0
        self._exact: bool | None = None
        self._scaled_inside = False

    def training_step(self, step: Callable[[], Any], batch: object) -> Any:
        """Run one micro-batch's ``step`` and count the targets of its batch, on the device.

        The count is taken before the step, because manual optimization steps the optimizer inside it. In the first
        step the output is checked; this reads one number on the host, later steps read none.

        Args:
            step: runs the user's ``training_step`` and returns its output.
            batch: the batch that it was given.

        Returns:
            The output, unchanged.

        Raises:
            ConfigurationError: the output has no ``per_token_loss`` though it is required, or ``loss`` minus the
                declared ``extra_terms`` is not ``per_token_loss.sum() / loss_divisor``.
            BatchContractError: ``loss_divisor`` changes inside a step.
        """
        self._scaled_inside = False
        countable = batch if isinstance(batch, Mapping) and {"shift_labels", "loss_divisor"} <= batch.keys() else None
        if countable is not None and self._exact is not False:
            self._count(countable)
        output = step()
        if output is None and countable is not None and self._targets is not None:
            self._targets = self._targets - count_targets(countable)  # the module skipped it: its targets train nothing
        if self._exact is None:
            self._check_first(output, countable)
        elif output is None:
            pass
        elif self._exact and not _has_per_token_loss(output):
            raise self._missing()
        return output

    def scale_gradients(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Multiply the gradients once, after the last backward of a step, and start a new count.

        One all-reduced int64 over ``topology.token_group``; every rank must call it at every step. Gradients may be
        DTensors.

        Args:
            parameters: those that the optimizer updates.
            accumulate: by what each micro-batch's loss was divided: ``accumulate_grad_batches``, also in a short last
                window; 1 in manual optimization.
        """
        if self._exact is False or self._targets is None:  # a mean of means, or no micro-batch since the last step
            return
        valid = self._targets
        if self._topology.token_group is not None:
            dist.all_reduce(valid, group=self._topology.token_group)
        constant = float(accumulate * self._topology.ranks_averaged * self._divisor)
        factor = (constant / valid.clamp(min=1).double()).float()  # stays on the device
        with torch.no_grad():
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = _local(parameter.grad)
                    by_device.setdefault(gradient.device, []).append(gradient)
            for device, gradients in by_device.items():  # offloaded ones are on the host
                _multiply(gradients, factor.to(device))
        self._targets, self._scaled_inside = None, True

    def reset(self) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        self._targets = None

    def _count(self, batch: Mapping[str, Any]) -> None:
        divisor = batch["loss_divisor"]
        if self._targets is not None and divisor != self._divisor:
            raise BatchContractError(
                "batch['loss_divisor']",
                "must be the same for all micro-batches of a step",
                f"{divisor} after {self._divisor}",
                "Use the full token budget of a micro-batch everywhere.",
            )
        self._divisor = divisor
        count = count_targets(batch)
        self._targets = count if self._targets is None else self._targets + count

    def _check_first(self, output: Any, batch: Mapping[str, Any] | None) -> None:
        """Settle once, for all ranks together, whether this run's steps are exact."""
        problem: ConfigurationError | None = None
        if output is None:
            state = _UNDECIDED
        elif _has_per_token_loss(output) and batch is not None:
            problem, state = _mismatch(output, batch), _EXACT
        else:
            problem = self._missing() if self._required or self._scaled_inside else None
            state = _INEXACT
        settled = self._highest(_PROBLEM if problem is not None else state)
        if problem is not None:
            raise problem
        if settled == _PROBLEM:
            raise ConfigurationError(
                "training_step", "must be right on every rank", "an error on another rank", "See that rank's message."
            )
        if settled == _UNDECIDED:
            return  # some rank skipped its micro-batch; every rank looks again at the next one
        self._exact = settled == _EXACT
        if not self._exact:
            self._targets = None
            warnings.warn(
                f"{self._owner}: `training_step` returned no `per_token_loss` (or the batch is not a packed batch), so"
                " the loss of a step is a mean of means over micro-batches and ranks, not the token mean. Return"
                " {'loss': out.loss, 'per_token_loss': out.per_token_loss} from `causal_lm_loss` for the exact one.",
                stacklevel=2,
            )

    def _highest(self, state: int) -> int:
        group = self._topology.host_group
        if group is None:
            return state
        value = torch.tensor(state)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
        return int(value)

    def _missing(self) -> ConfigurationError:
        return ConfigurationError(
            "training_step",
            f"must return a dict with `loss` and `per_token_loss` for a packed batch under {self._owner}",
            "an output or a batch without it",
            "Return {'loss': out.loss, 'per_token_loss': out.per_token_loss} with out = causal_lm_loss(...).",
        )


def _has_per_token_loss(output: Any) -> bool:
    return isinstance(output, Mapping) and isinstance(output.get("per_token_loss"), Tensor)


def _mismatch(output: Mapping[str, Any], batch: Mapping[str, Any]) -> ConfigurationError | None:
    loss = output.get("loss")
    if loss is None:  # manual optimization may have run backward itself
        return None
    extra = sum((term.detach().double() for term in output.get("extra_terms", {}).values()), torch.zeros(()).double())
    expected = float(output["per_token_loss"].double().sum() / batch["loss_divisor"])
    got = float(loss.detach().double() - extra.to(loss.device))
    if math.isnan(got) and math.isnan(expected):
        return None  # a diverged model is not a wrong contract
    if abs(got - expected) <= _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * abs(expected):
        return None
    return ConfigurationError(
        "training_step['loss']",
        "minus `extra_terms` must equal per_token_loss.sum() / loss_divisor",
        f"{got:.6g} where {expected:.6g} is expected",
        "Return the `.loss` of causal_lm_loss, and each extra term made by `weighted_term` in `extra_terms`.",
    )


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    if alike := [gradient for gradient in gradients if gradient.dtype == factor.dtype]:
        torch._foreach_mul_(alike, factor)
    for gradient in gradients:
        if gradient.dtype != factor.dtype:
            # One dimension, so that the product is taken in float32: a GPU rounds a factor without any to bfloat16.
            torch.mul(gradient, factor.view(1), out=gradient)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
