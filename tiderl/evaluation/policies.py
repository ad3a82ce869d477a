"""From a policy's SPEC (`oracle`, `hf:FOLDER`, `openai:URL#MODEL`, a plug-in's `NAME:ARGUMENT`) to a policy.

Invariant: built-in policies are found exactly as a user's are, through the entry-point group
`tiderl.agents`; only `hf` and `run`, which need an engine, are known here by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ..agent.policy import Policy, PolicyOptions
from ..errors import ConfigError, MissingExtra, TideError, nearest
from .episode import EpisodePlayer
from .plan import EvaluationPlan

GROUP = "tiderl.agents"
ENGINE_SCHEMES = {"hf": "hf:FOLDER_OR_HUB_NAME", "run": "run:RUN_DIR"}
SHAPES = {"openai": "openai:BASE_URL#MODEL", **ENGINE_SCHEMES}


def installed() -> dict[str, EntryPoint]:
    """The policies that installed packages register, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def list_policies() -> list[str]:
    """The shapes of all SPECs that this installation understands."""
    return [SHAPES.get(name, name) for name in sorted({*installed(), *ENGINE_SCHEMES})]


def parse_spec(spec: str) -> tuple[str, str]:
    """(scheme, what follows the first colon).

    Raises:
        ConfigError: no policy has that name; the nearest ones are named.
    """
    scheme, _, argument = spec.strip().partition(":")
    known = {*installed(), *ENGINE_SCHEMES}
    if scheme not in known:
        if spec.strip() and Path(spec.strip()).is_dir():
            run = (Path(spec.strip()) / "config.yaml").is_file()
            fix = f"did you mean {'run' if run else 'hf'}:{spec.strip()}?"
        elif near := nearest(scheme, known):
            fix = f"did you mean {' or '.join(SHAPES.get(n, n) for n in near)}?"
        else:
            fix = f"use one of {', '.join(list_policies())}"
        raise ConfigError(f"there is no policy called {scheme!r}", where=f"--policy {spec}", fix=fix)
    if scheme in SHAPES and not argument:
        raise ConfigError(
            f"the policy {scheme!r} says nothing after the colon",
            where=f"--policy {spec}",
            fix=f"write {SHAPES[scheme]}",
        )
    return scheme, argument


def load_policy(plan: EvaluationPlan) -> Policy | EpisodePlayer:
    """The policy that `plan.policy` names, not started yet. Writes nothing.

    Raises:
        ConfigError: SPEC is wrong, or the plug-in behind it cannot be loaded.
        ModelError: the model's folder is missing or cannot be chatted with.
        MissingExtra: `hf` or `run` without the packages of an engine.
    """
    scheme, argument = parse_spec(plan.policy)
    if scheme in ENGINE_SCHEMES:
        from .policies_engine import load_engine_policy

        return load_engine_policy(scheme, argument, plan)
    options = PolicyOptions(
        temperature=plan.temperature,
        max_tokens=plan.max_tokens,
        seed=plan.seed,
        format=plan.format,
        extra=plan.policy_kwargs,
    )
    return _from_plugin(scheme, argument, options)


def _from_plugin(name: str, argument: str, options: PolicyOptions) -> Policy | EpisodePlayer:
    entries: Sequence[EntryPoint] = tuple(entry_points(group=GROUP, name=name))
    values = {entry.value for entry in entries}
    where = f"entry point {GROUP}: {name} = {entries[0].value}"
    if len(values) > 1:
        raise ConfigError(
            f"two packages register a policy called {name!r} ({', '.join(sorted(values))})",
            fix="uninstall one of them",
        )
    try:
        policy = entries[0].load()(argument, options)
    except TideError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the policy {name!r} needs the package {error.name}",
            where=where,
            fix=f"pip install {error.name}",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the policy {name!r} cannot be loaded: {type(error).__name__}: {error}",
            where=where,
            fix="repair or reinstall the package that registers it",
        ) from error
    if not isinstance(policy, Policy | EpisodePlayer):
        raise ConfigError(
            f"the policy {name!r} is a {type(policy).__name__}, not a tiderl Policy",
            where=where,
            fix="derive it from tiderl.agent.policy.Policy",
        )
    return policy
