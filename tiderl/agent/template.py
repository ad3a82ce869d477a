"""A model's own chat template: what it can show, found by trying, and messages rendered with it.

Invariants: rendering the same messages twice gives the same text; every image of the messages appears
as exactly one placeholder. What a template cannot show is carried where it can: images of a tool message
in a user message after it, a system message in the first user message, adjacent user messages as one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .base import Message, Tokenizer, Tool, images_of, text_of
from .guard import ContentGuard

_A, _B, _C = "tideprobeone", "tideprobetwo", "tideprobethree"
_PLACEHOLDERS = (
    "<image>",
    "<|image|>",
    "<|image_pad|>",
    "<image_soft_token>",
    "[IMG]",
    "<|imgpad|>",
    "<img>",
)


class ChatTemplate:
    """Renders messages; see the module's invariants.

    Args:
        tokenizer: one with a chat template.
        options: further variables of the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self.guard = ContentGuard(tokenizer)
        self._where = f"chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                where=tokenizer.name_or_path or None,
                fix="use an instruction-tuned model, or put a chat_template.jinja into the model folder",
            )
        self._strings = self._shows(_A)
        self._parts = self._shows([{"type": "text", "text": _A}])
        if not (self._strings or self._parts):
            raise ModelError(
                "the chat template does not show a user message",
                where=self._where,
                fix="repair the template of the model folder",
            )
        turn = [_user(_A), {"role": "assistant", "content": self._content([_text(_B)])}]
        self.end_of_turn = self._find_end_of_turn(turn)
        """Literal of the token that ends an assistant turn; "" when the template writes none."""
        self._image_tokens = self._find_image_tokens()
        probe = self._try([*turn, _user(_C)], generate=True) or ""
        endings = [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id]
        literals = {number: literal for literal, number in self.guard.added.items()}
        structure = {*self.guard.controls_in(probe), *self._image_tokens}
        structure |= {literals[number] for number in flat_ids(endings) if number in literals}
        self.guard.structure(structure)

    @cached_property
    def image_token(self) -> str | None:
        """Literal of the placeholder that stands for one image; None when images cannot be shown."""
        tokens = self._image_tokens
        if len(set(tokens)) <= 1:
            return tokens[0] if tokens else None
        named = self._named_image_token()
        known = [token for token in tokens if token == named]
        known += [token for token in tokens if token in _PLACEHOLDERS]
        return known[0] if known else tokens[len(tokens) // 2]

    @property
    def image_tokens(self) -> tuple[str, ...]:
        """Literals of all tokens that the template writes for an image."""
        return tuple(self._image_tokens)

    def takes_tools(self, marker: str) -> bool:
        """True when the template, given tools, renders their names and `marker`."""
        parameters = {"type": "object", "properties": {_B: {"type": "string"}}, "required": [_B]}
        tool = {"type": "function", "function": {"name": _C, "description": _B, "parameters": parameters}}
        text = self._try([_user(_A)], tools=[tool]) or ""
        answered = [_user(_A), {"role": "assistant", "content": _B}, _tool(_C)]
        return _C in text and marker in text and _C in (self._try(answered, tools=[tool]) or "")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = True
    ) -> str:
        """The messages as guarded text; with `generate`, the header of the next reply stands at the end.

        Assistant messages are given as text; their `tool_calls` are not rendered.

        Raises:
            ModelError: the template refuses the messages, or cannot show their images.
        """
        shaped = [self._shape(message) for message in self._carry(list(messages))]
        try:
            return self._apply(shaped, [self.guard.escape_all(tool) for tool in tools], generate)
        except _template_errors() as error:
            raise ModelError(
                f"the chat template refuses the messages: {error}",
                where=self._where,
                fix="change the environment's messages, or use another model",
            ) from error

    def _shape(self, message: Message) -> Message:
        """A message as templates take it, contents escaped."""
        role, content = message["role"], message.get("content")
        parts: list[dict[str, Any]]
        if isinstance(content, list) and images_of(message):
            if self.image_token is None:
                raise ModelError(
                    "a message holds an image, but the model's chat template cannot show images",
                    where=self._where,
                    fix="use a vision-language model",
                )
            parts = [
                {"type": "image"} if part["type"] == "image" else _text(part["text"]) for part in content
            ]
        else:
            parts = [_text(text_of(message))]
        for part in parts:
            if part["type"] == "text":
                part["text"] = self.guard.escape(part["text"], reply=role == "assistant")
        shaped: Message = {"role": role, "content": self._content(parts)}
        if role == "tool":
            shaped["name"] = self.guard.escape(str(message.get("name") or ""))
            shaped["tool_call_id"] = self.guard.escape(str(message.get("tool_call_id") or ""))
        return shaped

    def _content(self, parts: list[dict[str, Any]]) -> Any:
        """Parts as a string where the template takes strings and there is no image."""
        if self._strings and all(part["type"] == "text" for part in parts):
            return "\n".join(part["text"] for part in parts)
        return parts

    def _carry(self, messages: list[Message]) -> list[Message]:
        """Move what the template cannot show to where it can."""
        if not self._tool_images and any(m["role"] == "tool" and images_of(m) for m in messages):
            messages = _images_after_tools(messages)
        if messages and messages[0]["role"] == "system" and not self._systems:
            head, messages = messages[0], messages[1:]
            if not messages or messages[0]["role"] != "user":
                messages = [_user(""), *messages]
            messages = [join_users([_user(text_of(head)), messages[0]], "\n\n"), *messages[1:]]
        if not self._adjacent_users:
            merged: list[Message] = []
            for message in messages:
                if merged and message["role"] == "user" == merged[-1]["role"]:
                    merged[-1] = join_users([merged[-1], message], "\n")
                else:
                    merged.append(message)
            messages = merged
        return messages

    @cached_property
    def _systems(self) -> bool:
        return _A in (self._try([{"role": "system", "content": self._content([_text(_A)])}, _user(_B)]) or "")

    @cached_property
    def _adjacent_users(self) -> bool:
        return _B in (self._try([_user(_A), _user(_B)]) or "")

    @cached_property
    def _tool_images(self) -> bool:
        if self.image_token is None:
            return False
        content = [_text(_B), {"type": "image"}]
        answered = [_user(_A), {"role": "assistant", "content": self._content([_text(_A)])}]
        text = self._try([*answered, {**_tool(_B), "content": content}]) or ""
        return text.count(self.image_token) == 1 and _B in text

    def _shows(self, content: Any) -> bool:
        text = self._try([{"role": "user", "content": content}]) or ""
        return text.count(_A) == 1 and "'type'" not in text and '"type"' not in text

    def _find_end_of_turn(self, turn: list[Message]) -> str:
        text = self._try([*turn, _user(_C)], generate=True) or self._try(turn) or ""
        if _B not in text:
            raise ModelError(
                "the chat template does not show an assistant message",
                where=self._where,
                fix="repair the template of the model folder",
            )
        behind = text.rsplit(_B, 1)[1].partition(_C)[0]
        controls = self.guard.controls_in(behind)
        # Text that must stand between reply and token is part of the tail, not of the token.
        return controls[0] if controls else ""

    def _find_image_tokens(self) -> list[str]:
        parts = [_text(_A), {"type": "image"}, _text(_B)]
        text = self._try([{"role": "user", "content": parts}]) or ""
        if not self._parts or _A not in text or _B not in text:
            return []
        return self.guard.controls_in(text.split(_A, 1)[1].split(_B, 1)[0])

    def _named_image_token(self) -> str | None:
        """The placeholder that the tokenizer or the model's config.json names."""
        named = getattr(self._tokenizer, "image_token", None)
        if isinstance(named, str):
            return named
        try:
            config = json.loads((Path(self._tokenizer.name_or_path) / "config.json").read_text())
        except (OSError, ValueError):
            return None
        number = config.get("image_token_id", config.get("image_token_index"))
        return next((literal for literal, known in self.guard.added.items() if known == number), None)

    def _try(
        self, messages: list[Message], *, tools: Sequence[Tool] = (), generate: bool = False
    ) -> str | None:
        """The rendered text of probe messages; None when the template refuses them."""
        if self.__dict__.get("_strings") is False:
            messages = [
                {**message, "content": [_text(message["content"])]}
                if isinstance(message["content"], str)
                else message
                for message in messages
            ]
        try:
            return self._apply(messages, tools, generate)
        except _template_errors():
            return None

    def _apply(self, messages: list[Message], tools: Sequence[Tool], generate: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=generate,
            tokenize=False,
            **self._options,
        )


def join_users(messages: Sequence[Message], separator: str) -> Message:
    """User messages as one: texts joined by `separator`, images where they were."""
    if not any(images_of(message) for message in messages):
        return _user(separator.join(text for message in messages if (text := text_of(message))))
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        new = [_text(content)] if isinstance(content, str) else [dict(part) for part in content]
        if parts and new and parts[-1]["type"] == "text" == new[0]["type"]:
            parts[-1] = _text(parts[-1]["text"] + separator + new[0]["text"])
            new = new[1:]
        parts += new
    return {"role": "user", "content": parts}


def flat_ids(values: Sequence[Any]) -> list[int]:
    """Token ids out of ids, lists of ids and None."""
    return [
        int(number)
        for value in values
        if value is not None
        for number in (value if isinstance(value, (list, tuple)) else [value])
    ]


def _images_after_tools(messages: list[Message]) -> list[Message]:
    """Images of each run of tool messages in one user message behind the run."""
    out: list[Message] = []
    held: list[Any] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            held += images_of(message)
            out.append({**message, "content": text_of(message)})
            continue
        if held:
            out.append({"role": "user", "content": [{"type": "image", "image": image} for image in held]})
            held = []
        if message is not None:
            out.append(message)
    return out


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template can raise; jinja2 comes with transformers, so it is imported only here."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text, "name": _A, "tool_call_id": "call_0"}
