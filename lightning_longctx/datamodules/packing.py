"""Documents into one row: the packer. Array code only, since a row may have a million tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX, MAX_PADDING_DOCUMENT, PAD_SOURCE_ID, PackedBatch
from lightning_longctx.datamodules.documents import Document, Tokens
from lightning_longctx.errors import ConfigurationError, DataError

__all__ = ["assemble_row", "flatten_row", "pack_documents", "unflatten_row"]


def pack_documents(
    documents: Sequence[Document],
    max_tokens_per_batch: int,
    pad_to_multiple_of: int = 1,
    *,
    max_tokens: int | None = None,
) -> PackedBatch:
    """Pack documents one after another into one whole row.

    Labels are shifted inside each document; its last token has no target, so no token is trained to predict the next
    document. The row is padded to the multiple only, not to the budget, with documents of at most 4,096 tokens.

    Args:
        documents: in order. None at all gives a row of ``pad_to_multiple_of`` padding tokens, which has no weight.
        max_tokens_per_batch: the budget; becomes ``loss_divisor``.
        pad_to_multiple_of: the row's length is a multiple of this. Default 1: no padding.
        max_tokens: most tokens of the row, a multiple of ``pad_to_multiple_of``, so that padding never exceeds it.
            Default: ``max_tokens_per_batch``; more where the budget counts targets.

    Returns:
        A whole row (``S = 1``), int64 ``[1, T]`` per token, as :class:`lightning_longctx.batch.PackedBatch` says.

    Raises:
        ConfigurationError: the budget is not a multiple of ``pad_to_multiple_of``.
        DataError: an empty document, or more tokens than the budget.

    Example:
        >>> row = pack_documents([Document(0, 0, 0, np.array([1, 2, 3], np.int32))], 8, pad_to_multiple_of=4)
        >>> row["shift_labels"].tolist(), row["cu_seqlens"].tolist()
        ([[2, 3, -100, -100]], [0, 3, 4])
    """
    limit = max_tokens_per_batch if max_tokens is None else max_tokens
    if limit % pad_to_multiple_of:
        got = f"{limit} % {pad_to_multiple_of} = {limit % pad_to_multiple_of}"
        fix = "Change `max_seq_len` or `packing.pad_to_multiple_of`."
        raise ConfigurationError("max_tokens_per_batch", "must be a multiple of pad_to_multiple_of", got, fix)
    lengths = [len(document) for document in documents]
    total = sum(lengths)
    if total > limit or 0 in lengths:
        rule = "must have 1 to max_tokens_per_batch tokens in documents that are not empty"
        raise DataError("documents", rule, f"{lengths} for a budget of {limit}", "Select fewer.")
    padding = _padding_lengths(-total % pad_to_multiple_of if documents else pad_to_multiple_of)
    bounds = np.cumsum([0, *lengths, *padding], dtype=np.int32)
    # Written in place as int64: at a million tokens each further copy costs milliseconds.
    ids, shifted = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int64)
    ids[total:], shifted[total:] = 0, IGNORE_INDEX
    for document, start, stop in zip(documents, bounds[:-1].tolist(), bounds[1:].tolist(), strict=False):
        ids[start:stop] = document.input_ids
        shifted[start : stop - 1] = _labels(document)[1:]
    shifted[bounds[1:] - 1] = IGNORE_INDEX
    keys = [[document.source_id, document.number] for document in documents] + [[PAD_SOURCE_ID] * 2] * len(padding)
    return assemble_row(
        torch.from_numpy(ids),
        torch.from_numpy(shifted),
        torch.from_numpy(bounds),
        torch.tensor(keys, dtype=torch.int64),
        max_tokens_per_batch,
    )


def assemble_row(
    input_ids: Tensor, shift_labels: Tensor, cu_seqlens: Tensor, document_keys: Tensor, loss_divisor: int
) -> PackedBatch:
    """Derive a whole row from the parts that cannot be derived; the other ranks of a group receive only these.

    Args:
        input_ids: integers ``[T]``.
        shift_labels: integers ``[T]``.
        cu_seqlens: int32 ``[D+1]``.
        document_keys: int64 ``[D, 2]``.
        loss_divisor: the budget.

    Returns:
        The row, with positions and sources per token.
    """
    lengths = cu_seqlens.diff().long()
    total = input_ids.numel()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths, output_size=total)
    sources = document_keys[:, 0].repeat_interleave(lengths, output_size=total)
    return PackedBatch(
        input_ids=input_ids.long()[None],
        shift_labels=shift_labels.long()[None],
        position_ids=(torch.arange(total) - starts)[None],
        source_ids=sources[None],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
        document_keys=document_keys,
        loss_divisor=loss_divisor,
    )


def flatten_row(row: PackedBatch) -> Tensor:
    """The parts of a whole row that cannot be derived, as one int32 ``[2T + (D+1) + 4D]``, to send it."""
    keys = row["document_keys"].contiguous().view(torch.int32).flatten()  # exact: two int32 for each int64
    return torch.cat([row["input_ids"][0].int(), row["shift_labels"][0].int(), row["cu_seqlens"], keys])


def unflatten_row(payload: Tensor, tokens: int, documents: int, loss_divisor: int) -> PackedBatch:
    """The inverse of :func:`flatten_row`.

    Args:
        payload: what it gave.
        tokens: T.
        documents: D, padding included.
        loss_divisor: the budget.
    """
    input_ids, labels, bounds, keys = payload.split([tokens, tokens, documents + 1, 4 * documents])
    # Copies of the small parts: views would keep the payload, and int64 needs a start that is a multiple of 8 bytes.
    keys = keys.clone().view(torch.int64).reshape(-1, 2)
    return assemble_row(input_ids, labels, bounds.clone(), keys, loss_divisor)


def _labels(document: Document) -> Tokens:
    return document.input_ids if document.labels is None else document.labels


def _padding_lengths(tokens: int) -> list[int]:
    whole, rest = divmod(tokens, MAX_PADDING_DOCUMENT)
    return [MAX_PADDING_DOCUMENT] * whole + [rest] * bool(rest)
