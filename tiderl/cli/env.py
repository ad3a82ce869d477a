"""`tiderl env`: list, show, write, check and play environments.

Invariant: standard output is a table in a terminal and plain lines elsewhere; exit code 0 is yes, 1 is
an environment that failed its check, 2 is a mistake of the user.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiderl.cli.play import Player, orderly_end, show_messages
from tiderl.env import messages as m
from tiderl.env.checker import CheckItem, CheckReport, check_environment
from tiderl.env.checker.items import ITEMS
from tiderl.env.images import encode_png
from tiderl.env.registry import EnvironmentSpec, broken_plugins, list_environments, make, spec
from tiderl.env.scaffold import write_package
from tiderl.errors import ConfigError, EnvironmentFault

app = typer.Typer(add_completion=False, rich_markup_mode=None)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The environment, for instance tide/Safe-v0.")]
TaskOption = Annotated[str | None, typer.Option(help="Id of the task; one is drawn from the seed otherwise.")]
SplitOption = Annotated[str | None, typer.Option(help="Split of the task; the first one otherwise.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the episode.")]


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """List, show, write, check and play environments."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command("list", short_help="List all environments.")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List all environments of the installed packages, and the packages that could not be loaded.

    \b
    Examples:
      tiderl env list
      tiderl env list --json
    """
    found, broken = list_environments(), broken_plugins()
    if as_json:
        rows = [{**asdict(one), "limits": asdict(one.limits)} for one in found]
        typer.echo(json.dumps({"environments": rows, "broken": [asdict(one) for one in broken]}, indent=2))
        return
    columns = ("id", "modality", "splits", "turns", "package")
    cells = [(one.id, one.modality, " ".join(one.splits), str(one.max_turns), one.package) for one in found]
    console = Console()
    if console.is_terminal:
        table = Table(*columns)
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    else:
        widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
        for row in [columns, *cells]:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for one in broken:
        typer.echo(f"broken: {one.name} of {one.package} ({one.value}): {one.error}")


@app.command(short_help="Show what an environment is and says.")
def show(
    env_id: IdArgument,
    task: TaskOption = None,
    split: SplitOption = None,
    seed: SeedOption = 0,
    image: Annotated[Path | None, typer.Option(help="Save the first picture to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show an environment: what it is, its tools, and what an episode opens with.

    \b
    Examples:
      tiderl env show tide/Calculator-v0
      tiderl env show tide/Pointer-v0 --seed 3 --image screen.png
      tiderl env show tide/Safe-v0 --split test --task 2
    """
    found = spec(env_id)
    env = make(env_id)
    try:
        messages, info = env.reset(seed=seed, options=options_of(task, split))
    finally:
        env.close()
    if image is not None:
        save_image(messages, image, env_id)
    if as_json:
        data = {**asdict(found), "task": info["task"], "seed": seed, "messages": m.jsonable(messages)}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    for line in describe(found):
        typer.echo(line)
    typer.echo(f"first observation (task {info['task']}, seed {seed}):")
    show_messages(messages, typer.echo)
    if image is not None:
        typer.echo(f"picture saved to {image}")


def options_of(task: str | None, split: str | None) -> dict[str, Any]:
    """The options of `reset` for what was given on the command line."""
    given = {"task": task, "split": split}
    return {key: value for key, value in given.items() if value is not None}


def save_image(messages: Any, file: Path, env_id: str) -> None:
    """Write the first picture of an observation as a PNG file, whole or not at all."""
    picture = next((image for message in messages for image in m.images_of(message)), None)
    if picture is None:
        raise EnvironmentFault(f"the first observation of {env_id} has no picture", fix="leave --image out")
    write_whole(file, encode_png(picture))


def write_whole(file: Path, data: bytes) -> None:
    """Write beside the file, then rename."""
    if not file.parent.is_dir():
        raise ConfigError(f"{str(file.parent)!r} is not a folder", fix="create it or give another file")
    if file.is_dir():
        raise ConfigError(f"{str(file)!r} is a folder", fix="give a file")
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(data)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def describe(found: EnvironmentSpec) -> list[str]:
    """A spec as lines."""
    low, high = found.reward_range
    limits = found.limits
    lines = [
        f"{found.id} (package {found.package})",
        f"  {found.description}" if found.description else "  (no description)",
        f"  modality {found.modality}; splits {', '.join(found.splits)}; at most {found.max_turns} turns",
        f"  reward {low:g} to {high:g}; oracle {'yes' if found.has_oracle else 'no'}",
        f"  time limits: step {limits.step_timeout:g} s, reset {limits.reset_timeout:g} s, "
        f"episode {limits.episode_timeout:g} s",
    ]
    if not found.tools:
        return [*lines, "no tools: a reply is text"]
    lines.append("tools:")
    for tool in found.tools:
        lines += ["  " + line for line in json.dumps(tool["function"], indent=2).splitlines()]
    return lines


@app.command(short_help="Write a package with a new environment.")
def new(
    name: Annotated[str, typer.Argument(help="Name of the package, for instance maze-run.")],
    into: Annotated[Path, typer.Option(help="Folder in which the package folder is made.")] = Path("."),
) -> None:
    """Write an installable package NAME/ with a working environment, its oracle and its tests.

    The id follows from the name: my-env gives my/Env-v0, maze-run gives maze/Run-v0, foo gives foo/Foo-v0.

    \b
    Examples:
      tiderl env new my-env
      tiderl env new maze-run --into ~/code
    """
    names, folder = write_package(name, into)
    typer.echo(f"wrote {folder}: {names.env_id}. Next:")
    typer.echo(f"  pip install -e {folder}")
    typer.echo(f"  tiderl env check {names.env_id}")
    typer.echo(f"  tiderl eval --env {names.env_id} --policy oracle")


@app.command(short_help="Check an environment: the gate for authors.")
def check(
    env_id: IdArgument,
    report_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is standard output."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each split to sample.")] = 3,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds for one call; the environment's own time limits otherwise."),
    ] = None,
) -> None:
    """Check an environment: seeds, rewards, oracle, images, malformed calls, isolation, remote = local.

    Exit code 0: every check passed. 1: one failed; the report says what was seen and what to do.

    \b
    Examples:
      tiderl env check tide/Safe-v0
      tiderl env check my/Env-v0 --tasks 10 --json report.json
    """
    to_stdout = str(report_file) == "-"
    if report_file is not None and not to_stdout:
        write_whole(report_file, b"{}\n")  # a file that cannot be written must not cost a whole check
    console = Console(stderr=to_stdout)
    if console.is_terminal:
        report = _check_live(console, env_id, tasks, timeout)
        console.print(_table(report))
        console.print(Text(list(report.lines())[-1], style="bold green" if report.ok else "bold red"))
    else:
        quiet = to_stdout
        report = check_environment(
            env_id, tasks=tasks, timeout=timeout, on_item=None if quiet else _print_item
        )
        if not quiet:
            typer.echo(list(report.lines())[-1])
    if to_stdout:
        typer.echo(report.dumps())
    elif report_file is not None:
        write_whole(report_file, report.dumps().encode() + b"\n")
    raise typer.Exit(0 if report.ok else 1)


def _print_item(item: CheckItem) -> None:
    typer.echo(f"{item.state:<4}  {item.name}: {item.detail}")
    if item.fix:
        typer.echo(f"      fix: {item.fix}")
    sys.stdout.flush()


def _check_live(console: Console, env_id: str, tasks: int, timeout: float | None) -> CheckReport:
    """Check with a line that tells how far it is."""
    seen: set[str] = set()
    with console.status(f"checking {env_id}") as status:

        def on_item(item: CheckItem) -> None:
            seen.add(item.name)
            status.update(
                f"checking {env_id}: {len(seen)} of {len(ITEMS) + 1} done, {item.name} {item.state}"
            )

        return check_environment(env_id, tasks=tasks, timeout=timeout, on_item=on_item)


_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


def _table(report: CheckReport) -> Table:
    table = Table("check", "", "what was seen")
    for item in report.items:
        seen = Text(item.detail)
        if item.fix:
            seen.append(f"\nfix: {item.fix}", style="bold")
        table.add_row(Text(item.name), Text(item.state, style=_STYLES[item.state]), seen)
    return table


@app.command(short_help="Act in an environment yourself.")
def play(
    env_id: IdArgument,
    task: TaskOption = None,
    split: SplitOption = None,
    seed: SeedOption = 0,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder for pictures; a temporary one, which goes at the end, otherwise."),
    ] = None,
) -> None:
    """Act in an environment yourself: type `tool argument=value ...` or a text.

    A value is a word, text in quotes, or JSON; `tool {"argument": value}` gives all at once. `:help` lists
    the tools, `:oracle` plays the scripted next action, `:text WORDS` is never a call, `:quit` leaves. An
    empty line does nothing.

    \b
    Examples:
      tiderl env play tide/Safe-v0
      tiderl env play tide/Pointer-v0 --seed 3 --images shots
      printf 'try_code 40\\n:oracle\\n:quit\\n' | tiderl env play tide/Safe-v0
    """
    env = make(env_id)
    try:
        with orderly_end(), Player(env, Console(), images) as player:
            code = player.run(env_id, seed, options_of(task, split))
    finally:
        env.close()
    raise typer.Exit(code)
