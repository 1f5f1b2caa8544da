"""What counting every routing decision costs: a training step with and without it, and one picture.

Both steps run in one process and take turns, so that a busy machine slows them alike; the ratio is the median of the
ratios inside a turn. The model is the quickstart's, on a row of 4,096 tokens.

    python benchmarks/moe_router.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx.callbacks.router_counts import RouterCounts
from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_picture import draw_heatmap
from lightning_longctx.callbacks.router_sites import find_sites
from lightning_longctx.integrations.presets import PRESETS

TOKENS = 4096


def step_ratio(repeats: int) -> tuple[float, float]:
    """Seconds of a step without counting, and the ratio of one with it."""
    torch.manual_seed(0)
    settings = dict(PRESETS["tiny-qwen3-moe"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).train()
    ids = torch.randint(0, 256, (1, TOKENS))
    counts = RouterCounts(find_sites(model), torch.device("cpu"))
    counts.padding = torch.zeros(TOKENS, 1, dtype=torch.bool)

    def step(active: bool) -> float:
        counts.active = active
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False).logits.sum().backward()
        return time.perf_counter() - start

    step(True), step(False)
    counts.settle()  # as after the first batch of a run
    pairs = [(step(False), step(True)) if turn % 2 else (step(True), step(False))[::-1] for turn in range(repeats)]
    return statistics.median(off for off, _ in pairs), statistics.median(on / off for off, on in pairs)


def picture_milliseconds(repeats: int, layers: int = 61, experts: int = 256) -> float:
    """Processor time to draw and write one picture, the least of ``repeats``."""
    names = tuple(f"layer_{number:02d}" for number in range(layers))
    tokens = tuple(torch.randint(0, 1000, (experts,)) for _ in range(layers))
    load = RouterLoad(1, 100, names, names, tokens, 0, 0)
    with TemporaryDirectory() as folder:

        def once() -> None:
            draw_heatmap(load).save(Path(folder) / "picture.png")

        return min(_processor_seconds(once) for _ in range(repeats)) * 1e3


def _processor_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Run both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    seconds, ratio = step_ratio(repeats)
    print(f"step of {TOKENS:,} tokens: {seconds:.2f} s, with counting x {ratio:.4f} (bar 1.01)")
    print(f"picture of 61 x 256: {picture_milliseconds(repeats):.0f} ms of processor time (bar 50)")


if __name__ == "__main__":
    main()
