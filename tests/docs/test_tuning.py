"""The figures of ``docs/tuning.md`` are what ``longctx plan`` says."""

from __future__ import annotations

import pytest

from benchmarks import tuning
from tests.contracts.pages import DOCS, tables_of

PAGE = (DOCS / "tuning.md").read_text()


def test_the_page_has_a_place_for_each_table() -> None:
    names = [*(f"plan {length}" for length in tuning.LENGTHS), "lengths", "ladders"]
    assert [PAGE.count(f"<!-- packing: {name} -->\n") for name in names] == [1] * len(names)


def test_a_rung_says_whether_it_fits_and_what_the_host_needs() -> None:
    assert tuning._cell(("nothing", 222.9, 0.0, False)) == "223"
    assert tuning._cell(("+ x", 15.8, 15.0, True)) == "fits: 16 (host 15)"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_shows_what_the_command_says() -> None:
    found = tuning.look("32K")
    assert found.switches() in PAGE
    row = tuning.overview({"32K": found}).splitlines()[-1]
    assert row in PAGE
    (ladder,) = [table for table in tables_of(PAGE) if table[0][0].startswith("turned on")]
    column = ladder[0].index("32K")
    assert [[row[0], row[column]] for row in ladder] == tables_of(tuning.ladders({"32K": found}))[0]
