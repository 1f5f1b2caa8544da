"""What a user who has files wants to write, as it stands in a configuration: books in parquet, code compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_longctx.datamodules import DynamicBatchingDataModule
from tests.datamodules.helpers import compress, keys_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CONFIGURATION = """
data:
  max_seq_len: WINDOW
  tokenizer: bytes
  buffer_policy: {class_path: lightning_longctx.datamodules.FixedBufferPolicy, init_args: {size: 2}}
  loading: {num_workers: WORKERS}
  sources:
    books: {path: books/*.parquet, weight: 0.4, min_tokens: 64K}
    code: {path: code/*.jsonl.zst, weight: 0.6}
"""
LONG, SHORT = 70_000, 9


def _write() -> None:
    Path("books").mkdir()
    Path("code").mkdir()
    for file in range(2):
        texts = ["b" * (LONG + file), "short", "c" * LONG]
        pq.write_table(pa.table({"title": ["x"] * 3, "text": texts}), f"books/{file}.parquet", row_group_size=2)
        lines = [json.dumps({"text": "d" * SHORT, "path": "a.py"}) for _ in range(6)]
        compress(Path(f"code/{file}.jsonl.zst"), "\n".join(lines).encode())


def _data(workers: int, window: str = "512K") -> DynamicBatchingDataModule:
    import lightning_longctx.cli.app  # noqa: F401 - teaches jsonargparse what a TokenCount is

    parser = ArgumentParser()
    parser.add_class_arguments(DynamicBatchingDataModule, "data")
    text = CONFIGURATION.replace("WORKERS", str(workers)).replace("WINDOW", window)
    data: Any = parser.instantiate(parser.parse_string(text))["data"]
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_books_and_code_are_read_each_document_once(workers: int) -> None:
    _write()
    data = _data(workers)
    assert data.source_names == ["books", "code"]
    rows = list(data.train_dataloader())
    keys = [key for row in rows for key in keys_of(row)]
    assert sorted(keys) == [*((0, number) for number in (0, 2, 3, 5)), *((1, number) for number in range(12))]
    assert data.counters["documents_below_min_tokens"] == 2
    packed = 4 * LONG + 1 + 4 + 12 * (SHORT + 1)  # one book is a byte longer, each document has its end
    assert sum(row["input_ids"].numel() for row in rows) == packed


def test_a_stop_goes_on_with_the_next_document() -> None:
    _write()
    unbroken = [keys_of(row) for row in _data(0, "80K").train_dataloader()]
    assert len(unbroken) >= 2
    first = _data(0, "80K")
    rows = iter(first.train_dataloader())
    found = [keys_of(next(rows))]
    second = _data(2, "80K")
    second.load_state_dict(first.state_dict())
    found += [keys_of(row) for row in second.train_dataloader()]
    assert found == unbroken
