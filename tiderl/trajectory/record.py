"""The token record of one episode: the only place where token ids live.

Invariants: append-only; `ids`, `mask`, `logprobs` and `versions` always have equal length; `mask` is 1
exactly on tokens the engine sampled (nowhere in a copy made by `masked`); a sampled token's version is
>= 0, a context token's is -1. Each turn's tokens are known by `turns`, whatever the mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass
class TokenRecord:
    """Ids, loss mask, log-probs (natural log, temperature 1) and policy versions, token by token."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of each sampled span, in order."""
    images: list[str] = field(default_factory=list)
    """Content hashes of the images whose placeholders stand in `ids`, in order."""

    def __len__(self) -> int:
        return len(self.ids)

    def append_context(self, ids: Sequence[int], images: Sequence[str] = ()) -> None:
        """Append tokens the engine did not sample (prompt, observation, template).

        `images` are the content hashes of the images in them, one for each placeholder.
        """
        n = len(ids)
        self.images.extend(images)
        self.ids.extend(int(i) for i in ids)
        self.mask.extend([0] * n)
        self.logprobs.extend([0.0] * n)
        self.versions.extend([-1] * n)

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append one turn's sampled tokens.

        Raises:
            ValueError: the lengths differ, nothing was sampled, a log-prob is not finite or is
                positive, or a version is negative. The record is left as it was.
        """
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"lengths differ: {len(ids)=} {len(logprobs)=} {len(versions)=}")
        if not ids:
            raise ValueError("a turn needs at least one sampled token")
        if any(not math.isfinite(x) or x > 1e-3 for x in logprobs):
            raise ValueError("a log-prob is not finite or is above 0")
        if any(v < 0 for v in versions):
            raise ValueError("a sampled token needs a policy version >= 0")
        start = len(self.ids)
        self.ids.extend(int(i) for i in ids)
        self.mask.extend([1] * len(ids))
        self.logprobs.extend(float(x) for x in logprobs)
        self.versions.extend(int(v) for v in versions)
        self.turns.append((start, len(self.ids)))

    def masked(self) -> TokenRecord:
        """A copy in which no token carries loss."""
        return replace(self, mask=[0] * len(self.mask))

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the engine sampled, with or without loss."""
        return sum(end - start for start, end in self.turns)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.turns[0][0] if self.turns else len(self.ids)

    @property
    def loss_tokens(self) -> int:
        """How many tokens carry loss."""
        return sum(self.mask)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced a token here; -1 when none was sampled."""
        return min((v for v in self.versions if v >= 0), default=-1)
