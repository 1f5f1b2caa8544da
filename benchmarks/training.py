"""A training step of the suite against plain Hugging Face with FSDP2: tokens per second, and device memory on a GPU.

Both train the same weights on the same rows in one process, and take turns, so that a busy machine slows them alike;
the ratio is the median of the ratios inside a turn. Their losses must agree, or the comparison means nothing. The peer
is what one writes without us: ``fully_shard`` on the blocks, Hugging Face's own attention and loss, AdamW.

    python -m benchmarks.training [--device cuda] [--size 1b] [--tokens N ...] [--documents N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.figures import Figure
from lightning_longctx import CausalLMModule, LongContextFSDPStrategy
from lightning_longctx.integrations.optimization import OptimizerSettings

__all__ = ["figures", "main"]

#: Llama shapes. ``small`` runs on two CPU cores, ``1b`` is Llama-3.2-1B.
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
#: Steps of a turn; the first two, in which memory is taken from the system, are not timed.
STEPS, WARM_UP = 5, 2
#: On a GPU we aim at no less than this part of the peer's tokens per second, wherever both fit.
BAR = 0.97
PEER = "Hugging Face + FSDP2"
_OPTIMIZER = OptimizerSettings(lr=1e-4, weight_decay=0.0)


@dataclass(frozen=True)
class Setup:
    """What is trained: a directory with weights, rows of ``tokens`` tokens in ``documents`` documents, and where."""

    weights: Path
    tokens: int
    documents: int
    device: torch.device
    checkpointing: bool

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run behind the host, and memory can be asked for."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Turn:
    """Seconds of the timed steps, peak device bytes (0 on CPU), and the loss of each step."""

    seconds: list[float]
    peak: int
    losses: list[float]


class Rows:
    """The same packed row for each step."""

    def __init__(self, setup: Setup) -> None:
        generator = torch.Generator().manual_seed(0)
        length = setup.tokens // setup.documents
        ids = torch.randint(0, 8192, (setup.tokens,), generator=generator)
        targets = ids.roll(-1)
        targets[length - 1 :: length] = -100  # [T]: the last token of a document has no target
        self.row = {
            "input_ids": ids[None],
            "shift_labels": targets[None],
            "position_ids": torch.arange(setup.tokens)[None] % length,
            "source_ids": torch.zeros(1, setup.tokens, dtype=torch.int64),
            "cu_seqlens": torch.arange(0, setup.tokens + 1, length, dtype=torch.int32),
            "max_seqlen": length,
            "document_keys": torch.zeros(setup.documents, 2, dtype=torch.int64),
            "loss_divisor": setup.tokens,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(STEPS):
            yield dict(self.row)


class _Clock(Callback):
    def __init__(self, setup: Setup) -> None:
        self.setup, self.marks, self.losses = setup, [], []  # type: ignore[var-annotated]

    def on_train_start(self, *_: Any) -> None:
        self.marks.append(_now(self.setup))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.marks.append(_now(self.setup))
        valid = (batch["shift_labels"] != -100).sum()
        self.losses.append(float(outputs["per_token_loss"].sum() / valid))


def _now(setup: Setup) -> float:
    if setup.is_gpu:
        torch.cuda.synchronize(setup.device)
    return time.perf_counter()


def _spans(marks: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(marks, marks[1:], strict=False)][WARM_UP:]


def ours(setup: Setup) -> Turn:
    """The suite as one uses it: a Trainer with our strategy and module."""
    clock = _Clock(setup)
    trainer = Trainer(
        accelerator="gpu" if setup.is_gpu else "cpu",
        devices=1,
        precision="bf16-true" if setup.is_gpu else "32-true",
        max_steps=STEPS,
        strategy=LongContextFSDPStrategy(activation_checkpointing="full" if setup.checkpointing else "none"),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    _reset_peak(setup)
    trainer.fit(CausalLMModule(pretrained=str(setup.weights), optimizer=_OPTIMIZER), Rows(setup))
    return Turn(_spans(clock.marks), _peak(setup), clock.losses)


def peer(setup: Setup) -> Turn:
    """The same with Hugging Face and FSDP2 alone."""
    _reset_peak(setup)
    model = AutoModelForCausalLM.from_pretrained(setup.weights, dtype=torch.float32, attn_implementation="sdpa")
    model.to(setup.device).train()
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setup.is_gpu else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    settings = _OPTIMIZER
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=setup.is_gpu or None
    )
    marks, losses = [_now(setup)], []
    for row in Rows(setup):
        batch = {name: value.to(setup.device) for name, value in row.items() if isinstance(value, torch.Tensor)}
        loss = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            labels=batch["input_ids"],
            shift_labels=batch["shift_labels"],
            use_cache=False,
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        marks.append(_now(setup))
    return Turn(_spans(marks), _peak(setup), losses)


def _reset_peak(setup: Setup) -> None:
    if setup.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)


def _peak(setup: Setup) -> int:
    return torch.cuda.max_memory_allocated(setup.device) if setup.is_gpu else 0


def compare(setup: Setup, turns: int) -> dict[str, Any]:
    """Let both take turns. A way that runs out of device memory has no figures."""
    found: dict[str, list[Turn]] = {"ours": [], "peer": []}
    for _ in range(turns):
        for name, way in (("ours", ours), ("peer", peer)):
            try:
                found[name].append(way(setup))
            except torch.OutOfMemoryError:
                found[name] = []
    result: dict[str, Any] = {"tokens": setup.tokens, "documents": setup.documents}
    for name, done in found.items():
        if done:
            seconds = statistics.median(second for turn in done for second in turn.seconds)
            result[name] = {"tokens_per_second": setup.tokens / seconds, "peak_gib": max(t.peak for t in done) / 2**30}
    if found["ours"] and found["peer"]:
        pairs = list(zip(found["ours"], found["peer"], strict=True))
        gap = max(abs(a - b) / b for mine, other in pairs for a, b in zip(mine.losses, other.losses, strict=True))
        # In bf16 the two round at different places.
        assert gap < (2e-2 if setup.is_gpu else 1e-4), f"the losses differ by {gap:.1e}: not the same training"
        medians = [(statistics.median(mine.seconds), statistics.median(other.seconds)) for mine, other in pairs]
        result["speed_ratio"] = statistics.median(other / mine for mine, other in medians)
        result["loss_gap"] = gap
    return result


@contextmanager
def group_of_one(is_gpu: bool) -> Iterator[None]:
    """A process group for both: Lightning takes one that is there."""
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def figures(results: list[dict[str, Any]]) -> list[Figure]:
    """Tokens per second, and memory where it was measured."""
    found = []
    for one in results:
        shape = f"{one['tokens']:,} tokens in {one['documents']} document(s)"
        if "speed_ratio" in one:
            bar = BAR if one["ours"]["peak_gib"] else None
            found.append(Figure(f"speed, {shape}", one["speed_ratio"], "x", PEER, 1.0, bar, more_is_better=True))
        if one.get("ours", {}).get("peak_gib"):
            theirs = one.get("peer", {}).get("peak_gib")
            found.append(Figure(f"device peak, {shape}", one["ours"]["peak_gib"], "GiB", PEER, theirs))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run all lengths and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), help="default: 1b on a GPU, small elsewhere")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 8K to 1M on a GPU, 2048 and 4096 elsewhere")
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 8], help="in a row (default: 1 and 8)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    lengths = options.tokens or ([2**power for power in (13, 15, 17, 18, 19, 20)] if is_gpu else [2048, 4096])
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    disable_progress_bar()
    results = []
    with tempfile.TemporaryDirectory() as folder, group_of_one(is_gpu):
        torch.manual_seed(0)
        shape = SIZES[options.size or ("1b" if is_gpu else "small")]
        config = AutoConfig.for_model("llama", **shape, max_position_embeddings=2**20, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for tokens in lengths:
            for documents in options.documents:
                setup = Setup(Path(folder), tokens, documents, device, checkpointing=is_gpu)
                results.append(compare(setup, options.turns))
                print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
