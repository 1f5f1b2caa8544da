"""What a record holds, and how it becomes token ids and labels: ``format`` of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.bad_record import BadRecord, checked_text
from lightning_longctx.datamodules.conversations import messages_of, tools_of
from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.sources import Source
from lightning_longctx.errors import ConfigurationError

__all__ = ["check_tokenizer", "columns_of", "encode_record"]

#: Ids, and aligned labels or None where every token is a target; checked by who asked.
Encoded: TypeAlias = "tuple[Any, Any]"

_MESSAGES = ("messages", "conversations")
# What a tokenizer must offer beside being called with a text.
_METHODS = {"chat": "chat", "prompt_response": "join"}


def columns_of(settings: SourceSettings, names: Sequence[str]) -> tuple[list[str], tuple[str, str] | None]:
    """The keys of a record that its format reads.

    Args:
        settings: of the source.
        names: keys that there are.

    Returns:
        Those to read, and the key that is missing with the setting that would name another one; None if none is.
    """
    tokens = [name for name in ("input_ids", "labels") if name in names]
    if settings.format == "tokens" or (settings.format == "text" and "input_ids" in tokens):
        return tokens, None if "input_ids" in tokens else ("input_ids", "format")
    if settings.format == "chat":
        messages = _messages_field(settings, names)
        wanted, setting = [messages, *(name for name in ("tools", "system") if name in names)], "messages_field"
    elif settings.format == "prompt_response":
        wanted = [settings.prompt_field, settings.response_field]
        setting = "prompt_field" if settings.prompt_field not in names else "response_field"
    else:
        wanted, setting = [settings.text_field], "text_field"
    missing = next((name for name in wanted if name not in names), None)
    return [name for name in wanted if name in names], None if missing is None else (missing, setting)


def check_tokenizer(sources: Sequence[Source], tokenize: Any) -> None:
    """Check that a tokenizer can do what the formats of sources ask for.

    Raises:
        ConfigurationError: it cannot write conversations (its template cannot even be read, say), or not join a prompt
            and a response.
    """
    for source in sources:
        method = _METHODS.get(source.format)
        if method is None:
            continue
        if callable(getattr(tokenize, method, None)):
            if method == "chat" and callable(check := getattr(tokenize, "check_chat", None)):
                check()
            continue
        if method == "chat":
            rule = "needs a tokenizer with a chat template"
            # A template of our own would train on a form that nothing writes when the model is used.
            fix = "Set `data.tokenizer: from_model` and take a model whose tokenizer has one."
        else:
            rule = "needs a tokenizer that joins a prompt and a response"
            fix = "Give the callable a method `join(prompt, response)` that returns the ids of both."
        raise ConfigurationError(f"{source.field}.format", rule, f"format: {source.format}", fix)


def encode_record(settings: SourceSettings, record: Mapping[str, Any], tokenize: Any) -> Encoded:
    """Turn a record into token ids and labels.

    Args:
        settings: of its source.
        record: what was read.
        tokenize: text to ids; None if there is no tokenizer.

    Returns:
        Ids and aligned labels (-100 where masked), as the record or the tokenizer gave them; None for labels that are
        the ids.

    Raises:
        BadRecord: it is not what the format says.
    """
    kind = settings.format
    if kind == "tokens" or (kind == "text" and "input_ids" in record):
        if "input_ids" not in record:
            raise BadRecord("must have `input_ids` under `format: tokens`", f"{_keys(record)} in", "Set `format`.")
        return record["input_ids"], record.get("labels")
    columns, missing = columns_of(settings, list(record))
    if missing is not None:
        fix = f"Name the key with `{missing[1]}`, set `format`, or give `input_ids`."
        what = "a text" if kind == "text" else f"{missing[0]!r} under `format: {kind}`"
        rule = f"must have {what} under {missing[0]!r}" if kind == "text" else f"must have {what}"
        raise BadRecord(rule, f"{_keys(record)} in", fix)
    if tokenize is None:
        raise BadRecord("needs a tokenizer", "text in", "Set `data.tokenizer`.")
    if kind == "chat":
        messages = messages_of(record[columns[0]], record.get("system"))
        encoded = tokenize.chat(messages, tools_of(record.get("tools")), settings.train_on)
    elif kind == "prompt_response":
        prompt, response = tokenize.join(_text(record, columns[0]), _text(record, columns[1]))
        return _joined(prompt, response, masked=settings.train_on == "assistant")
    else:
        encoded = tokenize(_text(record, columns[0]))
    if isinstance(encoded, Mapping):
        return encoded["input_ids"], encoded.get("labels")
    return encoded, None


def _joined(prompt: Any, response: Any, masked: bool) -> Encoded:
    ids = np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])
    if not masked:
        return ids, None
    labels = ids.copy()
    labels[: len(prompt)] = IGNORE_INDEX
    return ids, labels


def _text(record: Mapping[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        fix = "Name the right key, or set `loading.on_bad_record: skip`."
        raise BadRecord(f"must have a text under {name!r}", f"{type(text).__name__} there and {_keys(record)} in", fix)
    return checked_text(text)


def _messages_field(settings: SourceSettings, names: Sequence[str]) -> str:
    if settings.messages_field is not None:
        return settings.messages_field
    return next((name for name in _MESSAGES if name in names), _MESSAGES[0])


def _keys(record: Mapping[str, Any]) -> str:
    return f"the keys {sorted(map(str, record))}"
