"""Lightning callbacks of the suite. Each works alone, under any strategy, and in any order in ``callbacks:``.

``step_sums`` and ``gradient_norm`` are pure parts below them, the ``checkpoint_`` modules parts of
``AsyncDCPCheckpoint``.
"""

from __future__ import annotations

from lightning_longctx.callbacks.async_dcp_checkpoint import AsyncDCPCheckpoint
from lightning_longctx.callbacks.checkpoint_options import CheckpointOptions
from lightning_longctx.callbacks.exact_token_mean import ExactTokenMean
from lightning_longctx.callbacks.training_metrics import TrainingMetrics

__all__ = ["AsyncDCPCheckpoint", "CheckpointOptions", "ExactTokenMean", "TrainingMetrics"]
