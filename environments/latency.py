"""How long something takes: distributions of seconds, drawn from a hash.

Invariant: the same spec and the same draws give the same seconds on every machine, and never more than the
spec's `longest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from tiderl.errors import EnvironmentFault

from .draws import Draws

KINDS: dict[str, tuple[str, ...]] = {
    "constant": ("seconds",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma"),
    "pareto": ("least", "alpha"),
    "mixture": ("share", "short", "long"),
}
"""Kind -> what it needs; all but `constant` and `uniform` take `longest`, a cut in seconds, too."""

LONGEST = 60.0
_FINE = 1 << 53


def check(spec: Any) -> None:
    """Raises EnvironmentFault for a spec from which no seconds can be drawn."""
    if not isinstance(spec, Mapping) or spec.get("kind") not in KINDS:
        raise _fault(f"the latency {spec!r} has no known kind", f"set kind to one of {', '.join(KINDS)}")
    kind = spec["kind"]
    known = {"kind", *KINDS[kind], *(() if kind in ("constant", "uniform") else ("longest",))}
    if wrong := sorted(set(spec) - known):
        raise _fault(
            f"a latency of kind {kind} takes no {', '.join(wrong)}", f"give {', '.join(KINDS[kind])}"
        )
    if missing := [name for name in KINDS[kind] if name not in spec]:
        raise _fault(f"the latency of kind {kind} has no {', '.join(missing)}", "add it")
    for name in known - {"kind", "short", "long"}:
        value = spec.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise _fault(f"{name} of a latency of kind {kind} is {value!r}", "give a number, 0 or more")
    if kind == "uniform" and spec["low"] > spec["high"]:
        raise _fault(f"a latency's low {spec['low']} is above its high {spec['high']}", "exchange them")
    if kind == "pareto" and spec["alpha"] <= 0:
        raise _fault(
            "alpha of a latency of kind pareto is 0", "give a number above 0; 1 to 2 is a heavy tail"
        )
    if kind == "mixture":
        if spec["share"] > 1:
            raise _fault(f"share of a latency of kind mixture is {spec['share']}", "give 0 to 1")
        check(spec["short"])
        check(spec["long"])


def draw(spec: Mapping[str, Any], draws: Draws) -> float:
    """Seconds. `spec` has passed `check`."""
    kind = spec["kind"]
    longest = float(spec.get("longest", LONGEST))
    if kind == "constant":
        return float(spec["seconds"])
    u = (draws.below(_FINE) + 0.5) / _FINE
    if kind == "uniform":
        return float(spec["low"] + u * (spec["high"] - spec["low"]))
    if kind == "lognormal":
        return min(longest, float(spec["median"] * 2.718281828459045 ** (spec["sigma"] * _NORMAL.inv_cdf(u))))
    if kind == "pareto":
        return min(longest, float(spec["least"] * u ** (-1.0 / spec["alpha"])))
    return min(longest, draw(spec["long" if u < spec["share"] else "short"], draws))


def longest(spec: Mapping[str, Any]) -> float:
    """The most seconds a draw can give. `spec` has passed `check`."""
    kind = spec["kind"]
    if kind == "constant":
        return float(spec["seconds"])
    if kind == "uniform":
        return float(spec["high"])
    cut = float(spec.get("longest", LONGEST))
    return min(cut, max(longest(spec["short"]), longest(spec["long"]))) if kind == "mixture" else cut


_NORMAL = NormalDist()


def _fault(what: str, fix: str) -> EnvironmentFault:
    return EnvironmentFault(what, where="latency", fix=fix)
