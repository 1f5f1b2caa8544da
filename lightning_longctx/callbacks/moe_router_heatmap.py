"""How a Mixture-of-Experts model spreads its tokens: counts of every decision, as numbers and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_longctx.batch import PAD_SOURCE_ID
from lightning_longctx.callbacks.closing import closing_of
from lightning_longctx.callbacks.router_auxiliary import has_dead_auxiliary_loss
from lightning_longctx.callbacks.router_counts import EXTRA_COLUMNS, RouterCounts
from lightning_longctx.callbacks.router_decisions import Extract
from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_output import publish_history, publish_window
from lightning_longctx.callbacks.router_sites import RouterSite, find_sites
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, topology_of

__all__ = ["MoERouterHeatmap"]

Detail = Literal["brief", "full"]
OnMissing = Literal["error", "warn"]


class MoERouterHeatmap(Callback):
    """Count every routing decision of training, and show how far each expert is from its fair share.

    Routers are found by structure: experts, and beside them a module whose output holds an integer index for each token
    and choice. Each token counts once under any activation checkpointing; padding, validation and test do not count.
    A window of steps ends with one all-reduce over the ranks that hold distinct tokens. Its numbers go to every logger,
    its picture to those that take pictures, and both to ``moe_router/`` in the log directory.

    With share ``P`` of ``E`` experts the violation of an expert is ``D = E * P - 1``: 0 is fair, -1 without a token.

    ============================ ======================================================================================
    key                          value, the worst layer; ``<key>_mean`` over layers; ``<key>/layer_<n>`` in full detail
    ============================ ======================================================================================
    ``moe/max_vio``              violation of the busiest expert (MaxVio, https://arxiv.org/abs/2408.15664)
    ``moe/min_vio``              violation of the expert with the fewest tokens
    ``moe/avg_vio``              mean of the absolute violations
    ``moe/variation``            coefficient of variation of tokens per expert
    ``moe/entropy``              entropy of the shares / log E: 1 is fair, 0 is one expert
    ``moe/dead_experts``         experts without any token in the window
    ``moe/tokens_max``           most tokens of an expert
    ``moe/tokens_min``           fewest tokens of an expert
    ``moe/padding_share``        choices of padding / all choices (not counted above); one key
    ``moe/dropped_share``        choices beyond an expert's capacity / choices without padding; one key
    ============================ ======================================================================================

    Args:
        every_n_steps: optimizer steps of a window. Default 100: a window of thousands of tokens for each expert, and
            few enough pictures. None switches the callback off. What is left at the end of training is a window too.
        detail: ``brief`` (default: 18 keys, whatever the depth of the model) or ``full`` (8 more for each layer).
        routers: dotted paths of routers, with ``*``, for models whose routers are not found. Default: found.
        extract: reads expert indices, integer ``[..., k]``, from a module and its output; for outputs of another form.
            Called as ``extract(module, output)``; None means that this module tells nothing.
        on_missing: what to do with a model without any experts, or experts whose decisions cannot be seen: ``error``
            (default) or ``warn``.
        dead_after_windows: warn of experts without a token for so many windows in a row. Default 3: one window may be
            chance. None never warns.

    Attributes:
        latest: the last window as a :class:`~lightning_longctx.callbacks.router_metrics.RouterLoad`; None before.

    Raises:
        ConfigurationError: a setting that cannot work (at once); no router, or one that is not understood (before or
            after the first batch), with the paths of the modules; an index that is no expert, with layer and value.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[MoERouterHeatmap(every_n_steps=50)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        detail: Detail = "brief",
        routers: str | Sequence[str] = (),
        extract: Extract | None = None,
        on_missing: OnMissing = "error",
        dead_after_windows: int | None = 3,
    ) -> None:
        super().__init__()
        _check_count("every_n_steps", every_n_steps)
        _check_count("dead_after_windows", dead_after_windows)
        for name, value, choices in (("detail", detail, Detail), ("on_missing", on_missing, OnMissing)):
            if value not in get_args(choices):
                fix = f"Use one of {', '.join(get_args(choices))}."
                raise ConfigurationError(f"MoERouterHeatmap.{name}", "must be a known choice", repr(value), fix)
        self.every_n_steps = every_n_steps
        self.detail = detail
        self.routers = (routers,) if isinstance(routers, str) else tuple(routers)
        self.extract = extract
        self.on_missing = on_missing
        self.dead_after_windows = dead_after_windows
        self.latest: RouterLoad | None = None
        self._topology = Topology()
        self._counts: RouterCounts | None = None
        self._labels: tuple[str, ...] = ()
        self._directory = Path()
        self._first_step: int | None = None  # first step of the window; None before its first batch
        self._last_step = 0
        self._history: list[RouterLoad] = []
        self._windows = 0  # published in this fit
        self._dead: list[Tensor] = []  # for each layer, windows in a row without a token, by expert
        self._told: set[str] = set()
        self._paused = False
        self._in_batch = False
        self._to_restore: Mapping[str, Any] | None = None

    # -- for people ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop counting, for a phase of training that must not show."""
        self._paused = True

    def resume(self) -> None:
        """Count again."""
        self._paused = False

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask who holds which tokens, at a point that every rank reaches."""
        self._topology = topology_of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the routers of the sharded model, before anything runs or is compiled."""
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)  # every rank: Lightning sends it around
        if self.every_n_steps is None or self._counts is not None:
            return
        sites = find_sites(pl_module, self.routers)
        if not sites:
            self._miss("must have experts beside a router", f"none in {type(pl_module).__name__}")
            return
        if has_dead_auxiliary_loss(pl_module):
            rank_zero_warn(
                "The router's auxiliary loss has no gradient under reentrant activation checkpointing: it is logged and"
                " trains nothing. Use non-reentrant checkpointing (use_reentrant=False).",
                category=UserWarning,
            )
        self._labels = _labels([site.path for site in sites])
        self._counts = RouterCounts(sites, trainer.strategy.root_device, self.extract)
        self._dead = [torch.zeros(site.num_experts, dtype=torch.int64) for site in sites]
        self._restore(sites)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where training is."""
        self._last_step, self._windows = trainer.global_step, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the forwards of this micro-batch, except those of its padding."""
        if self._counts is None or self._paused:
            return
        self._counts.active, self._counts.valid, self._in_batch = True, _valid_tokens(batch), True
        if self._first_step is None:
            self._first_step = trainer.global_step + 1

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Stop counting: a compiled block that is computed again in backward could not tell by itself."""
        if self._counts is not None:
            self._counts.active = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count on, for steps with several backward passes."""
        if self._counts is not None:
            self._counts.active = self._in_batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first batch check that every router was understood; at the end of a window publish it."""
        if self._counts is None:
            return
        self._counts.active, self._counts.valid, self._in_batch = False, None, False
        silent = self._counts.settle()
        if silent:
            self._miss("must show their decisions", f"nothing from {', '.join(silent[:4])} ({len(silent)} in all)")
        previous, self._last_step = self._last_step, trainer.global_step
        assert self.every_n_steps is not None
        if self._last_step // self.every_n_steps > previous // self.every_n_steps:
            self._end_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish what is left, and the strip over the run."""
        if self._counts is None:
            return
        if self._first_step is not None and self._last_step >= self._first_step:
            self._end_window(trainer)
        if self._history and trainer.is_global_zero:
            publish_history(self._history, self._directory, trainer.loggers, _logger_step(trainer))
            if not closing_of(trainer).is_open:
                rank_zero_info("\n".join(self.closing_lines()))
        self._history = []

    def closing_lines(self) -> list[str]:
        """Where pictures are: printed at the end of training, or among what all parts say (``TrainingMetrics``)."""
        if self.latest is None or not self._windows:
            return []
        worst = self.latest.metrics(full=False)["moe/max_vio"]
        where = f"pictures of {self._windows} {'window' if self._windows == 1 else 'windows'} in {self._directory}"
        return [f"Expert load: {where}; the busiest expert had {1 + worst:.2f} times its share in the last one."]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove every hook."""
        if self._counts is not None:
            self._counts.detach()
            self._counts = None

    def state_dict(self) -> dict[str, Any]:
        """The window so far, of this rank: no collective, so any rank may ask at any time."""
        if self._counts is None or self._first_step is None:
            return {}
        return {
            "rank": self._topology.rank,
            "world_size": self._topology.world_size,
            "first_step": self._first_step,
            "paths": [site.path for site in self._counts.sites],
            "counts": self._counts.peek().cpu(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the saved window, where the checkpoint holds that of each rank; otherwise a new one starts."""
        self._to_restore = state_dict or None

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _restore(self, sites: Sequence[RouterSite]) -> None:
        saved, self._to_restore = self._to_restore, None
        if saved is None:
            return
        assert self._counts is not None
        # A stock checkpoint of several ranks holds the state of rank 0 alone: its window would lack the others' counts.
        own = saved["rank"] == self._topology.rank and saved["world_size"] == self._topology.world_size
        known = saved["paths"] == [site.path for site in sites] and saved["counts"].shape == self._counts.peek().shape
        if self._everywhere(own and known):
            self._first_step = saved["first_step"]
            self._counts.restore(saved["counts"])
        else:
            rank_zero_info("MoERouterHeatmap: the saved window is not that of these ranks; a new window starts.")

    def _everywhere(self, value: bool) -> bool:
        group = self._topology.host_group
        if group is None:
            return value
        agreed = torch.tensor(int(value))
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        return bool(agreed)

    def _end_window(self, trainer: Trainer) -> None:
        """Reduce, check and publish. Every rank comes here at the same step, whatever it counted."""
        assert self._counts is not None
        counts = self._counts.take()
        if self._topology.token_group is not None:
            dist.all_reduce(counts, group=self._topology.token_group)
        first, self._first_step = self._first_step, None
        host = counts.cpu()
        self._check_indices(host)
        load = self._load(host, first or self._last_step)
        if load.is_empty:
            self._tell("MoERouterHeatmap: a window saw no routing; nothing is published for it.")
            return
        self.latest = load
        self._history.append(load)
        self._windows += 1
        self._warn_of_dead(load)
        metrics = load.metrics(full=self.detail == "full")
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in metrics.items()})
        if trainer.is_global_zero:
            step = _logger_step(trainer)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
            publish_window(load, self._directory, trainer.loggers, step)

    def _load(self, host: Tensor, first_step: int) -> RouterLoad:
        assert self._counts is not None
        sites = self._counts.sites
        padding, dropped = (int(value) for value in host[:, -EXTRA_COLUMNS:][:, :2].sum(0))
        return RouterLoad(
            first_step,
            self._last_step,
            tuple(site.path for site in sites),
            self._labels,
            tuple(row[: site.num_experts] for row, site in zip(host, sites, strict=True)),
            padding,
            dropped,
        )

    def _check_indices(self, host: Tensor) -> None:
        assert self._counts is not None
        _, _, outside, worst, _, unmasked = host[:, -EXTRA_COLUMNS:].unbind(1)
        for number in outside.nonzero().flatten().tolist()[:1]:
            site = self._counts.sites[number]
            value = f"such as {int(worst[number])}" if worst[number] else "below -1"
            got = f"{int(outside[number])} others, {value}"
            fix = "Check the router, or read the right tensor with `extract`."
            raise ConfigurationError(site.path, f"must give expert indices from 0 to {site.num_experts - 1}", got, fix)
        if bool(unmasked.any()):
            self._tell(
                "MoERouterHeatmap: some routers see another number of tokens than the batch has, so padding counts"
                " there."
            )

    def _warn_of_dead(self, load: RouterLoad) -> None:
        if self.dead_after_windows is None:
            return
        found = []
        for label, windows, counts in zip(load.labels, self._dead, load.tokens, strict=True):
            if not bool(counts.sum()):
                continue  # a silent layer says nothing about its experts
            windows[:] = torch.where(counts == 0, windows + 1, 0)
            # Only when the limit is reached: one warning for each time that experts starve.
            dead = (windows == self.dead_after_windows).nonzero().flatten().tolist()
            if dead:
                found.append(f"{label} {dead}")
        if found:
            rank_zero_warn(
                f"MoERouterHeatmap: no token for {self.dead_after_windows} windows, until step {load.last_step}, for"
                f" the experts {', '.join(found[:8])} ({len(found)} layers in all).",
                category=UserWarning,
            )

    def _miss(self, rule: str, got: str) -> None:
        fix = (
            "Name routers with `routers` (and `extract`), call `record_router_indices` in the module of the experts, or"
            " set `on_missing: warn`."
        )
        if self.on_missing == "error":
            raise ConfigurationError("MoERouterHeatmap", rule, got, fix)
        self._tell(f"MoERouterHeatmap: the model {rule}: {got}. {fix}")

    def _tell(self, message: str) -> None:
        if message not in self._told:
            rank_zero_warn(message, category=UserWarning)
        self._told.add(message)


def _check_count(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        fix = "Write the number of steps." if name == "every_n_steps" else "Write the number of windows."
        raise ConfigurationError(f"MoERouterHeatmap.{name}", "must be a positive integer or null", repr(value), fix)


def _valid_tokens(batch: Any) -> Tensor | None:
    """Which tokens are not padding, bool ``[N]``: of a packed batch, or of one with an attention mask ``[B, S]``."""
    if not isinstance(batch, Mapping):
        return None
    sources, mask = batch.get("source_ids"), batch.get("attention_mask")
    if isinstance(sources, Tensor) and "cu_seqlens" in batch:
        return (sources != PAD_SOURCE_ID).flatten()
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask != 0).flatten()
    return None


def _labels(paths: Sequence[str]) -> tuple[str, ...]:
    """``layer_07`` for each path: the number in the path where it has one and it is unique, else its place."""
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path) for path in paths]
    found = [int(number[0]) if len(number) == 1 else None for number in numbers]
    if None in found or len(set(found)) < len(found):
        found = list(range(len(paths)))
    digits = max(2, math.ceil(math.log10(max(int(number or 0) for number in found) + 1)))
    return tuple(f"layer_{number:0{digits}d}" for number in found)


def _logger_step(trainer: Trainer) -> int:
    """The step under which Lightning logs what belongs to the step that has just ended."""
    return max(trainer.global_step - 1, 0)
