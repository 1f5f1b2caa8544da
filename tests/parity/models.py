"""The tiny models of the proofs: random weights, 8 query and 2 key/value heads, fp32."""

from __future__ import annotations

from typing import Any

from tests.parity.rows import VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # large enough that attention is not uniform, or wrong bounds would hardly show
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
# With its load-balancing loss, strong enough that a wrong one would show in every gradient.
CONFIGS["qwen3_moe_balanced"] = {**CONFIGS["qwen3_moe"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
