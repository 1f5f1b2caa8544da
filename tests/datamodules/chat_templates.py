"""Chat templates of the usual kinds, each with a plain loop that says which characters the assistant writes.

The tokenizer has a token for each character and for each special token, so that the expected tokens and labels can be
counted off on the loop's pieces, without any part of the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Message = dict[str, Any]
Pieces = Iterator[tuple[str, bool]]  # text, and whether the assistant writes it

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_CHARACTERS = [chr(code) for code in range(32, 127)] + list("\n\u00e9\u4e2d\U0001f600\u2063")

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}GENERATION{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}ENDGENERATION{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_CHATML = CHATML.replace("ENDGENERATION", "").replace("GENERATION", "")
TAGGED_CHATML = CHATML.replace("ENDGENERATION", "{% endgeneration %}").replace("GENERATION", "{% generation %}")

# Has no beginning of the assistant's turn, folds the system message into the first question, insists on taking turns.
INSTRUCT = (
    "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' }}{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)

# Writes an empty thought into the last turn, and takes it out once there is another one behind it.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

REWRITING = "{{ (messages | length) | string + '\n' }}" + PLAIN_CHATML
DATED = "{{ strftime_now('%d %b %Y') + strftime_now('%Y-%m-%d') }}" + PLAIN_CHATML


def chatml(messages: list[Message], tools: list[Any] | None) -> Pieces:
    """What ``CHATML`` writes."""
    if tools:
        yield "<|im_start|>system\n" + "".join(json.dumps(tool) for tool in tools) + "<|im_end|>\n", False
    for message in messages:
        own = message["role"] == "assistant"
        calls = "".join("<call>" + json.dumps(call["function"]) for call in message.get("tool_calls", []))
        yield f"<|im_start|>{message['role']}\n", False
        yield message["content"] + calls + "<|im_end|>", own
        yield "\n", False


def instruct(messages: list[Message], tools: list[Any] | None) -> Pieces:
    """What ``INSTRUCT`` writes."""
    yield "<s>", False
    system = ""
    for message in messages:
        if message["role"] == "system":
            system = message["content"] + "\n\n"
        elif message["role"] == "user":
            yield f"[INST] {system}{message['content']} [/INST]", False
            system = ""
        else:
            yield f" {message['content']}</s>", True


def thinking(messages: list[Message], tools: list[Any] | None) -> Pieces:
    """What ``THINKING`` writes."""
    for number, message in enumerate(messages):
        own = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        if own and number == len(messages) - 1:
            yield "<think>\n\n</think>\n\n", True
        yield message["content"] + "<|im_end|>", own
        yield "\n", False


def tokenizer(template: str | None, eos_token: str = "<|im_end|>") -> Any:  # noqa: S107 - a token of text
    """A Hugging Face tokenizer with a token for each character and each special token."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *_CHARACTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos_token)
    made.chat_template = template
    return made


def expected(pieces: Pieces, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and labels of pieces, counted off one by one."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in pieces:
        while text:
            token = next((token for token in SPECIAL if text.startswith(token)), text[0])
            ids.append(tokenizer.convert_tokens_to_ids(token))
            labels.append(ids[-1] if own else -100)
            text = text[len(token) :]
    return ids, labels


Writer = Callable[[list[Message], "list[Any] | None"], Pieces]
