"""``longctx checkpoint``: list, verify, export and prune, from disk alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_longctx import AsyncDCPCheckpoint, CheckpointOptions, DynamicBatchingDataModule, LongContextFSDPStrategy
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.export import export_checkpoint
from lightning_longctx.cli import main
from lightning_longctx.errors import CheckpointError
from lightning_longctx.integrations import CausalLMModule
from tests.callbacks.checkpoint_toy import Recorder, assert_same, fit
from tests.checkpoint.helpers import save, steps, writer


def _tool(*words: str | Path) -> int:
    return main(["checkpoint", *map(str, words)])


def _fill(folder: str | Path, *numbers: int) -> None:
    checkpoints = writer(Path(folder), keep=9)
    for number in numbers:
        save(checkpoints, number)


def test_list_shows_each_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    _fill("c", 5, 10)
    (Path("c") / "step-00000099-aaaaaaaa").mkdir()
    assert _tool("list", "c", "--json", "out/list.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["step", "content", "size", "ranks"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "5", "?"]
    assert "weights + optimizer" in lines[1]
    assert "COMMIT.json" in lines[3]
    rows = json.loads(Path("out/list.json").read_text())
    assert [row["resumable"] for row in rows] == [True, True, False]


def test_verify_finds_what_only_checksums_show(capsys: pytest.CaptureFixture[str]) -> None:
    _fill("c", 5, 10)
    assert _tool("verify", "c", "--deep") == 0
    file = scan("c")[0].path / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert _tool("verify", "c") == 0, "sizes are right"
    assert _tool("verify", "c", "--deep") == 1
    assert _tool("verify", scan("c")[1].path, "--deep") == 0
    assert "weights/__0_0.distcp has a wrong checksum" in capsys.readouterr().out


def test_prune_keeps_the_last_of_each_run() -> None:
    _fill("c", 1, 2, 3)
    _fill("c", 10, 11)
    assert _tool("prune", "c", "--keep-last", "1", "--dry-run") == 0
    assert len(steps(Path("c"))) == 5
    assert _tool("prune", "c", "--keep-last", "1") == 0
    assert steps(Path("c")) == [11, 3]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["list", "missing"], "no such folder"),
        (["list", "."], "no checkpoint"),
        (["export", "c"], "--output"),
        (["melt", "c"], "invalid choice"),
        (["export", "c", "--output", "c"], "must not exist yet"),
        (["prune", "c", "--keep-last", "0"], "`--keep-last` must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _fill("c", 1)
    assert _tool(*words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


# -- export ------------------------------------------------------------------------------------------------------------


def test_one_torch_file_loads_into_a_plain_module() -> None:
    trained = fit("c", 3, parts={"tied": True}, sp=1)["weights"]
    assert _tool("export", "c", "--to", "torch", "--output", "out/model.pt") == 0
    state = torch.load("out/model.pt")["state_dict"]
    for key, value in trained.items():
        assert torch.equal(state[key], value), key
    assert _tool("export", "c", "--to", "torch", "--output", "half.pt", "--dtype", "bfloat16") == 0
    assert torch.load("half.pt")["state_dict"]["head.weight"].dtype == torch.bfloat16


def test_a_stock_trainer_resumes_from_an_export() -> None:
    """Ours to stock Lightning and back: the same weights and optimizer on both sides."""
    saved = fit("c", 4, sp=1)
    assert _tool("export", "c", "--to", "lightning", "--output", "stock.ckpt") == 0
    module = Recorder()
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=4, enable_checkpointing=False, **settings)
    data = DynamicBatchingDataModule(sources={"a": [{"text": "words"}] * 120}, max_seq_len=64)
    state = torch.load("stock.ckpt", weights_only=True)
    state.pop("DynamicBatchingDataModule")
    torch.save(state, "stock.ckpt")
    trainer.fit(module, data, ckpt_path="stock.ckpt")
    names = {parameter: name for name, parameter in module.named_parameters()}
    loaded = {
        "step": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": module.state_dict(),
        "optimizer": {names[p]: entry for p, entry in trainer.optimizers[0].state.items()},
    }
    assert_same(loaded, saved)


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    """Two steps of a tiny Hugging Face model; its weights."""
    module = CausalLMModule(config="tiny-qwen3-moe")
    data = DynamicBatchingDataModule(sources={"a": [{"text": "some words " * 20}] * 20}, max_seq_len=256)
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    saving = AsyncDCPCheckpoint("c", options=CheckpointOptions(export_hf_at_end="at_end"))
    strategy = LongContextFSDPStrategy()
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, callbacks=[saving], **settings).fit(
        module, data
    )
    assert module.model is not None
    return {key: value.full_tensor().detach() for key, value in module.model.state_dict().items()}  # type: ignore[operator]


def test_hugging_face_loads_what_was_exported(trained: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    export_checkpoint(scan("c")[0].path, "sharded", "hf", shard_bytes=100_000)
    assert len(list(Path("sharded").glob("*.safetensors"))) > 2
    assert _tool("export", "c", "--to", "hf", "--output", "half", "--dtype", "bfloat16") == 0
    for folder in ("sharded", "at_end"):
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        loaded = model.state_dict()
        assert loaded.keys() == trained.keys()
        assert all(torch.equal(value, trained[key]) for key, value in loaded.items())
    assert json.loads(Path("half/config.json").read_text())["dtype"] == "bfloat16"
    # And back into a run, as anybody's model.
    module = CausalLMModule(pretrained="sharded")
    module.configure_model()


def test_weights_of_a_part_cannot_be_exported_as_a_model() -> None:
    fit("c", 2, parts={"frozen": True}, options={"trainable_only": True})
    with pytest.raises(CheckpointError, match="must hold all weights"):
        export_checkpoint(scan("c")[0].path, "out", "hf")


def test_damage_that_only_checksums_show_is_not_exported_or_loaded() -> None:
    """torchtitan#4011: a flipped bit was exported, and loaded by path, in silence."""
    fit("c", 2)
    checkpoint = scan("c")[0].path
    file = checkpoint / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="wrong checksum"):
        AsyncDCPCheckpoint.load_weights(checkpoint, Recorder())
    with pytest.raises(CheckpointError, match="wrong checksum"):
        fit("c", 3, ckpt_path=str(checkpoint))
    assert _tool("export", checkpoint, "--to", "hf", "--output", "out") == 2
    assert not Path("out").exists()


def test_a_checkpoint_without_its_record_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    _fill("c", 5)
    (checkpoint,) = scan("c")
    (checkpoint.path / "COMMIT.json").unlink()
    assert _tool("verify", checkpoint.path) == 1
    assert "COMMIT.json" in capsys.readouterr().out


class _Wrapped(pl.LightningModule):
    """Somebody's module around a Hugging Face model whose embedding and head are tied, with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return torch.as_tensor(self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_anybodys_module_around_a_hugging_face_model_is_exported() -> None:
    """It came without its configuration, under names that no model has, with the buffer among them."""
    from transformers import AutoModelForCausalLM

    module = _Wrapped()
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    loader = torch.utils.data.DataLoader([torch.arange(16)] * 4, batch_size=2)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[AsyncDCPCheckpoint("c")], **settings)
    trainer.fit(module, loader)
    with pytest.warns(UserWarning, match="seen"):
        export_checkpoint(scan("c")[0].path, "out", "hf")
    from safetensors import safe_open

    with safe_open("out/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    model, report = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(value, module.net.state_dict()[key]) for key, value in model.state_dict().items())
