"""Checks of the run itself: the model and its sizes, the documents, the first row, where it starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_longctx.checkpoint.address import Folder, as_folder, folder_of_run
from lightning_longctx.checkpoint.discovery import Found, is_checkpoint, scan
from lightning_longctx.checkpoint.layout import Commit
from lightning_longctx.checkpoint.restore import OpenCheckpoint
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.paths import is_remote
from lightning_longctx.datamodules.sources import IndexableSource, Source, StreamingSource
from lightning_longctx.errors import CheckpointError, ConfigurationError, DataError, FieldError, raise_together
from lightning_longctx.tools.before_start import check_checkpoint_path, check_folders, check_sizes
from lightning_longctx.tools.check.length import length_of
from lightning_longctx.tools.check.report import Check, Skipped
from lightning_longctx.tools.check.subject import Subject
from lightning_longctx.tools.probe.command import complete_tokenizer
from lightning_longctx.tools.probe.streams import FirstRows, read_streams
from lightning_longctx.topology import Topology
from lightning_longctx.units import counted

__all__ = [
    "check_first_row",
    "check_model",
    "check_places",
    "check_run_sizes",
    "check_sources",
    "check_start",
    "checkpoint_folder",
]

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
    """Whether every file is there, may be read and holds something, and how many there are; of validation too."""
    readers = subject.packing_data().readers()
    raise_together([error for reader in readers for source in reader.sources for error in _file_problems(source)])
    texts = [", ".join(map(_size, reader.sources)) for reader in readers]
    facts = {"sources": {source.name: len(source.paths) for source in readers[0].sources}}
    return Check("sources", "fine", "; validation: ".join(texts), facts)


def _file_problems(source: Source) -> Iterator[FieldError]:
    here = [path for path in source.paths if not is_remote(path)]
    closed = [path for path in here if not os.access(path, os.R_OK)]
    if closed:
        got = f"{', '.join(closed[:_FILES_NAMED])} ({len(closed)} of {counted(len(source.paths), 'file')})"
        yield DataError(source.field, "must be readable", got, "Change the permissions, or leave them out.")
    elif source.paths and len(here) == len(source.paths) and not any(os.path.getsize(path) for path in here):
        got = f"{counted(len(here), 'file')} without a byte, such as {here[0]}"
        yield DataError(source.field, "must have at least one document", got, "Fill it, or leave the source out.")


def _first_documents(reader: DocumentReader) -> Iterator[FieldError]:
    """Read the first record of each source: one that cannot be is most often one of many, such as a wrong key."""
    for number, source in enumerate(reader.sources):
        try:
            first = [next(source.open(), None)] if isinstance(source, StreamingSource) else []
            found = None if first == [None] else reader.draw(number, 0, *first).error
            yield from [found] if found is not None else []
        except FieldError as error:
            yield error


def _size(source: Source) -> str:
    files = counted(len(source.paths), "file") if source.paths else ""
    if isinstance(source, IndexableSource) and not source.paths:  # in memory, or mapped
        return f"{source.name}: {counted(len(source), 'record')}"
    return f"{source.name}: {files or 'a stream'}"


def check_first_row(subject: Subject) -> Check:
    """Read, tokenize, choose, pack and slice until the first row is there, as the first rank does."""
    data, strategy = subject.packing_data(), subject.build("strategy")
    complete_tokenizer(data, subject.configuration)
    readers = data.readers(subject.vocabulary())
    raise_together([error for reader in readers for error in _first_documents(reader)])
    sp_size = int(getattr(strategy, "sequence_parallel_size", 1))
    dp_size = max(1, (subject.devices or 1) * subject.nodes // sp_size)
    topology = Topology(0, dp_size * sp_size, 0, dp_size, sp_size=sp_size)
    (stream,) = read_streams(data, [topology], None, 1, 1, FirstRows)
    pieces = [entry for draw in stream.draws for entry in draw.entries]
    read = len({(entry.source_id, entry.number) for entry in pieces})  # a fit counts a split document once, too
    if not stream.rows:
        fix = "Give more documents; check limits on lengths and `drop_last`."
        got = counted(read, "document")
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
        f"{counted(read, 'document')} read in {stream.first_seconds:.1f} s; the row holds"
        f" {', '.join(f'{count:,} of {name}' for name, count in names.items())}"
        f" ({_lengths([tokens for _, _, tokens in row.documents])}), filled to {row.fill:.1%}{of}"
    )
    return Check("first row", "fine", text, {"read": read, "fill": row.fill, "documents": documents})


def _lengths(tokens: list[int]) -> str:
    more = len(tokens) - _DOCUMENTS_NAMED
    *first, last = tokens[:_DOCUMENTS_NAMED]
    shown = ", ".join([*(f"{count:,}" for count in first), counted(last, "token")])
    return shown if more <= 0 else f"{shown} and {more:,} more"


def check_start(subject: Subject) -> Check:
    """Where training would begin: the checkpoint that ``ckpt_path`` names, or a fresh start."""
    path = subject.settings.get("ckpt_path")
    folder = checkpoint_folder(subject)
    check_checkpoint_path(path, folder)
    if folder is None or path not in (None, "last"):
        if path is not None and is_checkpoint(path):
            _check_weights(subject, path)
        return Check("start", "fine", f"`ckpt_path: {path}`" if path else "a fresh start: `ckpt_path` is not set")
    found = scan(folder)
    usable = [one for one in found if one.commit is not None and one.commit.resumable and not one.problem]
    if path is None:
        odd = f"; `ckpt_path: last` would go on from {usable[0].path}" if usable else ""
        return Check("start", "warning" if odd else "fine", f"a fresh start: `ckpt_path` is not set{odd}")
    if found and not usable:
        fix = "Look with `longctx checkpoint list`, or set `ckpt_path: null` for a fresh start."
        raise CheckpointError(str(folder), "must hold a checkpoint that is whole", f"{len(found)} damaged", fix)
    if not usable:
        return Check("start", "fine", f"a fresh start: no checkpoint in {folder}")
    newest = usable[0].commit
    assert newest is not None
    _check_weights(subject, usable[0].path)
    text = f"goes on after step {newest.step:,}, from {usable[0].path}"
    strange = [*_odd_resume(newest, usable, length_of(subject).max_steps)]
    return Check("start", "warning" if strange else "fine", "; ".join([text, *strange]), {"step": newest.step})


def _odd_resume(newest: Commit, usable: Sequence[Found], max_steps: int | None) -> Iterator[str]:
    runs = {one.commit.run for one in usable if one.commit is not None}
    if len(runs) > 1:
        yield f"the folder has checkpoints of {counted(len(runs), 'run')}, and this is the newest of all"
    if max_steps is not None and max_steps <= newest.step:
        yield "nothing is left to train: raise `trainer.max_steps`, or name another folder (`dirpath`)"


def _check_weights(subject: Subject, checkpoint: Any) -> None:
    """Refuse a checkpoint of another model, by the shapes of both."""
    try:
        module = subject.shaped_model()
    except Skipped:
        return
    settings = (subject.callback("AsyncDCPCheckpoint") or {}).get("options") or {}
    if settings.get("on_missing") != "warn":
        OpenCheckpoint(checkpoint, trust_pickle=bool(settings.get("trust_pickle"))).check_weights(module)


def check_places(subject: Subject) -> Check:
    """Whether logs and checkpoints can be written where they are to be."""
    root = subject.trainer.get("default_root_dir") or "."
    logs = [_log_folder(entry, root) for entry in _loggers(subject)]
    saves = checkpoint_folder(subject)
    check_folders([*(("trainer.logger", folder) for folder in logs), ("callbacks.AsyncDCPCheckpoint.dirpath", saves)])
    told = [f"logs in {', '.join(logs)}"] if logs else ["no logs"]
    return Check("folders", "fine", ", ".join([*told, *([f"checkpoints in {saves}"] if saves else [])]))


def _loggers(subject: Subject) -> list[Mapping[str, Any]]:
    given = subject.trainer.get("logger")
    if given in (None, True, False):
        return [] if given is False else [{}]
    return [entry for entry in (given if isinstance(given, list) else [given]) if isinstance(entry, Mapping)]


def _log_folder(entry: Mapping[str, Any], root: str) -> str:
    """Where a logger writes: CSV and TensorBoard in a folder of a name, others in the one that they are given."""
    settings = entry.get("init_args") or {}
    folder = settings.get("save_dir") or settings.get("dir") or root
    if str(entry.get("class_path", "CSVLogger")).rpartition(".")[2] not in ("CSVLogger", "TensorBoardLogger"):
        return str(folder)
    return str(as_folder(folder, "trainer.logger") / (settings.get("name", "lightning_logs") or ""))


def checkpoint_folder(subject: Subject) -> Folder | None:
    """Where ``AsyncDCPCheckpoint`` writes; None if the run does not use it."""
    settings = subject.callback("AsyncDCPCheckpoint")
    if settings is None:
        return None
    return folder_of_run(settings.get("dirpath"), subject.trainer.get("default_root_dir"))
