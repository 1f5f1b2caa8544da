"""A small configuration of the same family: everything that decides how a model computes stays, sizes do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["shrunk_config"]

# Eight query heads can be dealt to 1, 2, 4 and 8 ranks. The initial weights are larger than usual: near-uniform
# attention would hide wrong document bounds.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "head_dim": 8,
    "vocab_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "initializer_range": 0.1,
    "max_position_embeddings": 4096,
}
_MOST = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


def shrunk_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a small configuration: two layers, or one of each kind if there are more kinds.

    Args:
        config: any supported configuration; it is left as it is.

    Returns:
        Keys with ``model_type``, for ``CausalLMModule(config=...)``.

    Example:
        >>> from lightning_longctx.integrations.model_config import load_config
        >>> small = shrunk_config(load_config("tiny-qwen3-moe", None))
        >>> small["hidden_size"], small["num_experts"], small["num_hidden_layers"]
        (64, 8, 2)
    """
    small: dict[str, Any] = {}
    for name, value in _SIZES.items():
        if getattr(config, name, None) is not None:
            small[name] = value
    for name, value in _MOST.items():
        if getattr(config, name, None) is not None:
            small[name] = min(value, getattr(config, name))
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        small["num_key_value_heads"] = max(1, 8 * kv_heads // heads)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    small["num_hidden_layers"] = max(2, len(kinds))
    if kinds:
        small["layer_types"] = (kinds * 2)[: small["num_hidden_layers"]]
    small |= {name: None for name in _TOKEN_KEYS if hasattr(config, name)}
    data = config.to_dict()
    fixed = {"transformers_version", "architectures", "dtype", "_name_or_path", "quantization_config", "auto_map"}
    kept = {name: value for name, value in data.items() if name not in fixed}
    return {**kept, **small, **_shrunk_rotary(config, small), "model_type": config.model_type}


def _shrunk_rotary(config: PretrainedConfig, small: dict[str, Any]) -> dict[str, Any]:
    """``longrope`` has a factor for each rotation; rows are short, so the long factors begin earlier."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict) or rotary.get("rope_type") != "longrope":
        return {}
    width = small.get("head_dim", small["hidden_size"] // small["num_attention_heads"])
    count = int(width * rotary.get("partial_rotary_factor", 1.0)) // 2
    factors = {name: list(rotary[name])[-count:] for name in ("long_factor", "short_factor")}
    original = {"original_max_position_embeddings": 16}
    top = original if hasattr(config, "original_max_position_embeddings") else {}
    return {"rope_parameters": {**rotary, **factors, **original}, **top}
