"""From a YAML file and `a.b=c` overrides to checked workloads.

Invariant: every fault names the key, the file or override it came from, and the nearest right key.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tiderl.bench.rollout.workload import Grid, Workload
from tiderl.config.faults import config_error
from tiderl.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)
KINDS = frozenset({"constant", "uniform", "lognormal", "pareto", "mixture"})
"""Kinds of latency: steps of a fault's place that are no keys."""


def load_workload(path: str | Path, overrides: Sequence[str] = ()) -> Workload:
    """Read `path` (a file, or the name of a shipped workload such as `heavy_tail`).

    Raises:
        ConfigError: the file is missing or is no YAML mapping, an override is malformed, a key is
            unknown, or a value has the wrong type or range.
    """
    file = find(path)
    data = _read(file)
    if "axes" in data:
        raise ConfigError("this file is a grid of workloads", where=str(file), fix="add --grid")
    return _resolved(_check(Workload, _merged(data, overrides, str(file)), str(file)), file)


def load_grid(path: str | Path, overrides: Sequence[str] = ()) -> list[Workload]:
    """The workloads of a grid file; `overrides` apply to each. Raises ConfigError as `load_workload`."""
    file = find(path)
    data = _read(file)
    if "axes" not in data:
        raise ConfigError("this file is one workload, no grid", where=str(file), fix="leave out --grid")
    grid = _check(Grid, data, str(file))
    found = []
    for chosen in itertools.product(*(list(values.items()) for values in grid.axes.values())):
        name = " ".join(f"{axis}={value}" for axis, (value, _) in zip(grid.axes, chosen, strict=True))
        base: Any = OmegaConf.create({"name": name, **grid.base})
        for _, changes in chosen:
            for key, value in changes.items():
                OmegaConf.update(base, key, value, merge=False)
        plain = OmegaConf.to_container(base, resolve=True)
        assert isinstance(plain, dict)
        merged = _merged({str(k): v for k, v in plain.items()}, overrides, str(file))
        found.append(_resolved(_check(Workload, merged, f"{file}, {name}"), file))
    return found


def find(path: str | Path) -> Path:
    """The file itself, or the shipped workload of that name."""
    file = Path(path)
    if file.is_file():
        return file
    folder = resources.files("tiderl.configs").joinpath("bench")
    shipped = {p.name.removesuffix(".yaml"): p for p in folder.iterdir() if p.name.endswith(".yaml")}
    name = str(path).removesuffix(".yaml")
    if name in shipped:
        return Path(str(shipped[name]))
    near = nearest(Path(name).name, shipped)
    raise ConfigError(
        f"no workload '{path}'",
        where=str(Path.cwd()),
        fix=f"give a YAML file or one of: {', '.join(near or sorted(shipped))}",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise ConfigError(
            "the workload is not valid YAML", where=f"{file}{line}", fix="mend the YAML there"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError("the workload is not a mapping of keys to values", where=str(file))
    return data


def _merged(data: dict[str, Any], overrides: Sequence[str], origin: str) -> dict[str, Any]:
    for override in overrides:
        key, sep, _ = override.partition("=")
        if not sep or not key.strip():
            raise ConfigError(
                f"override '{override}' has no '='", where="command line", fix="write it as a.b=value"
            )
    try:
        merged = OmegaConf.merge(OmegaConf.create(data), OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the overrides cannot be applied: {reason}", where=origin) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _resolved(workload: Workload, file: Path) -> Workload:
    """A trace is looked for beside the file that names it, then in the current folder."""
    trace = workload.episodes.trace
    if trace is None:
        return workload
    for place in (file.parent / trace, Path(trace)):
        if place.is_file():
            episodes = workload.episodes.model_copy(update={"trace": str(place.resolve())})
            return workload.model_copy(update={"episodes": episodes})
    raise ConfigError(
        f"there is no trace {trace}", where=f"episodes.trace of {file}", fix="record one with --record"
    )


def _check(model: type[M], data: dict[str, Any], origin: str) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error(error, model, lambda key: origin, tags=KINDS) from error
