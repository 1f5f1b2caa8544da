"""The strategy: FSDP2 plus Ulysses sequence parallelism for any LightningModule, on GPUs and on a laptop's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.checkpoints import load_any_checkpoint
from lightning_longctx.strategies.mesh import Layout, build_layout, check_world
from lightning_longctx.strategies.precision import FSDP2Precision
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.shard import check_equal_parameters, find_blocks, shard_module
from lightning_longctx.strategies.ulysses import Exchange, check_heads, set_running_exchange
from lightning_longctx.token_mean import TokenMean
from lightning_longctx.topology import Topology

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["LongContextFSDPStrategy"]

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class LongContextFSDPStrategy(ModelParallelStrategy):
    """FSDP2 sharding of any LightningModule, with each row of tokens shared by ``sequence_parallel_size`` ranks.

    The module is written as for one device. Its blocks and its root are sharded over all ranks before the first step,
    packed batches are sliced after they reach the device, and after the last backward of a step the gradients are
    scaled to those of the exact token mean (:class:`~lightning_longctx.token_mean.TokenMean`). For sequence
    parallelism its attention must be :func:`~lightning_longctx.ulysses_attention`, or
    ``attn_implementation="longctx"`` for a Hugging Face model.

    Registered as ``Trainer(strategy="longctx_fsdp")`` once the package is imported.

    Args:
        sequence_parallel_size: ranks that share a row; divides the world size and the number of query heads. Default
            1: plain FSDP2 with the exact token mean.
        blocks: class names of the repeated blocks that become FSDP units. Default None: found, see
            :func:`~lightning_longctx.strategies.shard.find_blocks`.
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again in backward.
            Default True: at long context memory is what runs out. The root is never resharded.
        forward_methods: further methods of the module that gather the root's parameters when called (``generate`` ...).
        process_group_backend: default: nccl on CUDA, gloo on CPU.
        timeout: of the training collectives. Default 30 minutes, PyTorch's own for gloo. Waiting for data has its
            own, longer one.

    Raises:
        ConfigurationError: sizes that do not divide (when the Trainer is built), heads that do not divide (before any
            process group where the model is known), a precision other than 32-true, bf16-true and bf16-mixed, unequal
            initial parameters, several optimizers in manual optimization, a packed step without ``per_token_loss`` at
            sp > 1, a model that never exchanged.

    Example:
        >>> import lightning as L
        >>> strategy = LongContextFSDPStrategy(sequence_parallel_size=1)
        >>> trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1)
    """

    #: Capability that callbacks ask for: gradients are already those of the exact token mean.
    applies_token_mean = True
    #: Capability: checkpoint directories of this package are read here, onto any layout.
    reads_checkpoint_directories = True

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        blocks: list[str] | None = None,
        reshard_after_forward: bool = True,
        forward_methods: Sequence[str] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        check_world(sequence_parallel_size, sequence_parallel_size)
        self.sequence_parallel_size = sequence_parallel_size
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.forward_methods = list(forward_methods)
        self._layout: Layout | None = None
        self._exchange = Exchange(None)
        self._token_mean: TokenMean | None = None
        self._rows: RowSharder | None = None
        self._exchange_proven = False

    # -- before any process group ------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        """Check the layout as soon as the number of processes is known: when the Trainer is built."""
        check_world(self.num_nodes * self.num_processes, self.sequence_parallel_size)
        super().set_world_ranks()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """Check what can be known of the model before processes are started."""
        super().connect(model)
        self.check_model(model)

    def check_model(self, model: torch.nn.Module) -> None:
        """Check the head counts that the model's configurations announce.

        Raises:
            ConfigurationError: query heads that ``sequence_parallel_size`` does not divide.
        """
        for module in model.modules():
            heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
            if isinstance(heads, int):
                check_heads(heads, self.sequence_parallel_size)

    @property
    @override
    def precision_plugin(self) -> Precision:
        """The precision plugin: :class:`FSDP2Precision`, whatever Lightning chose for the same name."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Lightning's own plugins would cast buffers or add autocast. Its check of names is skipped for a strategy
        # passed by name, so ours is made here.
        if plugin is not None and not isinstance(plugin, FSDP2Precision):
            plugin = FSDP2Precision(str(plugin.precision))
        self._precision_plugin = plugin

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Ranks, sizes and groups.

        Raises:
            ConfigurationError: the processes are not connected yet.
        """
        return self._require_layout().topology

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        """Axes ``data_parallel`` x ``sequence_parallel``; a module finds it as ``self.device_mesh``."""
        return self._require_layout().mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas for Lightning's sampler: data-parallel ones; ranks that share a row read the same samples."""
        topology = self.topology
        return {"num_replicas": topology.dp_size, "rank": topology.dp_rank}

    @override
    def setup_environment(self) -> None:
        """Connect the processes and lay them out."""
        self._setup_distributed()
        if self._layout is None:
            self._layout = build_layout(self.root_device.type, self.sequence_parallel_size)
        self._exchange = Exchange(self.topology.sp_group)
        self._device_mesh = self._layout.mesh
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._layout.mesh

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module once, then set up optimizers; a second fit finds it sharded."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.check_model(module)
        if not isinstance(module, FSDPModule):
            self._shard(module)
        module.reshard()  # type: ignore[operator]  # an evaluation may have left the root gathered
        self.model = module
        _without_inference_mode(trainer)
        self._rows = RowSharder(self.topology)
        self._token_mean = TokenMean(self.topology, type(self).__name__, required=self.topology.sp_size > 1)
        self._exchange_proven = self.topology.sp_size == 1
        set_running_exchange(self._exchange)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            _check_optimizers(module, self.optimizers)
        self.setup_precision_plugin()

    @override
    def teardown(self) -> None:
        """Forget the running exchange; the sharded module stays usable for the next fit or evaluation."""
        set_running_exchange(None)
        super().teardown()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this package, of stock Lightning as one file, or as a sharded directory."""
        assert self.lightning_module is not None
        return load_any_checkpoint(self, Path(self.broadcast(checkpoint_path)), super().load_checkpoint)

    def _shard(self, module: pl.LightningModule) -> None:
        meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if meta:
            fix = "Build it with real tensors: no `torch.device('meta')`, no `init_module(empty_init=True)`."
            raise ConfigurationError(
                "model", "must have materialized parameters", f"meta tensors such as {meta[0]}", fix
            )
        precision = self.precision_plugin
        plugin = precision if isinstance(precision, FSDP2Precision) else FSDP2Precision()
        self._precision_plugin = plugin
        self.model = plugin.convert_module(module)
        self.model_to_device()
        check_equal_parameters(module, self.topology.token_group)
        methods = [name for name in _STEP_METHODS if callable(getattr(module, name, None))] + self.forward_methods
        blocks = find_blocks(module, self.blocks)
        shard_module(
            module, blocks, self._require_layout().shard_mesh, plugin.policy(), self.reshard_after_forward, methods
        )

    def _require_layout(self) -> Layout:
        if self._layout is None:
            fix = "Ask in `setup` of a callback, module or data module, or later."
            raise ConfigurationError(
                "strategy.topology", "exists once the processes are connected", "an earlier call", fix
            )
        return self._layout

    # -- the step ----------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the batch as Lightning does, then keep this rank's slice of the row."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        assert self._rows is not None
        return self._rows.shard(batch, moved)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a new count of targets with each accumulation window: an epoch may have ended inside the last one."""
        module = self.lightning_module
        assert module is not None
        begins = batch_idx % module.trainer.accumulate_grad_batches == 0
        if self._token_mean is not None and module.automatic_optimization and begins:
            self._token_mean.reset()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` and count the targets of its batch."""
        assert self._token_mean is not None
        step = super().training_step
        return self._proving(
            lambda: self._token_mean.training_step(lambda: step(*args, **kwargs), args[0])  # type: ignore[union-attr]
        )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``, under the same sharding as training."""
        step = super().validation_step
        return self._proving(lambda: step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``, under the same sharding as training."""
        step = super().test_step
        return self._proving(lambda: step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step``, under the same sharding as training."""
        step = super().predict_step
        return self._proving(lambda: step(*args, **kwargs))

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer; between the last backward and clipping the gradients become those of the token mean."""
        assert self._token_mean is not None
        assert self.lightning_module is not None
        token_mean = self._token_mean
        trainer = self.lightning_module.trainer
        accumulate = trainer.accumulate_grad_batches if self.lightning_module.automatic_optimization else 1

        def exact_closure() -> Any:
            result = closure()
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            token_mean.scale_gradients(parameters, accumulate)
            return result

        return super().optimizer_step(optimizer, exact_closure, model, **kwargs)

    @override
    def on_validation_end(self) -> None:
        """Free the root's gathered parameters, so that whoever reads parameters next sees the sharded ones."""
        self._reshard()

    @override
    def on_test_end(self) -> None:
        """Free the root's gathered parameters."""
        self._reshard()

    @override
    def on_predict_end(self) -> None:
        """Free the root's gathered parameters."""
        self._reshard()

    def _reshard(self) -> None:
        if isinstance(self.lightning_module, FSDPModule):
            self.lightning_module.reshard()

    def _proving(self, step: Callable[[], Any]) -> Any:
        """Run a step; the first one must have exchanged at least once if a row is shared."""
        before = self._exchange.count
        output = step()
        if not self._exchange_proven:
            if self._exchange.count == before:
                raise ConfigurationError(
                    "model",
                    "must exchange sequence for heads in its attention at sequence_parallel_size > 1",
                    "a first step without any exchange: each rank attended to its own fragment only",
                    'Load a Hugging Face model with attn_implementation="longctx" (CausalLMModule does), or call'
                    " `lightning_longctx.ulysses_attention(q, k, v, batch)` in your own attention.",
                )
            self._exchange_proven = True
        return output


def _check_optimizers(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
    if not module.automatic_optimization and len(optimizers) > 1:
        raise ConfigurationError(
            "configure_optimizers",
            "must return one optimizer in manual optimization (the targets of a step belong to one update)",
            f"{len(optimizers)} optimizers",
            "Use one optimizer with several parameter groups.",
        )


def _without_inference_mode(trainer: pl.Trainer) -> None:
    # FSDP2 saves and restores version counters of its parameters, which inference tensors do not have. It fails on
    # GPUs only, so no CPU run would show it.
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        loop.inference_mode = False


if "longctx_fsdp" not in StrategyRegistry:
    StrategyRegistry.register(
        "longctx_fsdp",
        LongContextFSDPStrategy,
        description="FSDP2 with Ulysses sequence parallelism and the exact token mean",
    )
