"""What a step is made of, as one fixed-shape vector of sums: one all-reduce joins it over ranks, whatever their data.

Everything here stays on the device. A number is read on the host only by whoever decides to log it, so that steps that
are not logged never wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID

__all__ = [
    "Field",
    "StepSums",
    "count_source_tokens",
    "count_step_targets",
    "has_loss",
    "mean_loss",
    "returned_nothing",
    "squared_lengths",
    "wide_dtype",
]


class Field(IntEnum):
    """Position of each sum in the vector."""

    LOSS = 0  # of the losses of single tokens
    TARGETS = 1  # positions with a target
    TOKENS = 2  # source tokens: what is not padding
    BUDGET = 3  # `loss_divisor`, once per rank and micro-batch
    SQUARES = 4  # of document lengths, of the whole row, once per rank and micro-batch
    MEANS = 5  # of `loss`, of micro-batches without `per_token_loss`
    MEANS_COUNT = 6  # how many of those there were
    EXACT_COUNT = 7  # micro-batches with `per_token_loss`
    SILENT = 8  # of `TARGETS`, those of micro-batches without any loss
    # From here on sums over all ranks, also over those that hold the same tokens.
    GRADIENT_SQUARES = 9  # this rank's share of the squared gradient norm
    SECONDS = 10  # wall time


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which counts add up exactly: float64 (whole numbers to 2^53), where the device has it.

    Float32 would stop counting at 2^24, one step of a 16M-token batch. Apple's MPS has no float64; one step of one
    laptop stays below that.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def count_step_targets(batch: Any) -> Tensor | None:
    """Number of targets in this rank's part of a batch: int64, 0-d, on the device; None if the batch does not tell.

    ``shift_labels`` are counted as they are. ``labels`` are aligned with the tokens, so the first of each row is no
    target.
    """
    if not isinstance(batch, Mapping):
        return None
    if isinstance(labels := batch.get("shift_labels"), Tensor):
        return (labels != IGNORE_INDEX).sum()
    if isinstance(labels := batch.get("labels"), Tensor):
        return (labels[..., 1:] != IGNORE_INDEX).sum()
    return None


def count_source_tokens(batch: Any) -> Tensor | int | None:
    """Number of tokens in this rank's part of a batch, without padding where it is marked; None without tokens."""
    if not isinstance(batch, Mapping):
        return None
    if isinstance(sources := batch.get("source_ids"), Tensor):
        return (sources != PAD_SOURCE_ID).sum()
    if isinstance(mask := batch.get("attention_mask"), Tensor) and mask.dim() == 2:
        return (mask != 0).sum()
    if isinstance(tokens := batch.get("input_ids"), Tensor):
        return tokens.numel()
    return None


def returned_nothing(output: Any) -> bool:
    """Whether a step gave callbacks nothing: None, which Lightning hands on as an empty mapping."""
    return output is None or (isinstance(output, Mapping) and not output)


def squared_lengths(batch: Any, dtype: torch.dtype) -> Tensor | float | None:
    """Sum of the squared document lengths of the whole row, padding left out: what causal attention costs.

    Rows of an ordinary batch ``[B, S]`` count as documents of S tokens.

    Args:
        batch: this rank's part of a batch; its ``cu_seqlens`` are the whole row's, its ``document_keys`` on the host.
        dtype: of the sum, wide enough for squares: :func:`wide_dtype`.

    Returns:
        0-d on the device, a number that shapes alone give, or None without tokens.
    """
    if not isinstance(batch, Mapping):
        return None
    bounds, keys = batch.get("cu_seqlens"), batch.get("document_keys")
    if isinstance(bounds, Tensor):
        lengths = bounds.diff().to(dtype)
        if isinstance(keys, Tensor) and keys.device.type == "cpu":
            lengths = lengths[: int((keys[:, 0] != PAD_SOURCE_ID).sum())]  # padding comes last
        return lengths.square().sum()
    tokens = batch.get("input_ids")
    if isinstance(tokens, Tensor) and tokens.dim() == 2:
        return float(tokens.shape[0] * tokens.shape[1] ** 2)
    return None


class StepSums:
    """Sums over the micro-batches of one step (or over one validation loader) on this rank.

    Args:
        device: where losses and labels live.

    Attributes:
        values: ``[len(Field)]``, float64 (float32 on MPS), local until the owner reduces it.

    Example:
        >>> sums = StepSums(torch.device("cpu"))
        >>> output = {"loss": torch.tensor(0.5), "per_token_loss": torch.tensor([[1.0, 2.0, 0.0]])}
        >>> sums.add(output, {"shift_labels": torch.tensor([[4, 5, -100]])})
        True
        >>> mean_loss(sums.values.tolist())
        1.5
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(Field), dtype=wide_dtype(device), device=device)

    @torch.no_grad()
    def add(self, output: Any, batch: Any, accumulate: int = 1) -> bool:
        """Add one micro-batch.

        Args:
            output: what the step returned, as Lightning hands it to callbacks: a mapping, a loss or nothing.
            batch: the batch of the step, this rank's part.
            accumulate: by how much Lightning has divided ``output["loss"]``.

        Returns:
            Whether the exact token mean is known: False if the output has no ``per_token_loss`` or the batch no labels,
            in which case ``loss`` enters as one mean. Without any loss the targets are counted, and belong to none.
        """
        values = self.values
        if (tokens := count_source_tokens(batch)) is not None:
            values[Field.TOKENS] += tokens
        if isinstance(batch, Mapping) and isinstance(divisor := batch.get("loss_divisor"), int):
            values[Field.BUDGET] += divisor
        if (squares := squared_lengths(batch, values.dtype)) is not None:
            values[Field.SQUARES] += squares
        outputs = output if isinstance(output, Mapping) else {"loss": output}
        targets = count_step_targets(batch)
        if targets is not None:
            values[Field.TARGETS] += targets
        per_token, loss = outputs.get("per_token_loss"), outputs.get("loss")
        if isinstance(per_token, Tensor) and targets is not None:
            values[Field.LOSS] += per_token.detach().sum(dtype=values.dtype)
            values[Field.EXACT_COUNT] += 1
            return True
        if isinstance(loss, Tensor):
            values[Field.MEANS] += loss.detach().to(values.dtype).mean() * accumulate
            values[Field.MEANS_COUNT] += 1
            return False
        if targets is not None:
            values[Field.SILENT] += targets
        return True


def mean_loss(sums: list[float]) -> float:
    """Return the token mean of reduced sums, 0 without targets; the mean of means where there are only means."""
    if sums[Field.MEANS_COUNT]:
        return sums[Field.MEANS] / sums[Field.MEANS_COUNT]
    return sums[Field.LOSS] / max(sums[Field.TARGETS] - sums[Field.SILENT], 1.0)


def has_loss(sums: list[float]) -> bool:
    """Whether reduced sums tell a loss: some step must have returned one."""
    return bool(sums[Field.EXACT_COUNT] or sums[Field.MEANS_COUNT])
