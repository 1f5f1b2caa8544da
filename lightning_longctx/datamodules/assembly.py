"""From the settings of a data module to those of its rows: for training, and for validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.rows import RowSettings, RowWarmup
from lightning_longctx.datamodules.settings import LoadingSettings, PackingSettings
from lightning_longctx.datamodules.sizes import row_budget
from lightning_longctx.datamodules.sources import Source
from lightning_longctx.datamodules.tokenizers import Tokenize
from lightning_longctx.units import parse_token_count

__all__ = ["EVALUATION_DOCUMENTS", "RowAssembly"]

#: How many training documents stand in for validation data where there is none. A look at the loss in about a minute at
#: a window of 4,096 on a laptop; the same documents each time and on any layout.
EVALUATION_DOCUMENTS = 16


@dataclass(frozen=True)
class RowAssembly:
    """Everything about rows that does not depend on the layout, and the settings that follow for one.

    Attributes:
        sources: for training, by source id.
        validation: for validation and test; None where a sample of the training documents stands in.
        source_names: by source id; names that only validation has come last.
        max_seq_len: longest document in tokens.
        max_tokens_per_batch: budget of a row.
        packing: how documents become a row.
        loading: where they come from.
        tokenize: text to ids; None while only the model knows.
    """

    sources: Sequence[Source]
    validation: Sequence[Source] | None
    source_names: tuple[str, ...]
    max_seq_len: int
    max_tokens_per_batch: int
    packing: PackingSettings
    loading: LoadingSettings
    tokenize: Tokenize | None

    def facts(self) -> dict[str, object]:
        """Settings that decide which documents come, in which rows, by the names that users know."""
        validation = [] if self.validation is None else self.validation
        # How rows are made in time may differ between machines; what they are may not.
        loading = replace(self.loading, num_workers=0, runtime="main")
        return {
            "data.sources": [(source.name, source.weight) for source in self.sources],
            "data.validation_sources": [(source.name, source.weight) for source in validation],
            "data.max_seq_len": self.max_seq_len,
            "data.micro_batch_size": self.max_tokens_per_batch // self.max_seq_len,
            "data.packing": self.packing,
            "data.loading": loading,
        }

    def training(self, sp_size: int, vocab_size: int | None, accumulate: int) -> RowSettings:
        """Settings of training rows.

        Args:
            sp_size: ranks that share a row.
            vocab_size: token ids of the model; None if unknown.
            accumulate: micro-batches of a step, which a warm-up in steps needs.
        """
        loading = self.loading
        sequence = SequenceSettings(loading.seed, loading.shuffle, loading.stop_mode, loading.mixing)
        tokens = parse_token_count(loading.warmup.initial_tokens)
        warmup = RowWarmup(loading.warmup.steps * accumulate, tokens) if loading.warmup.steps else None
        settings = self._rows(self.sources, sequence, sp_size, vocab_size)
        return replace(settings, drop_last=loading.drop_last, balance=loading.balance, warmup=warmup)

    def evaluation(self, sp_size: int, vocab_size: int | None) -> RowSettings:
        """Settings of validation and test rows: every document in order, or the sample of the training documents."""
        if self.validation is not None:
            return self._rows(self.validation, SequenceSettings(shuffle=False, mixing="sample"), sp_size, vocab_size)
        sample = SequenceSettings(self.loading.seed, mixing="sample", limit=EVALUATION_DOCUMENTS)
        return self._rows(self.sources, sample, sp_size, vocab_size)

    def readers(self, vocab_size: int | None) -> list[DocumentReader]:
        """What makes documents of records: for training, and for validation if that has sources of its own."""
        evaluation = [] if self.validation is None else [self.evaluation(1, vocab_size)]
        return [settings.reader for settings in (self.training(1, vocab_size, 1), *evaluation)]

    def describe(self, source_id: int, number: int) -> str:
        """Where training document ``number`` of a source is, for people."""
        if not 0 <= source_id < len(self.sources):
            return f"source {source_id}, document {number}"
        return f"{self.sources[source_id].describe(number)} ({self.source_names[source_id]})"

    def _rows(
        self, sources: Sequence[Source], sequence: SequenceSettings, sp_size: int, vocab_size: int | None
    ) -> RowSettings:
        reader = DocumentReader(
            sources,
            self.tokenize,
            self.max_seq_len,
            self.packing.long_document,
            self.loading.on_bad_record,
            tuple(self.source_names.index(source.name) for source in sources),
            vocab_size,
        )
        multiple = lcm(self.packing.pad_to_multiple_of, sp_size)
        return RowSettings(
            reader,
            sequence,
            row_budget(self.packing, self.max_tokens_per_batch, self.max_seq_len, multiple),
            self.packing.count_mode == "effective",
            multiple,
            self.loading.num_workers,
            cut_to_fill=self.packing.cut_to_fill,
        )
