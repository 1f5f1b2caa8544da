"""Each message that ``docs/troubleshooting.md`` quotes is one that the code can say."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from lightning_longctx.units import counted
from tests.contracts.pages import DOCS
from tests.contracts.source import package_sources

PAGE = (DOCS / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### (.+)$", PAGE, flags=re.MULTILINE)
#: `field` rule: the shape of an error; anything else is (part of) a warning or a line of the log.
_ERROR = re.compile(r"^`(?P<field>[^`]+)` (?P<rule>.+)$")
_ANY = "\0"  # a value, where an f-string has one


def _flat(node: ast.AST, names: dict[str, str]) -> str | None:
    """A string as it may come out, with a mark for each value; names are the module's own constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else _value(part, names) for part in node.values)
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_flat(side, names) for side in (node.left, node.right)]
        return "".join(side or _ANY for side in sides) if any(sides) else None
    return None


def _value(part: ast.AST, names: dict[str, str]) -> str:
    inner = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "counted":
        noun = inner.args[1]
        return _ANY + (counted(2, str(noun.value)).removeprefix("2") if isinstance(noun, ast.Constant) else "")
    return (names.get(inner.id) if isinstance(inner, ast.Name) else None) or _ANY


@cache
def strings() -> list[tuple[str, set[str]]]:
    """All strings of each module, under the module's name."""
    found = []
    for name, source in package_sources().items():
        tree = ast.parse(source)
        names = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found.append((name, {text for node in ast.walk(tree) if (text := _flat(node, names))}))
    return found


def says(text: str, quoted: str) -> bool:
    """Whether a string of the code may come out with the quoted words; ``...`` is any value, on either side."""
    pieces = [re.escape(piece) for piece in quoted.split("...")]
    pattern = ".*".join(pieces)
    plain = re.sub(r"\s+", " ", text)
    return re.search(pattern, plain.replace(_ANY, "...")) is not None or bool(
        _ANY in plain and re.search(_open(plain), quoted)
    )


def _open(text: str) -> str:
    """A pattern of a whole string whose values may be anything; one that is values only says nothing."""
    fixed = text.replace(_ANY, "").strip()
    return "(?!)" if len(fixed) < 12 else "^" + ".+".join(map(re.escape, text.split(_ANY))) + "$"


def where(message: str) -> list[str]:
    """The modules that can say a message: for an error, those with both its field and its rule."""
    error = _ERROR.match(message)
    if error is None:
        return [name for name, texts in strings() if any(says(text, message) for text in texts)]
    field, rule = error["field"], error["rule"]
    return [
        name
        for name, texts in strings()
        if any(says(text, rule) for text in texts) and (field == "..." or any(says(text, field) for text in texts))
    ]


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 40
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_is_in_the_code(message: str) -> None:
    assert where(message)


@pytest.mark.parametrize(
    "message",
    [
        "`strategy.sequence_parallel_size` must divide the number of documents",
        "`data.max_seq_len` must divide the number of query heads",
        "Training waited for nothing",
        "`...` must be a number of apples",
    ],
)
def test_a_message_that_nothing_says_is_found(message: str) -> None:
    assert where(message) == []
