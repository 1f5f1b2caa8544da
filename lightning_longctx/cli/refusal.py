"""What a configuration whose building failed was refused for, where that got lost on the way."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_longctx.errors import FieldError

__all__ = ["hidden_refusal"]


def hidden_refusal(config: Any) -> FieldError | None:
    """Find which of our classes refuses its settings, after building the whole configuration failed.

    Where a setting may be a name or a class, jsonargparse tries both and tells of the last attempt only, so the refusal
    of the class is lost. Classes with plain settings are built again, alone, until one refuses.

    Args:
        config: a parsed configuration as plain containers, or a part of it.
    """
    if not isinstance(config, dict):
        return None
    for value in config.values():
        if (found := hidden_refusal(value)) is not None:
            return found
    path, settings = config.get("class_path"), config.get("init_args")
    if not isinstance(path, str) or not path.startswith("lightning_longctx.") or not isinstance(settings, dict):
        return None
    if any(isinstance(value, dict) for value in settings.values()):
        return None
    module, _, name = path.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)(**settings)
    except FieldError as refusal:
        return refusal
    except (TypeError, ValueError, AttributeError):  # not for us to explain: the first error stands
        return None
    return None
