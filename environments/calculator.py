"""`tide/Calculator-v0`: word problems that are solved by calling a calculator, then answering.

Invariant: success needs the right number and a working call of the calculator before it; so guessing,
or arithmetic in the head, never gets the full reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiderl
from tiderl.env import messages as m
from tiderl.env.ends import EndReason
from tiderl.env.tasks import LazyTasks
from tiderl.env.tools import ToolFault
from tiderl.errors import EnvironmentFault

from .arithmetic import BadExpression, evaluate, same_number, show
from .problems import problem

SYSTEM = (
    "You solve problems with a calculator. Give it an expression to use it. "
    "When you see the result, answer with the number."
)
DEMONSTRATIONS = (
    ("Each of 12 bags has 15 nuts. How many nuts?", "12*15"),
    ("Sam had 31 cards and got 14 more. How many cards?", "31+14"),
    ("Eva had 40 plums and gave away 16. How many are left?", "40-16"),
)
SIZES = {"train": 4096, "test": 512}
PARTIAL = 0.1
"""Reward for an episode with a working calculator call and no right answer."""


@tiderl.register("tide/Calculator-v0")
class Calculator(tiderl.AgentEnv):
    """Word problems with + - *: call the calculator, read the result, answer.

    Reward 1 for the right answer after a working call, 0.1 for a working call without it, else 0. A
    reply without a tool call ends the episode.

    Args:
        demonstrations: how many solved examples stand before the question (0 to 3).
        limits: see `AgentEnv`; `system` replaces the system prompt.
    """

    max_turns = 4
    system: str | None = SYSTEM
    splits = tuple(SIZES)

    def __init__(self, demonstrations: int = 2, **limits: Any) -> None:
        super().__init__(**limits)
        if not 0 <= demonstrations <= len(DEMONSTRATIONS):
            raise EnvironmentFault(
                f"demonstrations is {demonstrations}", fix=f"choose 0 to {len(DEMONSTRATIONS)}"
            )
        self.demonstrations = demonstrations
        self._result: str | None = None

    def tasks(self, split: str) -> Sequence[Any]:
        return LazyTasks(range(SIZES[split]), lambda number: problem(split, number))

    def start(self, task: Any) -> list[m.Message]:
        self._result = None
        opening = []
        for number, (question, expression) in enumerate(DEMONSTRATIONS[: self.demonstrations]):
            opening += self._example(number, question, expression)
        return [*opening, m.user(task["question"])]

    @staticmethod
    def _example(number: int, question: str, expression: str) -> list[m.Message]:
        result = show(evaluate(expression))
        first, second = f"example_{number}_0", f"example_{number}_1"
        return [
            m.user(question),
            m.assistant(None, [m.tool_call("calc", first, expression=expression)]),
            m.tool(first, "calc", result),
            m.assistant(None, [m.tool_call("answer", second, number=int(result))]),
        ]

    @tiderl.tool
    def calc(self, expression: str) -> str:
        """Work out an expression.

        Args:
            expression: numbers, + - * / and brackets.
        """
        try:
            self._result = show(evaluate(expression))
        except BadExpression as error:
            raise ToolFault(str(error)) from error
        return self._result

    @tiderl.tool
    def answer(self, number: float) -> str:
        """Give the final number.

        Args:
            number: the answer to the question.
        """
        right = same_number(number, self.task["answer"])
        self.finish(1.0 if right and self._result is not None else self._partial())
        return "right" if right else "wrong"

    def reply(self, text: str) -> None:
        """Plain text is no answer: the episode ends."""
        self.finish(self._partial())

    def on_truncate(self, reason: EndReason) -> float:
        return self._partial()

    def oracle(self) -> m.Message:
        if self._result is None:
            call = m.tool_call("calc", f"oracle_{self.turn}", expression=self.task["expression"])
        else:
            call = m.tool_call("answer", f"oracle_{self.turn}", number=self.task["answer"])
        return m.assistant(None, [call])

    def _partial(self) -> float:
        return 0.0 if self._result is None else PARTIAL
