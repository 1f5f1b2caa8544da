"""The loss of each document of a packed row, and which documents have the largest.

Ranks that share a row hold parts of its documents, so sums and counts are kept apart until they are joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.topology import Topology

__all__ = ["DocumentLoss", "RowLosses", "document_sums", "worst_documents"]


class RowLosses(NamedTuple):
    """What is kept of one micro-batch.

    Attributes:
        keys: int64 ``[D, 2]``, on the host: source id and number of each document.
        sums: float32 ``[2, D]``, on the device: losses and numbers of targets in this rank's shard.
    """

    keys: Tensor
    sums: Tensor


class DocumentLoss(NamedTuple):
    """A document and its mean loss over a step.

    Attributes:
        source_id: place of its source.
        number: its number in the source.
        loss: mean over its targets; not a number if one of its tokens has none.
        targets: how many those are.
    """

    source_id: int
    number: int
    loss: float
    targets: int


@torch.no_grad()
def document_sums(per_token_loss: Tensor, shift_labels: Tensor, cu_seqlens: Tensor, sp_rank: int) -> Tensor:
    """Sum losses and count targets by document, on the device.

    Args:
        per_token_loss: float32 ``[1, T/S]``, local.
        shift_labels: int64 ``[1, T/S]``, local.
        cu_seqlens: int32 ``[D+1]`` of the whole row.
        sp_rank: which shard this rank holds.

    Returns:
        float32 ``[2, D]``, local. A loss that is not a number makes only its own document's sum one.

    Example:
        >>> losses, labels = torch.tensor([[1.0, 2.0, 4.0, 0.0]]), torch.tensor([[7, 7, 7, -100]])
        >>> document_sums(losses, labels, torch.tensor([0, 2, 4], dtype=torch.int32), 0)
        tensor([[3., 4.],
                [2., 1.]])
    """
    tokens = per_token_loss.shape[1]
    positions = torch.arange(sp_rank * tokens, (sp_rank + 1) * tokens, device=per_token_loss.device)
    documents = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)  # [T/S]
    values = torch.stack([per_token_loss[0].float(), (shift_labels[0] != IGNORE_INDEX).float()])
    sums = values.new_zeros(2, cu_seqlens.numel() - 1)
    return sums.index_add_(1, documents, values)


def worst_documents(rows: Iterable[RowLosses], topology: Topology, count: int) -> list[DocumentLoss]:
    """Documents with the largest mean loss over all ranks, the worst first; those without a number before all others.

    Every rank calls it, with the same number of rows in each sequence-parallel group: one reduction a row in that
    group, then one exchange of a fixed shape over all ranks.

    Args:
        rows: of the micro-batches of one step on this rank.
        topology: the run's.
        count: how many to name at most.
    """
    own: list[DocumentLoss] = []
    for row in rows:
        sums = row.sums.clone()
        if topology.sp_group is not None:
            dist.all_reduce(sums, group=topology.sp_group)
        losses, targets = sums.tolist()
        for (source_id, number), loss, targets_here in zip(row.keys.tolist(), losses, targets, strict=True):
            if targets_here and source_id >= 0:
                own.append(DocumentLoss(source_id, number, loss / targets_here, int(targets_here)))
    own = sorted(own, key=_badness, reverse=True)[:count] if topology.is_reader else []
    return sorted(_gather(own, topology, count), key=_badness, reverse=True)[:count]


def _gather(own: list[DocumentLoss], topology: Topology, count: int) -> list[DocumentLoss]:
    if topology.host_group is None:
        return own
    # Numbers of documents are exact in float64; rows that are not filled have no targets.
    table = torch.zeros(count, len(DocumentLoss._fields), dtype=torch.float64)
    for place, document in enumerate(own):
        table[place] = torch.tensor(document, dtype=torch.float64)
    tables = [torch.zeros_like(table) for _ in range(topology.world_size)]
    dist.all_gather(tables, table, group=topology.host_group)
    rows = [row for ranks_table in tables for row in ranks_table.tolist() if row[-1]]
    return [DocumentLoss(int(source), int(number), loss, int(targets)) for source, number, loss, targets in rows]


def _badness(document: DocumentLoss) -> tuple[bool, float]:
    no_number = document.loss != document.loss
    return no_number, 0.0 if no_number else document.loss
