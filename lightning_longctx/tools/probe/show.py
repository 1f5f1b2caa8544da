"""A packed row for people: documents with their borders, and which tokens are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from lightning_longctx.batch import IGNORE_INDEX, PackedBatch
from lightning_longctx.datamodules.tokenizers import END_OF_DOCUMENT, bytes_tokenizer
from lightning_longctx.units import counted

__all__ = ["decoder_of", "describe_row"]

# What fits a terminal: a row of 1M tokens has megabytes of text.
_DOCUMENTS = 6  # at the beginning, and a third of them at the end
_RUNS = 6
_HEAD, _TAIL = 60, 20  # tokens of a long run

Decode = Callable[[Sequence[int]], str]


def decoder_of(tokenize: Any) -> Decode:
    """The way back from token ids to text.

    Args:
        tokenize: the tokenizer of the run: ``bytes``, an object with a method ``decode``, or any callable.

    Returns:
        The decoder; one that lists the ids where the tokenizer has none.
    """
    if tokenize is bytes_tokenizer:
        return _decode_bytes
    decode = getattr(tokenize, "decode", None)
    return decode if callable(decode) else _list_ids


def describe_row(row: PackedBatch, decode: Decode, source_names: Sequence[str]) -> list[str]:
    """Lines that show a whole row.

    The first token of a document is never trained on, since nothing before it predicts it.

    Args:
        row: a whole packed row.
        decode: from token ids to text.
        source_names: by source id.

    Returns:
        A line for the row, one for each document, and one for each run of trained or untrained tokens; long rows,
        documents and runs are abbreviated.
    """
    bounds = row["cu_seqlens"].tolist()
    keys = row["document_keys"].tolist()
    trained = int((row["shift_labels"] != IGNORE_INDEX).sum())
    padding = int((row["source_ids"] < 0).sum())
    real = sum(source >= 0 for source, _ in keys)
    lines = [f"{counted(bounds[-1], 'token')}; documents: {real:,}, trained tokens: {trained:,}, padding: {padding:,}"]
    for index in _ends(range(len(keys)), _DOCUMENTS):
        if index is None:
            lines.append(f"  ... {counted(len(keys) - _DOCUMENTS - _DOCUMENTS // 3, 'more document')} ...")
            continue
        start, stop = bounds[index], bounds[index + 1]
        source, number = keys[index]
        what = "padding" if source < 0 else f"document {index + 1}: {source_names[source]} number {number:,}"
        lines.append(f"+-- {what}, tokens {start:,} to {stop - 1:,} of the row ({stop - start:,})")
        if source >= 0:
            ids, labels = row["input_ids"][0, start:stop].tolist(), row["shift_labels"][0, start:stop].tolist()
            lines.extend(_document(ids, labels, decode))
    return lines


def _document(ids: list[int], labels: list[int], decode: Decode) -> Iterator[str]:
    # labels[i] is the target at i, which is token i + 1: so token p is trained on if there is a target at p - 1.
    is_trained = [False, *(label != IGNORE_INDEX for label in labels[:-1])]
    runs, position = [], 0
    for kind, members in groupby(is_trained):
        length = sum(1 for _ in members)
        runs.append((kind, ids[position : position + length]))
        position += length
    for run in _ends(runs, _RUNS):
        if run is None:
            yield f"|   ... {counted(len(runs) - _RUNS - _RUNS // 3, 'more run')} ..."
            continue
        kind, tokens = run
        yield f"|   {'trained ' if kind else 'not trained':12}{len(tokens):>9,}  {_abbreviated(tokens, decode)}"


def _abbreviated(tokens: Sequence[int], decode: Decode) -> str:
    if len(tokens) <= _HEAD + _TAIL:
        return _quoted(decode(tokens))
    return f"{_quoted(decode(tokens[:_HEAD]))} ... {_quoted(decode(tokens[-_TAIL:]))}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a line break must not end the line


def _ends(items: Sequence[Any], first: int) -> Iterator[Any]:
    """All items, or the first ones, None, and the last ones."""
    last = first // 3
    if len(items) <= first + last + 1:
        yield from items
        return
    yield from items[:first]
    yield None
    yield from items[-last:]


def _decode_bytes(ids: Sequence[int]) -> str:
    parts = bytearray()
    for token in ids:
        parts.extend(b"<end>" if token == END_OF_DOCUMENT else bytes([token]))
    return parts.decode("utf-8", errors="replace")


def _list_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
