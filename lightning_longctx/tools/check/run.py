"""Checks of the run itself: the model and its sizes, the documents, the first row, where it starts."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.datamodules.sources import IndexableSource, Source
from lightning_longctx.errors import CheckpointError, ConfigurationError, DataError
from lightning_longctx.tools.before_start import check_checkpoint_path, check_sizes
from lightning_longctx.tools.check.report import Check, Skipped
from lightning_longctx.tools.check.subject import Subject
from lightning_longctx.tools.probe.command import complete_tokenizer
from lightning_longctx.tools.probe.streams import FirstRows, read_streams
from lightning_longctx.topology import Topology
from lightning_longctx.units import counted

__all__ = ["check_first_row", "check_model", "check_run_sizes", "check_sources", "check_start", "checkpoint_folder"]

_FILES_NAMED = 3
_DOCUMENTS_NAMED = 6


def check_model(subject: Subject) -> Check:
    """Whether it can be built, by its shapes."""
    model = subject.shaped_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = getattr(getattr(model, "config", None), "model_type", None)
    name = f"{type(model).__name__} ({kind})" if kind else type(model).__name__
    return Check("model", "fine", f"{name}, {counted(count, 'parameter')}", {"parameters": count})


def check_run_sizes(subject: Subject) -> Check:
    """Whether processes, budgets, heads, positions and token ids fit each other, as ``longctx fit`` asks."""
    strategy, model, data = subject.build("strategy"), subject.build("model"), subject.build("data")
    devices = subject.devices
    if devices is None:
        raise Skipped("`trainer.devices` is open: give --devices 8")
    check_sizes(strategy, data, model, devices, subject.nodes)
    sp_size = int(getattr(strategy, "sequence_parallel_size", 1))
    dp_size = devices * subject.nodes // sp_size
    config = getattr(model, "config", None)
    heads, positions = (getattr(config, name, None) for name in ("num_attention_heads", "max_position_embeddings"))
    parts = [f"{dp_size} data-parallel x {counted(sp_size, 'sequence-parallel process')}"]
    parts += [counted(heads, "head")] if heads else []
    parts += (
        [f"documents of up to {counted(length, 'token')}"] if (length := getattr(data, "max_seq_len", None)) else []
    )
    parts += [counted(positions, "position")] if positions else []
    return Check("sizes", "fine", ", ".join(parts), {"data_parallel": dp_size, "sequence_parallel": sp_size})


def check_sources(subject: Subject) -> Check:
    """Whether every file is there and may be read, and how many documents that is where it is cheap to tell."""
    rows = subject.packing_data().row_builder(Topology(), kind=FirstRows)
    assert isinstance(rows, FirstRows)
    sources = rows.settings.reader.sources
    rows.close()
    for source in sources:
        closed = [path for path in source.paths if "://" not in path and not os.access(path, os.R_OK)]
        if closed:
            got = f"{', '.join(closed[:_FILES_NAMED])} ({len(closed)} of {counted(len(source.paths), 'file')})"
            raise DataError(source.field, "must be readable", got, "Change the permissions, or leave them out.")
    facts = {"sources": {source.name: len(source.paths) for source in sources}}
    return Check("sources", "fine", ", ".join(map(_size, sources)), facts)


def _size(source: Source) -> str:
    files = counted(len(source.paths), "file") if source.paths else ""
    if isinstance(source, IndexableSource) and not source.paths:  # in memory, or mapped
        return f"{source.name}: {counted(len(source), 'record')}"
    return f"{source.name}: {files or 'a stream'}"


def check_first_row(subject: Subject) -> Check:
    """Read, tokenize, choose, pack and slice until the first row is there, as the first rank does."""
    data, strategy = subject.packing_data(), subject.build("strategy")
    complete_tokenizer(data, subject.configuration)
    sp_size = int(getattr(strategy, "sequence_parallel_size", 1))
    dp_size = max(1, (subject.devices or 1) * subject.nodes // sp_size)
    topology = Topology(0, dp_size * sp_size, 0, dp_size, sp_size=sp_size)
    (stream,) = read_streams(data, [topology], None, 1, 1, FirstRows)
    if not stream.rows:
        fix = "Give more documents; check limits on lengths and `drop_last`."
        got = counted(stream.first_documents, "document")
        raise ConfigurationError("data.sources", "must give the first rank a row", got, fix)
    row, batch = stream.rows[0], stream.kept[0]
    largest, vocabulary = int(batch["input_ids"].max()), subject.vocabulary()
    if vocabulary is not None and largest >= vocabulary:
        got = f"token id {largest:,} in the first row"
        raise ConfigurationError(
            "model.vocab_size", f"is {vocabulary:,} and must cover every token id", got, "Raise it."
        )
    names = Counter(data.source_names[source] for source, _, _ in row.documents)
    documents = [
        {"source": data.source_names[source], "number": number, "tokens": tokens}
        for source, number, tokens in row.documents
    ]
    of = " of the targets it may hold" if data.packing_facts.count_mode == "effective" else ""  # a fit tells its tokens
    text = (
        f"{counted(stream.first_documents, 'document')} read in {stream.first_seconds:.1f} s; the row holds"
        f" {', '.join(f'{count:,} of {name}' for name, count in names.items())}"
        f" ({_lengths([tokens for _, _, tokens in row.documents])}), filled to {row.fill:.1%}{of}"
    )
    return Check("first row", "fine", text, {"read": stream.first_documents, "fill": row.fill, "documents": documents})


def _lengths(tokens: list[int]) -> str:
    more = len(tokens) - _DOCUMENTS_NAMED
    *first, last = tokens[:_DOCUMENTS_NAMED]
    shown = ", ".join([*(f"{count:,}" for count in first), counted(last, "token")])
    return shown if more <= 0 else f"{shown} and {more:,} more"


def check_start(subject: Subject) -> Check:
    """Where training would begin: the checkpoint that ``ckpt_path`` names, or a fresh start."""
    path = subject.settings.get("ckpt_path")
    check_checkpoint_path(path)
    folder = checkpoint_folder(subject)
    if path is None:
        return Check("start", "fine", "a fresh start: `ckpt_path` is not set")
    if path != "last" or folder is None:
        return Check("start", "fine", f"`ckpt_path: {path}`")
    found = scan(folder)
    usable = [one for one in found if one.commit is not None and one.commit.resumable and not one.problem]
    if found and not usable:
        fix = "Look with `longctx checkpoint list`, or set `ckpt_path: null` for a fresh start."
        raise CheckpointError(str(folder), "must hold a checkpoint that is whole", f"{len(found)} damaged", fix)
    if not usable:
        return Check("start", "fine", f"a fresh start: no checkpoint in {folder}")
    assert usable[0].commit is not None
    step = usable[0].commit.step
    return Check("start", "fine", f"goes on after step {step:,}, from {usable[0].path}", {"step": step})


def checkpoint_folder(subject: Subject) -> Path | None:
    """Where ``AsyncDCPCheckpoint`` writes; None if the run does not use it."""
    settings = subject.callback("AsyncDCPCheckpoint")
    if settings is None:
        return None
    given = settings.get("dirpath")
    return Path(given) if given else Path(subject.trainer.get("default_root_dir") or ".") / "checkpoints"
