"""From messages to token ids and back, with a proof that each turn extends the last.

Invariants: sampled ids are never tokenised again. The ids that follow a reply are handed out only when
the template's rendering of the whole conversation begins, character by character, with its rendering
of what is in the context already plus the reply; where it does not (a template that rewrites or trims
earlier turns), a complete fresh prompt is handed out and `broke` says so. Every prompt holds exactly one
placeholder per image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, ModelError
from .base import Message, Tokenizer, Tool, images_of, make_action
from .template import ChatTemplate, flat_ids

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Delta:
    """What to put into the context before the next reply."""

    ids: list[int]
    """Ids to append after the sampled ones; a whole prompt when `broke`. None of them carries loss."""
    broke: bool = False
    """True when the prefix could not be kept: start a new record and a new session with `ids`."""
    images: tuple[np.ndarray, ...] = ()
    """The images of `ids`' placeholders, in order."""
    reply: str = ""
    """The reply as an assistant message's content: with it, the template renders the reply verbatim."""


class ChatBridge:
    """Turns messages into ids for one tokenizer. Holds no episode: safe to share.

    Args:
        tokenizer: one with a chat template (`load_tokenizer`).
        tools_in_template: give tools to the template instead of describing them in a system message.
        template_options: further variables of the template, such as `enable_thinking`.

    Raises:
        ModelError: the chat template is missing or cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools_in_template: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools_in_template = tools_in_template
        self.template = ChatTemplate(tokenizer, template_options)
        self._guard = self.template.guard
        literals = [self.template.end_of_turn] if self.template.end_of_turn else []
        stops = [self._guard.added[literal] for literal in literals] + flat_ids([tokenizer.eos_token_id])
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """Ids at which sampling must stop: the template's end of turn first, then the tokenizer's eos."""
        self._stop_literals = {
            number: literal for literal, number in self._guard.added.items() if number in self.stop_token_ids
        }
        token = self.template.image_token
        self.image_token_id: int | None = None if token is None else self._guard.added[token]
        self.placeholder_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(self._guard.added[literal] for literal in self.template.image_tokens)
        )
        """Image and vision ids, which the engine must never sample."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a whole conversation, ending where the next reply begins.

        Raises:
            ModelError: the template refuses the messages, or placeholders and images do not agree.
        """
        ids = self._guard.encode(self._render(messages, tools))
        self._check_images(ids, messages)
        return ids

    def reply_text(self, sampled_ids: Sequence[int]) -> str:
        """What was sampled, as text; only a stop token at the very end is left out."""
        text, _ = self._split(sampled_ids)
        return text

    def delta(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Delta:
        """Ids that lead from a reply to the next one: end of turn, new messages, header.

        Args:
            history: the messages that the context renders, without the reply.
            sampled_ids: the reply as sampled, with or without its stop token.
            new_messages: what came after the reply.
            tools: as given to `prompt`.

        Raises:
            ModelError: as for `prompt`.
            EngineError: an image placeholder was sampled.
        """
        if strange := sorted(set(sampled_ids) & set(self.placeholder_token_ids)):
            raise EngineError(
                f"the engine sampled image placeholders (token ids {strange})",
                where="chat bridge",
                fix="ban ChatBridge.placeholder_token_ids in the engine's settings",
            )
        text, stop = self._split(sampled_ids)
        context = self._render(history, tools) + self._guard.escape(text, reply=True)
        # Where a template writes a space beside a reply, the model samples that space itself.
        ahead = text.removeprefix(" ")
        for content in dict.fromkeys([text, ahead, text.removesuffix(" "), ahead.removesuffix(" ")]):
            rendered = self._render([*history, make_action(content), *new_messages], tools)
            ids = self._extend(rendered, context, stop)
            if ids is not None:
                self._check_images(ids, new_messages)
                return Delta(ids, False, _images(new_messages), content)
        whole = [*history, make_action(text), *new_messages]
        return Delta(self.prompt(whole, tools), True, _images(whole), text)

    def _extend(self, rendered: str, context: str, stop: str) -> list[int] | None:
        """Ids of `rendered` behind `context` and its `stop` token; None when it does not extend them."""
        if not rendered.startswith(context + stop):
            return None
        rest = rendered[len(context) + len(stop) :]
        if not stop and not self._guard.piecewise and not self._guard.starts_with_control(rest):
            # What such a tokenizer makes of this text depends on the reply before it.
            return None
        return self._guard.encode(rest, after=stop)

    def _split(self, sampled_ids: Sequence[int]) -> tuple[str, str]:
        """(text of a reply, literal of the stop token at its end or "")."""
        ids = list(sampled_ids)
        stop = self._stop_literals.get(ids[-1], "") if ids else ""
        if stop:
            ids = ids[:-1]
        # Decoded behind a control token, as in the context: some tokenizers drop a leading space.
        anchor = next(iter(self._stop_literals.items()), None)
        if anchor is not None:
            text = self._decode([anchor[0], *ids])
            if text.startswith(anchor[1]):
                return text[len(anchor[1]) :], stop
        return self._decode(ids), stop

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self.template.render(messages, tools if self.tools_in_template else ())

    def _check_images(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        wanted = sum(len(images_of(message)) for message in messages)
        found = 0 if self.image_token_id is None else list(ids).count(self.image_token_id)
        if found != wanted:
            raise ModelError(
                f"the chat template gives {found} image placeholders for {wanted} images",
                where=f"chat template of {self.tokenizer.name_or_path or 'the tokenizer'}",
                fix="use a model whose template shows images in every message that holds one",
            )


def _images(messages: Sequence[Message]) -> tuple[np.ndarray, ...]:
    return tuple(image for message in messages for image in images_of(message))
