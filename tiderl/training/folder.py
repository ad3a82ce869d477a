"""The folder of one run.

Invariant: a folder belongs to one configuration; a finished run is never written to again; what a run
adds is written beside its target and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from tiderl.config import RunConfig, dump_config
from tiderl.errors import ResourceError, RunExists

MAY_CHANGE = {
    "training.updates",
    "training.max_wall_s",
    "training.stop",
    "runs_dir",
    "evaluation",
    "checkpoint",
}
"""Keys that may differ when a run is resumed: they do not change the updates made so far."""


class RunFolder:
    """`runs/NAME/` of a run, locked while it is used."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.runs_dir) / config.name
        self._lock: int | None = None
        self._made: list[Path] = []

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def step_path(self, step: int) -> Path:
        """The folder of the resumable checkpoint after update `step`."""
        return self.checkpoints / f"step-{step:06d}"

    def inspect(self, *, fresh: bool = False) -> int | None:
        """The update to resume after, or None for a new run. Writes nothing.

        Raises:
            RunExists: the folder holds a finished run, an unfinished one with another configuration,
                or files that no run of ours made.
        """
        if fresh or not self.path.exists() or not any(self.path.iterdir()):
            return None
        other = f"choose another with name=..., or start over with --fresh, which deletes {self.path}"
        if not (self.path / "config.yaml").exists():
            raise RunExists(
                f"'{self.path}' is not empty and holds no run", fix="choose another folder with name=..."
            )
        if (self.path / "summary.json").exists():
            raise RunExists(f"run folder '{self.path}' already holds a finished run", fix=other)
        before = yaml.safe_load((self.path / "config.yaml").read_text())
        changed = [k for k in _differences(before, self.config.model_dump(mode="json")) if not _free(k)]
        if changed:
            raise RunExists(
                f"run folder '{self.path}' holds an unfinished run with another {', '.join(changed[:3])}",
                fix=f"resume it with its own values, {other}",
            )
        steps = self.resumable()
        return steps[-1] if steps else None

    def resumable(self) -> list[int]:
        """Updates at which a whole checkpoint stands, oldest first."""
        found = []
        for folder in self.checkpoints.glob("step-*"):
            if (folder / "run.json").exists():
                found.append(int(folder.name.removeprefix("step-")))
        return sorted(found)

    def open(self, resume: int | None) -> None:
        """Create the folder (or empty it, for a new run), lock it and write `config.yaml`.

        Raises:
            RunExists: another process is using the folder.
            ResourceError: the folder cannot be made.
        """
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise ResourceError(
                f"run folder '{self.path}' cannot be made: {error.strerror}", fix="set runs_dir elsewhere"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = None
            raise RunExists(
                f"run folder '{self.path}' is in use by another process", fix="choose another name=..."
            ) from error
        if resume is None:
            for entry in self.path.iterdir():
                if entry.name != ".lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.checkpoints.mkdir(exist_ok=True)
        (self.path / "config.yaml").write_text(dump_config(self.config))

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that failed before its first number: nothing half-written stays.

        Call it while the folder is ours: another process' folder is left alone.
        """
        if self._lock is None:
            return
        if not self.resumable() and not (self.path / "summary.json").exists():
            metrics = self.path / "metrics.jsonl"
            if not metrics.exists() or not metrics.read_text().strip():
                shutil.rmtree(self.path, ignore_errors=True)
                for folder in self._made:
                    if folder.exists() and not any(folder.iterdir()):
                        folder.rmdir()

    def need_free(self, size: int) -> None:
        """Raises `ResourceError` when fewer than `size` bytes are free where the run is written."""
        probe = self.path
        while not probe.exists():
            probe = probe.parent
        free = shutil.disk_usage(probe).free
        if free < size:
            raise ResourceError(
                f"the run's checkpoints need {size / 1e9:.1f} GB of disk, but {free / 1e9:.1f} GB are free",
                where=str(self.path),
                fix="free some, or set runs_dir to another disk",
            )

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` resumable checkpoints."""
        for step in self.resumable()[:-keep]:
            shutil.rmtree(self.step_path(step), ignore_errors=True)

    def read_state(self, step: int) -> dict[str, Any]:
        """The counters of a checkpoint."""
        data: dict[str, Any] = json.loads((self.step_path(step) / "run.json").read_text())
        return data


def _free(key: str) -> bool:
    return any(key == k or key.startswith(k + ".") for k in MAY_CHANGE)


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{prefix}{k}.")]
    return [] if old == new else [prefix.rstrip(".")]
