"""What a step is under the strategy: a slice of the row, counted targets, exact gradients, and a proof of exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.gradients import average_unsharded
from lightning_longctx.strategies.memory import MemorySettings, settings_of
from lightning_longctx.strategies.out_of_memory import explaining
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.settings import ShardingSettings
from lightning_longctx.strategies.ulysses import Exchange, set_running_exchange
from lightning_longctx.token_mean import TokenMean
from lightning_longctx.topology import Topology

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ExactSteps"]


class ExactSteps(ModelParallelStrategy):
    """The half of :class:`~lightning_longctx.strategies.LongContextFSDPStrategy` that runs; the other half sets up."""

    sharding: ShardingSettings
    _exchange: Exchange
    _token_mean: TokenMean | None = None
    _rows: RowSharder | None = None
    _exchange_proven = False

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """Ranks, sizes and groups."""

    def _begin_run(self) -> None:
        """Start counting afresh; one-time checks run again."""
        self._rows = RowSharder(self.topology)
        self._token_mean = TokenMean(self.topology, type(self).__name__, required=self.topology.sp_size > 1)
        self._exchange_proven = self.topology.sp_size == 1
        set_running_exchange(self._exchange)

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
        if self.sharding.reduce_gradients == "last_micro_batch":
            module = self.lightning_module
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(not module.trainer.fit_loop._should_accumulate())
        with explaining("forward", self._memory_settings):
            return self._proving(
                lambda: self._token_mean.training_step(lambda: step(*args, **kwargs), args[0])  # type: ignore[union-attr]
            )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; where memory runs out, the error says what to switch on."""
        with explaining("backward", self._memory_settings):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

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
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            average_unsharded(parameters, self.topology)
            token_mean.scale_gradients(parameters, accumulate)
            return result

        with explaining("optimizer step", self._memory_settings):
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

    def _memory_settings(self) -> MemorySettings:
        return settings_of(self, self.lightning_module, self.world_size)

    def _reshard(self) -> None:
        if isinstance(self.lightning_module, FSDPModule):
            self.lightning_module.reshard()

    def _proving(self, step: Callable[[], Any]) -> Any:
        """Run a step; each must exchange at least once if a row is shared, unless the module skips its batch."""
        before = self._exchange.count
        output = step()
        if not self._exchange_proven and self._exchange.count == before and output is not None:
            raise ConfigurationError(
                "model",
                "must exchange sequence for heads in its attention at sequence_parallel_size > 1",
                "a step without any exchange: each rank attended to its own fragment only",
                'Load a Hugging Face model with attn_implementation="longctx" (CausalLMModule does), or call'
                " `lightning_longctx.ulysses_attention(q, k, v, batch)` in your own attention.",
            )
        return output
