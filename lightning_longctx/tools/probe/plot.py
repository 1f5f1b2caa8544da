"""The figures of the probe in one picture: fill, the first row, lengths, and balance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.probe.measures import Bucket, PolicyFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "save_plot"]

# Told apart also by those who see few colours (the palette of Okabe and Ito), and by their line styles.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_STYLES = ("-", "--", "-.", ":")


def check_plot(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        ConfigurationError: the name does not end like one of a picture.
    """
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigurationError("--plot", "must name a .png, .pdf or .svg file", repr(str(path)), "Rename it.")


def save_plot(path: Path, policies: Sequence[PolicyFigures], buckets: Sequence[Bucket]) -> None:
    """Draw and write the picture. No window and no global state of matplotlib is used.

    Args:
        path: file; its folder exists.
        policies: the configured one first.
        buckets: lengths of the documents.
    """
    from matplotlib.figure import Figure  # here, since it takes a second to import

    drawn = [policy for policy in policies if policy.fills]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (fill, first), (lengths, balance) = figure.subplots(2, 2)
    _draw_fills(fill, drawn)
    _draw_first_rows(first, drawn)
    _draw_lengths(lengths, buckets)
    _draw_balance(balance, drawn)
    figure.savefig(path, dpi=120)


def _draw_fills(axes: Axes, policies: Sequence[PolicyFigures]) -> None:
    for number, policy in enumerate(policies):
        fills = sorted(100 * fill for of_seed in policy.fills for fill in of_seed)
        axes.plot(_shares(fills), fills, label=policy.name, **_line(number))
    _name(axes, "Source fill of all ranks, emptiest first", "% of the micro-batches", "% of the budget")
    if policies:
        axes.legend(loc="lower right")


def _draw_first_rows(axes: Axes, policies: Sequence[PolicyFigures]) -> None:
    for number, policy in enumerate(policies):
        assert policy.documents is not None
        axes.barh(number, policy.documents.slowest, color=_COLOURS[number % len(_COLOURS)], alpha=0.85)
        axes.text(policy.documents.slowest, number, f" {policy.documents.slowest:,.0f}", va="center")
    axes.set_yticks(list(range(len(policies))), [policy.name for policy in policies])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    _name(axes, "Before the first micro-batch", "documents read by the slowest rank", "")


def _draw_lengths(axes: Axes, buckets: Sequence[Bucket]) -> None:
    places = range(len(buckets))
    documents, tokens = (sum(values) or 1 for values in _columns(buckets))
    axes.bar([x - 0.2 for x in places], [100 * b.documents / documents for b in buckets], 0.4, label="documents")
    axes.bar([x + 0.2 for x in places], [100 * b.tokens / tokens for b in buckets], 0.4, label="tokens")
    axes.set_xticks(list(places), [_short(bucket.low) for bucket in buckets], rotation=45)
    axes.legend()
    _name(axes, "Lengths", "tokens of a document, from", "% of all")


def _draw_balance(axes: Axes, policies: Sequence[PolicyFigures]) -> None:
    for number, policy in enumerate(policies):
        if policy.imbalance:
            ratios = sorted(policy.imbalance)
            axes.plot(_shares(ratios), ratios, label=policy.name, **_line(number))
    _name(axes, "Attention work of the ranks, most even first", "% of the micro-batches", "largest / mean")
    if axes.get_lines():
        axes.legend(loc="upper left")
    else:
        axes.text(0.5, 0.5, "one data-parallel rank", ha="center", va="center", transform=axes.transAxes)


def _columns(buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    return [bucket.documents for bucket in buckets], [bucket.tokens for bucket in buckets]


def _shares(values: Sequence[float]) -> list[float]:
    """Places on an axis from 0 to 100 %, so that policies with different numbers of rows can be compared."""
    return [100 * (index + 0.5) / len(values) for index in range(len(values))]


def _line(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _STYLES[number % len(_STYLES)],
        "linewidth": 1.5,
    }


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _short(tokens: int) -> str:
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if tokens >= factor:
            return f"{tokens // factor}{unit}"
    return str(tokens)
