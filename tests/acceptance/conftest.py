"""A tiny model, and environments on which its random replies earn unequal rewards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

ENVIRONMENT = '''
"""Three turns of free text; the reward is the share of letters."""

import os
import signal
import time

import tiderl


@tiderl.register("accept/Letters-v0")
class Letters(tiderl.AgentEnv):
    """Reply with letters, three times."""

    max_turns = 3
    max_invalid_actions = 99

    def __init__(self, crash_once: str = "", pause: float = 0.0) -> None:
        super().__init__()
        self.crash_once, self.pause = crash_once, pause

    def tasks(self, split):
        return [{"id": i} for i in range(64)]

    def start(self, task):
        self.shares = []
        return f"Task {task['id']}: write letters."

    def reply(self, text):
        time.sleep(self.pause)
        if self.crash_once and self.task["id"] % 8 == 3 and not os.path.exists(self.crash_once):
            open(self.crash_once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.shares.append(sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)))
        if len(self.shares) == 3:
            self.finish(sum(self.shares) / 3)
        return "More letters, please."

    def oracle(self):
        return "abc"


@tiderl.register("accept/Patience-v0")
class Patience(tiderl.AgentEnv):
    """Right is who goes on for four turns; one reply in four ends it, and long episodes wait longest."""

    max_turns = 6
    max_invalid_actions = 99

    def tasks(self, split):
        return [{"id": i} for i in range(64)]

    def start(self, task):
        return f"Task {task['id']}: go on."

    def reply(self, text):
        time.sleep(0.05 * self.turn + (1.5 if (self.task["id"] + self.turn) % 8 == 0 else 0))
        if self.turn == 6 or sum(text.encode()[:1]) % 4 == 0:
            self.finish(float(self.turn >= 4))
        return "Go on."

    def oracle(self):
        return "abc"
'''


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on PYTHONPATH, holds an installed distribution with the environments."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "accept_plugin.py").write_text(ENVIRONMENT)
    info = folder / "accept-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accept\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiderl.environments]\naccept = accept_plugin\n")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    from tiderl.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=3)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A float32 run of the tiny checkpoint: three turns, 16 episodes in flight."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    data = {
        "name": "tiny",
        "seed": 0,
        "model": {"path": str(tiny), "dtype": "float32", "max_length": 512, "lora": {"rank": 4, "alpha": 8}},
        "environment": {"id": "accept/Letters-v0"},
        "agent": {"format": "text", "instructions": False},
        "rollout": {
            "groups_per_update": 4,
            "group_size": 4,
            "max_turn_tokens": 16,
            "max_episode_tokens": 384,
            "deterministic": True,
        },
        "engine": {"kv_tokens": 8192, "max_sessions": 16, "threads": 1},
        "training": {"updates": 4, "learning_rate": 1e-3, "threads": 1},
        "evaluation": {"episodes": 0},
        "checkpoint": {"every": 0, "tokens": True},
    }
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="session")
def environ(plugin: Path) -> dict[str, str]:
    """Variables under which a process finds the environment."""
    path = os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}
