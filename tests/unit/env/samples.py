"""Small environments, one for each way of writing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.tools import ToolFault, tool


class Echo(AgentEnv):
    """`score` alone: say the word."""

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": n, "word": f"{split}{n}"} for n in range(4)]

    def start(self, task: Any) -> str:
        return f"Say {task['word']}."

    def score(self, text: str) -> float:
        return float(text == self.task["word"])

    def oracle(self) -> str:
        return self.task["word"]


class Talk(AgentEnv):
    """`reply` alone: a dialogue with a reward each turn (0.2, 0, 0.8)."""

    def start(self, task: Any) -> str:
        return "Count to three."

    def reply(self, text: str) -> Any:
        if text == "one":
            self.give(0.2)
        if text == "three":
            self.finish(0.8)
            return None
        return ["go on", np.full((2, 2, 3), self.turn, np.uint8)]

    def oracle(self) -> str:
        return ("one", "two", "three")[self.turn]


class Counter(AgentEnv):
    """`@tool` methods: add up to a number."""

    max_turns = 6

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{n}", "goal": n} for n in range(3, 9)]

    def start(self, task: Any) -> list[Any]:
        self.sum = 0
        self.added: list[int] = []
        self.noise = int(self.np_random.integers(1000))
        return [f"Reach {task['goal']} ({self.noise}).", np.full((3, 3, 3), self.noise % 256, np.uint8)]

    @tool
    def add(self, n: int) -> str:
        """Add a number."""
        self.added.append(n)
        self.sum += n
        if self.sum == self.task["goal"]:
            self.finish(1.0)
        elif self.sum > self.task["goal"]:
            self.finish(0.0)
        return f"now {self.sum}"

    @tool
    def refuse(self) -> str:
        """Say that the call makes no sense now."""
        raise ToolFault("not now")

    @tool
    def fail(self, kind: str = "value") -> str:
        """Raise an error."""
        raise {"value": ValueError, "net": ConnectionError, "exit": SystemExit}[kind]("broken")

    def on_truncate(self, reason: Any) -> float:
        return 0.5 if self.sum else 0.0

    def oracle(self) -> Any:
        return m.assistant(None, [m.tool_call("add", n=1)] * (self.task["goal"] - self.sum))


class Walk(AgentEnv):
    """Plain `reset` and `step`."""

    max_turns = 4

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.at = int(self.np_random.integers(2))
        return (m.user(f"You are at {self.at}."),), {}

    def step(self, action: Any) -> Any:
        self.at += 1 if action == "right" else 0
        done = self.at >= 3
        return (m.user(f"You are at {self.at}."),), float(done), done, False, {}


def call(name: str, call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    """An assistant message with one call."""
    return m.assistant(None, [m.tool_call(name, call_id, **arguments)])


def raw_call(arguments: Any, name: Any = "add", call_id: Any = "c1") -> dict[str, Any]:
    """An assistant message with one call whose fields are as given."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
