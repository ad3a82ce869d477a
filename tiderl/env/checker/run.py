"""`check_environment`: starts a check, watches it, and makes the report.

Invariant: it returns in bounded time whatever the environment does. A registered environment is
checked in a process of its own, which is killed with all it started when a call passes its deadline;
a class or function that only this process knows is checked in a thread, which is then abandoned.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium

from tiderl.env.checker.context import Context
from tiderl.env.checker.driver import Abandoned, Driver
from tiderl.env.checker.events import PipeSource, QueueSender, Sender, Watcher
from tiderl.env.checker.items import ITEMS, run_items
from tiderl.env.checker.report import CheckItem, CheckReport
from tiderl.env.registry import broken_plugins, make, spec
from tiderl.errors import ConfigError, UnknownEnvironment
from tiderl.processes import kill_below

OnItem = Callable[[CheckItem], None]


def check_environment(
    env: str | type[Any] | Callable[[], Any],
    *,
    tasks: int = 3,
    timeout: float | None = None,
    isolate: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
    on_item: OnItem | None = None,
    pause: float = 1.1,
) -> CheckReport:
    """Hold an environment against the contract of `AgentEnv`.

    Args:
        env: an id, an `AgentEnv` class, or a function that makes a new environment at each call.
        tasks: how many tasks of each split are sampled.
        timeout: seconds for one call of the environment; None means its own `reset_timeout` and
            `step_timeout`.
        isolate: check in a process of its own; None means wherever another process can make `env`.
        kwargs: constructor arguments.
        pause: seconds between two passes of the same episodes; above 1 a clock with whole seconds shows.
        on_item: called with every item as soon as it is known (again when a later item revises it).

    Returns:
        The report; `report.ok` is the verdict.

    Raises:
        UnknownEnvironment: no such id.
        ConfigError: `env` is an instance, or an argument is out of range.
    """
    if tasks < 1:
        raise ConfigError(f"tasks is {tasks}", fix="check at least 1 task of each split")
    if isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"an instance of {type(env).__name__} was given",
            fix="give its id, its class or a function that makes one",
        )
    if not isinstance(env, str) and not callable(env):
        raise ConfigError(
            f"{env!r} is no environment", fix="give an id, a class or a function that makes one"
        )
    arguments = dict(kwargs or {})
    began = time.monotonic()
    if isinstance(env, str):
        name = env
        try:
            entry = spec(env).entry
        except UnknownEnvironment:
            if (item := _unloadable(env)) is None:
                raise
            if on_item is not None:
                on_item(item)
            return CheckReport(env, [item], time.monotonic() - began)
        shared = _shareable(entry, arguments)
        factory: Callable[[], Any] = lambda: make(env, **arguments)  # noqa: E731
    else:
        name, entry, shared = getattr(env, "__qualname__", repr(env)), None, False
        factory = lambda: env(**arguments)  # noqa: E731
    if isolate and not shared:
        raise ConfigError(
            f"{name} cannot be made by another process", fix="register it in an importable module"
        )
    if shared and isolate is not False:
        order = {"env_id": name, "entry": entry, "tasks": tasks, "timeout": timeout, "kwargs": arguments}
        watcher = _in_process({**order, "pause": pause, "path": sys.path}, on_item)
    else:
        sender = QueueSender()
        driver = Driver(factory, sender, timeout)
        context = Context(driver, name, shared, tasks, kwargs=arguments, entry=entry, pause=pause)
        watcher = _in_thread(context, sender, on_item)
    items = [watcher.items[item.name] for item in ITEMS if item.name in watcher.items]
    items += [item for item in watcher.items.values() if item not in items]
    return CheckReport(name, items, time.monotonic() - began)


def _unloadable(env_id: str) -> CheckItem | None:
    """The fault of the package that seems to bring an unknown id, where that could not be loaded."""
    namespace = env_id.partition("/")[0].lower()
    for plugin in broken_plugins():
        if any(word.lower().startswith(namespace) for word in (plugin.name, plugin.package)):
            name = "tools" if "type hint" in plugin.error else "start"
            detail = f"package {plugin.package} cannot be loaded: {plugin.value}: {plugin.error}"
            return CheckItem(
                name, "fail", detail, "mend the package; `tiderl env list` shows such errors, too"
            )
    return None


def _shareable(entry: str | None, arguments: dict[str, Any]) -> bool:
    """Whether another process can make the environment: from an importable module, with plain arguments."""
    if entry is not None and ("<" in entry or ".py:" in entry or entry.startswith("__main__")):
        return False
    try:
        return bool(json.loads(json.dumps(arguments)) == arguments)
    except (TypeError, ValueError):
        return False


def _in_thread(context: Context, sender: QueueSender, on_item: OnItem | None) -> Watcher:
    watcher = Watcher(sender, on_item)
    thread = threading.Thread(target=serve, args=(context, sender), name="tiderl-check", daemon=True)
    thread.start()
    _conclude(watcher, watcher.watch())
    sender.muted = True
    return watcher


def serve(context: Context, sender: Sender) -> None:
    """Run all items, and tell the watcher; the body of the thread or process."""
    try:
        try:
            run_items(context, sender)
        except Exception as error:  # noqa: BLE001 - a fault of the checker itself must be reported, too
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"the checker itself failed: {error!r} at {place.filename}:{place.lineno}"
            sender.report(CheckItem("checker", "fail", detail, "report this to TideRL"))
        sender.done()
    except Abandoned:
        return


def _conclude(watcher: Watcher, hung: CheckItem | None) -> None:
    """Add the item about deadlines, and mark what was not reached."""
    if hung is None:
        seconds, label = watcher.slowest
        watcher.add(CheckItem("deadlines", "pass", f"slowest call {seconds:.2f} s: {label}"))
        return
    watcher.add(hung)
    _skip_rest(watcher, f"not checked: see {hung.name}")


def _skip_rest(watcher: Watcher, why: str) -> None:
    for item in ITEMS:
        if item.name not in watcher.items:
            watcher.add(CheckItem(item.name, "skip", why))


def _in_process(order: dict[str, Any], on_item: OnItem | None) -> Watcher:
    """Run the check as `python -m tiderl.env.checker.child` in a process group of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tiderl-check-"))
    reading, writing = os.pipe()
    child: subprocess.Popen[bytes] | None = None
    try:
        with open(folder / "log", "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "tiderl.env.checker.child", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _python_path(), "TMPDIR": str(folder)},
            )
        os.close(writing)
        writing = -1
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already: the watcher sees the end of its pipe and tells why
        watcher = Watcher(PipeSource(reading), on_item)
        try:
            _conclude(watcher, watcher.watch())
        except EOFError:
            _report_death(watcher, child, folder / "log")
        return watcher
    finally:
        if writing >= 0:
            os.close(writing)
        os.close(reading)
        if child is not None:
            _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def _python_path() -> str:
    """PYTHONPATH by which the child imports the same `tiderl`."""
    root = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _report_death(watcher: Watcher, child: subprocess.Popen[bytes], log: Path) -> None:
    """The process ended by itself in the middle of the check."""
    try:
        code: int | None = child.wait(5.0)
    except subprocess.TimeoutExpired:
        code = None
    how = "closed its output" if code is None else f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was ended by signal {signal.Signals(-code).name}"
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
    told = f"; its last words: {' | '.join(lines)}" if lines else ""
    detail = f"the environment's process {how} while {watcher.phase} was checked{told}"
    fix = "never end the process from an environment's code; raise an exception instead"
    watcher.add(CheckItem("exceptions", "fail", detail, fix))
    _skip_rest(watcher, "not checked: see exceptions")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and all below it."""
    kill_below(child.pid)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing of it is left
    if child.stdin is not None:
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass
    child.wait(10.0)
