"""What a person types in `tiderl env play`, and what is shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tiderl
from tiderl.cli.play import Player, half_blocks, printable, show_messages, usage
from tiderl.env import messages as m
from tiderl.errors import EnvironmentFault


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


class Bare(Box):
    """Its oracle fails in the author's code."""

    max_turns = 3

    def start(self, task: Any) -> list[Any]:
        return ["An empty box."]

    def oracle(self) -> Any:
        return vars(self)["next"]


def play(
    lines: str, monkeypatch: pytest.MonkeyPatch, shots: Path | None, env: type[Any] = Box, **terminal: Any
) -> tuple[int, str]:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with Player(env(), Console(file=out, width=60, **terminal), shots) as player:
        code = player.run("x/Box-v0", 0, {})
    return code, out.getvalue()


def test_an_episode_is_played_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = play("hello\nput pen\n:oracle\n", monkeypatch, tmp_path / "shots")
    assert code == 0
    assert "1 x pen" in text
    assert "the end: success; reward of the episode 1" in text
    assert "\x1b" not in text
    assert len(list((tmp_path / "shots").iterdir())) == 1


@pytest.mark.parametrize("lines", ["", ":quit\n", "put pen\n", ":nonsense\n:help\nput 'x\n"])
def test_leaving_early_is_clean(lines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = play(lines, monkeypatch, tmp_path / "shots")
    assert code == 0
    assert text.rstrip().endswith("left before the end")


@pytest.mark.parametrize("empty", ["\n", "   \n", "\t\n", "\r\n", "\n" * 20])
def test_an_empty_line_costs_no_turn(empty: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, text = play(f"{empty}put pen\n{empty}put cap\n{empty}", monkeypatch, None, Bare)
    assert "turn 1, reward 0" in text
    assert "turn 2, reward 0" in text
    assert "turn 3" not in text


@pytest.mark.parametrize(
    ("line", "reply"), [(":text", ""), (":text put pen", "put pen"), (":text  a ", " a ")]
)
def test_a_reply_that_is_no_call_can_be_typed(
    line: str, reply: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def step(self: Bare, action: Any) -> Any:
        seen.append(action)
        return (), 0.0, True, False, {"turn": 1}

    monkeypatch.setattr(Bare, "step", step)
    play(f"{line}\n", monkeypatch, None, Bare)
    assert seen == [reply]


def test_an_oracle_that_fails_is_told_and_the_episode_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = play(":oracle\nput pen\n", monkeypatch, None, Bare)
    assert "error: oracle raised KeyError: 'next' (" in text
    assert "1 x pen" in text


def no_folder(root: Path) -> bool:
    return list(root.glob("tiderl-play-*")) == []


@pytest.mark.parametrize("lines", ["", ":quit\n", "put lid\n"])
def test_the_folder_of_pictures_goes_with_the_end(
    lines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, text = play(lines, monkeypatch, None)
    assert str(tmp_path / "tiderl-play-") in text.replace("\n", "")
    assert no_folder(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EnvironmentFault("it broke"), SystemExit(143)])
def test_the_folder_of_pictures_goes_with_an_interrupt_or_a_fault(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(self: Any, *_: Any) -> Any:
        assert not no_folder(tmp_path)
        raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Box, "step", stop)
    if isinstance(error, KeyboardInterrupt):
        assert play("put pen\n", monkeypatch, None)[0] == 130
    else:
        with pytest.raises(type(error)):
            play("put pen\n", monkeypatch, None)
    assert no_folder(tmp_path)


def test_an_interrupt_is_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(self: Player) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Player, "read", interrupt)
    code, text = play("", monkeypatch, tmp_path / "shots")
    assert code == 130
    assert text.rstrip().endswith("left before the end")


def test_a_capable_terminal_gets_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, text = play(":quit\n", monkeypatch, tmp_path / "shots", force_terminal=True, color_system="truecolor")
    assert text.count("▀") == 15
