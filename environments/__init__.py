"""Built-in environments: the first plug-ins, found like a user's own.

Invariant: importing this package registers ids and imports no environment; each is imported when it is
made. In all of them a task's split follows from a hash of its content, so train and test cannot overlap.
"""

from __future__ import annotations

from tiderl.env.adapters import register_family
from tiderl.env.registry import register

register("tide/Calculator-v0", cls="tiderl.environments.calculator:Calculator")
register("tide/Pointer-v0", cls="tiderl.environments.pointer:Pointer")
register("tide/Safe-v0", cls="tiderl.environments.safe:Safe")
register("tide/Waiting-v0", cls="tiderl.environments.waiting:Waiting")


def _text_gym(name: str, **kwargs: object) -> object:
    """The adapter for `gymnasium/<name>`, imported when first used."""
    from .gymnasium_text import make_text_gym

    return make_text_gym(name, **kwargs)


register_family(
    "gymnasium",
    _text_gym,
    names=lambda: ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "Taxi-v4"),
    package="tiderl",
)
