"""LongContextFSDPStrategy: FSDP2 sharding plus Ulysses sequence parallelism."""

from lightning_longctx.strategies.fsdp2 import LongContextFSDPStrategy
from lightning_longctx.strategies.ulysses import ulysses_attention

__all__ = ["LongContextFSDPStrategy", "ulysses_attention"]
