"""The saved form of the data module's state: what it must agree with when it is loaded, and what may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.mixing import SourceState
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.redeal import redeal
from lightning_longctx.datamodules.row_state import left_over
from lightning_longctx.datamodules.rows import RowSettings, RowState
from lightning_longctx.datamodules.sources import IndexableSource
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology
from lightning_longctx.units import counted

__all__ = ["changes", "gathered_state", "join_states", "restore_state", "saved_state"]

# Raised when the form changes, so that an old state is refused instead of misread.
_VERSION = 3


def saved_state(state: RowState, settings: RowSettings, open_rows: int = 0) -> dict[str, Any]:
    """Plain state of one rank; ``ranks`` has one entry, and a gathered state has one for each data-parallel rank.

    Args:
        state: after the last row whose optimizer step is done.
        settings: of the rows.
        open_rows: rows that training took since: they come again, and the Trainer has counted them.
    """
    sources = settings.reader.sources
    return {
        "version": _VERSION,
        "dp_size": state.dp_size,
        "sources": [source.name for source in sources],
        "order": _order(settings),
        "settings": _settings(settings),
        "open_rows": open_rows,
        "ranks": {state.dp_rank: state.to_plain([not isinstance(source, IndexableSource) for source in sources])},
    }


def gathered_state(own: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """The state of all data-parallel ranks, from that of each. Every rank must call it."""
    if topology.host_group is None:
        return own
    gathered: list[Any] = [None] * topology.world_size
    dist.all_gather_object(gathered, own, group=topology.host_group)
    return join_states(gathered)


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of those of several ranks; ranks that read nothing have an empty one."""
    read = [state for state in states if state]
    ranks: dict[int, Any] = {}
    for state in read:
        ranks |= state["ranks"]
    return {**read[0], "ranks": ranks} if read else {}


def restore_state(saved: Mapping[str, Any], settings: RowSettings, topology: Topology) -> RowState:
    """This rank's part of a saved state, as far as the present settings allow.

    Sources that are new start at their beginning, and what waits of those that are gone is left over. What remains is
    dealt anew if the number of data-parallel ranks changed. Documents longer than a smaller window are cut or dropped
    as ``long_document`` says.

    Raises:
        ConfigurationError: another version, another order of documents, ranks that are missing, or a document longer
            than the window under ``long_document: error``.
    """
    if saved.get("version") != _VERSION:
        fix = "Resume with the version that wrote it."
        raise ConfigurationError("data", f"state must have version {_VERSION}", saved.get("version"), fix)
    same = saved["dp_size"] == topology.dp_size
    needed = [topology.dp_rank] if same else list(range(saved["dp_size"]))
    missing = [rank for rank in needed if rank not in saved["ranks"]]
    if missing:
        got = f"no state of {missing} of {saved['dp_size']}"
        raise ConfigurationError("data", "state must hold the data-parallel ranks", got, "Load a gathered state.")
    states = [_adapted(RowState.from_plain(saved["ranks"][rank]), saved, settings) for rank in needed]
    if topology.is_reader and not states[0].finished:
        _check_order(saved["order"], _order(settings))
    mixing = saved["settings"]["loading.mixing"]
    return states[0] if same else redeal(states, topology.dp_rank, topology.dp_size, mixing)


def changes(saved: Mapping[str, Any], settings: RowSettings, policy: BufferPolicy, dp_size: int) -> str | None:
    """One line: what differs from the run that was stopped, and applies from here on. None if nothing does."""
    names = [source.name for source in settings.reader.sources]
    found = [f"source {name} is new" for name in names if name not in saved["sources"]]
    found += [f"source {name} is gone" for name in saved["sources"] if name not in names]
    present = _settings(settings)
    found += [
        f"{key} is {value} instead of {saved['settings'][key]}"
        for key, value in present.items()
        if saved["settings"].get(key, value) != value
    ]
    before = next(iter(saved["ranks"].values()))["policy"].get("describe", policy.describe())
    if policy.describe() != before:
        found.append(f"data.buffer_policy is {policy.describe()} instead of {before}")
    if saved["dp_size"] != dp_size:
        found.append(f"the rest is dealt to {counted(dp_size, 'data-parallel rank')} instead of {saved['dp_size']}")
    return f"Data resumed with changes that apply from here on: {'; '.join(found)}." if found else None


def _adapted(state: RowState, saved: Mapping[str, Any], settings: RowSettings) -> RowState:
    """A rank's state under the present settings: source ids, documents, planned rows and credits that still hold."""
    reader, before, present = settings.reader, saved["settings"], _settings(settings)
    names = [source.name for source in reader.sources]
    if any(before.get(key) != present.get(key) for key in _PLANS):
        state = replace(state, candidates=state.waiting, planned=())  # rows are chosen again
    counters = Counter(state.counters)

    def adapt(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        return tuple(
            found for one in candidates for found in _fitted(_renamed(one, saved, names, counters), reader, counters)
        )

    planned = tuple(entry._replace(candidates=adapt(entry.candidates)) for entry in state.planned)
    sources = {name: found for name, found in state.sources.items() if name in names}
    if before["loading.mixing"] != settings.sequence.mixing:
        sources = {name: replace(found, credit=0.0) for name, found in sources.items()}
    same_end = before["loading.stop_mode"] == settings.sequence.stop_mode
    if not same_end:  # which sources have ended is found out anew: a small one may begin again
        sources = {name: _reopened(found) for name, found in sources.items()}
    reweighted = any(before.get(key, value) != value for key, value in present.items() if key.endswith(".weight"))
    return replace(
        state,
        exhausted=state.exhausted and same_end and set(names) <= set(saved["sources"]),
        sources=sources,
        weights=() if reweighted else state.weights,
        candidates=adapt(state.candidates),
        planned=tuple(entry for entry in planned if entry.candidates),
        counters=dict(counters),
    )


def _reopened(state: SourceState) -> SourceState:
    """A source that may go on; one that had ended is owed nothing."""
    return replace(state, place=state.place._replace(ended=False), credit=0.0) if state.place.ended else state


def _renamed(
    candidate: Candidate, saved: Mapping[str, Any], names: Sequence[str], counters: Counter[str]
) -> Candidate | None:
    name = saved["sources"][candidate.source_id]
    if name not in names:
        counters.update(left_over([candidate]))
        return None
    source_id = names.index(name)
    document = None if candidate.document is None else replace(candidate.document, source_id=source_id)
    return replace(candidate, source_id=source_id, document=document)


def _fitted(candidate: Candidate | None, reader: DocumentReader, counters: Counter[str]) -> Iterator[Candidate]:
    """The parts of a waiting document that fit a window which became smaller, as ``long_document`` says."""
    if candidate is None:
        return
    if candidate.length <= reader.window:
        yield candidate
    elif reader.long_document == "error":
        got = f"{reader.window:,} where a document of {counted(candidate.length, 'token')} waits"
        fix = f"Use {candidate.length} or more, or another `packing.long_document`."
        raise ConfigurationError("data.max_seq_len", "must hold the documents that wait", got, fix)
    elif reader.long_document == "drop":
        counters["documents_longer_than_window_dropped"] += 1
        counters["tokens_dropped"] += candidate.length
    elif reader.long_document == "truncate":
        counters["documents_truncated"] += 1
        counters["tokens_truncated"] += candidate.length - reader.window
        yield candidate.split(reader.window)[0]
    else:
        counters["documents_split"] += 1
        while candidate.length > reader.window:
            head, candidate = candidate.split(reader.window)
            yield head
        yield candidate


# The cap beside a budget of targets, or of a number of documents.
_MOST_TOKENS = "most tokens of a row"
# Settings under which a planned row would be another.
_PLANS = ("data.max_seq_len", "tokens of a row", _MOST_TOKENS, "packing.count_mode", "loading.balance")


def _settings(settings: RowSettings) -> dict[str, Any]:
    """What may change on a resume, under the names that a user knows."""
    reader, sequence, budget = settings.reader, settings.sequence, settings.budget
    return {
        "data.max_seq_len": reader.window,
        "tokens of a row": budget.counted,
        **({} if budget.physical == budget.counted else {_MOST_TOKENS: budget.physical}),
        "packing.count_mode": "effective" if settings.count_targets else "total",
        "packing.long_document": reader.long_document,
        "packing.cut_to_fill": settings.cut_to_fill,
        "loading.mixing": sequence.mixing,
        "loading.stop_mode": sequence.stop_mode,
        "loading.on_bad_record": reader.on_bad_record,
        "loading.balance": settings.balance,
        "loading.drop_last": settings.drop_last,
        "loading.num_workers": settings.num_workers,
        **{f"sources.{source.name}.weight": source.weight for source in reader.sources},
    }


def _order(settings: RowSettings) -> dict[str, Any]:
    """What the order of documents within a source depends on: any change would lose some and repeat others."""
    order: dict[str, Any] = {"loading.seed": settings.sequence.seed, "loading.shuffle": settings.sequence.shuffle}
    for source in settings.reader.sources:
        length = counted(len(source), "document") if isinstance(source, IndexableSource) else "a stream"
        order[f"sources.{source.name}"] = length
    return order


def _check_order(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    changed = [key for key in present if saved.get(key, present[key]) != present[key]]
    if not changed:
        return
    got = "; ".join(f"{key}: {present[key]} instead of {saved[key]}" for key in changed)
    fix = "Resume with the same files and seed, give changed data another name, or start the data anew."
    raise ConfigurationError("data", "must keep the order of documents on resume", got, fix)
