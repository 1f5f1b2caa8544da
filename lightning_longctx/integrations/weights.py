"""Where the weights of a Hugging Face model come from: a seed or a checkpoint, whole or some at a time.

The model is built on the meta device; whoever holds the whole of it or a block of it asks for the values of some
tensors by name. Random values follow from the seed and the name of a layer, checkpoint values from the files' names,
so a model that is filled block by block and sharded equals the one that is filled at once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.integrations.pretrained import PretrainedReader
from lightning_longctx.strategies.initialization import init_by_name

require_transformers()

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel  # noqa: E402

__all__ = ["ModelWeights", "empty_model", "shallow_model"]

# Enough to see every kind of layer in models that alternate, or that start with dense layers before experts.
_SHALLOW_LAYERS = 4
_SHALLOW_VOCABULARY = 256


class ModelWeights:
    """The weights of one model.

    Args:
        pretrained: a local directory with safetensors; None for random weights.
        init_seed: of random weights; None for the run's seed (``seed_everything``), 0 if there is none.
    """

    def __init__(self, pretrained: str | None, init_seed: int | None) -> None:
        self._pretrained = pretrained
        self._init_seed = init_seed
        self._reader: PretrainedReader | None = None

    def build(self, config: PretrainedConfig, attention: str, on_meta: bool) -> PreTrainedModel:
        """Build a model in float32.

        Args:
            config: its configuration.
            attention: the name of its attention.
            on_meta: whether pretrained weights may come later, by :meth:`fill`. Random ones always do.

        Returns:
            The model, with its pretrained weights or on the meta device.

        Raises:
            ConfigurationError: a checkpoint that lacks weights.
        """
        if self._pretrained is not None and not on_meta:
            return self._read_whole(self._pretrained, config, attention)
        model = empty_model(config, attention)
        if self._pretrained is not None:
            self._reader = PretrainedReader(model, self._pretrained)
            self._warn_of_unused(self._reader.unused)
        return model

    def fill(self, module: nn.Module, model: PreTrainedModel, names: Sequence[str]) -> None:
        """Put values in the place of tensors on the meta device.

        Args:
            module: what ``names`` start from.
            model: what :meth:`build` returned; its own rules initialize its layers. Layers outside of it and those that
                wrap it since then have ``reset_parameters``.
            names: parameters and buffers.
        """
        seed = self._init_seed if self._init_seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        inside = [name for name in names if name.startswith("model.")]
        if self._reader is None:
            init_by_name(module, inside, seed, model._init_weights)
        else:
            init_by_name(module, self._reader.read(module, inside), seed)
        init_by_name(module, [name for name in names if not name.startswith("model.")], seed)

    def _read_whole(self, home: str, config: PretrainedConfig, attention: str) -> PreTrainedModel:
        with torch.device("cpu"):
            model, report = AutoModelForCausalLM.from_pretrained(
                home,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        missing = sorted(report["missing_keys"])
        if missing:
            got = f"{len(missing)} missing, the first `{missing[0]}`"
            fix = "They would start at random. Give a complete checkpoint that fits the configuration."
            raise ConfigurationError("model.pretrained", "must hold every weight of the model", got, fix)
        self._warn_of_unused(sorted(report["unexpected_keys"]))
        return model

    def _warn_of_unused(self, names: Sequence[str]) -> None:
        if names:
            got = f"{len(names)} weights that the model does not use, the first `{names[0]}`"
            rank_zero_warn(f"{self._pretrained} holds {got}")


def empty_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build a model on the meta device, in float32: shapes without weights."""
    with torch.device("meta"):
        return _from_config(config, attention)


def shallow_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build the same kind of model with at most four layers, few tokens and random weights.

    What can be learned of a model's code needs no more, and it can be run where the whole one is on the meta device.
    """
    data, layers = copy.deepcopy(config.to_dict()), config.num_hidden_layers
    kept = min(layers, _SHALLOW_LAYERS)
    for key, value in data.items():
        if isinstance(value, list) and len(value) == layers:
            data[key] = value[:kept]
        elif key.endswith("_token_id") and isinstance(value, int) and value >= _SHALLOW_VOCABULARY:
            data[key] = None
    data["num_hidden_layers"] = kept
    data["vocab_size"] = min(config.vocab_size, _SHALLOW_VOCABULARY)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the host's alone: `torch.manual_seed` reseeds devices too
        return _from_config(type(config).from_dict(data), attention)


def _from_config(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
    )
