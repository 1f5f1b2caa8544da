"""Parquet: rows by number over files and row groups, columns and types checked before training, little kept."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules import parquet
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.parquet import ParquetSource
from lightning_longctx.errors import ConfigurationError, DataError
from tests.datamodules.helpers import data_module, keys_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def _write(path: str, columns: dict[str, Any], group: int = 3) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=group)


def _books() -> list[str]:
    texts = [f"book {i}" for i in range(12)]
    _write("a.parquet", {"text": texts[:7], "other": range(7)})
    _write("b.parquet", {"text": [], "other": []})
    _write("c.parquet", {"other": range(5), "text": texts[7:]}, group=5)
    return texts


def _source(value: Any) -> ParquetSource:
    source = open_source("books", value)
    assert isinstance(source, ParquetSource)
    return source


def test_rows_are_read_by_number_and_blocks_tell_the_row_groups() -> None:
    texts = _books()
    source = _source("*.parquet")
    assert (len(source), list(source.blocks)) == (12, [3, 3, 1, 5])
    assert [source.read(number) for number in range(12)] == [{"text": text} for text in texts]
    assert [source.read(number)["text"] for number in (11, 0, 6)] == [texts[11], texts[0], texts[6]]
    assert (source.describe(6), source.describe(8)) == ("a.parquet, row 6", "c.parquet, row 1")


def test_a_row_group_is_decoded_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _books()
    decoded: list[tuple[str, int]] = []
    original = pq.ParquetFile.read_row_group

    def read(self: Any, group: int, **options: Any) -> Any:
        decoded.append((tuple(options["columns"]), group))
        return original(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read)
    source = _source("*.parquet")
    for number in (0, 2, 1, 4, 0):
        source.read(number)
    assert decoded == [(("text",), 0), (("text",), 1)], "the column that is needed, each group once"
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1)
    source = _source("*.parquet")
    for number in (0, 1, 4, 0):
        source.read(number)
    assert len(decoded) == 5, "one group is always kept, and no more than fits"


def test_nothing_decoded_travels_to_another_process() -> None:
    _write("a.parquet", {"text": ["x" * 100_000] * 4})
    source = _source("a.parquet")
    source.read(0)
    sent = pickle.dumps(source)
    assert len(sent) < 5_000
    assert pickle.loads(sent).read(3) == {"text": "x" * 100_000}


def test_long_lists_of_ids_stay_arrays() -> None:
    ids = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
    _write("a.parquet", {"input_ids": ids, "labels": [[-100, 1, 2, 3, 4], [0, 1, 2]]})
    source = _source({"path": "a.parquet", "format": "tokens"})
    row = source.read(1)
    assert isinstance(row["input_ids"], np.ndarray)
    assert (row["input_ids"].tolist(), row["labels"].tolist()) == ([0, 1, 2], [0, 1, 2])
    assert source.is_pretokenized
    assert _source("a.parquet").is_pretokenized, "no text is there"


def test_files_elsewhere() -> None:
    fsspec = pytest.importorskip("fsspec")
    texts = _books()
    for file in Path().glob("*.parquet"):
        fsspec.filesystem("memory").pipe(f"/books/{file.name}", file.read_bytes())
    source = _source("memory://books/*.parquet")
    assert [source.read(number)["text"] for number in range(12)] == texts


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_module_reads_every_row_once(workers: int) -> None:
    _books()
    data = data_module({"books": "*.parquet"}, num_workers=workers)
    keys = [key for row in data.train_dataloader() for key in keys_of(row)]
    assert sorted(keys) == [(0, number) for number in range(12)]


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({"content": ["a"]}, {}, "must have a column 'text', but got none in a.parquet. Known: content"),
        ({"text": [1]}, {}, "must have text in column 'text', but got int64 in a.parquet"),
        ({"text": ["a"]}, {"format": "tokens"}, "must have a column 'input_ids'"),
        ({"input_ids": ["a"]}, {}, "must have integers in a list in column 'input_ids', but got string"),
        ({"text": ["a"]}, {"format": "chat"}, "must have a column 'messages'.*messages_field"),
        ({"messages": ["a"]}, {"format": "chat"}, "a list of messages in column 'messages', but got string"),
        ({"prompt": ["a"]}, {"format": "prompt_response"}, "must have a column 'response'.*response_field"),
        ({"text": pa.array([], pa.string())}, {}, "at least one document"),
    ],
)
def test_what_a_file_lacks_is_said_before_training(columns: Any, settings: Any, message: str) -> None:
    _write("a.parquet", columns)
    with pytest.raises(ConfigurationError, match=message):
        len(_source({"path": "a.parquet", **settings}))


def test_a_later_file_is_checked_before_the_first_row() -> None:
    _books()
    _write("d.parquet", {"words": ["a"]})
    with pytest.raises(ConfigurationError, match=r"column 'text'.*d\.parquet"):
        list(data_module({"books": "*.parquet"}).train_dataloader())
    Path("d.parquet").write_text("no parquet")
    with pytest.raises(ConfigurationError, match=r"must be parquet.*d\.parquet"):
        list(data_module({"books": "*.parquet"}).train_dataloader())


def test_an_empty_cell_and_a_lost_file_are_bad_records() -> None:
    _write("a.parquet", {"text": ["a", None, "b"]})
    with pytest.raises(DataError, match=r"NoneType there.*a\.parquet, row 1"):
        list(data_module({"books": "a.parquet"}).train_dataloader())
    source = _source("a.parquet")
    len(source)
    Path("a.parquet").unlink()
    with pytest.raises(DataError, match=r"must be readable.*a\.parquet, row group 0"):
        source.read(0)
