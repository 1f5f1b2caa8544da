"""The data module: documents by name in, packed rows out, on any layout, exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import lcm
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_longctx.batch import is_packed_batch
from lightning_longctx.datamodules.choosing import resolve_policy
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.files import open_sources
from lightning_longctx.datamodules.ledger import ConsumptionLedger
from lightning_longctx.datamodules.loader import EvaluationLoader, RowPlan, TrainingLoader
from lightning_longctx.datamodules.messages import cold_start_warning, first_row_line, start_line, summarize
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.policies import BufferPolicy, DocumentCountPolicy, FixedBufferPolicy, PackingFacts
from lightning_longctx.datamodules.row_state import COUNTERS, RowState
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowWarmup
from lightning_longctx.datamodules.settings import LoadingSettings, PackingSettings, as_settings
from lightning_longctx.datamodules.sizes import (
    accumulation,
    check_budget,
    check_micro_batch_size,
    check_warmup,
    row_budget,
)
from lightning_longctx.datamodules.sources import Source, SourceSettings
from lightning_longctx.datamodules.state import join_states, restore_state, saved_state
from lightning_longctx.datamodules.tokenizers import FROM_MODEL, ModelTokenizer, Tokenize, resolve_tokenizer
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, topology_of
from lightning_longctx.units import TokenCount, parse_token_count

__all__ = ["DynamicBatchingDataModule"]

#: How many training documents stand in for validation data where there is none. A look at the loss in about a minute at
#: a window of 4,096 on a laptop; the same documents each time and on any layout.
EVALUATION_DOCUMENTS = 16

_DEFAULT_PACKING = PackingSettings()
_DEFAULT_LOADING = LoadingSettings()


class DynamicBatchingDataModule(pl.LightningDataModule):
    """Packs documents from named sources into rows of at most ``micro_batch_size * max_seq_len`` tokens.

    Args:
        sources: by name: a built-in name, a path or glob, :class:`SourceSettings` (a mapping in YAML), or a sequence or
            iterable of dicts with ``text`` or ``input_ids`` (and aligned ``labels``).
        validation_sources: the same, for ``validate``, ``test`` and validation during ``fit``. Default None: ``fit``
            does not validate, and ``validate`` and ``test`` read a fixed sample of 16 training documents.
        tokenizer: ``bytes`` (default, needs nothing), ``from_model``, the path of a ``tokenizer.json``, or a callable.
        max_seq_len: longest document in tokens. Default 4096: runs on any machine.
        micro_batch_size: windows in a row. Default 1: at long context one window fills a device.
        global_batch_tokens: budget of an optimizer step over all ranks; sets ``trainer.accumulate_grad_batches``.
            Default None: the Trainer's own setting stays.
        buffer_policy: which documents make a row: ``adaptive`` (default: the first row after the fewest documents, and
            full rows for the whole run), ``fixed`` (200 candidates, the published default elsewhere),
            ``context_aware``, or a :class:`BufferPolicy`.
        packing: see :class:`PackingSettings`.
        loading: see :class:`LoadingSettings`.

    Attributes:
        max_seq_len: as given, an int.
        max_tokens_per_batch: ``micro_batch_size * max_seq_len``: the budget, and ``loss_divisor``.
        vocab_size: number of token ids; None while unknown.
        source_names: by source id; names that only validation has come last.
        packing_facts: what the buffer policy was told about the run.

    Raises:
        ConfigurationError: a setting, source or tokenizer that cannot work.

    Example:
        >>> data = DynamicBatchingDataModule(
        ...     sources={"a": [{"text": "hello"}, {"text": "world"}]}, max_seq_len=16
        ... )
        >>> [row["input_ids"].shape[1] for row in data.train_dataloader()]
        [12]
    """

    def __init__(  # noqa: PLR0913 - the nine names that users write in YAML, two of them groups already
        self,
        sources: dict[str, str | SourceSettings | Any],
        validation_sources: dict[str, str | SourceSettings | Any] | None = None,
        tokenizer: str | Tokenize = "bytes",
        max_seq_len: TokenCount = 4096,
        micro_batch_size: int = 1,
        global_batch_tokens: TokenCount | None = None,
        buffer_policy: str | BufferPolicy = "adaptive",
        packing: PackingSettings = _DEFAULT_PACKING,
        loading: LoadingSettings = _DEFAULT_LOADING,
    ) -> None:
        super().__init__()
        self.max_seq_len = parse_token_count(max_seq_len, "data.max_seq_len")
        self.max_tokens_per_batch = check_micro_batch_size(micro_batch_size) * self.max_seq_len
        self._global_batch_tokens = (
            None if global_batch_tokens is None else parse_token_count(global_batch_tokens, "data.global_batch_tokens")
        )
        self._packing = packing = as_settings(PackingSettings, packing, "data.packing")
        self._loading = loading = as_settings(LoadingSettings, loading, "data.loading")
        self._from_model = isinstance(tokenizer, str) and tokenizer == FROM_MODEL
        self._tokenize, self.vocab_size = resolve_tokenizer(tokenizer)
        self._sources = open_sources(sources, "data.sources")
        self._validation = (
            None if validation_sources is None else open_sources(validation_sources, "data.validation_sources")
        )
        self.packing_facts = PackingFacts(
            self.max_seq_len,
            micro_batch_size,
            packing.count_mode,
            modalities=tuple(source.modality for source in self._sources),
            dynamic=packing.dynamic,
        )
        policy = resolve_policy(buffer_policy, self.packing_facts)
        self._policy = policy if packing.dynamic else DocumentCountPolicy(packing.documents_per_batch)
        extra = [source.name for source in self._validation or [] if source.name not in sources]
        self.source_names = [*sources, *extra]
        self._topology = Topology()
        self._ledger: ConsumptionLedger | None = None
        self._loader: TrainingLoader | None = None
        self._to_restore: Mapping[str, Any] | None = None
        self._to_announce = False
        self._limit_val_batches: int | float | None = None  # the Trainer's own, while a fit does not validate
        self.check()

    def check(self, sp_size: int = 1, dp_size: int = 1) -> None:
        """Check everything that needs no trainer and no process group.

        Args:
            sp_size: sequence-parallel size of the run.
            dp_size: number of data-parallel ranks.

        Raises:
            ConfigurationError: sizes that do not divide, with the arithmetic.
        """
        check_budget(self.max_tokens_per_batch, self._packing, sp_size)
        check_warmup(self._loading.warmup, self.max_tokens_per_batch)
        self._accumulation(dp_size)

    def _accumulation(self, dp_size: int) -> int | None:
        """Micro-batches of a step that ``global_batch_tokens`` asks for."""
        if self._global_batch_tokens is None:
            return None
        return accumulation(self._global_batch_tokens, self.max_tokens_per_batch, dp_size)

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Learn the layout, check the sizes against it, and make ready for ``stage``."""
        topology = topology_of(self.trainer)
        self.check(topology.sp_size, topology.dp_size)
        self._topology = topology
        if self._from_model:
            self.use_tokenizer_of(self.trainer.lightning_module if self.trainer is not None else None)
        self._allow_validation(stage != TrainerFn.FITTING or self._validation is not None)
        if stage == TrainerFn.FITTING:
            self._set_accumulation(topology.dp_size)
            self._prepare_ledger()
            self._announce()

    def _announce(self) -> None:
        self._to_announce = True
        rank_zero_info(start_line(self.max_tokens_per_batch, self._topology.dp_size, self._policy, self.counters))
        if (warning := cold_start_warning(self.max_seq_len, self._policy)) is not None:
            rank_zero_warn(warning, category=UserWarning)

    def _allow_validation(self, allowed: bool) -> None:
        """Switch validation off during a fit without data for it: an empty loader would make Lightning warn."""
        if self.trainer is None:
            return
        if not allowed and self._limit_val_batches is None:
            self._limit_val_batches = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0
        elif allowed and self._limit_val_batches is not None:
            self.trainer.limit_val_batches = self._limit_val_batches
            self._limit_val_batches = None

    def use_tokenizer_of(self, module: Any) -> None:
        """Take the tokenizer of a module, for ``from_model``. ``setup`` does it; tools without a Trainer call it.

        Raises:
            ConfigurationError: the module has no ``load_tokenizer()``.
        """
        load = getattr(module, "load_tokenizer", None)
        if load is None:
            got = f"{type(module).__name__} without `load_tokenizer()`"
            fix = "Use CausalLMModule with `pretrained`, write the method, or name a tokenizer file."
            raise ConfigurationError("data.tokenizer", "from_model needs a model that has a tokenizer", got, fix)
        tokenizer = ModelTokenizer(load())
        self._tokenize, self.vocab_size = tokenizer, tokenizer.vocab_size

    def _set_accumulation(self, dp_size: int) -> None:
        steps, trainer = self._accumulation(dp_size), self.trainer
        if steps is None or trainer is None:
            return
        if trainer.accumulate_grad_batches not in (1, steps):
            got = f"{trainer.accumulate_grad_batches} where data.global_batch_tokens gives {steps}"
            raise ConfigurationError("trainer.accumulate_grad_batches", "must not be set twice", got, "Leave one out.")
        trainer.accumulate_grad_batches = steps

    def _prepare_ledger(self) -> ConsumptionLedger:
        layout = (self._topology.dp_rank, self._topology.dp_size)
        used = None if self._ledger is None else self._ledger.used
        if self._ledger is None or used is None or (used.dp_rank, used.dp_size) != layout:
            self._ledger = ConsumptionLedger(RowState(dp_rank=layout[0], dp_size=layout[1]))
        if self._to_restore is not None:
            saved, self._to_restore = self._to_restore, None
            self._ledger.reset(restore_state(saved, self._training_settings(), self._topology))
        return self._ledger

    def _model_vocabulary(self) -> int | None:
        """Number of token ids of the model, if it says so (``vocab_size``), so that a bad id names its document."""
        module = None if self.trainer is None else self.trainer.lightning_module
        vocabulary = getattr(module, "vocab_size", None)
        return vocabulary if isinstance(vocabulary, int) else None

    def train_dataloader(self) -> TrainingLoader:
        """Rows for training. Without a Trainer too: each row then counts as used when it is given."""
        ledger = self._ledger or self._prepare_ledger()
        plan = RowPlan(self._training_settings(), self._policy, self._topology, self._loading.on_uneven_end)
        self._loader = TrainingLoader(plan, ledger, (lambda: ledger.use(0)) if self.trainer is None else None)
        return self._loader

    def row_builder(
        self, topology: Topology, seed: int | None = None, kind: type[RowBuilder] = RowBuilder
    ) -> RowBuilder:
        """Rows of one data-parallel rank as training makes them, without a Trainer or a process group.

        Args:
            topology: whose rows; ranks and sizes are read, groups are not used.
            seed: of the order of documents. Default None: ``loading.seed``.
            kind: class to build, for tools that watch what is read and chosen.
        """
        settings, multiple = self._training_settings(), lcm(self._packing.pad_to_multiple_of, topology.sp_size)
        sequence = settings.sequence if seed is None else replace(settings.sequence, seed=seed)
        settings = replace(
            settings,
            sequence=sequence,
            budget=row_budget(self._packing, self.max_tokens_per_batch, self.max_seq_len, multiple),
            pad_to_multiple_of=multiple,
        )
        return kind(settings, deepcopy(self._policy), RowState(dp_rank=topology.dp_rank, dp_size=topology.dp_size))

    def val_dataloader(self) -> EvaluationLoader:
        """Rows for validation. Not asked for during ``fit`` without ``validation_sources``."""
        return self._evaluation_loader()

    def test_dataloader(self) -> EvaluationLoader:
        """The same rows as for validation."""
        return self._evaluation_loader()

    def predict_dataloader(self) -> EvaluationLoader:
        """The same rows as for validation."""
        return self._evaluation_loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note that training uses the next row: what is saved from now on no longer holds it."""
        if (
            self.trainer is not None
            and self.trainer.training
            and self._ledger is not None
            and self._ledger.has_produced
        ):
            self._ledger.use(self.trainer.global_step)
            if self._to_announce:
                self._to_announce = False
                rank_zero_info(first_row_line(self.counters, self.max_tokens_per_batch))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a row, except ``document_keys``, which are for the host."""
        if not is_packed_batch(batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        rest = {key: value for key, value in batch.items() if key != "document_keys"}
        moved = super().transfer_batch_to_device(rest, device, dataloader_idx)
        return {**moved, "document_keys": batch["document_keys"]}

    def teardown(self, stage: str) -> None:
        """End the worker processes, and say what was read, packed and dropped."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        if stage == TrainerFn.FITTING and self._ledger is not None:
            rank_zero_info(summarize(self.global_counters()))
        self._allow_validation(True)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """What this rank has read, packed and dropped, up to the last row used. Ranks that read nothing have zeros."""
        found = {} if self._ledger is None else self._ledger.used.counters
        return {name: found.get(name, 0) for name in COUNTERS}

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's state, without a collective: plain containers and tensors. Empty on ranks that read nothing."""
        if self._ledger is None or not self._topology.is_reader:
            return {}
        step = 1 if self.trainer is None else self.trainer.global_step
        return saved_state(self._ledger.state(step), self._training_settings())

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks at the last row whose optimizer step is done. Every rank must call it.

        Inside an accumulation window it is the state at the window's first row. Use :meth:`local_state_dict` where not
        every rank can take part.
        """
        own = self.local_state_dict()
        if self._topology.host_group is None:
            return own
        gathered: list[Any] = [None] * self._topology.world_size
        dist.all_gather_object(gathered, own, group=self._topology.host_group)
        return join_states(gathered)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on the same or another number of ranks.

        Args:
            state_dict: what :meth:`state_dict` returned, or ``{"local_states": [...]}`` with what
                :meth:`local_state_dict` returned on each rank.

        Raises:
            ConfigurationError: the sources, their weights, the seed or the order changed, or the state lacks ranks.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # validating a checkpoint must not move the training data
        self._to_restore = join_states(state_dict["local_states"]) if "local_states" in state_dict else state_dict
        if self._ledger is None:
            return
        stale = self._ledger.has_produced
        self._prepare_ledger()
        fetcher = getattr(self.trainer.fit_loop, "_data_fetcher", None) if self.trainer is not None else None
        if stale and fetcher is not None:
            # Lightning fetched a row before the restore (asking for `estimated_stepping_batches` does that).
            iter(fetcher)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _training_settings(self) -> RowSettings:
        loading = self._loading
        sequence = SequenceSettings(seed=loading.seed, shuffle=loading.shuffle, stop_mode=loading.stop_mode)
        settings = self._row_settings(self._sources, sequence, drop_last=loading.drop_last)
        accumulate = 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)
        tokens = parse_token_count(loading.warmup.initial_tokens)
        warmup = RowWarmup(loading.warmup.steps * accumulate, tokens) if loading.warmup.steps else None
        return replace(settings, balance=loading.balance, warmup=warmup)

    def _evaluation_loader(self) -> EvaluationLoader:
        if self._validation is not None:
            sources, sequence = self._validation, SequenceSettings(shuffle=False)
        else:
            sources, sequence = self._sources, SequenceSettings(seed=self._loading.seed, limit=EVALUATION_DOCUMENTS)
            rank_zero_info(
                f"`data.validation_sources` is not set: the loss is that of {EVALUATION_DOCUMENTS} training documents."
            )
        settings = self._row_settings(sources, sequence)
        # One candidate is enough here: order matters more than fill, and no batch waits for a pool.
        return EvaluationLoader(RowPlan(settings, FixedBufferPolicy(size=1), self._topology, "pad"))

    def _row_settings(
        self, sources: Sequence[Source], sequence: SequenceSettings, drop_last: bool = False
    ) -> RowSettings:
        reader = DocumentReader(
            sources,
            self._tokenize,
            self.max_seq_len,
            self._packing.long_document,
            self._loading.on_bad_record,
            tuple(self.source_names.index(source.name) for source in sources),
            self._model_vocabulary(),
        )
        multiple = lcm(self._packing.pad_to_multiple_of, self._topology.sp_size)
        return RowSettings(
            reader,
            sequence,
            row_budget(self._packing, self.max_tokens_per_batch, self.max_seq_len, multiple),
            self._packing.count_mode == "effective",
            multiple,
            self._loading.num_workers,
            drop_last=drop_last,
            cut_to_fill=self._packing.cut_to_fill,
        )

    def global_counters(self) -> dict[str, int]:
        """:attr:`counters` summed over all ranks: one reduction, which every rank must take part in."""
        values = torch.tensor(list(self.counters.values()), dtype=torch.int64)
        if not self._topology.is_reader:
            values.zero_()
        if self._topology.host_group is not None:
            dist.all_reduce(values, group=self._topology.host_group)
        return dict(zip(COUNTERS, values.tolist(), strict=True))
