"""The scheduling policies by name.

Invariant: a policy is made of its name and options alone; an unknown one is an error that lists the known.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tiderl.scheduling.aimd import Aimd
from tiderl.scheduling.asynchronous import Async
from tiderl.scheduling.common import Settings
from tiderl.scheduling.ctb import Ctb
from tiderl.scheduling.decisions import Policy
from tiderl.scheduling.mixed import Mixed
from tiderl.scheduling.mlfq import Mlfq
from tiderl.scheduling.smallest_first import SmallestFirst
from tiderl.scheduling.sorted_length import SortedLength
from tiderl.scheduling.sync import Sync
from tiderl.scheduling.ttl import Ttl

_KINDS: dict[str, tuple[type[Settings], str]] = {
    "ctb": (Ctb, "continuous task batching: admit what will fit, hold what is worth it"),
    "sync": (Sync, "a step barrier: only the current update's groups run, and they keep their KV"),
    "async": (Async, "as many tasks as the run allows, sticky, paused ones in the prefix cache"),
    "aimd": (Aimd, "async below a cap that grows and is cut by engine pressure (prime-rl)"),
    "ttl": (Ttl, "KV is held over an environment's call for a time to live (Continuum)"),
    "smallest_first": (SmallestFirst, "let go the smallest paused task first (ThunderAgent)"),
    "sorted": (SortedLength, "shortest expected first (SortedRL)"),
    "mlfq": (Mlfq, "levels by expected remaining tokens (Libra)"),
    "mixed": (Mixed, "start what keeps the trainer's mix of kinds near its target (MISA-T)"),
}

POLICIES = {name: line for name, (_, line) in _KINDS.items()}  # what each policy does, in a line


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of that name.

    Raises:
        ValueError: the name or an option is unknown, or an option's value is out of range.
    """
    if name not in _KINDS:
        raise ValueError(f"there is no scheduling policy {name!r}; there are {', '.join(_KINDS)}")
    kind = _KINDS[name][0]
    known = [each.name for each in fields(kind) if each.init]
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name} has no option {option!r}; it has {', '.join(known)}")
    policy = kind(**options)
    policy.name = name
    return policy
