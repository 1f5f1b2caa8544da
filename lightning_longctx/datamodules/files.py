"""From what a user wrote under a source's name to the source: what it is made of decides how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os.path import isdir, isfile  # Path's methods raise for a name that is too long for any file
from pathlib import Path
from typing import Any

from lightning_longctx.datamodules.builtin_sources import BUILTIN_SOURCES
from lightning_longctx.datamodules.json_lines import JsonLinesSource, JsonLinesStream
from lightning_longctx.datamodules.parquet import ParquetSource
from lightning_longctx.datamodules.paths import compression_of, find_files, is_remote, suffix_of
from lightning_longctx.datamodules.records import records_source
from lightning_longctx.datamodules.settings import known_names
from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.sources import Source
from lightning_longctx.datamodules.text_files import TextFilesSource
from lightning_longctx.errors import ConfigurationError, FieldError, raise_together

__all__ = ["open_source", "open_sources"]

_JSON_LINES = {".jsonl", ".ndjson"}
_PARQUET = {".parquet"}
# Formats that would otherwise be read as text, silently wrong.
_NOT_TEXT = {".7z", ".arrow", ".bin", ".bz2", ".csv", ".gz", ".json", ".npy", ".npz", ".pkl", ".pt", ".safetensors"}
_NOT_TEXT |= {".idx", ".mds", ".tar", ".tgz", ".tsv", ".xz", ".zip", ".zst"}
# Longer ones are told by their beginning: it may be a document that stands where its path belongs.
_LONGEST_PATH = 200
_CHECK = "Check the path, or leave the source out."
_OBJECT = "Give the library's object instead of its path, in Python, such as"


def open_sources(groups: Mapping[str, Mapping[str, Any]]) -> list[list[Source]]:
    """Open all sources by name, in their order. All that cannot be opened are told in one error.

    Args:
        groups: what the user wrote, by the setting it stands in: ``data.sources``, ``data.validation_sources``.

    Returns:
        The sources of each group.

    Raises:
        ConfigurationError: a group without a source, or sources that cannot be opened.
    """
    opened: list[list[Source]] = []
    refused: list[FieldError] = []
    for field, sources in groups.items():
        opened.append([])
        if not isinstance(sources, Mapping) or not sources:
            fix = "Give at least one, such as {code: python-stdlib}."
            raise ConfigurationError(field, "must be a mapping of sources by name", repr(sources), fix)
        for name, value in sources.items():
            try:
                opened[-1].append(open_source(str(name), value, field))
            except FieldError as error:
                refused.append(error)
    raise_together(refused)
    return opened


def open_source(name: str, value: Any, group: str = "data.sources") -> Source:
    """Make a source from what the user wrote under its name.

    Args:
        name: of the source.
        value: see :meth:`SourceSettings.of`.
        group: the setting it stands in, for errors.

    Raises:
        ConfigurationError: an unknown name, an empty glob or source, a directory, or a format that cannot be read.
    """
    settings, field = SourceSettings.of(name, value, group), f"{group}.{name}"
    if settings.path is None:
        return records_source(name, settings, field)
    if isinstance(settings.path, str) and settings.path in BUILTIN_SOURCES:
        return _builtin(name, settings, field)
    if isinstance(settings.path, str) and isdir(folder := Path(settings.path).expanduser()):
        return records_source(name, replace(settings, path=None, records=_saved_dataset(folder, field)), field)
    return _from_files(name, settings, field)


def _builtin(name: str, settings: SourceSettings, field: str) -> Source:
    found = BUILTIN_SOURCES[str(settings.path)]()
    if found and isinstance(found[0], str):
        # Nobody chose these files, so a file in an old encoding must not stop a first run.
        return TextFilesSource(name, settings, [str(path) for path in found], field, errors="replace")
    return records_source(name, replace(settings, path=None, records=found), field)


def _saved_dataset(folder: Path, field: str) -> Any:
    """A dataset that Hugging Face's ``save_to_disk`` wrote: Arrow files, mapped into memory."""
    if (folder / "dataset_dict.json").is_file():
        fix = f"Name a split, such as {folder}/train."
        raise ConfigurationError(field, "must be one dataset", f"{folder}, which has several", fix)
    if (folder / "index.json").is_file():
        fix = f"{_OBJECT} litdata.StreamingDataset({str(folder)!r})."
        got = f"{folder}, a data set of LitData or MosaicML Streaming"
        raise ConfigurationError(field, "must be a file or a glob", got, fix)
    if not (folder / "state.json").is_file():
        fix = f"Name the files, such as {folder}/*.jsonl."
        raise ConfigurationError(field, "must be a file or a glob", f"the directory {folder}", fix)
    try:
        from datasets import load_from_disk
    except ImportError:
        fix = "pip install 'lightning-longctx[hf]'."
        raise ConfigurationError(field, "needs the datasets package", folder, fix) from None
    return load_from_disk(str(folder))


def _from_files(name: str, settings: SourceSettings, field: str) -> Source:
    assert settings.path is not None
    paths = find_files(settings.path, field)
    written = str(settings.path)
    if not paths and isfile(f"{written}.idx"):
        fix = f"{_OBJECT} IndexedDataset({written!r})."
        raise ConfigurationError(
            field, "must be a file or a glob", f"{written!r}, an indexed data set of Megatron", fix
        )
    if not paths:
        fix = f"Paths start in {Path.cwd()}. {known_names(written, sorted(BUILTIN_SOURCES))}"
        got = repr(written if len(written) <= _LONGEST_PATH else f"{written[:_LONGEST_PATH]}...")
        raise ConfigurationError(field, "must be a built-in name, or match a file", got, fix)
    suffixes = {suffix_of(path) for path in paths}
    _check_codec(paths, field)
    if suffixes <= _JSON_LINES:
        return _json_lines(name, settings, paths, field)
    if suffixes <= _PARQUET and not any(map(compression_of, paths)):
        return ParquetSource(name, settings, paths, field)
    refused = sorted(suffixes & (_NOT_TEXT | _JSON_LINES | _PARQUET))
    if refused:
        fix = (
            "Use .jsonl, .parquet or text files alone; give others as a sequence of dicts or as their library's object."
        )
        rule = "must be files of one kind: text, JSON lines or parquet"
        raise ConfigurationError(field, rule, f"files with {refused}", fix)
    if settings.format != "text":
        fix = "Use .jsonl or .parquet files."
        raise ConfigurationError(field, f"must have records under `format: {settings.format}`", "text files", fix)
    return TextFilesSource(name, settings, paths, field)


def _json_lines(name: str, settings: SourceSettings, paths: list[str], field: str) -> Source:
    if any(is_remote(path) or compression_of(path) for path in paths):
        stream = JsonLinesStream(name, settings, paths, field)
        if next(stream.open(), None) is None:
            raise ConfigurationError(field, "must have at least one document", f"empty files: {settings.path}", _CHECK)
        return stream
    if not any(Path(path).stat().st_size for path in paths):
        raise ConfigurationError(field, "must have at least one document", f"empty files: {settings.path}", _CHECK)
    return JsonLinesSource(name, settings, paths, field)


def _check_codec(paths: list[str], field: str) -> None:
    zstandard = [path for path in paths if compression_of(path) == "zstd"]
    if not zstandard:
        return
    try:
        import pyarrow  # noqa: F401 - its codec reads them
    except ImportError:
        fix = "pip install 'lightning-longctx[hf]', or compress with gzip."
        raise ConfigurationError(field, "needs pyarrow to read .zst", zstandard[0], fix) from None
