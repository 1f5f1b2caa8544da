"""Sources that a user gives as Python objects: sequences, iterables, and Hugging Face datasets of both kinds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch.utils.data import IterableDataset

from lightning_longctx.datamodules.numbered import numbered_source
from lightning_longctx.datamodules.source_settings import SourceSettings, is_sequence
from lightning_longctx.datamodules.sources import RecordStream, SequenceSource, Source, StreamingSource, skip
from lightning_longctx.errors import ConfigurationError, DataError

__all__ = ["IterableSource", "records_source"]


class IterableSource(StreamingSource):
    """Any iterable of dicts. A resume goes on at its own state, if it has one, and reads over the records if not.

    It has one if the iterable or its iterator offers ``state_dict`` and ``load_state_dict``, as streaming datasets of
    Hugging Face do. One that shuffles in a buffer is read over all the same: its state leaves out the buffer's records.

    Args:
        name: of the source.
        settings: of the source; its ``records``.
        field: the setting it stands in, for errors.

    Raises:
        ConfigurationError: a Hugging Face dataset that was split by node: dealing it to ranks again would lose records.
    """

    def __init__(self, name: str, settings: SourceSettings, field: str = "") -> None:
        super().__init__(name, settings, field)
        self._records = settings.records
        self._opened = False
        split = getattr(self._records, "_distributed", None)
        if split is not None and getattr(split, "world_size", 1) > 1:
            got, fix = "one that was split by node", "Give the whole dataset: the data module deals it to the ranks."
            raise ConfigurationError(self.field, "must be a whole dataset", got, fix)

    def open(self, taken: int = 0, state: Any = None) -> RecordStream:
        """Start a pass.

        Raises:
            DataError: the source is an iterator that was already started, so a second pass would silently be empty.
        """
        # Their state lies in the dataset, not in the iterator: two passes at a time (validation) would share it.
        records = _own_copy(self._records) if _is_hugging_face(self._records) else self._records
        owner = _state_owner(records)
        _go_to(owner, state)
        iterator = iter(records)
        if iterator is records and self._opened:
            got = f"a {type(iterator).__name__} that was read before"
            fix = "Give an object whose __iter__ starts anew, or a sequence."
            raise DataError(self.field, "must be iterable more than once", got, fix)
        self._opened = True
        if owner is None:
            owner = _state_owner(iterator)
            _go_to(owner, state)
        stream = _Iterated(iterator, owner)
        return skip(stream, taken, self.field) if state is None or owner is None else stream


class _Iterated(RecordStream):
    def __init__(self, iterator: Iterator[Mapping[str, Any]], owner: Any) -> None:
        self._iterator = iterator
        self._owner = owner

    def __next__(self) -> Mapping[str, Any]:
        return next(self._iterator)

    def state(self) -> dict[str, Any] | None:
        return None if self._owner is None else deepcopy(self._owner.state_dict())


def records_source(name: str, settings: SourceSettings, field: str = "") -> Source:
    """The source of ``settings.records``: indexable if it has a length and items, a stream otherwise.

    Raises:
        ConfigurationError: records that are neither, or no records at all.
    """
    records, field = settings.records, field or f"data.sources.{name}"
    if isinstance(records, (Mapping, str, bytes)) or not (is_sequence(records) or hasattr(records, "__iter__")):
        fix = "Give a list or iterable of dicts, or one split of a dataset."
        raise ConfigurationError(field, "must have a sequence or iterable as `records`", type(records).__name__, fix)
    if (numbered := numbered_source(name, settings, field)) is not None:
        return numbered
    # A torch IterableDataset inherits __getitem__ and may have a length, yet cannot be read by number.
    if not is_sequence(records) or isinstance(records, IterableDataset):
        return IterableSource(name, settings, field)
    if len(records) == 0:
        fix = "Check where they come from, or leave the source out."
        raise ConfigurationError(field, "must have at least one document", "no records", fix)
    try:
        records[0]
    except (KeyError, TypeError):
        fix = "Give a list of dicts, or something whose items are numbered from 0."
        raise ConfigurationError(field, "must give records by number", type(records).__name__, fix) from None
    return SequenceSource(name, settings, records, field)


def _state_owner(value: Any) -> Any:
    """``value`` if it can tell where it is and go there, else None."""
    able = hasattr(value, "load_state_dict") and _called_without_arguments(getattr(value, "state_dict", None))
    return value if able and not _shuffles_in_a_buffer(getattr(value, "_ex_iterable", None)) else None


def _called_without_arguments(method: Any) -> bool:
    """Whether a ``state_dict`` tells the place by itself; some libraries want to be told how much was read."""
    try:
        inspect.signature(method).bind()
    except TypeError:  # not callable, or it needs arguments
        return False
    return True


def _go_to(owner: Any, state: Any) -> None:
    if owner is not None and state is not None:
        owner.load_state_dict(deepcopy(state))


def _is_hugging_face(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "datasets"


def _own_copy(dataset: Any) -> Any:
    """A streaming dataset of Hugging Face with a state of its own."""
    # Each refers to the hub's open file systems, which belong to the whole process: copying them would open new ones,
    # and fails where that happens in another thread than the one that made the dataset.
    shared = vars(dataset).get("_IterableDataset__hffs_cache")
    return deepcopy(dataset, {} if shared is None else {id(shared): shared})


def _shuffles_in_a_buffer(node: Any) -> bool:
    """Whether a chain of Hugging Face iterables holds records back that its state does not have."""
    if node is None:
        return False
    inner = [getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or [])]
    return "BufferShuffled" in type(node).__name__ or any(map(_shuffles_in_a_buffer, inner))
