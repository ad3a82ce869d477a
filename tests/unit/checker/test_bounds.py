"""A check ends in bounded time whatever the environment does, and refuses what it cannot check."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import tiderl
from tiderl.env.checker import CheckItem, CheckReport, check_environment
from tiderl.env.checker.events import QueueSender, Watcher
from tiderl.errors import ConfigError, UnknownEnvironment

RELEASE = threading.Event()


class Good(tiderl.AgentEnv):
    """Say yes."""

    max_turns = 3
    splits = ("train",)

    def start(self, task: Any) -> str:
        return "Say yes."

    def reply(self, text: str) -> str:
        if text == "yes":
            self.finish(1.0)
        return "noted"

    def oracle(self) -> str:
        return "yes"


class HangsInReset(Good):
    def start(self, task: Any) -> str:
        RELEASE.wait(20.0)
        return "Say yes."


class HangsInSecondStep(Good):
    def reply(self, text: str) -> str:
        if self.turn == 2:
            RELEASE.wait(20.0)
        return super().reply(text)


class HangsInClose(Good):
    def close(self) -> None:
        RELEASE.wait(20.0)


class LeavesFromTool(Good):
    def reply(self, text: str) -> str:
        raise SystemExit(3)


class LeavesThreads(Good):
    def reply(self, text: str) -> str:
        threading.Thread(target=RELEASE.wait, args=(20.0,), name="left-behind", daemon=True).start()
        return super().reply(text)


@pytest.fixture(autouse=True)
def _release() -> Any:
    RELEASE.clear()
    yield
    RELEASE.set()


@pytest.mark.parametrize(
    ("env", "call"),
    [(HangsInReset, "reset(seed=11"), (HangsInSecondStep, "at turn 2 of task 0"), (HangsInClose, "close()")],
)
def test_a_hang_is_a_failing_item_that_names_the_call(env: type[Any], call: str) -> None:
    report = check_environment(env, tasks=1, timeout=0.2, pause=0.0)
    assert report.names("fail") == ["deadlines"]
    assert call in report["deadlines"].detail
    assert "0.2 s" in report["deadlines"].detail
    assert report["deadlines"].fix
    assert "deadlines" in report["remote"].detail


def test_an_environment_that_exits_the_process_is_an_exception() -> None:
    report = check_environment(LeavesFromTool, tasks=1, pause=0.0)
    assert "exceptions" in report.names("fail")
    assert "SystemExit" in report["exceptions"].detail


def test_threads_left_behind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiderl.env.checker.process.GRACE", 0.1)
    report = check_environment(LeavesThreads, tasks=1, pause=0.0)
    assert report.names("fail") == ["close"]
    assert "left-behind" in report["close"].detail


def test_t41_an_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="an instance of Good"):
        check_environment(Good())  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_environment(Good, tasks=0)
    with pytest.raises(ConfigError, match="no environment"):
        check_environment(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another process"):
        check_environment(Good, isolate=True)
    with pytest.raises(UnknownEnvironment):
        check_environment("no/Such-v0")


def test_constructor_arguments_reach_the_environment() -> None:
    report = check_environment(Good, tasks=1, pause=0.0, kwargs={"max_turns": 2})
    assert report.ok, str(report)
    assert "turns: at most 2" in report["start"].detail


def test_items_are_announced_as_they_are_known() -> None:
    seen: list[CheckItem] = []
    report = check_environment(Good, tasks=1, pause=0.0, on_item=seen.append)
    assert [item.name for item in seen] == report.names()
    assert len(set(report.names())) == len(report.items)


def test_a_report_survives_json() -> None:
    items = [
        CheckItem("a", "pass", "fine"),
        CheckItem("b", "fail", "bad", "mend it", 1.5),
        CheckItem("c", "skip"),
    ]
    report = CheckReport("x/Y-v0", items, 2.0)
    data = json.loads(report.dumps())
    assert [CheckItem.from_json(item) for item in data["items"]] == items
    assert data["ok"] is report.ok is False
    assert "fix: mend it" in str(report)
    assert "1 of 3 checks failed" in str(report)
    assert report.names("fail") == ["b"]
    with pytest.raises(KeyError):
        report["d"]


def test_an_empty_report_is_not_ok() -> None:
    assert not CheckReport("x", []).ok
    assert not CheckReport("x", [CheckItem("a", "skip")]).ok


def test_the_watcher_counts_concurrent_calls() -> None:
    sender = QueueSender()
    watcher = Watcher(sender, silence=5.0)
    sender.begin("one", 0.0)
    sender.begin("two", 0.1)
    sender.end()
    hung = watcher.watch()  # one of the two is still open after its deadline
    assert hung is not None
    assert "two did not answer within 0.1 s" in hung.detail
