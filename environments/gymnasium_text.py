"""`gymnasium/<Name>`: text-rendering Gymnasium environments, played through one tool.

Invariant: the observation is the environment's own rendering as plain text (colour codes become
brackets), the action is a word for one of its discrete actions, and the episode's reward stays within
`reward_range` by clipping.

A task fixes what the episode starts from (a map, a state, a deal); a hash of it decides its split. What
chance does later (slippery ice) follows from the seed given to `reset`.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

import tiderl
from tiderl.env import messages as m
from tiderl.env.ends import EndReason
from tiderl.env.schemas import choice
from tiderl.env.tasks import LazyTasks
from tiderl.env.tools import Tool
from tiderl.errors import EnvironmentFault, UnknownEnvironment, nearest

from .draws import ONE_IN, Draws, draw_in_split
from .planning import Planner

SIZES = {"train": 512, "test": 128}
LONGEST_WALK = 24
_MARKED = re.compile(r"\x1b\[4\d[;\d]*m(.)\x1b\[0m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*m")


def plain_text(rendering: str) -> str:
    """A terminal rendering without colour codes; a character on a coloured ground gets brackets."""
    return _CODES.sub("", _MARKED.sub(r"[\1]", rendering)).strip("\n")


class TextGym(tiderl.AgentEnv):
    """A Gymnasium environment with discrete actions, as text.

    The base class works for any of them: it shows the `ansi` rendering, or else the observation, and
    sums the environment's own rewards. The classes below add rules, names of actions and oracles.

    Args:
        name: the Gymnasium id.
        options: arguments of `gymnasium.make`.
        reward_range: the declared range; the episode's sum is clipped to it.
        reward_scale: multiplies the environment's own rewards first. Where neither is given, rewards are
            scaled so that the sum at which Gymnasium calls the environment solved is 1.
        limits: see `AgentEnv`.

    Raises:
        UnknownEnvironment: Gymnasium has no such id (or only another version).
        EnvironmentFault: its actions are not discrete, or its scale of rewards is not known.
    """

    max_turns = 50
    splits = tuple(SIZES)
    on_no_tool: Literal["finish", "nudge", "error"] = "nudge"
    action_names: tuple[str, ...] = ()
    rules = "Play the game: choose an action each turn."

    def __init__(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        reward_range: tuple[float, float] | None = None,
        reward_scale: float = 1.0,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        if reward_range is not None:
            self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        self.name, self.options, self.reward_scale = name, dict(options or {}), reward_scale
        self.inner = self._make_inner({})
        space = self.inner.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise EnvironmentFault(
                f"the actions of {name} are {space}, not discrete",
                fix="write an AgentEnv of your own around it",
            )
        if reward_range is None and reward_scale == 1.0 and type(self) is TextGym:
            self.reward_scale = 1.0 / self._solved_at()
        self.first_action = int(space.start)
        self.actions: list[Any] = list(self.action_names) or list(
            range(self.first_action, self.first_action + int(space.n))
        )
        self.description = f"{name} of Gymnasium as text. {self.rules}"
        self._tools = {"act": self._act_tool()}  # type: ignore[misc]
        self.planner = Planner(self.worth)
        self._sum = 0.0
        self._last: Any = None

    def _make_inner(self, more: dict[str, Any]) -> Any:
        """The Gymnasium environment itself, without wrappers."""
        try:
            known = gymnasium.spec(self.name)
            modes = _render_modes(known)
            if "ansi" in modes:
                more = {"render_mode": "ansi", **more}
            return gymnasium.make(self.name, disable_env_checker=True, **{**self.options, **more}).unwrapped
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            near = nearest(self.name, gymnasium.registry)
            raise UnknownEnvironment(
                f"Gymnasium has no environment {self.name!r}",
                fix="did you mean " + " or ".join(f"gymnasium/{one}" for one in near) + "?"
                if near
                else "see gymnasium.pprint_registry()",
            ) from error
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise EnvironmentFault(f"{self.name} cannot be made: {error}", fix="check its options") from error

    def _solved_at(self) -> float:
        """The reward at which Gymnasium calls the environment solved: our 1.0 where no range is given."""
        threshold = gymnasium.spec(self.name).reward_threshold
        if not threshold or threshold <= 0:
            raise EnvironmentFault(
                f"how much reward {self.name} gives at best is not known",
                fix="give reward_range=[lowest, highest] of an episode's sum",
            )
        return float(threshold)

    def _act_tool(self) -> Tool:
        def act(self: Any, action: Any) -> Any: ...

        kinds = {"action": choice(self.actions, lambda value: value)}
        return Tool("act", "act", "Take one action.", act, {}, {"action": "the action to take"}, kinds)

    # -- tasks ---------------------------------------------------------------------------------------

    def tasks(self, split: str) -> Sequence[Any]:
        return LazyTasks(range(SIZES[split]), lambda number: self._task(split, number))

    def _task(self, split: str, number: int) -> dict[str, Any]:
        return {"id": number, **draw_in_split(f"{self.name}/{number}", split, self.draw_task)}

    def draw_task(self, draws: Draws) -> tuple[str, dict[str, Any]]:
        """What decides the split, and the task: here, the seed of the environment's reset."""
        seed = draws.below(2**31)
        return str(seed), {"seed": seed}

    def begin(self, task: Any) -> Any:
        """Bring `self.inner` to the task's start and give its first observation."""
        return self.inner.reset(seed=task["seed"])[0]

    def start(self, task: Any) -> list[Any]:
        self._sum, self._last = 0.0, self.begin(task)
        return [m.system(self.system or self.rules), m.user(self.view(self._last))]

    # -- turns ---------------------------------------------------------------------------------------

    def view(self, observation: Any) -> str:
        """An observation as text."""
        if getattr(self.inner, "render_mode", None) == "ansi":
            return plain_text(str(self.inner.render()))
        return _shown(observation)

    def worth(self, reward: float, terminated: bool) -> float:
        """One of the environment's rewards on our scale."""
        return reward * self.reward_scale

    def act(self, action: Any) -> str:
        """The tool: one action of the environment."""
        index = self.actions.index(action) + self.first_action
        self._last, reward, terminated, truncated, _ = self.inner.step(index)
        low, high = self.reward_range
        total = min(high, max(low, self._sum + self.worth(float(reward), bool(terminated))))
        gain, self._sum = total - self._sum, total
        if terminated:
            self.finish(gain)
        elif truncated:
            self.finish(gain, EndReason.FAILURE)
        else:
            self.give(gain)
        return self.view(self._last)

    def call(self, index: int) -> m.Message:
        """The assistant message that takes the action with that index (from 0)."""
        return m.assistant(None, [m.tool_call("act", action=self.actions[index])])

    def close(self) -> None:
        self.inner.close()


class FrozenLake(TextGym):
    """FrozenLake on random maps (4x4 or 8x8), one per task; reward 1 at the goal.

    Not slippery unless `options={"is_slippery": true}`; a map given in the options ("desc" or
    "map_name") is used for all tasks.
    """

    max_turns = 30
    action_names = ("left", "down", "right", "up")
    rules = (
        "Cross the frozen lake from S to G. F is ice, H is a hole: do not fall in. "
        "You are at the place in brackets. Move by calling act with left, down, right or up."
    )

    def __init__(self, name: str, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        options = {"is_slippery": False, **(options or {})}
        self.fixed = "desc" in options or "map_name" in options
        super().__init__(name, options, **kwargs)
        self.oracle_maximum = not self.options["is_slippery"]
        self.side = 8 if "8x8" in name else 4

    def draw_task(self, draws: Draws) -> tuple[str, dict[str, Any]]:
        if self.fixed:
            seed = draws.below(2**31)
            return str(seed), {}
        while True:
            cells = ["H" if draws.below(5) == 0 else "F" for _ in range(self.side**2)]
            cells[0], cells[-1] = "S", "G"
            rows = ["".join(cells[at : at + self.side]) for at in range(0, len(cells), self.side)]
            if _distance(rows) <= LONGEST_WALK:
                return "/".join(rows), {"map": rows}

    def begin(self, task: Any) -> Any:
        if "map" in task:
            self.inner.close()
            self.inner = self._make_inner({"desc": task["map"]})
        return self.inner.reset(seed=int(self.np_random.integers(2**31)))[0]

    def oracle(self) -> m.Message:
        return self.call(self.planner.best(self.inner.P, int(self.inner.s)))


class _Placed(TextGym, ABC):
    """Environments whose tasks are start states of their transition table.

    One in eight states is held out for "test": those that come first by hash.
    """

    @abstractmethod
    def starts(self) -> list[int]:
        """The states in which an episode may begin."""

    def tasks(self, split: str) -> Sequence[Any]:
        states = sorted(self.starts(), key=lambda state: Draws(f"{self.name}/{state}").below(2**63))
        held_out = max(1, len(states) // ONE_IN)
        mine = sorted(states[:held_out] if split == "test" else states[held_out:])
        return [{"id": state, "state": state} for state in mine]

    def begin(self, task: Any) -> Any:
        self.inner.reset(seed=int(self.np_random.integers(2**31)))
        self.inner.s = task["state"]
        return self.inner.s

    def worth(self, reward: float, terminated: bool) -> float:
        return 1.0 if terminated else 0.0

    def oracle(self) -> m.Message:
        return self.call(self.planner.best(self.inner.P, int(self.inner.s)))


class Taxi(_Placed):
    """Taxi: fetch a passenger and drop them at their destination; reward 1 for that, else 0.

    The environment's own penalties for steps and wrong pick-ups are not counted. A task is one of its
    start states.
    """

    max_turns = 40
    action_names = ("south", "north", "east", "west", "pickup", "dropoff")
    rules = (
        "You drive a taxi on a map with the stops R, G, Y and B. The taxi is in brackets, walls are |. "
        "Fetch the passenger and drop them off at the destination. "
        "Call act with south, north, east, west, pickup or dropoff."
    )

    def __init__(self, name: str, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(name, options, **kwargs)
        self.oracle_maximum = not (self.options.get("is_rainy") or self.options.get("fickle_passenger"))

    def starts(self) -> list[int]:
        return [int(state) for state in np.flatnonzero(self.inner.initial_state_distrib)]

    def view(self, observation: Any) -> str:
        _, _, passenger, destination = self.inner.decode(int(self.inner.s))
        where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
        drawing = super().view(observation).split("\n  (")[0]
        return f"{drawing}\nThe passenger is {where} and wants to go to {'RGYB'[destination]}."


class CliffWalking(_Placed):
    """CliffWalking from any safe cell; reward 1 at the target, else 0.

    A task is the cell to start from. A fall brings the walker to Gymnasium's own start, as always; the
    penalty of a fall is not counted.
    """

    max_turns = 30
    action_names = ("up", "right", "down", "left")
    rules = (
        "You are x on a grid. Reach T. C is a cliff: a fall takes you back to the corner at the bottom left. "
        "Move by calling act with up, right, down or left."
    )

    def __init__(self, name: str, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(name, options, **kwargs)
        self.oracle_maximum = not self.inner.is_slippery

    def starts(self) -> list[int]:
        return list(range(37))  # all cells but the cliff (37..46) and the target (47)


class Blackjack(TextGym):
    """Blackjack: one hand against the dealer; reward 1 for a win, -1 for a loss, 0 for a draw.

    The oracle plays basic strategy, which loses often: `oracle_maximum` is False.
    """

    max_turns = 12
    reward_range = (-1.0, 1.0)
    oracle_maximum = False
    action_names = ("stick", "hit")
    rules = (
        "You play Blackjack: get closer to 21 than the dealer without going over. "
        "Call act with hit to take a card or stick to stop."
    )

    def view(self, observation: Any) -> str:
        mine, dealer, ace = (int(value) for value in observation)
        usable = " with a usable ace" if ace else ""
        return f"Your cards sum to {mine}{usable}. The dealer shows {dealer}."

    def oracle(self) -> m.Message:
        mine, dealer, ace = (int(value) for value in self._last)
        if ace:
            hit = mine < 18 or (mine == 18 and dealer in (9, 10, 1))
        elif mine == 12:
            hit = dealer not in (4, 5, 6)
        else:
            hit = mine < 12 or (mine < 17 and dealer in (7, 8, 9, 10, 1))
        return self.call(int(hit))


KNOWN: dict[str, type[TextGym]] = {
    "FrozenLake": FrozenLake,
    "FrozenLake8x8": FrozenLake,
    "Taxi": Taxi,
    "CliffWalking": CliffWalking,
    "CliffWalkingSlippery": CliffWalking,
    "Blackjack": Blackjack,
}


def make_text_gym(name: str, **kwargs: Any) -> TextGym:
    """The environment `gymnasium/<name>`."""
    return KNOWN.get(name.rpartition("-v")[0], TextGym)(name, **kwargs)


def _render_modes(known: Any) -> Sequence[str]:
    creator = known.entry_point
    creator = load_env_creator(creator) if isinstance(creator, str) else creator
    return getattr(creator, "metadata", {}).get("render_modes", ())


def _distance(rows: list[str]) -> float:
    """Steps from the start to the goal over ice; infinite where there is no way."""
    front, seen, steps = {(0, 0)}, {(0, 0)}, 0
    goal = (len(rows) - 1, len(rows[0]) - 1)
    while front:
        if goal in front:
            return steps
        around = {(r + dr, c + dc) for r, c in front for dr, dc in ((1, 0), (-1, 0), (0, 1), (0, -1))}
        front = {
            (r, c) for r, c in around - seen if 0 <= r <= goal[0] and 0 <= c <= goal[1] and rows[r][c] != "H"
        }
        seen |= front
        steps += 1
    return math.inf


def _shown(observation: Any) -> str:
    """An observation as short text: JSON where that is possible."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, precision=4, separator=", ", threshold=500)
    if isinstance(observation, np.generic):
        return str(observation.item())
    if isinstance(observation, (tuple, list)):
        return "(" + ", ".join(_shown(one) for one in observation) + ")"
    if isinstance(observation, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_shown(one)}" for key, one in observation.items()) + "}"
    return str(observation)
