"""Documents by name in, packed rows out: sources, mixing, buffer policies, packing and the data module."""

from lightning_longctx.datamodules.data_module import DynamicBatchingDataModule
from lightning_longctx.datamodules.documents import Document
from lightning_longctx.datamodules.packing import pack_documents
from lightning_longctx.datamodules.policies import BufferPolicy, FixedBufferPolicy
from lightning_longctx.datamodules.settings import LoadingSettings, PackingSettings
from lightning_longctx.datamodules.sources import SourceSettings

__all__ = [
    "BufferPolicy",
    "Document",
    "DynamicBatchingDataModule",
    "FixedBufferPolicy",
    "LoadingSettings",
    "PackingSettings",
    "SourceSettings",
    "pack_documents",
]
