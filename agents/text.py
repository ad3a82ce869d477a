"""The `text` action format: no tool calls, the reply is the action.

Invariant: `parse` returns the text as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.agent.base import Message, Tool, calls_of, make_action, text_of
from tiderl.agent.formats import FormatError


class TextFormat:
    """Plain replies, for environments without tools."""

    name = "text"
    template_marker = None

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """None: there is nothing to explain."""
        return None

    def render_call(self, message: Message) -> str:
        """The message's text.

        Raises:
            FormatError: the message calls a tool.
        """
        if calls_of(message):
            raise FormatError(
                "the action format 'text' cannot write tool calls", fix="use the format hermes or lines"
            )
        return text_of(message)

    def render_result(self, message: Message) -> Message:
        """The tool message as a user message with the same content."""
        return {"role": "user", "content": message.get("content") or ""}

    def parse(self, text: str, tools: Sequence[Tool], call_id_prefix: str) -> Message:
        """The text as an assistant message."""
        return make_action(text)
