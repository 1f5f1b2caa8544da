"""Documents by name in, packed rows out: sources, mixing, buffer policies, packing and the data module."""

from lightning_longctx.datamodules.adaptive import AdaptiveBufferPolicy
from lightning_longctx.datamodules.data_module import DynamicBatchingDataModule
from lightning_longctx.datamodules.documents import Document
from lightning_longctx.datamodules.packing import pack_documents
from lightning_longctx.datamodules.policies import (
    BufferPolicy,
    ContextAwareBufferPolicy,
    FixedBufferPolicy,
    PackingFacts,
)
from lightning_longctx.datamodules.selection import Budget, PoolView
from lightning_longctx.datamodules.settings import LoadingSettings, PackingSettings
from lightning_longctx.datamodules.simulation import PackingReport, simulate_packing
from lightning_longctx.datamodules.source_settings import SourceSettings

__all__ = [
    "AdaptiveBufferPolicy",
    "Budget",
    "BufferPolicy",
    "ContextAwareBufferPolicy",
    "Document",
    "DynamicBatchingDataModule",
    "FixedBufferPolicy",
    "LoadingSettings",
    "PackingFacts",
    "PackingReport",
    "PackingSettings",
    "PoolView",
    "SourceSettings",
    "pack_documents",
    "simulate_packing",
]
