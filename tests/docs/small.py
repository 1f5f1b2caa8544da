"""A configuration of the documentation made small: the same keys and classes, sizes for one CPU process and seconds."""

from __future__ import annotations

import copy
import gzip
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from lightning.pytorch import Trainer

from lightning_longctx import CausalLMModule, LongContextFSDPStrategy
from tests.datamodules import chat_templates

SECTIONS = {"trainer", "model", "data", "ckpt_path", "seed_everything"}
_TRAINER = set(inspect.signature(Trainer).parameters)
_STRATEGY = set(inspect.signature(LongContextFSDPStrategy).parameters)

#: One record that every format can read.
RECORD = {
    "text": "some words to learn from. " * 8,
    "content": "other words to learn from. " * 8,
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, and you?"}],
    "prompt": "question",
    "question": "How long is a row?",
    "response": "Long.",
    "answer": "As long as its documents.",
    "input_ids": list(range(5, 60)),
}


def as_configuration(block: Mapping[str, Any]) -> dict[str, Any]:
    """What a block says, in its section: pages also show settings of the Trainer or of the strategy alone.

    Raises:
        ValueError: keys that are none of these.
    """
    keys = set(block)
    if keys <= SECTIONS:
        return dict(block)
    if keys <= _TRAINER:
        return {"trainer": dict(block)}
    if keys <= _STRATEGY:
        return {"trainer": {"strategy": {"class_path": "LongContextFSDPStrategy", "init_args": dict(block)}}}
    raise ValueError(f"{sorted(keys)} are neither sections nor settings of the Trainer or the strategy")


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration for two steps on one CPU process, over files that :func:`write_files` makes."""
    small = copy.deepcopy(dict(config))
    data, windows = small.setdefault("data", {}), 256
    data.update({"max_seq_len": windows} if not data.get("class_path") else {})
    if data.get("global_batch_tokens"):
        data["global_batch_tokens"] = 2 * windows
    data["sources"] = {name: _small_source(source) for name, source in data.get("sources", {"a": "a/*.txt"}).items()}
    if "num_workers" in data.get("loading", {}):
        data["loading"]["num_workers"] = 1
    small["model"] = _small_model(small)
    trainer = small.setdefault("trainer", {})
    one = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_steps": 2, "limit_val_batches": 1}
    trainer.update(one, enable_progress_bar=False, enable_model_summary=False, precision="32-true")
    if isinstance(trainer.get("strategy"), dict):
        _shrink_strategy(trainer["strategy"].setdefault("init_args", {}))
    return small


def write_files(config: Mapping[str, Any]) -> None:
    """Write what a small configuration reads into the current folder."""
    for source in config["data"]["sources"].values():
        path = Path((source if isinstance(source, str) else source["path"]).replace("*", "part"))
        if path.suffix:  # else one of the built-in sources
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path)
    home = config["model"].get("pretrained")
    if home:
        torch.manual_seed(0)
        source = CausalLMModule(config="tiny-llama")
        source.configure_model()
        source.model.save_pretrained(home)
        chat_templates.tokenizer(chat_templates.PLAIN_CHATML).save_pretrained(home)


def _small_source(source: Any) -> Any:
    if isinstance(source, str):
        return source.partition("://")[2] or source
    limits = {"min_tokens", "max_tokens"}
    small = {key: value for key, value in source.items() if key not in limits}
    return {**small, "path": _small_source(source["path"])}


def _small_model(config: Mapping[str, Any]) -> dict[str, Any]:
    model = dict(config.get("model", {}))
    experts = "MoERouterHeatmap" in json.dumps(config.get("trainer", {}))
    if "warmup_tokens" in model.get("schedule", {}):
        model["schedule"] = {**model["schedule"], "warmup_tokens": 100}
    if "pretrained" in model:
        model["config_overrides"] = {"rope_theta": 5.0e7}
    elif config["data"].get("tokenizer") == "from_model":
        return {**model, "pretrained": "model"}
    elif isinstance(model.get("config"), dict):
        sizes = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
        model["config"] |= {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
    elif "class_path" not in model:
        model["config"] = "tiny-qwen3-moe" if experts else "tiny-llama"
    return model


def _shrink_strategy(settings: dict[str, Any]) -> None:
    """One process; and offload that finds something to move in a tiny model."""
    for name in ("sequence_parallel_size", "data_parallel_replicate_size"):
        if name in settings:
            settings[name] = 1
    offload = settings.get("activation_offload", "none")
    if offload != "none":
        mapping = offload if isinstance(offload, dict) else {"mode": offload}
        settings["activation_offload"] = {**mapping, "min_tensor_mib": 0.0, "host_limit_gib": 0.1}
        settings.setdefault("activation_checkpointing", "full")


def _write(path: Path) -> None:
    lines = "".join(json.dumps(RECORD) + "\n" for _ in range(40))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD] * 40), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines.encode())
    elif path.suffix == ".jsonl":
        path.write_text(lines)
    else:
        path.write_text(RECORD["text"] * 40)
