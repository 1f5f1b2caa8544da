"""Python objects as sources: iterables, torch and Hugging Face datasets of both kinds, and where they go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from lightning_longctx.datamodules import SourceSettings
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.records import IterableSource
from lightning_longctx.datamodules.sources import SequenceSource
from lightning_longctx.errors import ConfigurationError
from tests.datamodules.helpers import Stream, data_module, keys_of

datasets = pytest.importorskip("datasets")
distributed = pytest.importorskip("datasets.distributed")

ITEMS = [{"text": f"document {number}"} for number in range(23)]


def _stream(records: Any) -> IterableSource:
    source = open_source("web", records)
    assert isinstance(source, IterableSource)
    return source


def _shards(shards: list[int]) -> Iterator[dict[str, str]]:
    for shard in shards:
        yield from ITEMS[shard : shard + 5]


def _streaming() -> Any:
    return datasets.IterableDataset.from_generator(_shards, gen_kwargs={"shards": [0, 5, 10, 15]})


def _upper(record: dict[str, str]) -> dict[str, str]:
    return {"text": record["text"].upper()}


class Counted:
    """An iterable whose iterator keeps its own place, as those of torchdata do."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[dict[str, str]]:
        return _Counting(self.read)


class _Counting(Iterator[dict[str, str]]):
    def __init__(self, read: list[int]) -> None:
        self._place = 0
        self._read = read

    def __next__(self) -> dict[str, str]:
        if self._place == len(ITEMS):
            raise StopIteration
        self._read.append(self._place)
        self._place += 1
        return ITEMS[self._place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stream(ITEMS),
        Counted,
        _streaming,
        lambda: _streaming().map(_upper).filter(lambda record: not record["text"].endswith("7")),
        lambda: datasets.Dataset.from_list(ITEMS).to_iterable_dataset(num_shards=3),
        lambda: datasets.Dataset.from_list(ITEMS).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=6),
        lambda: datasets.interleave_datasets([_streaming(), _streaming().map(_upper)]),
        lambda: _streaming().with_format("torch"),
    ],
    ids=["plain", "own state", "generator", "mapped", "arrow", "shuffled", "interleaved", "torch"],
)
def test_a_stream_goes_on_from_every_place_as_if_nothing_had_happened(make: Any) -> None:
    source = _stream(make())
    whole = list(source.open())
    assert len(whole) >= 18
    for taken in range(0, len(whole) + 1, 3):
        stream = source.open()
        assert list(islice(stream, taken)) == whole[:taken]
        state = json.loads(json.dumps(stream.state()))  # plain containers
        assert list(source.open(taken, state)) == whole[taken:], taken
        assert list(source.open(taken)) == whole[taken:], taken


def test_a_stream_with_a_state_is_not_read_again() -> None:
    records = Counted()
    source = _stream(records)
    stream = source.open(20)
    state = stream.state()
    records.read.clear()
    assert len(list(source.open(20, state))) == 3
    assert records.read == [20, 21, 22]


def test_one_that_holds_records_back_has_no_state() -> None:
    shuffled = _streaming().shuffle(seed=1, buffer_size=6)
    assert _stream(shuffled).open(3).state() is None
    assert _stream(shuffled.map(_upper)).open(3).state() is None
    assert _stream(_streaming()).open(3).state() is not None


def test_a_stream_can_be_opened_in_another_thread() -> None:
    """Rows are made in a thread: there the hub opens file systems anew, while the dataset refers to all open ones."""
    source = _stream(datasets.Dataset.from_list(ITEMS).to_iterable_dataset(num_shards=3))
    with ThreadPoolExecutor(1) as pool:
        assert len(list(pool.submit(source.open).result())) == len(ITEMS)


def test_two_passes_at_a_time_do_not_disturb_each_other() -> None:
    source = _stream(_streaming())
    first = source.open(4)
    state = first.state()
    other = source.open()
    assert [next(other), next(first)] == [ITEMS[0], ITEMS[4]]
    assert first.state() != state
    assert list(source.open(4, state))[0] == ITEMS[4]


@pytest.mark.parametrize("runtime", ["main", "worker"])
def test_a_streaming_dataset_does_not_see_workers_and_loses_nothing(tmp_path: Path, runtime: str) -> None:
    """It would give each worker process other shards, by ``get_worker_info()``, and none to a third one."""
    log = tmp_path / "log"

    def note(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{what} {get_worker_info() is not None}\n")

    def shards(shards: list[int]) -> Iterator[dict[str, str]]:
        for shard in shards:
            for record in ITEMS[shard : shard + 5]:
                note("read in a worker:")
                yield record

    def tokenize(text: str) -> list[int]:
        note("tokenized in a worker:")
        return [int(text.split()[1])] * 4

    streaming = datasets.IterableDataset.from_generator(shards, gen_kwargs={"shards": [0, 5, 10, 15]})
    assert streaming.num_shards == 4
    data = data_module({"web": streaming}, tokenizer=tokenize, num_workers=2, runtime=runtime)
    rows = list(data.train_dataloader())
    assert [key for row in rows for key in keys_of(row)] == [(0, number) for number in range(20)]
    tokens = [token for row in rows for token in row["input_ids"][0].tolist()]
    assert tokens == [number for number in range(20) for _ in range(4)]
    lines = log.read_text().splitlines()
    assert sorted(lines) == ["read in a worker: False"] * 20 + ["tokenized in a worker: True"] * 20


def test_map_style_datasets_are_indexable_and_read_again() -> None:
    source = open_source("web", SourceSettings(records=datasets.Dataset.from_list(ITEMS)))
    assert isinstance(source, SequenceSource)
    assert (len(source), source.read(22)) == (23, ITEMS[22])
    data = data_module({"web": datasets.Dataset.from_list(ITEMS)}, num_workers=2)
    keys = [key for row in data.train_dataloader() for key in keys_of(row)]
    assert sorted(keys) == [(0, number) for number in range(23)]


def test_a_saved_dataset_is_read_from_its_folder() -> None:
    datasets.Dataset.from_list(ITEMS).save_to_disk("saved")
    source = open_source("web", "saved")
    assert isinstance(source, SequenceSource)
    assert [source.read(number) for number in range(len(source))] == ITEMS
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ITEMS)}).save_to_disk("splits")
    with pytest.raises(ConfigurationError, match=r"must be one dataset.*splits/train"):
        open_source("web", "splits")
    assert isinstance(open_source("web", str(Path("splits") / "train")), SequenceSource)


class Sized(IterableDataset[dict[str, str]]):
    """Has a length, and inherits ``__getitem__``: still a stream."""

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ITEMS)


def test_a_torch_iterable_dataset_is_a_stream_whatever_it_inherits() -> None:
    assert list(_stream(Sized()).open()) == ITEMS


def test_what_is_not_one_whole_dataset_is_refused() -> None:
    train = datasets.Dataset.from_list(ITEMS)
    for value in (datasets.DatasetDict({"train": train}), {"records": datasets.DatasetDict({"train": train})}):
        with pytest.raises(ConfigurationError, match=r"data\.sources\.web"):
            open_source("web", value)
    part = distributed.split_dataset_by_node(_streaming(), rank=0, world_size=2)
    with pytest.raises(ConfigurationError, match="must be a whole dataset"):
        open_source("web", part)
    with pytest.raises(ConfigurationError, match="must give records by number"):
        open_source("web", {"records": _Columns()})


class _Columns:
    """As a data frame: a length, and items that are columns."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> list[str]:
        return {"text": ["a", "b", "c"]}[name]
