"""Environments of the hub's tests: each shows one kind of fault or effort.

They are registered when this file is imported; workers find it by its path.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

import tiderl
from tiderl.env import messages as m


@tiderl.register("case/Echo-v0")
class Echo(tiderl.AgentEnv):
    """Answers what it is told; `end` ends it."""

    max_turns = 10**6

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{i}"} for i in range(5)]

    def start(self, task: Any) -> str:
        return f"hello {task['id']} {int(self.np_random.integers(1 << 30))}"

    def reply(self, text: str) -> str:
        if text == "end":
            self.finish(1.0)
        return text

    def oracle(self) -> str:
        return "end"

    def on_truncate(self, reason: Any) -> float:
        return 0.25


@tiderl.register("case/Keep-v0")
class Keep(tiderl.AgentEnv):
    """A store with one key."""

    max_turns = 1000

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.stored = ""

    def reply(self, text: str) -> str:
        verb, _, value = text.partition(" ")
        if verb == "write":
            self.stored = value
        return f"{self.stored} {id(self)} {threading.get_ident()}"


@tiderl.register("case/Act-v0")
class Act(tiderl.AgentEnv):
    """Does what the reply says: sleep, hold the interpreter's lock, die, raise, spawn."""

    max_turns = 1000
    step_timeout = 20.0

    def start(self, task: Any) -> str:
        return "ready"

    def reply(self, text: str) -> str:
        verb, _, value = text.partition(" ")
        if verb == "sleep":
            time.sleep(float(value))
        elif verb == "lock":  # PyDLL does not let go of the interpreter's lock
            ctypes.PyDLL(None).usleep(int(float(value) * 1e6))
        elif verb == "die":
            print("last words", flush=True)
            os._exit(int(value))
        elif verb == "refuse":
            raise ConnectionError("the site is down")
        elif verb == "fault":
            raise ValueError("a bug of the author")
        elif verb == "spawn":
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
            )
            return str(child.pid)
        elif verb == "prefix":
            return sys.prefix
        elif verb == "getenv":
            return str(os.environ.get(value))
        return str(os.getpid())


@tiderl.register("case/SlowStart-v0")
class SlowStart(tiderl.AgentEnv):
    """Cannot be reset in time, or at all."""

    def __init__(self, *, seconds: float = 0.0, fail: bool = False, **limits: Any) -> None:
        super().__init__(**limits)
        self.seconds, self.fail = seconds, fail

    def start(self, task: Any) -> str:
        time.sleep(self.seconds)
        if self.fail:
            raise RuntimeError("no backend")
        return "ready"

    def reply(self, text: str) -> str:
        return text


@tiderl.register("case/Picture-v0")
class Picture(tiderl.AgentEnv):
    """Shows a random picture of the asked size."""

    max_turns = 10**6
    modality = "image"

    def __init__(self, *, width: int = 64, height: int = 48, **limits: Any) -> None:
        super().__init__(**limits)
        self.size = (height, width, 3)

    def start(self, task: Any) -> Any:
        return m.user("look", self.np_random.integers(0, 256, self.size, dtype=np.uint8))["content"]

    def reply(self, text: str) -> Any:
        return m.user("again", self.np_random.integers(0, 256, self.size, dtype=np.uint8))["content"]


@tiderl.register("case/BadClose-v0")
class BadClose(tiderl.AgentEnv):
    """Its teardown raises."""

    def start(self, task: Any) -> str:
        return "ready"

    def reply(self, text: str) -> str:
        return text

    def close(self) -> None:
        raise RuntimeError("teardown failed")
