"""What the user wrote: files and flags as one tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.cli.arguments import read_arguments
from lightning_longctx.errors import ConfigurationError


@pytest.mark.parametrize(
    ("words", "tree"),
    [
        (["--trainer.max_steps=3"], {"trainer": {"max_steps": 3}}),
        (["--trainer.max-steps", "3"], {"trainer": {"max_steps": 3}}),
        (["--trainer.max_steps", "-1", "--seed_everything=1"], {"trainer": {"max_steps": -1}, "seed_everything": 1}),
        (["--print_config", "--model.config=tiny"], {"print_config": None, "model": {"config": "tiny"}}),
        (["--data", "a.B", "--data.x=1"], {"data": {"class_path": "a.B", "init_args": {"x": 1}}}),
        (["--data.class_path=a.B", "--data.init_args.x=1"], {"data": {"class_path": "a.B", "init_args": {"x": 1}}}),
        (["--model.config=tiny", "--model.class_path=a.B"], {"model": {"class_path": "a.B"}}),
        (["--trainer.callbacks+=A", "--trainer.callbacks+=B"], {"trainer": {"callbacks": ["A", "B"]}}),
        (
            ["--trainer.callbacks+=A", "--trainer.callbacks.n=1"],
            {"trainer": {"callbacks": [{"class_path": "A", "init_args": {"n": 1}}]}},
        ),
        (['--config={"model": {"config": "tiny"}}'], {"model": {"config": "tiny"}}),
    ],
)
def test_flags_make_the_tree_of_a_file(words: list[str], tree: dict[str, Any]) -> None:
    assert read_arguments(words).tree == tree


def test_later_files_and_flags_win(write: Callable[..., str]) -> None:
    first = write({"trainer": {"max_steps": 1, "devices": 2}, "data": {"class_path": "a.B", "init_args": {"x": 1}}})
    second = write({"trainer": {"max_steps": 2}, "data": {"class_path": "c.D"}}, "more.yaml")
    found = read_arguments(["-c", first, "--config", second, "--trainer.devices=4"])
    assert found.tree == {"trainer": {"max_steps": 2, "devices": 4}, "data": {"class_path": "c.D"}}


def test_sections_with_settings_of_their_own_are_known(write: Callable[..., str]) -> None:
    name = write({"model": {"config": "tiny"}, "data": {"class_path": "a.B"}})
    assert read_arguments(["--config", name]).direct == {"model"}
    assert read_arguments(["--config", name, "--model=a.B"]).direct == {"model"}
    assert read_arguments(["--model=a.B", "--data.x=1"]).direct == {"data"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("trainer: {max_steps: 1\nmodel: 2", "run.yaml: line 2"),
        ("- trainer", "with a list"),
        ("", "with a NoneType"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(write: Callable[..., str], content: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_arguments(["--config", write(content)])


def test_a_missing_file_is_answered_with_the_nearest(write: Callable[..., str]) -> None:
    write({}, "quickstart.yaml")
    with pytest.raises(ConfigurationError, match=r"'quikstart.yml'. Did you mean `quickstart.yaml`"):
        read_arguments(["--config", "quikstart.yml"])
    with pytest.raises(ConfigurationError, match="must be a file that exists"):
        read_arguments(["--config", "no/such/folder/run.yaml"])


def test_a_file_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text("trainer: {}")

    def refuse(path: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)  # whoever runs the tests may read everything
    with pytest.raises(ConfigurationError, match=r"a file that can be read, but got .*Permission denied: 'run.yaml'"):
        read_arguments(["--config", "run.yaml"])
