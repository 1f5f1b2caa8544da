"""Where a message counts something, number and noun agree: ``counted`` writes both, and nobody writes "1 documents"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.contracts.source import package_sources

_NOUNS = (
    "accelerator|batch|block|check|checkpoint|core|device|document|epoch|expert|fault|file|finding|group|head|label"
    "|layer|layout|message|micro-batch|node|parameter|process|rank|record|replica|row|run|sample|save|seed|step|target"
    "|tensor|token|value|variant|window|worker"
)
#: A plural behind a value, perhaps with words before it: " documents", " training documents", " file(s)".
_PLURAL = re.compile(rf"^ (?:[\w-]+ )?(?:(?:{_NOUNS})(?:s|es)|[\w-]+\((?:s|es)\))(?![\w/-])")
# Words behind a value that begin something else: "0.99 of its tokens", "[2] for labels".
_NO_COUNT = re.compile(r"^ (?:a|and|at|for|from|in|its|of|on|the|where|whose|without|x) ")
# Values that are no count: a speed in short form, the name of a dtype, a length that is above 131,072.
_NEVER_ONE = {("callbacks.speed", "tokens a day"), ("strategies.attention", "tensors on"), ("messages", "tokens need")}


def uncounted(source: str) -> Iterator[str]:
    """Each value of an f-string that is followed by a plural which nothing makes agree with it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                continue
            words = str(text.value)
            if _PLURAL.match(words) and not _NO_COUNT.match(words):
                yield f"{value.lineno}: {{{ast.unparse(value.value)}}}{words[:40]}"


def test_a_number_and_its_noun_agree() -> None:
    found = [
        f"{name}:{line}"
        for name, source in package_sources().items()
        for line in uncounted(source)
        if not any(name.endswith(file) and words in line for file, words in _NEVER_ONE)
    ]
    assert not found, "write them with `lightning_longctx.units.counted`: " + "; ".join(found)


def test_the_search_finds_what_it_is_for() -> None:
    source = (
        'f"{n} documents", f"{n:,} file(s) {m} training documents", f"{a} of the rows", f"{counted(n, \'row\')} in"'
    )
    assert len(list(uncounted(source))) == 3
