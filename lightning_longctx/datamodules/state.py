"""The saved form of the data module's state, and what it must agree with when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_longctx.datamodules.rows import RowSettings, RowState
from lightning_longctx.datamodules.sources import IndexableSource
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology

__all__ = ["join_states", "restore_state", "saved_state"]

# Raised when the form changes, so that an old state is refused instead of misread.
_VERSION = 1


def saved_state(state: RowState, settings: RowSettings) -> dict[str, Any]:
    """Plain state of one rank; ``ranks`` has one entry, and a gathered state has one for each data-parallel rank."""
    by_value = [not isinstance(source, IndexableSource) for source in settings.reader.sources]
    return {
        "version": _VERSION,
        "dp_size": state.dp_size,
        "order": _order(settings),
        "ranks": {state.dp_rank: state.to_plain(by_value)},
    }


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of those of several ranks; ranks that read nothing have an empty one."""
    read = [state for state in states if state]
    ranks: dict[int, Any] = {}
    for state in read:
        ranks |= state["ranks"]
    return {**read[0], "ranks": ranks} if read else {}


def restore_state(saved: Mapping[str, Any], settings: RowSettings, topology: Topology) -> RowState:
    """This rank's part of a saved state; dealt anew if the number of data-parallel ranks changed.

    Raises:
        ConfigurationError: another version, another order of documents, ranks that are missing, or a window that
            became too small.
    """
    if saved.get("version") != _VERSION:
        fix = "Resume with the version that wrote it."
        raise ConfigurationError("data", f"state must have version {_VERSION}", saved.get("version"), fix)
    if topology.is_reader:
        _check_order(saved["order"], _order(settings))
    same = saved["dp_size"] == topology.dp_size
    needed = [topology.dp_rank] if same else list(range(saved["dp_size"]))
    missing = [rank for rank in needed if rank not in saved["ranks"]]
    if missing:
        got = f"no state of {missing} of {saved['dp_size']}"
        raise ConfigurationError("data", "state must hold the data-parallel ranks", got, "Load a gathered state.")
    states = [RowState.from_plain(saved["ranks"][rank]) for rank in needed]
    longest = max((candidate.length for state in states for candidate in state.waiting), default=0)
    if longest > settings.reader.window:
        got = f"{settings.reader.window} where a document of {longest} tokens waits"
        raise ConfigurationError(
            "data.max_seq_len", "must hold the documents that wait", got, f"Use {longest} or more."
        )
    return states[0] if same else RowState.redeal(states, topology.dp_rank, topology.dp_size)


def _order(settings: RowSettings) -> dict[str, Any]:
    """What the order of documents depends on: any change would lose some and repeat others."""
    order: dict[str, Any] = {"loading.seed": settings.sequence.seed, "loading.shuffle": settings.sequence.shuffle}
    for source in settings.reader.sources:
        length = len(source) if isinstance(source, IndexableSource) else "a stream"
        order[f"sources.{source.name}"] = f"{length} documents of weight {source.weight:g}"
    return order


def _check_order(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    if list(saved.items()) == list(present.items()):
        return
    keys = [key for key in {**saved, **present} if saved.get(key) != present.get(key)] or ["the order of sources"]
    got = "; ".join(f"{key}: {present.get(key, 'absent')} instead of {saved.get(key, 'absent')}" for key in keys)
    fix = "Resume with the sources and seed of the stopped run, or start the data anew."
    raise ConfigurationError("data", "must keep the order of documents on resume", got, fix)
