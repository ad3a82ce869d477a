"""Word problems with one step of arithmetic.

Invariant: a problem follows from its split and number alone; a pair of template and numbers belongs to
one split only. Numbers are within 12..99, differences are not negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .draws import Draws, draw_in_split

LOW, HIGH = 12, 99


@dataclass(frozen=True)
class Template:
    """A text with `{n}` and `{m}`, and the operator that answers it."""

    operator: str
    text: str


TEMPLATES = (
    Template("*", "{n} boxes hold {m} pens each. How many pens?"),
    Template("*", "A shop sells {n} cakes a day for {m} days. How many cakes?"),
    Template("*", "{n} rows with {m} chairs each. How many chairs?"),
    Template("+", "Tom had {n} coins and found {m} more. How many coins?"),
    Template("+", "There are {n} red and {m} blue cars. How many cars?"),
    Template("-", "Ann had {n} apples and ate {m}. How many are left?"),
    Template("-", "A bus had {n} people and {m} got off. How many are left?"),
)
OPERATORS = ("*", "+", "-")


def solve(operator: str, n: int, m: int) -> int:
    """The answer."""
    return {"*": n * m, "+": n + m, "-": n - m}[operator]


def _draw(draws: Draws) -> tuple[str, dict[str, Any]]:
    operator = draws.pick(OPERATORS)
    template = draws.pick([one for one in TEMPLATES if one.operator == operator])
    n, m = draws.between(LOW, HIGH), draws.between(LOW, HIGH)
    if operator == "-" and m > n:
        n, m = m, n
    problem = {
        "question": template.text.format(n=n, m=m),
        "expression": f"{n}{operator}{m}",
        "answer": solve(operator, n, m),
        "kind": operator,
    }
    return f"{template.text}/{n}/{m}", problem


def problem(split: str, number: int) -> dict[str, Any]:
    """The task: "id", "question", "expression", "answer", "kind"."""
    return {"id": number, **draw_in_split(f"calculator/{number}", split, _draw)}
