"""PyTorch Lightning plug-ins for training on 128K to 1M+ tokens per sequence.

Importing the package registers ``Trainer(strategy="longctx_fsdp")`` and numbers of tokens such as 512K for YAML, and
hides a warning that Lightning causes itself.
``CausalLMModule`` is imported on first use, since it needs the optional extra ``hf``.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import register_type

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID, PackedBatch, PackedSequence, model_inputs
from lightning_longctx.callbacks import (
    AsyncDCPCheckpoint,
    ChannelLoss,
    CheckpointOptions,
    ExactTokenMean,
    MaxTokens,
    MoERouterHeatmap,
    RunGuard,
    TrainingMetrics,
    record_router_indices,
)
from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.errors import (
    BatchContractError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DivergenceError,
)
from lightning_longctx.loss import TokenLoss, causal_lm_loss, weighted_term
from lightning_longctx.recompute import is_recomputing
from lightning_longctx.strategies import LongContextFSDPStrategy, gather_row, offload_activations, ulysses_attention
from lightning_longctx.topology import Topology, topology_of
from lightning_longctx.units import TokenCount, parse_token_count

if TYPE_CHECKING:
    from lightning_longctx.integrations.transformers import CausalLMModule

__all__ = [
    "IGNORE_INDEX",
    "PAD_SOURCE_ID",
    "AsyncDCPCheckpoint",
    "BatchContractError",
    "CausalLMModule",
    "ChannelLoss",
    "CheckpointError",
    "CheckpointOptions",
    "ConfigurationError",
    "DataError",
    "DivergenceError",
    "DynamicBatchingDataModule",
    "ExactTokenMean",
    "LongContextFSDPStrategy",
    "MaxTokens",
    "MoERouterHeatmap",
    "PackedBatch",
    "PackedSequence",
    "RunGuard",
    "TokenLoss",
    "Topology",
    "TrainingMetrics",
    "causal_lm_loss",
    "gather_row",
    "is_recomputing",
    "model_inputs",
    "offload_activations",
    "record_router_indices",
    "topology_of",
    "ulysses_attention",
    "weighted_term",
]

# Lightning on torch 2.13, at every fit; nothing a user could do about it. Behind all filters of the user's own.
warnings.filterwarnings(
    "ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning, append=True
)

# `max_seq_len: 512K`, under Lightning's own command line too.
register_type(TokenCount, serializer=int, deserializer=parse_token_count)

try:
    __version__ = version("lightning-longctx")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"


if not TYPE_CHECKING:  # else any name that is misspelt would be one of type `Any`

    def __getattr__(name: str) -> Any:
        if name == "CausalLMModule":
            from lightning_longctx.integrations import CausalLMModule

            return CausalLMModule
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
