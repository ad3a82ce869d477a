"""Environments of the evaluation's tests, and a session that drives one without a worker process."""

from __future__ import annotations

import asyncio
from typing import Any

import tiderl
from tiderl.env.ends import EndReason
from tiderl.hub.base import SessionSpec


@tiderl.register("evaltest/Steps-v0")
class Steps(tiderl.AgentEnv):
    """Say `right` until the task's number is reached; each right word earns its share."""

    max_turns = 6
    splits = ("train", "test")

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Task i needs 1 + i % 3 words."""
        return [{"id": f"{split}-{i}", "need": 1 + i % 3} for i in range(12)]

    def start(self, task: dict[str, Any]) -> str:
        """The rules."""
        self.got = 0
        return f"Say right {task['need']} times."

    @tiderl.tool
    def say(self, word: str) -> str:
        """Say one word."""
        if word == "stop":
            self.finish(0.0)
            return "stopped"
        if word == "right":
            self.got += 1
            if self.got == self.task["need"]:
                self.finish(1.0 - 0.1 * (self.got - 1))
                return "done"
            self.give(0.1)
        return f"{self.got} of {self.task['need']}"

    def on_truncate(self, reason: EndReason) -> float:
        """Half a point for having begun."""
        return 0.5 if self.got else 0.0

    def oracle(self) -> dict[str, Any]:
        """Always right."""
        return tiderl.messages.assistant(None, [tiderl.messages.tool_call("say", word="right")])


class DirectSession:
    """An `EnvSession` over an environment object in this process."""

    def __init__(self, env: tiderl.AgentEnv, env_id: str = "evaltest/Steps-v0", **changes: Any) -> None:
        self.env = env
        values: dict[str, Any] = {
            "env_id": env_id,
            "tools": env.tools,
            "max_turns": env.max_turns,
            "max_total_tokens": env.max_total_tokens,
            "episode_timeout": env.episode_timeout,
            "reward_range": env.reward_range,
            "splits": env.splits,
        }
        self.spec = SessionSpec(**(values | changes))

    async def reset(
        self, seed: int | None = None, task: Any = None, split: str = "train", *, timeout: float | None = None
    ) -> Any:
        """Reset at once."""
        await asyncio.sleep(0)
        return self.env.reset(seed=seed, options={"task": task, "split": split})

    async def step(self, action: Any, *, timeout: float | None = None) -> Any:
        """Step at once."""
        await asyncio.sleep(0)
        return self.env.step(action)

    async def oracle(self) -> Any:
        """The scripted action."""
        return self.env.oracle()

    async def truncate(self, reason: EndReason) -> tuple[float, dict[str, Any]]:
        """End it from outside."""
        return self.env.truncate(reason)

    async def close(self) -> None:
        """Close it."""
        self.env.close()
