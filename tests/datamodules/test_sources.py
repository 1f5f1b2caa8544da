"""Sources: what a user may write, what is read, and what is said when it cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.datamodules import SourceSettings
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.files import open_source, open_sources
from lightning_longctx.datamodules.json_lines import JsonLinesSource
from lightning_longctx.datamodules.sources import IndexableSource, SequenceSource, StreamingSource
from lightning_longctx.datamodules.text_files import TextFilesSource
from lightning_longctx.datamodules.tokenizers import bytes_tokenizer
from lightning_longctx.errors import ConfigurationError, DataError
from tests.datamodules.helpers import Stream, compress
from tests.helpers.pool import run_ranks


def _texts(source: Any) -> list[Any]:
    assert isinstance(source, IndexableSource)
    return [source.read(number)[source.text_field] for number in range(len(source))]


def test_text_files_are_one_document_each_in_sorted_order() -> None:
    for name, text in {"b.txt": "two", "a.txt": "one\nline", "c.md": "three"}.items():
        Path(name).write_text(text)
    assert _texts(open_source("x", "*.txt")) == ["one\nline", "two"]
    assert _texts(open_source("x", Path("c.md"))) == ["three"]
    assert _texts(open_source("x", {"path": str(Path.cwd() / "*"), "text_field": "content"})) == [
        "one\nline",
        "two",
        "three",
    ]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_json_lines_are_read_by_number_over_files(ending: str) -> None:
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": f"a{i} \u00e9\u4e2d"}) for i in range(3)) + ending)
    Path("b.jsonl").write_text('\n{"text": "b0"}\r\n\n\n{"text": "b1"}' + ending)
    source = open_source("x", "*.jsonl")
    assert isinstance(source, JsonLinesSource)
    assert _texts(source) == ["a0 \u00e9\u4e2d", "a1 \u00e9\u4e2d", "a2 \u00e9\u4e2d", "b0", "b1"]
    assert source.describe(4) == "b.jsonl:5"
    assert source.read(4) == {"text": "b1"}


@pytest.mark.parametrize(
    ("line", "got"), [('{"text": ', "a.jsonl:2"), ("[1, 2]", "a.jsonl:2: a list"), ('{"text": "\udcff"}', "a.jsonl:2")]
)
def test_a_bad_line_is_named(line: str, got: str) -> None:
    Path("a.jsonl").write_bytes(b'{"text": "ok"}\n' + line.encode(errors="surrogateescape") + b"\n")
    source = open_source("web", "a.jsonl")
    assert isinstance(source, IndexableSource)
    with pytest.raises(DataError, match="on_bad_record: skip") as caught:
        source.read(1)
    assert caught.value.field == "data.sources.web"
    assert str(caught.value.got).startswith(got)


def test_files_that_cannot_be_read_are_named() -> None:
    Path("a.txt").write_bytes(b"ab\xffcd")
    source = open_source("x", "a.txt")
    assert isinstance(source, TextFilesSource)
    with pytest.raises(DataError, match=r"a\.txt: byte 2"):
        source.read(0)
    Path("a.txt").unlink()
    with pytest.raises(DataError, match=r"must be readable.*a\.txt"):
        source.read(0)


@pytest.mark.parametrize("again", ["a.txt", "./a.txt"])
def test_a_file_that_is_named_twice_is_refused(again: str) -> None:
    Path("a.txt").write_text("a")
    with pytest.raises(ConfigurationError, match=r"must name a file once.*raise the source's `weight`"):
        open_source("a", ["a.txt", "*.txt", again])


def test_a_path_may_be_a_list_and_takes_each_file_once() -> None:
    for name in ("b.txt", "a.txt", "c.txt"):
        Path(name).write_text(name)
    source = open_source("x", {"path": ["c.txt", "*.txt", Path("a.txt")]})
    assert _texts(source) == ["c.txt", "a.txt", "b.txt"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text_files_are_documents_read_by_number(suffix: str) -> None:
    pytest.importorskip("pyarrow")
    compress(Path("a.txt" + suffix), "one\r\n\u00e9".encode())
    compress(Path("b.txt" + suffix), b"two")
    source = open_source("x", "*.txt" + suffix)
    assert _texts(source) == ["one\n\u00e9", "two"]
    broken = Path("b.txt" + suffix)
    broken.write_bytes(broken.read_bytes()[:-5])
    with pytest.raises(DataError, match=rf"must be readable.*b\.txt\{suffix}"):
        source.read(1)


def test_files_elsewhere_are_read_through_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe({"/books/b.txt": b"two", "/books/a.txt": b"one"})
    source = open_source("x", "memory://books/*.txt")
    assert _texts(source) == ["one", "two"]
    assert source.describe(1) == "memory:///books/b.txt"
    Path("here.txt").write_text("here")
    assert _texts(open_source("x", f"file://{Path.cwd()}/here.txt")) == ["here"]


@pytest.mark.parametrize("path", ["a.parquet", "a.jsonl.zst", "saved"])
def test_a_missing_package_is_named_with_its_extra(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("saved").mkdir()
    for name in ("a.parquet", "a.jsonl.zst", "saved/state.json"):
        Path(name).write_text("x")
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=r"needs (pyarrow|the datasets package).*lightning-longctx\[hf\]"):
        open_source("x", path)


def read_all(sources: list[Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for source in sources:
        records = map(source.decode, source.open()) if isinstance(source, StreamingSource) else None
        found.append([record["text"] for record in records] if records else _texts(source))
    return found


@pytest.mark.distributed
def test_files_open_in_a_spawned_process_after_they_were_read_here(tmp_path: Path) -> None:
    """The pool's processes start anew and get the sources pickled; forked workers are in the tests of each kind."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    compress(tmp_path / "a.jsonl", lines)
    compress(tmp_path / "a.jsonl.zst", lines)
    compress(tmp_path / "a.txt.gz", b"a")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    sources = [open_source("x", tmp_path / name) for name in ("a.jsonl", "a.jsonl.zst", "a.txt.gz", "a.parquet")]
    here = read_all(sources)
    assert here == [["a", "b"], ["a", "b"], ["a"], ["a", "b"]]
    assert run_ranks(read_all, 1, sources) == [here]


def test_errors_of_validation_sources_name_them() -> None:
    Path("a.jsonl").write_text('{"content": 1}\n')
    for value in ("none/*.txt", {"path": "x", "min_tokens": "64Q"}, {"path": "x", "wieght": 1}, {"records": 3}, []):
        with pytest.raises(ConfigurationError) as caught:
            open_sources({"data.validation_sources": {"web": value}})
        assert caught.value.field.startswith("data.validation_sources.web")
    ((source,),) = open_sources({"data.validation_sources": {"web": "a.jsonl"}})
    error = DocumentReader([source], bytes_tokenizer, 10).draw(0, 0).error
    assert error is not None
    assert (error.field, error.rule) == ("data.validation_sources.web", "must have a text under 'text'")
    assert "a.jsonl:1" in str(error)


def test_sequences_are_indexable_and_iterables_are_streams() -> None:
    items = [{"text": "a"}, {"text": "b"}]
    assert isinstance(open_source("x", items), SequenceSource)
    stream = open_source("x", SourceSettings(records=Stream(items), weight=2, min_tokens="1K"))  # type: ignore[arg-type]
    assert isinstance(stream, StreamingSource)
    assert (list(stream.open()), list(stream.open())) == (items, items)
    assert (stream.weight, stream.min_tokens, stream.max_tokens) == (2.0, 1024, None)


def test_a_second_pass_over_an_iterator_is_an_error_and_not_empty() -> None:
    source = open_source("x", iter([{"text": "a"}]))
    assert isinstance(source, StreamingSource)
    assert len(list(source.open())) == 1
    with pytest.raises(DataError, match="more than once"):
        source.open()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("python-stdlb", "Did you mean 'python-stdlib'"),
        ("none/*.txt", "must be a built-in name, or match a file"),
        ("a text in place of its path. " * 20, r"must be a built-in name, or match a file, but got 'a text .*\.\.\.'"),
        ({"path": "x", "wieght": 1}, "Did you mean 'weight'"),
        ({"weight": 1.0}, "one of `path` and `records`"),
        ({"path": "x", "weight": 0}, "positive `weight`"),
        ({"path": "x", "min_tokens": "64Q"}, "min_tokens"),
        ([], "at least one document"),
        (3, "must be a source"),
        (".", "must be a file or a glob"),
        ("shards", r"must be a file or a glob, but got shards, a data set of LitData.*StreamingDataset\('shards'\)"),
        ("tokens", r"but got 'tokens', an indexed data set of Megatron.*in Python, such as IndexedDataset\('tokens'\)"),
        ("tokens.idx", r"files with \['\.idx'\].*as their library's object"),
        ("shards/*.mds", r"files with \['\.mds'\]"),
        ("empty.jsonl", "at least one document"),
        ("data.parquet", r"must be parquet.*data\.parquet"),
        ("table.csv", r"files with \['\.csv'\]"),
        ("data.tar.gz", r"files with \['\.tar'\]"),
        ({"path": "a.txt", "format": "chat"}, "must have records under `format: chat`, but got text files"),
        ({"path": "x", "format": "caht"}, "known `format`, but got 'caht'. Did you mean 'chat'"),
        ({"path": "x", "train_on": "user"}, "known `train_on`"),
        ({"path": "x", "text_field": 3}, "data.sources.x.text_field"),
        ({"path": []}, "data.sources.x.path"),
        ({"path": ["a.txt", "none.txt"]}, "must match at least one file, but got 'none.txt'"),
        ({"records": {"text": "a"}}, "must have a sequence or iterable as `records`, but got dict"),
        ({"records": 3}, "but got int"),
        (b"text", "must be a source"),
        ("nowhere://a/*.jsonl", "must be an address that can be read"),
        ("memory://nothing/*.jsonl", "must match at least one file, but got 'memory://nothing"),
        ("memory://nothing/a.jsonl", "must match at least one file"),
        ("oci://bucket/*.jsonl", "needs a package for such addresses, but got oci"),
    ],
)
def test_what_cannot_be_a_source_is_refused_with_help(value: Any, message: str) -> None:
    Path("empty.jsonl").touch()
    Path("data.parquet").write_bytes(b"PAR1")
    Path("shards").mkdir()
    for name in ("table.csv", "data.tar.gz", "a.txt", "shards/index.json", "shards/a.mds", "tokens.idx"):
        Path(name).write_text("a")
    with pytest.raises(ConfigurationError, match=message):
        open_source("x", value)


def test_lines_and_text_files_do_not_mix() -> None:
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("a.txt").write_text("a")
    with pytest.raises(ConfigurationError, match="files of one kind"):
        open_source("x", "a.*")


@pytest.mark.parametrize(("name", "least"), [("python-stdlib", 200), ("package-metadata", 5)])
def test_built_in_sources_are_there_and_repeatable(name: str, least: int) -> None:
    source, again = open_source("x", name), open_source("x", {"path": name, "weight": 3.0})
    assert isinstance(source, IndexableSource)
    assert isinstance(again, IndexableSource)
    assert len(source) == len(again) >= least
    assert again.weight == 3.0
    assert all(source.read(number) == again.read(number) for number in (0, len(source) - 1))
    assert len(source.read(0)["text"]) > 0 if name == "package-metadata" else source.describe(0).endswith(".py")
