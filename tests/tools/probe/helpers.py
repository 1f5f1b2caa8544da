"""Documents of given lengths, and the rows that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules import DynamicBatchingDataModule, LoadingSettings, PackingSettings
from lightning_longctx.tools.probe.streams import MeasuredRows, Row, Stream, read_streams
from lightning_longctx.topology import Topology
from tests.cli.toys import ToyModel


def as_many_tokens(text: str) -> NDArray[np.int32]:
    """A tokenizer: the text is a number, and becomes as many tokens."""
    return np.full(int(text), 7, np.int32)


class Speller:
    """As much of a Hugging Face tokenizer as the data module uses: a token a letter."""

    eos_token_id = 0

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def __len__(self) -> int:
        return 256

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) if token else "</s>" for token in ids)


class SpellingModel(ToyModel):
    """A model with a tokenizer."""

    def load_tokenizer(self) -> Speller:
        return Speller()


def data_module(lengths: Sequence[int], window: int, policy: Any = "adaptive", **settings: Any) -> Any:
    """Documents of these lengths in this order; keywords of ``LoadingSettings`` and ``PackingSettings`` too."""
    loading = {name: settings.pop(name) for name in list(settings) if name in LoadingSettings.__dataclass_fields__}
    packing = {name: settings.pop(name) for name in list(settings) if name in PackingSettings.__dataclass_fields__}
    return DynamicBatchingDataModule(
        sources=settings.pop("sources", None) or {"a": [{"text": str(length)} for length in lengths]},
        tokenizer=as_many_tokens,
        max_seq_len=window,
        buffer_policy=policy,
        loading=LoadingSettings(**{"shuffle": False, **loading}),
        packing=PackingSettings(**packing),
        **settings,
    )


def topologies(dp_size: int, sp_size: int = 1) -> list[Topology]:
    """The reader ranks."""
    return [Topology(rank * sp_size, dp_size * sp_size, rank, dp_size, sp_size=sp_size) for rank in range(dp_size)]


def measured(
    data: DynamicBatchingDataModule, rows: int, dp_size: int = 1, sp_size: int = 1, seed: int | None = None
) -> list[Stream]:
    """Read the streams of all ranks."""
    return read_streams(data, topologies(dp_size, sp_size), seed, rows, keep=0)


def settings_of(data: DynamicBatchingDataModule) -> Any:
    """The settings of a rank's rows."""
    rows = data.row_builder(Topology(), kind=MeasuredRows)
    assert isinstance(rows, MeasuredRows)
    return rows.settings


def lengths_of(rows: Sequence[Row]) -> list[list[int]]:
    """Token counts of the documents of each row."""
    return [[length for _, _, length in row.documents] for row in rows]
