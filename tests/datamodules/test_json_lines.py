"""JSON lines as a stream: compressed and remote files, places, and going on where it was."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.datamodules import json_lines
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.json_lines import JsonLinesSource, JsonLinesStream
from lightning_longctx.errors import ConfigurationError, DataError
from tests.datamodules.helpers import compress, data_module

SUFFIXES = ["", ".gz", ".zst"]


def _write(suffix: str, counts: tuple[int, ...] = (3, 4)) -> list[str]:
    """Files with lines of very different lengths, blank lines and Windows line ends; returns the texts."""
    pytest.importorskip("pyarrow")
    texts = []
    for file, count in enumerate(counts):
        own = [f"{file}-{line} " + "\u00e9\u4e2d" * (line * 50) for line in range(count)]
        lines = [json.dumps({"text": text}) + "\r\n" * (line % 2) for line, text in enumerate(own)]
        compress(Path(f"{file}.jsonl{suffix}"), ("\n\n" + "\n".join(lines)).encode())
        texts += own
    return texts


def _stream(path: Any) -> JsonLinesStream:
    source = open_source("code", path)
    assert isinstance(source, JsonLinesStream)
    return source


def _read(source: JsonLinesStream, taken: int = 0, state: Any = None) -> list[str]:
    return [source.decode(record)["text"] for record in source.open(taken, state)]


@pytest.mark.parametrize("chunk", [7, 2**20])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_stream_gives_every_line(suffix: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_STREAM_CHUNK", chunk)
    texts = _write(suffix)
    assert _read(_stream(f"*.jsonl{suffix}")) == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_it_goes_on_from_every_place_as_if_nothing_had_happened(suffix: str) -> None:
    texts = _write(suffix)
    source = _stream(f"*.jsonl{suffix}")
    for taken in range(len(texts) + 1):
        stream = source.open()
        assert len(list(islice(stream, taken))) == taken
        state = json.loads(json.dumps(stream.state()))  # plain containers
        assert _read(source, taken, state) == _read(source, taken) == texts[taken:]


def test_plain_files_beside_compressed_ones_are_one_stream() -> None:
    texts = _write("")
    compress(Path("1.jsonl.gz"), Path("1.jsonl").read_bytes())
    assert isinstance(open_source("code", "*.jsonl"), JsonLinesSource)
    Path("1.jsonl").unlink()
    assert _read(_stream(["0.jsonl", "1.jsonl.gz"])) == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_elsewhere_are_streams(suffix: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    texts = _write(suffix)
    memory = fsspec.filesystem("memory")
    for file in Path().glob("*.jsonl*"):
        memory.pipe(f"/code{suffix}/{file.name}", file.read_bytes())
    source = _stream(f"memory://code{suffix}/*.jsonl{suffix}")
    assert _read(source) == texts
    stream = source.open(4)
    assert _read(source, 4, stream.state()) == texts[4:]


def test_the_place_of_a_line_is_its_file_and_number() -> None:
    pytest.importorskip("pyarrow")
    compress(Path("a.jsonl.gz"), b'{"text": "ok"}\n')
    compress(Path("b.jsonl.gz"), b'\n\n{"text": \n{"no": 1}\n   \n')
    source = _stream("*.jsonl.gz")
    records = list(source.open())
    assert [source.describe(number, record) for number, record in enumerate(records)] == [
        "a.jsonl.gz:1",
        "b.jsonl.gz:3",
        "b.jsonl.gz:4",
        "b.jsonl.gz:5",
    ]
    with pytest.raises(DataError, match=r"one JSON object a line.*b\.jsonl\.gz:3"):
        source.decode(records[1])
    assert source.decode(records[3]) == {"input_ids": []}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_lines_of_a_stream_are_named_or_counted(workers: int) -> None:
    compress(Path("a.jsonl.gz"), b'{"text": "abc"}\n{"text": \n{"no": 1}\n{"text": "\\ud800"}\n{"text": "def"}\n')
    data = data_module({"code": "a.jsonl.gz"}, on_bad_record="skip", num_workers=workers)
    assert [row["input_ids"].tolist() for row in data.train_dataloader()] == [[[97, 98, 99, 256, 100, 101, 102, 256]]]
    assert data.counters["bad_records_skipped"] == 3
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2"):
        list(data_module({"code": "a.jsonl.gz"}).train_dataloader())


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_cut_off_is_an_error_and_not_an_end(suffix: str) -> None:
    _write(suffix)
    source = _stream(f"*.jsonl{suffix}")
    file = Path(f"1.jsonl{suffix}")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"must be readable.*1\.jsonl\{suffix}"):
        list(source.open())


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_where_bad_records_are_skipped_the_files_behind_a_broken_one_are_read(suffix: str) -> None:
    texts = _write(suffix, (2, 3, 2))
    file = Path(f"1.jsonl{suffix}")
    file.write_bytes(file.read_bytes()[:-9])
    data = data_module({"code": f"*.jsonl{suffix}"}, size=1, max_seq_len=4096, on_bad_record="skip")
    keys = [row["input_ids"][0].tolist() for row in data.train_dataloader()]
    found = [bytes(part).decode() for ids in keys for part in _documents(ids)]
    assert found[:2] == texts[:2]
    assert found[-2:] == texts[-2:]
    assert data.counters["bad_records_skipped"] == 1


def _documents(ids: list[int]) -> list[list[int]]:
    """The bytes of each document of a row, which ends with 256."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == 256:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


@pytest.mark.parametrize("with_state", [False, True])
def test_a_stream_that_became_shorter_is_not_taken_for_its_end(with_state: bool) -> None:
    texts = _write(".gz")
    stream = _stream("*.jsonl.gz").open()
    assert len(list(islice(stream, 5))) == 5
    state = stream.state() if with_state else None
    assert _read(_stream("*.jsonl.gz"), 5, state) == texts[5:]
    compress(Path("1.jsonl.gz"), b"")
    if with_state:  # the file that it stood in lost what was read of it
        with pytest.raises(ConfigurationError, match="must have the bytes that were read before the stop"):
            _read(_stream("*.jsonl.gz"), 5, state)
    else:
        with pytest.raises(DataError, match=r"must have the records that were read before the stop.*2 records earlier"):
            _stream("*.jsonl.gz").open(5)


def test_a_stream_without_a_line_is_refused() -> None:
    compress(Path("a.jsonl.gz"), b"\n\n")
    with pytest.raises(ConfigurationError, match="at least one document"):
        open_source("code", "a.jsonl.gz")


def test_a_file_that_came_before_the_place_is_noticed() -> None:
    texts = _write(".gz")
    source = _stream("*.jsonl.gz")
    state = source.open(5).state()
    Path("2.jsonl.gz").write_bytes(Path("0.jsonl.gz").read_bytes())
    assert _read(_stream("*.jsonl.gz"), 5, state) == [*texts[5:], *texts[:3]], "appended: read on"
    Path("0.jsonl.gz").rename("00.jsonl.gz")
    with pytest.raises(DataError, match=r"same files as before the stop"):
        _stream("*.jsonl.gz").open(5, state)


def test_it_can_be_sent_to_another_process_before_and_after_reading() -> None:
    texts = _write(".gz")
    source = _stream("*.jsonl.gz")
    next(source.open())
    assert _read(pickle.loads(pickle.dumps(source))) == texts
