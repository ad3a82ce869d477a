"""Every error a user can meet.

Invariant: the text of a `TideError` is one sentence or two that say what was wrong, where, and what
to do next. The command line prints that text and exits with `exit_code`; it never prints a traceback
for one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TideError(Exception):
    """Base of all errors of ours.

    Args:
        what: what was wrong, with the value, key, file or id that was wrong.
        where: the file, key path or component in which it was found.
        fix: what the user should do next, as an imperative clause.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        text = what.rstrip(".")
        if where:
            text += f" ({where})"
        if fix:
            text += f": {fix.rstrip('.')}"
        super().__init__(text if text.endswith("?") else text + ".")


class ConfigError(TideError):
    """A configuration key, value or override is wrong."""


class UnknownEnvironment(TideError):
    """No environment is registered under that id."""


class EnvironmentFault(TideError):
    """An environment broke the contract of `AgentEnv`; the message names how."""


class ModelError(TideError):
    """A model folder, tokenizer or chat template cannot be used."""


class PromptTooLong(TideError):
    """A prompt does not fit the model's or the session's limit."""


class EngineError(TideError):
    """The inference engine refused a request or has died."""


class RunExists(TideError):
    """The run folder already holds a finished run, or one with another configuration."""


class ResourceError(TideError):
    """The machine lacks something: disk space, memory, a free port."""


class EndpointError(TideError):
    """A remote endpoint cannot be reached or answered with an error."""


class MissingExtra(TideError):
    """A part of TideRL was asked for whose packages are not installed."""


class InfrastructureError(TideError):
    """Something around the task failed (worker, sandbox, network): never a reward of zero.

    An episode that ends with one of these has `EndReason.INFRASTRUCTURE` and is masked.
    """


class WorkerDied(InfrastructureError):
    """The process that held a session is gone; the session's state is lost."""


class StepTimeout(InfrastructureError):
    """An environment call did not answer before its deadline; the session was killed."""


class Busy(InfrastructureError):
    """No capacity now. `retry_after` is in seconds."""

    def __init__(self, what: str, *, retry_after: float, where: str | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(what, where=where, fix=f"retry after {retry_after:.1f} s")


def nearest(word: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The up to `n` known words closest to `word`, best first; for "did you mean"."""
    return difflib.get_close_matches(word, list(known), n=n, cutoff=0.5)
