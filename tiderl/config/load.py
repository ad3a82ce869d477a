"""From a YAML file and `a.b=c` overrides to a checked `RunConfig`.

Invariant: every fault names the key, the file or override it came from, and the nearest right key.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tiderl.config.faults import config_error
from tiderl.config.schema import RunConfig
from tiderl.errors import ConfigError, nearest


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` (a file, or the name of a shipped configuration such as `quickstart`).

    Raises:
        ConfigError: the file is missing or is no YAML mapping, an override is malformed, a key is
            unknown, or a value has the wrong type or range.
    """
    file = find_config(path)
    try:
        raw = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration cannot be read: {error.strerror}", where=str(file), fix="give a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not text", where=str(file), fix="give a YAML file") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise ConfigError(
            "the configuration is not valid YAML", where=f"{file}{line}", fix="mend the YAML there"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            "the configuration is not a mapping of keys to values",
            where=str(file),
            fix="write lines `key: value`",
        )
    origin = str(file)
    for override in overrides:
        key, sep, _ = override.partition("=")
        if not sep or not key.strip():
            lacks = "key before its '='" if sep else "'='"
            raise ConfigError(
                f"override '{override}' has no {lacks}", where="command line", fix="write it as a.b=value"
            )
    try:
        base = OmegaConf.create(raw)
        for key, _, value in (override.partition("=") for override in overrides):
            if value.strip() == "{}":  # drops what the file says; other mappings are merged into it
                OmegaConf.update(base, key.strip(), {}, merge=False)
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        what = "the overrides cannot be applied" if overrides else "the configuration cannot be resolved"
        raise ConfigError(f"{what}: {reason}", where=origin, fix="mend that value") from error
    return check_config(data, origin, {o.partition("=")[0] for o in overrides})


def find_config(path: str | Path) -> Path:
    """The file itself, or the shipped configuration of that name."""
    file = Path(path)
    if file.is_file():
        return file
    folder = resources.files("tiderl.configs")
    shipped = {p.name.removesuffix(".yaml"): p for p in folder.iterdir() if p.name.endswith(".yaml")}
    name = str(path).removesuffix(".yaml")
    if name in shipped:
        return Path(str(shipped[name]))
    near = nearest(Path(name).name, shipped)
    fix = f"give a YAML file or one of: {', '.join(near or sorted(shipped))}"
    raise ConfigError(f"no configuration '{path}'", where=str(Path.cwd()), fix=fix)


def check_config(data: Any, origin: str, overridden: typing.Collection[str] = ()) -> RunConfig:
    """Validate a plain mapping. `origin` and `overridden` only serve the error's text."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:

        def where(key: str) -> str:
            given = any(one == key or one.startswith(key + ".") for one in overridden)
            return "command line" if given else origin

        raise config_error(error, RunConfig, where) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
