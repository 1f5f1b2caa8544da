"""The figures of the probe as text, as tables in files, and as JSON."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from lightning_longctx.tools.output import markdown_table
from lightning_longctx.tools.probe.measures import Bucket, FirstRow, PolicyFigures, RankFigures
from lightning_longctx.units import counted

__all__ = ["ProbeReport"]

#: Raised when a key of the JSON form changes its name or meaning.
JSON_VERSION = 1

# Below this ratio evening out costs more order than it gains time (bimodal lengths at 128K got worse).
_UNEVEN = 1.15

_NONE = "-"


@dataclass(frozen=True)
class ProbeReport:
    """Everything that was found.

    Attributes:
        facts: what was probed: sizes, seeds, policy.
        policies: the configured one first.
        buckets: lengths of the documents read.
        problems: what is below ``--min-fill``, as sentences.
    """

    facts: dict[str, Any]
    policies: list[PolicyFigures]
    buckets: list[Bucket]
    problems: list[str]

    def to_plain(self) -> dict[str, Any]:
        """All numbers, for ``--json``."""
        policies = [
            {
                **asdict(policy),
                "mean_imbalance": policy.mean_imbalance,
                "lost_to_imbalance": policy.lost_to_imbalance,
            }
            for policy in self.policies
        ]
        return {
            "version": JSON_VERSION,
            "facts": self.facts,
            "policies": policies,
            "lengths": [asdict(bucket) for bucket in self.buckets],
            "problems": self.problems,
        }

    def to_text(self) -> str:
        """The report as Markdown that is readable in a terminal."""
        facts = self.facts
        sizes = f"rows of {counted(facts['max_tokens_per_batch'], 'token')}"
        sizes += f", {counted(facts['data_parallel_ranks'], 'data-parallel rank')}"
        seeds = ", ".join(map(str, facts["seeds"]))
        lines = [
            "# longctx probe",
            "",
            f"{sizes}, sequence_parallel_size {facts['sequence_parallel_size']}, "
            f"{counted(facts['micro_batches'], 'micro-batch')} a rank, seed {seeds}.",
            f"Measured: {self.policies[0].gate}. The other policies chose from the lengths that were read.",
            "",
            "## Policies",
            "",
            *markdown_table(_POLICY_HEAD, (_policy_row(policy, self.policies[0]) for policy in self.policies)),
            "",
            *_LEGEND,
            "",
            "## Ranks (measured)",
            "",
            *markdown_table(_RANK_HEAD, map(_rank_row, self.policies[0].ranks)),
            "",
            "## Lengths of documents",
            "",
            *markdown_table(("tokens from", "documents", "% of documents", "% of tokens"), _bucket_rows(self.buckets)),
            "",
            *self._remarks(),
        ]
        return "\n".join(lines) + "\n"

    def _remarks(self) -> list[str]:
        measured, remarks = self.policies[0], list(self.problems)
        ratio, lost = measured.mean_imbalance, measured.lost_to_imbalance
        if ratio is not None and lost is not None and ratio > _UNEVEN:
            advice = "" if self.facts["balance"] else " `data.loading.balance: true` evens it out."
            remarks.append(
                f"Attention work is uneven, {ratio:.2f} times the mean: {lost:.0%} of its time is lost.{advice}"
            )
        tails = sum(rank.tail_rows for rank in measured.ranks)
        if tails:
            remarks.append(f"The documents ended: {counted(tails, 'row')} made of what was left, no steady ones.")
        least, most = (pick(rank.rows for rank in measured.ranks) for pick in (min, max))
        if least != most:
            remarks.append(
                f"Ranks gave {least} to {counted(most, 'row')}: a run stops, or pads, at the first that ends."
            )
        if any(policy.documents is None and not policy.refused for policy in self.policies):
            remarks.append("To compare all policies, read more documents: raise --micro-batches.")
        return [f"- {remark}" for remark in remarks]

    def save(self, folder: Path) -> None:
        """Write ``probe.md``, ``policies.csv`` and ``ranks.csv`` into a folder that exists."""
        (folder / "probe.md").write_text(self.to_text(), encoding="utf-8")
        given = [policy for policy in self.policies if not policy.refused]
        _write_csv(folder / "policies.csv", [_flat(policy) for policy in given])
        _write_csv(
            folder / "ranks.csv", [{"policy": policy.name, **asdict(rank)} for policy in given for rank in policy.ranks]
        )


# Short, so that a table fits a terminal; _LEGEND explains them below it.
_POLICY_HEAD = (
    "policy",
    "documents",
    "seconds",
    "first %",
    "steady %",
    "worst %",
    "wait",
    "pool",
    "drift %",
    "attention",
    "rows",
    "choice",
)
_RANK_HEAD = ("seed", "rank", "documents", "seconds", "first %", "steady %", "rows", "wait", "pool", "choice")

_LEGEND = (
    "documents, seconds: up to the first row; p50 / slowest rank / slowest over p50. ~: as long as reading took.",
    "first, steady, worst %: source fill of the first row, of the later ones, and of the emptiest later row of a rank.",
    "wait: most rows that a document waited. pool: most tokens that waited, in rows. rows: of the rank with fewest.",
    "drift %: length of the documents in the first third of the rows against all. attention: largest / mean of ranks.",
)


def _policy_row(policy: PolicyFigures, measured: PolicyFigures) -> tuple[str, ...]:
    if policy.refused:
        return (policy.name, f"refused: {policy.refused}")
    if policy.documents is None:
        read = min(rank.documents for rank in policy.ranks if not rank.rows)
        return (policy.name, f"no first row on some rank within the {counted(read, 'document')} that were read there")
    same = [rank.choice for rank in policy.ranks] == [rank.choice for rank in measured.ranks]
    return (
        policy.name,
        _first(policy.documents, digits=1).replace(".0 ", " "),
        ("" if policy.measured else "~ ") + _first(policy.seconds, digits=2),
        _percent(_mean(policy.first_fills)),
        _percent(_mean(policy.steady_fills)),
        _percent(policy.worst_fill),
        str(max(rank.longest_wait for rank in policy.ranks)),
        f"{max(rank.peak_windows for rank in policy.ranks):.1f}",
        _NONE if policy.order_drift is None else f"{100 * policy.order_drift:+.1f}",
        _NONE if policy.mean_imbalance is None else f"{policy.mean_imbalance:.2f}",
        f"{min(rank.rows for rank in policy.ranks):,}",
        "measured" if policy.measured else "the same" if same else "another",
    )


def _rank_row(rank: RankFigures) -> tuple[str, ...]:
    return (
        str(rank.seed),
        str(rank.rank),
        f"{rank.documents:,}",
        f"{rank.seconds:,.2f}",
        _percent(rank.first_fill),
        _percent(rank.steady_fill),
        f"{rank.rows:,}",
        str(rank.longest_wait),
        f"{rank.peak_windows:.1f}",
        rank.choice,
    )


def _bucket_rows(buckets: Sequence[Bucket]) -> Iterable[tuple[str, ...]]:
    documents = sum(bucket.documents for bucket in buckets)
    tokens = sum(bucket.tokens for bucket in buckets)
    for bucket in buckets:
        shares = (_percent(bucket.documents / documents), _percent(bucket.tokens / tokens))
        yield (f"{bucket.low:,}", f"{bucket.documents:,}", *shares)


def _flat(policy: PolicyFigures) -> dict[str, Any]:
    """One line of ``policies.csv``."""
    return {
        "policy": policy.name,
        "measured": policy.measured,
        **{f"documents_{key}": value for key, value in _parts(policy.documents).items()},
        **{f"seconds_{key}": value for key, value in _parts(policy.seconds).items()},
        "first_fill": _mean(policy.first_fills),
        "steady_fill": _mean(policy.steady_fills),
        "worst_fill": policy.worst_fill,
        "longest_wait": max(rank.longest_wait for rank in policy.ranks),
        "peak_windows": max(rank.peak_windows for rank in policy.ranks),
        "order_drift": policy.order_drift,
        "mean_imbalance": policy.mean_imbalance,
        "lost_to_imbalance": policy.lost_to_imbalance,
    }


def _parts(first: FirstRow | None) -> dict[str, float | None]:
    return {"p50": None, "slowest": None, "skew": None} if first is None else asdict(first)


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.2f}"


def _first(first: FirstRow | None, digits: int) -> str:
    if first is None:
        return _NONE
    return f"{first.p50:,.{digits}f} / {first.slowest:,.{digits}f} / {first.skew:.2f}x"
