"""Ranks agree on each row: a row, the end of data, or an error. Nobody waits for a rank that has nothing to say.

For each micro-batch every rank takes part in one small reduction over all ranks, then the reader of each
sequence-parallel group sends a fixed header and its row. A rank that fails takes part too, with its message, and the
same error is raised everywhere before anybody waits for a row.
"""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.packing import assemble_row, pack_documents
from lightning_longctx.datamodules.settings import OnUnevenEnd
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology

__all__ = ["RowAgreement"]

# A longer message is cut: every rank must receive it in one buffer.
_MAX_MESSAGE_BYTES = 4096


class RowAgreement:
    """Makes all ranks see the same kind of thing at the same row.

    Use it as a context around the work that one rank may fail at, then :meth:`exchange` the outcome::

        with agreement:
            row = next_row_or_none()
        row = agreement.exchange(row)

    Args:
        topology: ranks and groups.
        on_uneven_end: whether the first rank without a row ends the epoch, or receives padding until the last is done.
        max_tokens_per_batch: the budget, for rows of padding.
        pad_to_multiple_of: length of a row of padding.
    """

    def __init__(
        self, topology: Topology, on_uneven_end: OnUnevenEnd, max_tokens_per_batch: int, pad_to_multiple_of: int
    ) -> None:
        self._topology = topology
        self._pads = on_uneven_end == "pad"
        self._budget = max_tokens_per_batch
        self._multiple = pad_to_multiple_of

    def __enter__(self) -> RowAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interrupt is not an error of the data, and must not wait for other ranks.
        if isinstance(error, Exception) and self._topology.host_group is not None:
            winner = self._reduce(error=True)[0]
            self._message(winner - 1, f"{type(error).__name__}: {error}")

    def exchange(self, row: PackedBatch | None) -> PackedBatch | None:
        """Return this rank's whole row, or None at the agreed end.

        Args:
            row: on a reader, its next row, or None at the end of its data; on other ranks, None.

        Raises:
            DataError: another rank failed; its message is inside.
        """
        if self._topology.host_group is None:
            return row
        reader = self._topology.is_reader
        error, end, some = self._reduce(end=reader and row is None, some=row is not None)
        if error:
            got = f"an error on rank {error - 1}: {self._message(error - 1, '')}"
            raise DataError("data", "must be readable on every rank", got, "See that rank's own traceback.")
        if not some or (end and not self._pads):
            return None
        if reader and row is None:
            row = pack_documents([], self._budget, self._multiple)
        return row if self._topology.sp_host_group is None else self._share(row)

    def _reduce(self, error: bool = False, end: bool = False, some: bool = False) -> list[int]:
        """Largest value over all ranks of: failed rank + 1, a reader is at its end, a reader has a row."""
        codes = torch.tensor([self._topology.rank + 1 if error else 0, int(end), int(some)])
        dist.all_reduce(codes, dist.ReduceOp.MAX, group=self._topology.host_group)
        values: list[int] = codes.tolist()
        return values

    def _message(self, rank: int, text: str) -> str:
        """Send or receive the message of ``rank``."""
        buffer = torch.zeros(_MAX_MESSAGE_BYTES, dtype=torch.uint8)
        if rank == self._topology.rank:
            data = text.encode()[:_MAX_MESSAGE_BYTES]
            buffer[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=rank, group=self._topology.host_group)
        return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")

    def _share(self, row: PackedBatch | None) -> PackedBatch:
        """Send the reader's row to its group: header int64 [T, D], payload int32 [2T + (D+1) + 4D]."""
        group = self._topology.sp_host_group
        header = torch.zeros(2, dtype=torch.int64)
        if row is not None:
            header[:] = torch.tensor([row["input_ids"].numel(), len(row["document_keys"])])
        dist.broadcast(header, group=group, group_src=0)
        tokens, documents = header.tolist()
        sizes = [tokens, tokens, documents + 1, 4 * documents]
        payload = torch.empty(sum(sizes), dtype=torch.int32) if row is None else _payload(row)
        dist.broadcast(payload, group=group, group_src=0)
        if row is not None:
            return row
        input_ids, labels, bounds, keys = (part.clone() for part in torch.split(payload, sizes))
        return assemble_row(input_ids, labels, bounds, keys.view(torch.int64).reshape(-1, 2), self._budget)


def _payload(row: PackedBatch) -> Tensor:
    keys = row["document_keys"].contiguous().view(torch.int32).flatten()  # exact: two int32 for each int64
    return torch.cat([row["input_ids"][0].int(), row["shift_labels"][0].int(), row["cu_seqlens"], keys])
