"""The summary of a rollout benchmark as a person reads it: on a terminal, and as Markdown.

Invariant: both forms show the same numbers, and losses are shown like wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiderl.bench.rollout.report import OURS

if TYPE_CHECKING:
    from rich.table import Table

Cells = list[list[str]]


def workload_table(summary: Mapping[str, Any]) -> tuple[list[str], Cells]:
    """Headings and rows: one policy a row."""
    compared = "against" in summary
    headings = [
        "policy",
        "loss tokens/s",
        *(["ctb is"] if compared else []),
        "KV hit",
        "KV reuse",
        "computed again",
    ]
    headings += ["engines wait", "waiting s/1000 tokens", "trainer waits", "staleness"]
    rows = []
    for name, one in summary["policies"].items():
        ratio = summary["against"][name]["loss_tokens_per_s"] if compared and name != OURS else None
        rows.append(
            [
                name,
                ranged(one["loss_tokens_per_s"], "{:.0f}"),
                *([ranged(ratio, "{:.2f}x") if ratio else ""] if compared else []),
                middle(one["kv_hit_rate"], "{:.3f}"),
                middle(one["kv_reuse"], "{:.3f}"),
                middle(one["reprefilled_share"], "{:.0%}"),
                middle(one["waiting_share"], "{:.1%}"),
                middle(one["waiting_s_per_1000_tokens"], "{:.2f}"),
                middle(one["trainer_waiting_share"], "{:.0%}"),
                "" if one["staleness"] is None else f"{one['staleness']:.1f}",
            ]
        )
    return headings, rows


def cause_table(summary: Mapping[str, Any]) -> tuple[list[str], Cells]:
    """Why engines waited (share of the time), and why tokens were computed again."""
    policies = summary["policies"]
    waits = list(dict.fromkeys(c for one in policies.values() for c in one["waiting_by_cause"]))
    again = list(dict.fromkeys(c for one in policies.values() for c in one["reprefilled_by_cause"]))
    again = [c for c in again if any(one["reprefilled_by_cause"].get(c) for one in policies.values())]
    headings = ["policy", *(f"waits: {c}" for c in waits), *(f"again: {c}" for c in again)]
    rows = [
        [
            name,
            *(f"{one['waiting_by_cause'].get(c, 0.0):.1%}" for c in waits),
            *(f"{one['reprefilled_by_cause'].get(c, 0):,.0f}" for c in again),
        ]
        for name, one in policies.items()
    ]
    return headings, rows


def grid_table(workloads: Sequence[Mapping[str, Any]]) -> tuple[list[str], Cells]:
    """One workload a row, one policy a column: loss tokens/s relative to the best baseline there."""
    measured = [one for one in workloads if "of_best" in one["summary"]]
    policies = list(dict.fromkeys(p for one in measured for p in one["summary"]["of_best"]))
    headings = ["workload", "best baseline", *policies]
    rows = []
    for one in measured:
        summary = one["summary"]
        cells = []
        for policy in policies:
            found = summary["of_best"].get(policy)
            form = ranged if policy == OURS else middle
            cells.append(form(found, "{:.2f}") if found else "")
        best = summary["best_baseline"]
        rate = summary["policies"][best]["loss_tokens_per_s"]["median"]
        rows.append([one["name"], f"{best}, {rate:.0f}/s", *cells])
    return headings, rows


def middle(found: Mapping[str, float] | None, form: str) -> str:
    """The median."""
    return "" if found is None else form.format(found["median"])


def ranged(found: Mapping[str, float] | None, form: str) -> str:
    """The median, and the least and the greatest where they differ from it."""
    if found is None:
        return ""
    text, low, high = (form.format(found[name]) for name in ("median", "min", "max"))
    return text if text == low == high else f"{text} ({low} to {high})"


def rich_table(title: str, headings: Sequence[str], rows: Cells) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(headings: Sequence[str], rows: Cells) -> str:
    """For a document."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
