"""Weights that are made or read block by block equal those that are made or read at once, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy
from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.integrations.attention import ATTENTION_NAME
from lightning_longctx.integrations.pretrained import PretrainedReader
from lightning_longctx.strategies.initialization import fill_meta, meta_names
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.integrations.rows import make_documents, pack
from tests.integrations.test_parity import FAMILIES

MODELS = ["llama-tied", "qwen3-moe", "gemma2"]


def real_module(family: str, **settings: Any) -> CausalLMModule:
    module = CausalLMModule(config=FAMILIES[family], **settings)
    module.configure_model()
    return module


def save(family: str, home: Path) -> dict[str, torch.Tensor]:
    module = real_module(family, init_seed=5)
    module.model.save_pretrained(home)
    return {name: value.clone() for name, value in module.state_dict().items()}


def meta_module(home: Path) -> tuple[CausalLMModule, PretrainedReader]:
    module = CausalLMModule(pretrained=str(home))
    module.model = module.weights.build(module.config, ATTENTION_NAME, on_meta=True)
    return module, module.weights._reader


def read_in_pieces(module: CausalLMModule, reader: PretrainedReader) -> None:
    for layer in range(len(module.model.model.layers)):
        names = [name for name in meta_names(module) if name.startswith(f"model.model.layers.{layer}.")]
        fill_meta(module, names, lambda part: reader.read(module, part))
    fill_meta(module, meta_names(module), lambda part: reader.read(module, part))


@pytest.mark.parametrize("family", MODELS)
def test_reading_in_pieces_equals_transformers(family: str, tmp_path: Path) -> None:
    written = save(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    module, reader = meta_module(tmp_path)
    read_in_pieces(module, reader)
    assert reader.unused == []
    for name, value in plain.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], value), name
        assert torch.equal(written[f"model.{name}"], value), name
    for name, value in plain.named_buffers():
        assert torch.equal(module.model.get_buffer(name), value), name
    tied = module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert tied == bool(plain.config.tie_word_embeddings)


class Wrapped(nn.Module):
    """A low-rank adapter around a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, device="meta")
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_layers_that_were_wrapped_since_get_their_weights_and_stay_frozen(tmp_path: Path) -> None:
    written = save("llama-tied", tmp_path)
    module, _ = meta_module(tmp_path)
    attention = module.model.model.layers[0].self_attn
    attention.q_proj = Wrapped(attention.q_proj)
    fill_meta(module, meta_names(module), module.fill_weights)
    q_proj = module.model.model.layers[0].self_attn.q_proj
    assert torch.equal(q_proj.base.weight, written["model.model.layers.0.self_attn.q_proj.weight"])
    assert not q_proj.base.weight.requires_grad
    assert q_proj.down.weight.requires_grad
    assert q_proj.down.weight.abs().max() > 0
    assert meta_names(module) == []


def test_a_missing_weight_is_told_before_anything_is_read(tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match="1 missing, the first `model.layers.0.self_attn.q_proj.weight`"):
        meta_module(tmp_path)


def test_a_weight_of_another_shape_is_told(tmp_path: Path) -> None:
    save("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module, reader = meta_module(tmp_path)
    with pytest.raises(ConfigurationError, match=r"other shapes, the first `model\.norm\.weight`"):
        read_in_pieces(module, reader)


class Watched(CausalLMModule):
    """Notes how many numbers are whole on this rank whenever a block is about to be filled."""

    configure_model_keeps_meta = True

    def configure_model(self) -> None:
        super().configure_model()
        self.most_whole = 0

    def fill_weights(self, names: Any) -> None:
        super().fill_weights(names)
        whole = [p for p in self.parameters() if not isinstance(p, DTensor) and not p.is_meta]
        self.most_whole = max(self.most_whole, sum(p.numel() for p in whole))


def start(settings: dict[str, Any], world: int, sp: int, replicas: int) -> dict[str, Any]:
    """The weights before any step, whole, and the most numbers that were whole at a time."""
    module = Watched(**settings)
    trainer = quiet_trainer(
        devices=world,
        limit_val_batches=1,
        use_distributed_sampler=False,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp, data_parallel_replicate_size=replicas),
    )
    row = pack(make_documents(7, 1, 12, 4), padding=8)
    trainer.validate(module, DataLoader([row], batch_size=None), verbose=False)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    weights = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors}
    total = sum(p.numel() for p in module.parameters())
    return {"weights": {n: w.detach().clone() for n, w in weights.items()}, "share": module.most_whole / total}


@pytest.mark.distributed
@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_start_weights_are_equal_in_every_layout_and_never_whole(family: str, pretrained: bool, tmp_path: Path) -> None:
    if pretrained:
        save(family, tmp_path)
    settings = {"pretrained": str(tmp_path)} if pretrained else {"config": FAMILIES[family], "init_seed": 5}
    plain = real_module(family, init_seed=5)
    expected = {name: value.detach() for name, value in [*plain.named_parameters(), *plain.named_buffers()]}
    for world, sp, replicas in [(1, 1, 1), (2, 2, 1), (4, 2, 2)]:
        for rank in run_ranks(start, world, settings, world, sp, replicas):
            assert rank["weights"].keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(rank["weights"][name], value), (name, world)
            assert 0 < rank["share"] < 0.9


def test_random_weights_of_two_layers_differ() -> None:
    model = real_module("qwen3-moe", init_seed=5).model.model
    first, second = (layer.self_attn.q_proj.weight for layer in model.layers[:2])
    assert not torch.equal(first, second)
    assert 0.5 < float((first.std() / second.std()).detach()) < 2
