"""Precision under FSDP2: parameters and arithmetic in bfloat16, buffers and reductions in float32.

Lightning would cast the whole module, rotary ``inv_freq`` buffers with it, or run under autocast. A bfloat16
``inv_freq`` gives a cosine that is off by 0.15 at position 1,000 and by up to 2 at 1M; so buffers keep their dtype
and FSDP2's own policy does the rest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.gradients import by_kind, clip_by_norm

__all__ = ["FSDP2Precision"]

_SUPPORTED = ("32-true", "bf16-true", "bf16-mixed")


class FSDP2Precision(Precision):
    """The precision plugin that :class:`LongContextFSDPStrategy` puts in place of Lightning's.

    Args:
        precision: ``"32-true"``; ``"bf16-true"`` (parameters stored and used in bfloat16); ``"bf16-mixed"`` (stored
            in float32, gathered and used in bfloat16). Gradients are reduced in float32 in all of them.

    Raises:
        ConfigurationError: any other precision. float16 would need a loss scaler, which FSDP2 has not.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _SUPPORTED:
            raise ConfigurationError(
                "trainer.precision",
                f"must be one of {list(_SUPPORTED)} under LongContextFSDPStrategy",
                repr(precision),
                "Use bf16-true for long context: it has the range of float32 and needs no loss scaling.",
            )
        self.precision = precision  # type: ignore[assignment]

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy; inputs and outputs of the module keep their dtypes (``output_dtype`` None)."""
        if self.precision == "32-true":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    @override
    def convert_module(self, module: Module) -> Module:
        """Cast floating parameters for ``bf16-true``. Buffers stay as they are."""
        if self.precision == "bf16-true":
            for parameter in module.parameters():
                if parameter.is_floating_point() and parameter.dtype != torch.bfloat16:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return module

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over sharded and whole parameters together; PyTorch's own refuses a mixture."""
        clip_by_norm(self.main_params(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each value, of sharded and whole parameters alike; PyTorch's own refuses a mixture."""
        for members in by_kind(self.main_params(optimizer)):
            torch.nn.utils.clip_grad_value_(members, float(clip_val))

    @override
    def convert_input(self, data: Any) -> Any:
        """Leave the batch alone: FSDP2 casts floating inputs of its units."""
        return data

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """No autocast and no default dtype: both would reach into rotary embeddings and losses."""
        return nullcontext()
