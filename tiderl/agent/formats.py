"""How a model writes tool calls: the protocol of action formats and their registry.

Invariants: `parse` never raises on anything a model can write, and loses nothing the environment needs
to answer a faulty call; `parse(render_call(m))` gives the calls of `m` again. Formats are found only
through the entry-point group `tiderl.formats`, so that the built-ins are plug-ins like a user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from ..errors import TideError, nearest
from .base import Message, Tool

GROUP = "tiderl.formats"


class UnknownFormat(TideError):
    """No action format is installed under that name."""


class FormatError(TideError):
    """A message cannot be written in an action format."""


@runtime_checkable
class ActionFormat(Protocol):
    """How tool calls and their results look as text."""

    name: str
    template_marker: str | None
    """When a chat template given tools renders this text, the template itself writes this format: tools
    and tool messages then go to the template, and `instructions`/`render_result` are not used."""

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """What to add to the system message so that a model knows its tools; None when nothing."""
        ...

    def render_call(self, message: Message) -> str:
        """The text of an assistant message with its calls, as the model should have written it.

        Raises:
            FormatError: the format has no way to write this call.
        """
        ...

    def render_result(self, message: Message) -> Message:
        """A tool message as a message of a role that every template has."""
        ...

    def parse(self, text: str, tools: Sequence[Tool], call_id_prefix: str) -> Message:
        """The action in a model's text: an assistant message, `tool_calls` where there are calls.

        The k-th call has the id `{call_id_prefix}_{k}`. A call that is not well formed keeps its raw
        text as `arguments`, so that the environment can answer it with what was wrong.
        """
        ...


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def list_formats() -> list[str]:
    """Names of all installed action formats."""
    return sorted(_installed())


def get_format(name: str) -> ActionFormat:
    """The action format called `name`.

    Raises:
        UnknownFormat: none is installed under that name; near matches are named.
        FormatError: the plug-in that registers it cannot be imported or is not an `ActionFormat`.
    """
    installed = _installed()
    entry = installed.get(name)
    if entry is None:
        near = nearest(name, installed)
        fix = (
            f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(installed))}"
        )
        raise UnknownFormat(f"there is no action format called {name!r}", fix=fix)
    try:
        found = entry.load()
        result = found() if isinstance(found, type) or not isinstance(found, ActionFormat) else found
    except (ImportError, AttributeError, TypeError) as error:
        raise FormatError(
            f"the action format {name!r} cannot be loaded: {error}",
            where=f"entry point {GROUP}: {entry.value}",
            fix="reinstall or repair the package that registers it",
        ) from error
    if not isinstance(result, ActionFormat):
        raise FormatError(
            f"the action format {name!r} is a {type(result).__name__}, which lacks parts of ActionFormat",
            where=f"entry point {GROUP}: {entry.value}",
            fix="give it name, template_marker, instructions, render_call, render_result and parse",
        )
    return result
