"""The chat agent: plays one side of an episode over a model's own chat template.

Invariants: an episode's context is what `start` and `observe` handed out plus what was sampled; the
history that the template renders holds each reply as the text that was sampled, never as parsed calls;
tool calls have the ids `call_{turn}_{k}`, so that an episode is the same each time it is played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..env.images import image_hash
from ..env.messages import copy_messages
from .base import Message, Tokenizer, Tool, images_of, make_action, text_of
from .bridge import ChatBridge, Delta
from .formats import ActionFormat, get_format
from .template import join_users

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]


class ChatAgent:
    """How a chat model sees messages and acts. Holds no episode: one agent plays many.

    Args:
        tokenizer: the model's, with a chat template.
        format: an action format or its name.
        system: replaces the environment's system message.
        instructions: describe the tools in the system message, where the template does not.
        template_options: further variables of the template, such as `enable_thinking`.

    Raises:
        ModelError: the chat template cannot be used.
        UnknownFormat: no format of that name is installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ActionFormat | str = "hermes",
        system: str | None = None,
        *,
        instructions: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.format = get_format(format) if isinstance(format, str) else format
        self.system, self.instructions = system, instructions
        self.bridge = ChatBridge(tokenizer, template_options=template_options)
        marker = self.format.template_marker
        self.bridge.tools_in_template = (
            instructions and marker is not None and self.bridge.template.takes_tools(marker)
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which a turn must stop."""
        return self.bridge.stop_token_ids

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Ids that must never be sampled."""
        return self.bridge.placeholder_token_ids

    def episode(self) -> ChatEpisode:
        """A new episode."""
        return ChatEpisode(self)

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The first messages as they go to the template: system text, demonstrations, task."""
        given = [text_of(message) for message in messages if message["role"] == "system"]
        pieces = given if self.system is None else [self.system]
        if self.instructions and tools and not self.bridge.tools_in_template:
            pieces = [*pieces, self.format.instructions(tools) or ""]
        text = "\n\n".join(piece for piece in pieces if piece)
        rest = [message for message in messages if message["role"] != "system"]
        head = [{"role": "system", "content": text}] if text else []
        return head + self.shown(rest)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template gets them: calls and results in the action format."""
        out: list[Message] = []
        in_results = False
        for message in messages:
            is_result = message["role"] == "tool" and not self.bridge.tools_in_template
            if is_result:
                result = self.format.render_result(message)
                if in_results:
                    out[-1] = join_users([out[-1], result], "\n")
                else:
                    out.append(result)
            elif message["role"] == "assistant":
                out.append(make_action(self.format.render_call(message)))
            else:
                out.append(message)
            in_results = is_result
        return out


class ChatEpisode:
    """One episode, turn by turn: `start`, then `act` and `observe` in turn, `finish` at the end."""

    def __init__(self, agent: ChatAgent) -> None:
        self.agent = agent
        self.messages: list[Message] = []
        """The conversation: what the environment said, and what the agent did, with structured calls."""
        self.replies: list[str] = []
        """Each reply's text exactly as sampled, without its stop token."""
        self.forks = 0
        """How often the context had to be started afresh."""
        self.cut = 0
        """Replies that ended because they were too long."""
        self.new_images: tuple[np.ndarray, ...] = ()
        """Images that belong to the ids handed out last."""
        self._tools: list[Tool] = []
        self._shown: list[Message] = []
        self._sampled: list[int] = []

    @property
    def new_image_hashes(self) -> list[str]:
        """Content hashes of `new_images`, as `TokenRecord.append_context` takes them."""
        return [image_hash(image) for image in self.new_images]

    @property
    def turn(self) -> int:
        """Replies so far."""
        return len(self.replies)

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the first prompt; their images are in `new_images`.

        Raises:
            ModelError: the template cannot show the messages.
            FormatError: a demonstration cannot be written in the action format.
        """
        self._tools = list(tools)
        self.messages = copy_messages(messages)
        self._shown = self.agent.opening(self.messages, self._tools)
        ids = self.agent.bridge.prompt(self._shown, self._tools)
        self.new_images = tuple(image for message in self._shown for image in images_of(message))
        return ids

    def act(self, sampled_ids: Sequence[int], finish: FinishReason) -> Message:
        """The action in one turn's sampled ids: an assistant message."""
        self._sampled = list(sampled_ids)
        text = self.agent.bridge.reply_text(self._sampled)
        action = self.agent.format.parse(text, self._tools, f"call_{self.turn}")
        self.replies.append(text)
        self.cut += finish == "length"
        self.messages.append(action)
        return copy_messages([action])[0]

    def observe(self, messages: Sequence[Message]) -> Delta:
        """The environment's answer to the last action, as what to append to the context.

        Raises:
            ModelError: the template cannot show the messages.
        """
        self.finish(messages)
        new = self.agent.shown(self.messages[len(self.messages) - len(messages) :])
        delta = self.agent.bridge.delta(self._shown, self._sampled, new, self._tools)
        self._shown += [make_action(delta.reply), *new]
        self._sampled = []
        self.forks += delta.broke
        self.new_images = delta.images
        return delta

    def finish(self, messages: Sequence[Message]) -> None:
        """Keep the last messages of an episode that goes on no further."""
        self.messages += copy_messages(messages)
