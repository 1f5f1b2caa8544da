"""The files that recipes name: folders of documents, and models as small as can be under the names of large ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.integrations.presets import PRESETS
from tests.datamodules import chat_templates
from tests.datamodules.helpers import compress

#: Shapes of published models, written by hand: enough for `longctx plan`.
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
LARGE: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336},
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
_TINY = {"llama": "tiny-llama", "qwen2": "tiny-qwen3", "qwen3": "tiny-qwen3", "qwen3_moe": "tiny-qwen3-moe"}


def write_shapes(folder: Path) -> None:
    """Write a folder for each large model with its ``config.json`` alone."""
    for name, config in LARGE.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def write_tiny_models(folder: Path) -> None:
    """Write a tiny model of the same kind under the name of each large one: weights, tokenizer, chat template."""
    transformers = pytest.importorskip("transformers")
    tokenizer = chat_templates.tokenizer(chat_templates.PLAIN_CHATML)
    for name, config in LARGE.items():
        preset = PRESETS[_TINY[config["model_type"]]]
        # As few positions as the large one: a recipe that forgot to raise them must fail here too.
        same = {key: config[key] for key in ("model_type", "max_position_embeddings")}
        tiny = transformers.AutoConfig.for_model(**{**preset, **same})
        transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_documents(folder: Path) -> None:
    """Write ``books/``, ``web/``, ``code/``, ``chat/`` and ``held_out/`` in the forms that the recipes name."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(words))

    for name, words in {"books": 400, "web": 60}.items():
        (folder / name).mkdir(parents=True)
        table = pyarrow.table({"text": [text(words + 20 * number) for number in range(12)]})
        parquet.write_table(table, folder / name / "0.parquet")
    (folder / "code").mkdir()
    lines = "".join(json.dumps({"text": text(80)}) + "\n" for _ in range(24))
    compress(folder / "code" / "0.jsonl.zst", lines.encode())
    for name in ("chat", "held_out"):
        (folder / name).mkdir()
        talks = [
            [{"role": "user", "content": text(30)}, {"role": "assistant", "content": text(10 + number)}]
            for number in range(24)
        ]
        (folder / name / "0.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
