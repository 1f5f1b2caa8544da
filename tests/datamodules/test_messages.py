"""What a run says about its data."""

from __future__ import annotations

from collections import Counter

from lightning_longctx.datamodules import AdaptiveBufferPolicy, FixedBufferPolicy
from lightning_longctx.datamodules.messages import cold_start_warning, first_row_line, start_line, step_line


def test_the_start_tells_what_to_expect_once_lengths_were_seen() -> None:
    fresh = start_line(4096, 2, FixedBufferPolicy(7), Counter())
    assert fresh == ("Rows: 4,096 tokens x 2 data-parallel ranks; fixed: at least 7 documents and the tokens of a row.")
    resumed = start_line(4096, 2, FixedBufferPolicy(7), Counter(documents_read=10, tokens_read=5120))
    assert resumed.endswith("the tokens of a row; about 8 documents each, as those so far.")


def test_the_start_tells_what_a_step_is_made_of() -> None:
    assert step_line(524_288, 8, 8, 4) == (
        "Step: 524,288 tokens x 4 micro-batches x 8 data-parallel ranks = 16,777,216 tokens,"
        " on 8 data-parallel x 8 sequence-parallel = 64 devices."
    )


def test_the_first_row_tells_what_it_took() -> None:
    counters = Counter(documents_read=12, tokens_read=1200, rows=1, tokens_packed=99)
    assert first_row_line(counters, 100) == "First row: 12 documents read (100 tokens on average), filled to 99.0%."
    counters["rows"] = 3
    assert "12 documents read for 3 rows since the data began" in first_row_line(counters, 100)


def test_only_a_count_gate_at_long_context_is_warned_of() -> None:
    assert cold_start_warning(2**17 - 1, FixedBufferPolicy()) is None
    assert cold_start_warning(2**20, AdaptiveBufferPolicy()) is None
    assert "at least 200 documents before the first row" in (cold_start_warning(2**17, FixedBufferPolicy()) or "")
