"""From the whole row, which every rank of a sequence-parallel group loads, to this rank's slice of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import TOKEN_KEYS, HostBounds, is_packed_batch, validate_packed_batch
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.topology import Topology
from lightning_longctx.units import counted

__all__ = ["RowSharder"]

# A loader that shuffles each rank alone shows at once; two batches also catch one that agrees on the first by chance.
_CHECKED_BATCHES = 2


class RowSharder:
    """Slices packed batches over a sequence-parallel group and checks the first ones.

    Args:
        topology: the run's.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._left_to_check = _CHECKED_BATCHES

    def shard(self, batch: Any, moved: Any) -> Any:
        """Return this rank's part.

        Args:
            batch: as the loader gave it; its ``document_keys`` stay on the host.
            moved: the same on the device.

        Returns:
            A new dict whose per-token keys are ``[1, T/S]``, with ``host_bounds``. At sp 1 any batch passes, packed or
            not.

        Raises:
            ConfigurationError: sp > 1 with a batch that is not packed, or with rows that differ inside a group.
            BatchContractError: a packed batch that breaks a rule (first batches only), or one that is sliced already.
        """
        topology = self._topology
        packed = is_packed_batch(moved)
        if not packed and topology.sp_size > 1:
            got = f"keys {sorted(moved)}" if isinstance(moved, dict) else type(moved).__name__
            fix = "Use DynamicBatchingDataModule, or give rows as `PackedBatch` describes."
            raise ConfigurationError("batch", "must be a packed batch at sequence_parallel_size > 1", got, fix)
        if not packed:
            return moved
        whole = {**moved, "document_keys": batch["document_keys"]}
        if batch["cu_seqlens"].device.type == "cpu":  # a loader's row: no attention layer has to read it back
            whole["host_bounds"] = HostBounds(batch["cu_seqlens"].tolist())
        if self._left_to_check > 0:
            self._left_to_check -= 1
            self._check(whole)
        return self._slice(whole)

    def _check(self, whole: dict[str, Any]) -> None:
        problem: BatchContractError | None = None
        try:
            validate_packed_batch(whole)
        except BatchContractError as error:
            problem = error  # raised after the ranks have met below, or the others would wait
        group = self._topology.sp_host_group
        if group is not None:
            mine = torch.tensor([_checksum(whole) if problem is None else -1])
            everyone = [torch.zeros_like(mine) for _ in range(self._topology.sp_size)]
            dist.all_gather(everyone, mine, group=group)
            if problem is None and len({int(value) for value in everyone}) > 1:
                raise ConfigurationError(
                    "train_dataloader",
                    "must give the ranks of a sequence-parallel group the same row",
                    f"different rows on {counted(self._topology.sp_size, 'rank')}",
                    "Use DynamicBatchingDataModule, or a sampler over `topology_of(trainer).dp_rank` and `.dp_size`.",
                )
        if problem is not None:
            raise problem

    def _slice(self, whole: dict[str, Any]) -> dict[str, Any]:
        size = self._topology.sp_size
        total = whole["input_ids"].shape[1]
        if size == 1:
            return whole
        if total % size:
            raise BatchContractError(
                "batch['input_ids']",
                f"must have a length that sequence_parallel_size = {size} divides",
                total,
                "Set `packing.pad_to_multiple_of` to a multiple of it.",
            )
        length = total // size
        start = self._topology.sp_rank * length
        return {**whole, **{key: _part(whole[key], start, length) for key in TOKEN_KEYS}}


def _part(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor[:, start : start + length].contiguous()


def _checksum(whole: dict[str, Any]) -> int:
    # Weighted by position, or a row with its documents exchanged would look the same; 2^20 keeps sums far from 2^63.
    places = torch.arange(1, whole["input_ids"].shape[1] + 1, device=whole["input_ids"].device)
    parts = [(whole[key][0] % 2**20 * places).sum() for key in TOKEN_KEYS]
    return int(torch.stack(parts).sum() % 2**62)
