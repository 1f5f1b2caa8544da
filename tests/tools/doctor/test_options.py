"""The flags of ``longctx doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.doctor.options import DoctorOptions, read_options


def test_own_flags_are_taken_and_the_rest_is_passed_on() -> None:
    words = ["--config", "run.yaml", "--full", "--layouts", "60", "--model.config=tiny-llama", "--json=found.json"]
    options, rest = read_options(words)
    assert options == DoctorOptions(full=True, layouts=60, json=Path("found.json"))
    assert rest == ["--config", "run.yaml", "--model.config=tiny-llama"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "0"], "--layouts.*at least 1"),
        (["--row-tokens", "50"], "--row-tokens.*multiple of 4"),
        (["--tolerance", "2"], "--tolerance.*between 0 and 1"),
        (["--processes", "3"], "--processes"),
        (["--layout", "3"], "Did you mean --layouts"),
    ],
)
def test_wrong_values_are_told_with_their_flag(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_options(words)
