"""Checks that need no process group: sizes that cannot divide, and a checkpoint that is not there.

``longctx fit`` makes them before it starts a process, and ``longctx check`` without starting any.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_longctx.checkpoint.address import Folder, as_folder, is_address
from lightning_longctx.checkpoint.discovery import check_one_checkpoint, scan
from lightning_longctx.errors import ConfigurationError, FieldError, raise_together
from lightning_longctx.strategies.checks import check_parts
from lightning_longctx.tools.configuration import check_division

__all__ = ["check_checkpoint_path", "check_folders", "check_sizes"]

# Words that Lightning takes for ckpt_path instead of a path.
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")


def check_checkpoint_path(path: object, saves: Folder | str | None = None) -> None:
    """Check that a checkpoint to start from is there.

    Args:
        path: ``ckpt_path``: a path, an address, one of Lightning's words such as ``last``, or None.
        saves: the folder of ``AsyncDCPCheckpoint``, where ``best`` looks. Default None: the run has none.

    Raises:
        ConfigurationError: one that does not exist, ``best`` of none, or an address that cannot be opened.
        CheckpointError: the folder that checkpoints are in.
    """
    if not isinstance(path, (str, Path)):
        return
    if path == "best" and saves is not None and not scan(saves):
        fix = "Train first, name another folder (`dirpath`), or give the path of a checkpoint."
        raise ConfigurationError("ckpt_path", "must find a checkpoint", f"`best`, and none in {saves}", fix)
    if not is_address(path) and str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    folder = as_folder(path, "ckpt_path")
    if not folder.exists():
        words = ", ".join(_CHECKPOINT_WORDS[:2])
        fix = f"Check the path, or give one of the words {words}."
        raise ConfigurationError("ckpt_path", "must exist", repr(str(path)), fix)
    check_one_checkpoint(folder)


def check_sizes(strategy: Any, datamodule: Any, model: Any, devices: int, nodes: int) -> None:
    """Check that processes, token budgets and heads can be divided as asked, while one process still speaks for all.

    The strategy is asked for ``sequence_parallel_size`` and ``check_model(model)``, and data module and model for
    ``check``, see :func:`~lightning_longctx.strategies.checks.check_parts`.

    Args:
        strategy: an object, or a registered name.
        datamodule: the data module, or None.
        model: the model.
        devices: processes of a node.
        nodes: number of nodes.

    Raises:
        ConfigurationError: a size that does not divide, with the arithmetic.
    """
    check_division(devices, nodes, int(getattr(strategy, "sequence_parallel_size", 1)))
    check_parts(strategy, devices * nodes, (datamodule, model))
    check_model = getattr(strategy, "check_model", None)
    if callable(check_model):
        check_model(model)


def check_folders(folders: Iterable[tuple[str, str | Folder | None]]) -> None:
    """Check that folders that a run writes to can be made and written to.

    Args:
        folders: with the setting that names each; addresses and None are left out.

    Raises:
        ConfigurationError: those that cannot, which would end the run after the model was built, or at the first save.
    """
    refused: list[FieldError] = []
    for field, folder in folders:
        found = None if folder is None else as_folder(folder, field)
        if not isinstance(found, Path):
            continue
        place = found.absolute()
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            got = str(there) if there.is_dir() else f"the file {there}"
            fix = "Start in another folder, or set another (`save_dir` of the logger, `dirpath`, `default_root_dir`)."
            refused.append(ConfigurationError(field, "must be in a folder that can be written to", got, fix))
    raise_together(refused)
