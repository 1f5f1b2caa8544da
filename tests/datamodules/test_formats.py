"""What a record may be under each format, from the record to ids and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.datamodules.bad_record import BadRecord
from lightning_longctx.datamodules.conversations import messages_of, tools_of
from lightning_longctx.datamodules.documents import DocumentReader, Draw
from lightning_longctx.datamodules.files import open_source
from lightning_longctx.datamodules.tokenizers import END_OF_DOCUMENT, FileTokenizer, ModelTokenizer, bytes_tokenizer
from lightning_longctx.errors import ConfigurationError
from tests.datamodules import chat_templates as templates
from tests.datamodules.chat_templates import expected, tokenizer

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]


def _draw(record: Any, tokenize: Any = bytes_tokenizer, **settings: Any) -> Draw:
    source = open_source("web", {"records": [record], **settings})
    return DocumentReader([source], tokenize, 1000).draw(0, 0)


def _document(record: Any, tokenize: Any = bytes_tokenizer, **settings: Any) -> tuple[list[int], list[int] | None]:
    draw = _draw(record, tokenize, **settings)
    assert draw.error is None, draw.error
    (document,) = draw.documents
    return document.input_ids.tolist(), None if document.labels is None else document.labels.tolist()


def test_a_prompt_is_masked_and_only_the_response_ends_the_document() -> None:
    record, end = {"prompt": "ab", "response": "c"}, END_OF_DOCUMENT
    assert _document(record, format="prompt_response") == ([97, 98, 99, end], [-100, -100, 99, end])
    assert _document(record, format="prompt_response", train_on="all") == ([97, 98, 99, end], None)
    other = {"q": "ab", "a": ""}
    fields = {"prompt_field": "q", "response_field": "a"}
    assert _document(other, format="prompt_response", **fields) == ([97, 98, end], [-100, -100, end])
    assert _document({"prompt": "", "response": "c"}, format="prompt_response") == ([99, end], [99, end])
    empty = _draw({"prompt": "", "response": ""}, format="prompt_response")
    assert empty.counts["documents_without_tokens"] == 1


def test_special_tokens_stand_around_prompt_and_response_and_not_between() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizer(None, "</s>")
    inner = made.backend_tokenizer
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.save("tokenizer.json")
    a, b = made.convert_tokens_to_ids(["a", "b"])
    for tokenize in (ModelTokenizer(made), FileTokenizer("tokenizer.json")):
        for prompt, response, ids in (("a", "b", [0, a, b, 1]), ("", "b", [0, b, 1]), ("a", "", [0, a, 1])):
            found, labels = _document({"prompt": prompt, "response": response}, tokenize, format="prompt_response")
            masked = 1 + len(prompt)
            assert (found, labels) == (ids, [-100] * masked + ids[masked:])


def test_messages_and_share_gpt_are_the_same_conversation() -> None:
    made = tokenizer(templates.PLAIN_CHATML)
    ids, labels = expected(templates.chatml(TURNS, None), made)
    tokenize = ModelTokenizer(made)
    for record in (
        {"messages": TURNS},
        {"conversations": SHARED},
        {"messages": [{**turn, "name": None, "tool_calls": None} for turn in TURNS], "tools": None},  # from Arrow
    ):
        assert _document(record, tokenize, format="chat") == (ids, labels)
    assert _document({"talk": TURNS}, tokenize, format="chat", messages_field="talk") == (ids, labels)
    assert _document({"messages": TURNS}, tokenize, format="chat", train_on="all") == (ids, None)


def test_the_system_field_and_the_tools_of_share_gpt() -> None:
    made = tokenizer(templates.PLAIN_CHATML)
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    record = {
        "conversations": [SHARED[0], call, {"from": "observation", "value": "3"}, SHARED[1]],
        "system": "Be short.",
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    function = {"name": "f", "arguments": {"a": 1}}
    same = [
        {"role": "system", "content": "Be short."},
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "3"},
        TURNS[1],
    ]
    assert _document(record, ModelTokenizer(made), format="chat") == expected(templates.chatml(same, tools), made)


def test_no_message_is_an_empty_document() -> None:
    draw = _draw({"messages": []}, ModelTokenizer(tokenizer(templates.PLAIN_CHATML)), format="chat")
    assert (draw.error, draw.documents, draw.counts["documents_without_tokens"]) == (None, [], 1)


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        ({"text": "a\ud800"}, {}, r"valid Unicode.*'\\ud800' at character 1 in record 0 of source 'web'"),
        ({"text": "a"}, {"format": "tokens"}, "must have `input_ids` under `format: tokens`"),
        ({"text": "a"}, {"format": "chat"}, r"'messages' under `format: chat`.*messages_field.*"),
        ({"prompt": "a"}, {"format": "prompt_response"}, "'response' under `format: prompt_response`.*response_field"),
        ({"prompt": "a", "response": 3}, {"format": "prompt_response"}, "text under 'response', but got int there"),
        ({"messages": "hi"}, {"format": "chat"}, "must have a list of messages"),
        ({"messages": ["hi"]}, {"format": "chat"}, "messages that are mappings"),
        ({"messages": [{"role": "user", "content": 3}]}, {"format": "chat"}, "a role and a content.*message 0 of"),
        ({"conversations": [{"from": "me", "value": ""}]}, {"format": "chat"}, "'me' with a str in message 0 of"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, {"format": "chat"}, "function_call that is"),
        ({"messages": TURNS, "tools": "f"}, {"format": "chat"}, "list of JSON schemas as `tools`"),
    ],
)
def test_a_record_of_another_form_is_a_bad_record_with_its_place(record: Any, settings: Any, message: str) -> None:
    error = _draw(record, ModelTokenizer(tokenizer(templates.PLAIN_CHATML)), **settings).error
    assert error is not None
    assert error.field == "data.sources.web"
    assert str(error.got).endswith("record 0 of source 'web'")
    with pytest.raises(type(error), match=message):
        raise error


def test_keys_without_a_value_are_left_out_and_a_missing_content_is_empty() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    (message,) = messages_of([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}])
    trimmed = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert message == {"content": "", "role": "assistant", "tool_calls": [trimmed]}
    assert tools_of("") is None
    assert tools_of([]) is None
    with pytest.raises(BadRecord):
        tools_of(3)


@pytest.mark.parametrize(
    ("tokenize", "format", "message"),
    [
        ("bytes", "chat", "needs a tokenizer with a chat template.*from_model"),
        (len, "chat", "needs a tokenizer with a chat template"),
        (len, "prompt_response", r"joins a prompt and a response.*join\(prompt, response\)"),
    ],
)
def test_a_tokenizer_that_cannot_write_a_format_is_refused_at_once(tokenize: Any, format: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        DynamicBatchingDataModule({"web": {"records": [{}], "format": format}}, tokenizer=tokenize)
    assert caught.value.field == "data.sources.web.format"


def test_the_models_tokenizer_is_checked_when_it_is_known() -> None:
    class Module:
        def load_tokenizer(self) -> Any:
            return tokenizer(self.template)

        template: str | None = None

    sources = {"talk": {"records": [{"messages": TURNS}], "format": "chat"}}
    data = DynamicBatchingDataModule(sources, tokenizer="from_model")
    with pytest.raises(ConfigurationError, match="needs a tokenizer with a chat template"):
        data.use_tokenizer_of(Module())
    Module.template = "{% for message in messages %}{{ message.content }}"
    with pytest.raises(ConfigurationError, match=r"chat template that can be read, but got .* in line 1"):
        data.use_tokenizer_of(Module())  # also where bad records are skipped: none of them is at fault
    Module.template = templates.PLAIN_CHATML
    data.use_tokenizer_of(Module())
    (row,) = data.train_dataloader()
    ids, _ = expected(templates.chatml(TURNS, None), tokenizer(None))
    assert row["input_ids"][0].tolist() == ids


def test_tokenizer_bytes_says_nothing_about_ids_that_it_does_not_make() -> None:
    tokens, text = {"records": [{"input_ids": [1, 2]}], "format": "tokens"}, [{"text": "a"}]
    Path("a.jsonl").write_text('{"input_ids": [1]}\n')
    assert DynamicBatchingDataModule({"a": tokens, "b": [{"input_ids": [3]}]}).vocab_size is None
    assert DynamicBatchingDataModule({"a": {"path": "a.jsonl", "format": "tokens"}}).vocab_size is None
    assert DynamicBatchingDataModule({"a": tokens, "b": text}).vocab_size == 257
    assert DynamicBatchingDataModule({"a": tokens}, validation_sources={"a": text}).vocab_size == 257
