"""Rotary factors that follow the row, made constant for a run.

``longrope`` (Phi-3) has two sets of factors and takes the long one as soon as a position beyond the original length
occurs. Under sequence parallelism each rank would look at the positions of its own shard: the first rank of a row
would rotate with the short factors and the last with the long ones. In packed rows the factors of a document would also
follow its neighbours. So the choice is made once, from the longest document that a run allows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["fix_longrope"]


def fix_longrope(config: PretrainedConfig, max_seq_len: int | None) -> PretrainedConfig:
    """Return a configuration whose ``longrope`` factors do not depend on the row: long and short ones are the same.

    Args:
        config: any configuration; it is left as it is.
        max_seq_len: longest document of the run, in tokens. None: ``max_position_embeddings``.

    Returns:
        ``config`` itself where there is nothing to fix.
    """
    fixed = copy.deepcopy(config)
    longest = max_seq_len if max_seq_len is not None else int(config.max_position_embeddings)
    changed = [_fix(rotary, longest) for rotary in _rotary(getattr(fixed, "rope_parameters", None))]
    return fixed if any(changed) else config


def _fix(rotary: dict[str, Any], longest: int) -> bool:
    if rotary.get("rope_type") != "longrope" or rotary["short_factor"] == rotary["long_factor"]:
        return False
    is_long = longest > rotary["original_max_position_embeddings"]
    chosen = rotary["long_factor" if is_long else "short_factor"]
    rotary["long_factor"], rotary["short_factor"] = list(chosen), list(chosen)
    return True


def _rotary(parameters: Any) -> list[dict[str, Any]]:
    """The settings, one a kind of layer where there are several."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
