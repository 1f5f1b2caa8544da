"""Step time and device peak of activation offload against offloaded checkpoints, on a GPU (or, to try it, a CPU).

A Llama-shaped body with full activation checkpointing runs forward and backward. The ways take turns in one process, so
that a busy machine slows them alike; ratios are medians of the ratios inside a turn. ``save_on_cpu`` around each
checkpoint, pinned, is what transformers' ``activation_checkpointing_enable(offload=True)`` does.

    python benchmarks/offload_time.py [--device cuda] [--tokens N ...] [--layers N] [--turns N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.figures import Figure
from benchmarks.offload import Body, Shape
from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing, apply_checkpointing
from lightning_longctx.strategies.activation_offload import ActivationOffload, RunningOffload

WAYS = ("checkpointing", "save_on_cpu around checkpoints", "sync", "async")
#: Overhead of ``async`` over checkpointing alone that is aimed at, from 128K tokens of a rank on.
TARGET, TARGET_TOKENS = 1.05, 131072


def attach(way: str, body: nn.Module, device: torch.device) -> Callable[[], None]:
    """Put a way around the blocks of ``body``; returns what takes it off."""
    blocks = list(body.layers)  # type: ignore[arg-type]
    if way in ("sync", "async"):
        offload = RunningOffload(ActivationOffload(mode=way, min_tensor_mib=0), device)  # type: ignore[arg-type]
        detach = offload.attach(body, blocks)

        def end() -> None:
            detach()
            offload.close()

        return end
    plain = [block.forward for block in blocks]
    for block in blocks if way.startswith("save_on_cpu") else ():
        block.forward = partial(_saved, block.forward, device)

    def restore() -> None:
        for block, forward in zip(blocks, plain, strict=True):
            block.forward = forward

    return restore


def _saved(forward: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    with save_on_cpu(pin_memory=device.type == "cuda", device_type=device.type):
        return forward(*args)


def step(body: nn.Module, tokens: int, hidden: int, device: torch.device) -> tuple[float, int, list[torch.Tensor]]:
    """One forward and backward: seconds, peak bytes (0 on CPU) and gradients."""
    body.zero_grad()
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16, generator=generator)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    body(x.requires_grad_()).float().square().mean().backward()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return seconds, peak, [parameter.grad for parameter in body.parameters() if parameter.grad is not None]


def compare(shape: Shape, tokens: int, turns: int, device: torch.device) -> dict[str, dict[str, float | bool]]:
    """Let all ways take turns; the first turn warms up, and checks that gradients are equal in every bit."""
    torch.manual_seed(0)
    body = Body(shape).to(device, torch.bfloat16)
    apply_checkpointing(body, list(body.layers), ActivationCheckpointing("full"))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks, equal, reference = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, True), None
    for way in WAYS * (turns + 1):
        end = attach(way, body, device)
        step(body, tokens, shape.hidden, device)  # host memory is taken from the system in the first step
        taken, peaks[way], gradients = step(body, tokens, shape.hidden, device)
        end()
        seconds[way].append(taken)
        if reference is None:
            reference = [gradient.clone() for gradient in gradients]
        equal[way] &= all(map(torch.equal, gradients, reference))
    base = seconds[WAYS[0]][1:]
    return {
        way: {
            "ratio": statistics.median(mine / other for mine, other in zip(seconds[way][1:], base, strict=True)),
            "seconds": statistics.median(seconds[way][1:]),
            "peak_gib": peaks[way] / 2**30,
            "equal": equal[way],
        }
        for way in WAYS
    }


def figures(results: dict[str, dict[str, dict[str, float]]]) -> list[Figure]:
    """Step times over checkpointing alone."""
    peer = "save_on_cpu around checkpoints"
    return [
        Figure(
            f"step with offload async, {int(tokens):,} tokens",
            ways["async"]["ratio"],
            "x checkpointing alone",
            peer,
            ways[peer]["ratio"],
            TARGET if int(tokens) >= TARGET_TOKENS else None,
        )
        for tokens, ways in results.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each length; exit status 1 if a gradient differs, or ``async`` misses its target on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="tokens of the rank")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device, results, failed = torch.device(options.device), {}, False
    shape = Shape(layers=options.layers, hidden=options.hidden, inner=options.hidden * 7 // 2)
    for tokens in options.tokens:
        results[str(tokens)] = found = compare(shape, tokens, options.turns, device)
        print(f"\n{tokens:,} tokens of this rank, {shape.layers} layers of width {shape.hidden}, {device.type}\n")
        print("| way | step time / checkpointing alone | seconds | device peak, GiB | gradients equal |")
        print("|---|---|---|---|---|")
        for way, row in found.items():
            print(f"| {way} | {row['ratio']:.3f} | {row['seconds']:.3f} | {row['peak_gib']:.2f} | {row['equal']} |")
            failed |= not row["equal"]
        failed |= device.type == "cuda" and tokens >= TARGET_TOKENS and found["async"]["ratio"] > TARGET
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
