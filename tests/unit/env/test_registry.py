"""Environments by id: registered once, made anywhere, refused with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import tiderl
from tiderl.env import adapters, registry
from tiderl.env.base import AgentEnv
from tiderl.env.ends import EndReason
from tiderl.errors import EnvironmentFault, UnknownEnvironment


class Small(AgentEnv):
    """A small one.

    More of it.
    """

    def __init__(self, size: int = 1, **limits):
        super().__init__(**limits)
        self.size = size

    def score(self, text):
        return 1.0


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """Leave both registries as they were."""
    ours, theirs, kept = dict(registry._entries), dict(gymnasium.registry), dict(adapters._families)
    yield
    registry._entries.clear()
    registry._entries.update(ours)
    gymnasium.registry.clear()
    gymnasium.registry.update(theirs)
    adapters._families.clear()
    adapters._families.update(kept)


def test_a_decorated_class_can_be_made_in_three_ways():
    decorated = tiderl.register("mine/Small-v0", size=3)(Small)
    assert decorated is Small
    env = tiderl.make("mine/Small-v0", max_turns=2)
    assert type(env) is Small
    assert (env.size, env.max_turns) == (3, 2)
    assert gymnasium.make("mine/Small-v0").unwrapped.size == 3
    check_env(env, skip_render_check=True)
    again = env.spec.make().unwrapped
    assert (again.size, again.max_turns) == (3, 2)


def test_a_spec_says_what_there_is():
    tiderl.register("mine/Small-v1", cls=Small, size=3)
    spec = tiderl.spec("mine/Small-v1")
    assert spec.description == "A small one."
    assert spec.kwargs == {"size": 3}
    assert spec.entry == f"{__name__}:Small"
    assert (spec.splits, spec.max_turns, spec.reward_range) == (("train", "test"), 16, (0.0, 1.0))
    assert (spec.has_oracle, spec.tools, spec.modality) == (False, [], "text")


@pytest.mark.parametrize("bad", ["Small-v0", "mine/Small", "mine/Small-vx", "a/b/c-v0", "", "mine/ Small-v0"])
def test_malformed_ids_are_refused(bad):
    with pytest.raises(EnvironmentFault, match="mine/Maze-v0"):
        tiderl.register(bad, cls=Small)


def test_t41_an_instance_is_refused():
    with pytest.raises(EnvironmentFault, match="instance of Small.*class"):
        tiderl.register("mine/Small-v2", cls=Small())


def test_other_things_are_refused():
    class Foreign(gymnasium.Env):
        pass

    with pytest.raises(EnvironmentFault, match="no AgentEnv"):
        tiderl.register("mine/Foreign-v0", cls=Foreign)
    with pytest.raises(EnvironmentFault, match="cannot make"):
        tiderl.register("mine/Three-v0", cls=3)
    with pytest.raises(EnvironmentFault, match="module:Class"):
        tiderl.register("mine/Path-v0", cls="no_colon")
    tiderl.register("mine/Wrong-v0", cls=_wrong)
    with pytest.raises(EnvironmentFault, match="no AgentEnv"):
        tiderl.make("mine/Wrong-v0")


def _wrong() -> object:
    return object()


def _factory(size: int = 5) -> Small:
    return Small(size)


def test_a_function_may_make_environments():
    tiderl.register("mine/Made-v0", cls=_factory)
    assert tiderl.make("mine/Made-v0").size == 5
    assert tiderl.spec("mine/Made-v0").description == "A small one."


def test_an_id_belongs_to_one_environment():
    class Other(AgentEnv):
        pass

    tiderl.register("mine/Same-v0", cls=Small)
    tiderl.register("mine/Same-v0", cls=Small)
    with pytest.raises(EnvironmentFault, match="taken by"):
        tiderl.register("mine/Same-v0", cls=Other)


def test_unknown_ids_name_near_ones():
    with pytest.raises(UnknownEnvironment, match="did you mean tide/Safe-v0"):
        tiderl.make("tide/Saef-v0")
    with pytest.raises(UnknownEnvironment, match="tide/Calculator-v0"):
        tiderl.spec("calculator")
    with pytest.raises(UnknownEnvironment, match="cannot be imported"):
        tiderl.make("no_such_module:a/B-v0")
    with pytest.raises(UnknownEnvironment, match=r"safe:demo/Safe-v0 for a file safe\.py"):
        tiderl.spec("./safe.py:Safe")


def test_a_module_in_front_of_an_id_may_lie_in_the_current_folder(tmp_path, monkeypatch):
    source = (
        "import tiderl\n@tiderl.register('mine/Here-v0')\nclass Here(tiderl.AgentEnv):\n    splits = ()\n"
    )
    (tmp_path / "lies_here.py").write_text(source)
    (tmp_path / "does_not_parse.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert tiderl.spec("lies_here:mine/Here-v0").id == "mine/Here-v0"
    assert sys.path[-1] == str(tmp_path)
    with pytest.raises(EnvironmentFault, match="does_not_parse.*SyntaxError"):
        tiderl.make("does_not_parse:mine/Here-v0")


def test_wrong_arguments_and_failing_constructors_are_faults():
    class Fails(AgentEnv):
        def __init__(self):
            raise OSError("no disk")

    tiderl.register("mine/Small-v3", cls=Small)
    with pytest.raises(EnvironmentFault, match="no argument 'sise'"):
        tiderl.make("mine/Small-v3", sise=3)
    tiderl.register("mine/Made-v1", cls=_factory)
    with pytest.raises(EnvironmentFault, match="sise"):
        tiderl.make("mine/Made-v1", sise=3)
    tiderl.register("mine/Fails-v0", cls=Fails)
    with pytest.raises(EnvironmentFault, match="OSError: no disk"):
        tiderl.make("mine/Fails-v0")


def test_late_import_paths_that_are_wrong_are_listed_as_broken():
    tiderl.register("mine/Late-v0", cls="no_such_module:Late")
    with pytest.raises(EnvironmentFault, match="no_such_module"):
        tiderl.make("mine/Late-v0")
    assert all(spec.id != "mine/Late-v0" for spec in tiderl.list_environments())
    broken = [one for one in registry.broken_plugins() if one.name == "mine/Late-v0"]
    assert "no_such_module" in broken[0].error
    registry._plugins.broken.remove(broken[0])


def test_families_own_a_namespace():
    adapters.register_family("fam", lambda name, **kw: Small(**kw), lambda: ["One-v0"], package="me")
    env = tiderl.make("fam/Two-v0", size=9)
    assert env.size == 9
    assert env.spec.make().unwrapped.size == 9
    spec = tiderl.spec("fam/One-v0")
    assert (spec.package, spec.entry) == ("me", None)
    assert "fam/One-v0" in [one.id for one in tiderl.list_environments()]
    with pytest.raises(EnvironmentFault, match="belongs to me"):
        adapters.register_family("fam", lambda name: None, list, package="you")


def test_builtin_environments_are_listed_without_an_import():
    ids = [spec.id for spec in tiderl.list_environments()]
    assert {"tide/Calculator-v0", "tide/Pointer-v0", "tide/Safe-v0", "gymnasium/FrozenLake-v1"} <= set(ids)
    assert ids == sorted(ids)


def test_lazy_exports():
    assert tiderl.EndReason is EndReason
    assert tiderl.messages.user("a")["role"] == "user"
    assert "check_environment" in dir(tiderl)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = tiderl.nothing_such
