"""What was run, in one line: model, window, strategy and devices, as the configuration says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_longctx.tools.report.run import Run
from lightning_longctx.units import counted

__all__ = ["setup_of"]


def setup_of(run: Run) -> str:
    """The line; empty without a configuration that tells any of it.

    Args:
        run: whose configuration.
    """
    return ", ".join([*_model(run), *_devices(run)])


def _model(run: Run) -> Iterator[str]:
    model = run.setting("model", "pretrained") or run.setting("model", "config") or _class(run.setting("model"))
    if isinstance(model, str):
        yield model
    window = run.setting("data", "max_seq_len")
    if isinstance(window, int):
        yield f"{counted(window, 'token')} a document"


def _devices(run: Run) -> Iterator[str]:
    strategy = run.setting("trainer", "strategy")
    name = strategy if isinstance(strategy, str) else _class(strategy)
    if name and name != "auto":
        yield name
    shared = run.setting("trainer", "strategy", "sequence_parallel_size")
    if isinstance(shared, int) and shared > 1:
        yield f"sequence parallel {shared}"
    accelerator, devices = run.setting("trainer", "accelerator"), run.setting("trainer", "devices")
    if accelerator and devices and devices != "auto":
        nodes = run.setting("trainer", "num_nodes")
        yield f"{accelerator} x {devices}" + (
            f" on each of {counted(nodes, 'node')}" if isinstance(nodes, int) and nodes > 1 else ""
        )


def _class(section: Any) -> str:
    """The bare name of a configured class; empty for anything else."""
    path = section.get("class_path") if isinstance(section, dict) else None
    return str(path).rpartition(".")[2] if path else ""
