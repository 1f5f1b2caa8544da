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
from lightning_longctx.callbacks.router_counts import RouterCounts, SiteCounts
from lightning_longctx.callbacks.router_decisions import Extract
from lightning_longctx.callbacks.router_history import RouterHistory, StarvedExperts
from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_output import publish_history, publish_window, run_folder
from lightning_longctx.callbacks.router_sites import find_sites
from lightning_longctx.callbacks.run_metrics import logger_step, own_folder
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, topology_of
from lightning_longctx.units import check_whole, counted

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
        for name, number in (("every_n_steps", every_n_steps), ("dead_after_windows", dead_after_windows)):
            if number is not None:
                check_whole(f"MoERouterHeatmap.{name}", number, 1)
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
        self._paths: list[str] = []
        self._labels: tuple[str, ...] = ()
        self._directory = Path()
        self._own_folder: Path | None = None
        self._resumed = False
        self._first_step: int | None = None  # first step of the window; None before its first batch
        self._last_step = 0
        self._history = RouterHistory(())
        self._starved = StarvedExperts(None, ())
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
        folder = trainer.log_dir  # every rank: Lightning sends it around
        self._directory = own_folder(folder or trainer.default_root_dir)
        self._detach()
        if self.every_n_steps is None:
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
        self._paths = [site.path for site in sites]
        self._labels = _labels(self._paths)
        self._counts = RouterCounts(sites, trainer.strategy.root_device, self.extract)
        self._history = RouterHistory(self._labels)
        self._starved = StarvedExperts(self.dead_after_windows, [site.num_experts for site in sites])
        self._first_step, self._own_folder = None, None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where training is, and go on with what a checkpoint had: strategies that shard load it only now."""
        self._last_step = trainer.global_step
        self._restore()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the forwards of this micro-batch, except those of its padding."""
        if self._counts is None or self._paused:
            return
        self._counts.active, self._counts.padding, self._in_batch = True, _padding_tokens(batch), True
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
        counted, self._in_batch = self._in_batch, False
        self._counts.active, self._counts.padding = False, None
        if counted and not self._counts.has_settled:
            self._check_seen(self._counts.settle())
        previous, self._last_step = self._last_step, trainer.global_step
        assert self.every_n_steps is not None
        if self._last_step // self.every_n_steps > previous // self.every_n_steps:
            self._end_window(trainer, logger_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish what is left, and the strip over the run."""
        if self._counts is None:
            return
        step = max(logger_step(trainer) - 1, 0)
        if self._first_step is not None and self._last_step >= self._first_step:
            self._end_window(trainer, step)
        if self._history.windows and trainer.is_global_zero:
            publish_history(self._history, self._folder(), trainer.loggers, step)
            if not closing_of(trainer).is_open:
                rank_zero_info("\n".join(self.closing_lines()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove every hook."""
        self._detach()

    def closing_lines(self) -> list[str]:
        """Where pictures are: printed at the end of training, or among what all parts say (``TrainingMetrics``)."""
        windows = self._history.windows
        if self.latest is None or not windows:
            return []
        worst = self.latest.metrics(full=False)["moe/max_vio"]
        where = f"pictures of {counted(windows, 'window')} in {self._folder()}"
        return [f"Expert load: {where}; the busiest expert had {1 + worst:.2f} times its share in the last one."]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove every hook."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove every hook: Lightning skips ``teardown`` after an error."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """The window so far over all ranks, and what is remembered of earlier ones.

        An open window takes one all-reduce, so every rank must call it.
        """
        state: dict[str, Any] = {"paths": self._paths, "history": self._history.state_dict(), "window": None}
        state["starved"] = self._starved.state_dict()
        if self._counts is not None and self._first_step is not None:
            counts = self._reduced(self._counts.peek()).cpu()
            state["window"] = {"first_step": self._first_step, "counts": counts}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the saved window, on any number of ranks; with other layers of experts a new one starts."""
        self._to_restore = state_dict

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _detach(self) -> None:
        if self._counts is not None:
            self._counts.detach()
            self._counts = None

    def _folder(self) -> Path:
        """Of this run; made when there is something to write."""
        if self._own_folder is None:
            self._own_folder = run_folder(self._directory, self._resumed)
        return self._own_folder

    def _check_seen(self, silent: Sequence[str]) -> None:
        if silent:
            self._miss("must show their decisions", f"nothing from {', '.join(silent[:4])} ({len(silent)} in all)")

    def _restore(self) -> None:
        saved, self._to_restore = self._to_restore, None
        self._resumed = saved is not None
        if saved is None or self._counts is None:
            return
        window, starved = saved["window"], self._starved.state_dict()
        own = [len(windows) for windows in starved]
        if saved["paths"] != self._paths or own != [len(windows) for windows in saved["starved"]]:
            rank_zero_info("MoERouterHeatmap: the checkpoint is of other layers of experts; a new window starts.")
            return
        self._history.load_state_dict(saved["history"])
        self._starved.load_state_dict(saved["starved"])
        if window is not None:
            self._first_step = window["first_step"]
            if self._topology.dp_rank == self._topology.sp_rank == 0:  # the counts of all ranks go on at one
                self._counts.restore(window["counts"])

    def _reduced(self, counts: Tensor) -> Tensor:
        if self._topology.token_group is not None:
            dist.all_reduce(counts, group=self._topology.token_group)
        return counts

    def _end_window(self, trainer: Trainer, step: int) -> None:
        """Reduce, check and publish under a step of loggers. All ranks come here together, whatever they counted."""
        assert self._counts is not None
        self._counts.settle()
        found = self._counts.read(self._reduced(self._counts.take()))
        first, self._first_step = self._first_step, None
        self._check_seen([path for path, site in zip(self._paths, found, strict=True) if site.is_silent])
        self._check_indices(found)
        load = self._load(found, first or self._last_step)
        if load.is_empty:
            self._tell("MoERouterHeatmap: a window saw no routing; nothing is published for it.")
            return
        self.latest = load
        self._history.add(load)
        if (starved := self._starved.add(load)) is not None:
            rank_zero_warn(starved, category=UserWarning)
        metrics = load.metrics(full=self.detail == "full")
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in metrics.items()})
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
            publish_window(load, self._folder(), trainer.loggers, step)

    def _load(self, found: Sequence[SiteCounts], first_step: int) -> RouterLoad:
        assert self._counts is not None
        return RouterLoad(
            first_step,
            self._last_step,
            tuple(self._paths),
            self._labels,
            tuple(site.tokens for site in found),
            sum(site.padding for site in found),
            sum(site.dropped for site in found),
        )

    def _check_indices(self, found: Sequence[SiteCounts]) -> None:
        """Refuse indices that are no experts. The counts are those of all ranks, so all of them come to one answer."""
        assert self._counts is not None
        wrong = next((number for number, site in enumerate(found) if site.outside), None)
        if wrong is not None:
            largest = self._counts.largest()
            if self._topology.token_group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._topology.token_group)
            site, value = self._counts.sites[wrong], int(largest[wrong])
            such = f"such as {value}" if value >= site.num_experts else "below -1"
            fix = "Check the router, or read the right tensor with `extract`."
            rule = f"must give expert indices from 0 to {site.num_experts - 1}"
            got = counted(found[wrong].outside, "other")
            raise ConfigurationError(site.path, rule, f"{got}, {such}", fix)
        if any(site.unmasked for site in found):
            self._tell(
                "MoERouterHeatmap: some routers see another number of tokens than the batch has, so padding counts"
                " there."
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


def _padding_tokens(batch: Any) -> Tensor | None:
    """Which tokens are padding, bool ``[N, 1]``: of a packed batch, or of one with an attention mask ``[B, S]``."""
    if not isinstance(batch, Mapping):
        return None
    sources, mask = batch.get("source_ids"), batch.get("attention_mask")
    if isinstance(sources, Tensor) and "cu_seqlens" in batch:
        return (sources == PAD_SOURCE_ID).view(-1, 1)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask == 0).view(-1, 1)
    return None


def _labels(paths: Sequence[str]) -> tuple[str, ...]:
    """``layer_07`` for each path: the number in the path where it has one and it is unique, else its place."""
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path) for path in paths]
    found = [int(number[0]) if len(number) == 1 else None for number in numbers]
    if None in found or len(set(found)) < len(found):
        found = list(range(len(paths)))
    digits = max(2, math.ceil(math.log10(max(int(number or 0) for number in found) + 1)))
    return tuple(f"layer_{number:0{digits}d}" for number in found)
