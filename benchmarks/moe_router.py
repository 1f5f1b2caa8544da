"""What counting every routing decision costs: a training step with and without it, and one picture.

Both steps run in one process and take turns, so that a busy machine slows them alike; the ratio is the median of the
ratios inside a turn. The model is the quickstart's, on a row of 4,096 tokens.

    python benchmarks/moe_router.py [--repeats N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.figures import Figure
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


def figures(results: dict[str, float]) -> list[Figure]:
    """Both costs, against their bars."""
    return [
        Figure("counting in a step of the quickstart's model", 100 * (results["ratio"] - 1), "%", bar=1),
        Figure("picture of 61 x 256, processor time", results["picture_ms"], "ms", bar=50),
    ]


def main() -> None:
    """Run both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    seconds, ratio = step_ratio(options.repeats)
    print(f"step of {TOKENS:,} tokens: {seconds:.2f} s, with counting x {ratio:.4f} (bar 1.01)")
    picture = picture_milliseconds(options.repeats)
    print(f"picture of 61 x 256: {picture:.0f} ms of processor time (bar 50)")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "ratio": ratio, "picture_ms": picture}) + "\n")


if __name__ == "__main__":
    main()
