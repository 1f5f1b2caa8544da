"""Numbers as people write them: tokens in settings, counts in messages."""

from __future__ import annotations

import pytest

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted, parse_token_count


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1_048_576", 1_048_576),
        ("512K", 524_288),
        ("512k", 524_288),
        (" 1M ", 1_048_576),
        ("1.5K", 1536),
        ("1G", 2**30),
        ("2e10", 20_000_000_000),
        (2e10, 20_000_000_000),
        (4096.0, 4096),
        ("16M", 16 * 2**20),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_reads_every_form(written: float | str, tokens: int) -> None:
    parsed = parse_token_count(written)
    assert parsed == tokens
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    "written",
    [0, -1, "0K", 1.5, "1.3", "", "K", "many", "12Q", "nan", "inf", float("nan"), float("inf"), True, None, [1]],
)
def test_refuses_what_is_no_number_of_tokens(written: object) -> None:
    with pytest.raises(ConfigurationError, match="`data.max_seq_len` must be a .*number of tokens") as caught:
        parse_token_count(written, field="data.max_seq_len")  # type: ignore[arg-type]
    assert repr(written) == caught.value.got
    assert "512K" in caught.value.fix


@pytest.mark.parametrize(
    ("number", "noun", "written"),
    [
        (0, "document", "0 documents"),
        (1, "document", "1 document"),
        (1.3, "training document", "1 training document"),
        (2300, "row", "2,300 rows"),
        (1, "process", "1 process"),
        (4, "process", "4 processes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "whole epoch", "2 whole epochs"),
        (float("nan"), "expert", "nan experts"),
    ],
)
def test_a_number_with_its_noun(number: float, noun: str, written: str) -> None:
    assert counted(number, noun) == written
