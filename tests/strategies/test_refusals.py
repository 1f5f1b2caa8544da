"""What is refused in a module before it is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy
from lightning_longctx.strategies.refusals import check_token_mixing


class Model(nn.Module):
    """A model with one more layer."""

    def __init__(self, layer):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(8, 4), layer


MIXERS = {
    "convolution": lambda: nn.Conv1d(4, 4, 3),
    "recurrence": lambda: nn.GRU(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_a_layer_that_mixes_tokens_of_one_rank_is_refused_where_rows_are_shared(kind):
    model = Model(MIXERS[kind]())
    check_token_mixing(model, 1)
    with pytest.raises(ConfigurationError, match=r"must mix tokens only in attention.*`layer`"):
        LongContextFSDPStrategy(sequence_parallel_size=2).check_model(model)
    model.layer.mixes_tokens = False
    if kind != "encoder layer":  # it holds a MultiheadAttention, which speaks for itself
        check_token_mixing(model, 2)


def test_layers_that_keep_tokens_apart_pass():
    check_token_mixing(Model(nn.Sequential(nn.Conv1d(4, 4, 1), nn.LayerNorm(4), nn.Linear(4, 4))), 2)


@pytest.mark.parametrize(
    ("model_type", "options", "named"),
    [
        ("qwen3_next", {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32}, "linear_attention|Conv1d"),
        ("mamba", {"num_hidden_layers": 1, "hidden_size": 32, "state_size": 4}, "linear_attention|Conv1d"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}, "conv|Conv1d"),
    ],
)
def test_linear_and_state_space_layers_of_hugging_face_are_refused(model_type, options, named):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=64, **options))
    check_token_mixing(model, 1)
    with pytest.raises(ConfigurationError, match=named):
        check_token_mixing(model, 2)
