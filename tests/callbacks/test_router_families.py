"""Mixture-of-Experts families of transformers on tiny random configurations, discovered without being configured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

transformers = pytest.importorskip("transformers")

from lightning_longctx.callbacks.router_auxiliary import has_dead_auxiliary_loss  # noqa: E402
from lightning_longctx.callbacks.router_counts import RouterCounts  # noqa: E402
from lightning_longctx.callbacks.router_sites import find_sites  # noqa: E402

EXPERTS, CHOICES, TOKENS = 6, 2, 14

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Every family takes its own of these names and ignores the others.
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOICES,
    "moe_topk": CHOICES,
    "moe_intermediate_size": 16,
}
_GROUPS = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_FULL = {"layer_types": ["full_attention"] * 2}

#: By model type: what it needs besides, and how many layers of experts there are then.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "afmoe": ({"num_dense_layers": 0, "n_group": 1, "topk_group": 1, "num_shared_experts": 1}, 2),
    "cohere2_moe": ({}, 2),
    "deepseek_v2": ({**_GROUPS, **_LATENT, "q_lora_rank": None, "n_shared_experts": 1}, 2),
    "deepseek_v3": ({**_GROUPS, **_LATENT, "n_shared_experts": 1}, 2),
    "dots1": ({**_GROUPS, "n_shared_experts": 1}, 2),
    "ernie4_5_moe": (
        {"moe_num_experts": EXPERTS, "moe_k": CHOICES, "moe_layer_start_index": 0, "moe_layer_interval": 1},
        2,
    ),
    "exaone_moe": ({**_GROUPS, "num_shared_experts": 1, "mlp_layer_types": ["sparse"] * 2}, 2),
    "flex_olmo": ({}, 2),
    "glm4_moe": ({**_GROUPS, "n_shared_experts": 1}, 2),
    "gpt_oss": ({}, 2),
    "granitemoe": ({}, 2),
    "granitemoeshared": ({"shared_intermediate_size": 16}, 2),
    "hunyuan_v1_moe": ({}, 2),
    "jamba": (
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "use_mamba_kernels": False,
        },
        2,
    ),
    "jetmoe": ({"kv_channels": 8, "activation_function": "silu"}, 4),  # experts in attention too
    "kimi_linear": ({}, 1),
    "lfm2_moe": ({"num_dense_layers": 0, **_FULL}, 2),
    "llama4_text": ({"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1, "moe_layers": [0, 1]}, 2),
    "longcat_flash": (
        {**_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
        1,
    ),
    "minimax": ({**_FULL, "block_size": 8}, 2),
    "minimax_m2": ({}, 2),
    "mixtral": ({}, 2),
    "olmoe": ({}, 2),
    "phimoe": ({}, 2),
    "qwen2_moe": ({"shared_expert_intermediate_size": 16}, 2),
    "qwen3_moe": ({}, 2),
    "qwen3_next": ({"shared_expert_intermediate_size": 16, **_FULL}, 2),
    "solar_open": ({**_GROUPS, "n_shared_experts": 1}, 2),
}


#: Families whose routers older transformers (5.8 and before) wrote otherwise: not found, or counted wrongly.
NEWER = ("granitemoe", "granitemoeshared", "longcat_flash", "switch_transformers", "dbrx")
OLDER = Version(transformers.__version__) < Version("5.9")


def skip_if_older(family: str) -> None:
    if family not in transformers.CONFIG_MAPPING or (OLDER and family in NEWER):
        pytest.skip(f"{family} needs a newer transformers than {transformers.__version__}")


def build(family: str, settings: dict[str, Any]) -> nn.Module:
    """The family's causal language model; skipped by name where this version of transformers cannot make it."""
    skip_if_older(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_COMMON, **settings})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def observe(model: nn.Module, **inputs: Any) -> tuple[RouterCounts, list[list[int]]]:
    counts = RouterCounts(find_sites(model), torch.device("cpu"))
    counts.active = True
    model(**inputs)
    assert counts.settle() == []
    found = counts.read(counts.peek())
    assert not any(site.outside for site in found)
    return counts, [site.tokens.tolist() for site in found]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_found_and_every_choice_counted(family: str) -> None:
    settings, layers = FAMILIES[family]
    model = build(family, settings)
    ids = torch.randint(3, 64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    _, found = observe(model, input_ids=ids, use_cache=False)
    assert [sum(row) for row in found] == [TOKENS * CHOICES] * layers


def test_qwen3_moe_counts_equal_the_logits_of_the_model() -> None:
    """vllm#36304, transformers#45120: what is counted are the choices themselves, against the recorded logits."""
    model = build("qwen3_moe", {"output_router_logits": True})
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    _, found = observe(model, input_ids=ids, use_cache=False)
    logits = model(input_ids=ids, use_cache=False).router_logits
    for row, layer in zip(found, logits, strict=True):
        chosen = layer.reshape(-1, EXPERTS).topk(CHOICES, dim=-1).indices
        assert row == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize(("family", "gate"), [("llama4_text", "router"), ("jetmoe", "router.layer")])
def test_readers_of_single_families_count_the_choices_of_their_logits(family: str, gate: str) -> None:
    model, logits = build(family, FAMILIES[family][0]), []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        logits.append(output[-1] if isinstance(output, tuple) else output)

    for site in find_sites(model):
        site.module.get_submodule(gate).register_forward_hook(keep)
    _, found = observe(model, input_ids=torch.randint(3, 64, (1, TOKENS)), use_cache=False)
    recounted = [
        torch.bincount(row.float().topk(CHOICES, dim=-1).indices.flatten(), minlength=EXPERTS).tolist()
        for row in logits
    ]
    assert sorted(found) == sorted(recounted)


def test_switch_transformers_report_what_a_capacity_dropped() -> None:
    skip_if_older("switch_transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=64,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=EXPERTS,
        expert_capacity=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    counts, found = observe(model, input_ids=ids, decoder_input_ids=ids[:, :5])
    dropped = [site.dropped for site in counts.read(counts.peek())]
    assert [sum(row) + lost for row, lost in zip(found, dropped, strict=True)] == [14, 10]
    assert max(max(row) for row in found) <= 2 * 2  # a capacity of two for each of two sequences


def test_dbrx_is_read_from_the_input_of_its_experts() -> None:
    skip_if_older("dbrx")
    config = transformers.DbrxConfig(
        vocab_size=64,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        ffn_config={
            "ffn_hidden_size": 16,
            "moe_num_experts": EXPERTS,
            "moe_top_k": CHOICES,
            "hidden_size": 32,
            "ffn_act_fn": {"name": "silu"},
        },
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    )
    model = transformers.DbrxForCausalLM(config).train()
    _, found = observe(model, input_ids=torch.randint(3, 64, (1, TOKENS)), use_cache=False)
    assert [sum(row) for row in found] == [TOKENS * CHOICES] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name of the switch, which every version has
@pytest.mark.parametrize(("reentrant", "coefficient"), [(True, 0.1), (False, 0.1), (True, 0.0)])
def test_a_dead_auxiliary_loss_is_seen(reentrant: bool, coefficient: float) -> None:
    """transformers 5.24 under reentrant checkpointing: recorded router logits have no graph, so the loss is dead."""
    model = build("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": coefficient})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert has_dead_auxiliary_loss(model) == (reentrant and coefficient > 0)
    if coefficient:
        ids = torch.randint(3, 64, (1, TOKENS))
        assert model(input_ids=ids, labels=ids, use_cache=False).aux_loss.requires_grad is not reentrant
