"""What is printed, written and drawn, from made-up numbers; and the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longctx import ConfigurationError
from lightning_longctx.tools.plan.options import read_options
from lightning_longctx.tools.plan.peaks import Peaks
from lightning_longctx.tools.plan.plot import check_plot, save_plot
from lightning_longctx.tools.plan.report import PlanReport, Variant
from lightning_longctx.tools.plan.storages import Segment
from lightning_longctx.units import GIB

FACTS = {
    "parameters": 8_030_261_248,
    "tokens": 524_288,
    "world_size": 8,
    "ranks_per_node": 8,
    "sequence_parallel_size": 2,
    "precision": "bf16-true",
    "device_gib": 80.0,
    "switched_on": ["activation_checkpointing: full"],
}


def _peaks(gib: int) -> Peaks:
    parts = {"parameters": 2 * GIB, "activations": (gib - 2) * GIB}
    phases = [Segment("forward", GIB, {"parameters": GIB}), Segment("backward", gib * GIB, parts, 3 * GIB)]
    return Peaks(phases, (2**31, (2**16, 2**15)))


@pytest.fixture
def report() -> PlanReport:
    variants = [
        Variant("as configured", _peaks(90), False, 1024),
        Variant("+ tiled_mlp: auto", _peaks(70), True, None),
    ]
    return PlanReport(FACTS, variants, "Advice.", ["A note."])


def test_the_text(report: PlanReport) -> None:
    lines = report.to_text().splitlines()
    assert "It does not fit: 96.5 GiB with margin of 80 GiB, set by the backward. Margin: 5% and 2 GiB." in lines
    assert "Switched on: activation_checkpointing: full." in lines
    (backward,) = [line for line in lines if line.startswith("| backward")]
    cells = [cell.strip() for cell in backward.strip("|").split("|")]
    assert cells == ["backward", "2.00", "0.00", "0.00", "0.00", "88.00", "0.00", "0.00", "90.00"]
    rows = [line for line in lines if line.startswith(("| as configured", "| + "))]
    first, second = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert first == ["as configured", "90.0", "", "96.5", "no", "backward", "24.0", "1,024"]
    assert second == ["+ tiled_mlp: auto", "70.0", "-20.0", "75.5", "yes", "backward", "24.0", "-"]
    assert "- A note." in lines
    assert lines[-1].startswith("- Not simulated: ")


def test_the_numbers(report: PlanReport) -> None:
    plain = report.to_plain()
    assert (plain["version"], plain["facts"], plain["advice"]) == (1, FACTS, "Advice.")
    first = plain["variants"][0]
    assert (first["peak_bytes"], first["host_bytes_per_node"]) == (90 * GIB, 24 * GIB)
    assert (first["fits"], first["longest_tokens"], first["binding_phase"]) == (False, 1024, "backward")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_plot(report: PlanReport, kind: str) -> None:
    path = Path(f"plan.{kind}")
    check_plot(path)
    save_plot(path, report.variants, 80)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert kind == "png" or b"tiled" in data or b"<path" in data


def test_a_plot_of_an_unknown_kind() -> None:
    with pytest.raises(ConfigurationError, match="--plot"):
        check_plot(Path("plan.txt"))


def test_flags_and_the_words_of_the_configuration() -> None:
    words = ["--config", "a.yaml", "--device-gb", "79.6", "--max_seq_len=512K", "--data.max_seq_len", "4K", "--brief"]
    options, rest = read_options(words)
    assert (options.device_gb, options.max_seq_len, options.brief) == (79.6, 524_288, True)
    assert (options.devices, options.host_gb, options.write) == (None, None, None)
    assert rest == ["--config", "a.yaml", "--data.max_seq_len", "4K"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`--device-gb` must be given"),
        (["--device-gb", "0"], "`--device-gb` must be a number of GiB such as 80, but got '0'"),
        (["--device-gb", "nan"], "must be a number of GiB"),
        (["--device-gb", "80", "--devices", "0"], "`--devices` must be an integer of at least 1, but got '0'"),
        (["--device-gb", "80", "--max-seq-len", "long"], "--max-seq-len"),
        (["--device-gb", "80", "--device"], "must be a flag of longctx plan"),
    ],
)
def test_flags_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_options(words)
    assert message in str(raised.value)
