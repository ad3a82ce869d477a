"""What a check found: items, and the report that holds them.

Invariant: every item has a name and a detail of what was seen; an item that failed also has a `fix`
that tells the author what to change. A report is `ok` when it has items and none of them failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class CheckItem:
    """One thing that was checked.

    Args:
        name: stable identifier, for instance `global_rng`.
        state: `skip` means that the item does not apply, or that another failing item stopped it.
        detail: what was seen, with the task, seed and turn at which it was seen.
        fix: what the author should do; empty unless the item failed.
        seconds: wall-clock seconds spent on the item.
    """

    name: str
    state: State
    detail: str = ""
    fix: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """False only when the item failed."""
        return self.state != "fail"

    def to_json(self) -> dict[str, Any]:
        """The item as plain JSON values."""
        return {
            "name": self.name,
            "ok": self.ok,
            "state": self.state,
            "detail": self.detail,
            "fix": self.fix,
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CheckItem:
        """The inverse of `to_json`."""
        return cls(data["name"], data["state"], data["detail"], data["fix"], data["seconds"])


@dataclass
class CheckReport:
    """The outcome of `check_environment`.

    Args:
        env_id: the id (or the name of the class or factory) that was checked.
        items: in the order in which they were checked.
        seconds: wall-clock seconds of the whole check.
    """

    env_id: str
    items: list[CheckItem] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when at least one item passed and none failed."""
        return any(item.state == "pass" for item in self.items) and not self.failed

    @property
    def failed(self) -> list[CheckItem]:
        """The items that failed."""
        return [item for item in self.items if not item.ok]

    def __getitem__(self, name: str) -> CheckItem:
        """The item of that name; `KeyError` when it was not checked."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)

    def names(self, state: State | None = None) -> list[str]:
        """Names of all items, or of those in one state."""
        return [item.name for item in self.items if state is None or item.state == state]

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "environment": self.env_id,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "items": [item.to_json() for item in self.items],
        }

    def dumps(self) -> str:
        """`to_json` as indented text."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False)

    def lines(self) -> Iterable[str]:
        """The report as plain lines, one or two an item, a verdict last."""
        for item in self.items:
            yield f"{item.state:<4}  {item.name}: {item.detail}"
            if item.fix:
                yield f"      fix: {item.fix}"
        count = len(self.failed)
        verdict = "all checks passed" if self.ok else f"{count} of {len(self.items)} checks failed"
        yield f"{self.env_id}: {verdict} in {self.seconds:.1f} s"

    def __str__(self) -> str:
        return "\n".join(self.lines())
