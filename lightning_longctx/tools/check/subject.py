"""The run that is checked: its parts, built when a check first asks, and the machine as far as it matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.errors import ConfigurationError, FieldError
from lightning_longctx.tools.check.options import CheckOptions
from lightning_longctx.tools.check.report import Skipped
from lightning_longctx.tools.configuration import RunConfiguration, device_count

__all__ = ["Subject"]

_GPU = ("auto", "cuda", "gpu", "mps")


class Subject:
    """A configuration under check.

    Args:
        configuration: parsed.
        options: the machine that it is for.

    Attributes:
        configuration: as given.
        options: as given.
        settings: all sections as plain containers.
    """

    def __init__(self, configuration: RunConfiguration, options: CheckOptions) -> None:
        self.configuration, self.options = configuration, options
        self.settings: Mapping[str, Any] = configuration.settings
        self._failed: set[str] = set()

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The section ``trainer``."""
        return self.settings.get("trainer") or {}

    @property
    def accelerators(self) -> int:
        """How many this machine has."""
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    @property
    def wants_accelerator(self) -> bool:
        """Whether training runs on one: as the configuration says, or as this machine has it."""
        name = str(self.trainer.get("accelerator") or "auto")
        return name in _GPU and (name != "auto" or self.accelerators > 0 or self.options.device_gb is not None)

    @property
    def devices(self) -> int | None:
        """Processes of a node; None where only the machine that is meant knows."""
        count = self.options.devices or device_count(self.trainer.get("devices"))
        if count is None and self.options.device_gb is None:
            count = self.accelerators if self.wants_accelerator else 1  # as Lightning resolves `auto`
        return count

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.trainer.get("num_nodes") or 1)

    @property
    def data_parallel_ranks(self) -> int | None:
        """Ranks with rows of their own; None where only the machine that is meant knows.

        Raises:
            FieldError: the strategy is refused.
            Skipped: it was refused before.
        """
        sp_size = int(getattr(self.build("strategy"), "sequence_parallel_size", 1))
        return None if self.devices is None else max(1, self.devices * self.nodes // sp_size)

    def part_settings(self, section: str) -> Mapping[str, Any]:
        """The settings of the class of a section, without its name."""
        found = self.settings.get(section) or {}
        return (found.get("init_args") or {}) if isinstance(found, Mapping) else {}

    def build(self, part: str) -> Any:
        """Build a part, the model by its shapes alone. What fails is told by the first check that asks for it.

        Raises:
            FieldError: the part is refused.
            Skipped: it was refused before, or a module of the user's own cannot do without values.
        """
        if part in self._failed:
            raise Skipped(f"`{part}` cannot be built: see above")
        try:
            if part != "model":
                return self.configuration.build(part)
            with torch.device("meta"):
                return self.configuration.build("model")
        except FieldError:
            self._failed.add(part)
            raise
        except RuntimeError as error:
            raise self._needs_values(part, error) from error

    def _needs_values(self, part: str, error: RuntimeError) -> Skipped:
        """What a constructor or ``configure_model`` says that looks at values, or at a Trainer that there is not."""
        self._failed.add(part)
        how = " by its shapes" if part == "model" else ""
        return Skipped(f"the {part} cannot be built{how}: {' '.join(str(error).split())}")

    def shaped_model(self) -> LightningModule:
        """The model with all of its parameters, on the meta device.

        Raises:
            FieldError: it is refused.
            Skipped: it was refused before, or cannot do without values.
        """
        model = self.build("model")
        if not isinstance(model, LightningModule):
            raise ConfigurationError("model", "must be a LightningModule", type(model).__name__, "Name one.")
        try:
            with torch.device("meta"):
                getattr(model, "configure_shapes", model.configure_model)()
        except RuntimeError as error:
            raise self._needs_values("model", error) from error
        return model

    def vocabulary(self) -> int | None:
        """Number of token ids of the model; None where it does not tell, or cannot be built."""
        try:
            size = getattr(self.build("model"), "vocab_size", None)
        except Skipped:
            return None
        return size if isinstance(size, int) else None

    def packing_data(self) -> DynamicBatchingDataModule:
        """The data module, if it is ours.

        Raises:
            Skipped: it is another one.
        """
        data = self.build("data")
        if not isinstance(data, DynamicBatchingDataModule):
            name = "the model brings its own loaders" if data is None else f"{type(data).__name__} is not known here"
            raise Skipped(f"data that DynamicBatchingDataModule does not read: {name}")
        return data

    def callback(self, name: str) -> Mapping[str, Any] | None:
        """Settings of a callback of the Trainer by its class name, None if it is not listed."""
        return next((settings for known, settings in self.callbacks() if known == name), None)

    def callbacks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Class name and settings of each callback of the Trainer that is listed."""
        callbacks = self.trainer.get("callbacks") or []
        for entry in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
            path = entry.get("class_path") if isinstance(entry, Mapping) else entry
            settings = (entry.get("init_args") or {}) if isinstance(entry, Mapping) else {}
            yield str(path).rpartition(".")[2], settings
