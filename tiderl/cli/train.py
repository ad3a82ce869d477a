"""`tiderl train`: a training run from a YAML file.

Invariant: a fault in the input ends with one sentence and exit code 2 before anything is written; Ctrl-C
ends with what was done saved and exit code 130.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiderl.errors import MissingExtra, ResourceError

if TYPE_CHECKING:
    from tiderl.config import RunConfig


def train(
    config: Annotated[str, typer.Argument(help="YAML file, or the name of a shipped configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Replace values of the configuration.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration, print it resolved and end.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what the run folder holds and start over.")
    ] = False,
    tensorboard: Annotated[
        int | None, typer.Option(metavar="PORT", help="Also serve TensorBoard on this local port.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the summary and errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a policy with reinforcement learning.

    Examples:

      tiderl train quickstart

      tiderl train configs/quickstart.yaml seed=1 name=quickstart-1

      tiderl train quickstart --dry-run training.learning_rate=1e-4 model.lora=null

    A run that was interrupted goes on where it was when the same command is given again.
    """
    from tiderl.config import dump_config, load_config
    from tiderl.config.check import absent_model, check_names

    run_config = load_config(config, overrides or [])
    check_names(run_config)
    if dry_run:
        if (absent := absent_model(run_config)) is not None:
            typer.echo(f"note: the model {absent} is not on this machine: a run would download it", err=True)
        typer.echo(dump_config(run_config), nl=False)
        return
    _need_packages()
    if tensorboard is not None:
        _port_is_free(tensorboard)
    from tiderl.training.run import Interrupted

    try:
        summary = asyncio.run(_run(run_config, fresh=fresh, quiet=quiet, tensorboard=tensorboard))
    except Interrupted as stop:
        kept = "what was done is saved" if stop.saved else "nothing was saved yet"
        typer.echo(f"{stop}; {kept}. Give the same command again to go on ({stop.folder.path}).", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(summary, indent=2) if as_json else _text(run_config, summary))


async def _run(config: RunConfig, *, fresh: bool, quiet: bool, tensorboard: int | None) -> dict[str, Any]:
    from tiderl.telemetry.progress import RunProgress
    from tiderl.training.run import TrainingRun

    with RunProgress(config.training.updates, quiet=quiet) as progress:
        run = TrainingRun(config, progress, fresh=fresh)
        board = await _serve_board(run.folder.path / "tensorboard", tensorboard, progress)
        interrupts = 0

        def interrupt() -> None:
            nonlocal interrupts
            interrupts += 1
            if interrupts == 1:
                progress.say("stopping: saving what was done (Ctrl-C again to stop at once)")
                run.stop.set()
            else:
                signal.default_int_handler(signal.SIGINT, None)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await run.execute()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if board is not None and board.returncode is None:
                board.terminate()
                await asyncio.wait_for(board.wait(), 10)


async def _serve_board(folder: Path, port: int | None, progress: Any) -> asyncio.subprocess.Process | None:
    if port is None:
        return None
    command = ["-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port), "--host", "127.0.0.1"]
    quiet = asyncio.subprocess.DEVNULL
    board = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=quiet, stderr=quiet)
    progress.say(f"TensorBoard: http://127.0.0.1:{port}")
    return board


def _port_is_free(port: int) -> None:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}",
                where="--tensorboard",
                fix="give another port",
            ) from error


def _need_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "vllm", "transformers", "peft") if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"training needs {', '.join(missing)}",
            fix="install them with: pip install 'tiderl[cpu]' (or 'tiderl[gpu]'), or use `make setup`",
        )


def _text(config: RunConfig, summary: dict[str, Any]) -> str:
    folder = Path(config.runs_dir) / config.name
    lines = [f"run {summary['name']}: {summary['updates']} updates in {summary['wall_s']:.0f} s"]
    if summary["success_after"] is not None:
        low, high = summary["success_ci95"]
        before = summary["success_before"]
        lines.append(
            f"success {before:.3f} -> {summary['success_after']:.3f} "
            f"[{low:.3f}, {high:.3f}] on {summary['evaluation_episodes']} held-out tasks"
        )
    lines += [
        f"goodput {summary['goodput_tokens_per_s']:.0f} tokens/s ({summary['goodput_is']})",
        f"KV hit rate {summary['kv_hit_rate']:.4f} · re-prefilled tokens {summary['reprefilled_tokens']} · "
        f"largest log-prob gap {summary['max_logprob_gap']:.1e} · "
        f"episodes masked {summary['episodes_masked']} of {summary['episodes']} · "
        f"peak memory {summary['peak_memory_mb'] / 1000:.1f} GB",
        f"summary: {folder / 'summary.json'} · model: {folder / 'checkpoints' / 'final'}",
        f"next: tiderl eval --env {config.environment.id} --policy run:{folder} --episodes 200",
    ]
    return "\n".join(lines)
