"""``CausalLMModule`` in a Trainer: set-up checks, weights, optimizer and schedule, tokenizer, checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lightning_longctx.callbacks import MaxTokens
from lightning_longctx.callbacks.flops import model_flops
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import CausalLMModule, OptimizerSettings, ScheduleSettings
from tests.helpers.trainers import quiet_trainer
from tests.integrations.rows import make_documents, pack

_TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 8}


class Rows(LightningDataModule):
    """Two rows, with the attributes that the module looks at."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def train_dataloader(self) -> Any:
        rows = [pack(make_documents(7, 12, 5, vocabulary=256, seed=seed)) for seed in range(2)]
        return DataLoader(rows, batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_module(
    preset: str = "tiny-llama", overrides: dict[str, Any] | None = None, **arguments: Any
) -> CausalLMModule:
    return CausalLMModule(config=preset, config_overrides=_TINY | (overrides or {}), **arguments)


def make_trainer(**arguments: Any) -> Trainer:
    return quiet_trainer(**({"max_steps": 2} | arguments))


def weights(module: CausalLMModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_trainer_runs_all_stages(caplog: pytest.LogCaptureFixture) -> None:
    module, trainer = make_module(), make_trainer()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(module, datamodule=Rows())
    before = weights(module)
    assert trainer.global_step == 2
    trainer.validate(module, datamodule=Rows(), verbose=False)
    trainer.test(module, datamodule=Rows(), verbose=False)
    scored = trainer.predict(module, datamodule=Rows())
    assert [out["per_token_loss"].shape for out in scored] == [(1, 24), (1, 24)]
    count = sum(parameter.numel() for parameter in module.parameters())
    assert [text for text in caplog.messages if "parameters" in text] == [f"LlamaForCausalLM: {count:,} parameters"]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_weights_come_from_their_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    made = []
    for state, seed in ((1, None), (2, None), (1, 0), (1, 5)):
        torch.manual_seed(state)
        module = make_module(init_seed=seed)
        module.configure_model()
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(state))  # the state is untouched
        made.append(module.model.lm_head.weight)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], made[3])
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    module = make_module()
    module.configure_model()
    assert torch.equal(module.model.lm_head.weight, made[3])


def test_configure_model_makes_weights_once() -> None:
    module = make_module()
    assert list(module.parameters()) == []
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("overrides", "attributes", "message"),
    [
        ({"max_position_embeddings": 4096}, {"max_seq_len": 8192}, "config_overrides: {rope_theta: "),
        ({}, {"vocab_size": 265}, "vocab_size: 265"),
    ],
)
def test_data_that_the_model_cannot_take_is_refused(
    overrides: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    module = make_module(overrides=overrides)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(module, datamodule=Rows(**attributes))
    assert module.model is None  # before any weight


def test_data_that_fits_is_taken() -> None:
    module = make_module(overrides={"max_position_embeddings": 8192})
    make_trainer().fit(module, datamodule=Rows(max_seq_len=8192, vocab_size=None))


class _Horizon(Callback):
    token_horizon = 10 * 100


def learning_rates(schedule: ScheduleSettings, steps: int, data: Rows, **arguments: Any) -> list[float]:
    rates: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    callbacks = [*arguments.pop("callbacks", []), Watch()]
    module = make_module(optimizer=OptimizerSettings(lr=1.0e-3), schedule=schedule)
    arguments = {"max_steps": steps, "max_epochs": -1, "callbacks": callbacks} | arguments
    make_trainer(**arguments).fit(module, datamodule=data)
    return rates


def test_schedule_over_steps_ends_at_max_steps() -> None:
    # the rate after update n is that of update n + 1
    rates = learning_rates(ScheduleSettings(kind="linear", warmup_steps=2, min_lr_ratio=0.0), 6, Rows())
    assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedule_over_tokens_counts_the_budget_of_a_step(accumulate: int) -> None:
    settings = ScheduleSettings(kind="linear", over="tokens", total_tokens=400 * accumulate, min_lr_ratio=0.0)
    data = Rows(max_tokens_per_batch=100)
    rates = learning_rates(settings, 4, data, accumulate_grad_batches=accumulate)
    assert rates[accumulate - 1 :: accumulate] == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.0])


def test_horizon_of_a_callback_counts_for_tokens() -> None:
    settings = ScheduleSettings(kind="linear", over="tokens", min_lr_ratio=0.0)
    rates = learning_rates(settings, 2, Rows(max_tokens_per_batch=100), callbacks=[_Horizon()])
    assert rates == pytest.approx([0.9e-3, 0.8e-3])


def test_max_tokens_ends_a_decay_and_the_run() -> None:
    settings = ScheduleSettings(kind="linear", over="tokens", min_lr_ratio=0.0)
    rows = Rows(max_tokens_per_batch=24)
    rates = learning_rates(settings, -1, rows, callbacks=[MaxTokens(source=96)], max_epochs=-1)
    assert rates == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.0])


def test_accumulation_that_changes_between_epochs_is_counted() -> None:
    settings = ScheduleSettings(kind="linear", over="tokens", total_tokens=1000, min_lr_ratio=0.0)
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 2})]
    rates = learning_rates(settings, 4, Rows(max_tokens_per_batch=100), callbacks=callbacks)
    # Two steps of one row, then two of both; the rate changes with the second row of a step.
    assert rates == pytest.approx([0.9e-3, 0.8e-3, 0.8e-3, 0.6e-3, 0.6e-3, 0.4e-3])


def test_a_resume_with_another_accumulation_goes_on_at_its_tokens(tmp_path: Path) -> None:
    settings = ScheduleSettings(kind="linear", over="tokens", total_tokens=1000, min_lr_ratio=0.0)
    module, data = (
        make_module(optimizer=OptimizerSettings(lr=1.0e-3), schedule=settings),
        Rows(max_tokens_per_batch=100),
    )
    trainer = make_trainer(max_steps=2, max_epochs=1, accumulate_grad_batches=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)["lr_schedulers"][0]
    assert state["done"] == 200
    rates: list[float] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    again = make_module(optimizer=OptimizerSettings(lr=1.0e-3), schedule=settings)
    trainer = make_trainer(max_steps=4, max_epochs=-1, accumulate_grad_batches=2, callbacks=[Watch()])
    trainer.fit(again, datamodule=data, ckpt_path=tmp_path / "run.ckpt")
    assert rates == pytest.approx([0.8e-3, 0.6e-3])


def test_horizon_in_tokens_follows_from_max_steps() -> None:
    rates = learning_rates(
        ScheduleSettings(kind="linear", over="tokens", min_lr_ratio=0.0), 4, Rows(max_tokens_per_batch=7)
    )
    assert rates == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3, 0.0])


@pytest.mark.parametrize(
    ("schedule", "data", "message"),
    [
        (ScheduleSettings(kind="cosine"), Rows(), "total_steps"),
        (ScheduleSettings(kind="cosine", over="tokens"), Rows(max_tokens_per_batch=7), "total_tokens"),
        (ScheduleSettings(over="tokens", warmup_tokens=10), Rows(), "max_tokens_per_batch"),
    ],
)
def test_schedule_without_an_end_or_a_measure_is_refused(schedule: ScheduleSettings, data: Rows, message: str) -> None:
    module = make_module(schedule=schedule)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(max_steps=-1, max_epochs=1).fit(module, datamodule=data)
    assert module.model is None


def test_warmup_longer_than_the_run_is_refused() -> None:
    module = make_module(schedule=ScheduleSettings(kind="cosine", warmup_steps=2))
    with pytest.raises(ConfigurationError, match="after the warm-up"):
        make_trainer(max_steps=2).fit(module, datamodule=Rows())


def test_pretrained_directory_gives_its_weights(tmp_path: Path) -> None:
    source = make_module(init_seed=3)
    source.configure_model()
    source.model.save_pretrained(tmp_path)
    module = CausalLMModule(pretrained=str(tmp_path), config_overrides={"rope_theta": 5.0e7})
    module.configure_model()
    assert module.model.config.rope_parameters["rope_theta"] == 5.0e7
    assert module.model.training
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    # a changed base must reach the rotary table, not only the configuration
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(module.model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("change", ["missing", "unused"])
def test_incomplete_weights_are_told(tmp_path: Path, change: str) -> None:
    source = make_module()
    source.configure_model()
    source.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module = CausalLMModule(pretrained=str(tmp_path))
    if change == "missing":
        with pytest.raises(ConfigurationError, match=r"1 missing, the first `model\.norm\.weight`"):
            module.configure_model()
    else:
        with pytest.warns(UserWarning, match=r"1 weights that the model does not use, the first `model\.norm\.scale`"):
            module.configure_model()


def test_checkpoint_restores_module_and_settings(tmp_path: Path) -> None:
    module = make_module(optimizer=OptimizerSettings(lr=2e-3), schedule=ScheduleSettings(warmup_steps=3))
    trainer = make_trainer()
    trainer.fit(module, datamodule=Rows())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = CausalLMModule.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    assert again.optimizer_settings == module.optimizer_settings
    assert again.schedule_settings == module.schedule_settings
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())


def make_tokenizer(home: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(home)


def test_tokenizer_beside_the_model(tmp_path: Path) -> None:
    source = make_module()
    source.config.save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    assert CausalLMModule(config=str(tmp_path)).load_tokenizer()("b a c").input_ids == [2, 1, 0]


def test_tokenizer_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tokenizer: bytes"):
        make_module().load_tokenizer()
    make_module().config.save_pretrained(tmp_path)
    module = CausalLMModule(config=str(tmp_path))
    with pytest.raises(ConfigurationError, match="needs a tokenizer beside the model"):
        module.load_tokenizer()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="must load"):
        module.load_tokenizer()


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_operations_are_those_that_a_step_runs(preset: str) -> None:
    module = CausalLMModule(config=preset)
    module.configure_model()
    row = pack(make_documents(64, vocabulary=256, seed=0))
    with FlopCounterMode(display=False) as counter:
        module.training_step(row, 0)["loss"].backward()
    flops = model_flops(module)
    assert flops is not None
    # The counter sees neither attention on the host nor the head's weight gradient, which is added in place.
    head = 2 * 64 * module.config.vocab_size * module.config.hidden_size
    # Older transformers make rotary angles by a small matrix product.
    assert flops.of(tokens=64, squares=0) == pytest.approx(counter.get_total_flops() + head, rel=1e-5)
    width = module.config.num_hidden_layers * module.config.num_attention_heads * module.config.head_dim
    assert flops.per_squared_length == 6 * width


def test_operations_of_experts_are_those_that_a_token_takes() -> None:
    module = CausalLMModule(config="tiny-qwen3-moe")
    module.configure_model()
    flops = model_flops(module)
    assert flops is not None
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.dim() > 1 and "embed_tokens" not in name}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    assert experts > 0
    assert flops.per_token == 6 * (sum(sizes.values()) - experts * 6 / 8)  # two of eight are taken
