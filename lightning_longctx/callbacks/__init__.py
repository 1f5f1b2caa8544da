"""Lightning callbacks of the suite. Each works alone, under any strategy, and in any order in ``callbacks:``.

``step_sums``, ``gradient_norm``, ``batch_filter``, ``loss_hook``, ``source_names`` and ``channel_*`` but
``channel_loss`` are the pure parts below them.
"""

from __future__ import annotations

from lightning_longctx.callbacks.channel_loss import ChannelLoss, ChannelOptions
from lightning_longctx.callbacks.exact_token_mean import ExactTokenMean
from lightning_longctx.callbacks.moe_router_heatmap import MoERouterHeatmap
from lightning_longctx.callbacks.router_counts import record_router_indices
from lightning_longctx.callbacks.training_metrics import TrainingMetrics

__all__ = [
    "ChannelLoss",
    "ChannelOptions",
    "ExactTokenMean",
    "MoERouterHeatmap",
    "TrainingMetrics",
    "record_router_indices",
]
