"""The whole command, as it is typed: figures, files, exit codes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import main
from tests.contracts.source import ROOT

LENGTHS = [6, 5, 4, 3, 7, 2, 6, 4, 10, 3]  # 50 tokens


def _config(lengths: list[int], window: int = 10, **data: Any) -> str:
    """Write the documents and a configuration; return its name."""
    lines = [json.dumps({"text": str(length)}) for length in lengths]
    Path("documents.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "max_seq_len": window,
        "tokenizer": "tests.tools.probe.helpers.as_many_tokens",
        "sources": {"a": "documents.jsonl"},
        "loading": {"shuffle": False},
    }
    content = {
        "trainer": {"accelerator": "gpu", "devices": 1, "precision": "bf16-true"},  # never asked for
        "model": {"class_path": "tests.cli.toys.ToyModel"},
        "data": {**settings, **data},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))
    return "run.yaml"


def _gate(size: int) -> dict[str, Any]:
    return {"class_path": "FixedBufferPolicy", "init_args": {"size": size}}


def _probe(*words: str) -> tuple[int, dict[str, Any]]:
    """Run; return the exit code and the JSON."""
    code = main(["probe", "--config", "run.yaml", "--json", "found/probe.json", *words])
    return code, json.loads(Path("found/probe.json").read_text())


def _choices(found: dict[str, Any], policy: int = 0) -> list[str]:
    return [rank["choice"] for rank in found["policies"][policy]["ranks"]]


def test_figures_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    _config(LENGTHS, buffer_policy=_gate(2))
    code, found = _probe("--micro-batches", "3")
    assert code == 0
    measured, adaptive, refused = found["policies"]
    # [6]: 5 does not fit; [5, 4]; [3, 7]
    assert measured["name"] == "fixed"
    assert measured["documents"] == {"p50": 2, "slowest": 2, "skew": 1}
    assert measured["first_fills"] == [0.6]
    assert measured["steady_fills"] == [pytest.approx(0.95)]
    assert measured["ranks"][0]["longest_wait"] == 1
    assert measured["ranks"][0]["peak_windows"] == 1.2
    assert measured["order_drift"] == pytest.approx(6 / 5 - 1)  # read: 6, 5, 4, 3, 7
    # the same five documents: [6, 4]; [3, 7]; [5] would read on
    assert (adaptive["name"], adaptive["measured"]) == ("adaptive", False)
    assert adaptive["documents"]["slowest"] == 3
    assert adaptive["first_fills"] == [1.0]
    assert adaptive["ranks"][0]["rows"] == 2
    assert (refused["name"], refused["documents"]) == ("context_aware", None)
    assert "must be one of [524288, 1048576]" in refused["refused"]
    text = capsys.readouterr().out
    assert "| fixed" in text
    assert "| context_aware | refused: `data.max_seq_len` must be" in text
    assert text.startswith(Path("runs/probe/probe.md").read_text())


def test_json_has_everything() -> None:
    _config(LENGTHS)
    _, found = _probe("--micro-batches", "2", "--dp", "2", "--seeds", "1,2")
    assert found.keys() == {"version", "facts", "policies", "lengths", "problems"}
    assert found["facts"] == {
        "max_seq_len": 10,
        "max_tokens_per_batch": 10,
        "count_mode": "total",
        "data_parallel_ranks": 2,
        "sequence_parallel_size": 1,
        "micro_batches": 2,
        "seeds": [1, 2],
        "policy": "adaptive",
        "balance": False,
        "min_fill": None,
    }
    measured = found["policies"][0]
    assert [(rank["seed"], rank["rank"]) for rank in measured["ranks"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len(measured["first_fills"]) == len(measured["steady_fills"]) == 2
    assert all(ratio >= 1 for ratio in measured["imbalance"])
    read = found["lengths"]
    assert sum(bucket["tokens"] for bucket in read) > 0
    assert [bucket["low"] for bucket in read] == [2, 4, 8][: len(read)]


def test_tables_and_plot_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    _config(LENGTHS)
    assert main(["probe", "--config=run.yaml", "--micro-batches=3", "--dp=2", "--out=there", "--plot=a/b.png"]) == 0
    assert Path("a/b.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("a/b.png").read_bytes()) > 10_000
    with Path("there/ranks.csv").open() as file:
        ranks = list(csv.DictReader(file))
    assert [(row["policy"], row["rank"]) for row in ranks] == [(p, r) for p in ("adaptive", "fixed") for r in "01"]
    with Path("there/policies.csv").open() as file:
        (adaptive, fixed) = csv.DictReader(file)
    assert (float(adaptive["first_fill"]), adaptive["measured"], fixed["measured"]) == (1.0, "True", "False")
    assert not Path("there/probe.png").exists()
    assert "plot in a/b.png" in capsys.readouterr().out


def test_the_plot_lies_beside_the_tables() -> None:
    _config(LENGTHS)
    assert main(["probe", "--config", "run.yaml", "--micro-batches", "2"]) == 0
    names = sorted(path.name for path in Path("runs/probe").iterdir())
    assert names == ["policies.csv", "probe.md", "probe.png", "ranks.csv"]


@pytest.mark.parametrize(
    ("size", "least", "code", "said"),
    [
        (2, "60", 0, []),
        (2, "60.1", 1, ["First fill 60.00 % is below --min-fill 60.1 (seed 42)."]),
        (2, "96", 1, ["First fill 60.00 %", "Steady fill 95.00 %"]),
        (3, "85", 0, []),  # [6, 4]; [5, 3]; [7, 2]
        (3, "85.1", 1, ["Steady fill 85.00 %"]),
    ],
)
def test_min_fill(size: int, least: str, code: int, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _config(LENGTHS, buffer_policy=_gate(size))
    found_code, found = _probe("--micro-batches", "3", "--min-fill", least)
    assert found_code == code
    assert len(found["problems"]) == len(said)
    assert all(part in problem for part, problem in zip(said, found["problems"], strict=True))
    assert all(part in capsys.readouterr().out for part in said[:1])


def test_min_fill_needs_a_steady_row(capsys: pytest.CaptureFixture[str]) -> None:
    _config(LENGTHS)
    assert main(["probe", "--config", "run.yaml", "--micro-batches", "1", "--min-fill", "50"]) == 2
    assert "`--min-fill` needs a micro-batch after the first one" in capsys.readouterr().err


def test_the_hash_follows_the_order() -> None:
    _config(LENGTHS * 3, loading={"shuffle": True})
    _, found = _probe("--micro-batches", "4", "--seeds", "1,2")
    first, second = _choices(found)
    assert first != second
    assert _choices(_probe("--micro-batches", "4", "--seeds", "2")[1]) == [second]
    _, other = _probe("--micro-batches", "4", "--seeds", "2", "--data.buffer_policy=fixed")
    assert _choices(other) != [second]


def test_two_settings_that_choose_the_same_have_the_same_hash(capsys: pytest.CaptureFixture[str]) -> None:
    """The published gate for 512K is a fixed gate of 24."""
    lengths = [90_000 + 7_919 * (i % 13) for i in range(60)]
    _config(lengths, window=524_288, buffer_policy=_gate(24))
    _, found = _probe("--micro-batches", "4")
    names = [policy["name"] for policy in found["policies"]]
    assert names == ["fixed", "adaptive", "context_aware"]
    assert _choices(found, 2) == _choices(found)
    assert _choices(found, 1) != _choices(found)
    rows = [line.split("|")[-2].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1:4] == ["measured", "another", "the same"]
    assert found["policies"][2]["documents"]["slowest"] == 24
    assert found["policies"][1]["documents"]["slowest"] <= 8  # four fill the window; at most four more are read


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    for number, text in enumerate(["first text", "second"]):
        Path(f"texts/{number}.txt").write_text(text)
    content = {
        "model": {"class_path": "tests.cli.toys.ToyModel"},
        "data": {"max_seq_len": 18, "sources": {"notes": "texts/*.txt"}, "loading": {"shuffle": False}},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))
    assert main(["probe", "--config", "run.yaml", "--show", "1"]) == 0
    shown = capsys.readouterr().out.partition("Row 1 of rank 0, seed 42:\n")[2].splitlines()
    assert shown[:4] == [
        "18 tokens; documents: 2, trained tokens: 16, padding: 0",
        "+-- document 1: notes number 0, tokens 0 to 10 of the row (11)",
        '|   not trained         1  "f"',
        '|   trained            10  "irst text<end>"',
    ]


def test_the_tokenizer_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    _config([123, 4567], tokenizer="from_model")
    model = "--model=tests.tools.probe.helpers.SpellingModel"
    assert main(["probe", "--config", "run.yaml", model, "--show", "1", "--micro-batches", "1"]) == 0
    shown = capsys.readouterr().out
    assert '|   trained             3  "23</s>"' in shown
    assert '|   trained             4  "567</s>"' in shown


@pytest.mark.slow
def test_the_quickstart() -> None:
    pytest.importorskip("transformers")
    shutil.copy(ROOT / "examples" / "quickstart.yaml", "run.yaml")
    # Its prose is that of the installed packages: 94 to 97 % have been seen with different ones.
    code, found = _probe("--micro-batches", "50", "--dp", "2", "--min-fill", "90")
    assert code == 0
    assert found["policies"][0]["documents"]["slowest"] <= 20


@pytest.mark.parametrize(("devices", "words", "ranks"), [(2, [], 2), (4, ["--dp", "3"], 3), ("auto", [], 1)])
def test_the_number_of_ranks(devices: Any, words: list[str], ranks: int) -> None:
    _config(LENGTHS)
    _, found = _probe("--micro-batches", "1", f"--trainer.devices={devices}", *words)
    assert found["facts"]["data_parallel_ranks"] == ranks
    assert len(found["policies"][0]["ranks"]) == ranks


def test_sequence_parallel_ranks_share_a_stream() -> None:
    _config(LENGTHS, window=12)
    strategy = "--trainer.strategy=LongContextFSDPStrategy"
    size = "--trainer.strategy.sequence_parallel_size=4"
    _, found = _probe("--micro-batches", "2", "--trainer.devices=8", strategy, size)
    assert (found["facts"]["data_parallel_ranks"], found["facts"]["sequence_parallel_size"]) == (2, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "run.yml"], "`--config` must be a file that exists, but got 'run.yml'. Did you mean `run.yaml`?"),
        (["--config", "run.yaml", "--dp", "x"], "`--dp` must be an integer"),
        (["--config", "run.yaml", "--micro-batchs", "3"], "Did you mean --micro-batches?"),
        (["--config", "run.yaml", "--data.max_seqlen", "3"], "Did you mean `data.max_seq_len`?"),
        (["--config", "run.yaml", "--data.buffer_policy", "context_aware"], "must be one of [524288, 1048576]"),
        (["--config", "run.yaml", "--dp", "11"], "got none for rank 10 of 11 (seed 42). Lower --dp"),
        (["--config", "run.yaml", "--data.tokenizer", "from_model"], "from_model needs a model that has a tokenizer"),
        (["--config", "run.yaml", "--out", "run.yaml"], "`--out` must be in a folder that can be made"),
        (["--config", "run.yaml", "--plot", "x.txt"], "`--plot` must name a .png, .pdf or .svg file"),
        (
            ["--config", "run.yaml", "--data", "tests.cli.toys.ToyData"],
            "`data` must be a DynamicBatchingDataModule, but got ToyData",
        ),
        (["--config", "run.yaml", "--data.sources", "{a: gone/*.jsonl}"], "gone/*.jsonl"),
    ],
)
def test_what_cannot_run_is_told_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    _config(LENGTHS)
    assert main(["probe", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("longctx: error: ")]
    assert said in line


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "probe" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["probe", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{flag}" in text for flag in ("micro-batches", "dp", "seeds", "min-fill", "show", "json", "plot"))
