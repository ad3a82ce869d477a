"""From the cells of a benchmark to its summary. Pure functions.

Invariant: two policies are only ever compared within a round; a ratio is taken there, and then the median of
the rounds with the least and the greatest. A round in which one of the two is missing does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from tiderl.bench.result import spread

OURS = "ctb"
Row = Mapping[str, Any]

FIGURES = (
    "loss_tokens_per_s",
    "sampled_tokens_per_s",
    "goodput_tokens_per_s",
    "kv_hit_rate",
    "kv_reuse",
    "waiting_share",
    "waiting_s_per_1000_tokens",
    "trainer_waiting_share",
)


def key_of(cell: Row) -> tuple[str, int]:
    """Which cell of its workload it is."""
    return cell["policy"], cell["round"]


def summary(cells: Sequence[Row]) -> dict[str, Any]:
    """What a workload's cells come to: each policy's figures, and `ctb` against each other policy."""
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    by_policy = {p: [cell for cell in cells if cell["policy"] == p] for p in policies}
    found: dict[str, Any] = {"policies": {p: _policy(rows) for p, rows in by_policy.items()}}
    if OURS not in policies:
        return found
    others = [p for p in policies if p != OURS]
    found["against"] = {p: against(by_policy[OURS], by_policy[p]) for p in others}
    rated = {p: found["policies"][p]["loss_tokens_per_s"]["median"] for p in others}
    if rated:
        best = max(rated, key=lambda p: rated[p])
        found["best_baseline"] = best
        found["of_best"] = {
            p: ratios(by_policy[p], by_policy[best], lambda cell: cell["loss_tokens_per_s"]) for p in policies
        }
    return found


def _policy(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FIGURES:
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = spread(known) if known else None
    found["reprefilled_share"] = spread([reprefilled_share(row) for row in rows])
    ages = [row["staleness"]["mean"] for row in rows if row["staleness"]["mean"] is not None]
    found["staleness"] = median(ages) if ages else None
    found["waiting_by_cause"] = _medians(rows, lambda row: _shares(row["waiting_s"], row["seconds"]))
    found["reprefilled_by_cause"] = _medians(rows, lambda row: row["reprefilled_by_cause"])
    return found


def _shares(values: Mapping[str, float], whole: float) -> dict[str, float]:
    return {name: value / whole for name, value in values.items()}


def _medians(rows: Sequence[Row], of: Callable[[Row], Mapping[str, float]]) -> dict[str, float]:
    found = [of(row) for row in rows]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: median(one.get(name, 0.0) for one in found) for name in names}


def reprefilled_share(row: Row) -> float:
    """Tokens computed again / all prompt tokens that the engines computed."""
    prefill = row["engine_tokens"]["prefill_tokens"]
    return row["engine_tokens"]["reprefilled_tokens"] / prefill if prefill else 0.0


def ratios(ours: Sequence[Row], other: Sequence[Row], of: Callable[[Row], float | None]) -> Any:
    """`of` ours / `of` other within each round: median, least and greatest; None without a common round."""
    theirs = {row["round"]: of(row) for row in other}
    found = []
    for row in ours:
        mine, base = of(row), theirs.get(row["round"])
        if mine is not None and base:
            found.append(mine / base)
    return spread(found) if found else None


def against(ours: Sequence[Row], other: Sequence[Row]) -> dict[str, Any]:
    """Ratios of `ctb` to another policy. Waiting: below 1 is less."""
    return {
        "loss_tokens_per_s": ratios(ours, other, lambda row: row["loss_tokens_per_s"]),
        "sampled_tokens_per_s": ratios(ours, other, lambda row: row["sampled_tokens_per_s"]),
        "goodput_tokens_per_s": ratios(ours, other, lambda row: row["goodput_tokens_per_s"]),
        "kv_hit_rate": ratios(ours, other, lambda row: row["kv_hit_rate"]),
        "waiting_share": ratios(ours, other, lambda row: row["waiting_share"]),
        "waiting_s_per_1000_tokens": ratios(ours, other, lambda row: row["waiting_s_per_1000_tokens"]),
    }


def kept(report: Any, fingerprints: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The cells of an earlier report that still hold, by workload: neither it nor the policy has changed."""
    found: dict[str, list[Any]] = {}
    for workload in report.get("workloads", ()) if isinstance(report, Mapping) else ():
        name = workload.get("name")
        if fingerprints.get(name) == workload.get("fingerprint"):
            found[name] = [
                cell
                for cell in workload.get("cells", ())
                if cell["policy"] in options and cell.get("options") == options[cell["policy"]]
            ]
    return found


def rotated(policies: Sequence[str], number: int) -> list[str]:
    """The order of the policies in round `number` (from 1): each begins once in as many rounds."""
    start = (number - 1) % len(policies)
    return [*policies[start:], *policies[:start]]
