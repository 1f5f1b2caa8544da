"""The runner of all benchmarks: figures judged right, every script in the list, a failure told and not hidden."""

from __future__ import annotations

import ast
import csv
import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import training
from benchmarks.__main__ import BENCHMARKS, Benchmark, main, merge_csv, page_text, run_all, to_rows
from benchmarks.figures import Figure, figure_table
from tests.contracts.source import ROOT
from tests.helpers.pool import run_ranks


@pytest.mark.parametrize(
    ("figure", "ratio", "against", "verdict"),
    [
        (Figure("pause", 1.2, "s", "memcpy", 2.4, bar=1.35), 0.5, "better", "PASS"),
        (Figure("pause", 1.4, "s", "memcpy", 0.7, bar=1.35), 2, "worse", "FAIL"),
        (Figure("speed", 0.99, "x", "plain", 1.0, bar=0.97, more_is_better=True), 0.99, "even", "PASS"),
        (Figure("fill", 90, "%", "gate", 95, bar=99, more_is_better=True), 90 / 95, "worse", "FAIL"),
        (Figure("drift", 0.5, "points", "arrival", 0.0), None, "worse", ""),
        (Figure("share", 0.2, "%"), None, "", ""),
    ],
)
def test_verdicts(figure: Figure, ratio: float | None, against: str, verdict: str) -> None:
    assert figure.ratio == (None if ratio is None else pytest.approx(ratio))
    assert (figure.against_peer, figure.bar_verdict) == (against, verdict)


def test_the_table() -> None:
    figures = [Figure("speed", 1234.4, "tokens/s", "plain", 1000, 900, more_is_better=True), Figure("share", 0.2, "%")]
    assert figure_table(figures).splitlines()[2:] == [
        "| speed | 1,234 tokens/s | plain | 1,000 tokens/s | 1.23 | better | >= 900 | PASS |",
        "| share | 0.2 % |  |  |  |  |  |  |",
    ]


def test_every_script_is_in_the_list() -> None:
    scripts = {
        path.stem
        for path in (ROOT / "benchmarks").glob("[!_]*.py")
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)
    }
    assert scripts == {*BENCHMARKS, "tuning"}  # which measures nothing: it writes the tables of a page
    for name in BENCHMARKS:
        assert callable(import_module(f"benchmarks.{name}").figures)
        assert f"[{name}.py]({name}.py)" in (ROOT / "benchmarks/README.md").read_text()


def test_the_committed_packing_numbers_become_figures() -> None:
    found = import_module("benchmarks.packing").figures(json.loads((ROOT / "benchmarks/packing.json").read_text()))
    first = {figure.peer: figure for figure in found if figure.what == "documents before the first row"}
    assert first["fixed 200"].against_peer == "better"
    assert first["fixed 200"].theirs == pytest.approx(200)
    assert [figure.what for figure in found if figure.bar_verdict == "PASS"] == ["of its own bars, not met"]


def test_one_benchmark_is_run_anew_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    speed = Figure("speed", 0.5, "x", "plain", 1.0, 0.9, more_is_better=True)
    merge_csv(path, to_rows({"mix": [Figure("share off", 1.0, "points", "arrival", 0.5, 2)], "loss": [speed]}))
    rows = merge_csv(path, to_rows({"mix": [Figure("share off", 0.25, "points", "arrival", 0.5, 2)]}))
    assert [(row["benchmark"], row["ours"]) for row in rows] == [("mix", "0.25"), ("loss", "0.5")]
    with path.open() as file:
        assert list(csv.DictReader(file)) == rows
    text = page_text(rows, {"loss": "failed with exit status 1"})
    assert "| speed | 0.5 x | plain | 1 x | 0.5 | worse | >= 0.9 | FAIL |" in text
    assert "| share off | 0.25 points | arrival | 0.5 points | 0.5 | better | <= 2 | PASS |" in text
    assert "Worse than a peer: loss: speed." in text
    assert "Bars not met: loss: speed." in text
    assert "Not run: offload_time (needs a GPU)." in text
    assert "Not run: loss" not in text  # its older figures stand there, with their date


def test_the_page_shows_the_committed_figures() -> None:
    with (ROOT / "benchmarks/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert page_text(rows, {}) in page


@pytest.mark.slow
def test_a_run_and_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "packing": Benchmark(
            "a real one",
            ("--seeds", "1", "--micro-batches", "10", "--parts", "grid", "--streams", "wide", "--windows", "32K"),
        ),
        "mix": Benchmark("one that cannot run", ("--no-such-option",)),
        "offload_time": Benchmark("one for a GPU", needs_gpu=True),
    }
    monkeypatch.setattr(runner, "BENCHMARKS", few)
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: False)
    results, missing = run_all(list(few), quick=True)
    assert missing == {"mix": "failed with exit status 2", "offload_time": "needs a GPU"}
    assert {"fixed 200", "next fit"} <= {figure.peer for figure in results["packing"]}
    rows = merge_csv(tmp_path / "all.csv", to_rows(results))
    text = page_text(rows, missing)
    assert "Not run: mix (failed with exit status 2)." in text
    assert "### packing" in text
    assert [row["what"] for row in rows] == [figure.what for figure in results["packing"]]
    assert all(float(row["ours"]) >= 0 and row["torch"] and row["date"] and row["cores"] for row in rows)


def test_an_unknown_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["packings"])
    assert "'packings' is none of packing, mix" in capsys.readouterr().err


def _compare(folder: str, turns: int) -> list[dict]:
    path = Path(folder) / "numbers.json"
    assert training.main(["--tokens", "256", "--documents", "1", "4", "--turns", str(turns), "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_training_step_against_its_peer(tmp_path: Path) -> None:
    (results,) = run_ranks(_compare, 1, str(tmp_path), 1)
    assert [one["documents"] for one in results] == [1, 4]
    # the same weights and rows give the same five losses: the two are the same training
    assert all(one["loss_gap"] < 1e-5 and one["ours"]["tokens_per_second"] > 0 for one in results)
    found = training.figures(results)
    assert [figure.what for figure in found] == [
        "speed, 256 tokens in 1 document(s)",
        "speed, 256 tokens in 4 document(s)",
    ]
    assert all(figure.ours == one["speed_ratio"] for figure, one in zip(found, results, strict=True))
