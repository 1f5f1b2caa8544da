"""A checkpoint as files of other libraries: safetensors with a configuration, or one torch file. From disk, alone."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_longctx.checkpoint.address import PathLike, is_address
from lightning_longctx.checkpoint.discovery import reading
from lightning_longctx.checkpoint.layout import OPTIMIZER
from lightning_longctx.checkpoint.reading import SavedTensor, TensorDirectory
from lightning_longctx.checkpoint.restore import OpenCheckpoint
from lightning_longctx.checkpoint.states import saved_optimizer_state
from lightning_longctx.errors import CheckpointError

__all__ = ["ExportKind", "export_checkpoint"]

ExportKind = Literal["hf", "torch", "lightning"]

#: Bytes of a safetensors file, and so the memory that an export needs. The size that Hugging Face itself uses.
SHARD_BYTES = 5 * 10**9

# Files of a tokenizer beside the model that was trained.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_INDEX = "model.safetensors.index.json"


def export_checkpoint(
    checkpoint: PathLike,
    output: str | os.PathLike[str],
    kind: ExportKind = "hf",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | None = None,
) -> Path:
    """Write the weights of a checkpoint in another form.

    Args:
        checkpoint: its directory.
        output: directory (``hf``) or file to write, on this machine; must not exist.
        kind: ``hf``: safetensors, ``config.json``, tokenizer. ``torch``: one file with weights and hyperparameters, as
            ``load_from_checkpoint`` reads it. ``lightning``: besides, optimizers and loops, as ``ckpt_path`` of a stock
            Trainer reads it.
        dtype: of floating-point weights; None: as saved.
        shard_bytes: largest safetensors file, and the memory needed (``hf``; the others need that of all weights).
        tokenizer: directory of the tokenizer; None: the one that was trained with, if there is one.

    Returns:
        ``output``.

    Raises:
        CheckpointError: the checkpoint has no complete weights, or ``output`` exists.
    """
    if is_address(output):
        raise CheckpointError(str(output), "must be a path of this machine", "an address", "Copy it there afterwards.")
    opened, target = OpenCheckpoint(checkpoint, deep_bytes=None), Path(output)
    if opened.commit.trainable_only:
        fix = "Load it into the model with its base (AsyncDCPCheckpoint.load_weights), and save that."
        raise CheckpointError(str(checkpoint), "must hold all weights", "those of trainable parameters only", fix)
    if target.exists():
        raise CheckpointError(str(output), "must not exist yet", "an existing path", "Name another, or remove it.")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with reading(opened.path):
            if kind == "hf":
                _write_hugging_face(opened, partial, dtype, shard_bytes, tokenizer)
            else:
                _write_torch(opened, partial, dtype, kind == "lightning")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if partial.is_file():
            partial.unlink()
    return target


def _write_hugging_face(
    opened: OpenCheckpoint, folder: Path, dtype: torch.dtype | None, shard_bytes: int, tokenizer: str | None
) -> None:
    from safetensors.torch import save_file

    extra = opened.rank_extra(0)
    directory = opened.weights()
    folder.mkdir()
    prefix = extra.get("model_prefix") or ""
    left_out = [key for key in directory if not key.startswith(prefix)]
    if left_out:
        warnings.warn(f"Not part of the Hugging Face model, and left out: {left_out[:8]}", UserWarning, stacklevel=3)
    shards = list(_shards([key for key in directory if key.startswith(prefix)], directory, dtype, shard_bytes))
    place: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key.removeprefix(prefix): _cast(directory.read(key), dtype) for key in keys}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        place |= dict.fromkeys(tensors, name)
        del tensors  # before the next shard is read
    if len(shards) > 1:
        total = sum(_bytes(directory[key], dtype) for keys in shards for key in keys)
        (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=2))
    if extra.get("model_config"):
        (folder / "config.json").write_text(_config(extra["model_config"], dtype))
    _copy_tokenizer(tokenizer or extra.get("tokenizer"), folder)


def _write_torch(opened: OpenCheckpoint, file: Path, dtype: torch.dtype | None, whole: bool) -> None:
    extra = opened.rank_extra(0)
    state: dict[str, Any] = dict(extra["lightning"])
    weights = opened.full_weights()
    state["state_dict"] = {
        key: _cast(value, dtype) if isinstance(value, Tensor) else value for key, value in weights.items()
    }
    state.pop("optimizer_states", None)
    if whole:
        if not opened.commit.resumable or OPTIMIZER not in opened.commit.slots:
            fix = "Export with `--to torch`, or another checkpoint."
            raise CheckpointError(str(opened.path), "must hold optimizer state", opened.commit.slots, fix)
        directory = opened.optimizers()
        state["optimizer_states"] = [
            saved_optimizer_state(directory, number, saved) for number, saved in enumerate(extra["optimizers"])
        ]
        if "data" in extra:
            state[extra["data"]["key"]] = opened.joined_data_state()
    torch.save(state, file)


def _shards(
    names: Iterable[str], directory: TensorDirectory, dtype: torch.dtype | None, limit: int
) -> Iterator[list[str]]:
    """Those of these names that are tensors of their own, in groups of at most ``limit`` bytes."""
    chosen = dict.fromkeys(names)
    keys: list[str] = []
    size = 0
    for key in (name for name in chosen if directory.aliases.get(name) not in chosen):
        more = _bytes(directory[key], dtype)
        if keys and size + more > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += more
    yield keys


def _bytes(saved: SavedTensor, dtype: torch.dtype | None) -> int:
    kind = dtype if dtype is not None and saved.dtype.is_floating_point else saved.dtype
    return torch.Size(saved.size).numel() * kind.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _config(text: str, dtype: torch.dtype | None) -> str:
    content = json.loads(text)
    if dtype is not None:
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _copy_tokenizer(home: str | None, folder: Path) -> None:
    for pattern in _TOKENIZER_FILES if home and Path(home).is_dir() else ():
        for file in Path(str(home)).glob(pattern):
            shutil.copy2(file, folder / file.name)
