"""An environment whose own code raises: which exception, where, and what to do, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiderl.cli.main import main

SOURCE = '''
import json
import os
import sys
import tiderl
from tiderl import messages as m


class Good(tiderl.AgentEnv):
    """Say yes."""

    max_turns = 3

    def tasks(self, split):
        return [{"id": f"{split}-{n}"} for n in range(16)]

    def start(self, task):
        return "Say yes."

    def reply(self, text):
        if text == "yes":
            self.finish(1.0)
        return "noted"

    def oracle(self):
        return "yes"


@tiderl.register("demo/Start-v0")
class Start(Good):
    def start(self, task):
        return task["prompt"]  # here


@tiderl.register("demo/Reply-v0")
class Reply(Good):
    def reply(self, text):
        return self.nothing[text]  # here


@tiderl.register("demo/Library-v0")
class Library(Good):
    def reply(self, text):
        return json.loads(text)  # here


@tiderl.register("demo/Score-v0")
class Score(Good):
    reply = tiderl.AgentEnv.reply

    def score(self, text):
        return len(text) / 0  # here


@tiderl.register("demo/Tool-v0")
class Tool(Good):
    @tiderl.tool
    def say(self, word: str) -> str:
        """Say a word."""
        raise RuntimeError(word)  # here

    def oracle(self):
        return m.assistant("", [m.tool_call("say", word="yes")])


@tiderl.register("demo/File-v0")
class File(Good):
    def start(self, task):
        return open("/no/such/file").read()  # here


@tiderl.register("demo/Leave-v0")
class Leave(Good):
    def reply(self, text):
        sys.exit(3)  # here


@tiderl.register("demo/Plain-v0")
class Plain(Good):
    def step(self, action):
        raise ValueError("no step")  # here


@tiderl.register("demo/Reset-v0")
class Reset(Good):
    def reset(self, *, seed=None, options=None):
        raise ValueError("no reset")  # here


@tiderl.register("demo/Oracle-v0")
class Oracle(Good):
    def oracle(self):
        return {}["next"]  # here


@tiderl.register("demo/Reward-v0")
class Reward(Good):
    def reply(self, text):
        self.finish(float("nan"))


@tiderl.register("demo/Init-v0")
class Init(Good):
    def __init__(self):
        raise ValueError("no init")  # here


@tiderl.register("demo/Tasks-v0")
class Tasks(Good):
    def tasks(self, split):
        return {}["tasks"]  # here


@tiderl.register("demo/Some-v0")
class Some(Good):
    def start(self, task):
        if task["id"].endswith("3"):
            raise KeyError("three")  # here
        return "Say yes."


@tiderl.register("demo/Dead-v0")
class Dead(Good):
    def start(self, task):
        os._exit(9)
'''

RAISES = [
    ("Start", "start of Start raised KeyError: 'prompt'"),
    ("Reply", "reply of Reply raised AttributeError: 'Reply' object has no attribute 'nothing'"),
    ("Library", "reply of Library raised JSONDecodeError: Expecting value"),
    ("Score", "score of Score raised ZeroDivisionError"),
    ("Tool", "RuntimeError: yes"),
    ("File", "start of File raised FileNotFoundError"),
    ("Leave", "reply of Leave raised SystemExit: 3"),
    ("Plain", "step of Plain raised ValueError: no step"),
    ("Reset", "reset of Reset raised ValueError: no reset"),
    ("Oracle", "KeyError: 'next'"),
    ("Reward", "nan"),
]
AT_ONCE = [("Init", "ValueError: no init"), ("Tasks", "KeyError: 'tasks'")]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source in a file of the current folder, with a name of its own, for it is imported here too."""
    name = "raising_" + "".join(char for char in tmp_path.name if char.isalnum())
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("demo/", f"{name}/"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / f"{name}.py"


def name_of(file: Path, env: str) -> str:
    return f"{file.stem}:{file.stem}/{env}-v0"


def evaluate(
    file: Path, env: str, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str, list[str]]:
    with pytest.raises(SystemExit) as left:
        main(["eval", "--env", name_of(file, env), "--policy", "oracle", "--workers", "1", *more])
    said = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err.splitlines()


def place(file: Path, env: str) -> str:
    """`file:line in` of the line marked `# here` in the class."""
    lines = file.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"class {env}("))
    number = next(number for number, line in enumerate(lines[begin:], begin + 1) if line.endswith("# here"))
    return f"{file}:{number} in "


@pytest.mark.parametrize(("env", "text"), RAISES)
@pytest.mark.parametrize("episodes", [3, 60])
def test_code_that_always_raises_is_one_sentence_with_its_place(
    file: Path, capsys: pytest.CaptureFixture[str], env: str, text: str, episodes: int
) -> None:
    code, out, errors = evaluate(file, env, capsys, "-n", str(episodes))
    assert code == 2
    last = errors[-1]
    assert last.startswith(f"error: the code of {name_of(file, env)} raised in ")
    assert text in last
    assert env == "Reward" or place(file, env) in last
    assert last.endswith(f"`tiderl env check {name_of(file, env)}` shows more.")
    assert not any("again" in line for line in errors)
    assert sum(text in line for line in errors) == 1
    assert out == "" or out.startswith(f"success n/a (0 valid of {episodes})")


@pytest.mark.parametrize(("env", "text"), AT_ONCE)
def test_code_that_raises_before_any_episode(
    file: Path, capsys: pytest.CaptureFixture[str], env: str, text: str
) -> None:
    code, out, errors = evaluate(file, env, capsys, "-n", "3")
    assert (code, out) == (2, "")
    assert errors[-1].startswith("error: ")
    assert text in errors[-1]
    assert place(file, env) in errors[-1]
    assert not (file.parent / "evals").exists()


def test_code_that_raises_now_and_then_is_to_be_mended_and_run_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, errors = evaluate(file, "Some", capsys, "-n", "16", "--split", "train")
    assert code == 0
    assert "2 invalid, not counted" in out
    assert any(line.startswith("2 invalid: start of Some raised KeyError: 'three' (") for line in errors)
    assert any("code raised in 2 of them: mend it" in line and "then run the same" in line for line in errors)


def test_a_dead_worker_is_no_fault_of_the_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = evaluate(file, "Dead", capsys, "-n", "2")
    assert code == 1
    assert "run the same command again to repeat the invalid episodes" in errors
    assert not any("raised" in line for line in errors)
    assert any(line.startswith("no episode was valid: `tiderl env check") for line in errors)


def test_a_program_reads_the_summary_and_one_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, errors = evaluate(file, "Start", capsys, "-n", "2", "--json")
    assert code == 2
    assert json.loads(out)["valid"] == 0
    assert len(errors) == 1
