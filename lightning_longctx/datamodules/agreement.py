"""Ranks agree on each row: a row, the end of data, or an error. Nobody waits for a rank that has nothing to say.

For each micro-batch every rank takes part in one small reduction over all ranks, then the reader of each
sequence-parallel group sends a fixed header and its row. A rank that fails takes part too, with its message, and the
same error is raised everywhere before anybody waits for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.bad_record import text_of
from lightning_longctx.datamodules.balance import PLANNED_ROWS, pick_rows
from lightning_longctx.datamodules.packing import flatten_row, pack_documents, unflatten_row
from lightning_longctx.datamodules.runtime import BackgroundRows
from lightning_longctx.datamodules.settings import OnUnevenEnd
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology

__all__ = ["RowAgreement"]

# A longer message is cut: every rank must receive it in one buffer.
_MAX_MESSAGE_BYTES = 4096
_CODES = 3  # see RowAgreement._reduce


class RowAgreement:
    """Makes all ranks see the same kind of thing at the same row.

    Use it as a context around the work that one rank may fail at, then :meth:`exchange` the outcome::

        with agreement:
            rows.plan()
        row = agreement.exchange(rows)

    Args:
        topology: ranks and groups.
        on_uneven_end: whether the first rank without a row ends the epoch, or receives padding until the last is done.
        max_tokens_per_batch: the budget, for rows of padding.
        pad_to_multiple_of: length of a row of padding.
        balance: whether ranks pick rows of like cost among those planned.
    """

    def __init__(
        self,
        topology: Topology,
        on_uneven_end: OnUnevenEnd,
        max_tokens_per_batch: int,
        pad_to_multiple_of: int,
        balance: bool = False,
    ) -> None:
        self._depth = PLANNED_ROWS if balance and topology.dp_size > 1 else 0
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
            winner = int(self._reduce(error=True)[0])
            self._message(winner - 1, text_of(error))

    def exchange(self, rows: BackgroundRows | None) -> PackedBatch | None:
        """Return this rank's whole row, or None at the agreed end.

        Args:
            rows: on a reader, with the next one planned (none at the end of its data); on other ranks, None.

        Raises:
            DataError: another rank failed; its message is inside.
        """
        offers = [] if rows is None else rows.offers()
        if self._topology.host_group is None:
            return rows.give() if rows is not None and offers else None
        values = self._reduce(end=rows is not None and not offers, offers=offers)
        error, end, some = (int(value) for value in values[:_CODES])
        if error:
            got = f"an error on rank {error - 1}: {self._message(error - 1, '')}"
            raise DataError("data", "must be readable on every rank", got, "See that rank's own traceback.")
        if not some or (end and not self._pads):
            return None
        row = None
        if rows is not None and offers:
            row = rows.give(self._pick(values[_CODES:]))
        elif rows is not None:
            row = pack_documents([], self._budget, self._multiple)
        return row if self._topology.sp_host_group is None else self._share(row)

    def _reduce(self, error: bool = False, end: bool = False, offers: Sequence[tuple[int, float]] = ()) -> list[float]:
        """Largest value over all ranks of: failed rank + 1, a reader is at its end, a reader has a row; then offers."""
        topology = self._topology
        codes = torch.zeros(_CODES + self._depth * 2 * topology.dp_size, dtype=torch.float64)
        codes[:_CODES] = torch.tensor([topology.rank + 1 if error else 0, int(end), int(bool(offers))])
        if self._depth and offers:
            # Row numbers from 1, so that 0 says that there is no offer.
            own = torch.tensor([(row + 1, cost) for row, cost in offers[: self._depth]], dtype=torch.float64).flatten()
            start = _CODES + self._depth * 2 * topology.dp_rank
            codes[start : start + own.numel()] = own
        dist.all_reduce(codes, dist.ReduceOp.MAX, group=topology.host_group)
        values: list[float] = codes.tolist()
        return values

    def _pick(self, values: Sequence[float]) -> int:
        """Which planned row this rank gives, from the offers of all."""
        if not self._depth:
            return 0
        pairs = list(zip(values[::2], values[1::2], strict=True))
        ranks = [pairs[start : start + self._depth] for start in range(0, len(pairs), self._depth)]
        offers = [[(int(row) - 1, cost) for row, cost in rank if row] for rank in ranks]
        return pick_rows(offers)[self._topology.dp_rank]

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
        size = 2 * tokens + documents + 1 + 4 * documents
        payload = torch.empty(size, dtype=torch.int32) if row is None else flatten_row(row)
        dist.broadcast(payload, group=group, group_src=0)
        return unflatten_row(payload, tokens, documents, self._budget) if row is None else row
