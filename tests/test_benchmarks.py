"""The packing benchmark: peers do by hand what they do in code, figures are right, bars fail where they should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from math import log
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data_wait, packing, packing_grid
from benchmarks.packing_bars import cost_bars, grid_bars
from benchmarks.packing_costs import PoolCost, RowCost, pool_costs, row_costs, worst_growth
from benchmarks.packing_grid import RUNS, Cell, Figures, Grid, half_windows, measure, overview, run_variant
from benchmarks.packing_peers import (
    PEERS,
    best_fit_carry,
    best_fit_chunks,
    first_fit_bins,
    knapsack_buffer,
    next_fit,
    run_peer,
)
from benchmarks.packing_pieces import CHANGED, LADDER, WITHOUT
from benchmarks.packing_streams import STREAMS
from benchmarks.packing_tables import write_tables
from lightning_longctx.datamodules import FixedBufferPolicy, adaptive, selection, simulate_packing
from tests.contracts.source import ROOT

TABLES = ("method", "bars", "policies", "packers", "ladder", "without", "changed", "pools")
FIGURES = Figures(
    documents=10.0,
    documents_worst=12,
    first=0.99,
    steady=0.999,
    worst=0.9,
    max_wait=5,
    pool=2.0,
    drift=0.0,
    imbalance=2.0,
    lost=0.5,
    balanced=1.2,
    lost_balanced=0.2,
    cpu_ms=0.1,
)


def endless(*lengths: int) -> Iterator[int]:
    return cycle(lengths)


@pytest.mark.parametrize(
    ("packer", "options", "lengths", "rows"),
    [
        # 6 + 3, then 5 closes; 5 + 5, then 7 closes; 7 alone, since 4 does not fit
        (next_fit, {}, (6, 3, 5, 5, 7, 4), [[0, 1], [2, 3], [4]]),
        # 6 | 7, 3 into the first; 4 fits nowhere: both are given, and 4 opens the next pair; 6 joins it, 9 beside
        (first_fit_bins, {"bins": 2}, (6, 7, 3, 4, 6, 9, 2), [[0, 2], [1], [3, 4], [5]]),
        # 6, 5, 4 to the 6 (least room, not most), 3 and 2 to the 5
        (best_fit_chunks, {"chunk": 5}, (6, 5, 4, 3, 2), [[0, 2], [1, 3, 4], [5, 7], [6, 8, 9]]),
        # 6 + 3 is given and the other 6 waits; then 6 + 4 is full, and 1 waits
        (best_fit_carry, {"batch": 3}, (6, 6, 3, 4, 8, 1), [[0, 2], [4, 5]]),
        # 7 + 3, 5 + 5 (the newer one first), 2; nothing of the buffer is kept back
        (knapsack_buffer, {"buffer": 5}, (7, 5, 5, 3, 2), [[0, 3], [2, 1], [4], [5, 8], [7, 6], [9]]),
    ],
)
def test_peers_on_cases_done_by_hand(packer, options, lengths, rows) -> None:
    source = endless(*lengths)
    found = packer(lambda: next(source), 10, **options)
    assert list(islice(found, len(rows))) == rows


@pytest.mark.parametrize("name", PEERS)
def test_peers_give_each_document_once_in_rows_that_fit(name: str) -> None:
    lengths = np.random.default_rng(3).integers(1, 101, 20_000).tolist()
    report = run_peer(PEERS[name], lengths, 100, 120)
    given = [number for row in report.selected for number in row]
    assert len(given) == len(set(given))
    assert set(given) <= set(range(report.documents))
    assert all(0 < sum(lengths[number] for number in row) <= 100 for row in report.selected)
    assert report.fills == [sum(lengths[number] for number in row) / 100 for row in report.selected]


def test_a_peer_is_measured_as_a_policy_is() -> None:
    report = run_peer(next_fit, endless(6, 3, 5, 5, 7), 10, 3)
    assert report.first_documents == 3, "the third document closes the first row"
    assert (report.first_fill, report.steady_fill) == (0.9, (1.0 + 0.7) / 2)
    assert report.max_wait == 1
    assert report.peak_pool_tokens == 6 + 3 + 5 + 5 + 7 - 9, "before the second row: all but the first"
    lengths = np.random.default_rng(0).integers(1, 60, 4000).tolist()
    gate = simulate_packing(lengths, FixedBufferPolicy(1), max_tokens_per_batch=100, micro_batches=50)
    assert gate.max_wait <= run_peer(PEERS["best fit, chunks of 1000"], lengths, 100, 50).max_wait == 49


@pytest.mark.parametrize("name", [name for name in WITHOUT if name != "pauses between looks"])
def test_taking_a_piece_away_changes_the_rows(name: str) -> None:
    if name == "futility":
        run = run_variant(WITHOUT[name])
        assert half_windows(run, 60).peak_pool_tokens > half_windows(RUNS["adaptive"], 60).peak_pool_tokens
        return
    # A document waits up to 256 rows where rows fall short, so the limit shows on a hard stream and after many rows.
    window, count = (2**15, 400) if name == "waiting limit" else (2**17, 120)
    rows = [
        run(STREAMS["mid-size"](0, window), window, count).selected
        for run in (RUNS["adaptive"], run_variant(WITHOUT[name]))
    ]
    assert rows[0] != rows[1]


def test_the_ladder_starts_at_greedy_and_ends_at_the_policy() -> None:
    def rows(run) -> list[list[int]]:
        return run(STREAMS["wide"](1, 2**19), 2**19, 40).selected

    first, *_, last = LADDER.values()
    assert rows(run_variant(last)) == rows(RUNS["adaptive"])
    greedy = simulate_packing(
        STREAMS["wide"](1, 2**19), FixedBufferPolicy(1), max_tokens_per_batch=2**19, micro_batches=40
    )
    assert rows(run_variant(first)) == greedy.selected


@pytest.mark.parametrize("variant", [*LADDER.values(), *WITHOUT.values(), *CHANGED.values()])
def test_changes_end_with_the_run(variant) -> None:
    before = dict(vars(adaptive)), dict(vars(selection))
    with variant.policy(1000) as policy:
        simulate_packing([500, 400, 300] * 20, policy, max_tokens_per_batch=1000)
    assert (dict(vars(adaptive)), dict(vars(selection))) == before


def test_figures_of_a_cell() -> None:
    grid, cell = Grid((4, 5), 12), Cell("mid-size", 2**19)
    reports = [
        simulate_packing(STREAMS["mid-size"](seed, 2**19), max_tokens_per_batch=2**19, micro_batches=12)
        for seed in (4, 5)
    ]
    found = measure(RUNS["adaptive"], grid, cell)
    assert found.documents == sum(report.first_documents for report in reports) / 2
    assert found.documents_worst == max(report.first_documents for report in reports)
    assert found.steady == pytest.approx(sum(report.steady_fill for report in reports) / 2)
    assert found.worst == min(min(report.fills) for report in reports)
    assert 1 <= found.imbalance <= 2
    assert found.lost == pytest.approx(1 - 1 / found.imbalance, abs=0.05)
    assert packing_grid.oracle(grid, cell) <= found.documents
    view = overview([found, replace(found, steady=0.9, pool=8.0)])
    assert (view["cells_above_99.5"], view["worst_cell"], view["max_pool"]) == (1, 0.9, 8.0)


def test_ranks_that_pick_rows_give_the_same_work_at_once() -> None:
    costs = [[9.0, 1.0] * 40, [1.0, 9.0] * 40]
    steps = packing_grid._balanced(costs)
    assert len(steps) == 80 - 15, "until nothing is left to plan 16 rows ahead"
    assert steps[0] == [9.0, 1.0], "the first row is not delayed"
    assert all(first == second for first, second in steps[4:])


def test_half_windows_never_fit_together() -> None:
    assert max(half_windows(RUNS["adaptive"], 20).fills) <= 0.6


def test_bars_fail_where_they_should() -> None:
    cells = [Cell(stream, 2**20) for stream in ("mid-size", "wide")]
    gate = replace(FIGURES, documents=24.0, first=0.98, steady=0.98)
    good = {cell: {"adaptive": FIGURES, "fixed 24": gate} for cell in cells}
    oracles = dict.fromkeys(cells, 9.5)
    assert [bar.verdict for bar in grid_bars(good, oracles, 8)] == ["PASS"] * 8
    assert grid_bars(good, oracles, 3)[-1].verdict == "-", "balance is defined for 8 ranks"
    for change, failing in (
        ({"documents": 10.6}, {"documents before"}),
        ({"first": 0.97}, {"first fill", "no cell worse"}),
        ({"steady": 0.99}, {"steady fill >= 99.8", "steady fill >= 99.5"}),
        ({"pool": 6.1}, {"pool"}),
        ({"max_wait": 33}, {"wait"}),
        ({"documents": 25.0}, {"documents before", "no cell worse"}),
    ):
        bad = {**good, cells[0]: {"adaptive": replace(FIGURES, **change), "fixed 24": gate}}
        failed = [bar.rule for bar in grid_bars(bad, oracles, 8) if bar.passed is False]
        assert len(failed) == len(failing)
        assert all(any(words in rule for rule in failed) for words in failing)
    uneven = {**good, cells[1]: {"adaptive": replace(FIGURES, balanced=1.4), "fixed 24": gate}}
    assert [bar.passed for bar in grid_bars(uneven, oracles, 8)][-1] is False


def test_growth_is_measured_against_n_log_n() -> None:
    def cost(documents: int, ms: float) -> PoolCost:
        return PoolCost(documents, ms / 2, ms, ms / 3)

    exact = 8.0 * (20_000 * log(20_000)) / (4096 * log(4096))
    assert worst_growth([cost(24, 1), cost(4096, 8.0), cost(20_000, exact)]) == pytest.approx(1)
    bars = cost_bars([cost(4096, 10.5), cost(20_000, exact * 1.5)], RowCost(51.0, 50.0, 60.0, 1e6))
    assert [bar.passed for bar in bars] == [False, False, False]
    bars = cost_bars([cost(4096, 9.5), cost(20_000, exact)], RowCost(49.0, 55.0, 90.0, 1e6))
    assert [bar.passed for bar in bars] == [True, True, True]


def test_costs_are_measured() -> None:
    small, large = pool_costs((24, 2000), rows=2)
    assert 0 < small.usual <= small.worst < large.worst


@pytest.mark.slow
def test_real_rows_are_measured() -> None:
    cost = row_costs(rows=2, num_workers=0)
    assert 0.99 * 2**20 < cost.tokens <= 2**20
    assert 0 < cost.median <= cost.worst


@pytest.mark.slow
def test_a_small_run_prints_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    names = ("method", "bars", "policies", "packers", "ladder", "without", "changed")
    page.write_text("Before.\n" + "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in names))
    arguments = ["--streams", "mid-size", "--windows", "512K", "--seeds", "2", "--micro-batches", "4"]
    arguments += ["--ablation-seeds", "1", "--parts", "grid", "ablation", "--json", str(numbers), "--docs", str(page)]
    status = packing.main(arguments)
    found = json.loads(numbers.read_text())
    verdicts = [bar["verdict"] for bar in found["bars"]]
    assert status == int("FAIL" in verdicts)
    assert len(verdicts) == 5 + 2 + 2
    assert set(found["grid"]["mid-size 512K"]) == {"oracle", *RUNS}
    assert set(found["without"]) == set(WITHOUT)
    printed, written = capsys.readouterr().out, page.read_text()
    assert "old" not in written
    for name in RUNS:
        assert f"| {name} |" in printed
        assert f"| {name} |" in written
    assert "seeds 0 to 1, 4 rows each" in written


def test_tables_need_their_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: bars -->\n<!-- end -->\n")
    write_tables(page, {"bars": "| a |"})
    assert page.read_text() == "<!-- table: bars -->\n| a |\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="one place for the table 'pools'"):
        write_tables(page, {"pools": "| b |"})


def test_the_docs_page_has_a_place_for_each_table() -> None:
    text = (ROOT / "docs" / "buffer_policies.md").read_text()
    assert [text.count(f"<!-- table: {name} -->\n") for name in TABLES] == [1] * len(TABLES)


@pytest.mark.slow
def test_waits_are_measured_against_rows_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    data_wait.main(["--rows", "6", "--seconds", "0.05", "--first-seconds", "0.3", "--json", str(numbers)])
    found = json.loads(numbers.read_text())
    assert tuple(found) == (*data_wait.WAYS, "resume")
    assert found["main"]["wait_p50"] < found["on demand"]["wait_p50"]
    assert found["worker"]["wait_p50"] < found["on demand"]["wait_p50"]
    assert found["on demand"]["first"] >= 1
    for runtime in ("main", "worker"):
        resumed = found["resume"][f"eighths, {runtime}, {data_wait.WORKERS} workers"]
        assert resumed["first_seconds"] < resumed["pool_seconds"]
    assert "| on demand | " in capsys.readouterr().out
