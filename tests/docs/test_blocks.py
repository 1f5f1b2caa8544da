"""Fenced blocks of README.md, CONTRIBUTING.md and docs/: Python and YAML run, commands exist, none is left out."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import COMMANDS, load_config, main
from lightning_longctx.cli.tools import TOOLS
from tests.contracts.pages import DOCS, Block, all_blocks
from tests.contracts.source import ROOT
from tests.docs.fragments import AROUND, whole
from tests.docs.small import SECTIONS, as_configuration, shrink, write_files

BLOCKS = all_blocks()
#: What is tested of a block in each language; a block in another one is a mistake.
SHELL = {"bash", "sh"}
LANGUAGES = {"python", "pycon", "yaml", "text", "", *SHELL}

#: Blocks that do not train here, with the reason.
BUILT_ONLY = {
    "docs/channel_loss.md: trainer:\n  callbacks: [{class_path": "ids in own batches: test_channel_foreign.py",
    "docs/channel_loss.md: callbacks: [{class_path: ChannelLoss": "a module without per_token_loss: test_loss_hook.py",
}
#: YAML that is not of this package, with the reason.
FOREIGN = {
    "docs/migration_veomni.md: model: {model_path: Llama-3.1-8B}": "a configuration of VeOmni, beside ours",
}


def _of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def _listed(block: Block, names: Any) -> bool:
    return any(f"{block.page}: {block.text}".startswith(name) for name in names)


def each(*languages: str) -> pytest.MarkDecorator:
    """Run a test for each block in these languages."""
    found = _of(*languages)
    return pytest.mark.parametrize("block", found, ids=[f"{block.page}:{block.line}" for block in found])


def test_blocks_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/strategy.md"} <= {block.page for block in BLOCKS}
    assert len(_of("python")) > 15
    assert len(_of("yaml")) > 20


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.page}:{block.line}" for block in BLOCKS])
def test_each_block_says_what_it_is(block: Block) -> None:
    """A block that is Python, YAML or a command and does not say so would never be tested."""
    assert block.language in LANGUAGES
    if block.language in {"", "text"}:
        assert not re.search(r"^(from \S+ import|import \S+|def |class |>>> )", block.text, re.MULTILINE), "Python"
        assert not set(re.findall(r"^(\w+):(?: |$)", block.text, re.MULTILINE)) & SECTIONS or block.name in FOREIGN
        commands = [line for line in block.text.splitlines() if line.startswith("longctx ") and "error:" not in line]
        assert all("|" in line or "[" in line or " DIR" in line for line in commands), "usage, or else a command"


def test_lists_name_blocks_that_exist() -> None:
    for names in (AROUND, BUILT_ONLY, FOREIGN):
        stale = [name for name in names if not any(_listed(block, [name]) for block in BLOCKS)]
        assert stale == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@each("python")
def test_python_runs(block: Block) -> None:
    program = compile(whole(block), f"{block.page}:{block.line}", "exec")
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("page", sorted({block.page for block in _of("pycon")}))
def test_sessions_are_right(page: str) -> None:
    found = doctest.testfile(str(ROOT / page), module_relative=False)
    assert found.attempted
    assert found.failed == 0


@pytest.mark.slow
@each("yaml")
def test_yaml_runs(block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands it is read; small, it trains for two steps."""
    config = as_configuration(yaml.safe_load(block.text))
    load_config({**config, "data": {"sources": {"any": "any/*.txt"}, **config.get("data", {})}})
    if _listed(block, BUILT_ONLY):
        return
    small = shrink(config)
    write_files(small)
    Path("run.yaml").write_text(yaml.safe_dump(small))
    code = main(["fit", "--config", "run.yaml"])
    assert code == 0, capsys.readouterr().err


@each(*SHELL)
def test_commands_exist(block: Block) -> None:
    """Each command of ours is one, and so are its flags and the files of the repository that it names."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] == ["longctx"]:
                _check_command(words[1:])


def _check_command(words: list[str]) -> None:
    assert words[0] in {*COMMANDS, *TOOLS, "--version", "--help"}, words[0]
    missing = [word for word in words[1:] if word.startswith("examples/") and not (ROOT / word).exists()]
    assert missing == []
    own = DOCS / f"{words[0]}.md"
    page = (own if own.exists() else DOCS / "command_line.md").read_text() if words[0] in TOOLS else None
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--") and "." not in word]
    known = {"--config", "--print_config", "--print_layout", "--help", "--ckpt_path"}
    assert [flag for flag in flags if flag not in known and not (page and f"{flag}" in page)] == []
