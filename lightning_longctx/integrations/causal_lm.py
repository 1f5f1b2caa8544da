"""Any causal language model of Hugging Face transformers as a LightningModule for packed, sequence-parallel rows.

The model runs up to its last hidden states; the loss comes from those in chunks, so the logits of a row never exist.
Its attention is asked for by name (``longctx``), through transformers' own interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_longctx.batch import model_inputs
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.integrations.attention import attention_name, is_longctx
from lightning_longctx.integrations.head import HeadTransform, announced_transform, head_loss, head_of, inspect_model
from lightning_longctx.integrations.model_config import check_max_seq_len, check_supported, load_config
from lightning_longctx.integrations.optimization import (
    OptimizerSettings,
    ProgressSchedule,
    ScheduleSettings,
    build_optimizer,
    keep_settings,
)
from lightning_longctx.integrations.plain import PlainTwin
from lightning_longctx.integrations.rotary import fix_longrope
from lightning_longctx.integrations.router_loss import RouterLoss, find_router_loss, wants_router_loss
from lightning_longctx.integrations.shrink import shrunk_config
from lightning_longctx.integrations.weights import ModelWeights, empty_model, shallow_model
from lightning_longctx.loss import TokenLoss
from lightning_longctx.strategies.initialization import fill_meta, meta_names
from lightning_longctx.strategies.ulysses import check_heads, running_exchange
from lightning_longctx.topology import topology_of
from lightning_longctx.units import counted

require_transformers()

from transformers import AutoTokenizer, PreTrainedModel  # noqa: E402  (after the message above)

__all__ = ["CausalLMModule"]

# One of these lies beside every tokenizer. Without any, some releases of transformers make one without a vocabulary.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")

_OPTIMIZER = OptimizerSettings()
_SCHEDULE = ScheduleSettings()


class CausalLMModule(LightningModule):
    """Train any Hugging Face causal language model on packed rows.

    The configuration is read and checked at once; the weights are made on the host, in float32 (an update of 1e-5 is
    lost on bfloat16 weights; the strategy casts for the computation). Random weights follow from a seed and the name of
    each layer, so they are equal on all ranks, under every strategy and in every layout. ``LongContextFSDPStrategy``
    makes or reads them one block at a time and shards each at once; other strategies hold the whole model in each
    process, 4 bytes x parameters of host memory.

    Steps return ``loss`` (for backward) and ``per_token_loss`` (float32 ``[1, T/S]``, local). Nothing is logged here:
    ``TrainingMetrics`` logs ``train/loss``, ``val/loss`` and ``train/lr`` exactly, over all ranks. A mixture of experts
    trains with its load-balancing loss over the whole row where ``config_overrides`` has a ``router_aux_loss_coef``, or
    its configuration ``output_router_logits: true``.

    Args:
        config: a preset (``tiny-llama``, ``tiny-qwen3``, ``tiny-qwen3-moe``), a local directory with ``config.json``,
            such a file, or a mapping with ``model_type``. Random weights.
        pretrained: a local directory with ``config.json`` and safetensors. Exactly one of ``config`` and
            ``pretrained``.
        config_overrides: values to change in the configuration, such as ``rope_theta``, ``rope_scaling`` or
            ``max_position_embeddings``.
        optimizer: AdamW's settings.
        schedule: the learning rate over the run. Default: constant, which needs no horizon.
        init_seed: seed of random weights. Default None: the run's seed (``seed_everything``), 0 if there is none.
        loss_chunk_tokens: tokens whose logits exist at a time. Default None: as many as make 2^24 logits (64 MiB).
        attention_core: ``flash_attn``, ``varlen``, ``flex``, ``documents`` or, by default, ``auto``: the fastest that
            can run on the device and dtype at hand.

    Raises:
        ConfigurationError: a configuration that cannot be read, or a model that this suite would train wrongly; before
            any process group, weight or step wherever the configuration alone tells.
        ImportError: transformers is not installed.

    Example:
        >>> module = CausalLMModule(config="tiny-llama", optimizer=OptimizerSettings(lr=1e-3))
        >>> module.config.max_position_embeddings
        1048576
    """

    #: A subclass that overrides ``configure_model`` gets real weights from it, since it may want to change values. One
    #: that only wraps or freezes layers (LoRA) sets this, and the weights come later, one block at a time.
    configure_model_keeps_meta = False

    def __init__(
        self,
        config: str | dict[str, Any] | None = None,
        pretrained: str | None = None,
        config_overrides: dict[str, Any] | None = None,
        optimizer: OptimizerSettings = _OPTIMIZER,
        schedule: ScheduleSettings = _SCHEDULE,
        init_seed: int | None = None,
        loss_chunk_tokens: int | None = None,
        attention_core: str = "auto",
    ) -> None:
        super().__init__()
        # Checkpoints keep plain containers only, so `load_from_checkpoint` hands these two back as mappings.
        self.optimizer_settings = OptimizerSettings(**optimizer) if isinstance(optimizer, Mapping) else optimizer
        self.schedule_settings = ScheduleSettings(**schedule) if isinstance(schedule, Mapping) else schedule
        self.config = load_config(config, pretrained, config_overrides)
        check_supported(self.config)
        given = config if isinstance(config, Mapping) else {}
        self.wants_router_loss = wants_router_loss(self.config, given, config_overrides or {})
        self.attention_name = attention_name(attention_core)
        self.pretrained = pretrained
        self.weights = ModelWeights(pretrained, init_seed)
        self.loss_chunk_tokens = loss_chunk_tokens
        self.head_transform = HeadTransform()
        self.router_loss: RouterLoss | None = None
        self.model: PreTrainedModel | None = None
        self._tokenizer_home = pretrained if pretrained is not None else config if isinstance(config, str) else None
        self.save_hyperparameters(
            {
                "config": config,
                "pretrained": pretrained,
                "config_overrides": config_overrides,
                "optimizer": asdict(self.optimizer_settings),
                "schedule": asdict(self.schedule_settings),
                "init_seed": init_seed,
                "loss_chunk_tokens": loss_chunk_tokens,
                "attention_core": attention_core,
            }
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model; the data module checks documents against it."""
        return int(self.config.vocab_size)

    @property
    def tokenizer_home(self) -> str | None:
        """The directory that the model came from, where a tokenizer may lie; an export takes it along."""
        home = self._tokenizer_home
        return home if home is not None and Path(home).is_dir() else None

    def check(self, sp_size: int = 1, max_seq_len: int | None = None, vocab_size: int | None = None) -> None:
        """Compare the configuration with a run, without a Trainer or weights. The command line asks it first.

        Args:
            sp_size: ranks that share a row.
            max_seq_len: longest document in tokens; None if unknown.
            vocab_size: number of token ids of the data; None if unknown.

        Raises:
            ConfigurationError: documents longer than the model's positions, more token ids than it has, or heads that
                cannot be dealt to the ranks of a row.
        """
        if max_seq_len is not None:
            check_max_seq_len(self.config, max_seq_len)
        if vocab_size is not None and vocab_size > self.config.vocab_size:
            fix = (
                f"Write `model: {{config_overrides: {{vocab_size: {vocab_size}}}}}`, or take the model's own tokenizer."
            )
            got = f"a tokenizer with {counted(vocab_size, 'id')}"
            rule = f"is {self.config.vocab_size:,} and must cover every token id"
            raise ConfigurationError("model.config.vocab_size", rule, got, fix)
        heads = getattr(self.config, "num_attention_heads", None)
        if heads is not None:
            check_heads(heads, sp_size)

    def setup(self, stage: str) -> None:
        """Compare the model with the data and the run, before any weight is made.

        Args:
            stage: Lightning's stage.

        Raises:
            ConfigurationError: documents longer than the model's positions, more token ids than it has, heads
                that cannot be dealt to the ranks of a row, or a decay without end.
        """
        data = getattr(self.trainer, "datamodule", None)
        self.check(
            topology_of(self.trainer).sp_size,
            getattr(data, "max_seq_len", None),
            getattr(data, "vocab_size", None),
        )
        if stage == "fit" and not self.schedule_settings.is_flat:
            self._end_of_schedule()

    def configure_model(self) -> None:
        """Make the weights and look at the model. Lightning calls it before the strategy shards; again does nothing.

        Raises:
            ConfigurationError: weights that do not fit the configuration, or a model that this suite would train
                wrongly.
        """
        if self.model is not None:
            return
        data = getattr(self._trainer, "datamodule", None)
        config = fix_longrope(self.config, getattr(data, "max_seq_len", None))
        # A strategy that fills meta tensors gets them empty and asks block by block; others get the whole model.
        on_meta = self._may_stay_on_meta()
        model = self.weights.build(config, self.attention_name, on_meta)
        self._check_attention(model)
        model.train()  # `from_pretrained` leaves it in evaluation mode
        self.model = model
        try:
            if not on_meta:
                fill_meta(self, meta_names(self), self.fill_weights)
            shown = shallow_model(config, self.attention_name) if on_meta else model
            self.head_transform = inspect_model(shown)
            if self.wants_router_loss:
                self.router_loss = find_router_loss(shown)
        except ConfigurationError:
            self.model = None
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        rank_zero_info(f"{type(model).__name__}: {counted(count, 'parameter')}")

    def configure_shapes(self) -> None:
        """Build the model by its shapes, on the meta device, for tools that count memory. No weights are needed."""
        self.model = empty_model(self.config, self.attention_name)
        self.head_transform = announced_transform(self.config)

    def fill_weights(self, names: Sequence[str]) -> None:
        """Put values in the place of tensors on the meta device. ``LongContextFSDPStrategy`` asks block by block.

        Random values follow from seed and name alone, so they are the same under every strategy and in every layout.

        Args:
            names: parameters and buffers of this module.
        """
        assert self.model is not None
        self.weights.fill(self, self.model, names)

    def for_cpu_check(self, full: bool) -> CausalLMModule:
        """Return a module for ``longctx doctor``: of the same family and settings, on any attention core that runs.

        Args:
            full: keep the size and the pretrained weights; otherwise two small layers with random weights.
        """
        settings: dict[str, Any] = {**self.hparams, "attention_core": "auto", "init_seed": 0}
        if not full:
            config = shrunk_config(self.config)
            config |= {"output_router_logits": True} if self.wants_router_loss else {}
            settings |= {"config": config, "pretrained": None, "config_overrides": None, "loss_chunk_tokens": 16}
        return CausalLMModule(**settings)

    def plain_twin(self) -> PlainTwin:
        """Return the model as transformers computes it, with copies of the weights: the reference of a comparison."""
        assert self.model is not None, "configure_model() comes first"
        return PlainTwin(self.model, self.router_loss)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Any]:
        """Return ``loss`` (0-d, for backward) and ``per_token_loss`` (float32 ``[1, T/S]``) of a packed batch.

        With a router loss ``loss`` includes it, and ``extra_terms`` says how much it is.
        """
        if self.router_loss is None:
            return self._step(batch)
        out, router_logits = self._forward(batch, output_router_logits=True)
        exchange = running_exchange()
        term = self.router_loss(router_logits, batch, None if exchange is None else exchange.group)
        terms = {"router_aux_loss": term}
        return {"loss": out.loss + term, "per_token_loss": out.per_token_loss, "extra_terms": terms}

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """As :meth:`training_step`."""
        return self._step(batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """As :meth:`training_step`."""
        return self._step(batch)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Score the documents of a row.

        Args:
            batch: a packed batch.
            batch_idx: unused.

        Returns:
            ``per_token_loss`` (float32 ``[1, T/S]``, local), with ``cu_seqlens`` and ``document_keys`` of the whole
            row.
        """
        return {
            "per_token_loss": self.token_loss(batch).per_token_loss,
            "cu_seqlens": batch["cu_seqlens"],
            "document_keys": batch["document_keys"],
        }

    def token_loss(self, batch: Mapping[str, Any]) -> TokenLoss:
        """Run the model on a packed batch. Call it inside a step: there FSDP2 has gathered the head.

        Args:
            batch: a packed batch, of this rank's shard.

        Returns:
            The loss, its mean over this rank's targets, and the loss of each token.
        """
        return self._forward(batch)[0]

    def configure_optimizers(self) -> Any:
        """Return AdamW and, unless the rate is constant, its schedule, which advances once an update."""
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        optimizer = build_optimizer(self.named_parameters(), self.optimizer_settings, has_scaler)
        keep_settings(optimizer, rank_zero_info)
        if self.schedule_settings.is_flat:
            return optimizer
        horizon, max_steps = self._end_of_schedule()
        schedule = ProgressSchedule(optimizer, self.schedule_settings, self._step_length, horizon, max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def load_tokenizer(self) -> Any:
        """Return the tokenizer that lies beside the model, for ``tokenizer: from_model``. Runs no code from there.

        Raises:
            ConfigurationError: the model has no directory, or none of a tokenizer in it.
        """
        home = self._tokenizer_home
        if home is None or not Path(home).is_dir():
            fix = "Write `tokenizer: bytes`, or give the model as a local directory that has a tokenizer."
            raise ConfigurationError("data.tokenizer", "is `from_model` and needs a model directory", repr(home), fix)
        if not any(path for name in _TOKENIZER_FILES for path in Path(home).glob(name)):
            fix = f"Put the tokenizer's files there ({', '.join(_TOKENIZER_FILES)}), or name another tokenizer."
            raise ConfigurationError(
                "data.tokenizer", "is `from_model` and needs a tokenizer beside the model", home, fix
            )
        try:
            return AutoTokenizer.from_pretrained(home, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            fix = "Put the tokenizer's files there, or name another tokenizer."
            raise ConfigurationError("data.tokenizer", "is `from_model` and must load", home, fix) from error

    def _forward(self, batch: Mapping[str, Any], **options: bool) -> tuple[TokenLoss, tuple[Tensor, ...]]:
        """The loss, and the router logits of each layer where they are asked for."""
        assert self.model is not None, "configure_model() comes first"
        self._check_attention(self.model)
        out = self.model.base_model(**model_inputs(batch), use_cache=False, **options)
        loss = head_loss(self.head_transform, head_of(self.model), out.last_hidden_state, batch, self.loss_chunk_tokens)
        return loss, getattr(out, "router_logits", None) or ()

    def _check_attention(self, model: PreTrainedModel) -> None:
        """In each step too: somebody may have called ``set_attn_implementation`` since."""
        name = model.config._attn_implementation
        if not is_longctx(name):
            got = f"{type(model).__name__} with `{name}`"
            fix = "Take a model whose attention goes through transformers' AttentionInterface, and leave it as it was."
            raise ConfigurationError("model", f"must use attention `{self.attention_name}`", got, fix)

    def _step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        out = self.token_loss(batch)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def _may_stay_on_meta(self) -> bool:
        own = type(self).configure_model is CausalLMModule.configure_model or self.configure_model_keeps_meta
        return own and getattr(self._trainer and self.trainer.strategy, "fills_meta_weights", False)

    def _step_length(self) -> int:
        """What a step advances the schedule by, in the unit of ``over``."""
        return 1 if self.schedule_settings.over == "steps" else _tokens_per_step(self.trainer)

    def _end_of_schedule(self) -> tuple[int | None, int | None]:
        """Where a decay ends: in the unit of ``over``, or else in steps. Neither for a constant rate."""
        trainer: Any = self.trainer
        ends = [callback.token_horizon for callback in trainer.callbacks if hasattr(callback, "token_horizon")]
        return self.schedule_settings.end(trainer.max_steps, self._step_length(), ends)


def _tokens_per_step(trainer: Any) -> int:
    """Token budget of a step at present: callbacks may change the accumulation between epochs."""
    budget = getattr(getattr(trainer, "datamodule", None), "max_tokens_per_batch", None)
    if budget is None:
        fix = "Use DynamicBatchingDataModule, give your data module a `max_tokens_per_batch`, or write `over: steps`."
        raise ConfigurationError(
            "model.schedule.over", "is `tokens` and needs the tokens of a batch", "none known", fix
        )
    return int(budget) * topology_of(trainer).dp_size * int(trainer.accumulate_grad_batches)
