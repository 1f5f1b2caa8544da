"""A local safetensors checkpoint, read a few tensors at a time into a Hugging Face model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.strategies.initialization import get_tensor, init_by_name, set_tensor

require_transformers()

from safetensors import safe_open  # noqa: E402  (transformers needs it too)
from transformers import PreTrainedModel  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig  # noqa: E402
from transformers.utils import logging  # noqa: E402

__all__ = ["PretrainedReader"]

# Early releases of transformers 5 require one argument more.
_OLD = {"tp_plan": None} if "tp_plan" in signature(convert_and_load_state_dict_in_model).parameters else {}
_load_into = partial(convert_and_load_state_dict_in_model, **_OLD)


class PretrainedReader:
    """Reads tensors of a local safetensors checkpoint into a model on the meta device, some at a time.

    Names are translated and experts are stacked by transformers' own code, on a copy of the model that stays empty but
    for the tensors that are being read. Tensors are recognized by identity, so layers may have been wrapped since.

    Args:
        model: on the meta device, as it was built.
        home: directory with ``*.safetensors``.

    Attributes:
        unused: names in the checkpoint that the model has no place for.

    Raises:
        ConfigurationError: the checkpoint lacks a weight of the model.
    """

    def __init__(self, model: PreTrainedModel, home: str) -> None:
        self._skeleton = copy.deepcopy(model)
        self._mapping = get_model_conversion_mapping(model)
        self._files = _names_in(home)
        # The tensors are kept with their names: an id alone could come back as another tensor's.
        self._origins = {id(tensor): (name, tensor) for name, tensor in _tensors(model)}
        places = model.state_dict(keep_vars=True)
        self._sources: dict[str, list[str]] = {}  # names in the checkpoint by name in the model
        for key in self._files:
            for target in self._targets(key, places):
                self._sources.setdefault(target, []).append(key)
        self.unused = sorted({key for name, keys in self._sources.items() if name not in places for key in keys})
        self._resolve_ties(places)
        missing = sorted(name for name in places if name not in self._sources)
        if missing:
            got = f"{len(missing)} missing, the first `{missing[0]}`"
            fix = "They would start at random. Give a complete checkpoint that fits the configuration."
            raise ConfigurationError("model.pretrained", "must hold every weight of the model", got, fix)

    def read(self, module: nn.Module, names: Sequence[str]) -> list[str]:
        """Put values in the place of meta tensors of the model; those that are in no checkpoint are computed.

        Args:
            module: what ``names`` start from.
            names: parameters and buffers on the meta device.

        Returns:
            The names of tensors that were not in the model when it was built, and are still on the meta device.

        Raises:
            ConfigurationError: a weight of another shape than the model's.
        """
        origins = {name: self._origins.get(id(get_tensor(module, name)), (None,))[0] for name in names}
        wanted = [origin for origin in origins.values() if origin is not None]
        self._load(wanted)
        for name, origin in origins.items():
            if origin is not None:
                set_tensor(module, name, get_tensor(self._skeleton, origin))
        for name in wanted:  # the copy is empty again
            set_tensor(self._skeleton, name, get_tensor(self._skeleton, name).to("meta"))
        return [name for name, origin in origins.items() if origin is None]

    def _load(self, wanted: Sequence[str]) -> None:
        keys = sorted({key for name in wanted for key in self._sources.get(name, ())})
        if keys:
            settings = LoadStateDictConfig(weight_mapping=copy.deepcopy(self._mapping), dtype=torch.float32)
            with _without_progress_bar():
                _load_into(self._skeleton, self._open(keys), settings)
        computed = [name for name in wanted if name not in self._sources]
        init_by_name(self._skeleton, computed, 0, self._skeleton._init_weights)
        unread = [name for name in wanted if get_tensor(self._skeleton, name).is_meta]
        if unread:
            got = f"{len(unread)} of other shapes, the first `{unread[0]}`"
            fix = "Give a checkpoint that fits the configuration, without `config_overrides` that change sizes."
            raise ConfigurationError("model.pretrained", "must hold weights of the model's shapes", got, fix)

    def _targets(self, key: str, places: Mapping[str, Tensor]) -> list[str]:
        """Where a tensor of the checkpoint goes: one place, or several where a fused one is split."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        prefix = self._skeleton.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, places)
        if name not in places and key in places:
            name, pattern = rename_source_key(key, [], [], prefix, places)
        if pattern is None:
            return [name]
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        first = converter.target_patterns[0]
        return [name.replace(first, target) for target in converter.target_patterns]

    def _resolve_ties(self, places: Mapping[str, Tensor]) -> None:
        """Let all names of a tied tensor lead to where the checkpoint has it."""
        found = {id(tensor): self._sources[name] for name, tensor in places.items() if name in self._sources}
        for name, tensor in places.items():
            if name not in self._sources and id(tensor) in found:
                self._sources[name] = found[id(tensor)]

    def _open(self, keys: Sequence[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in sorted({self._files[key] for key in keys}):
            with safe_open(path, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in keys if self._files[key] == path})
        return tensors


def _names_in(home: str) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    files: dict[str, Path] = {}
    for path in sorted(Path(home).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """One bar a block would fill the screen."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
