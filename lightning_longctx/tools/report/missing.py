"""What else a run could show, and what switches it on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_longctx.tools.report.run import Run

__all__ = ["missing_parts"]

#: Beginning of the keys, and what to do for them.
_PARTS = (
    ("train/loss", "Exact losses, tokens per second, gradient norm: `TrainingMetrics` in `trainer.callbacks`."),
    ("val/loss", "Validation loss: `data.validation_sources`, and `trainer.val_check_interval` to say how often."),
    ("channel_loss/", "Loss by source: `ChannelLoss` in `trainer.callbacks`."),
    ("position_loss/", "Loss by position in the document: one more `ChannelLoss`, with `group_by: position`."),
    ("data/source_fill", "Source fill: `TrainingMetrics`, and batches with `loss_divisor` (as packed ones are)."),
    ("data/wait_s_p50", "Wait for data: `DynamicBatchingDataModule` with `TrainingMetrics`."),
    ("checkpoint/stall_s/", "Stalls and writes of checkpoints: `AsyncDCPCheckpoint` in `trainer.callbacks`."),
    ("train/mfu", "Share of the device's peak: `TrainingMetrics` on a known GPU, or its `device_peak_tflops`."),
    ("train/memory_peak_gib", "Peak memory: a run on a GPU."),
)
_EXPERTS = "Expert load: `MoERouterHeatmap` in `trainer.callbacks`, for a Mixture-of-Experts model."
_CONFIGURATION = "Configuration and versions: start the run with `longctx fit`, which saves `config.yaml`."


def missing_parts(runs: Sequence[Run]) -> list[str]:
    """A sentence for each part that none of the runs has."""
    found = [text for start, text in _PARTS if not any(key.startswith(start) for run in runs for key in run.series)]
    if not any(run.experts for run in runs):
        found.append(_EXPERTS)
    if not any(run.configuration_text for run in runs):
        found.append(_CONFIGURATION)
    return found
