"""Stories of tasks, told from logs that the real task table and teller wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tiderl.errors import TideError
from tiderl.rollout.table import TaskTable
from tiderl.scheduling.views import KV, State, Task
from tiderl.telemetry.attempts import RolloutStory, TaskSummary, decision_log_of
from tiderl.telemetry.decisions import DecisionLog, read_decisions
from tiderl.telemetry.explain import Story, explain


class Script:
    """A rollout whose moves a test dictates; the log is written as the conductor writes it."""

    def __init__(self, path: Path, *, keep_until: float | None = None) -> None:
        self.log = DecisionLog(path, keep_until=keep_until)
        self.table = TaskTable(self._moved)
        self.at = 0.0

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def _moved(self, before: Task | None, after: Task, at: float, cause: str) -> None:
        self.log.transition(
            at,
            after.key,
            "" if before is None else str(before.state),
            str(after.state),
            kv=str(after.kv),
            engine=after.engine,
            context=after.context,
            cause=cause,
            wait=after.wait,
        )

    def queue(self, key: str) -> None:
        self.table.add(Task(key, (0, 0), "demo/Env", State.QUEUED, since=self.at, queued=self.at))

    def admit(self, key: str, after: float = 0.0, reset: float = 0.0) -> None:
        self.at += after
        inputs = {"promised": 24576, "capacity": 32768, "running": 3, "queued": 12, "waited": after}
        self.log.decision(self.at, "admit", key, engine="engine-0", why="its group begins", inputs=inputs)
        self.table.move(key, State.ADMITTED, self.at, engine="engine-0")
        self.at += reset
        self.table.move(key, State.READY, self.at)

    def turn(
        self,
        key: str,
        *,
        engine: str = "engine-0",
        new: int = 40,
        again: int = 0,
        cause: str = "",
        predicted: float | None = None,
        seconds: float = 1.0,
    ) -> None:
        now = self.table[key]
        inputs = {"context": now.context, "new": new}
        self.log.decision(self.at, "resume", key, engine=engine, predicted=predicted, inputs=inputs)
        self.table.move(key, State.RUNNING, self.at, kv=KV.HELD, engine=engine)
        self.at += seconds
        prompt = now.context + new
        self.log.turn(
            self.at,
            key,
            engine=engine,
            prompt_tokens=prompt,
            cached_tokens=prompt - new - again,
            new_tokens=new,
            reprefilled=again,
            sampled=10,
            cause=cause,
        )
        changes: dict[str, Any] = {"context": prompt + 10, "turn": now.turn + 1, "wait": "demo/Env/"}
        self.table.move(key, State.PAUSED, self.at, cause, kv=KV.HELD, **changes)
        self.table.change(key, self.at, wait="demo/Env/search")

    def answer(self, key: str, seconds: float) -> None:
        self.at += seconds
        self.table.move(key, State.READY, self.at)

    def release(self, key: str, predicted: float) -> None:
        self.log.decision(self.at, "release", key, why="the queue's head is blocked", predicted=predicted)
        self.table.change(key, self.at, "released", kv=KV.CACHED)

    def end(self, key: str, seconds: float, state: State = State.DONE, cause: str = "success") -> None:
        self.at += seconds
        self.table.move(key, state, self.at, cause)


def story(path: Path, task: str) -> Story:
    (found,) = explain(RolloutStory(read_decisions(path)), task)
    return found


def text(found: Story) -> str:
    return "\n".join(f"{line.after:.2f} {line.text}" for line in found.lines)


def summary(path: Path, task: str) -> TaskSummary:
    return next(s for s in RolloutStory(read_decisions(path)).summaries() if s.task == task)


def test_a_whole_life_is_told_in_order(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with Script(path) as run:
        run.at = 5.0
        run.queue("g0m0")
        run.log.note(6.0, "weights of version 1, mode keep")  # it had no KV yet: of no interest
        run.admit("g0m0", after=4.0, reset=0.5)
        run.turn("g0m0", new=200)
        run.release("g0m0", predicted=4.0)
        run.log.note(run.at, "weights of version 2, mode keep")
        run.answer("g0m0", 1.0)
        run.turn("g0m0", again=150, cause="mispredicted", predicted=0)
        run.end("g0m0", 0.5)
    assert text(story(path, "g0m0")) == "\n".join(
        [
            "0.00 queued",
            "4.00 admitted to engine-0 after 4.00 s in the queue; why: its group begins; then 24,576 of its "
            "32,768 KV tokens were promised, 3 turns ran on it, 12 tasks were queued",
            "4.50 its environment was reset after 0.50 s",
            "4.50 turn 1 begins on engine-0 after 0.00 s of waiting for room: context 0 + 200 new tokens",
            "5.50 turn 1 ended after 1.00 s: 200 new tokens read, 10 sampled; context 210",
            "5.50 its KV of 210 tokens was let go after 0.00 s, since it was not expected back before 4.00 s "
            "more; why: the queue's head is blocked",
            "5.50 meanwhile (environment): weights of version 2, mode keep",
            "6.50 the environment answered (search) after 1.00 s",
            "6.50 mispredicted: its KV was let go, and it came back 1.00 s later, sooner than 4.00 s",
            "6.50 turn 2 begins on engine-0 after 0.00 s of waiting for room: context 210 + 40 new tokens; "
            "its KV had been let go, the prefix cache may still have it",
            "7.50 turn 2 ended after 1.00 s: 40 new tokens read, 10 sampled, 150 computed again (its KV had "
            "been let go and it came back sooner than predicted), 0 were predicted to be; context 260",
            "8.00 the environment answered (search) after 0.50 s",
            "8.00 done: success, after 2 turns, 8.00 s after it was queued",
            "8.00 in all 8.00 s: 50% queued, 6% reset, 25% running, 19% environment; "
            "150 tokens computed again (mispredicted 150)",
        ]
    )
    seen = summary(path, "g0m0")
    assert (seen.state, seen.reason, seen.turns, seen.sampled) == ("done", "success", 2, 20)
    assert (seen.released, seen.mispredicted, seen.reprefilled_by_cause) == (1, 1, {"mispredicted": 150})
    assert seen.waits == {"queued": 4.0, "reset": 0.5, "ready": 0.0, "running": 2.0, "environment": 1.5}
    assert sum(seen.waits.values()) == seen.seconds == 8.0


def test_letting_go_was_right_when_it_came_back_late(tmp_path: Path) -> None:
    with Script(tmp_path / "d.jsonl") as run:
        run.queue("a")
        run.admit("a")
        run.turn("a")
        run.release("a", predicted=4.0)
        run.answer("a", 5.0)
    found = story(tmp_path / "d.jsonl", "a")
    assert "it was right to let its KV go: it came back 5.00 s later, 4.00 s or more were predicted" in text(
        found
    )
    assert found.summary.mispredicted == 0


def test_holding_is_judged_by_what_was_usual_until_then(tmp_path: Path) -> None:
    with Script(tmp_path / "d.jsonl") as run:
        run.queue("a")
        run.admit("a")
        for seconds in (1.0, 1.0, 2.0, 1.0, 1.0, 1.5, 8.0, 1.0):
            run.turn("a")
            run.answer("a", seconds)
    lines = [line.text for line in story(tmp_path / "d.jsonl", "a").lines]
    answers = [line for line in lines if "answered" in line]
    assert answers[4] == "the environment answered (search) after 1.00 s", (
        "five are needed to say what is usual"
    )
    assert answers[5] == "the environment answered (search) after 1.50 s; usual until then were 1.00 s"
    verdicts = [line for line in lines if "hold" in line or "held, and" in line]
    assert verdicts == [
        "it was right to hold its KV",
        "mispredicted: its KV was held, and it took much longer than 1.00 s: 2,800 token-seconds of KV lay "
        "idle",
        "it was right to hold its KV",
    ]


def test_moves_and_deaths_are_told(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with Script(path) as run:
        run.queue("a")
        run.admit("a")
        run.turn("a")
        run.table.change("a", run.at, "moved", kv=KV.COLD, engine="")
        run.answer("a", 1.0)
        run.turn("a", engine="engine-1", again=50, cause="moved", predicted=50)
        run.answer("a", 1.0)
        run.table.move("a", State.RUNNING, run.at, kv=KV.HELD, engine="engine-1")
        run.at += 1
        run.log.note(run.at, "engine engine-1 died", error="signal 9")
        run.table.move("a", State.READY, run.at, "engine_died", kv=KV.COLD, engine="")
        run.turn("a", engine="engine-0", again=100, cause="engine_died")
        run.end("a", 1.0, State.FAILED, "infrastructure")
    told = text(story(path, "a"))
    for part in (
        "its KV was given up: it goes on on another engine",
        "turn 2 begins moved from engine-0 to engine-1",
        "its KV is gone, all is computed again",
        "50 computed again (it went to another engine); context",
        "meanwhile (running): engine engine-1 died (error signal 9)",
        "after 1.00 s its engine died and its KV with it; the turn is sent again",
        "100 computed again (its engine had died)",
        "failed: infrastructure, after 3 turns",
    ):
        assert part in told, told
    seen = summary(path, "a")
    assert seen.engines == ["engine-0", "engine-1"]
    assert (seen.state, seen.turns, seen.reprefilled) == ("failed", 3, 150)


def test_a_resumed_run_has_two_attempts(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with Script(path) as run:
        run.queue("a")
        run.admit("a", after=1.0)
        run.turn("a")
    with Script(path, keep_until=math.inf) as run:
        run.queue("a")
        run.admit("a", after=3.0)
    first, second = explain(RolloutStory(read_decisions(path)), "a")
    assert "the run was stopped while it was paused" in text(first)
    assert "admitted to engine-0 after 3.00 s" in text(second)
    assert "ready since 0.00 s, when the log ends" in text(second)
    assert (first.summary.state, second.summary.state) == ("interrupted", "ready")
    assert summary(path, "a").attempts == 2


def test_a_log_without_turns_and_predictions_still_tells(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "d.jsonl") as log:
        for at, before, after in (
            (0.0, "", "queued"),
            (1.0, "queued", "admitted"),
            (2.0, "admitted", "ready"),
            (3.0, "ready", "running"),
            (4.0, "running", "paused"),
            (5.0, "paused", "cancelled"),
        ):
            log.transition(at, "a", before, after, kv="held", engine="e", context=7)
    told = text(story(tmp_path / "d.jsonl", "a"))
    assert "4.00 turn 1 ended after 1.00 s; context 7" in told
    assert "5.00 cancelled, after 1 turn, 5.00 s after it was queued" in told


def test_tasks_are_found_by_an_unambiguous_part(tmp_path: Path) -> None:
    with Script(tmp_path / "d.jsonl") as run:
        for key in ("g000012m03", "g000012m03r1", "g000012m04", "g000007m00"):
            run.queue(key)
    log = RolloutStory(read_decisions(tmp_path / "d.jsonl"))
    assert log.find("g000012m03") == "g000012m03", "a whole name wins"
    assert log.find("7m0") == "g000007m00"
    with pytest.raises(
        TideError, match=r"3 tasks match '12m': choose one of g000012m03, g000012m03r1, g0000"
    ):
        log.find("12m")
    with pytest.raises(TideError, match=r"no task 'g000013m04' in this run: did you mean g000012m04 or"):
        log.find("g000013m04")
    with pytest.raises(TideError, match="`tiderl rollout tasks RUN` lists them"):
        log.find("zzz")


def test_runs_are_found_by_folder_name_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "quickstart" / "decisions.jsonl"
    path.parent.mkdir(parents=True)
    (tmp_path / "runs" / "old").mkdir()
    path.write_text("")
    for run in (path, path.parent, "runs/quickstart", "quickstart"):
        assert decision_log_of(run).samefile(path)
    for wrong in ("quickstrat", "runs/quickstrat"):
        with pytest.raises(TideError, match=rf"no run '{wrong}': did you mean runs/quickstart\?"):
            decision_log_of(wrong)
    with pytest.raises(TideError, match="run 'old' holds no decisions.jsonl"):
        decision_log_of("old")
