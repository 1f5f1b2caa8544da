"""Data sets of other libraries as sources, with the real libraries on local files; each is optional.

    pip install litdata mosaicml-streaming megatron-core

What is asked of each: every record once on any layout, also over a stop at any row, with and without workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import IterableDataset

from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.numbered import NumberedSource
from lightning_longctx.datamodules.records import IterableSource
from lightning_longctx.errors import ConfigurationError
from tests.datamodules.helpers import Recorder, data_module, keys_of, records, trainer
from tests.helpers.pool import run_ranks

DOCUMENTS = 23
TOKENS = [record["input_ids"] for record in records(DOCUMENTS)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Transformer Engine and Apex are not installed:UserWarning",  # megatron-core, for training that is not done
    "ignore:`torch.jit.script.*` is deprecated:DeprecationWarning",  # megatron-core
)


def _litdata_record(number: int) -> dict[str, Any]:
    return {"input_ids": np.array(TOKENS[number], np.int32)}


def write_litdata(folder: str) -> Any:
    """LitData's own writer starts processes of its own and asks for the main module; its cache does the same here."""
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.cache import Cache

    if not Path(folder, "index.json").exists():
        cache = Cache(folder, chunk_size=5)
        for number in range(DOCUMENTS):
            cache[number] = _litdata_record(number)
        cache.done()
        cache.merge()
    return litdata.StreamingDataset(folder)


def write_streaming(folder: str) -> Any:
    streaming = pytest.importorskip("streaming")
    if not Path(folder).exists():
        with streaming.MDSWriter(out=folder, columns={"input_ids": "ndarray:int32"}, size_limit=500) as writer:
            for tokens in TOKENS:
                writer.write({"input_ids": np.array(tokens, np.int32)})
    return streaming.StreamingDataset(local=folder, batch_size=1)


def write_megatron(folder: str) -> Any:
    """Each third document has two sequences, as those that were split into sentences have."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    if not Path(f"{folder}.idx").exists():
        builder = indexed.IndexedDatasetBuilder(f"{folder}.bin", dtype=np.uint16)
        for number, tokens in enumerate(TOKENS):
            cut = 1 if number % 3 == 0 else 0
            for sequence in filter(None, (tokens[:cut], tokens[cut:])):
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(f"{folder}.idx")
    return indexed.IndexedDataset(folder)


def write_hugging_face(folder: str) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"input_ids": tokens} for tokens in TOKENS]).to_iterable_dataset(num_shards=4)


LIBRARIES: dict[str, Callable[[str], Any]] = {
    "litdata": write_litdata,
    "streaming": write_streaming,
    "megatron": write_megatron,
    "datasets": write_hugging_face,
}
each_library = pytest.mark.parametrize("library", LIBRARIES)


def _fit(library: str, steps: int = -1, start: str | None = None, **settings: Any) -> Recorder:
    module, every = Recorder(), ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    run = trainer(max_steps=steps, callbacks=[every], enable_checkpointing=True)
    run.fit(module, data_module({"a": LIBRARIES[library]("a")}, **settings), ckpt_path=start)
    return module


@each_library
def test_every_document_comes_once_with_its_own_tokens(library: str) -> None:
    module = _fit(library)
    keys = list(chain(*module.seen))
    assert sorted(keys) == [(0, number) for number in range(DOCUMENTS)]
    expected = [token for _, number in keys for token in TOKENS[number]]
    assert list(chain(*module.tokens)) == expected


@each_library
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_at_any_step_loses_and_repeats_nothing(library: str, workers: int) -> None:
    if workers and library in ("litdata", "streaming") and sys.platform != "linux":
        pytest.skip("their readers do not survive pickling")
    whole = _fit(library)
    for stop in (1, 3, len(whole.seen) - 1):
        first = _fit(library, stop, num_workers=workers)
        rest = _fit(library, start=f"steps/step={stop}.ckpt", num_workers=workers)
        assert first.seen + rest.seen == whole.seen, stop
        assert first.tokens + rest.tokens == whole.tokens


def _rank(library: str, folder: str) -> list[tuple[int, int]]:
    module = Recorder()
    data = data_module({"a": LIBRARIES[library](folder)}, on_uneven_end="pad")
    trainer(devices=2, strategy="ddp_find_unused_parameters_true").fit(module, data)
    return list(chain(*module.seen))


@pytest.mark.distributed
@each_library
def test_two_ranks_share_the_documents(library: str, tmp_path: Path) -> None:
    """Both libraries of streams deal by what they find in the environment: they must not deal once more."""
    folder = str(tmp_path / "shared")
    LIBRARIES[library](folder)  # written once; each rank opens it
    first, second = run_ranks(_rank, 2, library, folder)
    assert first
    assert second
    assert sorted(first + second) == [(0, number) for number in range(DOCUMENTS)]


@pytest.mark.parametrize("library", ["litdata", "streaming"])
def test_the_order_reads_file_after_file(library: str) -> None:
    source = open_source("a", LIBRARIES[library]("a"))
    assert isinstance(source, NumberedSource)
    assert source.blocks is not None
    assert sum(source.blocks) == len(source) == DOCUMENTS
    assert len(source.blocks) > 3
    order = [number for _, number in chain(*_fit(library).seen)]
    block = np.repeat(np.arange(len(source.blocks)), source.blocks)[order]
    # The pool holds four documents, so a row may put those of two neighbours in another order; shuffled, every second
    # step would go to another file.
    assert np.count_nonzero(np.diff(block)) < DOCUMENTS / 2
    assert order != sorted(order)


def test_a_part_of_litdata_is_a_source_too() -> None:
    litdata = pytest.importorskip("litdata")
    write_litdata("a")
    source = open_source("a", litdata.StreamingDataset("a", subsample=0.5))
    assert isinstance(source, NumberedSource)
    found = [int(source.read(number)["input_ids"][0]) for number in range(len(source))]
    assert len(set(found)) == len(found) == DOCUMENTS // 2


def test_what_draws_samples_itself_is_refused() -> None:
    litdata, streaming = pytest.importorskip("litdata"), pytest.importorskip("streaming")
    combined = litdata.CombinedStreamingDataset([write_litdata("a")], iterate_over_all=True)
    with pytest.raises(ConfigurationError, match=r"data.sources.web.*must be a StreamingDataset of LitData"):
        open_source("web", combined)
    write_streaming("b")
    with pytest.raises(ConfigurationError, match=r"must give each of its samples once.*epoch of 10 samples out of 23"):
        open_source("web", streaming.StreamingDataset(local="b", batch_size=1, epoch_size=10))


class _WantsArguments(IterableDataset[dict[str, Any]]):
    """A stream that says where it is only to somebody who counts for it, as those of several libraries."""

    def __iter__(self) -> Any:
        return ({"input_ids": tokens} for tokens in TOKENS)

    def state_dict(self, num_samples: int) -> dict[str, int]:
        return {"place": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nobody can know what to load")


def test_a_state_that_needs_arguments_is_not_asked_for() -> None:
    source = open_source("a", _WantsArguments())
    assert isinstance(source, IterableSource)
    stream = source.open(3)
    assert next(stream)["input_ids"] == TOKENS[3]
    assert stream.state() is None


@pytest.mark.parametrize("item", [np.arange(1, 5, dtype=np.uint16), torch.arange(1, 5)], ids=["array", "tensor"])
def test_tokens_without_a_key_are_told_what_to_do(item: Any) -> None:
    rows = iter(data_module({"a": [item] * 3}).train_dataloader())
    with pytest.raises(Exception, match="must be a dict|Give records such as"):
        next(rows)


def test_keys_of_padding_are_left_out() -> None:
    """What the comparison of two ranks stands on: rows that only fill up have no documents."""
    assert keys_of({"document_keys": torch.tensor([[-1, -1], [0, 4]])}) == [(0, 4)]
