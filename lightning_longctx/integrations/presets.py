"""Small configurations by name, for the quickstart and for tests: byte vocabulary, random weights, seconds to build."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_COMMON: dict[str, Any] = {
    # 256 bytes and the end of document, rounded up to a multiple of 8 so that 2, 4 and 8 ranks get even shards.
    "vocab_size": 264,
    "hidden_size": 128,
    # Few wide heads: attention over a whole row is most of a step on the host, and its cost there goes with the number
    # of heads. Four can be dealt to 2 and 4 ranks; two key/value heads show how they are replicated on 4.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    # Rotary tables cost nothing, so a preset never stands in the way of a long row.
    "max_position_embeddings": 2**20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0e6},
    # Ids of the tokenizer `bytes`: no token starts a document or pads a row, and 256 ends a document.
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}

#: Configurations by name: the arguments of ``AutoConfig.for_model``.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {**_COMMON, "model_type": "llama", "num_hidden_layers": 3, "intermediate_size": 384},
    "tiny-qwen3": {**_COMMON, "model_type": "qwen3", "num_hidden_layers": 3, "intermediate_size": 384},
    "tiny-qwen3-moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 384,  # of dense layers, which this preset has none of
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,  # as the published Qwen3-MoE models
    },
}
