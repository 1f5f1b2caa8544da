"""The strategy: FSDP2 plus Ulysses sequence parallelism for any LightningModule, on GPUs and on a laptop's CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.activation_checkpointing import (
    ActivationCheckpointing,
    CheckpointingMode,
    as_checkpointing,
)
from lightning_longctx.strategies.activation_offload import (
    ActivationOffload,
    OffloadMode,
    RunningOffload,
    as_offload,
    check_with_checkpointing,
    start_offload,
)
from lightning_longctx.strategies.agreement import check_equal_facts
from lightning_longctx.strategies.checkpoints import load_any_checkpoint
from lightning_longctx.strategies.checks import (
    CheckingLauncher,
    check_callbacks,
    check_manual_optimization,
    check_sharded_before,
    data_facts,
    run_facts,
    warn_of_crossings,
)
from lightning_longctx.strategies.evaluation import allow_generate, refuse_generate, without_inference_mode
from lightning_longctx.strategies.mesh import Layout, build_layout, check_sizes, check_world, describe_layout
from lightning_longctx.strategies.precision import FSDP2Precision
from lightning_longctx.strategies.preparation import prepare_module
from lightning_longctx.strategies.refusals import check_token_mixing
from lightning_longctx.strategies.settings import ProcessSettings, ShardingSettings, as_settings
from lightning_longctx.strategies.shard import register_forward_methods
from lightning_longctx.strategies.steps import ExactSteps
from lightning_longctx.strategies.tiled_mlp import TiledMLP, apply_tiles, as_tiled_mlp
from lightning_longctx.strategies.ulysses import Exchange, check_heads, set_running_exchange
from lightning_longctx.topology import Topology

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["LongContextFSDPStrategy"]

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")

_SHARDING = ShardingSettings()
_PROCESSES = ProcessSettings()

#: The offload of each sharded module: another strategy may find a module sharded.
_OFFLOADS: WeakKeyDictionary[torch.nn.Module, RunningOffload | None] = WeakKeyDictionary()


class LongContextFSDPStrategy(ExactSteps):
    """FSDP2 sharding of any LightningModule, with each row of tokens shared by ``sequence_parallel_size`` ranks.

    The module is written as for one device. Its blocks and its root are sharded over all ranks (or over those of one
    replica) before the first step, packed batches are sliced after they reach the device, and after the last backward
    of a step the gradients are scaled to those of the exact token mean
    (:class:`~lightning_longctx.token_mean.TokenMean`). For sequence parallelism its attention must be
    :func:`~lightning_longctx.ulysses_attention`, or ``attn_implementation="longctx"`` for a Hugging Face model.

    A module built on the meta device is filled one block at a time: by its method ``fill_weights(names)`` if it has
    one, else by ``reset_parameters`` of each submodule, with equal weights in every layout.

    Registered as ``Trainer(strategy="longctx_fsdp")`` once the package is imported.

    Args:
        sequence_parallel_size: ranks that share a row; divides the world size and the number of query heads. Default
            1: plain FSDP2 with the exact token mean.
        data_parallel_replicate_size: copies of the sharded parameters (HSDP): each is sharded over world / copies
            ranks, best those of one node, and only gradients travel between copies. Default 1: sharded over all ranks,
            which needs least memory.
        activation_checkpointing: ``none`` (default), ``full``, ``every_n``, ``selective``, or a mapping of
            :class:`ActivationCheckpointing`: computes blocks again in backward in place of keeping what they computed.
        activation_offload: ``none`` (default), ``sync``, ``async``, or a mapping of :class:`ActivationOffload`: keeps
            saved activations of blocks in host memory until backward. Numbers stay the same; it costs copies.
        tiled_mlp: ``none`` (default), ``auto``, a list of class names or patterns, or a mapping of :class:`TiledMLP`:
            runs MLPs in tiles of tokens, computed again in backward.
        sharding: units, gathering and reduction; see :class:`ShardingSettings`.
        processes: backend and time limit; see :class:`ProcessSettings`.

    Raises:
        ConfigurationError: sizes that do not divide (when the Trainer is built), heads that do not divide or callbacks
            that cannot work (before any process is started, where the model is known), a precision other than 32-true,
            bf16-true and bf16-mixed, ranks with other settings, versions or initial parameters, a module that was
            sharded with other settings before, several optimizers in manual optimization, a packed step without
            ``per_token_loss`` at sp > 1, a model that never exchanged.

    Example:
        >>> import lightning as L
        >>> strategy = LongContextFSDPStrategy(sequence_parallel_size=1, sharding={"prefetch": 2})
        >>> trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1)
    """

    #: Capability that callbacks ask for: gradients are already those of the exact token mean.
    applies_token_mean = True
    #: Capability: checkpoint directories of this package are read here, onto any layout.
    reads_checkpoint_directories = True

    #: Capability that modules ask for: tensors on the meta device become real one block at a time.
    fills_meta_weights = True

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        data_parallel_replicate_size: int = 1,
        activation_checkpointing: CheckpointingMode | ActivationCheckpointing | dict[str, Any] = "none",
        activation_offload: OffloadMode | ActivationOffload | dict[str, Any] = "none",
        tiled_mlp: str | list[str] | TiledMLP | dict[str, Any] = "none",
        sharding: ShardingSettings | dict[str, Any] = _SHARDING,
        processes: ProcessSettings | dict[str, Any] = _PROCESSES,
    ) -> None:
        self.sharding = as_settings(ShardingSettings, sharding, "sharding")
        self.processes = as_settings(ProcessSettings, processes, "processes")
        self.activation_checkpointing = as_checkpointing(activation_checkpointing)
        self.activation_offload = as_offload(activation_offload)
        check_with_checkpointing(self.activation_offload, self.activation_checkpointing.mode)
        self.tiled_mlp = as_tiled_mlp(tiled_mlp)
        self._offload: RunningOffload | None = None
        check_sizes(sequence_parallel_size, data_parallel_replicate_size)
        super().__init__(process_group_backend=self.processes.backend, timeout=self.processes.timeout)
        self.sequence_parallel_size = sequence_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self._layout: Layout | None = None
        self._exchange = Exchange(None)

    # -- before any process group ------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        """Check the layout as soon as the number of processes is known: when the Trainer is built."""
        world_size = self.num_nodes * self.num_processes
        check_world(world_size, self.sequence_parallel_size, self.data_parallel_replicate_size)
        super().set_world_ranks()

    def describe_layout(self) -> str:
        """Write which rank does what, as a table. Needs a Trainer, and no process group."""
        world_size = self.num_nodes * self.num_processes
        sizes = (self.sequence_parallel_size, self.data_parallel_replicate_size)
        return describe_layout(world_size, *sizes, self.num_processes)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None:
            self._launcher = CheckingLauncher(self._launcher, self._check_run)

    def _check_run(self, trainer: pl.Trainer) -> None:
        check_callbacks(trainer.callbacks, self)  # type: ignore[attr-defined]
        if self.lightning_module is not None:
            self.check_model(self.lightning_module)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """Check what can be known of the model before processes are started."""
        super().connect(model)
        self.check_model(model)
        if model._trainer is not None:
            check_callbacks(model.trainer.callbacks, self)  # type: ignore[attr-defined]

    def check_model(self, model: torch.nn.Module) -> None:
        """Check the head counts that the model's configurations announce, and that only attention mixes tokens.

        Raises:
            ConfigurationError: query heads that ``sequence_parallel_size`` does not divide, or layers that would see a
                shard where they need the whole row.
        """
        for module in model.modules():
            heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
            if isinstance(heads, int):
                check_heads(heads, self.sequence_parallel_size)
        check_token_mixing(model, self.sequence_parallel_size)

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
    @override
    def topology(self) -> Topology:
        """Ranks, sizes and groups.

        Raises:
            ConfigurationError: the processes are not connected yet.
        """
        return self._require_layout().topology

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        """Axes ``data_parallel_replicate`` x ``data_parallel_shard`` x ``sequence_parallel``.

        A module finds it as ``self.device_mesh``.
        """
        return self._require_layout().mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas for Lightning's sampler: data-parallel ones; ranks that share a row read the same samples."""
        topology = self.topology
        return {"num_replicas": topology.dp_size, "rank": topology.dp_rank}

    @override
    def setup_environment(self) -> None:
        """Connect the processes, check that they belong to the same run, and lay them out."""
        if self.sharding.offload_parameters and self.root_device.type == "cuda" and self.processes.backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # norms of offloaded gradients are summed on the host
        self._setup_distributed()
        assert self.lightning_module is not None
        if self._layout is None:
            world = dist.group.WORLD if self.world_size > 1 else None
            check_equal_facts(run_facts(self.lightning_module, self), world, self.root_device)
            check_equal_facts(data_facts(self.lightning_module), world, self.root_device)
            sizes = (self.sequence_parallel_size, self.data_parallel_replicate_size)
            self._layout = build_layout(self.root_device.type, *sizes)
            warn_of_crossings(self.world_size, self.sequence_parallel_size, self.num_processes)
        self._exchange = Exchange(self.topology.sp_group)
        self._device_mesh = self._layout.mesh
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
        elif module in _OFFLOADS:
            self._offload = _OFFLOADS[module]
        check_sharded_before(module, self)
        assert isinstance(module, FSDPModule)
        module.reshard()  # an evaluation may have left the root gathered
        module.set_requires_gradient_sync(True)  # an interrupted fit may have stopped between micro-batches
        self.model = module
        refuse_generate(module, self.sharding.forward_methods)
        without_inference_mode(trainer)
        self._begin_run()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self._offload is not None:
                self._offload.watch(self.optimizers, rank_zero_info, self.topology.host_group)
            check_manual_optimization(module, self)
        self.setup_precision_plugin()

    @override
    def teardown(self) -> None:
        """Forget the running exchange; the sharded module stays usable for the next fit or evaluation."""
        set_running_exchange(None)
        if self.lightning_module is not None:
            allow_generate(self.lightning_module)
        if self._offload is not None:
            self._offload.close()
        super().teardown()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this package, of stock Lightning as one file, or as a sharded directory."""
        assert self.lightning_module is not None
        return load_any_checkpoint(self, self.broadcast(checkpoint_path), super().load_checkpoint)

    def step_metrics(self) -> dict[str, float]:
        """What a logged step shows of the strategy: activation offload on this rank, since the start."""
        return {} if self._offload is None else self._offload.metrics()

    def _shard(self, module: pl.LightningModule) -> None:
        precision = self.precision_plugin
        plugin = precision if isinstance(precision, FSDP2Precision) else FSDP2Precision()
        self._precision_plugin = plugin
        self._offload = start_offload(self.activation_offload, self.root_device, self.num_processes)
        apply_tiles(module, self.tiled_mlp)
        prepare_module(
            module,
            self._require_layout(),
            plugin.policy(),
            plugin.convert_module,
            sharding=self.sharding,
            checkpointing=self.activation_checkpointing,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            device=self.root_device,
            offload=self._offload,
        )
        methods = [name for name in _STEP_METHODS if callable(getattr(module, name, None))]
        register_forward_methods(module, methods + self.sharding.forward_methods)
        _OFFLOADS[module] = self._offload

    def _require_layout(self) -> Layout:
        if self._layout is None:
            fix = "Ask in `setup` of a callback, module or data module, or later."
            raise ConfigurationError(
                "strategy.topology", "exists once the processes are connected", "an earlier call", fix
            )
        return self._layout

    def hang_report(self) -> str:
        """Where the exchanges stand, for the report of a run that hangs. Reads two counters, and waits for nothing."""
        return f"{self._exchange.count} attention calls began to exchange, {self._exchange.done} have"


if "longctx_fsdp" not in StrategyRegistry:
    StrategyRegistry.register(
        "longctx_fsdp",
        LongContextFSDPStrategy,
        description="FSDP2 with Ulysses sequence parallelism and the exact token mean",
    )
