"""The whole command, as it is typed: tables, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import main
from lightning_longctx.cli.parts import read_words
from lightning_longctx.strategies import LongContextFSDPStrategy
from lightning_longctx.strategies.memory import MemorySettings, next_switches, settings_of
from lightning_longctx.tools.plan import command
from lightning_longctx.tools.plan.options import PlanOptions
from lightning_longctx.tools.plan.reading import Run
from lightning_longctx.tools.plan.step import Step
from tests.contracts.source import ROOT
from tests.strategies.own_model import OwnModule
from tests.tools.plan.helpers import TINY, own_shapes


def _config(strategy: Any = "longctx_fsdp", model: Any = None, **trainer: Any) -> None:
    """Write a configuration for GPUs that are not here."""
    content = {
        "trainer": {"accelerator": "gpu", "devices": 4, "precision": "bf16-true", "strategy": strategy, **trainer},
        "model": model or {"config": {**TINY, "num_hidden_layers": 3}},
        "data": {"max_seq_len": "64K", "sources": {"a": [{"text": "words"}]}},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))


def _plan(*words: str) -> tuple[int, dict[str, Any]]:
    """Run; return the exit code and the JSON."""
    code = main(["plan", "--config", "run.yaml", "--json", "found/plan.json", "--brief", *words])
    return code, json.loads(Path("found/plan.json").read_text())


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--config", "run.yaml", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_does_not_fit_and_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    _config()
    code, found = _plan("--device-gb", "2.2", "--write", "found/fits.yaml")
    assert code == 1
    text, told = capsys.readouterr()
    assert "Simulating: as configured (1 of " in told
    assert "Simulating: the fewest switches that make it fit." in told
    assert text.splitlines()[-1].startswith("Next: `longctx fit --config run.yaml --config found/fits.yaml`")
    assert "It does not fit" in text
    assert "| backward " in text
    assert text.startswith(Path("runs/plan/plan.md").read_text())
    assert Path("runs/plan/plan.png").read_bytes().startswith(b"\x89PNG")
    variants = {variant["name"]: variant for variant in found["variants"]}
    configured = variants["as configured"]
    assert configured["peak_bytes"] > variants["+ activation_checkpointing: full"]["peak_bytes"]
    assert configured["peak_bytes"] == max(phase["peak"] for phase in configured["phases"])
    assert found["facts"]["smallest_fit"]
    # the remedy is a second configuration: nothing else changes, and it fits
    code, again = _plan("--config", "found/fits.yaml", "--device-gb", "2.2")
    assert code == 0
    assert again["facts"]["smallest_fit"] == []
    assert again["facts"]["parameters"] == found["facts"]["parameters"]
    assert again["facts"]["switched_on"] == found["facts"]["smallest_fit"]
    assert again["variants"][0]["with_margin_bytes"] <= 2.2 * 2**30


@pytest.mark.slow
def test_the_remedy_keeps_other_settings() -> None:
    sharding = {"prefetch": 2}
    _config({"class_path": "LongContextFSDPStrategy", "init_args": {"sharding": sharding}})
    code, found = _plan("--device-gb", "2.2", "--write", "fits.yaml")
    assert code == 1
    strategy, _ = read_words(["--config", "run.yaml", "--config", "fits.yaml"], "strategy")
    assert strategy.sharding.prefetch == 2
    assert settings_of(strategy, None, 4).switched_on() == found["facts"]["smallest_fit"]


@pytest.mark.slow
def test_length_devices_and_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    _config(devices="auto")
    code, found = _plan("--device-gb", "80", "--devices", "2", "--max-seq-len", "1K", "--write", "fits.yaml")
    assert code == 0
    assert (found["facts"]["tokens"], found["facts"]["world_size"]) == (1024, 2)
    assert yaml.safe_load(Path("fits.yaml").read_text()) == {}
    assert "Nothing has to be switched on." in capsys.readouterr().out
    assert not [note for note in found["notes"] if note.startswith("Left out")]


@pytest.mark.slow
def test_the_quickstart_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(ROOT / "examples/quickstart.yaml"), "--device-gb", "8", "--brief", "--json", "plan.json"]
    assert main(["plan", *words]) == 0
    found = json.loads(Path("plan.json").read_text())
    # all its MLPs are experts: tiles would be refused, so they are not among the switches, and a note says so
    assert not [variant["name"] for variant in found["variants"] if "tiled_mlp" in variant["name"]]
    assert "Left out: `tiled_mlp`, which finds nothing to act on in this model." in found["notes"]


@pytest.mark.slow
def test_longest_rows() -> None:
    _config()
    assert main(["plan", "--config", "run.yaml", "--device-gb", "2.5", "--json", "plan.json"]) in (0, 1)
    found = {entry["name"]: entry for entry in json.loads(Path("plan.json").read_text())["variants"]}
    longest = [found[name]["longest_tokens"] for name in ("as configured", "+ activation_checkpointing: full")]
    assert 0 < longest[0] < longest[1] < found["+ all of them"]["longest_tokens"]


@pytest.mark.slow
def test_what_cannot_be_planned_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _config()
    assert "`--device-gb` must be given" in _refused(capsys)
    assert "Did you mean --max-seq-len?" in _refused(capsys, "--device-gb", "80", "--max-seq-lenn", "1K")
    assert "`--device-gb` must be a number of GiB" in _refused(capsys, "--device-gb", "many")
    assert "`--max-seq-len` must be" in (text := _refused(capsys, "--device-gb", "80", "--max-seq-len", "0"))
    assert "got '0'" in text
    assert "`--plot` must name a .png" in _refused(capsys, "--device-gb", "80", "--plot", "plan.bmp")
    _config(devices="auto")
    assert "`trainer.devices` must be a number" in _refused(capsys, "--device-gb", "80")
    _config("ddp")
    assert "must be LongContextFSDPStrategy, but got ddp" in _refused(capsys, "--device-gb", "80")
    _config({"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 3}})
    assert "must divide the number of processes" in _refused(capsys, "--device-gb", "80")


def test_nobody_waits_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search simulates dozens of steps without another word: those are counted, every few seconds."""
    told: list[str] = []
    progress = command._Progress(told.append)
    progress.begin("as configured (1 of 3)")
    progress.simulated()
    assert told == ["Simulating: as configured (1 of 3)."]
    monkeypatch.setattr(command, "_SILENCE", 0.0)
    progress.simulated()
    assert told[1:] == ["  ... 2 steps simulated so far"]


@pytest.mark.parametrize(
    ("switches", "write", "said"),
    [
        ([], None, "Next: `longctx check --config a.yaml --device-gb 80`"),
        (None, None, "Next: a shorter row"),
        (["full"], None, "with `--write fits.yaml`, then `longctx fit --config a.yaml --config fits.yaml`"),
        (["full"], Path("b.yaml"), "Next: `longctx fit --config a.yaml --config b.yaml`"),
    ],
)
def test_what_to_do_with_a_plan(switches: Any, write: Path | None, said: str) -> None:
    assert said in command._next(["--config", "a.yaml"], PlanOptions(80.0, write=write), switches)


def test_the_next_command_is_of_what_was_planned() -> None:
    options = PlanOptions(80, devices=8, max_seq_len=2**20, write=Path("fits.yaml"))
    given = "--config run.yaml --trainer.devices=8 --data.max_seq_len=1048576"
    words = ["--config", "run.yaml"]
    assert command._next(words, options, []).startswith(f"Next: `longctx check {given} --device-gb 80`")
    (switch, *_) = next_switches(MemorySettings())
    assert command._next(words, options, [switch]).startswith(f"Next: `longctx fit {given} --config fits.yaml`")


def test_sizes_that_the_heads_of_ones_own_module_forbid_are_no_switches() -> None:
    module = own_shapes(OwnModule)  # four heads, which no `config` tells
    run = Run(module, settings_of(LongContextFSDPStrategy(), module, 8), Step(512), 8, "OwnModule")
    report, switches = command.plan(run, PlanOptions(1000, brief=True))
    names = [variant.name for variant in report.variants]
    assert [name for name in names if "parallel" in name] == [f"+ sequence_parallel_size: {size}" for size in (2, 4)]
    assert (names[-1], switches) == ("+ all of them", [])
    assert not [note for note in report.notes if "query head" in note], "their number is not known"
