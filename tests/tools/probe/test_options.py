"""The flags of the probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.probe.options import ProbeOptions, read_options
from tests.contracts.source import ROOT


def test_defaults() -> None:
    assert read_options([]) == (ProbeOptions(), [])


def test_all_flags_in_any_spelling() -> None:
    words = "--micro-batches 5 --dp=8 --seeds 42,43 --min_fill 98.5 --show 1 --json a.json --plot b.png --out c"
    options, rest = read_options(words.split())
    paths = {"json": Path("a.json"), "plot": Path("b.png"), "folder": Path("c")}
    assert options == ProbeOptions(micro_batches=5, dp=8, seeds=(42, 43), min_fill=98.5, show=1, **paths)
    assert rest == []


def test_other_words_are_passed_on_in_order() -> None:
    words = ["--config", "a.yaml", "--dp", "2", "--config=b.yaml", "--data.max_seq_len", "512K", "--data.dp", "3"]
    options, rest = read_options(words)
    assert options.dp == 2
    assert rest == ["--config", "a.yaml", "--config=b.yaml", "--data.max_seq_len", "512K", "--data.dp", "3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dp", "0"], "`--dp` must be an integer of at least 1, but got '0'"),
        (["--dp", "two"], "`--dp` must be an integer of at least 1, but got 'two'"),
        (["--dp", "\u00b2"], "`--dp` must be an integer"),
        (["--micro-batches", "-1"], "`--micro-batches` must be an integer of at least 1"),
        (["--show", "x"], "`--show` must be an integer of at least 0"),
        (["--seeds", "42,x"], "`--seeds` must be an integer of at least 0, but got 'x'"),
        (["--seeds", "42,42"], "`--seeds` must be different seeds, but got '42,42'"),
        (["--min-fill", "0.985"], "`--min-fill` must be a percentage such as 98.5, but got '0.985'"),
        (["--min-fill", "101"], "`--min-fill` must be a percentage"),
        (["--min-fill", "full"], "`--min-fill` must be a percentage"),
        (["--micro-batchs", "3"], "Did you mean --micro-batches?"),
        (["--jsn=x"], "Did you mean --json?"),
        (["--dp"], "`longctx probe` must be called as its help says, but got argument --dp: expected one argument"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_options(words)
    assert said in str(caught.value)


def test_the_page_lists_all_options() -> None:
    page = (ROOT / "docs" / "probe.md").read_text()
    names = [name.replace("_", "-").replace("folder", "out") for name in ProbeOptions.__dataclass_fields__]
    assert [name for name in names if f"| `--{name} " not in page] == []
