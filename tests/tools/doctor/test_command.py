"""The whole command, as it is typed: real processes, verdicts, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import main
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.doctor.launch import run_world
from lightning_longctx.tools.doctor.report import parity_line
from tests.contracts.source import ROOT


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes import the modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def doctor(model: Any, *words: str) -> tuple[int, dict[str, Any]]:
    """Run; return the exit code and the JSON."""
    content: dict[str, Any] = {"trainer": {"accelerator": "gpu", "devices": 8}, "model": model}  # no GPU is asked for
    if "class_path" not in model:
        content["data"] = {"sources": {"code": "python-stdlib"}}  # never read
    Path("run.yaml").write_text(yaml.safe_dump(content))
    code = main(["doctor", "--config", "run.yaml", "--json", "found.json", *words])
    report = Path("runs/doctor/doctor.json")
    assert report.read_text() == Path("found.json").read_text()
    assert parity_line(report, json.loads(report.read_text())["facts"]["model"])
    return code, json.loads(report.read_text())


def verdicts(found: dict[str, Any]) -> dict[tuple[str, int, int], str]:
    return {(f["check"], f["world_size"], f["sp_size"]): f["verdict"] for f in found["findings"]}


def own(name: str) -> dict[str, str]:
    return {"class_path": f"tests.tools.doctor.modules.{name}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_own_module_in_real_processes(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(own("Shifts"), "--processes", "2", "--layouts", "3")
    text = capsys.readouterr().out
    assert code == 1, text
    assert text.startswith(Path("runs/doctor/doctor.md").read_text())
    seen = verdicts(found)
    checks = {"loss", "gradients", "evaluation", "isolation", "causality"}
    assert set(seen) == {(c, w, s) for c in checks for w, s in ((1, 1), (2, 1), (2, 2))}
    assert {verdict for (_, _, sp), verdict in seen.items() if sp == 1} == {"ok"}
    fault = next(f for f in found["findings"] if f["check"] == "gradients" and f["verdict"] == "fault")
    assert fault["sp_size"] == 2
    assert f"fault: gradients {fault['error']:.1e} at `{fault['where']}`" in text
    assert found["facts"]["reference"].startswith("the module's own step on one document")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "sp", "message"),
    [("Forgets", 2, "must exchange sequence for heads"), ("LocalMean", 1, r"per_token_loss.sum\(\) / loss_divisor")],
)
def test_what_training_refuses_is_a_fault(name: str, sp: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(own(name), "--processes", "2", "--layouts", "3")
    text = capsys.readouterr().out
    assert code == 1, text
    refused = [f for f in found["findings"] if f["check"] == "refused"]
    assert {f["sp_size"] for f in refused} == {sp}
    assert all(re.search(message, f["note"]) for f in refused)
    assert re.search(rf"- fault: refused \(\d process(es)?, sequence_parallel_size {sp}, .*{message}", text)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", [None, {"router_aux_loss_coef": 0.1}])
def test_a_mixture_of_experts_is_found_right_in_all_worlds(overrides: dict[str, Any] | None) -> None:
    words = ["--layouts", "6"] if overrides is None else ["--layouts", "3", "--processes", "2"]
    code, found = doctor({"config": "tiny-qwen3-moe", "config_overrides": overrides}, *words)
    assert code == 0, found
    assert set(verdicts(found).values()) == {"ok"}
    assert found["facts"]["reference"] == "transformers with eager attention, one document at a time"
    if overrides is None:
        assert {(w, s) for _, w, s in verdicts(found)} == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
        assert verdicts(found)["resume", 4, 2] == "ok"


def test_manual_optimization_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump({"model": own("Manual")}))
    assert main(["doctor", "--config", "run.yaml"]) == 2
    assert "automatic optimization" in capsys.readouterr().err


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_process_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"rank \d of 2.*exit code 2.*nothing_there.yaml"):
        run_world(["fit", "--config", "nothing_there.yaml"], 2, tmp_path, 60)


@pytest.mark.distributed
def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no end within 0.2 s"):
        run_world(["--help"], 1, tmp_path, 0.2)
