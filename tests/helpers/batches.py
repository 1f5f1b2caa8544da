"""Packed batches built by hand, independent of the package's own packing."""

from __future__ import annotations

import torch

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID, PackedBatch


def packed_batch(
    lengths: list[int], *, padding: int = 0, vocab_size: int = 257, divisor: int | None = None
) -> PackedBatch:
    """One row of random documents, a loop over documents on purpose; ``padding`` tokens follow as one last document.

    Document ``i`` comes from source ``i % 2``.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    columns: dict[str, list[torch.Tensor]] = {"ids": [], "labels": [], "positions": [], "sources": []}
    for number, length in enumerate([*lengths, *([padding] if padding else [])]):
        is_padding = number == len(lengths)
        ids = torch.zeros(length).long() if is_padding else torch.randint(vocab_size, (length,), generator=generator)
        labels = torch.full((length,), IGNORE_INDEX)
        if not is_padding:
            labels[:-1] = ids[1:]
        columns["ids"].append(ids)
        columns["labels"].append(labels)
        columns["positions"].append(torch.arange(length))
        columns["sources"].append(torch.full((length,), PAD_SOURCE_ID if is_padding else number % 2))
    pieces = [len(piece) for piece in columns["ids"]]
    keys = [[number % 2, number] for number in range(len(lengths))] + [[-1, -1]] * bool(padding)
    return {
        "input_ids": torch.cat(columns["ids"])[None],
        "shift_labels": torch.cat(columns["labels"])[None],
        "position_ids": torch.cat(columns["positions"])[None],
        "source_ids": torch.cat(columns["sources"])[None],
        "cu_seqlens": torch.tensor([0, *pieces]).cumsum(0).int(),
        "max_seqlen": max(pieces),
        "document_keys": torch.tensor(keys),
        "loss_divisor": divisor or sum(pieces),
    }
