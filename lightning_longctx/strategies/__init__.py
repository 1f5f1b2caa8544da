"""LongContextFSDPStrategy: FSDP2 sharding plus Ulysses sequence parallelism."""

from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing
from lightning_longctx.strategies.activation_offload import ActivationOffload, offload_activations
from lightning_longctx.strategies.evaluation import gather_row
from lightning_longctx.strategies.fsdp2 import LongContextFSDPStrategy
from lightning_longctx.strategies.settings import ProcessSettings, ShardingSettings
from lightning_longctx.strategies.tiled_mlp import TiledMLP
from lightning_longctx.strategies.ulysses import ulysses_attention

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "LongContextFSDPStrategy",
    "ProcessSettings",
    "ShardingSettings",
    "TiledMLP",
    "gather_row",
    "offload_activations",
    "ulysses_attention",
]
