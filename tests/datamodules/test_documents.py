"""From records to documents: tokenizers, long documents, limits, and bad records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules.documents import DocumentReader, Draw
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.json_lines import JsonLinesSource
from lightning_longctx.datamodules.tokenizers import (
    BYTES_VOCAB_SIZE,
    END_OF_DOCUMENT,
    ModelTokenizer,
    bytes_tokenizer,
    resolve_tokenizer,
)
from lightning_longctx.errors import ConfigurationError


def _draw(record: Any, source: dict[str, Any] | None = None, **reader: Any) -> Draw:
    settings = {"records": [record], **(source or {})}
    return DocumentReader([open_source("web", settings)], **{"tokenize": bytes_tokenizer, "window": 10, **reader}).draw(
        0, 0
    )


def _pieces(draw: Draw) -> list[list[int]]:
    assert draw.error is None
    return [document.input_ids.tolist() for document in draw.documents]


@pytest.mark.parametrize("text", ["hello", "\u00e9\u4e2d\U0001f600", "a\0b", "\udcff"])
def test_bytes_can_be_read_back(text: str) -> None:
    ids = bytes_tokenizer(text)
    assert ids[-1] == END_OF_DOCUMENT == BYTES_VOCAB_SIZE - 1
    assert bytes(ids[:-1].tolist()).decode(errors="surrogatepass") == text


def test_a_document_of_two_and_a_half_windows_becomes_three() -> None:
    """torchtune#1697: a sample beyond the window ended the run."""
    draw = _draw({"input_ids": list(range(25)), "labels": [-100] + list(range(1, 25))})
    assert _pieces(draw) == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert [document.start for document in draw.documents] == [0, 10, 20]
    assert [document.labels.tolist() for document in draw.documents if document.labels is not None] == [
        [-100, *range(1, 10)],
        list(range(10, 20)),
        list(range(20, 25)),
    ]
    assert {document.number for document in draw.documents} == {0}
    assert (draw.counts["documents_split"], draw.counts["tokens_read"]) == (1, 25)


@pytest.mark.parametrize(
    ("mode", "pieces", "counts"),
    [
        ("split", [10, 2], {"documents_split": 1}),
        ("truncate", [10], {"documents_truncated": 1, "tokens_truncated": 2}),
        ("drop", [], {"documents_longer_than_window_dropped": 1, "tokens_dropped": 12}),
    ],
)
def test_long_documents(mode: Any, pieces: list[int], counts: dict[str, int]) -> None:
    draw = _draw({"input_ids": [1] * 12}, long_document=mode)
    assert [len(piece) for piece in _pieces(draw)] == pieces
    assert draw.counts == {"documents_read": 1, "tokens_read": 12, **counts}
    assert [len(piece) for piece in _pieces(_draw({"input_ids": [1] * 10}, long_document=mode))] == [10]


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_a_long_document_is_an_error_if_asked(on_bad_record: Any) -> None:
    draw = _draw({"input_ids": [1] * 12}, long_document="error", on_bad_record=on_bad_record)
    assert draw.error is not None
    assert "12 tokens in record 0 of source 'web'" in str(draw.error)


def test_documents_without_tokens_are_dropped_and_counted() -> None:
    for record in ({"text": ""}, {"input_ids": []}):
        draw = _draw(record)
        assert _pieces(draw) == []
        assert draw.counts["documents_without_tokens"] == 1


def test_limits_of_a_source_count_what_they_drop() -> None:
    limits = {"min_tokens": 3, "max_tokens": 20}
    kept = [_draw({"input_ids": [1] * n}, limits) for n in (2, 3, 20, 21)]
    assert [sum(map(len, _pieces(draw))) for draw in kept] == [0, 3, 20, 0]
    assert kept[0].counts["documents_below_min_tokens"] == kept[3].counts["documents_above_max_tokens"] == 1
    assert (kept[0].counts["tokens_dropped"], kept[3].counts["tokens_dropped"]) == (2, 21)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"content": "a"}, r"text under 'text'.*\['content'\]"),
        ({"text": 3}, "text under 'text'"),
        ("words", "must give mappings"),
        ({"input_ids": [[1, 2]]}, "flat list"),
        ({"input_ids": [0.5]}, "flat list"),
        ({"input_ids": [-1]}, "token ids from 0"),
        ({"input_ids": [2**31]}, "fit 32 bits"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 label for 2 tokens"),
        ({"input_ids": [1], "labels": [-101]}, "token ids from -100"),
    ],
)
def test_bad_records_are_errors_or_counted(record: Any, message: str) -> None:
    draw = _draw(record)
    assert draw.error is not None
    assert pytest.raises(type(draw.error), match=message)
    with pytest.raises(type(draw.error), match=message):
        raise draw.error
    skipped = _draw(record, on_bad_record="skip")
    assert _pieces(skipped) == []
    assert skipped.counts == {"bad_records_skipped": 1}


def test_the_place_of_a_good_record_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a line's number everything before it is read: for each record that would be the file squared."""
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    asked: list[int] = []
    monkeypatch.setattr(JsonLinesSource, "describe", lambda self, number, record=None: str(asked.append(number)))
    reader = DocumentReader([open_source("web", "a.jsonl")], bytes_tokenizer, 10)
    assert reader.draw(0, 0).error is None
    assert asked == []
    assert reader.draw(0, 1).error is not None
    assert asked == [1]


def test_a_callable_may_give_ids_or_ids_and_labels() -> None:
    assert _pieces(_draw({"text": "abc"}, tokenize=lambda text: [len(text)])) == [[3]]
    draw = _draw({"text": "abc"}, tokenize=lambda text: {"input_ids": np.arange(3), "labels": [-100, 1, 2]})
    assert draw.documents[0].labels is not None
    assert draw.documents[0].labels.tolist() == [-100, 1, 2]
    assert _pieces(_draw({"input_ids": [4, 5]}, tokenize=None)) == [[4, 5]]
    assert "needs a tokenizer" in str(_draw({"text": "abc"}, tokenize=None).error)


def test_validation_sources_carry_the_ids_of_the_training_sources() -> None:
    assert _draw({"text": "a"}, source_ids=(7,)).documents[0].source_id == 7


def test_tokenizers_by_name() -> None:
    assert resolve_tokenizer("bytes") == (bytes_tokenizer, 257)
    assert resolve_tokenizer("from_model") == (None, None)
    assert resolve_tokenizer("tests.datamodules.test_documents.words") == (words, None)
    assert resolve_tokenizer(words) == (words, None)
    for name, message in {"byte": "Did you mean 'bytes'", "no.such.thing": "Known", "x.json": "exists"}.items():
        with pytest.raises(ConfigurationError, match=message):
            resolve_tokenizer(name)
    with pytest.raises(ConfigurationError, match="known tokenizer"):
        resolve_tokenizer(3)  # type: ignore[arg-type]


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_a_tokenizer_file() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer.json")
    encode, size = resolve_tokenizer(str(Path("tokenizer.json").resolve()))
    assert encode is not None
    assert (encode("b a c"), encode(""), size) == ([1, 0, 2], [], 3)


def test_the_model_tokenizer_ends_documents_once() -> None:
    class Plain:
        eos_token_id: int | None = 9

        def __len__(self) -> int:
            return 10

        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": [int(c) for c in text]}

    tokenizer = Plain()
    encode = ModelTokenizer(tokenizer)
    assert (encode("12"), encode("19"), encode(""), encode.vocab_size) == ([1, 2, 9], [1, 9], [], 10)
    tokenizer.eos_token_id = None
    assert encode("12") == [1, 2]
