"""Activation offload: what autograd saves waits in host memory, and comes back for backward."""

from lightning_longctx.strategies.activation_offload.settings import ActivationOffload, OffloadMode, as_offload
from lightning_longctx.strategies.activation_offload.setup import (
    RunningOffload,
    check_with_checkpointing,
    offload_activations,
    start_offload,
)

__all__ = [
    "ActivationOffload",
    "OffloadMode",
    "RunningOffload",
    "as_offload",
    "check_with_checkpointing",
    "offload_activations",
    "start_offload",
]
