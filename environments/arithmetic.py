"""Arithmetic from text, worked out exactly and within bounds; nothing is ever executed.

Invariant: `evaluate` ends within a bounded number of steps for any text, and either returns a fraction
of at most `MAX_BITS` bits or raises `BadExpression`.

Grammar: `sum = product (("+"|"-") product)*`, `product = unary (("*"|"/"|"//"|"%") unary)*`,
`unary = ("+"|"-") unary | power`, `power = atom ["**" unary]`, `atom = number | "(" sum ")"`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_CHARS = 200
MAX_DEPTH = 40
MAX_BITS = 256
MAX_EXPONENT = 64
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%()]))", re.ASCII)


class BadExpression(ValueError):
    """The text is no expression that can be worked out; the message says why."""


def evaluate(text: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        BadExpression: a syntax fault, a division by zero, or something out of bounds.
    """
    if len(text) > MAX_CHARS:
        raise BadExpression(f"the expression is longer than {MAX_CHARS} characters")
    return _Parser(text.replace("×", "*").replace("÷", "/").replace("−", "-")).result()


def show(value: Fraction) -> str:
    """A value as text: an integer as it is, else rounded to six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{round(float(value), 6):.6f}".rstrip("0").rstrip(".")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = self._split(text)
        self._at = 0
        self._depth = 0

    @staticmethod
    def _split(text: str) -> list[str]:
        tokens, at = [], 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise BadExpression(f"{text[at:].strip()[:20]!r} is not arithmetic")
            tokens.append(match[1] or match[2])
            at = match.end()
        if not tokens:
            raise BadExpression("the expression is empty")
        return tokens

    def result(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise BadExpression(f"{self._tokens[self._at]!r} is not expected there")
        return value

    def _next(self, *wanted: str) -> str | None:
        """The next token if it is one of those, and go on."""
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadExpression("the expression is nested too deeply")
        value = self._product()
        while sign := self._next("+", "-"):
            right = self._product()
            value = self._bounded(value + right if sign == "+" else value - right)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._unary()
        while sign := self._next("*", "/", "//", "%"):
            right = self._unary()
            if sign != "*" and right == 0:
                raise BadExpression("division by zero")
            if sign == "*":
                value = self._bounded(value * right)
            elif sign == "/":
                value = self._bounded(value / right)
            elif sign == "//":
                value = Fraction(value // right)
            else:
                value = self._bounded(value % right)
        return value

    def _unary(self) -> Fraction:
        negative = False
        while sign := self._next("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._next("**"):
            return base
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadExpression("the expression is nested too deeply")
        exponent = self._unary()
        self._depth -= 1
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise BadExpression(f"an exponent must be a whole number within {MAX_EXPONENT}")
        if base == 0 and exponent < 0:
            raise BadExpression("division by zero")
        power = abs(exponent.numerator)
        bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
        if bits * power > 2 * MAX_BITS:
            raise BadExpression("the number is too large")
        return self._bounded(base**exponent.numerator)

    def _atom(self) -> Fraction:
        if self._next("("):
            value = self._sum()
            if not self._next(")"):
                raise BadExpression("a bracket is not closed")
            return value
        if self._at < len(self._tokens) and self._tokens[self._at][0] in ".0123456789":
            self._at += 1
            return self._bounded(Fraction(self._tokens[self._at - 1].rstrip(".")))
        found = repr(self._tokens[self._at]) if self._at < len(self._tokens) else "the end"
        raise BadExpression(f"a number is expected instead of {found}")

    @staticmethod
    def _bounded(value: Fraction) -> Fraction:
        if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise BadExpression("the number is too large")
        return value


def same_number(left: float, right: float) -> bool:
    """Whether two finite numbers are equal up to float rounding."""
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)
