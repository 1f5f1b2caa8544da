"""Modules by their shapes, and the switches of a plan by short names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.strategies import LongContextFSDPStrategy
from lightning_longctx.strategies.memory import MemorySettings, settings_of

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2**20,
}


def shapes(config: Any = TINY, kind: type[CausalLMModule] = CausalLMModule, **settings: Any) -> CausalLMModule:
    """A module on the meta device, as the tool builds it."""
    module = kind(config=config, **settings)
    module.configure_shapes()
    return module


def own_shapes(make: type[LightningModule]) -> LightningModule:
    """A module of somebody else's on the meta device."""
    with torch.device("meta"):
        return make()


def settings(module: LightningModule | None = None, world_size: int = 1, **switches: Any) -> MemorySettings:
    """What a strategy with these arguments asks for."""
    found = settings_of(LongContextFSDPStrategy(**switches), module, world_size)
    return replace(found, heads=found.heads or 8)
