"""What no schema can know of a configuration: whether the things it names exist.

Invariant: nothing is written, downloaded or converted, and no training package is imported; what is refused
here, a run would refuse with the same words.
"""

from __future__ import annotations

from tiderl.agent.formats import get_format
from tiderl.config.schema import RunConfig
from tiderl.engine.checkpoint import read_checkpoint
from tiderl.engine.models import given_folder, is_at_hand
from tiderl.env.registry import make, spec
from tiderl.errors import ConfigError, EnvironmentFault
from tiderl.scheduling import make_policy
from tiderl.scheduling.decisions import Policy


def check_names(config: RunConfig) -> None:
    """Look up environment, splits, action format and model folder.

    A model named by its hub name may need the network, so it is not refused here; see `absent_model`.

    Raises:
        UnknownEnvironment: with near matches.
        EnvironmentFault: the environment cannot be made with `environment.kwargs`.
        ConfigError: it has no such split, or there is no such format, policy or option of that policy.
        ModelError: there is no such folder, or it holds no checkpoint that can be trained with this
            `model.max_length`.
    """
    check_splits(config)
    get_format(config.agent.format)
    scheduling_policy(config)
    folder = given_folder(config.model.path)
    if folder is not None:
        read_checkpoint(folder, config.model.max_length)


def scheduling_policy(config: RunConfig) -> Policy:
    """The scheduling policy a configuration names. Raises ConfigError for an unknown name or option."""
    rollout = config.rollout
    try:
        return make_policy(rollout.policy, **{"update_mode": rollout.update_mode, **rollout.policy_options})
    except ValueError as error:
        raise ConfigError(str(error), where="rollout.policy") from error


def absent_model(config: RunConfig) -> str | None:
    """The model's hub name where it is not on this machine, so that a run would have to download it."""
    name = config.model.path
    return name if given_folder(name) is None and not is_at_hand(name) else None


def check_splits(config: RunConfig) -> None:
    """Whether the environment exists and has the splits that are trained and evaluated on.

    Raises:
        UnknownEnvironment, EnvironmentFault, ConfigError: see `check_names`.
    """
    environment = config.environment
    splits = spec(environment.id).splits
    if environment.kwargs:
        try:
            made = make(environment.id, **environment.kwargs)
        except EnvironmentFault as error:
            where = error.where or f"environment.kwargs of {environment.id}"
            raise EnvironmentFault(error.what, where=where, fix=error.fix) from error
        splits = tuple(made.splits)
        made.close()
    for key, split in (("environment", environment.split), ("evaluation", config.evaluation.split)):
        if splits and split not in splits:
            raise ConfigError(
                f"{key}.split is '{split}', which {environment.id} does not have",
                fix=f"choose one of: {', '.join(splits)}",
            )
