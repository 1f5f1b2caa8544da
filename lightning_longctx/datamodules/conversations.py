"""Conversations as people write them, to messages as chat templates take them: role and content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_longctx.datamodules.bad_record import BadRecord

__all__ = ["messages_of", "tools_of"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_WRITE = "Write {'role': 'user', 'content': ...}, or {'from': 'human', 'value': ...}."


def messages_of(value: Any, system: Any = None) -> list[dict[str, Any]]:
    """Messages with ``role`` and ``content``; ShareGPT's ``from`` and ``value`` are renamed.

    Keys without a value are left out: columns of Arrow give every message the keys of all others. A missing content is
    an empty one.

    Args:
        value: of the record's messages field.
        system: of its ``system`` field, which some ShareGPT data has beside the conversation.

    Raises:
        BadRecord: not a list of messages.

    Example:
        >>> messages_of([{"from": "human", "value": "hi"}])
        [{'role': 'user', 'content': 'hi'}]
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise BadRecord("must have a list of messages", f"{type(value).__name__} in", _WRITE)
    messages = [_message(entry, number) for number, entry in enumerate(value)]
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def tools_of(value: Any) -> list[Any] | None:
    """The tools that a conversation may call: a list of JSON schemas, or such a list as JSON; None for no tools.

    Raises:
        BadRecord: neither.
    """
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    found = _without_none(value) if value is not None else None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise BadRecord("must have a list of JSON schemas as `tools`", f"{str(value)[:80]} in", "Repair it.")
    return found


def _message(entry: Any, number: int) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise BadRecord("must have messages that are mappings", f"a {type(entry).__name__} in", _WRITE)
    found: dict[str, Any] = _without_none(entry)
    if "role" not in found and "from" in found:
        return _share_gpt(found, number)
    if not isinstance(found.get("role"), str) or not isinstance(found.get("content", ""), (str, list)):
        got = f"{sorted(map(str, entry))} in message {number} of"
        raise BadRecord("must have messages with a role and a content", got, _WRITE)
    return {"content": "", **found}


def _share_gpt(entry: dict[str, Any], number: int) -> dict[str, Any]:
    role, content = _ROLES.get(str(entry["from"])), entry.get("value", "")
    if role is None or not isinstance(content, str):
        got = f"{entry['from']!r} with a {type(content).__name__} in message {number} of"
        raise BadRecord(f"must have messages from one of {', '.join(_ROLES)}", got, _WRITE)
    if entry["from"] == "function_call":
        return {"role": role, "content": "", "tool_calls": [_call(content, number)]}
    return {"role": role, "content": content}


def _call(content: str, number: int) -> dict[str, Any]:
    try:
        call = json.loads(content)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, TypeError, KeyError):
        got, fix = f"{content[:80]!r} in message {number} of", 'Write {"name": ..., "arguments": {...}}.'
        raise BadRecord("must have a function_call that is JSON with name and arguments", got, fix) from None


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
