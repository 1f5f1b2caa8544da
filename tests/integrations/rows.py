"""Packed rows built by hand, and the plain loop over documents that they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID


def make_documents(*lengths: int, vocabulary: int = 96, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def pack(documents: list[Tensor], padding: int = 0) -> dict[str, Any]:
    """One row; the divisor is the number of tokens with padding, as a full budget is."""
    parts = [*documents, torch.zeros(padding, dtype=torch.long)] if padding else documents
    labels = [torch.cat([part[1:], torch.tensor([IGNORE_INDEX])]) for part in documents]
    sources = [torch.full_like(part, number) for number, part in enumerate(documents)]
    if padding:
        labels.append(torch.full((padding,), IGNORE_INDEX))
        sources.append(torch.full((padding,), PAD_SOURCE_ID))
    lengths = torch.tensor([len(part) for part in parts])
    return {
        "input_ids": torch.cat(parts)[None],
        "shift_labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts])[None],
        "source_ids": torch.cat(sources)[None],
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int(),
        "max_seqlen": int(lengths.max()),
        "document_keys": torch.zeros(len(parts), 2, dtype=torch.long),
        "loss_divisor": int(lengths.sum()),
    }


def reference_loss(model: Any, documents: list[Tensor], divisor: int) -> tuple[Tensor, Tensor]:
    """Plain forward of each document, the model's own logits, plain cross entropy: sum / divisor, and per token."""
    losses = []
    for document in documents:
        logits = model(input_ids=document[None], use_cache=False).logits[0].float()
        losses.append(torch.cat([cross_entropy(logits[:-1], document[1:], reduction="none"), torch.zeros(1)]))
    per_token = torch.cat(losses)
    return per_token.sum() / divisor, per_token


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
