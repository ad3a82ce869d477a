"""What a person types in `tiderl env play`, and what is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tiderl
from tiderl.cli.play import Player, half_blocks, parse, printable, show_messages, usage
from tiderl.env import messages as m
from tiderl.errors import ConfigError


class Box(tiderl.AgentEnv):
    """Put things into a box."""

    max_turns = 5

    def start(self, task: Any) -> list[Any]:
        return ["An empty box.\x1b[2J", np.zeros((6, 5, 3), np.uint8)]

    @tiderl.tool
    def put(self, what: str, count: int = 1) -> str:
        """Put something in."""
        if what == "lid":
            self.finish(1.0)
        return f"{count} x {what}"

    def oracle(self) -> Any:
        return m.assistant("", [m.tool_call("put", what="lid")])


TOOLS = Box().tools


def arguments(line: str) -> dict[str, Any]:
    action = parse(line, TOOLS, 3)
    assert isinstance(action, dict)
    (call,) = action["tool_calls"]
    assert call["id"] == "call_3"
    assert call["function"]["name"] == "put"
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("put what=pen count=2", {"what": "pen", "count": 2}),
        ("put pen 2", {"what": "pen", "count": 2}),
        ("put count=2 pen", {"what": "pen", "count": 2}),
        ("put 'a red pen'", {"what": "a red pen"}),
        ('put what="a = b"', {"what": "a = b"}),
        ("put 12", {"what": "12"}),
        ("put count=many", {"count": "many"}),
        ("put", {}),
        ("put no=such", {"no": "such"}),
        ("put what=", {"what": ""}),
    ],
)
def test_a_line_that_begins_with_a_tool_is_a_call(line: str, expected: dict[str, Any]) -> None:
    assert arguments(line) == expected


@pytest.mark.parametrize("line", ["", "hello", "please put it", "puts pen", "it's"])
def test_any_other_line_is_a_text(line: str) -> None:
    assert parse(line, TOOLS, 0) == line


@pytest.mark.parametrize("line", ["put 'pen", "put a 1 b"])
def test_a_line_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        parse(line, TOOLS, 0)


def test_usage_names_parameters_and_types() -> None:
    assert usage(TOOLS[0]) == "put what=<string> [count=<integer>]: Put something in."


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in printable("a\x1b[2Jb\x07")
    assert printable("ä\n\t漢") == "ä\n\t漢"


def test_messages_are_shown_part_by_part() -> None:
    lines: list[str] = []
    shown = [m.user("look", np.zeros((4, 9, 3), np.uint8)), m.assistant("", [m.tool_call("put", what="x")])]
    show_messages(shown, lines.append)
    assert lines == ["[user]", "look", "(picture, 9 x 4)", "[assistant]", '-> put {"what": "x"}']


@pytest.mark.parametrize(("shape", "width"), [((1, 1), 10), ((7, 5), 80), ((300, 200), 40), ((20, 900), 30)])
def test_half_blocks_fit_and_hold_two_pixels_each(shape: tuple[int, int], width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    text = half_blocks(picture, width)
    lines = text.plain.split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) <= 40
    red, green, blue = picture[0, 0].tolist()
    assert f"rgb({red},{green},{blue})" in str(text.spans[0].style)


def play(lines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **terminal: Any) -> tuple[int, str]:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    env = Box()
    code = Player(env, Console(file=out, width=60, **terminal), tmp_path / "shots").run("x/Box-v0", 0, {})
    return code, out.getvalue()


def test_an_episode_is_played_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = play("hello\nput pen\n:oracle\n", monkeypatch, tmp_path)
    assert code == 0
    assert "1 x pen" in text
    assert "the end: success; reward of the episode 1" in text
    assert "\x1b" not in text
    assert len(list((tmp_path / "shots").iterdir())) == 1


@pytest.mark.parametrize("lines", ["", ":quit\n", "put pen\n", ":nonsense\n:help\nput 'x\n"])
def test_leaving_early_is_clean(lines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = play(lines, monkeypatch, tmp_path)
    assert code == 0
    assert text.rstrip().endswith("left before the end")


def test_an_interrupt_is_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(self: Player) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Player, "read", interrupt)
    code, text = play("", monkeypatch, tmp_path)
    assert code == 130
    assert text.rstrip().endswith("left before the end")


def test_a_capable_terminal_gets_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, text = play(":quit\n", monkeypatch, tmp_path, force_terminal=True, color_system="truecolor")
    assert text.count("▀") == 15
