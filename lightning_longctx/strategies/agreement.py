"""What ranks must have in common before they train together: versions, settings, weights.

Ranks that differ would wait for one another in a collective, or average gradients of two runs. So each rank shows
what it has before anything depends on it, and the message names the ranks that are alone with theirs.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = [
    "check_equal_facts",
    "check_equal_hashes",
    "hash_tensors",
    "named_tensors",
    "package_versions",
    "stable_text",
]

# Room for one fact of one rank: a version, a number, or a hash.
_FACT_BYTES = 32
# How many ranks a message lists.
_SHOWN_RANKS = 8
# Words hashed at a time: 2^22 of them need 96 MiB of int64 scratch, whatever the size of the parameter.
_HASH_CHUNK = 2**22

_PACKAGES = ("torch", "lightning", "lightning-longctx", "transformers", "numpy")


def package_versions() -> dict[str, str]:
    """Versions that change what is computed; a package that is not installed is ``none``."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def check_equal_facts(facts: Mapping[str, object], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare named facts over the ranks of ``group``: one all-gather of 32 bytes a fact and rank.

    Args:
        facts: the same names in the same order on every rank; values are compared as text, long ones by their hash.
        group: the ranks; None if alone.
        device: where the group communicates.

    Raises:
        ConfigurationError: on every rank, with the first fact that differs and the ranks that are in the minority.
    """
    if group is None or not facts:
        return
    texts = [_short(str(value)) for value in facts.values()]
    mine = torch.zeros(len(texts), _FACT_BYTES, dtype=torch.uint8)
    for row, text in zip(mine, texts, strict=True):
        data = text.encode()[:_FACT_BYTES]
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = [torch.zeros_like(mine, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine.to(device), group=group)
    everyone = [rank.cpu() for rank in gathered]
    for place, name in enumerate(facts):
        values = [bytes(rank[place].tolist()).rstrip(b"\0").decode(errors="replace") for rank in everyone]
        common, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = [f"rank {rank} has {value}" for rank, value in enumerate(values) if value != common]
        more = f" and {len(odd) - _SHOWN_RANKS} more" if len(odd) > _SHOWN_RANKS else ""
        raise ConfigurationError(
            name,
            "must be the same on every rank",
            f"{', '.join(odd[:_SHOWN_RANKS])}{more}; the others have {common}",
            "Start every rank with the same environment and the same configuration.",
        )


def stable_text(value: object) -> str:
    """Text of plain values that is equal on every rank: no addresses, keys sorted; other objects by their class."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        items = sorted((str(key), stable_text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(stable_text(item) for item in value) + "]"
    if value is None or isinstance(value, (str, bool, int, float)):
        return repr(value)
    return type(value).__qualname__


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return a checksum of the bits of each tensor: int64, 0-d, on the host, by name."""
    return {name: _hash(tensor) for name, tensor in named}


def check_equal_hashes(hashes: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare hashes of parameters and buffers over the ranks of ``group``, since sharding does not broadcast.

    Args:
        hashes: by qualified name, in the module's order.
        group: the ranks; None if alone.
        device: where the group communicates.

    Raises:
        ConfigurationError: the first tensor that differs, by name, on every rank.
    """
    if group is None or not hashes:
        return
    counts = torch.tensor([len(hashes)], dtype=torch.int64, device=device)
    if not _equal(counts, group):
        fix = "Build the same model on every rank."
        raise ConfigurationError("model", "must have the same parameters on every rank", f"{len(hashes)} here", fix)
    values = torch.stack(list(hashes.values())).to(device)
    if _equal(values, group):
        return
    low, high = _extremes(values, group)
    first = int((low != high).nonzero()[0])
    raise ConfigurationError(
        f"model.{list(hashes)[first]}",
        "must start equal on every rank (sharding does not broadcast)",
        f"{int((low != high).sum())} of {counted(len(hashes), 'tensor')} that differ",
        "Seed every rank alike before the model is built: `L.seed_everything(0)`, or `seed_everything: 0` in YAML.",
    )


def named_tensors(module: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module with their qualified names, without those that are sharded already."""
    named = [*module.named_parameters(prefix), *module.named_buffers(prefix)]
    return [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]


def _short(text: str) -> str:
    if len(text.encode()) <= _FACT_BYTES:
        return text
    return f"another ({hashlib.sha256(text.encode()).hexdigest()[:20]})"


def _hash(tensor: Tensor) -> Tensor:
    """Position-dependent checksum of a tensor's bits: int64, 0-d, on the host."""
    flat = tensor.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % 4:  # it begins inside of a word of another tensor's memory
        flat = flat.clone()
    width = torch.int32 if flat.numel() * flat.element_size() % 4 == 0 and flat.element_size() <= 4 else torch.uint8
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in torch.split(flat.view(width), _HASH_CHUNK):
        # Weights in 1..65,521 (a prime), so that exchanged values show; int64 sums may wrap, alike on every rank.
        places = torch.arange(part.numel(), device=part.device).remainder_(65_521).add_(1)
        total = total * 31 + (part.to(torch.int64) * places).sum()
    return total.cpu()


def _extremes(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return low, high


def _equal(values: Tensor, group: dist.ProcessGroup) -> bool:
    low, high = _extremes(values, group)
    return bool(torch.equal(low, high))
