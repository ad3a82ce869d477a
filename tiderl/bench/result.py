"""From the metrics of both sides to the figures, the JSON and the table. Pure functions.

Invariant: the timed window of a side reaches from the end of its warm-up update to the end of its last
update, so it holds everything that repeats with every update and nothing of start-up or the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from tiderl.errors import TideError

if TYPE_CHECKING:
    from rich.table import Table

SIDES = {"tiderl": "TideRL", "trl": "TRL GRPOTrainer"}
SHARES = ("rollout", "training", "publishing", "waiting")
Row = Mapping[str, Any]


def figures(rows: Sequence[Row], samples_per_update: int) -> dict[str, Any]:
    """One side's figures of one round; the first row is the warm-up update.

    Seconds are wall clock. Every sample of a batch counts as trained, on both sides, also one of a group
    with equal rewards, whose gradient is zero.
    """
    if len(rows) < 2:
        raise TideError(
            f"a side ended after {len(rows)} updates", fix="run it again with TIDERL_DEBUG=1 to see its log"
        )
    first, last, timed = rows[0], rows[-1], rows[1:]
    wall = last["wall_s"] - first["wall_s"]
    seconds = {name: last["shares_s"][name] - first["shares_s"][name] for name in SHARES}
    seconds["waiting"] = max(0.0, wall - sum(seconds[name] for name in SHARES if name != "waiting"))
    samples = samples_per_update * len(timed)
    return {
        "updates": len(timed),
        "samples": samples,
        "wall_s": wall,
        "samples_per_s": samples / wall,
        "seconds": seconds,
        "share_of_time": {name: seconds[name] / wall for name in SHARES},
        "cpu_s_per_sample": _cpu(first, last, samples),
        "generated_tokens": sum(row["generated_tokens"] for row in timed),
        "reward": sum(row["reward"] for row in timed) / len(timed),
        "success": sum(row["success"] or 0.0 for row in timed) / len(timed),
        "updates_without_step": sum(bool(row.get("skipped", False)) for row in timed),
        "zero_variance_groups": sum(row.get("zero_variance_groups", 0) for row in timed),
    }


def _cpu(first: Row, last: Row, samples: int) -> float | None:
    """CPU seconds a sample: less disturbed by other work on the machine than the wall clock.

    None where it was not seen, or where both ends of a very short window fell into one look at it.
    """
    before, after = first.get("cpu_s"), last.get("cpu_s")
    if before is None or after is None or after <= before:
        return None
    return (after - before) / samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rounds come to: the ratio is taken within each round, then its median."""
    return {
        "ratio": spread([one["ratio"] for one in rounds]),
        "samples_per_s": {side: spread([one[side]["samples_per_s"] for one in rounds]) for side in SIDES},
        "share_of_time": {
            side: {name: median(one[side]["share_of_time"][name] for one in rounds) for name in SHARES}
            for side in SIDES
        },
        "cpu_s_per_sample": {
            side: _median_known(one[side]["cpu_s_per_sample"] for one in rounds) for side in SIDES
        },
    }


def _median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The report as a person reads it."""
    from rich.table import Table

    rates = Table(title="trained samples per second", title_justify="left")
    for heading in ("round", "first", *SIDES.values(), "ratio"):
        rates.add_column(heading, justify="left" if heading == "first" else "right")
    for one in report["rounds"]:
        each = [f"{one[side]['samples_per_s']:.2f}" for side in SIDES]
        rates.add_row(str(one["round"]), SIDES[one["order"][0]], *each, f"{one['ratio']:.2f}")
    middle = [f"{report['samples_per_s'][side]['median']:.2f}" for side in SIDES]
    ratio = report["ratio"]
    rates.add_section()
    rates.add_row("median", "", *middle, f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")

    shares = Table(title="share of time, and CPU seconds of all processes", title_justify="left")
    shares.add_column("side")
    for name in SHARES:
        shares.add_column(name, justify="right")
    shares.add_column("CPU-s a sample", justify="right")
    for side, title in SIDES.items():
        cpu = report["cpu_s_per_sample"][side]
        each = [f"{report['share_of_time'][side][name]:.1%}" for name in SHARES]
        shares.add_row(title, *each, "unknown" if cpu is None else f"{cpu:.2f}")
    return [rates, shares]


def notes(report: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    skipped = sum(one["tiderl"]["updates_without_step"] for one in report["rounds"])
    if not skipped:
        return []
    return [
        f"{skipped} of TideRL's timed updates made no optimizer step, because every group had equal rewards: "
        "the ratio flatters TideRL; use a model or tasks with mixed rewards"
    ]
