"""`tiderl rollout`: what the rollouts of a run did, and why.

Invariants: it only reads, also from a run under way; standard output is a table in a terminal and plain lines
elsewhere, or JSON; an unknown run or task is one sentence that names near ones.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tiderl.telemetry.attempts import read_story, waiting_shares
from tiderl.telemetry.explain import Story, duration
from tiderl.telemetry.explain import explain as stories_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name below runs/, or its decisions.jsonl.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

COLUMNS = (
    *("task", "state", "turns", "context", "seconds"),
    *("queued", "reset", "ready", "running", "environment"),
    *("released", "re-prefilled"),
)


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Tell what the rollouts of a run did, from its decision log.

    \b
    Examples:
      tiderl rollout tasks runs/quickstart
      tiderl rollout tasks quickstart --state failed --json
      tiderl rollout explain runs/quickstart g000012m03
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(short_help="List the tasks of a run.")
def tasks(
    run: RunArgument,
    state: Annotated[
        str | None, typer.Option(help="Only those in this state, such as done, failed or paused.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the tasks of a run: state, turns, where their time went, and tokens computed again.

    Shares are of the task's own time from queue to end.

    \b
    Examples:
      tiderl rollout tasks runs/quickstart
      tiderl rollout tasks quickstart --state failed --json
    """
    found = [one for one in read_story(run).summaries() if state is None or one.state == state]
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in found], indent=2))
        return
    cells = [
        (
            one.task,
            f"{one.state} ({one.reason})" if one.reason else one.state,
            str(one.turns),
            str(one.context),
            f"{one.seconds:.2f}",
            *(f"{share:.0%}" for share in waiting_shares(one).values()),
            str(one.released),
            str(one.reprefilled),
        )
        for one in found
    ]
    widths = [max(len(row[i]) for row in [COLUMNS, *cells]) for i in range(len(COLUMNS))]
    for row in [COLUMNS, *cells]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command(short_help="Tell the story of one task.")
def explain(
    run: RunArgument,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="An episode id such as g000012m03, or a part of only one.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Tell the story of one task in words: its waits, its turns, what was decided and whether it was right.

    Times are seconds since the task was queued.

    \b
    Examples:
      tiderl rollout explain runs/quickstart g000012m03
      tiderl rollout explain quickstart 12m03 --json
    """
    stories = stories_of(read_story(run), task)
    if as_json:
        typer.echo(
            json.dumps({"task": stories[0].task, "attempts": [s.to_json() for s in stories]}, indent=2)
        )
        return
    for story in stories:
        for line in told(story, len(stories)):
            typer.echo(line)


def told(story: Story, attempts: int) -> list[str]:
    """The lines of a story."""
    begun = duration(story.lines[0].at)
    again = f", attempt {story.attempt} of {attempts}" if attempts > 1 else ""
    head = f"task {story.task}{again}, queued {begun} after the rollout began"
    return [head, *(f"{line.after:+10.2f} s  {line.text}" for line in story.lines)]
