"""Conversations to token ids by a Hugging Face chat template, with the exact tokens that the model has to write.

A template writes a conversation as one text. What of it belongs to the assistant is told by the template's own
``{% generation %}`` tags, where it has them. Where it has none, the conversation is written again and again, up to each
of the assistant's turns and with it: the difference is the turn, as long as what was written before does not change
with what follows. That is checked, and a template that rewrites earlier turns is refused rather than guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.bad_record import BadRecord, checked_text
from lightning_longctx.datamodules.source_settings import TrainOn
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = ["ChatTemplate"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A template that writes today's date would make a document another one after a resume. This macro takes the place of
# the function that templates ask, and knows one day: the day that Llama's templates name where they are not told.
_ONE_DAY = "".join(
    f" | replace('{directive}', '{value}')"
    for directive, value in {
        "%Y": "2024", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%A": "Friday", "%a": "Fri", "%y": "24",
        "%H": "12", "%M": "00", "%S": "00",
    }.items()
)  # fmt: skip
_STRFTIME = "{%- macro strftime_now(format) -%}{{ format" + _ONE_DAY + " }}{%- endmacro -%}\n"
# What stands for the next turn of the user while the end of a turn is looked for.
_PROBE = "\u2063next turn\u2063"


class ChatTemplate:
    """Writes conversations with the template of a Hugging Face tokenizer.

    A token is a target if it covers any character of what the assistant wrote, its end-of-sequence token included; what
    a template writes after that token (a line break) is not.

    Args:
        tokenizer: with ``chat_template``, and fast: only such tokenizers tell which characters a token covers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Check that the template can be read, before any record is.

        Raises:
            ConfigurationError: it cannot.
        """
        with suppress(BadRecord):  # it may ask for more than these two messages
            self.encode([{"role": role, "content": "a"} for role in ("user", "assistant")], None, "all")

    def encode(self, messages: list[dict[str, Any]], tools: list[Any] | None, train_on: TrainOn) -> Mapping[str, Any]:
        """Token ids and labels of a conversation.

        Args:
            messages: with role and content.
            tools: JSON schemas, or None.
            train_on: ``assistant`` masks all but the assistant's turns.

        Returns:
            ``input_ids``, and under ``assistant`` int64 ``labels`` of the same length. No token for no message.

        Raises:
            BadRecord: the template refuses the conversation, or changes what it wrote before.
        """
        if not messages:
            return {"input_ids": []}
        template = str(self._tokenizer.get_chat_template(tools=tools))
        if "strftime_now" in template:
            template = _STRFTIME + template
        writer = _Writer(self._tokenizer, template, tools)
        if train_on == "all":
            return {"input_ids": self._tokens(writer.text(messages))["input_ids"]}
        if _GENERATION.search(template):
            return writer.tagged(messages)
        text = writer.text(messages)
        encoded = self._tokens(text, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], np.int64)
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        for start, stop in _turns(writer, messages, text, self._tokenizer.eos_token):
            covers = _covering(offsets, start, stop)
            labels[covers] = ids[covers]
        return {"input_ids": ids, "labels": labels}

    def _tokens(self, text: str, **options: bool) -> Mapping[str, Any]:
        # The template has written the special tokens already.
        encoded: Mapping[str, Any] = self._tokenizer(
            checked_text(text), add_special_tokens=False, verbose=False, **options
        )
        return encoded


class _Writer:
    """A template, and what a conversation gives it beside the messages."""

    def __init__(self, tokenizer: Any, template: str, tools: list[Any] | None) -> None:
        self._tokenizer = tokenizer
        self._given = {"chat_template": template, "tools": tools}

    def text(self, messages: list[dict[str, Any]], asked: bool = False) -> str:
        """The conversation as text; ``asked``: with the beginning of an assistant's turn."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=asked))

    def tagged(self, messages: list[dict[str, Any]]) -> Mapping[str, Any]:
        """Ids and labels by the template's own generation tags."""
        checked_text(self.text(messages))
        encoded = self._apply(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
        ids = np.asarray(encoded["input_ids"], np.int64)
        return {"input_ids": ids, "labels": np.where(np.asarray(encoded["assistant_masks"]) == 1, ids, IGNORE_INDEX)}

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        from jinja2 import TemplateError, TemplateSyntaxError  # there with every tokenizer that has a template

        try:
            return self._tokenizer.apply_chat_template(messages, **self._given, **options)
        except TemplateSyntaxError as error:  # not the record's fault: no conversation can be written
            got, fix = f"{error.message} in line {error.lineno}", "Repair the tokenizer's `chat_template`."
            raise ConfigurationError("data.tokenizer", "must have a chat template that can be read", got, fix) from None
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            got = f"{type(error).__name__} ({error}) after {counted(len(messages), 'message')} of"
            fix = "Repair the conversation; `train_on: all` does not need to write it in part."
            raise BadRecord("must be a conversation that the chat template takes", got, fix) from None


def _turns(writer: _Writer, messages: list[dict[str, Any]], text: str, end_token: str | None) -> list[tuple[int, int]]:
    """First and last character of each of the assistant's turns in ``text``."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:  # what stands before it cannot be written: templates refuse a conversation without messages
            rule, fix = "must have a message before the assistant's first", "Use a template with {% generation %} tags."
            raise BadRecord(rule, "none in", fix)
        before = writer.text(messages[:number], asked=True)
        stop = _stop_of(writer, messages[: number + 1], text, len(before), end_token)
        if stop is None or not text.startswith(before):
            fix = "Use a template with {% generation %} tags, or set `train_on: all`."
            got = f"message {number} changed by what follows it, in"
            raise BadRecord("needs a chat template that does not rewrite earlier turns", got, fix)
        spans.append((len(before), stop))
    return spans


def _stop_of(
    writer: _Writer, messages: list[dict[str, Any]], text: str, start: int, end_token: str | None
) -> int | None:
    """Where the last turn of ``messages``, which begins at ``start``, ends in ``text``; None if that cannot be told."""
    written, is_whole = writer.text(messages), True
    if not text.startswith(written):
        # Some templates write a last turn differently (with an empty thought). With one behind it, it is not the last.
        written, is_whole = writer.text([*messages, {"role": "user", "content": _PROBE}]), False
        written = written[: written.rfind(_PROBE)]
        if not text.startswith(written):
            return None
    last = text.rfind(end_token, start, len(written)) if end_token else -1
    if end_token and last >= 0:
        return last + len(end_token)
    return len(written) if is_whole and len(written) >= start else None


def _covering(offsets: NDArray[np.int64], start: int, stop: int) -> slice:
    """The tokens that cover any of the characters from ``start`` to ``stop``."""
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    return slice(first, int(np.searchsorted(offsets[:, 0], stop, side="left")))
