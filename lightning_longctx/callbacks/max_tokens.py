"""A run of so many tokens, on any number of ranks: tokens are what training costs and what a learning curve is over.

``max_steps`` means another amount of training as soon as ranks, accumulation or the fill of rows change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_longctx.callbacks.step_sums import count_source_tokens, count_step_targets
from lightning_longctx.callbacks.step_tally import TallyMember, TokensSeen
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import TokenCountLike, counted, parse_token_count

__all__ = ["MaxTokens"]


class MaxTokens(Callback):
    """Stop a run after so many tokens over all ranks, at the end of the step that reaches them.

    Counted are tokens of finished steps, as ``TrainingMetrics`` logs them (``train/source_tokens``,
    ``train/target_tokens``): the same numbers for every layout, over resumes. Both callbacks share one count and one
    all-reduce a step, in any order. The run stops as by ``trainer.should_stop``: Lightning validates before it ends,
    and goes on while ``min_steps`` or ``min_epochs`` ask for it. A resumed run that has its tokens does no step.

    The count is read from the device only where the end may be near: a step is expected to hold at most twice the
    tokens of the largest so far, or of the budget of its micro-batches. A batch beyond that may be noticed late, on all
    ranks alike.

    Args:
        source: tokens that are not padding. Default None: no limit.
        target: tokens that are trained on: their label is not -100. Default None: no limit. At least one limit must be
            given; the first one that is reached counts. Both are written as 2e10, 512K, 1M (binary) or 20_000.

    Raises:
        ConfigurationError: no limit, or one that is no number of tokens; in the first step that a limit counts tokens
            which the batches do not tell.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[MaxTokens(target="1M")], accelerator="cpu", logger=False)
        >>> MaxTokens(source=2e10, target=1e10).token_horizon
        10000000000
    """

    def __init__(self, source: TokenCountLike | None = None, target: TokenCountLike | None = None) -> None:
        super().__init__()
        if source is None and target is None:
            fix = "Write `MaxTokens(target=2e10)`, or leave the callback out."
            raise ConfigurationError("callbacks.MaxTokens", "needs `source` or `target`", "neither", fix)
        self.source = None if source is None else parse_token_count(source, "callbacks.MaxTokens.source")
        self.target = None if target is None else parse_token_count(target, "callbacks.MaxTokens.target")
        self._limits = TokensSeen(self.source or 0, self.target or 0)
        self._tokens = TallyMember(self._limits)
        self._to_tell = True
        self._to_check = True

    @property
    def token_horizon(self) -> int:
        """Where a learning-rate schedule over tokens ends: the smaller of the limits."""
        return min(limit for limit in self._limits if limit)

    @property
    def seen(self) -> TokensSeen:
        """Source and target tokens so far, over all ranks and resumes. Waits for the device during a fit."""
        return self._tokens.seen

    def state_dict(self) -> dict[str, int]:
        """Return source and target tokens: equal on every rank and in every layout, without a collective."""
        return self._tokens.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the checkpoint stopped. The limits are those of this run."""
        self._tokens.load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting; a run that has its tokens already stops here."""
        self._to_tell = self._to_check = True
        self._tokens.begin(trainer)
        self._tell(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._tokens.tally is not None and pl_module.automatic_optimization:
            self._tokens.tally.forget_unfinished_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch, and stop at the end of a step."""
        assert self._tokens.tally is not None
        if self._to_check:
            self._to_check = False
            self._check(batch)
        self._tokens.tally.advance(trainer, outputs, batch)
        self._tell(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the count of this fit."""
        self._tokens.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the count of this fit."""
        self._tokens.abort()

    def _tell(self, trainer: Trainer) -> None:
        reached = None if self._tokens.tally is None else self._tokens.tally.reached
        if reached is not None and self._to_tell:
            self._to_tell = False
            counts = f"{reached.source_tokens:,} source and {counted(reached.target_tokens, 'target token')}"
            rank_zero_info(f"MaxTokens: the run stops at step {trainer.global_step:,}, after {counts}.")

    def _check(self, batch: Any) -> None:
        for field, limit, count, key in (
            ("source", self.source, count_source_tokens, "`input_ids`"),
            ("target", self.target, count_step_targets, "`shift_labels` or `labels`"),
        ):
            if limit is not None and count(batch) is None:
                got = f"keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
                rule = f"needs batches with {key}"
                fix = "Use DynamicBatchingDataModule, give batches that key, or use `max_steps`."
                raise ConfigurationError(f"callbacks.MaxTokens.{field}", rule, got, fix)
