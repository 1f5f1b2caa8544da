"""Memory with activation offload and tiled MLPs for an 8B model, simulated, against PyTorch's save_on_cpu.

One forward and backward of a Llama-shaped body (bfloat16, flash attention, one row) runs on fake tensors: shapes and
lifetimes are real, numbers are not computed. The device is fake ``cpu`` memory, the host is ``meta`` memory, and living
storages of each are counted. On small models this count equals that of a real run on a CPU to the byte; allocator
fragmentation, communication buffers and the context of a real device are not in it. Times need a GPU and are not here.

    python benchmarks/offload.py [--json PATH] [--tokens N ...] [--layers N]
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures import Figure
from lightning_longctx.strategies.activation_checkpointing import apply_checkpointing, as_checkpointing
from lightning_longctx.strategies.activation_offload import ActivationOffload, RunningOffload
from lightning_longctx.strategies.activation_offload.virtual import VirtualBackend
from lightning_longctx.strategies.tiled_mlp import TiledMLP, apply_tiles

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A body of decoder layers; the default is that of Llama-3.1-8B."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8


class MLP(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP. Rotary factors are left out: they change no size that is kept."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, head = shape, shape.hidden // shape.heads
        self.norm, self.mlp_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * head, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * head, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to the same."""
        y, groups = self.norm(x), self.shape.heads // self.shape.kv_heads
        q = self.q(y).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)  # [1, H, T, D]
        k, v = (part(y).unflatten(-1, (self.shape.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        if x.device.type == "cpu":  # by name, since fake tensors may choose another kernel than real ones
            attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Body(nn.Module):
    """The layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


class Counter(TorchDispatchMode):
    """Bytes of living storages by device, and the most of them so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {"cpu": 0, "meta": 0}
        self.peak = dict(self.live)
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                self._add(tensor.untyped_storage(), tensor.device.type)
        return outputs

    def _add(self, storage: Any, device: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live[device] += nbytes
        self.peak[device] = max(self.peak[device], self.live[device])
        weakref.finalize(storage, self._remove, key, nbytes, device)

    def _remove(self, key: int, nbytes: int, device: str) -> None:
        self._seen.discard(key)
        self.live[device] -= nbytes


@dataclass
class Figures:
    """Bytes of one forward and backward.

    Attributes:
        kept: on the device after forward, beyond weights and the input.
        host: on the host after forward.
        peak: most on the device, weights and gradients included.
        moved: copied to the host.
    """

    kept: int
    host: int
    peak: int
    moved: int


@contextmanager
def save_on_cpu(moved: list[int]) -> Iterator[None]:
    """What PyTorch's ``save_on_cpu`` does, with ``meta`` memory as the host."""

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.nbytes)
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta").copy_(tensor)

    with saved_tensors_hooks(pack, lambda packed: packed.to("cpu")):
        yield


def measure(
    shape: Shape, tokens: int, checkpointing: str, offload: str, tiles: bool | int, simulated: bool = True
) -> Figures:
    """Count one step.

    Args:
        shape: of the model.
        tokens: of the rank.
        checkpointing: mode of the strategy.
        offload: a level, ``none``, or ``save_on_cpu`` around the whole forward, as transformers' ``offload=True`` puts
            around each checkpoint.
        tiles: whether MLPs run in tiles, or in how many.
        simulated: on fake tensors; false computes, which an offload to ``meta`` memory cannot.
    """
    with FakeTensorMode() if simulated else nullcontext(), Counter() as counter:
        torch.set_default_dtype(torch.bfloat16)
        model = Body(shape)
        torch.set_default_dtype(torch.float32)
        if tiles:
            apply_tiles(model, TiledMLP(tiles=0 if tiles is True else tiles))
        moved: list[int] = []
        count: Callable[[], int] = partial(sum, moved)
        around: Any = nullcontext()
        running = None
        if offload not in ("none", "save_on_cpu"):
            settings = ActivationOffload(mode="async", level=offload, host_limit_gib=2**14)  # type: ignore[arg-type]
            running = _running(settings)
            count = lambda: running.counters.bytes_out  # noqa: E731
        policy = running.checkpoint_contexts if running is not None and offload == "policy" else None
        apply_checkpointing(model, list(model.layers), as_checkpointing(checkpointing), policy)  # type: ignore[arg-type]
        if running is not None:
            running.attach(model, list(model.layers))
        elif offload == "save_on_cpu":
            around = save_on_cpu(moved)
        x = torch.empty(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        before = counter.live["cpu"]
        with around:
            loss = model(x).sum()
        kept, host = counter.live["cpu"] - before, counter.live["meta"]
        loss.backward()
        return Figures(kept, host, counter.peak["cpu"], count())


def _running(settings: ActivationOffload) -> RunningOffload:
    from lightning_longctx.strategies.activation_offload import setup

    backend, limit = VirtualBackend(host_device="meta"), setup.host_limit
    setup.host_limit = lambda settings, ranks: 2**44  # the simulated host's, not this machine's
    try:
        return RunningOffload(settings, torch.device("cpu"), backend=backend)
    finally:
        setup.host_limit = limit


#: Checkpointing, offload, tiles.
WAYS: dict[str, tuple[str, str, bool]] = {
    "nothing": ("none", "none", False),
    "PyTorch's save_on_cpu alone": ("none", "save_on_cpu", False),
    "offload all alone": ("none", "all", False),
    "checkpointing": ("full", "none", False),
    "checkpointing, save_on_cpu": ("full", "save_on_cpu", False),
    "checkpointing, offload boundary": ("full", "boundary", False),
    "selective, offload policy": ("selective", "policy", False),
    "checkpointing, tiles": ("full", "none", True),
    "checkpointing, offload boundary, tiles": ("full", "boundary", True),
}


def analytic(shape: Shape, tokens: int, keep: int = 1) -> int:
    """Bytes that ``boundary`` moves under full checkpointing: inputs of all layers but the last ones."""
    return (shape.layers - keep) * tokens * shape.hidden * 2


def figures(results: dict[str, dict[str, int]]) -> list[Figure]:
    """Simulated device peaks against PyTorch's ``save_on_cpu``, and without offload."""
    found = []
    for tokens in sorted({int(name.split()[0]) for name in results}):
        peak = {way: results[f"{tokens} {way}"]["peak"] / GIB for way in WAYS}
        mine, tiled = peak["checkpointing, offload boundary"], peak["checkpointing, offload boundary, tiles"]
        label = f"device peak, {tokens:,} tokens"
        for peer, name in (("checkpointing, save_on_cpu", "save_on_cpu"), ("checkpointing", "checkpointing alone")):
            found.append(Figure(f"{label}: offload", mine, "GiB", name, peak[peer]))
        found.append(Figure(f"{label}: offload and tiles", tiled, "GiB", "checkpointing alone", peak["checkpointing"]))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each length; exit status 1 if the bytes moved are not what arithmetic says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures in bytes")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 131072], help="tokens of the rank")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args(arguments)
    shape, results, wrong = Shape(layers=options.layers), {}, False
    for tokens in options.tokens:
        print(f"\n{shape.layers} layers, {tokens:,} tokens of this rank, GiB\n")
        print("| way | on the device after forward | host after forward | device peak | moved out |")
        print("|---|---|---|---|---|")
        for name, way in WAYS.items():
            found = measure(shape, tokens, *way)
            results[f"{tokens} {name}"] = asdict(found)
            cells = (found.kept, found.host, found.peak, found.moved)
            print(f"| {name} | " + " | ".join(f"{cell / GIB:.1f}" for cell in cells) + " |", flush=True)
            wrong |= "boundary" in name and found.moved != analytic(shape, tokens)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\nbytes moved at level boundary:", "WRONG" if wrong else "equal to the analytic number")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
