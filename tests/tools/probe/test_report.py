"""The report as text: what it says beside the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_longctx.tools.probe.command import probe
from lightning_longctx.tools.probe.options import ProbeOptions
from tests.tools.probe.helpers import data_module


def _text(lengths: list[int], window: int = 10, policy: Any = "adaptive", **options: Any) -> str:
    return probe(data_module(lengths, window, policy), ProbeOptions(**options))[0].to_text()


def test_tables_line_up() -> None:
    lines = _text([6, 5, 4, 3, 7, 2] * 40, micro_batches=60, dp=2).splitlines()
    tables = [line for line in lines if line.startswith("|") and "refused" not in line]
    heads = [index for index, line in enumerate(tables) if line.startswith("|--")]
    assert len(heads) == 3
    for start, stop in zip([0, *(index - 1 for index in heads[1:])], [*(i - 1 for i in heads[1:]), None], strict=True):
        assert len({len(line) for line in tables[start:stop]}) == 1


@pytest.mark.parametrize(("dp", "count"), [(1, 0), (2, 1)])
def test_uneven_attention_is_told_with_the_remedy(dp: int, count: int) -> None:
    text = _text([10, 1] * 40, dp=dp, micro_batches=3)  # rank 0 has rows of one long document, rank 1 of ten short ones
    assert text.count("Attention work is uneven, 1.82 times the mean: 45% of its time is lost.") == count
    assert text.count("`data.loading.balance: true` evens it out.") == count


def test_the_end_of_the_documents_is_told() -> None:
    text = _text([6, 4, 6, 4, 6], dp=2, micro_batches=9)
    assert "The documents ended: " in text
    assert "Ranks gave 1 to 3 rows" in text
    text = _text([6, 4] * 20, micro_batches=3)
    assert "The documents ended" not in text
    assert "Ranks gave" not in text


def test_a_policy_without_a_first_row_says_so() -> None:
    text = _text([6, 4] * 40, micro_batches=3)
    assert "| fixed         | no first row on some rank within the 6 documents that were read there |" in text
    assert "raise --micro-batches" in text
