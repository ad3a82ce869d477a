"""The `tiderl` command.

Invariants: a command's module is imported only when that command runs, so that `tiderl --help` is fast and
a missing extra breaks only the commands that need it; every error a user can cause ends as one `error: ...`
line on standard error, without a traceback, with a fixed exit code.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import tiderl
from tiderl.errors import MissingExtra, ResourceError, TideError

INTERRUPTED = 130

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("tiderl.cli.train:train", "Train a model on an environment."),
    "eval": ("tiderl.cli.eval:evaluate", "Run a policy on an environment and report its success."),
    "env": ("tiderl.cli.env:app", "List, show, write, check and play environments."),
    "rollout": ("tiderl.cli.rollout:app", "Tell what the rollouts of a run did, and why."),
    "bench": ("tiderl.cli.bench:app", "Measure TideRL against other systems."),
    "plot": ("tiderl.cli.plot:plot", "Draw the learning curves of runs."),
    "doctor": ("tiderl.cli.doctor:doctor", "Say what this machine has and what is missing."),
}
"""Command name -> (where it lives, one line of help). Shown without importing anything."""

TRAINING_PACKAGES = frozenset(
    {"torch", "vllm", "transformers", "peft", "safetensors", "gguf", "psutil", "tensorboard", "matplotlib"}
)


class LazyCommand(TyperCommand):
    """A command that is imported at its first use; only its name and help line are known before."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name, help=help)
        self.target = target

    def load(self) -> Any:
        """The real command. Raises MissingExtra where a package of an extra is not installed."""
        module_name, attribute = self.target.split(":")
        found = getattr(importlib.import_module(module_name), attribute)
        if isinstance(found, typer.Typer):
            found.info.name = self.name
            command = get_command(found)
        else:
            single = typer.Typer(add_completion=False)
            single.command(self.name)(found)
            command = get_command(single)
        command.name = self.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)


class LazyGroup(TyperGroup):
    """The top level: its commands are those of `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (target, help) in COMMANDS.items():
            self.add_command(LazyCommand(name, target, help), name)


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiderl {tiderl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement learning of LLM agents on multi-turn, multi-modal tasks."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a user's error, 130 interrupted, 1 a fault of ours."""
    # Engine and trainer share the cores: an OpenMP thread that spins takes the core from the one with work
    # (7 times fewer tokens a second were measured on two busy cores). Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        result = get_command(app).main(args=argv, prog_name="tiderl", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        told = user_error(error)
        if told is None or os.environ.get("TIDERL_DEBUG") == "1":
            raise
        message, code = told
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(code)


def user_error(error: BaseException) -> tuple[str, int] | None:
    """The one line and the exit code for an error that a user can mend; None for a fault of ours."""
    for leaf in _leaves(error):
        if isinstance(leaf, TideError):
            return str(leaf), leaf.exit_code
    for leaf in _leaves(error):
        if hasattr(leaf, "format_message") and hasattr(leaf, "exit_code"):  # a usage error of the parser
            return _usage(leaf), leaf.exit_code
        known = _missing_extra(leaf) or _resource_error(leaf)
        if known is not None:
            return str(known), known.exit_code
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside (nested) exception groups, which task groups raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _usage(error: Any) -> str:
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "tiderl"
    message = error.format_message().rstrip(".")
    if not message:  # no arguments: the help has been printed instead
        return ""
    return f"{message} See `{path} --help`." if message.endswith("?") else f"{message}: see `{path} --help`."


def _missing_extra(error: BaseException) -> MissingExtra | None:
    package = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in TRAINING_PACKAGES:
        return None
    return MissingExtra(
        f"this command needs the package {package}, which is not installed",
        fix="run `pip install 'tiderl[cpu]'`, or 'tiderl[gpu]' on a machine with an NVIDIA GPU",
    )


def _resource_error(error: BaseException) -> ResourceError | None:
    number = getattr(error, "errno", None)
    where = getattr(error, "filename", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError("no space left on the disk", where=where, fix="free some space and run it again")
    if number == errno.EADDRINUSE:
        return ResourceError(
            f"the address is already in use: {error}",
            fix="stop the program that holds it or choose another port",
        )
    if isinstance(error, PermissionError):
        return ResourceError("permission denied", where=where, fix="choose a folder that you may write to")
    return None


if __name__ == "__main__":
    main()
