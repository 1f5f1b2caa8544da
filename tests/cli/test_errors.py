"""Mistakes: one line with what to do, exit code 2, no traceback, and nothing started."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx import cli
from lightning_longctx.cli import COMMANDS, TOOLS, main
from lightning_longctx.cli.explain import explain
from lightning_longctx.cli.schema import Place
from tests.cli.test_app import TOYS

OURS: dict[str, Any] = {
    "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1},
    "model": {"config": "tiny-qwen3-moe"},
    "data": {"sources": {"a": "texts/*.txt"}},
}


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return config


def refused(config: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str, command: str = "fit") -> str:
    """Run the command line, which must refuse in one line; return the line."""
    capsys.readouterr()
    assert main([command, f"--config={yaml.safe_dump(config)}", *flags]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("INFO")]
    assert len(lines) == 1
    assert lines[0].startswith("longctx: error: ")
    return lines[0]


# -- wrong keys -------------------------------------------------------------------------------------------------------

WRONG_KEYS = [
    ("trainer.max_step", 3, "Did you mean `trainer.max_steps`?"),
    ("trainr", {"max_steps": 3}, "Did you mean `trainer`?"),
    ("trainer.max_seq_len", 3, "Did you mean `data.max_seq_len`?"),
    ("data.max_seqlen", 3, "Did you mean `data.max_seq_len`?"),
    ("data.loading.num_worker", 1, "Did you mean `data.loading.num_workers`?"),
    ("data.packing.long_documents", "split", "Did you mean `data.packing.long_document`?"),
    ("data.sources.a", {"path": "texts/*.txt", "weigth": 1}, "Did you mean 'weight'?"),
    ("model.optimzer", {"lr": 1}, "Did you mean `model.optimizer`?"),
    ("model.optimizer.learning_rat", 1, "must be a setting of OptimizerSettings"),
    ("model.config_overrides", {"rope_thet": 1}, "Did you mean `rope_theta`?"),
    (
        "trainer.strategy",
        {"class_path": "LongContextFSDPStrategy", "init_args": {"blocks": ["Block"]}},
        "Did you mean `trainer.strategy.sharding.blocks`?",
    ),
]


@pytest.mark.parametrize(("key", "value", "said"), WRONG_KEYS)
def test_wrong_key_in_a_file(key: str, value: Any, said: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(changed(OURS, key, value), capsys)


@pytest.mark.parametrize(("key", "value", "said"), [case for case in WRONG_KEYS if not isinstance(case[1], dict)])
def test_wrong_key_as_flag(key: str, value: Any, said: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(OURS, capsys, f"--{key}={value}")
    assert said in line
    assert f"`{key}`" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.init_args.widht", 3, "`model.widht` must be a setting of ToyModel"),
        ("model.init_args.optimizer.lrr", 3, "Did you mean `model.optimizer.lr`?"),
        ("trainer.strategy", {"class_path": "tests.cli.toys.ToyStrategy", "init_args": {"sp_size": 2}}, "sequence_p"),
        ("trainer.callbacks", [{"class_path": "EarlyStopping", "init_args": {"monitr": "x"}}], "callbacks[0].monitor`"),
    ],
)
def test_wrong_key_of_a_class(key: str, value: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(changed(TOYS, key, value), capsys)


def test_settings_without_their_class(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(changed(TOYS, "trainer.strategy", {"sequence_parallel_size": 2}), capsys)
    assert "Write `trainer.strategy: {class_path: ..., init_args: {...}}`." in line


# -- wrong classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.strategy", "LongContextFSDPStrateg", "Did you mean `LongContextFSDPStrategy`?"),
        ("trainer.strategy", "longctx_fsd", "Did you mean `longctx_fsdp`?"),
        ("trainer.strategy", {"class_path": "LongContextFSDP"}, "Did you mean `LongContextFSDPStrategy`?"),
        ("trainer.callbacks", ["TrainingMetrics", "ExactTokenMeen"], "`trainer.callbacks[1]` must name a Callback"),
        ("trainer.callbacks", "EarlyStoping", "Did you mean `EarlyStopping`?"),
        ("trainer.logger", "CSVLoger", "Did you mean `CSVLogger`?"),
        ("trainer.callbacks", ["LossByChannel"], "Did you mean `ChannelLoss`?"),
        ("trainer.callbacks", ["Foo"], "This package has: AsyncDCPCheckpoint, ChannelLoss, ExactTokenMean, "),
        ("model", {"class_path": "tests.cli.toys.ToyModl"}, "which cannot be imported"),
        ("data", {"class_path": "no_such_package.Data"}, "which cannot be imported"),
        ("model", {"class_path": "tests.cli.toys.Unrelated"}, "model"),
    ],
)
def test_wrong_class(key: str, value: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(changed(TOYS, key, value), capsys)


# -- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--trainer.max_steps=many", "`trainer.max_steps` must be of type int, but got many"),
        ("--trainer.precision=bf16-tru", "'bf16-true'"),
        ("--trainer.accelerator=cpuu", "invalid accelerator name"),
        ("--trainer.devices=0", "`Trainer(devices='0')` value is not a valid input"),
        ("--trainer.devices=two", "`devices` selected with `CPUAccelerator` should be an int > 0"),
        ("more.yaml", "unrecognized arguments: more.yaml. Did you mean `longctx fit --config more.yaml`?"),
        ("--data.max_seq_len=4Q", "`data.max_seq_len` must be a number of tokens, but got '4Q'. Write 4096"),
        ("--data.max_seq_len=0.5", "must be a whole positive number of tokens, but got '0.5'"),
        ("--data.tokenizer=byte", "Did you mean 'bytes'?"),
        ("--model.config=tiny-qwen", "Did you mean `tiny-qwen3`?"),
        ("--model.schedule.kind=cosin", "must be one of 'constant', 'linear', 'cosine'"),
        ("--model.optimizer.lr=-1", "optimizer.lr` must be positive, but got -1.0"),
        ("--ckpt_path=no/such.ckpt", "`ckpt_path` must exist, but got 'no/such.ckpt'"),
        ("--data.sources.b=no/such/*.txt", "`data.sources.b`"),
        ("--data.sources=texts/plain.txt", "`data.sources` must be of type dict, but got texts/plain.txt"),
        ("--data.packing.long_document=splitt", "'truncate', 'drop', but got 'splitt'"),
        ("--optimizer=SGD", "CausalLMModule, which makes them later. Leave it out. Its own one is set under"),
        ("--ckpt_path=texts/0.txt", "`texts/0.txt` must be a checkpoint that can be read, but got "),
    ],
)
def test_wrong_value(flag: str, said: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts/plain.txt").write_text("A text that jsonargparse reads where a mapping goes.")
    assert said in refused(OURS, capsys, flag)


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_the_best_of_no_checkpoint(command: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(OURS, "trainer.callbacks", ["AsyncDCPCheckpoint"])
    said = refused(config, capsys, "--ckpt_path=best", command=command)
    assert "`ckpt_path` must find a checkpoint, but got `best`, and none in " in said


@pytest.mark.parametrize("config", [{}, {"data": {"max_seq_len": 64}}])
def test_missing_sources(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(config, capsys)
    assert said.endswith(
        "`data.sources` must be given. Add it to the file of `--config`; `longctx init` has files to start from."
    )


def test_a_package_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    assert "wandb" in refused(changed(TOYS, "trainer.logger", "WandbLogger"), capsys)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lightning_longctx.integrations.causal_lm", raising=False)
    assert "pip install 'lightning-longctx[hf]'" in refused(OURS, capsys)
    assert main(["fit", f"--config={yaml.safe_dump(TOYS)}", "--trainer.max_steps=1"]) == 0


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "sp_size", "flags", "said"),
    [
        (3, 2, [], "but got 2 for 3 processes"),
        (1, 2, [], "but got 2 for 1 process"),
        (2, 2, ["--data.max_seq_len=4095"], "sequence_parallel_size = 2"),
        (8, 8, [], "but got 8 for 4 heads (4 / 8 leaves 4)"),
        (4, 2, ["--data.global_batch_tokens=12K"], "4,096 tokens x 2 data-parallel ranks = 8,192"),
    ],
)
def test_sizes_that_cannot_be_divided(  # noqa: PLR0913
    devices: int, sp_size: int, flags: list[str], said: str, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": sp_size}}
    config = changed(changed(OURS, "trainer.strategy", strategy), "trainer.devices", devices)
    assert said in refused(config, capsys, *flags)


def test_sizes_of_a_foreign_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"class_path": "tests.cli.toys.ToyStrategy", "init_args": {"sequence_parallel_size": 2}}
    line = refused(changed(TOYS, "trainer.strategy", strategy), capsys)
    assert "2 for 1 device x 1 node = 1 process. Use one of [1]" in line


# -- errors of constructors -------------------------------------------------------------------------------------------


def test_our_error_in_a_nested_constructor(capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(TOYS, "trainer.callbacks", ["tests.cli.toys.BrokenCallback"])
    assert refused(config, capsys).endswith(
        "`callbacks.broken` must never be built, but got configuration. Leave it out."
    )


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            {"class_path": "FixedBufferPolicy", "init_args": {"size": 0}},
            "`buffer_policy.size` must be a positive integer",
        ),
        (
            {"class_path": "AdaptiveBufferPolicy", "init_args": {"fill_target": 2}},
            "`buffer_policy.fill_target` must be",
        ),
    ],
)
def test_a_refusal_of_a_policy_is_not_lost(
    policy: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(changed(OURS, "data.sources", {"a": "package-metadata"}), "data.buffer_policy", policy)
    assert said in refused(config, capsys)


def test_a_bug_of_the_user_keeps_its_traceback() -> None:
    callback = {"class_path": "tests.cli.toys.BrokenCallback", "init_args": {"how": "bug"}}
    with pytest.raises(ValueError, match=r"^a bug of the user$"):
        main(["fit", f"--config={yaml.safe_dump(changed(TOYS, 'trainer.callbacks', [callback]))}"])


# -- before anything is imported --------------------------------------------------------------------------------------


def test_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fot"]) == 2
    assert capsys.readouterr().err == "longctx: error: unknown command 'fot'. Did you mean `fit`?\n"
    assert main(["--config", "run.yaml"]) == 2
    assert "The command comes first: `longctx fit --config ...`. Commands: fit, " in capsys.readouterr().err
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "longctx: error: unknown command 'train'. Did you mean `fit`?\n"
    for word in ("xyzzy", "foo"):
        assert main([word]) == 2
        said = f"longctx: error: unknown command {word!r}. Commands: {', '.join([*COMMANDS, *TOOLS])}.\n"
        assert capsys.readouterr().err == said


def test_ctrl_c_outside_of_training_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "\nlongctx: stopped by Ctrl-C.\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "", "one voice for each machine"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "longctx init quickstart > quickstart.yaml" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert re.match(r"longctx \S+", capsys.readouterr().out.splitlines()[-1])


def test_other_local_ranks_are_silent_about_the_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["fit", "--config=missing.yaml"]) == 2
    assert capsys.readouterr().err == ""


def test_the_message_itself_where_no_key_is_wrong() -> None:
    message = 'Parser key "data":\n  - Problem with given class_path \'a.B\':\n      Parser key "x":\n        odd value'
    assert str(explain(message, {"data": {"x": 1}}, {"data": Place()}, "fit")) == "`data.x` odd value"
