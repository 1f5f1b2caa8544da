"""Data sets of other libraries that are streams to PyTorch, and yet can be read by number.

LitData and MosaicML Streaming deal their samples to ranks and workers themselves, by what they find in the
environment. Dealt once more by the data module most of them would be lost; so they are asked for each sample by its
number, which neither deals, and their files tell which samples are cheap to read together. Megatron's files hold
sequences, of which one or several make a document. None of the libraries is imported here: a user has them, or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.sources import SequenceSource
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = ["NumberedSource", "numbered_source"]


@dataclass(frozen=True)
class _Records:
    """Reads records by number.

    Args:
        read: from a number to a record.
        count: how many there are.
        blocks: lengths of consecutive runs of records in one file; None if all cost alike.
    """

    read: Callable[[int], Any]
    count: int
    blocks: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.read(number)


class NumberedSource(SequenceSource):
    """Records that another library's data set gives by number, in an order that reads file after file.

    Args:
        name: of the source.
        settings: of the source.
        records: the reader of the data set.
        field: the setting it stands in, for errors.
    """

    def __init__(self, name: str, settings: SourceSettings, records: _Records, field: str = "") -> None:
        super().__init__(name, settings, records, field)  # type: ignore[arg-type]
        self._blocks = records.blocks

    @property
    def blocks(self) -> Sequence[int] | None:
        """Records of each file; None if all cost alike."""
        return self._blocks

    def read(self, number: int) -> Mapping[str, Any]:
        """Read record ``number``; tokens without a key are its ``input_ids``."""
        record = super().read(number)
        return record if isinstance(record, Mapping) else {"input_ids": record}


def numbered_source(name: str, settings: SourceSettings, field: str) -> NumberedSource | None:
    """The source of ``settings.records`` if they are a data set of a library that is known here, else None.

    Raises:
        ConfigurationError: a data set of such a library that cannot be read whole and by number.
    """
    records = settings.records
    libraries = {cls.__module__.partition(".")[0] for cls in type(records).__mro__}
    if "litdata" in libraries:
        found = _of_litdata(records, field)
    elif "streaming" in libraries and hasattr(records, "samples_per_shard"):
        found = _of_streaming(records, field)
    elif "megatron" in libraries and hasattr(records, "document_indices"):
        found = _of_megatron(records, field)
    else:
        return None
    return NumberedSource(name, settings, found, field)


def _of_litdata(records: Any, field: str) -> _Records:
    if not hasattr(records, "cache_dir"):
        rule = "must be a StreamingDataset of LitData"
        fix = "Give each of its data sets as a source, with a `weight`: the data module mixes them by tokens."
        raise ConfigurationError(field, rule, type(records).__name__, fix)
    records[0]  # opens the index
    blocks = [interval[2] - interval[1] for interval in records.cache.get_chunk_intervals()]  # of the chosen part
    return _Records(records.__getitem__, sum(blocks), blocks)


def _of_streaming(records: Any, field: str) -> _Records:
    if records.epoch_size != records.size:
        got = f"an epoch of {counted(records.epoch_size, 'sample')} out of {records.size}"
        fix = "Leave `epoch_size` and the streams' proportions out, and give each stream as a source with a `weight`."
        raise ConfigurationError(field, "must give each of its samples once", got, fix)
    return _Records(records.__getitem__, records.size, [int(count) for count in records.samples_per_shard])


def _of_megatron(records: Any, field: str) -> _Records:
    if records.multimodal:
        raise ConfigurationError(field, "must hold text alone", "multimodal sequences", "Leave it out.")
    bounds = np.asarray(records.document_indices)

    def read(number: int) -> Any:
        sequences = [records[index] for index in range(bounds[number], bounds[number + 1])]
        return sequences[0] if len(sequences) == 1 else np.concatenate([np.empty(0, np.int32), *sequences])

    return _Records(read, len(bounds) - 1)
