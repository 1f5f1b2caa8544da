"""Lightning callbacks of the suite. Each works alone, under any strategy, and in any order in ``callbacks:``.

``step_tally`` counts each step once for all of them; the other modules are the pure parts below.
"""

from __future__ import annotations

from lightning_longctx.callbacks.async_dcp_checkpoint import AsyncDCPCheckpoint
from lightning_longctx.callbacks.channel_loss import ChannelLoss, ChannelOptions
from lightning_longctx.callbacks.checkpoint_options import CheckpointOptions
from lightning_longctx.callbacks.exact_token_mean import ExactTokenMean
from lightning_longctx.callbacks.max_tokens import MaxTokens
from lightning_longctx.callbacks.moe_router_heatmap import MoERouterHeatmap
from lightning_longctx.callbacks.router_counts import record_router_indices
from lightning_longctx.callbacks.run_guard import RunGuard
from lightning_longctx.callbacks.training_metrics import TrainingMetrics

__all__ = [
    "AsyncDCPCheckpoint",
    "ChannelLoss",
    "ChannelOptions",
    "CheckpointOptions",
    "ExactTokenMean",
    "MaxTokens",
    "MoERouterHeatmap",
    "RunGuard",
    "TrainingMetrics",
    "record_router_indices",
]
