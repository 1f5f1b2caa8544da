"""Conversations by chat templates: ids and masks, token for token, against plain loops that write the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules.bad_record import BadRecord
from lightning_longctx.datamodules.chat import ChatTemplate
from tests.datamodules import chat_templates as templates
from tests.datamodules.chat_templates import Writer, expected, tokenizer

USER, ANSWER = {"role": "user", "content": "hi\n"}, {"role": "assistant", "content": "\nhello \u4e2d\U0001f600 there"}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
TOOL = {"role": "tool", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]

CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "several": [USER, ANSWER, {**USER, "content": "more"}, {**ANSWER, "content": "yes"}, USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "no answer": [SYSTEM, USER],
    "ends with a question": [USER, ANSWER, USER],
    "empty contents": [{**USER, "content": ""}, {**ANSWER, "content": ""}, USER, ANSWER],
    "tools": [USER, CALL, TOOL, ANSWER, USER, ANSWER],
    "answers in a row": [USER, ANSWER, {**ANSWER, "content": "and"}, USER, ANSWER],
    "end token in a text": [{**USER, "content": "a<|im_end|>b"}, {**ANSWER, "content": "c</s>d"}, USER, ANSWER],
}
CHATML = [(templates.PLAIN_CHATML, templates.chatml), (templates.TAGGED_CHATML, templates.chatml)]


def _check(template: str, writer: Writer, messages: Any, tools: Any = None, eos_token: str = "<|im_end|>") -> None:
    hugging_face = tokenizer(template, eos_token)
    ids, labels = expected(writer(messages, tools), hugging_face)
    assert ids == list(hugging_face.apply_chat_template(messages, tools=tools)["input_ids"]), "the loop writes the same"
    encoded = ChatTemplate(hugging_face).encode(messages, tools, "assistant")
    assert np.asarray(encoded["input_ids"]).tolist() == ids
    assert encoded["labels"].tolist() == labels
    every = ChatTemplate(hugging_face).encode(messages, tools, "all")
    assert (list(every["input_ids"]), "labels" in every) == (ids, False)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(("template", "writer"), CHATML, ids=["plain", "tagged"])
def test_what_the_assistant_writes_is_the_target(template: str, writer: Writer, name: str) -> None:
    _check(template, writer, CONVERSATIONS[name])
    _check(template, writer, CONVERSATIONS[name], TOOLS)


@pytest.mark.parametrize(
    "name", ["one turn", "several", "system", "no answer", "ends with a question", "empty contents"]
)
def test_a_template_without_a_beginning_of_the_answer(name: str) -> None:
    _check(templates.INSTRUCT, templates.instruct, CONVERSATIONS[name], eos_token="</s>")


@pytest.mark.parametrize("name", ["one turn", "several", "system", "ends with a question", "empty contents"])
def test_a_template_that_writes_the_last_turn_differently(name: str) -> None:
    _check(templates.THINKING, templates.thinking, CONVERSATIONS[name])


def test_without_an_end_token_a_turn_is_all_that_the_template_writes_for_it() -> None:
    hugging_face = tokenizer(templates.PLAIN_CHATML, "</s>")
    encoded = ChatTemplate(hugging_face).encode([USER, ANSWER, USER], None, "assistant")
    kept = encoded["labels"][encoded["labels"] >= 0]
    assert hugging_face.decode(kept.tolist()) == ANSWER["content"] + "<|im_end|>\n"


def test_merged_tokens_are_targets_as_with_generation_tags() -> None:
    """A byte-level tokenizer whose tokens span a turn's first character: both ways agree on each of them."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=templates.SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(["hello assistant\n\nuser\n\n hello"] * 9, trainer)
    hugging_face = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    for messages in CONVERSATIONS.values():
        found = []
        for template, _ in CHATML:
            hugging_face.chat_template = template
            found.append(ChatTemplate(hugging_face).encode(messages, None, "assistant"))
        assert found[0]["input_ids"].tolist() == found[1]["input_ids"].tolist()
        assert found[0]["labels"].tolist() == found[1]["labels"].tolist()


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (templates.REWRITING, CONVERSATIONS["several"], "does not rewrite earlier turns"),
        (templates.REWRITING, CONVERSATIONS["one turn"], "does not rewrite earlier turns"),
        (templates.INSTRUCT, [USER, USER, ANSWER], "Roles must alternate"),
        (templates.PLAIN_CHATML, [ANSWER, USER], "a message before the assistant's first"),
        (templates.PLAIN_CHATML, [USER, {**ANSWER, "content": "\ud800"}], "lone surrogate"),
        (templates.TAGGED_CHATML, [USER, {**ANSWER, "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_what_cannot_be_masked_exactly_is_a_bad_record(template: str, messages: Any, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        ChatTemplate(tokenizer(template)).encode(messages, None, "assistant")


def test_a_template_that_asks_for_the_date_writes_the_same_day_always() -> None:
    hugging_face = tokenizer(templates.DATED)
    ids = ChatTemplate(hugging_face).encode([USER, ANSWER], None, "all")["input_ids"]
    assert hugging_face.decode(list(ids)).startswith("26 Jul 20242024-07-26<|im_start|>user\nhi")


def test_generation_tags_also_mark_an_answer_that_comes_first() -> None:
    _check(templates.TAGGED_CHATML, templates.chatml, [ANSWER, USER, ANSWER])


def test_no_message_gives_no_token() -> None:
    assert ChatTemplate(tokenizer(templates.PLAIN_CHATML)).encode([], None, "assistant") == {"input_ids": []}
