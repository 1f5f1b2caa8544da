"""What a user may write about one source: where it is, how much of it, and what its records are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_longctx.datamodules.settings import known_names
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import TokenCount, parse_token_count

__all__ = ["RecordFormat", "SourceSettings", "TrainOn", "is_sequence"]

_INFINITY = float("inf")

Modality = Literal["text", "multimodal", "diffusion"]
RecordFormat = Literal["text", "chat", "prompt_response", "tokens"]
TrainOn = Literal["assistant", "all"]
_CHOICES: dict[str, Any] = {"modality": Modality, "format": RecordFormat, "train_on": TrainOn}
_FIELD_NAMES = ("text_field", "prompt_field", "response_field")


@dataclass
class SourceSettings:
    """One source in YAML, or in Python with ``records``.

    Args:
        path: a built-in name (``python-stdlib``, ``package-metadata``), a file, a glob, an address such as
            ``s3://bucket/*.parquet`` or ``hf://datasets/owner/name/*.parquet``, a folder written by a Hugging Face
            dataset's ``save_to_disk``, or a list of these. ``.jsonl`` files have a document a line and ``.parquet``
            files a document a row, all others are one document each; text and JSON lines may be compressed (``.gz``,
            ``.zst``).
        records: instead of ``path``: any sequence or iterable of dicts, such as a Hugging Face dataset.
        weight: share against the other sources, in tokens, or in documents under ``loading.mixing: sample``. Default 1
            for each: equal shares until one is exhausted.
        format: what a record is. ``text`` (default): a text, or ``input_ids`` where a record has them. ``chat``:
            ``messages`` with role and content, or ``conversations`` with from and value (ShareGPT), written by the chat
            template of the tokenizer. ``prompt_response``: two texts. ``tokens``: ``input_ids`` and, optionally,
            aligned ``labels``.
        train_on: targets of ``chat`` and ``prompt_response``. ``assistant`` (default): what the model will have to
            write, the assistant's turns or the response. ``all``: every token.
        text_field: the key of the text in a record. Default ``text``, the usual one.
        messages_field: the key of the messages. Default None: ``messages``, or ``conversations`` where it is missing.
        prompt_field: the key of the prompt. Default ``prompt``.
        response_field: the key of the response. Default ``response``.
        min_tokens: shorter documents are dropped and counted. Default None: all are kept.
        max_tokens: longer documents are dropped and counted. Default None: all are kept.
        modality: what the tokens stand for: ``text`` (default), ``multimodal`` or ``diffusion``. Declared and not
            guessed; a buffer policy that was measured on text alone refuses the others.

    Raises:
        ConfigurationError: neither or both of ``path`` and ``records``, a path that is none, a weight that is not
            positive and finite, or an unknown choice.

    Example:
        >>> SourceSettings(path="books/*.parquet", weight=0.4, min_tokens="64K").min_tokens
        65536
    """

    path: str | list[str] | None = None
    records: Any = None
    weight: float = 1.0
    format: RecordFormat = "text"
    train_on: TrainOn = "assistant"
    text_field: str = "text"
    messages_field: str | None = None
    prompt_field: str = "prompt"
    response_field: str = "response"
    min_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    modality: Modality = "text"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.records is None):
            got = "both" if self.path else "neither"
            raise ConfigurationError("data.sources", "must have one of `path` and `records`", got, "Give one of them.")
        if self.path is not None:
            self.path = _checked_path(self.path)
        if (
            isinstance(self.weight, bool)
            or not isinstance(self.weight, (int, float))
            or not 0 < self.weight < _INFINITY
        ):
            fix = "Leave the source out instead."
            raise ConfigurationError(
                "data.sources", "must have a positive `weight`, and a finite one", repr(self.weight), fix
            )
        self._check_choices()
        self._check_limits()

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value, known = getattr(self, name), list(get_args(choices))
            if value not in known:
                rule = f"must have a known `{name}`"
                raise ConfigurationError("data.sources", rule, repr(value), known_names(str(value), known))
        for name in _FIELD_NAMES:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                fix = "Write the key as it stands in the records."
                raise ConfigurationError(f"data.sources.{name}", "must be the name of a key", repr(value), fix)

    def _check_limits(self) -> None:
        if self.min_tokens is not None:
            self.min_tokens = parse_token_count(self.min_tokens, "data.sources.min_tokens")
        if self.max_tokens is not None:
            self.max_tokens = parse_token_count(self.max_tokens, "data.sources.max_tokens")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            got = f"{self.min_tokens} above {self.max_tokens}"
            raise ConfigurationError("data.sources.min_tokens", "must be at most `max_tokens`", got, "Exchange them.")

    @classmethod
    def of(cls, name: str, value: Any, group: str = "data.sources") -> SourceSettings:
        """Read a source in any form that a user may write it.

        Args:
            name: of the source, for errors.
            value: settings, a mapping of them, a path or built-in name, a list of paths, or a sequence or iterable of
                dicts.
            group: the setting that the source stands in, for errors.

        Raises:
            ConfigurationError: an unknown key (the nearest one is named), or something that cannot be read.
        """
        field = f"{group}.{name}"
        if isinstance(value, cls):
            return value
        if _is_path(value):
            return cls(path=value)
        if type(value).__name__.endswith("DatasetDict"):
            fix = f"Give one of its splits: {', '.join(map(str, value))}."
            raise ConfigurationError(field, "must be one dataset", f"a {type(value).__name__}", fix)
        if isinstance(value, Mapping):
            return cls._of_mapping(field, value)
        if not isinstance(value, bytes) and (isinstance(value, Iterable) or is_sequence(value)):
            return cls(records=value)
        fix = "Give a path, a built-in name, or a sequence or iterable of dicts."
        raise ConfigurationError(field, "must be a source", type(value).__name__, fix)

    @classmethod
    def _of_mapping(cls, field: str, value: Mapping[Any, Any]) -> SourceSettings:
        known = [entry.name for entry in fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigurationError(field, "must have known keys only", repr(key), known_names(str(key), known))
        try:
            return cls(**value)
        except ConfigurationError as error:
            place = error.field.replace("data.sources", field, 1)
            raise ConfigurationError(place, error.rule, error.got, error.fix) from None


def is_sequence(value: Any) -> bool:
    """Whether something can be read by number: it has a length and items."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_path(value: Any) -> bool:
    """Whether something is a path or a list of them."""
    written = value if isinstance(value, (list, tuple)) else [value]
    return bool(written) and all(isinstance(entry, (str, Path)) for entry in written)


def _checked_path(path: Any) -> str | list[str]:
    if _is_path(path):
        return str(path) if isinstance(path, (str, Path)) else [str(entry) for entry in path]
    fix = "Write `path: books/*.parquet`, or a list of such paths."
    raise ConfigurationError("data.sources.path", "must be a path or a list of paths", repr(path), fix)
