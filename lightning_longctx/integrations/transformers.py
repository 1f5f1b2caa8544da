"""The Hugging Face integration under one import path: the attention, the presets and the module.

Importing this registers the attention ``longctx``, so that ``attn_implementation="longctx"`` works in any script.
"""

from __future__ import annotations

from lightning_longctx.integrations.attention import ATTENTION_NAME, longctx_attention, register_attention
from lightning_longctx.integrations.causal_lm import CausalLMModule
from lightning_longctx.integrations.optimization import OptimizerSettings, ScheduleSettings
from lightning_longctx.integrations.presets import PRESETS
from lightning_longctx.integrations.rotary import fix_longrope

__all__ = [
    "ATTENTION_NAME",
    "PRESETS",
    "CausalLMModule",
    "OptimizerSettings",
    "ScheduleSettings",
    "fix_longrope",
    "longctx_attention",
    "register_attention",
]
