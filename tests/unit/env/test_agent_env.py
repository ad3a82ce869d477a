"""The ways of writing an environment, and what holds for all of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

import tiderl
from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.ends import EndReason
from tiderl.env.tasks import LazyTasks
from tiderl.errors import EnvironmentFault

WAYS = ("Echo", "Talk", "Counter", "Walk")


def play(env: Any, actions: Any, **reset: Any) -> list[Any]:
    """All that an episode returns."""
    out = [env.reset(**reset)]
    for action in actions:
        out.append(env.step(action))
        if out[-1][2] or out[-1][3]:
            break
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_checker_passes(samples, way):
    # A tool that is made to fail must not be drawn by the checker's random actions.
    check_env(type(way, (getattr(samples, way),), {"fail": None})(), skip_render_check=True)


@pytest.mark.parametrize("way", ["Echo", "Talk", "Counter"])
def test_the_oracle_gets_the_maximum(samples, way):
    env = getattr(samples, way)()
    for seed in range(8):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(env.oracle())
            total, over = total + reward, terminated or truncated
        assert total == pytest.approx(1.0)
        assert info["success"] is True
        assert info["end"] == "success"


def test_score_ends_after_one_reply_with_feedback(samples):
    class Graded(samples.Echo):
        def score(self, text):
            return len(text) / 10, f"{len(text)} letters"

    env = Graded()
    env.reset(options={"task": 1})
    observation, reward, terminated, truncated, info = env.step("abc")
    assert observation == (m.user("3 letters"),)
    assert (reward, terminated, truncated) == (0.3, True, False)
    assert info == {"task": 1, "turn": 1, "end": "failure", "success": False}


def test_t74_rewards_of_all_turns_are_kept(samples):
    env = samples.Talk()
    turns = play(env, ["one", "two", "three"])[1:]
    assert [turn[1] for turn in turns] == [0.2, 0.0, 0.8]
    assert turns[-1][2] is True
    assert turns[-1][4]["end"] == "success"
    assert turns[-1][0] == ()


def test_the_reward_of_an_episode_decides_success_not_the_last_one(samples):
    turns = play(samples.Talk(), ["two", "three"])
    assert turns[-1][4] == {"task": 0, "turn": 2, "end": "failure", "success": False}


@pytest.mark.parametrize("way", WAYS)
def test_t46_the_seed_and_the_task_decide_everything(samples, way):
    make = getattr(samples, way)
    actions = {"Counter": [samples.call("add", n=1)] * 3}.get(way, ["right", "one", "right"])
    env, other = make(), make()
    random.seed(1)
    np.random.seed(1)
    first = play(env, actions, seed=5)
    random.seed(2)
    np.random.seed(2)
    play(other, actions, seed=6)
    assert data_equivalence(play(other, actions, seed=5), first, exact=True)
    assert data_equivalence(play(env, actions, seed=5), first, exact=True)


def test_t48_each_environment_draws_from_its_own_generator(samples):
    env, other = samples.Counter(), samples.Counter()
    env.reset(seed=3)
    noise = env.noise
    other.reset(seed=4)
    random.seed(0)
    np.random.seed(0)
    other.reset(seed=3)
    assert other.noise == noise
    assert np.random.get_state()[1][0] == np.random.RandomState(0).get_state()[1][0]


def test_the_task_does_not_depend_on_the_seed_when_it_is_named(samples):
    env = samples.Counter()
    seen = set()
    for seed in range(5):
        _, info = env.reset(seed=seed, options={"task": "test-5", "split": "test"})
        assert info == {"task": "test-5", "turn": 0}
        seen.add(env.noise)
    assert len(seen) > 1
    _, info = env.reset(seed=1)
    assert info["task"].startswith("train-")


def test_a_named_task_leaves_the_generator_alone(samples):
    class Drawn(samples.Echo):
        def start(self, task):
            return str(self.np_random.integers(10**9))

    env = Drawn()
    first, _ = env.reset(seed=3, options={"task": 0})
    second, _ = env.reset(seed=3, options={"task": 3})
    assert first == second


def test_ids_may_come_as_text(samples):
    env = samples.Echo()
    assert env.reset(options={"task": "2"})[1]["task"] == 2
    with pytest.raises(EnvironmentFault, match="no task 'seven'"):
        env.reset(options={"task": "seven"})
    with pytest.raises(EnvironmentFault, match="'train', 'test'"):
        env.reset(options={"split": "validation"})


@pytest.mark.parametrize(
    ("tasks", "word"),
    [
        ([{"no": 1}], "no id"),
        ([{"id": 1.5}], "no id"),
        ([{"id": True}], "no id"),
        ([{"id": 1}, {"id": 1}], "twice"),
        ([], "no tasks"),
        ({"id": 1}, "dict"),
        ("ab", "str"),
    ],
)
def test_faulty_task_lists_are_named(tasks, word):
    class Bad(AgentEnv):
        def tasks(self, split):
            return tasks

    with pytest.raises(EnvironmentFault, match=word):
        Bad().reset(options={"task": 1})


def test_lazy_tasks_make_only_what_is_asked_for():
    made = []

    def make(number):
        made.append(number)
        return {"id": number}

    class Lazy(AgentEnv):
        def tasks(self, split):
            return LazyTasks(range(10**6), make)

    env = Lazy()
    env.reset(options={"task": 999_999})
    assert made == [999_999]
    assert len(env.task_lists.tasks("train")[10:20]) == 10
    assert env.task_lists.ids("train")[:2] == [0, 1]


def test_an_authors_changes_to_a_task_do_not_outlive_the_episode(samples):
    class Spoils(samples.Echo):
        ALL = [{"id": 0, "word": "x", "more": []}]

        def tasks(self, split):
            return self.ALL

        def score(self, text):
            self.task["more"].append(text)
            return 0.0

    env = Spoils()
    play(env, ["a"])
    assert env.reset()[1] == {"task": 0, "turn": 0}
    assert env.task["more"] == []


def test_openings_of_every_form():
    def opening(value: Any, **limits: Any) -> Any:
        class One(AgentEnv):
            def start(self, task):
                return value

            def score(self, text):
                return 1.0

        return One(**limits).reset()[0]

    picture = np.zeros((2, 2, 3), np.uint8)
    assert opening("hi") == (m.user("hi"),)
    assert len(m.images_of(opening(picture)[0])) == 1
    assert opening(["a", "b"])[0]["content"][1]["text"] == "b"
    assert opening("hi", system="be kind") == (m.system("be kind"), m.user("hi"))
    given = [m.system("mine"), m.user("q")]
    assert opening(given, system="be kind") == tuple(given)
    with pytest.raises(EnvironmentFault, match="float64"):
        opening(picture / 1.0)
    with pytest.raises(EnvironmentFault, match="robot"):
        opening([{"role": "robot", "content": ""}])


def test_nothing_returned_is_shared_with_what_an_author_keeps():
    kept = [m.user("q", np.zeros((2, 2, 3), np.uint8))]

    class Keeps(AgentEnv):
        def start(self, task):
            return kept

        def reply(self, text):
            return kept[0]["content"]

    env = Keeps()
    observation, _ = env.reset()
    m.images_of(observation[0])[0][:] = 9
    assert m.images_of(kept[0])[0].max() == 0
    answer = env.step("x")[0]
    assert not np.shares_memory(m.images_of(answer[0])[0], m.images_of(kept[0])[0])


def test_limits_can_be_given_and_unknown_arguments_are_named(samples):
    env = samples.Counter(max_turns=2, on_no_tool="finish")
    assert (env.max_turns, samples.Counter.max_turns) == (2, 6)
    with pytest.raises(EnvironmentFault, match="max_trun.*max_turns"):
        samples.Counter(max_trun=2)


def test_a_class_that_forgets_super_init_works():
    class Forgets(AgentEnv):
        def __init__(self):
            self.mine = 1

        def score(self, text):
            return 1.0

    env = Forgets()
    env.reset(seed=1)
    assert env.step("x")[2]
    assert "step" in env.timings


def test_without_a_way_to_answer_the_fault_says_what_to_write():
    env = type("Mute", (AgentEnv,), {})()
    env.reset()
    with pytest.raises(EnvironmentFault, match="score, reply"):
        env.step("x")
    with pytest.raises(EnvironmentFault, match="no oracle"):
        env.oracle()
    assert not env.has_oracle


def test_step_needs_a_running_episode(samples):
    env = samples.Echo()
    with pytest.raises(EnvironmentFault, match="before reset"):
        env.step("x")
    play(env, ["x"])
    with pytest.raises(EnvironmentFault, match="ended"):
        env.step("x")
    with pytest.raises(EnvironmentFault, match="outside"):
        env.give(1.0)


def test_times_are_beside_info(samples):
    env = samples.Counter()
    _, info = env.reset(seed=1)
    assert set(info) == {"task", "turn"}
    assert set(env.step(samples.call("add", n=1))[4]) == {"task", "turn"}
    assert set(env.timings) == {"reset", "step"}


def test_spaces_follow_the_tools(samples):
    env = samples.Counter()
    assert [one["function"]["name"] for one in env.action_space.tools] == ["add", "refuse", "fail"]
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space


def test_ends_have_names():
    assert EndReason.SUCCESS.terminal
    assert not EndReason.MAX_TURNS.terminal
    assert not EndReason.INFRASTRUCTURE.valid
    assert EndReason("time").valid


def test_an_unknown_reset_option_is_refused():
    env = tiderl.make("tide/Safe-v0")
    with pytest.raises(EnvironmentFault, match="'tsk'"):
        env.reset(options={"tsk": 1})


@pytest.mark.parametrize("method", ["reply", "score"])
def test_a_method_that_no_class_brings_is_named(method: str) -> None:
    class Upward(tiderl.AgentEnv):
        pass

    setattr(Upward, method, lambda self, text: getattr(super(Upward, self), method)(text))
    env = Upward()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=rf"Upward has no {method}.*write {method}\(self, text\)"):
        env.step("hello")


def test_an_oracle_that_no_class_brings_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"has no oracle.*write oracle\(self\)"):
        tiderl.AgentEnv().oracle()
