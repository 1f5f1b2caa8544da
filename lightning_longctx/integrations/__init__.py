"""Other libraries' models under this suite. Nothing is imported until it is asked for, so the core runs without them.

Hugging Face models need the extra ``hf``: ``pip install 'lightning-longctx[hf]'``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_longctx.integrations.causal_lm import CausalLMModule
    from lightning_longctx.integrations.optimization import OptimizerSettings, ScheduleSettings

__all__ = ["CausalLMModule", "OptimizerSettings", "ScheduleSettings"]

_HOMES = {
    "CausalLMModule": "lightning_longctx.integrations.causal_lm",
    "OptimizerSettings": "lightning_longctx.integrations.optimization",
    "ScheduleSettings": "lightning_longctx.integrations.optimization",
}


def require_transformers() -> None:
    """Raise an error that tells how to install Hugging Face transformers, if it cannot be imported.

    Raises:
        ImportError: ``transformers`` is missing or broken.
    """
    try:
        import_module("transformers")
    except ImportError as error:
        message = "Hugging Face models need `transformers`. Run: pip install 'lightning-longctx[hf]'"
        raise ImportError(message) from error


if not TYPE_CHECKING:  # else any name that is misspelt would be one of type `Any`

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
