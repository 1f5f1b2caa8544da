"""Weights for a module on the meta device: equal whatever the order, and nothing is left to chance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_longctx import ConfigurationError
from lightning_longctx.strategies.initialization import fill_meta, init_by_name, meta_names


class Model(nn.Module):
    """Embedding, layers with buffers, tied head."""

    def __init__(self, device=None):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, device=device)
        self.layers = nn.ModuleList(nn.Linear(4, 4, device=device) for _ in range(3))
        self.norm = nn.BatchNorm1d(4, device=device)
        self.head = nn.Linear(4, 7, bias=False, device=device)
        self.head.weight = self.embedding.weight


def fill(model, groups, seed=3):
    for names in groups:
        fill_meta(model, names, lambda part: init_by_name(model, part, seed))
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_values_depend_on_seed_and_name_alone():
    at_once = Model("meta")
    first = fill(at_once, [meta_names(at_once)])
    torch.manual_seed(99)
    in_pieces = Model("meta")
    names = meta_names(in_pieces)
    second = fill(in_pieces, [[n for n in names if "layers.2" in n], [n for n in names if "layers.2" not in n]])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], first["layers.1.weight"])
    other = Model("meta")
    assert not torch.equal(fill(other, [meta_names(other)], seed=4)["layers.0.weight"], first["layers.0.weight"])


def test_drawing_leaves_the_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = Model("meta")
    fill(model, [meta_names(model)])
    assert torch.equal(torch.rand(3), expected)


def test_ties_freezing_and_buffers_are_kept():
    model = Model("meta")
    model.layers[1].requires_grad_(False)
    fill(model, [meta_names(model)])
    assert model.head.weight is model.embedding.weight
    assert [p.requires_grad for p in model.layers[1].parameters()] == [False, False]
    assert model.layers[0].weight.requires_grad
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert int(model.norm.num_batches_tracked) == 0
    assert meta_names(model) == []


class Norm(nn.Module):
    """Has a weight and no way to reset it, as many models' own norms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Forgetful(nn.Linear):
    """Resets its weight and forgets a buffer that its constructor computed."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("inv_freq", torch.arange(2.0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Norm, r"model \(Norm\).*must have `reset_parameters\(\)`"), (Forgetful, r"model\.0\.inv_freq.*must be set by")],
)
def test_tensors_without_a_value_are_refused(kind, message):
    with torch.device("meta"):
        model = nn.Sequential(kind())
    with pytest.raises(ConfigurationError, match=message):
        fill(model, [meta_names(model)])


def test_a_fill_that_leaves_names_out_is_refused():
    model = Model("meta")
    with pytest.raises(ConfigurationError, match=r"model\.embedding\.weight.*must get a value"):
        fill_meta(model, meta_names(model), lambda names: None)
