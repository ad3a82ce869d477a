"""Keeps what messages say apart from what a chat template controls.

Invariant: text that comes from a message never becomes a control token. Before rendering, every literal
of a control token in a message is replaced by a guarded number (private-use characters, themselves
guarded); after rendering, the literals that are left are the template's own. Guarded literals are then
tokenised as plain text (`split_special_tokens`), or, where a tokenizer's pieces depend on each other
or the literal is no special token, with a zero-width space after their first character.

A model's own reply keeps the tokens that it may write (such as `<tool_call>`); only those that structure
the conversation (turn and image tokens) are guarded there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ModelError
from .base import Tokenizer

OPEN, CLOSE = "\ue000", "\ue001"
_GUARDED = re.compile(f"{OPEN}([0-9]+){CLOSE}")
_BREAK = "\u200b"
_PROBES = ("a", " a b", "\na\n", "  ", "a ", "ä\n\n b")


class ContentGuard:
    """Escapes control literals in contents and turns rendered text into ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added: dict[str, int] = {
            str(token): int(number) for number, token in tokenizer.added_tokens_decoder.items() if str(token)
        }
        self._special = {
            str(token)
            for token in tokenizer.added_tokens_decoder.values()
            if str(token) and getattr(token, "special", True)
        }
        self._literals: list[str] = [OPEN, CLOSE, *sorted(self._special, key=len, reverse=True)]
        self._numbers = {literal: number for number, literal in enumerate(self._literals)}
        self._structure: set[str] = {OPEN, CLOSE}
        self._controls = _alternation(self._special, group=True)
        self._compile()
        self.piecewise = self._pieces_are_independent()
        """True when text between two control tokens has the same ids alone as in place."""

    def structure(self, literals: Iterable[str]) -> None:
        """Name the literals that structure a conversation: they are guarded in replies too."""
        for literal in literals:
            if literal not in self._numbers:
                self._numbers[literal] = len(self._literals)
                self._literals.append(literal)
            self._structure.add(literal)
        self._compile()

    def _compile(self) -> None:
        self._in_content = _alternation(self._literals)
        self._in_reply = _alternation(self._structure)

    def escape(self, text: str, *, reply: bool = False) -> str:
        """`text` with its control literals guarded; `reply` for what the model itself wrote."""
        pattern = self._in_reply if reply else self._in_content
        return pattern.sub(lambda match: f"{OPEN}{self._numbers[match.group()]}{CLOSE}", text)

    def escape_all(self, value: Any) -> Any:
        """A JSON value with every string in it escaped, keys included (tool schemas)."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape_all(key): self.escape_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_all(item) for item in value]
        return value

    def plain(self, text: str) -> str:
        """Rendered text as a reader sees it."""
        return _GUARDED.sub(lambda match: self._literals[int(match.group(1))], text)

    def controls_in(self, text: str) -> list[str]:
        """The control literals in rendered text, in order; guarded ones are not among them."""
        return _alternation(self.added).findall(text)

    def starts_with_control(self, text: str) -> bool:
        """True when rendered text begins with a control literal."""
        return self._controls.match(text) is not None

    def encode(self, text: str, *, after: str = "") -> list[int]:
        """Ids of rendered text.

        Args:
            text: rendered, guarded text.
            after: a control literal that stands before `text` in the context already; its id is not part
                of the result.

        Raises:
            ModelError: the tokenizer does not give `after` as one token.
        """
        whole = after + text
        if OPEN not in text:
            ids = self._ids(whole)
        elif not self.piecewise:
            ids = self._ids(_GUARDED.sub(self._apart, whole))
        else:
            ids = self._encode_pieces(whole)
        if not after:
            return ids
        if ids[:1] != [self.added.get(after)]:
            raise ModelError(
                f"the tokenizer does not give {after!r} as one token",
                where=self._tokenizer.name_or_path,
                fix="use the tokenizer that the model was trained with",
            )
        return ids[1:]

    def _encode_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        pending = ""
        for piece in self._controls.split(text):
            if OPEN not in piece:
                pending += piece
                continue
            ids += self._ids(pending)
            pending = ""
            ids += self._ids(_GUARDED.sub(self._kept, piece), split=True)
        return ids + self._ids(pending)

    def _kept(self, match: re.Match[str]) -> str:
        literal = self._literals[int(match.group(1))]
        return literal if literal in self._special or literal in (OPEN, CLOSE) else _broken(literal)

    def _apart(self, match: re.Match[str]) -> str:
        literal = self._literals[int(match.group(1))]
        return literal if literal in (OPEN, CLOSE) else _broken(literal)

    def _ids(self, text: str, *, split: bool = False) -> list[int]:
        if not text:
            return []
        options = {"add_special_tokens": False, "split_special_tokens": split, "verbose": False}
        ids = self._tokenizer.encode(text, **options)
        return [int(number) for number in ids]

    def _pieces_are_independent(self) -> bool:
        tokens = self._tokenizer.added_tokens_decoder.values()
        if any(getattr(token, "lstrip", False) or getattr(token, "rstrip", False) for token in tokens):
            return False  # such a token swallows the white space beside it
        control = min(self._special, default="")
        if not control or self._ids(control, split=True) == self._ids(control):
            return False
        one = [self.added[control]]
        return all(self._ids(control + probe + control) == one + self._ids(probe) + one for probe in _PROBES)


def _broken(literal: str) -> str:
    return literal[0] + _BREAK + literal[1:]


def _alternation(literals: Iterable[str], *, group: bool = False) -> re.Pattern[str]:
    """A pattern of any of the literals, longest first; one that never matches when there are none."""
    ordered: Sequence[str] = sorted(literals, key=lambda literal: (-len(literal), literal))
    body = "|".join(re.escape(literal) for literal in ordered) if ordered else r"(?!)"
    return re.compile(f"({body})" if group else body)
