"""What a batch says about its tokens: which have a target, and which slot each target belongs to.

A target belongs to the source of the *target* token, so slots are shifted like labels are. Sources come from the batch
alone; document bounds are never guessed from positions, since rows may start in the middle of a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID
from lightning_longctx.callbacks.source_names import SourceTable, exchanged
from lightning_longctx.errors import BatchContractError
from lightning_longctx.units import counted

__all__ = ["POSITION_NAMES", "SOURCE_KEYS", "BatchReader", "TokenLosses", "losses_of_output"]

#: Where source ids are looked for, in this order, when no key is given.
SOURCE_KEYS = ("channel_id", "source_id", "dataset_id", "ds_idx", "source_ids")

# Upper ends of the ranges of positions, in tokens. Four times as much each where models are strong, and twice as much
# where long context shows.
_POSITION_ENDS = (2**12, 2**14, 2**16, 2**17, 2**18, 2**19, 2**20)
#: Ranges of positions in a document, as names for keys.
POSITION_NAMES = ("0-4K", "4K-16K", "16K-64K", "64K-128K", "128K-256K", "256K-512K", "512K-1M", "over-1M")


class TokenLosses(NamedTuple):
    """Losses of single tokens. Entry ``[b, i]`` is for the prediction made at token ``i`` of row ``b``.

    Attributes:
        losses: ``[B, S]``, local, any floating dtype.
        is_target: bool ``[B, S]``: whether there is a target.
    """

    losses: Tensor
    is_target: Tensor


def losses_of_output(per_token_loss: Tensor, batch: Mapping[str, Any]) -> TokenLosses:
    """Pair the losses that a step returned with the labels of its batch.

    Args:
        per_token_loss: ``[B, S]``, or ``[B, S - 1]`` beside ``labels``; flat is fine too.
        batch: with ``shift_labels`` ``[B, S]``, or ``labels`` ``[B, S]`` that are aligned with the tokens.

    Raises:
        BatchContractError: no labels, or another shape.
    """
    labels, shifted = batch.get("shift_labels"), True
    if not isinstance(labels, Tensor):
        labels, shifted = batch.get("labels"), False
    if not isinstance(labels, Tensor):
        fix = "Give `shift_labels` or `labels`, so that targets can be told from padding and prompts."
        raise BatchContractError("batch['labels']", "must be a tensor beside `per_token_loss`", sorted(batch), fix)
    rows = labels.reshape(-1, labels.shape[-1])
    is_target = rows != IGNORE_INDEX
    if not shifted:  # the first token of a row is predicted by nobody
        is_target = torch.cat([is_target[:, 1:], torch.zeros_like(is_target[:, :1])], 1)
    count, width = is_target.shape
    if per_token_loss.numel() == count * width:
        return TokenLosses(per_token_loss.detach().reshape(count, width), is_target)
    if not shifted and per_token_loss.numel() == count * (width - 1):
        return TokenLosses(per_token_loss.detach().reshape(count, width - 1), is_target[:, :-1])
    fix = "Return one loss per token, of the same shard as the labels."
    got = f"{list(per_token_loss.shape)} for labels {list(labels.shape)}"
    raise BatchContractError("training_step['per_token_loss']", "must have the shape of the labels", got, fix)


@dataclass
class BatchReader:
    """Reads slots from batches.

    Args:
        table: the sources, or the ranges of positions.
        group_by: which of the two.
        source_key: where the ids are; None looks for :data:`SOURCE_KEYS`.
        sp_rank: which part of a row this rank holds.
        sp_size: in how many parts rows are cut.
    """

    table: SourceTable
    group_by: Literal["source", "position"] = "source"
    source_key: str | None = None
    sp_rank: int = 0
    sp_size: int = 1
    _ends: Tensor | None = None

    def key_of(self, batch: Mapping[str, Any]) -> str:
        """Return the key of the source ids.

        Raises:
            BatchContractError: the batch has none.
        """
        wanted = SOURCE_KEYS if self.source_key is None else (self.source_key,)
        found = next((key for key in wanted if batch.get(key) is not None), None)
        if found is None:
            fix = "Put the id of the source of each row, document or token into the batch, or set `source_key`."
            raise BatchContractError(f"batch[{wanted[0]!r}]", "must hold source ids", f"keys {sorted(batch)}", fix)
        return found

    def slots_of_targets(self, batch: Mapping[str, Any], like: Tensor) -> Tensor:
        """Slots of the tokens that are predicted at each place.

        Args:
            batch: this rank's part.
            like: ``[B, S]``, for shape and device.

        Returns:
            Integers ``[B, S]``; out of range where the batch does not tell.

        Raises:
            BatchContractError: no source ids, or ids that fit neither rows nor documents nor tokens.
        """
        if self.group_by == "position":
            # The place of the target in its document is one further than that of the token that predicts it.
            return self._ranges(_positions(batch, like) + 1)
        return self._source_slots(batch, like, shift=1)

    def slots_of_tokens(self, batch: Mapping[str, Any], like: Tensor) -> Tensor:
        """Slots of the tokens themselves, out of range on padding; otherwise as :meth:`slots_of_targets`."""
        if self.group_by == "position":
            slots = self._ranges(_positions(batch, like))
            sources = batch.get("source_ids")
            if isinstance(sources, Tensor) and sources.shape == slots.shape:
                slots = slots.masked_fill(sources == PAD_SOURCE_ID, -1)
        else:
            slots = self._source_slots(batch, like, shift=0)
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == slots.shape:
            slots = slots.masked_fill(mask == 0, -1)
        return slots

    def slots_of_samples(self, batch: Mapping[str, Any], device: torch.device) -> Tensor:
        """Slots of the documents that begin in this batch; of its rows where documents are not told.

        A row that several ranks share is counted by the first of them.
        """
        if self.sp_rank:
            return torch.empty(0, dtype=torch.int64, device=device)
        ids = _as_ids(batch[self.key_of(batch)], self.table, device)
        if ids.dim() == 2 and isinstance(keys := batch.get("document_keys"), Tensor):
            ids = _on(keys[:, 0], device)
        return self.table.slots_of(ids[:, 0] if ids.dim() == 2 else ids.reshape(-1))

    def named_ids(self, batch: Mapping[str, Any], name_key: str) -> tuple[Tensor, list[str]]:
        """Return the ids and the names that a batch gives its rows or documents.

        Raises:
            BatchContractError: not one name for each id.
        """
        names = batch.get(name_key)
        if isinstance(names, str):
            names = [names]
        ids = _as_ids(batch[self.key_of(batch)], self.table, None).reshape(-1)
        if not isinstance(names, Sequence) or len(names) != ids.numel():
            got = f"{len(names) if isinstance(names, Sequence) else type(names).__name__} for {ids.numel()} ids"
            fix = "Give one name for each id of a row or document."
            raise BatchContractError(f"batch[{name_key!r}]", "must name each source id", got, fix)
        return ids, [exchanged(str(name)) for name in names]

    def _ranges(self, positions: Tensor) -> Tensor:
        if self._ends is None or self._ends.device != positions.device:
            self._ends = torch.tensor(_POSITION_ENDS, device=positions.device)
        return torch.bucketize(positions, self._ends, right=True, out_int32=True)

    def _source_slots(self, batch: Mapping[str, Any], like: Tensor, shift: int) -> Tensor:
        key = self.key_of(batch)
        ids = _as_ids(batch[key], self.table, like.device)
        rows, width = like.shape
        if ids.dim() == 1 and ids.numel() == rows * width:
            ids = ids.view(rows, width)
        slots = self.table.slots_of(ids)
        if ids.shape == (rows, width) or ids.shape == (rows, width + 1):  # per token; losses may lack the last one
            return self._shifted(batch, slots, shift, width)
        if ids.shape == (rows, width * self.sp_size):  # per token of the whole row
            start = self.sp_rank * width + shift
            return torch.cat([slots, slots[:, -1:]], 1)[:, start : start + width]
        flat = slots.reshape(-1)
        bounds = batch.get("cu_seqlens")
        if isinstance(bounds, Tensor) and rows == 1 and flat.numel() == bounds.numel() - 1:
            start = self.sp_rank * width + shift
            documents = self._documents(bounds, torch.arange(start, start + width, device=like.device))
            return flat[documents][None]
        if flat.numel() in (1, rows):
            return flat[:, None].expand(rows, width)
        fix = "Give one id for each row, document or token."
        got = f"{list(ids.shape)} for {counted(rows, 'row')} of {counted(width, 'token')}"
        raise BatchContractError(f"batch[{key!r}]", "must have one id per row, document or token", got, fix)

    def _shifted(self, batch: Mapping[str, Any], slots: Tensor, shift: int, width: int) -> Tensor:
        if not shift or slots.shape[1] > width:
            return slots[:, shift : shift + width]
        return torch.cat([slots[:, 1:], self._after(batch, slots)], 1)

    def _after(self, batch: Mapping[str, Any], slots: Tensor) -> Tensor:
        """Slots [B, 1] of the tokens behind this rank's part; of its last tokens where nothing follows."""
        keys, bounds = batch.get("document_keys"), batch.get("cu_seqlens")
        if self.sp_rank == self.sp_size - 1 or not isinstance(keys, Tensor) or not isinstance(bounds, Tensor):
            return slots[:, -1:]
        place = torch.full((1, 1), (self.sp_rank + 1) * slots.shape[1], device=slots.device)
        return self.table.slots_of(_on(keys[:, 0], slots.device))[self._documents(bounds, place)]

    def _documents(self, bounds: Tensor, places: Tensor) -> Tensor:
        """Numbers of the documents that hold these places of the whole row; the last one behind its end."""
        found = torch.searchsorted(bounds, places.to(bounds.dtype), right=True) - 1
        return found.clamp_(0, bounds.numel() - 2)


def _as_ids(value: Any, table: SourceTable, device: torch.device | None) -> Tensor:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
        # Names are looked up on the host, so what comes out are slots; a table of names is numbered by them.
        value = table.ids_of_names(value)
    try:
        ids = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a ragged list, None in a list, any object
        raise _no_integers(f"{type(value).__name__} {value!r:.60}") from error
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise _no_integers(ids.dtype)
    return ids if device is None else _on(ids, device)


def _no_integers(got: object) -> BatchContractError:
    fix = "Give integers, as a tensor, or names that are in `source_names`."
    return BatchContractError("batch[source_key]", "must hold integer source ids", got, fix)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A few numbers from the host to the device; never the other way, which would wait for it."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def _positions(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Positions [B, S] in the document: the batch's own; without any, the place in the row after left padding."""
    rows, width = like.shape
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor):
        if positions.dim() == 3:  # several axes: text rises on all of them, and an image's first may stand still
            positions = positions.amax(0)
        return positions[..., :width].expand(rows, width)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask.long().cumsum(1) - 1).clamp_(min=0)[:, :width]
    return torch.arange(width, device=like.device).expand(rows, width)
