"""What goes wrong in and around workers: each fault is typed, quick, and costs no capacity."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiderl.env import messages as m
from tiderl.errors import EnvironmentFault, InfrastructureError, StepTimeout, TideError, WorkerDied
from tiderl.hub.local import LocalHub
from tiderl.hub.process import WorkerProcess


async def settled(hub: LocalHub, workers: int, seconds: float = 10.0) -> bool:
    """Whether all workers are up and free within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if [(w.ready, w.sessions) for w in hub.workers] == [(True, 0)] * workers:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_t01_kill_9_of_all_workers_during_a_long_step() -> None:
    async with LocalHub(2) as hub:
        async with hub.session("case/Act-v0", step_timeout=600.0) as env:
            await env.reset(seed=0)
            step = asyncio.create_task(env.step("sleep 600"))
            await asyncio.sleep(0.3)
            began = time.monotonic()
            for worker in hub.workers:
                os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await step
            assert time.monotonic() - began < 5.0
        while hub.replaced < 2 and time.monotonic() - began < 5.0:  # the other one's end may be seen later
            await asyncio.sleep(0.01)
        async with hub.session("case/Act-v0") as env:
            await env.reset(seed=0)
            await env.step("x")
        assert time.monotonic() - began < 10.0
        assert await settled(hub, 2)
        assert hub.replaced == 2


async def test_t01_kill_9_of_the_serving_process_alone(gone: Callable[[int, float], bool]) -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        serving = int(m.text_of((await env.step("pid"))[0][0]))
        first = hub.workers[0].pid
        assert serving != first
        step = asyncio.create_task(env.step("sleep 15"))
        await asyncio.sleep(0.2)
        os.kill(serving, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            async with asyncio.timeout(3):
                await step
        assert gone(first, 3.0)
        assert await settled(hub, 1)


async def test_t01_fifty_calls_in_flight_all_end() -> None:
    async with LocalHub(2) as hub:
        victim = hub.workers[0].pid
        outcomes: list[type[BaseException] | None] = []

        async def one() -> None:
            async with hub.session("case/Act-v0") as env:
                try:
                    await env.reset(seed=0)
                    await env.step("sleep 2")
                    outcomes.append(None)
                except TideError as error:
                    outcomes.append(type(error))

        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(one())
            await asyncio.sleep(1.0)
            os.kill(victim, signal.SIGKILL)
        assert len(outcomes) == 50
        assert set(outcomes) == {None, WorkerDied}
        assert 20 <= outcomes.count(WorkerDied) <= 30
        assert await settled(hub, 2)


MODULE = """
import os, sys
import tiderl
if os.environ.get("CASE_IN_WORKER"):
    print("looking for the key", flush=True)
    {statement}

@tiderl.register("case/Key{number}-v0")
class Key(tiderl.AgentEnv):
    def reply(self, text):
        return text
"""


@pytest.mark.parametrize(
    ("number", "statement", "kind", "text"),
    [
        (1, 'raise SystemExit("no key")', EnvironmentFault, "no key"),
        (2, "os._exit(7)", WorkerDied, "exited with code 7"),
        (3, 'raise RuntimeError("no key")', EnvironmentFault, "RuntimeError: no key"),
    ],
)
async def test_t02_a_module_that_ends_its_worker_at_import(
    number: int,
    statement: str,
    kind: type[TideError],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"case_key_{number}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(statement=statement, number=number))
    monkeypatch.syspath_prepend(tmp_path)
    __import__(name)
    async with LocalHub(1, environ={"CASE_IN_WORKER": "1"}) as hub:
        began = time.monotonic()
        with pytest.raises(kind, match=text) as caught:
            async with hub.session(f"case/Key{number}-v0"):
                pass
        assert time.monotonic() - began < 3.0
        if kind is WorkerDied:
            assert "looking for the key" in str(caught.value)
        assert await settled(hub, 1)


async def test_t02_an_interpreter_without_tiderl(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho No module named tiderl >&2\nexit 3\n")
    script.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)exited with code 3.*No module named tiderl"):
        async with LocalHub(2, python=script):
            pass
    assert time.monotonic() - began < 3.0
    with pytest.raises(TideError, match="nowhere"):
        async with LocalHub(1, python=tmp_path / "nowhere"):
            pass


async def test_t11_an_error_in_a_worker_keeps_its_traceback() -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        with pytest.raises(EnvironmentFault, match="a bug of the author") as caught:
            await env.step("fault")
        assert any("cases.py" in note and "ValueError" in note for note in caught.value.__notes__)
        with pytest.raises(InfrastructureError, match="has ended"):
            await env.step("x")


async def test_t20_a_step_past_its_limit(gone: Callable[[int, float], bool]) -> None:
    async with LocalHub(2) as hub:
        async with hub.session("case/Act-v0") as env:
            await env.reset(seed=0)
            serving = int(m.text_of((await env.step("pid"))[0][0]))
            began = time.monotonic()
            with pytest.raises(StepTimeout, match=r"limit of 0\.5 s"):
                await env.step("sleep 4", timeout=0.5)
            assert 0.5 <= time.monotonic() - began < 1.0
            assert gone(serving, 2.0)
            with pytest.raises(InfrastructureError, match="has ended"):
                await env.reset(seed=0)
        assert await settled(hub, 2)
        assert hub.replaced == 1


async def test_t20_the_environments_own_limit_holds_in_c_code_too(gone: Callable[[int, float], bool]) -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0", step_timeout=0.6) as env:
        await env.reset(seed=0)
        began = time.monotonic()
        with pytest.raises(StepTimeout, match=r"0\.6 s"):
            await env.step("lock 5", timeout=99.0)
        assert 0.6 <= time.monotonic() - began < 1.1


async def test_t20_a_stopped_worker_is_noticed_by_the_client(gone: Callable[[int, float], bool]) -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        serving = int(m.text_of((await env.step("pid"))[0][0]))
        for pid in (hub.workers[0].pid, serving):
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StepTimeout):
            await env.step("x", timeout=0.3)
        assert time.monotonic() - began < 0.8
        assert gone(serving, 2.0)
        assert await settled(hub, 1)


async def test_t20_neighbours_of_a_late_step_die_typed_and_other_workers_live() -> None:
    async with LocalHub(2, sessions_per_process=2) as hub:

        async def one(action: str, limit: float) -> str:
            async with hub.session("case/Act-v0", step_timeout=limit) as env:
                await env.reset(seed=0)
                await ready.wait()
                try:
                    await env.step(action)
                except TideError as error:
                    return type(error).__name__
                return "done"

        ready = asyncio.Barrier(4)
        ends = await asyncio.gather(one("sleep 9", 0.5), *(one("sleep 2", 20.0) for _ in range(3)))
        assert ends[0] == "StepTimeout"
        assert sorted(ends[1:]) == ["WorkerDied", "done", "done"]


@pytest.mark.parametrize("how", ["late", "kill", "die", "close"])
async def test_t29_processes_of_an_environment_end_with_its_worker(
    how: str, gone: Callable[[int, float], bool]
) -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        child = int(m.text_of((await env.step("spawn"))[0][0]))
        if how == "late":
            with pytest.raises(StepTimeout):
                await env.step("sleep 9", timeout=0.2)
        elif how == "kill":
            os.kill(hub.workers[0].pid, signal.SIGKILL)
        elif how == "die":
            with pytest.raises(WorkerDied):
                await env.step("die 3")
        else:
            await hub.close()
        assert gone(child, 2.0)


async def test_t29_a_worker_without_its_watchdog_ends_what_it_started(
    gone: Callable[[int, float], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving half may see the watchdog's death before a busy hub does, and must not just leave."""
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        child = int(m.text_of((await env.step("spawn"))[0][0]))
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "kill", lambda _: None)
            os.kill(hub.workers[0].pid, signal.SIGKILL)
            assert gone(child, 5.0)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"fail": True}, EnvironmentFault),
        ({"seconds": 9.0, "reset_timeout": 0.3}, StepTimeout),
    ],
)
async def test_t31_a_failed_reset_frees_its_place(kwargs: dict[str, object], kind: type[TideError]) -> None:
    async with LocalHub(1, sessions_per_process=1, queue_timeout=8.0) as hub:
        async with hub.session("case/SlowStart-v0", **kwargs) as env:
            with pytest.raises(kind):
                await env.reset(seed=0)
            # The failed session is still in its block, yet its place is free.
            async with hub.session("case/SlowStart-v0") as other:
                await other.reset(seed=0)
        assert await settled(hub, 1)


async def test_t23_limits_are_the_environments_own() -> None:
    async with LocalHub(1) as hub:
        async with hub.session("case/SlowStart-v0", seconds=0.6, reset_timeout=10.0) as env:
            assert env.spec.reset_timeout == 10.0
            await env.reset(seed=0)


async def test_t57_t58_one_failing_step_of_sixteen() -> None:
    async with LocalHub(2) as hub:

        async def one(number: int) -> str:
            async with hub.session("case/Act-v0") as env:
                await env.reset(seed=0)
                for turn in range(5):
                    try:
                        await env.step("refuse" if (number, turn) == (3, 2) else "x")
                    except InfrastructureError as error:
                        return str(error)
                return "done"

        ends = await asyncio.gather(*(one(i) for i in range(16)))
        assert "ConnectionError: the site is down" in ends[3]
        assert ends[:3] + ends[4:] == ["done"] * 15
        assert hub.replaced == 0
        assert await settled(hub, 2)


async def test_last_words_of_a_worker_are_in_the_error() -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        with pytest.raises(WorkerDied, match=r"(?s)exited with code 3.*last words"):
            await env.step("die 3")


async def test_a_cancelled_step_leaves_at_once_and_its_place_comes_back() -> None:
    async with LocalHub(1, sessions_per_process=1) as hub:

        async def play() -> None:
            async with hub.session("case/Act-v0") as env:
                await env.reset(seed=0)
                await env.step("sleep 1.5")

        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(play(), 0.5)
        assert time.monotonic() - began < 1.0
        async with hub.session("case/Act-v0") as env:
            await env.reset(seed=0)
        assert hub.replaced == 0


async def test_blas_threads_and_variables_of_workers() -> None:
    async with LocalHub(1, environ={"CASE_EXTRA": "yes"}) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        for name, wanted in [
            ("OMP_NUM_THREADS", "1"),
            ("CASE_EXTRA", "yes"),
            ("TIDERL_WORKER_LAUNCH", "None"),
        ]:
            pid_or_value = m.text_of((await env.step(f"getenv {name}"))[0][0])
            assert pid_or_value == wanted
