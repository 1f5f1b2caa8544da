"""The random number generators of a process: Python's, numpy's, torch's on the CPU and on CUDA devices."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy
import torch

__all__ = ["reseed", "restore_rng", "rng_state"]


def rng_state() -> dict[str, Any]:
    """All states, as plain containers and tensors."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(numpy.asarray(keys, "int64")),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put all generators where :func:`rng_state` found them. CUDA states are skipped where there are other devices."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, last = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, last))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def reseed(attempt: str, rank: int) -> None:
    """Seed all generators from a checkpoint and a rank: the rule where the number of ranks has changed.

    Streams of the old ranks cannot be dealt to others without two ranks drawing the same numbers.
    """
    seed = zlib.crc32(f"{attempt}/{rank}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
