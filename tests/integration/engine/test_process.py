"""The engine's process: its start, its death, what it leaves behind, and what it leaves alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tiderl.engine.base import Sampling
from tiderl.engine.counters import Cell
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import EngineError

from .conftest import Episode, Live, load_reference, play, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(folder: str) -> bool:
    return not os.path.exists(folder)


def open_files() -> list[str]:
    """What this process has open, pipes and sockets included."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(links)


async def test_start_and_close_leave_this_process_and_machine_alone(
    live: Live, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second engine beside the first one, with two threads, after this process has used OpenMP."""
    import numpy as np
    import torch

    reference = load_reference(tiny)
    torch.set_num_threads(2)
    a = torch.randn(1500, 1500)
    (a @ a).sum()  # a pool of OpenMP threads now belongs to this thread
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    wanted = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    environment, files, children = dict(os.environ), open_files(), _children()
    capfd.readouterr()

    engine = VLLMEngine(
        EngineSettings(model=tiny, kv_tokens=4096, max_sessions=8, threads=2, banned_token_ids=(0, 5, 300))
    )
    await engine.start()
    assert engine.start_seconds["construct"] < 12
    both = Live(engine, reference, tiny)
    episodes = await asyncio.gather(
        *(
            play(engine, [tokens(k, 500), tokens(k, 60)], max_tokens=40, seed=k, reserve=1024)
            for k in range(4)
        ),
        play(live.engine, [tokens(1, 100)]),
    )
    assert max(both.gap(e) for e in episodes[:4]) <= 1e-4  # log-probs are of the full softmax
    assert not {0, 5, 300} & {i for e in episodes[:4] for _, o in e.turns for i in o.ids}
    pid = engine._counters[Cell.PID]  # type: ignore[index]
    assert alive(pid)
    began = time.monotonic()
    folder = engine._folder
    assert os.listdir(folder)
    await engine.close()
    assert time.monotonic() - began < 1.5
    assert not alive(pid)
    await engine.close()

    assert (torch.rand(1).item(), np.random.rand(), random.random()) == wanted
    assert torch.get_num_threads() == 2
    kept = {k: v for k, v in os.environ.items() if k not in _PLATFORM}
    assert kept == {k: v for k, v in environment.items() if k not in _PLATFORM}
    assert gone(folder)
    gc.collect()
    extra = Counter(open_files()) - Counter(files)
    assert not {name for name in extra if "memfd" in name or "tiderl" in name or "shm" in name}, extra
    assert extra.total() <= 3, extra
    assert _children() <= children
    assert capfd.readouterr() == ("", "")
    assert live.gap(await play(live.engine, [tokens(1, 100)])) <= 1e-4


# Set by vLLM's CPU platform for its own use; none of them is read by torch after import.
_PLATFORM = {
    "NUMEXPR_MAX_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "LOCAL_WORLD_SIZE",
    "LD_PRELOAD",
    "PYTEST_CURRENT_TEST",
}


def _children() -> set[int]:
    text = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    return {int(pid) for pid in text.split() if alive(int(pid))}


async def test_c5_c11_a_killed_engine_fails_everybody_at_once_and_says_why(
    tiny: Path, tmp_path: Path
) -> None:
    engine = VLLMEngine(
        EngineSettings(model=tiny, kv_tokens=2048, max_sessions=8, log_file=tmp_path / "logs" / "engine.log")
    )
    await engine.start()
    assert (tmp_path / "logs" / "engine.log").is_file()
    running = [asyncio.create_task(play(engine, [tokens(k, 30)], max_tokens=400)) for k in range(4)]
    waiting = [asyncio.create_task(play(engine, [tokens(k, 30)])) for k in range(4)]
    try:
        async with engine.session(0 + 32) as idle:
            pass
        idle_session = engine.session(32)
        waiting_too = asyncio.create_task(_hold_idle(idle_session))
        await asyncio.sleep(0.15)
        os.kill(engine._counters[Cell.PID], signal.SIGKILL)  # type: ignore[index]
        began = time.monotonic()
        results = await asyncio.wait_for(
            asyncio.gather(*running, *waiting, waiting_too, return_exceptions=True), 10
        )
        assert time.monotonic() - began < 3
        failed = [r for r in results if isinstance(r, BaseException)]
        assert len(failed) >= 5
        assert all(isinstance(r, EngineError) for r in failed), failed
        assert any("SIGKILL" in str(r) for r in failed), [str(r) for r in failed]
        with pytest.raises(EngineError, match="died"):
            async with engine.session(32) as session:
                await session.generate([1], Sampling(1))
        with pytest.raises(EngineError, match="died"):
            await engine.publish([("model.norm.weight", load_reference(tiny).model.norm.weight)], 1)
        del idle
    finally:
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 1.5


async def _hold_idle(opening: object) -> None:
    """A session between two turns when the engine dies: the next turn fails."""
    async with opening as session:  # type: ignore[attr-defined]
        while True:
            await asyncio.sleep(0.3)
            await session.generate([1], Sampling(1, ignore_eos=True))


async def test_two_engines_side_by_side_and_one_is_killed(tiny: Path) -> None:
    """Held, running and released sessions of the dead one fail at once; the other goes on; a third starts."""
    settings = EngineSettings(model=tiny, kv_tokens=2048, max_sessions=8, max_model_len=512)
    reference = load_reference(tiny)
    survivor, victim = VLLMEngine(settings), VLLMEngine(settings)
    await survivor.start()
    await victim.start()
    try:
        beside = [asyncio.create_task(play(survivor, [tokens(k, 60)] * 3, max_tokens=100)) for k in range(4)]
        async with AsyncExitStack() as stack:
            held, running, released, never = [
                await stack.enter_async_context(victim.task_session(session_id=name)) for name in "abcd"
            ]
            for session in (held, running, released):
                await session.generate(tokens(1, 30), Sampling(4, ignore_eos=True))
            await released.release()
            kept = running.snapshot()
            turn = asyncio.create_task(running.generate(tokens(2, 9), Sampling(400, ignore_eos=True)))
            await asyncio.sleep(0.1)
            os.kill(victim.cells[Cell.PID], signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(EngineError, match="SIGKILL"):
                await asyncio.wait_for(turn, 5)
            for session in (held, released, never):
                with pytest.raises(EngineError, match="SIGKILL"):
                    await asyncio.wait_for(session.generate(tokens(2, 9), Sampling(4)), 5)
            assert time.monotonic() - began < 3
            await held.release()
            await running.release()
            assert victim.promised_tokens == 0
            assert running.snapshot() == kept  # enough to go on with elsewhere
            with pytest.raises(EngineError, match="SIGKILL"):
                async with victim.task_session(session_id="e"):
                    pass
            with pytest.raises(EngineError, match="SIGKILL"):
                await victim.publish(reference.named_parameters(), 1, mode="recompute")
        assert time.monotonic() - began < 4
        victim.audit()
        third = VLLMEngine(settings)
        await third.start()
        try:
            episodes = await asyncio.wait_for(asyncio.gather(*beside), 60)  # they fill the survivor's pool
            for engine in (survivor, third):
                async with engine.task_session(session_id="b", replay=kept) as moved:
                    output = await moved.generate(tokens(2, 9), Sampling(20, ignore_eos=True))
                    assert output.reprefilled == 33
                    episode = Episode([*moved.snapshot().ids], [(43, output)])
                    assert Live(engine, reference, tiny).gap(episode) <= 1e-4
        finally:
            await third.close()
        assert max(Live(survivor, reference, tiny).gap(e) for e in episodes) <= 1e-4
    finally:
        await survivor.close()
        await victim.close()
    assert victim.promised_tokens == survivor.promised_tokens == 0


async def test_an_engine_killed_between_two_turns_is_noticed(tiny: Path) -> None:
    """Nobody waits for it; the next turn, release or close must not hang."""
    for what in ("generate", "release", "close"):
        engine = VLLMEngine(EngineSettings(model=tiny, kv_tokens=1024, max_sessions=4, max_model_len=512))
        await engine.start()
        try:
            async with engine.task_session(session_id="x") as session:
                await session.generate(tokens(1, 30), Sampling(4, ignore_eos=True))
                began = time.monotonic()
                os.kill(engine.cells[Cell.PID], signal.SIGKILL)
                if what == "generate":
                    with pytest.raises(EngineError, match="SIGKILL"):
                        await session.generate([1], Sampling(4))
                elif what == "release":
                    await session.release()
            assert time.monotonic() - began < 3
            assert engine.promised_tokens == 0
        finally:
            await engine.close()


async def test_closing_an_engine_ends_its_open_sessions(tiny: Path) -> None:
    engine = VLLMEngine(EngineSettings(model=tiny, kv_tokens=1024, max_sessions=8))
    await engine.start()
    tasks = [asyncio.create_task(play(engine, [tokens(k, 30)], max_tokens=450)) for k in range(4)]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await engine.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert time.monotonic() - began < 1.5
    assert all(isinstance(r, EngineError) and "closed" in str(r) for r in results), results


async def test_a_model_vllm_cannot_run_is_an_error_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "strange"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["NoSuchModel"], "model_type": "no"})
    )
    children = _children()
    with pytest.raises(EngineError, match=r"strange|did not start"):
        await VLLMEngine(EngineSettings(model=folder)).start()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 999}))  # weights do not fit
    with pytest.raises(EngineError, match="did not start"):
        await VLLMEngine(EngineSettings(model=folder)).start()
    await asyncio.sleep(0.2)
    assert _children() <= children


async def test_a_start_that_takes_too_long_is_ended(tiny: Path, live: Live) -> None:
    children = _children()
    engine = VLLMEngine(EngineSettings(model=tiny, start_timeout=1.0))
    with pytest.raises(EngineError, match="not up after 1 s"):
        await engine.start()
    for _ in range(150):
        if _children() <= children:
            return
        await asyncio.sleep(0.1)
    pytest.fail("the process of the abandoned start is still there")


PARENT = """
import asyncio, os, sys
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine
from tiderl.engine.base import Sampling

async def main():
    async with VLLMEngine(EngineSettings(model=sys.argv[1], start_method=sys.argv[2])) as engine:
        async with engine.session(64) as session:
            await session.generate([1, 2, 3], Sampling(4))
            print(engine._counters[0], engine._folder, flush=True)
            await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_an_engine_dies_with_its_killed_parent(tiny: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        PARENT.replace("asyncio.run(main())", "if __name__ == '__main__':\n    asyncio.run(main())")
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(tiny), method, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 110)
        pid, folder = int(line.split()[0]), line.split()[1].decode()
        assert alive(pid)
    finally:
        process.kill()
        _, errors = await process.communicate()
    lines = [line for line in errors.decode().splitlines() if "resource_tracker" not in line]
    assert not [line for line in lines if line and "warnings.warn" not in line]
    for _ in range(30):
        if not alive(pid):
            break
        await asyncio.sleep(0.1)
    assert not alive(pid)
    assert gone(folder)
