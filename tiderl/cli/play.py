"""A person in the place of the model: the loop behind `tiderl env play`.

Invariants: whatever is typed becomes an action, a command or a message that says why not, and an empty line
is none of them; the loop ends at the episode's end, at `:quit`, at the end of input, or at an interrupt, and
always returns; pictures that were saved in a temporary folder go with the player.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tiderl.cli.typed import parse
from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.images import encode_png
from tiderl.env.plain import place_of
from tiderl.errors import EnvironmentFault, ResourceError, TideError

INTERRUPTED = 130
HELP = "commands: :help, :oracle (the scripted next action), :text WORDS (never a call), :quit"


def printable(text: str) -> str:
    """Text without what would steer a terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def show_messages(
    messages: Iterable[m.Message],
    say: Callable[[str], Any],
    picture: Callable[[np.ndarray], Any] | None = None,
) -> None:
    """Print messages part by part; `picture` shows an image, else its size is told."""
    for message in messages:
        name = f" {message['name']}" if message.get("name") else ""
        content = message.get("content")
        parts: list[m.Part] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        )
        say(f"[{message['role']}{name}]")
        for part in parts:
            if part["type"] == "text":
                if part["text"]:
                    say(printable(part["text"]))
            elif picture is not None:
                picture(part["image"])
            else:
                height, width = part["image"].shape[:2]
                say(f"(picture, {width} x {height})")
        for call in message.get("tool_calls", ()):
            say(f"-> {call['function']['name']} {printable(call['function']['arguments'])}")


def usage(tool: dict[str, Any]) -> str:
    """One line for a tool: `try_code n=<integer>: Try one code.`"""
    function = tool["function"]
    schema = function.get("parameters", {})
    words = [function["name"]]
    for name, value in schema.get("properties", {}).items():
        kinds = value.get("enum") or [one.get("type", "value") for one in value.get("anyOf", [value])]
        kind = "|".join(map(str, kinds))
        words.append(f"{name}=<{kind}>" if name in schema.get("required", ()) else f"[{name}=<{kind}>]")
    return f"{' '.join(words)}: {function.get('description', '')}".rstrip(": ")


def half_blocks(image: np.ndarray, width: int, height: int = 40) -> Text:
    """A picture as text: each character shows two pixels, one above the other."""
    rows, columns = image.shape[:2]
    scale = max(1.0, columns / width, rows / (2 * height))
    y = (np.arange(max(1, int(rows / scale))) * scale).astype(int)
    x = (np.arange(max(1, int(columns / scale))) * scale).astype(int)
    small = image[y][:, x]
    if len(small) % 2:
        small = np.concatenate([small, np.zeros_like(small[:1])])
    text = Text()
    for top, bottom in zip(small[0::2], small[1::2], strict=True):
        for above, below in zip(top.tolist(), bottom.tolist(), strict=True):
            text.append(
                "▀", Style.parse(f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})")
            )
        text.append("\n")
    text.rstrip()
    return text


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (the terminal is closed) end the block as an exception, so that it tidies up."""

    def leave(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    kept = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, kept, strict=True):
            signal.signal(number, handler)


class Player:
    """One person and one environment.

    Args:
        env: the environment; the caller closes it.
        console: where to print; pictures are drawn when it is a terminal with colours.
        images: folder for pictures as PNG files, made when needed; None is a temporary folder, which is
            made with the first picture and removed when the player is left as a context manager.
    """

    def __init__(self, env: AgentEnv, console: Console, images: Path | None = None) -> None:
        self.env, self.console, self.folder = env, console, images
        self.temporary: Path | None = None
        self.shown = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(Text(text), soft_wrap=True)

    def run(self, env_id: str, seed: int, options: dict[str, Any]) -> int:
        """Play one episode; returns the exit code."""
        try:
            messages, info = self.env.reset(seed=seed, options=options)
            self.say(f"{env_id}, task {info['task']}, seed {seed}, at most {self.env.max_turns} turns")
            self.help()
            show_messages(messages, self.say, self.picture)
            total = 0.0
            while True:
                action = self.ask()
                if action is None:
                    self.say("left before the end")
                    return 0
                messages, reward, terminated, truncated, info = self.env.step(action)
                total += reward
                show_messages(messages, self.say, self.picture)
                self.say(f"turn {info['turn']}, reward {reward:g}")
                if terminated or truncated:
                    self.say(f"the end: {info.get('end', 'unknown')}; reward of the episode {total:g}")
                    return 0
        except KeyboardInterrupt:
            self.say("\nleft before the end")
            return INTERRUPTED

    def ask(self) -> str | m.Message | None:
        """The next action that is typed; None at `:quit` or the end of input."""
        while True:
            line = self.read()
            if line is None or line.strip() == ":quit":
                return None
            command = line.strip()
            try:
                if not command:
                    continue  # a turn is too dear for a slip of the finger; `:text` is an empty reply
                if command == ":help":
                    self.help()
                elif command.split()[0] == ":text":
                    return line.lstrip().removeprefix(":text").removeprefix(" ")
                elif command == ":oracle":
                    action = self.oracle()
                    spoken = action if isinstance(action, dict) else m.assistant(action)
                    show_messages([spoken], self.say)
                    return action
                elif command.startswith(":"):
                    self.say(f"there is no command {command.split()[0]!r}; {HELP}")
                else:
                    return parse(line, self.env.tools, self.env.turn)
            except TideError as error:
                self.say(f"error: {error}")

    def oracle(self) -> str | m.Message:
        """The environment's own next action.

        Raises:
            EnvironmentFault: it has none, or it failed.
        """
        try:
            action: str | m.Message = self.env.oracle()
        except TideError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"oracle raised {type(error).__name__}: {error}", where=place_of(error), fix="repair it"
            ) from error
        return action

    def read(self) -> str | None:
        """One line of input without its end; None when there is no more."""
        if sys.stdin.isatty():
            try:
                return input("> ")
            except EOFError:
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def help(self) -> None:
        """Print the tools and the commands."""
        for tool in self.env.tools:
            self.say(f"  {usage(tool)}")
        if not self.env.tools:
            self.say("  no tools: type a text")
        self.say(HELP)

    def picture(self, image: np.ndarray) -> None:
        """Save a picture; draw it where the terminal can."""
        if self.folder is None:
            self.folder = self.temporary = Path(tempfile.mkdtemp(prefix="tiderl-play-"))
        file = self.folder / f"picture-{self.shown:03d}.png"
        self.shown += 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode_png(image))
        except OSError as error:
            raise ResourceError(
                f"a picture cannot be saved: {error.strerror}",
                where=str(file),
                fix="give a folder that you may write to with --images",
            ) from error
        if self.console.is_terminal and self.console.color_system in ("256", "truecolor"):
            self.console.print(half_blocks(image, self.console.width), soft_wrap=True)
        self.say(f"(picture, {image.shape[1]} x {image.shape[0]}: {file})")
