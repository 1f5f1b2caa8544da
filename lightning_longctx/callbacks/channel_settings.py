"""Settings of ``ChannelLoss``: what is rarely changed, as a group, and the checks of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from lightning_longctx.callbacks.source_names import UNSAFE, SourceTable
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import check_whole

__all__ = ["ChannelOptions", "check_prefix", "check_settings", "options_of"]

Counter = Literal["samples", "input_tokens", "label_tokens"]


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
    counters: list[Counter] = field(default_factory=list)
    extra_strip_keys: list[str] = field(default_factory=list)
    loss_function: bool = False
    summary: bool = True
    plot: bool = True

    def __post_init__(self) -> None:
        """Refuse counters that do not exist, and a text where a list is meant."""
        known = get_args(Counter)
        if isinstance(self.counters, str) or not set(self.counters) <= set(known):
            fix = f"Give a list of {', '.join(known)}."
            raise ConfigurationError("ChannelLoss.options.counters", "must hold known counters", self.counters, fix)
        if isinstance(self.extra_strip_keys, str):
            fix = "Put it into a list."
            raise ConfigurationError(
                "ChannelLoss.options.extra_strip_keys", "must be a list", self.extra_strip_keys, fix
            )


def check_settings(
    average_over: str, group_by: str, every_n_steps: int | None, source_names: Sequence[str] | Mapping[int, str] | None
) -> None:
    """Refuse settings that cannot work, before anything runs.

    Raises:
        ConfigurationError: an unknown choice, fewer steps than one, or names that are empty, not unique or of no use.
    """
    for name, value, choices in (
        ("average_over", average_over, ("step", "interval")),
        ("group_by", group_by, ("source", "position")),
    ):
        if value not in choices:
            fix = f"Take one of {', '.join(choices)}."
            raise ConfigurationError(f"ChannelLoss.{name}", "must be a known choice", repr(value), fix)
    if every_n_steps is not None:
        check_whole("ChannelLoss.every_n_steps", every_n_steps, 1)
    if source_names is None:
        return
    if group_by == "position":
        fix = "Leave `source_names` out, or add a second ChannelLoss for sources."
        raise ConfigurationError(
            "ChannelLoss.source_names", "must not be set with `group_by: position`", source_names, fix
        )
    SourceTable(source_names)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that some logger would write in another way.

    Raises:
        ConfigurationError: empty, or with other characters than letters, digits, ``_``, ``-`` and ``.``.
    """
    if UNSAFE.search(prefix) or not prefix:
        fix = "Use letters, digits, `_`, `-` and `.`, or leave it out."
        raise ConfigurationError("ChannelLoss.prefix", "must be a name that every logger takes", repr(prefix), fix)


def options_of(options: ChannelOptions | Mapping[str, Any]) -> ChannelOptions:
    """Options, also from a mapping as a configuration has it.

    Raises:
        ConfigurationError: an option that does not exist.
    """
    if not isinstance(options, Mapping):
        return options
    known = [part.name for part in fields(ChannelOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        fix = f"Use some of {', '.join(known)}."
        raise ConfigurationError("ChannelLoss.options", "must hold known options", unknown, fix)
    return ChannelOptions(**options)
