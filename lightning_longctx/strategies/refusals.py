"""What is refused in a module before it is sharded: layers that would see a shard where they need the whole row.

These are read from modules and their configurations by name, without importing the library they come from. What cannot
be read shows in the first step, where exchanges are counted, or in ``longctx doctor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_longctx.errors import ConfigurationError

__all__ = ["LAYER_TYPES", "check_token_mixing"]

#: Kinds of layers, as Hugging Face configurations name them, that attention cores compute. Others mix tokens in ways
#: that see neither documents nor other ranks.
LAYER_TYPES = {"full_attention", "sliding_attention"}

# Modules of PyTorch that mix tokens along the sequence by themselves.
_MIXERS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_FIX = (
    "Use attention layers (`ulysses_attention`), or set `mixes_tokens = False` on the layer if it does not run along"
    " the tokens of a row."
)


def check_token_mixing(module: nn.Module, sp_size: int) -> None:
    """Refuse layers that mix tokens outside attention and rotary factors that follow the shard, where rows are shared.

    Args:
        module: the whole module.
        sp_size: ranks that share a row; with 1 nothing is refused.

    Raises:
        ConfigurationError: a recurrence, a convolution, PyTorch's own attention modules, linear or state-space layers
            by their configuration, or rotary factors that depend on the largest local position.
    """
    if sp_size == 1:
        return
    for name, child in module.named_modules():
        if getattr(child, "mixes_tokens", True) is False:
            continue
        if isinstance(child, _MIXERS) or (isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1):
            got = f"`{name}` ({type(child).__name__}), which would see the tokens of its own rank only"
            _refuse("must mix tokens only in attention that exchanges", got, _FIX)
        config = getattr(child, "config", None)
        kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
        if kinds:
            got = f"layers {sorted(kinds)} in the configuration of {type(child).__name__}"
            _refuse("must mix tokens only in attention that exchanges", got, "Take a model of attention layers.")
        if hasattr(child, "rope_type"):
            _check_rotary(name, config)


def _check_rotary(name: str, config: Any) -> None:
    for rotary in _rotary(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        kind = rotary.get("rope_type", "default")
        follows = kind == "dynamic" or (kind == "longrope" and rotary.get("long_factor") != rotary.get("short_factor"))
        if follows:
            got = f"`{kind}` in `{name}`, whose factors follow the largest position of a rank's own shard"
            fix = (
                "For longrope build the model from `fix_longrope(config, max_seq_len)` (CausalLMModule does; it is in"
                " lightning_longctx.integrations.transformers); instead of dynamic use yarn or a larger rope_theta."
            )
            _refuse("must have rotary factors that are alike on all ranks of a row", got, fix)


def _rotary(parameters: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]


def _refuse(rule: str, got: str, fix: str) -> None:
    raise ConfigurationError("model", f"{rule} at sequence_parallel_size > 1", got, fix)
