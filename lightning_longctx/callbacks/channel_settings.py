"""Settings of ``ChannelLoss``: what is rarely changed, as a group, and the checks of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_longctx.callbacks.source_names import SourceTable
from lightning_longctx.errors import ConfigurationError

__all__ = ["ChannelOptions", "check_settings"]


@dataclass
class ChannelOptions:
    """What is rarely changed.

    Args:
        log_weighted: whether ``channel_loss_weighted/<source>`` is logged.
        log_tokens: whether ``channel_tokens/<source>`` is logged.
        counters: of ``samples``, ``input_tokens`` and ``label_tokens``, what is logged besides, as
            ``channel_<counter>/<source>``. Default: none, since they cost a pass over the tokens each.
        extra_strip_keys: keys of the batch that the module's steps must not see, beside source ids and names.
        loss_function: watch the ``loss_function`` of the Hugging Face models in the module, for modules that return
            only a mean. A second, detached cross entropy on sampled steps. Default False: ``per_token_loss`` is free.
        summary: whether a table is printed at the end of training.
        plot: whether ``<prefix>_loss.png`` is written to the log directory at the end of training.
    """

    log_weighted: bool = True
    log_tokens: bool = True
    counters: list[Literal["samples", "input_tokens", "label_tokens"]] = field(default_factory=list)
    extra_strip_keys: list[str] = field(default_factory=list)
    loss_function: bool = False
    summary: bool = True
    plot: bool = True


def check_settings(
    average_over: str, group_by: str, every_n_steps: int | None, source_names: Sequence[str] | Mapping[int, str] | None
) -> None:
    """Refuse settings that cannot work, before anything runs.

    Raises:
        ConfigurationError: an unknown choice, fewer steps than one, or names that are empty or not unique.
    """
    for name, value, choices in (
        ("average_over", average_over, ("step", "interval")),
        ("group_by", group_by, ("source", "position")),
    ):
        if value not in choices:
            fix = f"Take one of {', '.join(choices)}."
            raise ConfigurationError(f"ChannelLoss.{name}", "must be a known choice", repr(value), fix)
    if every_n_steps is not None and every_n_steps < 1:
        raise ConfigurationError("ChannelLoss.every_n_steps", "must be at least 1", every_n_steps, "Leave it out.")
    if source_names is not None:
        SourceTable(source_names)
