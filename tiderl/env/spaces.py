"""Gymnasium spaces of messages and replies.

Invariant: `sample()` is contained, `from_jsonable(to_jsonable(x))` equals `x` (images bit by bit), and
after `seed(s)` the samples are the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from tiderl.env import messages as m
from tiderl.env.tools import sample_call

_WORDS = ("yes", "no", "stop", "go on", "left", "right", "1", "7", "42", "I do not know.")


class _Flatless(Space[Any]):
    """What both spaces share: they cannot be flattened to a Box."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def _no_masks(self, mask: Any, probability: Any) -> None:
        if mask is not None or probability is not None:
            raise ValueError(f"{type(self).__name__}.sample takes no mask and no probability")


class MessageSpace(_Flatless):
    """Observations: a tuple of new messages (see `tiderl.messages`); empty when nothing was said."""

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[m.Message, ...]:
        self._no_masks(mask, probability)
        rng = self.np_random
        out = []
        for _ in range(int(rng.integers(1, 4))):
            parts: list[Any] = [_WORDS[int(rng.integers(len(_WORDS)))]]
            if rng.random() < 0.3:
                parts.append(rng.integers(0, 256, (4, 5, 3)).astype("uint8"))
            out.append(m.user(*parts))
        return tuple(out)

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(m.message_problem(one) is None for one in x)

    def to_jsonable(self, sample_n: Any) -> list[Any]:
        return [m.to_openai(one) for one in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        return [tuple(m.from_openai(one)) for one in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace)

    def __hash__(self) -> int:
        return hash(MessageSpace)

    def __repr__(self) -> str:
        return "MessageSpace()"


class ReplySpace(_Flatless):
    """Actions: a string, or an assistant message.

    Args:
        tools: OpenAI tool schemas; samples are then calls of these, most of the time.
        seed: seed of `sample`.
    """

    def __init__(self, tools: Sequence[dict[str, Any]] = (), seed: int | None = None) -> None:
        self.tools = json.loads(json.dumps(list(tools)))
        super().__init__(seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str | m.Message:
        self._no_masks(mask, probability)
        rng = self.np_random
        if self.tools and rng.random() < 0.9:
            return m.assistant(None, [sample_call(self.tools, rng, f"call_{int(rng.integers(10**9))}")])
        return _WORDS[int(rng.integers(len(_WORDS)))]

    def contains(self, x: Any) -> bool:
        if isinstance(x, str):
            return True
        return isinstance(x, dict) and x.get("role") == "assistant" and m.message_problem(x) is None

    def to_jsonable(self, sample_n: Any) -> list[Any]:
        return [one if isinstance(one, str) else m.to_openai([one])[0] for one in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        return [one if isinstance(one, str) else m.from_openai([one])[0] for one in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplySpace) and self.tools == other.tools

    def __hash__(self) -> int:
        return hash(json.dumps(self.tools, sort_keys=True))

    def __repr__(self) -> str:
        names = ", ".join(tool["function"]["name"] for tool in self.tools)
        return f"ReplySpace(tools=[{names}])"
