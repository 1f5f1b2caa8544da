"""The data module: documents by name in, packed rows out, on any layout, exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_longctx.batch import is_packed_batch
from lightning_longctx.datamodules import messages
from lightning_longctx.datamodules.assembly import EVALUATION_DOCUMENTS, RowAssembly
from lightning_longctx.datamodules.choosing import resolve_policy
from lightning_longctx.datamodules.counting import mix_over_ranks, sum_over_ranks
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.files import open_sources
from lightning_longctx.datamodules.formats import check_tokenizer
from lightning_longctx.datamodules.ledger import ConsumptionLedger
from lightning_longctx.datamodules.loader import EvaluationLoader, RowPlan, TrainingLoader
from lightning_longctx.datamodules.policies import BufferPolicy, DocumentCountPolicy, FixedBufferPolicy, PackingFacts
from lightning_longctx.datamodules.row_state import COUNTERS, RowState
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings
from lightning_longctx.datamodules.settings import LoadingSettings, PackingSettings, as_settings, check_weights
from lightning_longctx.datamodules.sizes import accumulation, check_budget, check_micro_batch_size, check_warmup
from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.state import changes, gathered_state, join_states, restore_state, saved_state
from lightning_longctx.datamodules.tokenizers import FROM_MODEL, ModelTokenizer, Tokenize, resolve_tokenizer
from lightning_longctx.datamodules.trainer_settings import (
    TrainerSettings,
    begins_epoch,
    end_fit,
    model_vocabulary,
    rows_to_overfit,
    warn_of_cut_epoch,
)
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, topology_of
from lightning_longctx.units import TokenCountLike, parse_token_count

__all__ = ["DynamicBatchingDataModule"]

_DEFAULT_PACKING = PackingSettings()
_DEFAULT_LOADING = LoadingSettings()


class DynamicBatchingDataModule(pl.LightningDataModule):
    """Packs documents from named sources into rows of at most ``micro_batch_size * max_seq_len`` tokens.

    Args:
        sources: by name: a built-in name, a path or glob (or a list of them), :class:`SourceSettings` (a mapping in
            YAML), or a sequence or iterable of dicts, such as a Hugging Face dataset.
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
        max_seq_len: TokenCountLike = 4096,
        micro_batch_size: int = 1,
        global_batch_tokens: TokenCountLike | None = None,
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
        packing = as_settings(PackingSettings, packing, "data.packing")
        loading = as_settings(LoadingSettings, loading, "data.loading")
        self._from_model = isinstance(tokenizer, str) and tokenizer == FROM_MODEL
        tokenize, self.vocab_size = resolve_tokenizer(tokenizer)
        own = {} if validation_sources is None else {"data.validation_sources": validation_sources}
        opened, *rest = open_sources({"data.sources": sources, **own})
        validation = rest[0] if rest else None
        every = [*opened, *(validation or [])]
        if all(source.is_pretokenized for source in every):
            self.vocab_size = None  # that of a tokenizer that is never asked says nothing about the ids
        elif tokenize is not None:
            check_tokenizer(every, tokenize)
        extra = [source.name for source in validation or [] if source.name not in sources]
        self.source_names = [*map(str, sources), *extra]
        names, sizes = tuple(self.source_names), (self.max_seq_len, self.max_tokens_per_batch)
        self._assembly = RowAssembly(opened, validation, names, *sizes, packing, loading, tokenize)
        self.packing_facts = PackingFacts(
            self.max_seq_len,
            micro_batch_size,
            packing.count_mode,
            loading.runtime,
            modalities=tuple(source.modality for source in opened),
            dynamic=packing.dynamic,
        )
        policy = resolve_policy(buffer_policy, self.packing_facts)
        self._policy = policy if packing.dynamic else DocumentCountPolicy(packing.documents_per_batch)
        self._topology = Topology()
        self._ledger: ConsumptionLedger | None = None
        self._loader: TrainingLoader | None = None
        self._to_restore: Mapping[str, Any] | None = None
        self._to_announce = False
        self._first_counters: dict[str, int] = {}  # after the first row of a fit
        self._trainer_settings = TrainerSettings(validates=validation is not None)
        self.check()

    def check(self, sp_size: int = 1, dp_size: int = 1) -> None:
        """Check everything that needs no trainer and no process group.

        Args:
            sp_size: sequence-parallel size of the run.
            dp_size: number of data-parallel ranks.

        Raises:
            ConfigurationError: sizes that do not divide, with the arithmetic.
        """
        check_budget(self.max_tokens_per_batch, self._assembly.packing, sp_size)
        check_warmup(self._assembly.loading.warmup, self.max_tokens_per_batch)
        self._accumulation(dp_size)

    def _accumulation(self, dp_size: int) -> int | None:
        """Micro-batches of a step that ``global_batch_tokens`` asks for."""
        if self._global_batch_tokens is None:
            return None
        return accumulation(self._global_batch_tokens, self.max_tokens_per_batch, dp_size)

    def run_facts(self) -> dict[str, object]:
        """Settings that every rank must share, by name: a strategy compares them before the first step."""
        policy = {"data.buffer_policy": type(self._policy).__name__}
        return {**self._assembly.facts(), **policy, "data.global_batch_tokens": self._global_batch_tokens}

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Learn the layout, check the sizes against it, and make ready for ``stage``."""
        topology = topology_of(self.trainer)
        self.check(topology.sp_size, topology.dp_size)
        self._topology = topology
        if self._from_model:
            self.use_tokenizer_of(self.trainer.lightning_module if self.trainer is not None else None)
        steps = self._accumulation(topology.dp_size)
        if self.trainer is not None:
            validates = stage != TrainerFn.FITTING or self._assembly.validation is not None
            self._trainer_settings.allow_validation(self.trainer, validates)
            if stage == TrainerFn.FITTING and steps is not None:
                self._trainer_settings.accumulate(self.trainer, steps)
        if stage == TrainerFn.FITTING:
            self._prepare_ledger().begin_fit()
            self._announce()

    def _announce(self) -> None:
        self._to_announce, self._first_counters = True, {}
        topology = self._topology
        sizes = topology.dp_size, topology.sp_size, self._accumulate()
        rank_zero_info(messages.step_line(self.max_tokens_per_batch, *sizes))
        rank_zero_info(messages.start_line(self.max_tokens_per_batch, topology.dp_size, self._policy, self.counters))
        if (warning := messages.cold_start_warning(self.max_seq_len, self._policy)) is not None:
            rank_zero_warn(warning, category=UserWarning)

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
        check_tokenizer([*self._assembly.sources, *(self._assembly.validation or [])], tokenizer)
        self._assembly, self.vocab_size = replace(self._assembly, tokenize=tokenizer), tokenizer.vocab_size

    def _prepare_ledger(self) -> ConsumptionLedger:
        layout = (self._topology.dp_rank, self._topology.dp_size)
        if self._ledger is None or (self._ledger.used.dp_rank, self._ledger.used.dp_size) != layout:
            self._ledger = ConsumptionLedger(RowState(dp_rank=layout[0], dp_size=layout[1]))
        if self._to_restore is not None:
            saved, self._to_restore = self._to_restore, None
            settings = self._training_settings()
            self._ledger.reset(restore_state(saved, settings, self._topology))
            if (line := changes(saved, settings, self._policy, self._topology.dp_size)) is not None:
                rank_zero_info(line)
            if self.trainer is not None:
                self._trainer_settings.rewind(self.trainer, saved.get("open_rows", 0))
        return self._ledger

    def readers(self, vocab_size: int | None = None) -> list[DocumentReader]:
        """What makes documents of records: for training, and for validation if that has sources of its own."""
        return self._assembly.readers(vocab_size)

    def train_dataloader(self) -> TrainingLoader:
        """Rows for training. Without a Trainer too: each row then counts as used when it is given."""
        ledger = self._ledger or self._prepare_ledger()
        warn_of_cut_epoch(self.trainer, ledger.used)
        loading, settings = self._assembly.loading, self._training_settings()
        plan = RowPlan(settings, self._policy, self._topology, loading.on_uneven_end, loading.runtime)
        at_once, begins = None if self.trainer else partial(ledger.use, 0), partial(begins_epoch, self.trainer)
        self._loader = TrainingLoader(plan, ledger, at_once, rows_to_overfit(self.trainer), begins)
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
        settings = self._assembly.training(topology.sp_size, model_vocabulary(self.trainer), self._accumulate())
        if seed is not None:
            settings = replace(settings, sequence=replace(settings.sequence, seed=seed))
        return kind(settings, deepcopy(self._policy), RowState(dp_rank=topology.dp_rank, dp_size=topology.dp_size))

    def val_dataloader(self) -> EvaluationLoader:
        """Rows for validation. Not asked for during ``fit`` without ``validation_sources``."""
        return self._evaluation_loader()

    test_dataloader = predict_dataloader = val_dataloader  # the same rows

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note that training uses the next row: what is saved from now on no longer holds it."""
        trainer, ledger = self.trainer, self._ledger
        if trainer is not None and trainer.training and ledger is not None and ledger.has_produced:
            ledger.use(trainer.global_step)
            if self._to_announce:
                self._to_announce = False
                self._first_counters = self.counters
                rank_zero_info(messages.first_row_line(self.counters, self.max_tokens_per_batch))
        return batch

    def closing_lines(self) -> list[str]:
        """What the first row waited for, unless the fit went on with an earlier one's data. For ``TrainingMetrics``."""
        return messages.closing_lines(self._first_counters, self.max_tokens_per_batch, self._policy)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a row, except ``document_keys``, which are for the host."""
        if not is_packed_batch(batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        rest = {key: value for key, value in batch.items() if key != "document_keys"}
        moved = super().transfer_batch_to_device(rest, device, dataloader_idx)
        return moved | {"document_keys": batch["document_keys"]}

    def teardown(self, stage: str) -> None:
        """End the worker processes, and say what was read, packed and dropped."""
        end_fit(self.trainer, self._ledger)
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        if stage == TrainerFn.FITTING and self._ledger is not None:
            rank_zero_info(messages.summarize(self.global_counters()))
        if self.trainer is not None:
            self._trainer_settings.restore(self.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Note which rows a fit that breaks off has not trained on: another one in this process begins with them."""
        end_fit(self.trainer, self._ledger)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """What this rank has read, packed and dropped, up to the last row used. Ranks that read nothing have zeros."""
        found = {} if self._ledger is None else self._ledger.used.counters
        return {name: found.get(name, 0) for name in COUNTERS}

    def wait_seconds(self) -> list[float]:
        """How long training waited for each row since the last call, on this rank; other ranks' waiting included."""
        return [] if self._loader is None else self._loader.wait_seconds()

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's state, without a collective: plain containers and tensors. Empty on ranks that read nothing."""
        if self._ledger is None or not self._topology.is_reader:
            return {}
        step = 1 if self.trainer is None else self.trainer.global_step
        return saved_state(self._ledger.state(step), self._training_settings(), self._ledger.open_rows(step))

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks at the last row whose optimizer step is done. Every rank must call it.

        Inside an accumulation window it is the state at the window's first row. Use :meth:`local_state_dict` where not
        every rank can take part.
        """
        return gathered_state(self.local_state_dict(), self._topology)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on the same or another number of ranks.

        Args:
            state_dict: what :meth:`state_dict` returned, or ``{"local_states": [...]}`` with what
                :meth:`local_state_dict` returned on each rank.

        Raises:
            ConfigurationError: the length of a source, the seed or the order changed, or the state lacks ranks.
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
        return self._assembly.training(self._topology.sp_size, model_vocabulary(self.trainer), self._accumulate())

    def _accumulate(self) -> int:
        return 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)

    def _evaluation_loader(self) -> EvaluationLoader:
        if self._assembly.validation is None:
            rank_zero_info(messages.stand_in_line(EVALUATION_DOCUMENTS))
        settings = self._assembly.evaluation(self._topology.sp_size, model_vocabulary(self.trainer))
        # One candidate is enough here: order matters more than fill, and no batch waits for a pool.
        policy, runtime = FixedBufferPolicy(size=1), self._assembly.loading.runtime
        return EvaluationLoader(RowPlan(settings, policy, self._topology, "pad", runtime))

    def describe_document(self, source_id: int, number: int) -> str:
        """Where a training document came from: its source, and file and line where the source knows them.

        Args:
            source_id: as in ``document_keys`` and ``source_ids``.
            number: of the document in its source.
        """
        return self._assembly.describe(source_id, number)

    def global_counters(self) -> dict[str, int]:
        """:attr:`counters` summed over all ranks: one reduction, which every rank must take part in."""
        return dict(zip(COUNTERS, sum_over_ranks(list(self.counters.values()), self._topology), strict=True))

    def global_mix(self) -> dict[str, float]:
        """Share of each training source of the tokens that were packed so far, by name; empty before the first row.

        One reduction, which every rank must take part in.
        """
        found = {} if self._ledger is None else self._ledger.used.counters
        return mix_over_ranks(found, [source.name for source in self._assembly.sources], self._topology)

    def set_source_weights(self, weights: Mapping[str, float]) -> None:
        """Mix the training sources by other weights, from the first row on that is not planned yet.

        Every rank must call it at the same row, with the same weights. They are part of the state; a resume with other
        weights in its configuration takes those.

        Args:
            weights: by source name, positive; sources that are not named keep theirs.

        Raises:
            ConfigurationError: an unknown source, or a weight that is not positive and finite.
        """
        check_weights(weights, [source.name for source in self._assembly.sources])
        if self._loader is not None:
            self._loader.reweight(weights)
        else:
            ledger = self._ledger or self._prepare_ledger()
            ledger.reweight(ledger.used.rows, weights)
