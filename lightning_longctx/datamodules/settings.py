"""The two groups of settings of the data module, small enough to write in YAML.

Only what is implemented is here: a setting that is read and ignored would be worse than a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.spelling import nearest
from lightning_longctx.units import TokenCount, parse_token_count

__all__ = [
    "MAX_DOCS_PER_PACK",
    "CountMode",
    "LoadingSettings",
    "LongDocument",
    "Mixing",
    "OnBadRecord",
    "OnUnevenEnd",
    "PackingSettings",
    "Runtime",
    "StopMode",
    "WarmupSettings",
    "as_settings",
    "check_weights",
    "known_names",
]

#: Most documents of a row: rows of many tiny documents stall variable-length attention kernels.
MAX_DOCS_PER_PACK = 4096

Settings = TypeVar("Settings")
LongDocument = Literal["split", "error", "truncate", "drop"]
CountMode = Literal["total", "effective"]
Mixing = Literal["token", "sample"]
StopMode = Literal["all_exhausted", "first_exhausted", "forever"]
OnBadRecord = Literal["error", "skip"]
OnUnevenEnd = Literal["stop", "pad"]
Runtime = Literal["main", "worker"]


def known_names(name: str, known: list[str]) -> str:
    """A sentence that lists ``known`` and, where one is close, names it first."""
    close = nearest(name, known)
    hint = f"Did you mean {close!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def as_settings(kind: type[Settings], value: Settings | Mapping[str, Any], field: str) -> Settings:
    """Turn a mapping, as YAML and Python users write it, into settings.

    Raises:
        ConfigurationError: not a mapping, or an unknown key (the nearest one is named).
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        fix = f"Give {kind.__name__} or a mapping of its fields."
        raise ConfigurationError(field, f"must be {kind.__name__}", repr(value), fix)
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise ConfigurationError(field, "must have known keys only", repr(key), known_names(str(key), known))
    return kind(**value)


def _check_choice(field: str, value: str, choices: object) -> None:
    known = list(get_args(choices))
    if value not in known:
        raise ConfigurationError(field, "must be a known choice", repr(value), known_names(str(value), known))


def _check_at_least(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(field, f"must be an integer of at least {least}", repr(value), "Change it.")


def _check_bools(group: str, settings: object, *names: str) -> None:
    """Python takes any word for true: `"false"` would switch on what it should switch off."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            fix = "Write it without quotes."
            raise ConfigurationError(f"{group}.{name}", "must be true or false", repr(value), fix)


def check_weights(weights: Mapping[str, float], names: Sequence[str]) -> None:
    """Check weights of sources that are set during a run.

    Raises:
        ConfigurationError: an unknown source, or a weight that is not positive and finite.
    """
    for name, weight in weights.items():
        field = f"data.sources.{name}.weight"
        if name not in names:
            raise ConfigurationError(field, "must be of a known source", name, known_names(name, list(names)))
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ConfigurationError(field, "must be positive and finite", repr(weight), "Set a small one instead.")


@dataclass(frozen=True)
class PackingSettings:
    """How documents become one row.

    Args:
        long_document: what happens to a document longer than ``max_seq_len``. ``split`` cuts it into pieces, each a
            document of its own (default: no token is lost); ``error`` stops the run; ``truncate`` keeps the beginning;
            ``drop`` leaves the document out. All but ``error`` are counted.
        pad_to_multiple_of: a row's length is rounded up to this and to the sequence-parallel size. Default 1: padding
            costs time, so a row gets only what its sharding needs. Kernels that want aligned lengths ask for more.
        count_mode: what the budget of a row counts. ``total`` (default): tokens. ``effective``: targets, so that rows
        of
            masked prompts carry as much training as others; their tokens are capped by ``physical_overflow_ratio``.
        physical_overflow_ratio: under ``effective``, most tokens of a row as a multiple of the budget, at least 1.
            Default 1.5. The cap holds also for documents without any target.
        max_docs_per_pack: most documents of a row. Default 4096: many tiny documents stall variable-length kernels.
        cut_to_fill: whether, where whole documents leave more than 0.2 % of a row empty, the longest waiting one is cut
            to close the gap; its rest stays. Default false: a cut costs a document its context, which only pretraining
            can afford. Not with ``count_mode: effective``.
        dynamic: whether rows are filled to a token budget (default). False packs ``documents_per_batch`` documents into
            each row, whatever their tokens, and asks no buffer policy.
        documents_per_batch: documents of a row under ``dynamic: false``. Default 1.

    Raises:
        ConfigurationError: an unknown choice, a multiple or number below 1, or a ratio below 1.
    """

    long_document: LongDocument = "split"
    pad_to_multiple_of: int = 1
    count_mode: CountMode = "total"
    physical_overflow_ratio: float = 1.5
    max_docs_per_pack: int = MAX_DOCS_PER_PACK
    cut_to_fill: bool = False
    dynamic: bool = True
    documents_per_batch: int = 1

    def __post_init__(self) -> None:
        _check_choice("packing.long_document", self.long_document, LongDocument)
        _check_choice("packing.count_mode", self.count_mode, CountMode)
        _check_bools("packing", self, "cut_to_fill", "dynamic")
        ratio = self.physical_overflow_ratio
        if not isinstance(ratio, int | float) or not 1 <= ratio < float("inf"):
            fix = "Write 1.5 for rows of at most one and a half budgets of tokens."
            got = self.physical_overflow_ratio
            raise ConfigurationError("packing.physical_overflow_ratio", "must be finite and at least 1", got, fix)
        _check_at_least("packing.max_docs_per_pack", self.max_docs_per_pack, 1)
        _check_at_least("packing.documents_per_batch", self.documents_per_batch, 1)
        if self.documents_per_batch > 1 and self.dynamic:
            fix = "Set `packing.dynamic: false`, or leave it out."
            count = self.documents_per_batch
            raise ConfigurationError("packing.documents_per_batch", "needs `dynamic: false`", count, fix)
        if self.cut_to_fill and (self.count_mode != "total" or not self.dynamic):
            fix = "Leave one of them out."
            rule = "needs `count_mode: total` and `dynamic: true`"
            other = f"count_mode {self.count_mode}, dynamic {self.dynamic}"
            raise ConfigurationError("packing.cut_to_fill", rule, other, fix)
        _check_at_least("packing.pad_to_multiple_of", self.pad_to_multiple_of, 1)


@dataclass(frozen=True)
class WarmupSettings:
    """A token budget that grows over the first steps, linearly, to the full one.

    Args:
        steps: optimizer steps over which it grows. Default 0: none.
        initial_tokens: budget of a micro-batch in the first step. Default 4096. A document that is longer goes alone.

    Raises:
        ConfigurationError: a negative number of steps, or no token.
    """

    steps: int = 0
    initial_tokens: TokenCount = 4096

    def __post_init__(self) -> None:
        _check_at_least("loading.warmup.steps", self.steps, 0)
        parse_token_count(self.initial_tokens, "data.loading.warmup.initial_tokens")


@dataclass(frozen=True)
class LoadingSettings:
    """Where documents come from, in which order, and what happens at the end.

    Args:
        num_workers: processes that read and tokenize. Default 0, in the main process: works everywhere and shows errors
            where they happen; set it when ``data`` waits show up. Any number gives the same documents in the same
            order.
        runtime: where rows are chosen and packed while the step computes: ``main`` (default) in a thread of this
            process, or ``worker``, in one process of its own, for a training process whose Python is busy. Both give
            the same rows and states. ``num_workers`` says where documents are read and tokenized, under either.
        seed: of the order of documents. Default 42, and not the global seed, so that a sweep over seeds of the model
            sees the same data.
        shuffle: whether indexable sources are read in a new random order in each epoch. Streams keep their order.
        mixing: what the weights of sources count. ``token`` (default): tokens, which is what a share of 0.4 means where
            the documents of one source are a thousand times longer than those of another. ``sample``: documents.
        stop_mode: ``all_exhausted`` (default) is one pass over everything, so nothing repeats unless asked;
            ``first_exhausted`` ends when the source whose turn it is has nothing left, so the mix never changes;
            ``forever`` starts an exhausted source again.
        on_bad_record: ``error`` (default) stops at a record that cannot be used and names file and line; ``skip``
            counts it.
        on_uneven_end: when one data-parallel rank runs out first: ``stop`` (default) ends the epoch for all and counts
            what is left over; ``pad`` gives the others' remaining rows beside rows of padding, which have no weight.
        balance: whether data-parallel ranks take rows of like attention cost together. Each plans 16 rows ahead and
            picks by what the others could give, so the order of rows changes, and the first rows of an epoch are not
            balanced yet. Default false: it pays where the step time follows attention, which ``longctx probe`` shows.
        warmup: a token budget that grows over the first steps. Default: none.
        drop_last: whether rows below the budget at the end of an epoch are left out (and counted). Default false: a
            short row is right under the exact token mean.

    Raises:
        ConfigurationError: an unknown choice, or a negative number of workers.
    """

    num_workers: int = 0
    runtime: Runtime = "main"
    seed: int = 42
    shuffle: bool = True
    mixing: Mixing = "token"
    stop_mode: StopMode = "all_exhausted"
    on_bad_record: OnBadRecord = "error"
    on_uneven_end: OnUnevenEnd = "stop"
    drop_last: bool = False
    balance: bool = False
    warmup: WarmupSettings = WarmupSettings()

    def __post_init__(self) -> None:
        object.__setattr__(self, "warmup", as_settings(WarmupSettings, self.warmup, "data.loading.warmup"))
        _check_choice("loading.runtime", self.runtime, Runtime)
        _check_choice("loading.mixing", self.mixing, Mixing)
        _check_choice("loading.stop_mode", self.stop_mode, StopMode)
        _check_choice("loading.on_bad_record", self.on_bad_record, OnBadRecord)
        _check_choice("loading.on_uneven_end", self.on_uneven_end, OnUnevenEnd)
        _check_bools("loading", self, "shuffle", "drop_last", "balance")
        _check_at_least("loading.num_workers", self.num_workers, 0)
        _check_at_least("loading.seed", self.seed, 0)
        if self.seed >= 2**63:  # PyTorch's generators take no more
            raise ConfigurationError("loading.seed", "must be below 2^63", self.seed, "Use a smaller number.")
