"""Reading the directory of a run: as it is written, half written, continued, and everything that is no run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

from lightning_longctx.callbacks.router_metrics import RouterLoad, violations
from lightning_longctx.callbacks.router_output import publish_window, run_folder
from lightning_longctx.cli import main
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.csv_file import read
from lightning_longctx.tools.report.numbers import decades, pleasant_ticks
from lightning_longctx.tools.report.routers import read_expert_load
from lightning_longctx.tools.report.series import Series, thinned
from tests.tools.report.helpers import write_metrics, write_run


def test_what_the_logger_writes_is_read() -> None:
    logger = CSVLogger(".", name="runs", flush_logs_every_n_steps=2)
    for step in range(5):
        logger.log_metrics({"train/loss": 5.0 - step, "text": "warm" if step else 1.5}, step=step)
    logger.log_metrics({"val/loss": 1.25}, step=4)  # a new column: the file is written anew
    logger.save()
    found = read([Path("runs/version_0/metrics.csv")])
    assert found["train/loss"].steps.tolist() == [0, 1, 2, 3, 4]
    assert found["train/loss"].values.tolist() == [5, 4, 3, 2, 1]
    assert (found["val/loss"].steps.tolist(), found["val/loss"].values.tolist()) == ([4], [1.25])
    assert found["text"].values.tolist() == [1.5], "cells that are no number are left out"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_that_windows_touched_are_read(encoding: str, end: str) -> None:
    Path("metrics.csv").write_bytes(end.join(["step,train/loss", "0,3.0", "1,2.0", ""]).encode(encoding))
    assert read([Path("metrics.csv")])["train/loss"].values.tolist() == [3, 2]


@pytest.mark.parametrize("end", ["2,1.2", "2,", "2", "2,1.25,"])
def test_the_line_that_is_being_written_is_left_out(end: str) -> None:
    Path("metrics.csv").write_text(f"step,train/loss\n0,3.0\n1,2.0\n{end}")
    assert read([Path("metrics.csv")])["train/loss"].values.tolist() == [3, 2]


def test_of_a_step_that_comes_twice_the_later_row_counts() -> None:
    rows = [{"step": step, "train/loss": loss} for step, loss in [(0, 9), (1, 8), (2, 7), (1, 6), (2, 5), (3, 4)]]
    found = read([write_metrics(Path("run"), rows) / "metrics.csv"])["train/loss"]
    assert (found.steps.tolist(), found.values.tolist()) == ([0, 1, 2, 3], [9, 6, 5, 4])


def test_many_rows_are_read_in_chunks() -> None:
    rows = [{"step": step, "a": step / 4, **({"b": step} if step % 7 == 0 else {})} for step in range(4500)]
    found = read([write_metrics(Path("run"), rows) / "metrics.csv"])
    assert found["a"].values.tolist() == [step / 4 for step in range(4500)]
    assert found["b"].steps.tolist() == list(range(0, 4500, 7))


def test_expert_load_is_what_the_callback_counted() -> None:
    layers = [torch.tensor([3, 1, 0, 0]), torch.tensor([5, 5])]  # layers may have different numbers of experts
    for first, scale in ((1, 1), (11, 2), (11, 3)):  # the last window comes twice: a run that went back
        tokens = tuple(layer * scale for layer in layers)
        load = RouterLoad(first, first + 9, ("m.0", "m.1"), ("layer_00", "layer_01"), tokens, padding=0, dropped=0)
        publish_window(load, run_folder(Path("run"), resumed=first > 1), [], first)
    table = Path("run/moe_router/tokens_per_expert.csv")
    table.write_text(table.read_text() + "21,30,layer_00,m.0,0,7")  # being written
    found = read_expert_load(table)
    assert found is not None
    assert found.windows == ((1, 10), (11, 20))
    assert found.tokens.tolist() == [[[3, 1, 0, 0], [5, 5, -1, -1]], [[9, 3, 0, 0], [15, 15, -1, -1]]]
    assert found.violations[0, 0].tolist() == violations(layers[0]).tolist()
    assert found.violations[1, 1, :2].tolist() == [0, 0]
    assert np.isnan(found.violations[:, 1, 2:]).all()


def test_a_thinned_curve_holds_mean_least_and_most_of_each_bucket() -> None:
    curve = thinned(Series(np.arange(12), np.array([0, 1, 5, 2, 2, -9, 3, 4, 4, 5, 8, np.nan])), 4)
    assert curve.steps.tolist() == [1, 3.5, 6, 9]
    assert curve.middle.tolist() == pytest.approx([2, 2, -2 / 3, 17 / 3])
    assert (curve.low.tolist(), curve.high.tolist()) == ([0, 2, -9, 4], [5, 2, 4, 8])
    assert thinned(Series(np.arange(8), np.arange(8.0)), 4).whole


@settings(max_examples=40)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400),
    st.integers(1, 30),
    st.lists(st.integers(1, 50), min_size=400, max_size=400),
)
def test_thinning_keeps_the_extremes(values: list[float], buckets: int, gaps: list[int]) -> None:
    steps = np.cumsum(gaps[: len(values)])
    curve = thinned(Series(steps, np.array(values)), buckets)
    assert float(curve.low.min()) == min(values)
    assert float(curve.high.max()) == max(values)
    assert len(curve.steps) <= max(buckets, 2 * buckets if curve.whole else 0)
    assert (np.diff(curve.steps) > 0).all()
    assert (curve.low <= curve.middle + 1e-9 * abs(curve.middle)).all()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.1, 10.9), (-3, 3), (0, 1e-9), (17, 17.5), (1e6, 3e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = pleasant_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(0.5, 3e2), (1e-9, 1e9), (3, 1e3)])
def test_ticks_of_a_logarithmic_axis_are_few(low: float, high: float) -> None:
    ticks = decades(low, high)
    assert 2 <= len(ticks) <= 10
    assert all(low <= tick <= high for tick in ticks)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        main_raising(["report", *words])
    return str(caught.value)


def main_raising(words: list[str]) -> None:
    from lightning_longctx.cli.tools import run_tool

    run_tool(words[0], words[1:])


def test_what_is_no_run_is_told() -> None:
    assert "no such directory" in refusal("nowhere")
    Path("empty").mkdir()
    assert "an empty directory" in refusal("empty")
    (Path("empty") / "config.yaml").write_text("")
    assert "got config.yaml. Write `logger: [CSVLogger]`" in refusal("empty")
    write_run(Path("runs/version_3"))
    assert "Did you mean runs/version_3?" in refusal("runs")
    assert "got a file" in refusal("runs/version_3/metrics.csv")
    assert "`RUN` must be given" in refusal()
    assert "`--out` must name an .html file" in refusal("runs/version_3", "--out", "page.pdf")
    assert "Did you mean --json?" in refusal("runs/version_3", "--jsn", "x")
    assert "`--out` must be a file that can be written" in refusal(
        "runs/version_3", "--out", "empty/config.yaml/a.html"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "must have a column `step`, but got an empty file"),
        ("step,train/loss\n", "must have values, but got none yet"),
        ("step,train/loss\n1,", "must have values, but got none yet"),
        ("a,b\n1,2\n", "must have a column `step`, but got columns a, b"),
        ("step,train/loss\nx,2.0\n", "must be the CSV of CSVLogger"),
        ("step,train/loss\ninf,2.0\n", "must be the CSV of CSVLogger"),
        (f"step,train/loss\n{2**64},2.0\n", "must be the CSV of CSVLogger"),
        ("a\x1b[31m,b\n1,2\n", "but got columns a?[31m, b"),
    ],
)
def test_a_file_without_rows_is_told(content: str, said: str) -> None:
    Path("run").mkdir()
    Path("run/metrics.csv").write_text(content)
    assert said in refusal("run")


def test_a_broken_table_of_experts_is_told() -> None:
    table = write_run(Path("run")) / "moe_router" / "tokens_per_expert.csv"
    table.write_text("a,b\n1,2\n")
    assert "must have the columns first_step, last_step" in refusal("run")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("999999999,3", "expert 999999999 in 1 row"),
        ("-1,3", "expert -1"),
        ("0,-3", "-3 tokens"),
        (f"0,{2**70}", "token"),
    ],
)
def test_a_number_that_no_table_of_experts_has_is_told(cells: str, said: str) -> None:
    table = write_run(Path("run")) / "moe_router" / "tokens_per_expert.csv"
    table.write_text(f"first_step,last_step,layer,module,expert,tokens\n1,5,layer_00,m,{cells}\n")
    assert said in refusal("run")


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nowhere"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("longctx: error: `nowhere` must be the directory of a run")
    assert told.count("\n") == 1


def test_the_page_goes_into_the_run_or_beside_several() -> None:
    first, second = write_run(Path("runs/a")), write_run(Path("runs/b"))
    assert main(["report", str(first)]) == 0
    assert (first / "report.html").is_file()
    assert main(["report", str(first), str(second)]) == 0
    assert Path("runs/report.html").is_file()


def test_a_configuration_that_is_no_yaml_is_shown_as_it_is() -> None:
    path = write_run(Path("run"))
    (path / "config.yaml").write_text("model: !own.Class {a: [}\n")
    assert main(["report", str(path)]) == 0
    assert "!own.Class" in (path / "report.html").read_text()
