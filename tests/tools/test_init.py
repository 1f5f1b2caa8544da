"""Recipes by name: what is listed, printed and suggested."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_longctx.cli import main
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.init import find_recipe, recipes, summary_of
from tests.contracts.source import ROOT


def test_a_recipe_is_printed_as_it_is_but_for_the_folder_of_a_clone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "quickstart"]) == 0
    printed = capsys.readouterr().out
    text = (ROOT / "examples" / "quickstart.yaml").read_text()
    assert printed == text.replace("examples/", "")
    assert "longctx fit --config quickstart.yaml" in printed
    assert yaml.safe_load(printed) == yaml.safe_load(text)


@pytest.mark.parametrize("name", recipes())
def test_none_names_a_folder_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 0
    assert "examples/" not in capsys.readouterr().out


def test_all_configurations_and_scripts_of_the_examples_are_there() -> None:
    expected = {path.name for path in (ROOT / "examples").rglob("*") if path.suffix in (".yaml", ".py", ".sh")}
    assert {path.name for path in recipes().values()} == expected
    assert {"quickstart", "own_model.py", "torchrun.sh"} <= recipes().keys()


@pytest.mark.parametrize("path", recipes().values(), ids=recipes())
def test_each_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    assert len(summary_of(path)) > 20
    assert summary_of(path)[0] not in "#\"'"


def test_without_a_name_all_are_listed_where_a_redirection_does_not_hide_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if line.split()[:1] == ["quickstart"]]
    assert "Mixture-of-Experts" in line
    assert main(["init", "--help"]) == 0
    assert line in capsys.readouterr().out


def test_a_wrong_name_gets_the_list_and_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "quikstart"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "recipes:" in said.err
    assert said.err.splitlines()[-1].endswith("but got 'quikstart'. Did you mean `longctx init quickstart`?")
    assert main(["init", "quickstart", "now"]) == 2
    assert "must get one name" in capsys.readouterr().err


KNOWN = {name: Path(name) for name in ("chat", "long1m", "pretrain_512k", "moe", "moe_wide", "own_model.py")}


@pytest.mark.parametrize(
    ("name", "found"),
    [("chat", "chat"), ("chat.yaml", "chat"), ("pretrain", "pretrain_512k"), ("moe", "moe"), ("own", "own_model.py")],
)
def test_a_name_its_file_or_its_beginning(name: str, found: str) -> None:
    assert find_recipe(name, KNOWN) == Path(found)


@pytest.mark.parametrize(
    ("name", "hint"), [("mo", "init moe`"), ("pretain", "init pretrain_512k`"), ("zzz", "are: chat")]
)
def test_what_is_no_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        find_recipe(name, KNOWN)


def test_the_line_of_a_script_is_that_of_its_text(tmp_path: Path) -> None:
    for content in (
        "#!/bin/sh\n#\n# Start it.\n",
        '"""Start it."""\n',
        '"""\nStart it.\n"""\n',
        "\n# Start it.\nx: 1\n",
    ):
        path = tmp_path / "file"
        path.write_text(content)
        assert summary_of(path) == "Start it."
