"""The limits of an episode, and how an observation is cut to fit them.

Invariant: cutting never leaves an image whose text was cut away before it, never leaves a tool call
without its answer, and always says in the observation how much is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiderl.env.messages import Message, Part, copy_message
from tiderl.errors import EnvironmentFault

NAMES = (
    "max_turns",
    "max_total_tokens",
    "step_timeout",
    "reset_timeout",
    "episode_timeout",
    "max_observation_chars",
    "max_images",
    "max_invalid_actions",
)


@dataclass(frozen=True)
class Limits:
    """What an environment allows in one episode; times in seconds, `None` is unlimited.

    `max_turns` and `max_invalid_actions` are enforced by `AgentEnv.step`, the sizes by `AgentEnv`
    when it returns an observation, the times and `max_total_tokens` by whoever drives the episode.
    """

    max_turns: int = 16
    max_total_tokens: int | None = None
    step_timeout: float = 30.0
    reset_timeout: float = 60.0
    episode_timeout: float = 600.0
    max_observation_chars: int = 20_000
    max_images: int = 64
    max_invalid_actions: int = 3


def limits_of(env: Any) -> Limits:
    """The limits of an `AgentEnv` instance or class; raises EnvironmentFault where one is no such number."""
    for name in NAMES:
        value, whole = getattr(env, name), not name.endswith("_timeout")
        if value is None and name == "max_total_tokens":
            continue
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or value < 0 or (value == 0 and name != "max_images"):
            kind = getattr(env, "__name__", type(env).__name__)
            raise EnvironmentFault(
                f"{name} of {kind} is {value!r}",
                fix=f"give {'a whole number' if whole else 'seconds'} above 0",
            )
    return Limits(**{name: getattr(env, name) for name in NAMES})


def cut_text(text: str, room: int) -> str:
    """The first `room` characters of `text`, with a marker when something was cut."""
    if len(text) <= room:
        return text
    return f"{text[: max(0, room)]}\n[{len(text) - max(0, room)} characters cut]"


def cut_message(message: Message, room: int, images: int) -> tuple[Message, int, int]:
    """A copy of `message` within `room` characters and `images` images, and what is left of both.

    After the first cut of a text part, all that follows in the message is dropped, images too, so a
    picture never outlives the text that explained it. An image beyond the limit becomes a marker.
    """
    message = copy_message(message)
    content = message.get("content")
    if content is None:
        return message, room, images
    if isinstance(content, str):
        message["content"] = cut_text(content, room)
        return message, max(0, room - len(content)), images
    parts: list[Part] = []
    for position, part in enumerate(content):
        if part.get("type") == "text":
            cut = len(part["text"]) > room
            text = cut_text(part["text"], room)
            room = max(0, room - len(part["text"]))
            if cut:
                dropped = sum(rest.get("type") == "image" for rest in content[position + 1 :])
                if dropped:
                    text += f"\n[{dropped} images left out]"
                parts.append({"type": "text", "text": text})
                break
            parts.append({"type": "text", "text": text})
        elif images > 0:
            images -= 1
            parts.append(part)
        else:
            parts.append({"type": "text", "text": "[image left out: the episode's limit is reached]"})
    message["content"] = parts
    return message, room, images


def cut_observation(
    messages: list[Message], max_chars: int, images_left: int
) -> tuple[tuple[Message, ...], int]:
    """Copies of the messages that together fit `max_chars` and `images_left`; and the images left."""
    room, out = max_chars, []
    for message in messages:
        message, room, images_left = cut_message(message, room, images_left)
        out.append(message)
    return tuple(out), images_left
