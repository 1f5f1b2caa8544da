"""What a run writes beside its checkpoints: nothing over a file of the user's, and nothing where it cannot."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import main
from tests.cli.test_app import TOYS, with_trainer

OWN = f"# why this learning rate: see the notes\n{yaml.safe_dump(with_trainer(logger=False))}"


def fit(config: str, **settings: Any) -> int:
    flags = [f"--trainer.{key}={value}" for key, value in settings.items()]
    return main(["fit", "--config", config, *flags])


def test_a_configuration_that_somebody_wrote_is_not_written_over() -> None:
    Path("config.yaml").write_text(OWN)
    with pytest.warns(UserWarning, match=r"was not saved: `.*config.yaml` is a file of yours\. Set `trainer.logger`"):
        assert fit("config.yaml") == 0
    assert Path("config.yaml").read_text() == OWN


def test_nor_one_that_another_file_stands_beside() -> None:
    Path("run.yaml").write_text(OWN)
    Path("config.yaml").write_text("mine: true\n")
    with pytest.warns(UserWarning, match="is a file of yours"):
        assert fit("run.yaml") == 0
    assert Path("config.yaml").read_text() == "mine: true\n"


def test_one_that_a_run_saved_is_kept_where_it_is_what_was_read() -> None:
    Path("run.yaml").write_text(OWN)
    assert fit("run.yaml", max_steps=1) == 0
    saved = Path("config.yaml").read_text()
    assert yaml.safe_load(saved)["trainer"]["max_steps"] == 1
    edited = saved + "# a note\n"
    Path("config.yaml").write_text(edited)
    with pytest.warns(UserWarning, match="is a file of yours"):
        assert fit("config.yaml", max_steps=2) == 0
    assert Path("config.yaml").read_text() == edited
    assert fit("run.yaml", max_steps=2) == 0
    assert yaml.safe_load(Path("config.yaml").read_text())["trainer"]["max_steps"] == 2, "a run's own is replaced"


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = os.access  # whoever runs the tests may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path.cwd() and allowed(path, mode))
    Path("run.yaml").write_text(yaml.safe_dump(copy.deepcopy(TOYS)))
    assert fit("run.yaml") == 2
    assert f"`trainer.logger` must be in a folder that can be written to, but got {Path.cwd()}." in (
        capsys.readouterr().err
    )
    assert fit("run.yaml", logger="false") == 2
    assert "`trainer.default_root_dir` must be" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["init", "quickstart"], ["init", "--help"]])
def test_a_full_disk_is_told_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:  # takes what is written, and fails when that is to be kept
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert main(words) == 2
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # or closing it fails again
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "could not be written: No space left on device. Free some space" in said


def test_other_errors_of_files_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise FileNotFoundError(2, "No such file or directory", "mine.txt")

    monkeypatch.setattr("lightning_longctx.cli._run", fail)
    with pytest.raises(FileNotFoundError):
        main(["fit"])
