"""A row for people: borders, trained tokens, and what is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules import Document, pack_documents
from lightning_longctx.datamodules.tokenizers import ModelTokenizer, bytes_tokenizer
from lightning_longctx.tools.probe.show import decoder_of, describe_row


def _document(text: str, number: int = 0, masked: int = 0) -> Document:
    ids = np.asarray(bytes_tokenizer(text), np.int32)
    labels = ids.copy()
    labels[:masked] = -100
    return Document(1, number, 0, ids, labels)


def _lines(documents: list[Document], multiple: int = 1) -> list[str]:
    row = pack_documents(documents, 16_384, multiple)
    return describe_row(row, decoder_of(bytes_tokenizer), ["code", "prose"])


def test_borders_and_trained_tokens_are_marked() -> None:
    assert _lines([_document("ask answer", 7, masked=4), _document("b\n", 8)], multiple=8) == [
        "16 tokens; documents: 2, trained tokens: 9, padding: 2",
        "+-- document 1: prose number 7, tokens 0 to 10 of the row (11)",
        '|   not trained         4  "ask "',
        '|   trained             7  "answer<end>"',
        "+-- document 2: prose number 8, tokens 11 to 13 of the row (3)",
        '|   not trained         1  "b"',
        '|   trained             2  "\\n<end>"',
        "+-- padding, tokens 14 to 15 of the row (2)",
    ]


def test_a_trained_token_is_one_that_is_predicted() -> None:
    document = _document("abcd")
    document.labels[2] = -100  # type: ignore[index]
    runs = [line.split(maxsplit=1)[1] for line in _lines([document])[2:]]
    assert [run.split('"')[1] for run in runs] == ["a", "b", "c", "d<end>"]
    assert ["not" in run for run in runs] == [True, False, True, False]


def test_long_runs_and_rows_are_abbreviated() -> None:
    lines = _lines([_document("x" * 500 + "end", number) for number in range(20)])
    assert lines[3] == f'|   trained           503  "{"x" * 60}" ... "{"x" * 16}end<end>"'
    assert len(lines) == 1 + 6 * 3 + 1 + 2 * 3
    assert "  ... 12 more documents ..." in lines
    assert "document 20" in lines[-3]


def test_many_runs_are_abbreviated() -> None:
    document = _document("ab" * 20)
    document.labels[::2] = -100  # type: ignore[index]
    lines = _lines([document])
    assert len(lines) == 2 + 6 + 1 + 2
    assert lines[8] == "|   ... 33 more runs ..."


class _Words:
    def __call__(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: Any) -> str:
        return "+".join(f"w{token}" for token in ids)


def test_decoders() -> None:
    assert decoder_of(bytes_tokenizer)([104, 105, 256]) == "hi<end>"
    assert decoder_of(bytes_tokenizer)([0xC3, 0xA9, 0xC3]) == "\u00e9\ufffd"
    assert decoder_of(_Words())([3, 4]) == "w3+w4"
    assert decoder_of(lambda text: [1])([3, 4]) == "3 4"
    assert decoder_of(None)([3, 4]) == "3 4"


def test_hugging_face_tokenizers_decode() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = ModelTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))
    assert tokenizer("b a") == [1, 0, 2]
    assert decoder_of(tokenizer)([1, 0, 2]).split() == ["b", "a", "</s>"]
