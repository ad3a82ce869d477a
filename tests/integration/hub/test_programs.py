"""Whole programs around a hub: where they register environments, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiderl
from tiderl.env import messages as m
from tiderl.hub.local import LocalHub

CASES = Path(__file__).parent / "cases.py"

REGISTERS = """
import asyncio
import tiderl
from tiderl.hub.local import LocalHub

@tiderl.register("mine/Own-v0", max_turns=3)
class Own(tiderl.AgentEnv):
    def start(self, task):
        return "hello from " + __name__.split("_")[0]
    def reply(self, text):
        return text

async def main():
    async with LocalHub(1) as hub, hub.session("mine/Own-v0") as env:
        messages, _ = await env.reset(seed=0)
        print(messages[0]["content"], env.spec.max_turns)
"""

LIVES = f"""
import asyncio, importlib.util, sys
found = importlib.util.spec_from_file_location("hub_cases", {str(CASES)!r})
module = importlib.util.module_from_spec(found)
sys.modules["hub_cases"] = module
found.loader.exec_module(module)
from tiderl.hub.local import LocalHub

async def main():
    async with LocalHub(2) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        told = [(await env.step(verb))[0][0]["content"] for verb in ("pid", "spawn")]
        print(*[worker.pid for worker in hub.workers], *told, hub._folder, flush=True)
        await env.step("sleep 15")

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_t53_registered_in_main(tmp_path: Path) -> None:
    script = tmp_path / "own_script.py"
    script.write_text(REGISTERS + '\nif __name__ == "__main__":\n    asyncio.run(main())\n')
    done = run([sys.executable, str(script)], Path("/"))
    assert (done.stdout, done.returncode) == ("hello from tiderl 3\n", 0), done.stderr


def test_t53_main_without_a_guard_is_named(tmp_path: Path) -> None:
    script = tmp_path / "own_script.py"
    script.write_text(REGISTERS + "\nasyncio.run(main())\n")
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1] + done.stderr


def test_t53_registered_in_a_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own.py").write_text(REGISTERS)
    (tmp_path / "main.py").write_text("import asyncio, own\nasyncio.run(own.main())\n")
    done = run([sys.executable, str(tmp_path / "main.py")], tmp_path / "elsewhere")
    assert (done.stdout, done.returncode) == ("hello from own 3\n", 0), done.stderr


def test_t53_an_interactive_session_is_told_to_use_a_file(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", REGISTERS + "\nasyncio.run(main())"], tmp_path)
    assert done.returncode == 1
    assert "put it into a file" in done.stderr


async def test_workers_of_another_interpreter(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [Path(tiderl.__file__).parents[1], *(Path(p) for p in sys.path if p.endswith("site-packages"))]
    own = tmp_path / "other" / "lib" / version / "site-packages" / "own.pth"
    own.write_text("".join(f"{path}\n" for path in packages))
    python = tmp_path / "other" / "bin" / "python"
    async with LocalHub(1, python=python) as hub, hub.session("case/Act-v0") as env:
        await env.reset(seed=0)
        assert m.text_of((await env.step("prefix"))[0][0]) == str(tmp_path / "other")


@contextmanager
def living(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A program in the middle of a long step: itself, the processes below it, its hub's folder."""
    script = tmp_path / "lives.py"
    script.write_text(LIVES)
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        *pids, folder = program.stdout.readline().split()
        assert len(pids) == 4
        assert Path(folder).is_dir()
        yield program, [int(pid) for pid in pids], Path(folder)
    finally:
        program.kill()
        program.communicate(timeout=10)


def test_kill_9_of_the_program_leaves_nothing(tmp_path: Path, gone: Callable[[int, float], bool]) -> None:
    with living(tmp_path) as (program, pids, folder):
        end = time.monotonic() + 3.0
        program.kill()
        assert all(gone(pid, end - time.monotonic()) for pid in pids)
        assert not folder.exists()


@pytest.mark.parametrize("times", [1, 2])
def test_t27_interrupts_leave_nothing(times: int, tmp_path: Path, gone: Callable[[int, float], bool]) -> None:
    with living(tmp_path) as (program, pids, folder):
        began = time.monotonic()
        for _ in range(times):
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does
            time.sleep(0.2)
        errors = program.communicate(timeout=10)[1]
        assert time.monotonic() - began < 6.0
        assert program.returncode == -signal.SIGINT
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert all(gone(pid, 3.0) for pid in pids)
        assert not folder.exists()
