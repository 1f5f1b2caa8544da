"""Lightning callbacks of the suite. Each works alone, under any strategy, and in any order in ``callbacks:``.

``step_tally`` counts each step once for all of them; the other modules are the pure parts below.
"""

from __future__ import annotations

from lightning_longctx.callbacks.exact_token_mean import ExactTokenMean
from lightning_longctx.callbacks.max_tokens import MaxTokens
from lightning_longctx.callbacks.run_guard import RunGuard
from lightning_longctx.callbacks.training_metrics import TrainingMetrics

__all__ = ["ExactTokenMean", "MaxTokens", "RunGuard", "TrainingMetrics"]
