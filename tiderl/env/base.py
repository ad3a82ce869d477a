"""`AgentEnv`: an environment whose observations are messages and whose actions are replies.

Invariant: whatever a model replies, `step` answers with an observation (every tool call exactly once,
in order); whatever an author's code does wrong, `step` raises, and never turns it into a reward.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal

import gymnasium

from tiderl.env import messages as m
from tiderl.env import plain
from tiderl.env.ends import EndReason
from tiderl.env.limits import NAMES, Limits, cut_observation, limits_of
from tiderl.env.spaces import MessageSpace, ReplySpace
from tiderl.env.tasks import TaskLists
from tiderl.env.tools import Tool, ToolFault, collect
from tiderl.env.turn import respond
from tiderl.errors import EnvironmentFault, InfrastructureError, TideError

TOLERANCE = 1e-9
Observation = tuple[m.Message, ...]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class AgentEnv(gymnasium.Env[Observation, Any]):
    """Base class of all environments; write `start` and one of these:

    * `score(text) -> float`: one reply, scored; the episode ends.
    * `reply(text) -> str | image | parts | None`: a dialogue; call `finish` to end it.
    * methods decorated with `@tiderl.tool`: the model calls them; call `finish` to end.
    * `reset` and `step` of your own, as in plain Gymnasium.

    `give(r)` adds to the reward of this turn, `finish(r)` adds and ends. The reward of an episode is
    the sum over its turns; it must stay within `reward_range`, whose upper end means success.

    Keyword arguments of the constructor set the limits below for one instance.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    max_turns: int = 16
    max_total_tokens: int | None = None
    step_timeout: float = 30.0
    reset_timeout: float = 60.0
    episode_timeout: float = 600.0
    max_observation_chars: int = 20_000
    max_images: int = 64
    max_invalid_actions: int = 3
    on_no_tool: Literal["finish", "nudge", "error"] = "nudge"
    reward_range: tuple[float, float] = (0.0, 1.0)
    system: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    modality: str = "text"
    """"image" where observations hold pictures."""
    oracle_maximum: bool = True
    """Whether `oracle` always reaches the maximal reward; False where chance can prevent it."""

    task: Any = None
    turn: int = 0
    split: str = "train"

    _tools: ClassVar[dict[str, Tool]] = {}
    _end: EndReason | None = None
    _started = False
    _return = 0.0
    _gained = 0.0
    _invalid_row = 0
    _images_left = 0
    _acting = False
    _counted = False
    _depth = 0

    def __init__(self, **limits: Any) -> None:
        known = (*NAMES, "on_no_tool", "system")
        for name, value in limits.items():
            if name not in known:
                raise EnvironmentFault(
                    f"{type(self).__name__} takes no argument {name!r}",
                    fix="give one of " + ", ".join(known) + ", or add it to __init__",
                )
            setattr(self, name, value)
        limits_of(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = collect(cls)
        plain.guard(cls)

    # -- what an author writes ---------------------------------------------------------------------

    def tasks(self, split: str) -> Sequence[Any]:
        """The tasks of a split, each a dict with an "id" (an int or str) that is unique in the split.

        Leave it out where the seed alone makes the episode: `start` and `reset` then draw from
        `self.np_random`.
        """
        return [{"id": 0}]

    def start(self, task: Any) -> Any:
        """What the episode opens with: text, an image, parts, or a list of messages.

        A list of messages may hold a system message and demonstrations (assistant messages with
        structured tool calls, each answered by a tool message). Default: the task's "prompt".
        """
        return task.get("prompt", "") if isinstance(task, dict) else ""

    def score(self, text: str) -> Any:
        """The reward of a single reply, or (reward, feedback)."""
        raise self._missing("score", "the reward of a reply")

    def reply(self, text: str) -> Any:
        """The answer to one reply of a dialogue."""
        raise self._missing("reply", "the answer to a reply")

    def oracle(self) -> Any:
        """The next action of a scripted policy that gets the maximal reward: text or a message."""
        raise self._missing("oracle", "the next right action")

    def on_truncate(self, reason: EndReason) -> float:
        """Reward to add when a limit cuts the episode short (partial credit); default 0."""
        return 0.0

    # -- what an author calls ----------------------------------------------------------------------

    def give(self, reward: float) -> None:
        """Add `reward` to this turn without ending the episode."""
        if not self._acting:
            raise EnvironmentFault(
                "a reward was given outside of a turn", fix="call it within a tool or reply"
            )
        self._gained += self._number(reward)

    def finish(self, reward: float, reason: EndReason | None = None) -> None:
        """Add `reward` to this turn and end the episode after it.

        `reason` defaults to SUCCESS when the episode's reward is the maximum, else FAILURE.
        """
        if self._end is not None:
            raise EnvironmentFault(
                "finish() was called twice in one episode", fix="call it once, then return"
            )
        self.give(reward)
        self._end = EndReason(reason) if reason else self._verdict()

    # -- what a driver calls -----------------------------------------------------------------------

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as a new list of OpenAI schemas."""
        return [made.schema for made in self._tools.values()]

    @property
    def limits(self) -> Limits:
        """The limits of this instance."""
        return limits_of(self)

    @property
    def end(self) -> EndReason | None:
        """Why the episode ended; None while it runs."""
        return self._end

    @property
    def has_oracle(self) -> bool:
        """Whether this class brings an oracle of its own."""
        return self.overrides("oracle")

    @property
    def has_tasks(self) -> bool:
        """Whether there is a list of tasks; without one every seed is an episode of its own."""
        return self.overrides("tasks") or "tasks" in vars(self)

    @classmethod
    def _missing(cls, method: str, what: str) -> EnvironmentFault:
        arguments = "self" if method == "oracle" else "self, text"
        return EnvironmentFault(f"{cls.__name__} has no {method}", fix=f"write {method}({arguments}), {what}")

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Whether this class brings a method of its own instead of the one here."""
        return getattr(cls, method) is not getattr(AgentEnv, method)

    @cached_property
    def observation_space(self) -> Any:  # type: ignore[override]
        """Tuples of new messages."""
        return MessageSpace()

    @cached_property
    def action_space(self) -> Any:  # type: ignore[override]
        """Strings and assistant messages."""
        return ReplySpace(self.tools)

    @cached_property
    def timings(self) -> dict[str, float]:
        """Seconds of the latest `reset` and `step`; beside `info`, which must be deterministic."""
        return {}

    @cached_property
    def task_lists(self) -> TaskLists:
        """The tasks by split and id."""
        return TaskLists(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seeds `self.np_random`; the task does not depend on it when it is named.
            options: {"task": id, "split": name}; without a task one is drawn from `self.np_random`.

        Returns:
            The opening messages, and {"task": id, "turn": 0}.

        Raises:
            EnvironmentFault: unknown option, split or task, or the author's code failed.
        """
        began = time.perf_counter()
        super().reset(seed=seed)
        self._begin()
        wanted = dict(options or {})
        for key in wanted:
            if key not in ("task", "split"):
                raise EnvironmentFault(
                    f"reset has no option {key!r}", where=type(self).__name__, fix="use 'task' and 'split'"
                )
        self.split = wanted.get("split", self.splits[0])
        if wanted.get("task") is None:
            found = self.task_lists.draw(self.split, self.np_random)
        else:
            found = self.task_lists.find(self.split, wanted["task"])
        self.task = copy.deepcopy(found)
        with self._author("start"):
            opening = self._opening(self.start(self.task))
        observation = self._cut(opening)
        self._started = True
        self.timings["reset"] = time.perf_counter() - began
        return observation, self._info()

    def step(self, action: Any) -> Step:
        """Take one reply: text, or an assistant message with tool calls.

        Returns:
            New messages, the reward of this turn, terminated, truncated, and info: "task", "turn",
            "invalid_action" when the reply was malformed, "end" and "success" at the end.

        Raises:
            EnvironmentFault: the author's code failed; the episode cannot go on.
            InfrastructureError: something around the task failed.
        """
        began = time.perf_counter()
        self._check_running()
        if not self._counted:
            self.turn += 1
        self._gained, self._acting = 0.0, True
        try:
            answer = respond(self, action)
            self._invalid_row = self._invalid_row + 1 if answer.faults and not answer.executed else 0
            if self._end is None:
                self._apply_limits()
        finally:
            self._acting = False
        reward = self._gained
        self._return += reward
        info = self._info()
        if answer.faults:
            info["invalid_action"] = "; ".join(answer.faults)
        self.timings["step"] = time.perf_counter() - began
        ended = self._end
        return (
            self._cut(answer.messages),
            reward,
            ended is not None and ended.terminal,
            ended is not None and not ended.terminal,
            info,
        )

    def truncate(self, reason: EndReason) -> tuple[float, dict[str, Any]]:
        """End a running episode from outside (time, tokens, context length).

        Returns:
            The partial credit that `on_truncate` gives, and the final info.
        """
        self._check_running()
        self._gained, self._acting = 0.0, True
        try:
            self._cut_short(EndReason(reason))
        finally:
            self._acting = False
        self._return += self._gained
        return self._gained, self._info()

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget the episode before."""
        self.turn, self._end, self._return, self._gained = 0, None, 0.0, 0.0
        self._invalid_row, self._images_left = 0, self.max_images
        self._started = self._acting = False

    def _check_running(self) -> None:
        if not self._started or self._end is not None:
            state = "before reset()" if not self._started else f"after the episode had ended ({self._end})"
            raise EnvironmentFault(f"step() was called {state}", fix="call reset() first")

    def _info(self) -> dict[str, Any]:
        identity = self.task.get("id") if isinstance(self.task, dict) else self.task
        info: dict[str, Any] = {"task": identity, "turn": self.turn}
        if self._end is not None:
            info |= {"end": self._end.value, "success": self._end is EndReason.SUCCESS}
        return info

    def _verdict(self) -> EndReason:
        total = self._return + self._gained
        return EndReason.SUCCESS if total >= self.reward_range[1] - TOLERANCE else EndReason.FAILURE

    def _number(self, reward: Any) -> float:
        """A reward as a finite float."""
        try:
            number = float(reward)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"a reward is {reward!r}, not a number", where=type(self).__name__, fix="give a finite number"
            ) from error
        if not math.isfinite(number):
            raise EnvironmentFault(
                f"a reward is {number}", where=type(self).__name__, fix="give a finite number"
            )
        return number

    @contextmanager
    def _author(self, what: str, *, faults: bool = False) -> Iterator[None]:
        """Run an author's code; a failure ends the episode as an infrastructure failure.

        With `faults`, a `ToolFault` passes: it is the author's word to the model about a bad call.
        """
        turn = self.turn
        try:
            yield
            if self.turn != turn:  # a likely name for a counter of the author's own: both would be wrong
                raise EnvironmentFault(
                    f"{what} of {type(self).__name__} changed self.turn from {turn} to {self.turn}",
                    fix="it is counted for you: read it, or count under another name",
                )
        except ToolFault as fault:
            if faults:
                raise
            raise self._broken(
                f"{what} of {type(self).__name__} raised a ToolFault: {fault}", fault
            ) from fault
        except TideError:
            self._end = EndReason.INFRASTRUCTURE
            raise
        # Whatever an author's code raises, `sys.exit` included, must reach the driver as an error of ours.
        except (Exception, SystemExit) as error:
            text = f"{what} of {type(self).__name__} raised {type(error).__name__}: {error}"
            raise self._broken(text, error) from error

    def _broken(self, text: str, error: BaseException) -> TideError:
        self._end = EndReason.INFRASTRUCTURE
        if isinstance(error, (OSError, EOFError)):
            return InfrastructureError(text, where=plain.place_of(error))
        return EnvironmentFault(text, where=plain.place_of(error), fix="repair the environment")

    def _opening(self, given: Any) -> list[m.Message]:
        if (
            isinstance(given, (list, tuple))
            and given
            and all(isinstance(x, dict) and "role" in x for x in given)
        ):
            opening = m.copy_messages(given)
        else:
            opening = [m.user(given)]
        for message in opening:
            m.validate_message(message, where=f"start of {type(self).__name__}")
        if self.system and all(message["role"] != "system" for message in opening):
            opening.insert(0, m.system(self.system))
        return opening

    def _cut(self, messages: list[m.Message]) -> Observation:
        observation, self._images_left = cut_observation(
            messages, self.max_observation_chars, self._images_left
        )
        return observation

    def _apply_limits(self) -> None:
        if self._invalid_row >= self.max_invalid_actions:
            self._cut_short(EndReason.INVALID_ACTIONS)
        elif self.turn >= self.max_turns:
            self._cut_short(EndReason.MAX_TURNS)

    def _cut_short(self, reason: EndReason) -> None:
        with self._author("on_truncate"):
            self.give(self.on_truncate(reason))
        self._end = reason
