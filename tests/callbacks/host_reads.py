"""Counts the ways in which Python waits for a device, on a machine where everything is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnHost(torch.Tensor):
    """Marks what a packed batch keeps on the host."""


class HostReads(TorchFunctionMode):
    """Notes each call that would wait for a device, by its name."""

    NAMES = frozenset(
        {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero", "to"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moves = name == "to" and any(isinstance(value, (str, torch.device)) for value in args)
        on_host = bool(args) and isinstance(args[0], _OnHost)
        if name in self.NAMES and (name != "to" or moves) and not on_host:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def with_host_keys(batches: Sequence[Any]) -> list[dict[str, Any]]:
    """The batches, with the one tensor marked that a packed batch keeps on the host."""
    return [{**batch, "document_keys": batch["document_keys"].as_subclass(_OnHost)} for batch in batches]


class ReadingSteps:
    """Mixed into a callback: the steps at whose end something was read from the device."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.read_at: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        with HostReads() as mode:
            super().on_train_batch_end(trainer, *args)  # type: ignore[misc]
        if mode.reads:
            self.read_at.append(trainer.global_step)
