"""Where routers are found, without a list of class names."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_longctx.callbacks.router_sites import find_sites, plain_path
from lightning_longctx.errors import ConfigurationError
from tests.callbacks.moe import EXPERTS, LAYERS, Block, MoEModule
from tests.callbacks.toy import ToyLM


def test_each_layer_of_experts_is_a_site() -> None:
    sites = find_sites(MoEModule())
    assert [site.path for site in sites] == [f"layers.{number}" for number in range(LAYERS)]
    assert {site.num_experts for site in sites} == {EXPERTS}


def test_experts_in_a_list_are_found_beside_a_gate_of_as_many_rows() -> None:
    block = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    assert [site.num_experts for site in find_sites(block)] == [4]


def test_a_router_with_a_row_for_no_expert_has_one_more() -> None:
    block = Block()
    block.gate.weight = nn.Parameter(block.gate.weight.new_zeros(EXPERTS + 1, 8))
    assert [site.num_experts for site in find_sites(block)] == [EXPERTS + 1]


@pytest.mark.parametrize(
    "module",
    [
        ToyLM(),
        nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(8, 8)),
        nn.ModuleDict({"embedding": nn.Embedding(11, 8), "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))}),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False),
    ],
    ids=["toy", "convolution", "layers", "encoder"],
)
def test_dense_models_have_none(module: nn.Module) -> None:
    assert find_sites(module) == []


def test_patterns_name_routers_instead() -> None:
    sites = find_sites(MoEModule(), ["layers.*.gate"])
    assert [(site.path, site.num_experts) for site in sites] == [
        (f"layers.{number}.gate", EXPERTS) for number in range(LAYERS)
    ]


def test_a_pattern_without_a_match_names_paths_of_the_model() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks\.\*.*layers\.0\.gate"):
        find_sites(MoEModule(), ["blocks.*"])


def test_a_named_module_without_a_number_of_experts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_experts"):
        find_sites(nn.ModuleDict({"gate": nn.Identity()}), ["gate"])


def test_paths_lose_what_wrappers_add() -> None:
    assert plain_path("model._orig_mod.layers.0._checkpoint_wrapped_module.mlp") == "model.layers.0.mlp"
