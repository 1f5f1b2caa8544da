"""The packed batch: the one contract between data, strategy, model and callbacks.

One row holds whole documents one after another. The per-token keys are sliced over the ranks of a sequence-parallel
group; the facts about the row (document bounds, divisor) are whole on every rank. Labels are shifted inside each
document before that slice, since a shard cannot know the first token of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from lightning_longctx.errors import BatchContractError

__all__ = [
    "IGNORE_INDEX",
    "MAX_PADDING_DOCUMENT",
    "PAD_SOURCE_ID",
    "TOKEN_KEYS",
    "HostBounds",
    "PackedBatch",
    "PackedSequence",
    "count_targets",
    "is_packed_batch",
    "model_inputs",
    "validate_packed_batch",
]

#: The label of a position without a target; the value of PyTorch's and Hugging Face's cross entropy.
IGNORE_INDEX = -100

#: The source id of padding.
PAD_SOURCE_ID = -1

#: Longest document made of padding, in tokens: attention over padding is quadratic, so the tail is cut in pieces.
MAX_PADDING_DOCUMENT = 4096

#: The keys that hold one value per token, in this order, and are sliced over a sequence-parallel group.
TOKEN_KEYS = ("input_ids", "shift_labels", "position_ids", "source_ids")


class HostBounds:
    """The document bounds of a row on the host, and what an attention core derives from them once a row.

    With them no attention layer reads ``cu_seqlens`` back from the device. A plain object and no tuple, so that what
    walks a call's arguments (FSDP2's casts, recompute) passes it on as it is, however many documents there are.

    Args:
        values: ``cu_seqlens`` as D+1 ints.

    Attributes:
        derived: kept by cores for the other layers of the same row, such as a block mask; by a key of their own.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self.derived: dict[object, Any] = {}


class PackedBatch(TypedDict):
    """One row of ``T`` tokens from ``D`` documents, on one of ``S`` sequence-parallel ranks. A plain dict.

    Attributes:
        input_ids: int64 ``[1, T/S]``, local.
        shift_labels: int64 ``[1, T/S]``, local. Already shifted inside each document; the last token of a document
            has -100.
        position_ids: int64 ``[1, T/S]``, local. Restart at 0 in each document.
        source_ids: int64 ``[1, T/S]``, local. Which source each token came from; -1 on padding.
        cu_seqlens: int32 ``[D+1]``, of the whole row on every rank. Strictly increasing, first 0, last ``T``.
        max_seqlen: the longest document of the whole row.
        document_keys: int64 ``[D, 2]``, whole, on the host. (source id, document number in the source); (-1, -1) for
            padding.
        loss_divisor: the token budget of a micro-batch; the same on every rank.

    A row on a device may also have ``host_bounds``, its :class:`HostBounds`: the strategy adds them.
    """

    input_ids: Tensor
    shift_labels: Tensor
    position_ids: Tensor
    source_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    document_keys: Tensor
    loss_divisor: int


class PackedSequence(NamedTuple):
    """Document bounds of a whole row, as one keyword argument from the model's forward to the attention function.

    It travels with the call and not in a context variable, because activation recompute runs the forward again when any
    context around the step is long gone.

    Attributes:
        cu_seqlens: int32 ``[D+1]``, of the whole row (not of the shard).
        max_seqlen: the longest document of the whole row.
        host: the bounds on the host, where the batch has them.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    host: HostBounds | None = None

    def bounds(self) -> tuple[int, ...]:
        """``cu_seqlens`` as ints; waits for the device where the batch came without ``host_bounds``."""
        return tuple(self.cu_seqlens.tolist()) if self.host is None else self.host.values


def is_packed_batch(batch: object) -> bool:
    """Whether ``batch`` claims to be a packed batch: a mapping with all of its keys."""
    return isinstance(batch, Mapping) and PackedBatch.__required_keys__ <= batch.keys()


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return exactly what a model's forward may see of a packed batch.

    Labels, sources, keys and divisor stay outside: a Hugging Face model shifts ``labels`` again, silently.

    Args:
        batch: a :class:`PackedBatch`, whole or sharded.

    Returns:
        ``input_ids`` and ``position_ids``, int64 ``[1, T/S]``, and ``packed_sequence``, a :class:`PackedSequence`.

    Example:
        >>> hidden = model(**model_inputs(batch), use_cache=False).last_hidden_state  # doctest: +SKIP
    """
    return {
        "input_ids": batch["input_ids"],
        "position_ids": batch["position_ids"],
        "packed_sequence": PackedSequence(batch["cu_seqlens"], batch["max_seqlen"], batch.get("host_bounds")),
    }


def count_targets(batch: Mapping[str, Any]) -> Tensor:
    """Count the positions with a target in this rank's shard: int64, 0-d, on the batch's device."""
    labels: Tensor = batch["shift_labels"]
    return (labels != IGNORE_INDEX).sum()


def validate_packed_batch(batch: Mapping[str, Any], sp_size: int = 1) -> None:
    """Check every rule of a packed batch.

    It reads values on the host: for loaders, tests and first steps, not for each step.

    Args:
        batch: the candidate.
        sp_size: into how many shards the per-token keys are cut; 1 for a whole row.

    Raises:
        BatchContractError: the first broken rule, with key, rule and value.
    """
    missing = sorted(PackedBatch.__required_keys__ - batch.keys())
    if missing:
        raise BatchContractError(
            f"batch[{missing[0]!r}]",
            "must be present",
            f"the keys {sorted(batch)}",
            "Build rows with `pack_documents`.",
        )
    if "attention_mask" in batch:
        _fail("attention_mask", "must be absent (document bounds are in `cu_seqlens`)", "one", "Leave the key out.")
    if "labels" in batch:
        _fail("labels", "must be absent (a packed batch has `shift_labels`)", "one", "Shift inside each document.")
    _check_bounds(batch)
    _check_tokens(batch, sp_size)
    if sp_size == 1:
        _check_documents(batch)


def _fail(key: str, rule: str, got: object, fix: str) -> None:
    raise BatchContractError(f"batch[{key!r}]", rule, got, fix)


def _check_bounds(batch: Mapping[str, Any]) -> None:
    bounds = batch["cu_seqlens"]
    if not isinstance(bounds, Tensor) or bounds.dtype != torch.int32 or bounds.dim() != 1 or bounds.numel() < 2:
        _fail(
            "cu_seqlens", "must be int32 [D+1] with D >= 1", _describe(bounds), "Give the document bounds of the row."
        )
    lengths = bounds.diff()
    if int(bounds[0]) != 0 or int(lengths.min()) <= 0:
        _fail("cu_seqlens", "must start at 0 and strictly increase", bounds.tolist(), "Leave empty documents out.")
    if batch["max_seqlen"] != int(lengths.max()) or isinstance(batch["max_seqlen"], Tensor):
        got = f"{batch['max_seqlen']!r} where the longest document has {int(lengths.max())}"
        _fail("max_seqlen", "must be the longest document, as an int", got, "Compute it from the unsharded row.")
    keys = batch["document_keys"]
    documents = bounds.numel() - 1
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or tuple(keys.shape) != (documents, 2):
        _fail(
            "document_keys",
            f"must be int64 [{documents}, 2]",
            _describe(keys),
            "Give (source id, number) per document.",
        )
    if keys.device.type != "cpu":
        _fail("document_keys", "must stay on the host", keys.device, "Do not move this key to the device.")
    divisor = batch["loss_divisor"]
    if not isinstance(divisor, int) or divisor < 1:
        _fail("loss_divisor", "must be a positive int", divisor, "Give the token budget of a micro-batch.")


def _check_tokens(batch: Mapping[str, Any], sp_size: int) -> None:
    total = int(batch["cu_seqlens"][-1])
    if total % sp_size:
        fix = "Set `pad_to_multiple_of` to a multiple of sequence_parallel_size."
        _fail("cu_seqlens", f"must end at a multiple of sp_size = {sp_size}", total, fix)
    shape = (1, total // sp_size)
    for key in TOKEN_KEYS:
        value = batch[key]
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or tuple(value.shape) != shape:
            fix = "Slice the row once, by `LongContextFSDPStrategy`." if sp_size > 1 else "Give one row of all tokens."
            _fail(key, f"must be int64 {list(shape)}", _describe(value), fix)


def _check_documents(batch: Mapping[str, Any]) -> None:
    bounds = batch["cu_seqlens"].long().to(batch["input_ids"].device)
    starts, total = bounds[:-1], int(bounds[-1])
    expected = torch.arange(total, device=bounds.device) - starts.repeat_interleave(bounds.diff())
    wrong = (batch["position_ids"][0] != expected).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        got = f"{int(batch['position_ids'][0, at])} at token {at}"
        _fail("position_ids", "must restart at 0 in each document and rise by 1", got, "Number each document from 0.")
    last = batch["shift_labels"][0, bounds[1:] - 1]
    if bool((last != IGNORE_INDEX).any()):
        got = last.tolist()
        _fail("shift_labels", "must be -100 on the last token of each document", got, "Shift inside each document.")
    labels = batch["shift_labels"][0]
    unknown = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    if unknown.numel():
        fix = "Mask with -100 alone."
        _fail("shift_labels", "must be token ids, or -100 where there is no target", int(unknown[0]), fix)
    padding = batch["source_ids"][0] == PAD_SOURCE_ID
    if bool((batch["shift_labels"][0][padding] != IGNORE_INDEX).any()):
        _fail("shift_labels", "must be -100 on padding", "a target on a padding token", "Padding is never trained.")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"
