"""The frame of the command line: lazy commands, and errors that a user can act on."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import tiderl
from tiderl.cli import main as frame
from tiderl.errors import ConfigError, UnknownEnvironment, WorkerDied

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        frame.main(list(arguments))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the command `doctor` end with this error."""

    def command() -> None:
        raise error

    monkeypatch.setattr("tiderl.cli.doctor.doctor", command)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"tiderl {tiderl.__version__}\n", "")


def test_help_names_every_command_and_imports_none(cli: Cli) -> None:
    code = (
        "import sys; from tiderl.cli import main\n"
        "try: main.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print('loaded', sorted(m for m in sys.modules if m.startswith('tiderl.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in frame.COMMANDS)
    assert "loaded ['tiderl.cli.main']" in done.stdout


@pytest.mark.parametrize("name", sorted(frame.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"Usage: tiderl {name}" in out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "trian")
    assert code == 2
    assert err == "error: No such command 'trian'. Did you mean 'train'? See `tiderl --help`.\n"


def test_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "doctor", "--fast")
    assert code == 2
    assert err == "error: No such option: --fast: see `tiderl doctor --help`.\n"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert code == 2
    assert "Usage: tiderl" in out + err
    assert "error" not in err


def test_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(monkeypatch, ConfigError("unknown key `lr`", where="a.yaml", fix="write learning_rate"))
    assert run(capsys, "doctor") == (2, "", "error: unknown key `lr` (a.yaml): write learning_rate.\n")


def test_user_error_inside_task_groups_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = ExceptionGroup("two", [ValueError("x"), UnknownEnvironment("no environment `a/B-v0`")])
    fails_with(monkeypatch, ExceptionGroup("one", [inner]))
    assert run(capsys, "doctor") == (2, "", "error: no environment `a/B-v0`.\n")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDERL_DEBUG", "1")
    fails_with(monkeypatch, WorkerDied("a worker died"))
    with pytest.raises(WorkerDied):
        frame.main(["doctor"])


def test_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyError("x"))
    with pytest.raises(KeyError):
        frame.main(["doctor"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a"),
            ["no space left", "/runs/a", "free some"],
        ),
        (OSError(errno.EADDRINUSE, "Address already in use"), ["already in use", "another port"]),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), ["permission denied", "/x"]),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            ["torch", "pip install 'tiderl[cpu]'"],
        ),
    ],
)
def test_machine_faults_are_one_sentence(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_with(monkeypatch, error)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_port_in_use_from_zmq_is_one_sentence() -> None:
    import zmq

    context = zmq.Context()
    first, second = context.socket(zmq.REP), context.socket(zmq.REP)
    try:
        port = first.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError) as caught:
            second.bind(f"tcp://127.0.0.1:{port}")
    finally:
        first.close(0)
        second.close(0)
        context.term()
    told = frame.user_error(caught.value)
    assert told is not None
    assert "already in use" in told[0]


def test_another_missing_module_is_a_fault_of_ours() -> None:
    assert frame.user_error(ModuleNotFoundError("No module named 'tiderl.x'", name="tiderl.x")) is None


def test_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    assert run(capsys, "doctor") == (130, "", "")


def test_missing_extra_breaks_only_the_command_that_needs_it(cli: Cli, tmp_path: Any) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'vllm', 'transformers', 'peft'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    absent = {"PYTHONPATH": str(tmp_path)}
    assert cli("env", "list", env=absent).returncode == 0
    needs = cli("train", "quickstart", env=absent)
    assert needs.returncode == 2
    assert needs.stderr.startswith("error: "), needs.stderr
    assert "tiderl[cpu]" in needs.stderr
    assert not (tmp_path / "runs").exists()


def test_doctor_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    subjects = [line.split()[1] for line in out.splitlines()]
    assert {"python", "tiderl", "core", "engine", "torch", "cores", "memory", "cache", "disk", "gpu"} <= set(
        subjects
    )
    assert all(line.split()[0] in ("ok", "todo") for line in out.splitlines())


def test_doctor_says_what_to_do_about_an_unwritable_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDERL_CACHE", "/dev/null/cache")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "bad  cache         /dev/null/cache cannot be written" in out
    assert "set TIDERL_CACHE" in out
