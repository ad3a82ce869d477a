"""What an evaluation reads from the folder of a training run.

Invariant: it only reads; the weights it names are a whole checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import RunConfig, load_config
from ..errors import ConfigError, ModelError


def read_config(run: Path) -> RunConfig:
    """The configuration with which the run was made.

    Raises:
        ConfigError: the folder is missing or is not a run.
    """
    if not run.is_dir():
        raise ConfigError(
            f"there is no run folder {str(run)!r}", fix="give a folder that `tiderl train` wrote"
        )
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            "the folder is not a training run: it has no config.yaml",
            where=str(run),
            fix="give a folder that `tiderl train` wrote, or hf:FOLDER for a model",
        )
    return load_config(run / "config.yaml")


def find_weights(run: Path) -> Path:
    """`checkpoints/final`, or the newest whole checkpoint of a run that has not ended.

    Raises:
        ModelError: the run has none yet.
    """
    folder = run / "checkpoints"
    steps = [p for p in folder.glob("step-*") if (p / "run.json").is_file()]
    for found in (folder / "final", *sorted(steps, reverse=True)):
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
    raise ModelError(
        "the run has no checkpoint yet", where=str(folder), fix="let it train until its first checkpoint"
    )


def evaluation_defaults(run: Path, env_id: str) -> dict[str, Any]:
    """What the run's own evaluation used, as far as it is about the same environment.

    Keys: `seed`, and for the same environment `split`, `episodes` and `env_kwargs`.
    """
    config = read_config(run)
    if config.environment.id != env_id:
        return {"seed": config.seed}
    return {
        "seed": config.seed,
        "split": config.evaluation.split,
        "episodes": config.evaluation.episodes or None,
        "env_kwargs": dict(config.environment.kwargs),
    }
