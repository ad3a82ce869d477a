"""What a rollout has seen so far: how long prompts, episodes and waits are, by environment.

Invariant: figures only; a task that has not been seen yet is expected to be like those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tiderl.scheduling.waits import Waits

_WEIGHT = 0.1
"""Of a new observation in a moving average."""


class Average:
    """A moving average that starts as a plain mean."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.count = 0

    def add(self, value: float) -> None:
        """One more observation."""
        self.count += 1
        self.value += (value - self.value) * max(_WEIGHT, 1.0 / self.count)


class History:
    """Averages by environment, and histograms of waits by `environment/tool`."""

    def __init__(self) -> None:
        self._prompts: dict[str, Average] = {}
        self._after: dict[str, list[Average]] = {}
        self._waits: dict[str, Waits] = {}
        self.image_tokens = 64
        """Tokens planned for an image of a turn to come: the most one took so far, 64 before any."""

    @property
    def waits(self) -> Mapping[str, Waits]:
        """Histograms of environment durations (a live view: each `Waits` in it is frozen)."""
        return MappingProxyType(self._waits)

    def waited(self, key: str, seconds: float) -> None:
        """An environment took `seconds` to answer."""
        self._waits[key] = self._waits.get(key, Waits()).seen(seconds)

    def prompt(self, kind: str, default: int) -> int:
        """Expected tokens of a first prompt."""
        seen = self._prompts.get(kind)
        return default if seen is None else round(seen.value)

    def saw_prompt(self, kind: str, tokens: int) -> None:
        """A first prompt had so many tokens."""
        self._prompts.setdefault(kind, Average()).add(tokens)

    def saw_images(self, images: int, more_tokens: int) -> None:
        """A turn's images took so many tokens beyond their placeholders."""
        self.image_tokens = max(self.image_tokens, -(-more_tokens // images) + 1)

    def remaining(self, kind: str, turn: int) -> int:
        """Expected tokens an episode adds after `turn` turns; 0 when nothing like it has ended yet."""
        after = self._after.get(kind)
        if not after:
            return 0
        return round(after[min(turn, len(after) - 1)].value)

    def ended(self, kind: str, contexts: list[int]) -> None:
        """An episode ended; `contexts` are its lengths in tokens after 0, 1, 2... turns."""
        if not contexts:
            return
        after = self._after.setdefault(kind, [])
        for turn, context in enumerate(contexts):
            if turn == len(after):
                after.append(Average())
            after[turn].add(contexts[-1] - context)
