"""Copies of state that is stored beside the tensors, and the rule what may be in it.

What is loaded must not run code, so it must be readable by torch's weights-only unpickler. That is checked when it is
saved, where the fault can still be mended, and not at the resume that would fail of it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.errors import CheckpointError

__all__ = ["load_plain", "snapshot", "to_bytes"]

_ATOMS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)

# How torch answers a refused, cut or damaged file.
_BROKEN = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
)


def snapshot(value: Any, where: str, trust_pickle: bool = False) -> Any:
    """Copy state so that training may go on changing the original.

    Args:
        value: containers of plain Python values and tensors. Tensors are copied to the CPU, numpy scalars become
            Python's.
        where: name of ``value``, for the error.
        trust_pickle: copy also what only a pickle can hold. Only ``trust_pickle`` can load that again.

    Raises:
        CheckpointError: something that could only be loaded by running code; names its key.

    Example:
        >>> snapshot({"a": [1, torch.zeros(2)]}, "extra")
        {'a': [1, tensor([0., 0.])]}
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, numpy.generic):
        return snapshot(value.item(), where, trust_pickle)
    if isinstance(value, Tensor):
        return _copy(value, where)
    if type(value) in (dict, OrderedDict, defaultdict) or _is_mapping_proxy(value):
        copied = {_key(key, where): snapshot(item, f"{where}[{key!r}]", trust_pickle) for key, item in value.items()}
        return OrderedDict(copied) if isinstance(value, OrderedDict) else copied
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, f"{where}[{index}]", trust_pickle) for index, item in enumerate(value))
    if trust_pickle:
        return copy.deepcopy(value)
    raise _refusal(value, where)


def to_bytes(value: Any) -> bytes:
    """Serialize what :func:`snapshot` returned."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_plain(path: Folder, trust_pickle: bool = False) -> Any:
    """Load extra state without running code.

    Args:
        path: the file.
        trust_pickle: allow any pickle, and with it any code that it holds.

    Raises:
        CheckpointError: it holds something that could run code, or is damaged.
    """
    try:
        file = path if isinstance(path, Path) else io.BytesIO(path.read_bytes())
        return torch.load(file, map_location="cpu", weights_only=not trust_pickle)
    except _BROKEN as error:
        got = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        fix = "Use another checkpoint; `trust_pickle` loads it if you trust whoever wrote it."
        raise CheckpointError(str(path), "must hold plain values and tensors", got, fix) from error


def _is_mapping_proxy(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__name__ == "AttributeDict"  # Lightning's hyperparameters


def _key(key: Any, where: str) -> Any:
    if isinstance(key, numpy.generic):
        key = key.item()
    if type(key) in _ATOMS or (type(key) is tuple and all(type(item) in _ATOMS for item in key)):
        return key
    raise _refusal(key, f"key of {where}")


def _copy(value: Tensor, where: str) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        raise _refusal(value, where)
    # `empty_like` and `copy_` give the copy a storage of its own size, whatever the original is a view of.
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _refusal(value: Any, where: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fix = "Give plain values and tensors (`save_hyperparameters(ignore=[...])`), or set `trust_pickle`."
    return CheckpointError(where, "must be loadable without running code", kind, fix)
