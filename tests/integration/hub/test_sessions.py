"""Sessions of a local hub with real worker processes: what comes back, and who sees what."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import tiderl
from tiderl.env import EndReason
from tiderl.env import messages as m
from tiderl.errors import Busy, ConfigError, EnvironmentFault, InfrastructureError, UnknownEnvironment
from tiderl.hub.local import LocalHub
from tiderl.hub.protocol import Failure, Observed, Request, Step, pack, unpack_reply


def same(one: Any, other: Any) -> bool:
    """Equal bit by bit, arrays included."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        both = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        return (
            both
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "env_id", ["tide/Pointer-v0", "tide/Calculator-v0", "tide/Safe-v0", "gymnasium/FrozenLake-v1"]
)
async def test_remote_equals_local(env_id: str) -> None:
    async with LocalHub(1) as hub, hub.session(env_id) as remote:
        with tiderl.make(env_id) as local:
            assert remote.spec.tools == local.tools
            assert await hub.task_ids(env_id, "test") == local.task_lists.ids("test")
            for seed in range(4):
                assert same(await remote.reset(seed=seed), local.reset(seed=seed))
                ended = False
                while not ended:
                    action = local.oracle()
                    assert same(await remote.oracle(), action)
                    answer = local.step(action)
                    assert same(await remote.step(action), answer)
                    ended = answer[2] or answer[3]


async def test_tasks_by_split_and_seed() -> None:
    async with LocalHub(1) as hub:
        assert await hub.task_ids("case/Echo-v0", "test") == [f"test-{i}" for i in range(5)]
        async with hub.session("case/Echo-v0") as one, hub.session("case/Echo-v0") as other:
            first = await one.reset(seed=7, task="test-3", split="test")
            assert first[1] == {"task": "test-3", "turn": 0}
            assert first == await other.reset(seed=7, task="test-3", split="test")
            assert first != await other.reset(seed=8, task="test-3", split="test")


@pytest.mark.parametrize("size", [(64, 48), (1024, 768)])
async def test_t63_images_survive_the_wire(size: tuple[int, int]) -> None:
    width, height = size
    with tiderl.make("case/Picture-v0", width=width, height=height) as local:
        wanted = [local.reset(seed=5)[0], local.step("x")[0]]
    async with LocalHub(1) as hub, hub.session("case/Picture-v0", width=width, height=height) as env:
        got = [(await env.reset(seed=5))[0], (await env.step("x"))[0]]
    for here, there in zip(wanted, got, strict=True):
        (one,), (other,) = m.images_of(here[0]), m.images_of(there[0])
        assert other.shape == (height, width, 3)
        assert other.dtype == np.uint8
        assert other.flags.writeable
        assert hashlib.sha256(one.tobytes()).digest() == hashlib.sha256(other.tobytes()).digest()


async def test_images_in_actions_arrive() -> None:
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    action = {
        "role": "assistant",
        "content": [{"type": "image", "image": picture}, {"type": "text", "text": "hm"}],
    }
    async with LocalHub(1) as hub, hub.session("case/Echo-v0") as env:
        await env.reset(seed=0)
        assert m.text_of((await env.step(action))[0][0]) == "hm"


async def test_t50_each_session_reads_its_own() -> None:
    async with LocalHub(1) as hub:

        async def one(name: str) -> tuple[str, str, str]:
            async with hub.session("case/Keep-v0") as env:
                await env.reset(seed=0)
                await env.step(f"write {name}")
                await asyncio.sleep(0.05)
                seen = [m.text_of((await env.step("read"))[0][0]).split() for _ in range(5)]
                assert all(row == seen[0] for row in seen)
                stored, env_object, thread = seen[0]
                return stored, env_object, thread

        answers = await asyncio.gather(*(one(f"value{i}") for i in range(8)))
    assert [stored for stored, _, _ in answers] == [f"value{i}" for i in range(8)]
    assert len({env_object for _, env_object, _ in answers}) == 8
    assert len({thread for _, _, thread in answers}) == 8


async def test_64_sessions_on_2_workers() -> None:
    async with LocalHub(2) as hub:

        async def one(number: int) -> float:
            async with hub.session("case/Echo-v0") as env:
                await env.reset(seed=number)
                for turn in range(20):
                    messages, *_ = await env.step(f"{number}/{turn}")
                    assert m.text_of(messages[0]) == f"{number}/{turn}"
                busiest.append(max(w.sessions for w in hub.workers))
                return (await env.step("end"))[1]

        busiest: list[int] = []
        assert await asyncio.gather(*(one(i) for i in range(64))) == [1.0] * 64
        assert max(busiest) <= 33  # least-loaded placement: half on each
        assert [w.sessions for w in hub.workers] == [0, 0]


async def test_a_slow_session_does_not_block_the_others() -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as slow, hub.session("case/Echo-v0") as quick:
        await slow.reset(seed=0)
        await quick.reset(seed=0)
        sleeping = asyncio.create_task(slow.step("sleep 1.0"))
        for _ in range(50):
            await quick.step("x")
        assert not sleeping.done()
        await sleeping


async def test_a_repeated_sequence_number_is_answered_and_not_executed() -> None:
    async with LocalHub(1) as hub, hub.session("case/Echo-v0") as env:
        await env.reset(seed=0)
        await env.step("a")

        async def send(seq: int, text: str) -> Any:
            return await env._connection.call(env.id, seq, Step(text), limit=5.0, what="step")

        first = await send(3, "b")
        again = await send(3, "b")
        assert isinstance(first, Observed)
        assert first == again
        assert first.info["turn"] == 2
        assert (await send(4, "c")).info["turn"] == 3
        for wrong in (3, 6):
            with pytest.raises(InfrastructureError, match=f"call number {wrong}"):
                await send(wrong, "d")
        assert (await send(5, "e")).info["turn"] == 4


async def test_a_repeat_of_a_running_call_gets_its_answer() -> None:
    async with LocalHub(1) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        calls = [env._connection.call(env.id, 2, Step("sleep 0.4"), limit=5.0, what="step") for _ in range(2)]
        first, again = (asyncio.create_task(call) for call in calls)
        answer = await again
        assert isinstance(answer, Observed)
        assert answer.info["turn"] == 1
        first.cancel()


async def test_unknown_and_unmakeable_environments() -> None:
    async with LocalHub(1) as hub:
        with pytest.raises(UnknownEnvironment, match="tide/Calculator-v0"):
            async with hub.session("tide/Calculater-v0"):
                pass
        with pytest.raises(EnvironmentFault, match="colour"):
            async with hub.session("case/Picture-v0", colour="red"):
                pass
        with pytest.raises(ConfigError, match=r"object cannot be sent"):
            async with hub.session("case/Picture-v0", width=object()):
                pass
        assert [w.sessions for w in hub.workers] == [0]


async def test_a_class_inside_a_function_is_refused() -> None:
    @tiderl.register("case/Inner-v0")
    class Inner(tiderl.AgentEnv):
        def reply(self, text: str) -> str:
            return text

    async with LocalHub(1) as hub:
        with pytest.raises(EnvironmentFault, match="top level of a module"):
            async with hub.session("case/Inner-v0"):
                pass


async def test_t43_places_in_order_then_busy() -> None:
    async with LocalHub(1, sessions_per_process=1, queue_timeout=0.3) as hub:
        order: list[int] = []
        async with hub.session("case/Echo-v0"):
            with pytest.raises(Busy) as caught:
                async with hub.session("case/Echo-v0"):
                    pass
            assert caught.value.retry_after > 0

        async def one(number: int) -> None:
            async with hub.session("case/Echo-v0"):
                order.append(number)

        await asyncio.gather(*(one(i) for i in range(6)))
        assert order == list(range(6))


async def test_t87_a_teardown_that_raises_frees_its_place() -> None:
    async with LocalHub(1, sessions_per_process=1) as hub:
        for _ in range(3):
            async with hub.session("case/BadClose-v0") as env:
                await env.reset(seed=0)
        assert hub.replaced == 0
        assert hub.workers[0].sessions == 0


async def test_t72_truncation_from_outside_gives_partial_credit() -> None:
    async with LocalHub(1) as hub, hub.session("case/Echo-v0") as env:
        await env.reset(seed=0)
        credit, info = await env.truncate(EndReason.TIME)
        assert (credit, info["end"], info["success"]) == (0.25, "time", False)
        with pytest.raises(EnvironmentFault, match="after the episode had ended"):
            await env.step("x")


async def test_garbage_is_refused_and_the_worker_goes_on() -> None:
    async with LocalHub(1) as hub, hub.session("case/Echo-v0") as env:
        await env.reset(seed=0)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(hub._workers[0].process.endpoint)
            for frames in (
                [b""],
                [b"id", b"\xc1"],
                [b"id", b"", b"raw"],
                [b"id", b"\x90"],
                [b"id", b"x" * 10**6],
            ):
                stranger.send_multipart(frames)
            stranger.send_multipart([b"id", *pack(Request(env.id + "x", 5, Step("a")))])
            for _ in range(5):
                assert stranger.poll(2000)
                assert isinstance(unpack_reply(stranger.recv_multipart()[1:]), Failure)
        assert m.text_of((await env.step("still here"))[0][0]) == "still here"


async def test_a_hub_without_places_and_a_hub_entered_twice() -> None:
    with pytest.raises(ConfigError, match="0 workers"):
        LocalHub(0)
    async with LocalHub(1) as hub:
        with pytest.raises(ConfigError, match="already open"):
            await hub.start()
        async with hub.session("case/Echo-v0") as env:
            await env.reset(seed=0)


async def test_a_closed_session_and_a_closed_hub_say_so() -> None:
    hub = LocalHub(1)
    async with hub:
        async with hub.session("case/Echo-v0") as env:
            await env.reset(seed=0)
        with pytest.raises(InfrastructureError, match="has ended"):
            await env.step("x")
    with pytest.raises(InfrastructureError, match="not open"):
        async with hub.session("case/Echo-v0"):
            pass


def test_several_event_loops_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hub = LocalHub(1)

    def modes() -> list[int]:
        return [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()]

    async def play() -> str:
        async with hub, hub.session("case/Echo-v0") as env:
            assert modes() == [0o700]
            return m.text_of((await env.reset(seed=3))[0][0])

    assert asyncio.run(play()) == asyncio.run(play())
    assert list(tmp_path.iterdir()) == []
