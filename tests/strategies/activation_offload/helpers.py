"""Small models and a running offload with the adversary as its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_longctx.strategies.activation_offload import ActivationOffload, RunningOffload
from lightning_longctx.strategies.activation_offload.virtual import VirtualBackend

WIDTH = 16
TOKENS = 24
#: float32 bytes of one block input.
INPUT_BYTES = TOKENS * WIDTH * 4


def settings(mode: str = "async", **changes: Any) -> ActivationOffload:
    """Settings that move small tensors too."""
    return ActivationOffload(**{"mode": mode, "min_tensor_mib": 0, "keep_last_blocks": 0, **changes})


def running(mode: str = "async", late: bool = True, **changes: Any) -> RunningOffload:
    """Offload on the CPU whose copies run as late as is allowed, with poisoned memory."""
    backend = VirtualBackend(late=late, poison=True)
    return RunningOffload(settings(mode, **changes), torch.device("cpu"), backend=backend)


class Block(nn.Module):
    """Products, a non-linearity and a residual, as in a transformer; ``how`` says who checkpoints it."""

    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how

    def inner(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.down(torch.nn.functional.gelu(attended * scale))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.how == "none" or not torch.is_grad_enabled():
            return self.inner(x, scale)
        return checkpoint(self.inner, x, scale, use_reentrant=self.how == "reentrant")


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, blocks: int = 4, how: str = "none", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(how) for _ in range(blocks))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = torch.full((1,), 0.5, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, scale)
        return x


def batch(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Float ``[1, TOKENS, WIDTH]``."""
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, as they are now."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def expected(model: nn.Module, x: Tensor, passes: int = 1) -> dict[str, Tensor]:
    """Gradients without offload."""
    for _ in range(passes):
        model(x).square().mean().backward()
    found = gradients(model)
    model.zero_grad()
    return found


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
