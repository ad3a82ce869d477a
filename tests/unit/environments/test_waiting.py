"""tide/Waiting-v0: what follows from task and seed, what it sleeps, and traces."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiderl
from tiderl.env import messages as m
from tiderl.environments import latency
from tiderl.environments.draws import Draws
from tiderl.errors import EnvironmentFault

MIXTURE = {
    "kind": "mixture",
    "share": 0.1,
    "short": {"kind": "lognormal", "median": 0.2, "sigma": 0.5},
    "long": {"kind": "pareto", "least": 3, "alpha": 1.1, "longest": 30},
}


def waiting(**arguments: Any) -> Any:
    return tiderl.make("tide/Waiting-v0", **arguments)


def begin(env: Any, task: int = 0, seed: int = 0) -> str:
    observation, _ = env.reset(seed=seed, options={"task": task})
    return m.text_of(observation[-1])


def play(env: Any, task: int = 0, seed: int = 0, first: str | None = None) -> list[str]:
    """All observations of an episode of the oracle, whose first reply may be another text."""
    said, over, reply = [begin(env, task, seed)], False, first
    while not over:
        observation, _, terminated, truncated, _ = env.step(reply if reply is not None else env.oracle())
        over, reply = terminated or truncated, None
        said += [m.text_of(message) for message in observation]
    return said


def test_it_asks_for_as_many_words_as_it_says_and_all_are_in_the_vocabulary() -> None:
    env = waiting(turns=(3, 5), observation_words=(8, 20), prompt_words=(30, 40), reply_words=(1, 9), pace=0)
    words = set(env.vocabulary)
    for task in range(12):
        said = play(env, task)
        assert len(said) == len(env.plan)
        for text, turn in zip(said, env.plan, strict=True):
            assert len(text.split()) == turn.words
            assert text.split()[2] == str(turn.reply)
            assert set(text.split()) <= words
        assert 30 <= env.plan[0].words <= 40
        assert all(8 <= turn.words <= 20 for turn in env.plan[1:])


def test_a_wrong_number_of_words_costs_the_reward_and_not_the_episode() -> None:
    env = waiting(turns=(3, 3), pace=0)
    for wrong in (0, 1, 2, None):
        begin(env)
        rewards = []
        for turn in range(3):
            reply = env.oracle() + (" more" if turn == wrong else "")
            _, reward, terminated, _, info = env.step(reply)
            rewards.append(reward)
        assert terminated
        assert sum(rewards) == (1.0 if wrong is None else 0.0)
        assert info["success"] is (wrong is None)


def test_task_and_seed_make_the_episode() -> None:
    assert play(waiting(pace=0), 3, 5) == play(waiting(pace=0), 3, 5)
    assert play(waiting(pace=0), 3, 5) != play(waiting(pace=0), 3, 6)
    assert play(waiting(pace=0), 3, 5) != play(waiting(pace=0), 4, 5)


def test_how_long_it_takes_does_not_change_what_it_says() -> None:
    slow = waiting(latency=MIXTURE, pace=0)
    assert play(slow) == play(waiting(pace=0))
    assert max(turn.seconds for turn in slow.plan) > 0.01


def test_the_first_reply_chooses_among_the_variants() -> None:
    one, many = waiting(pace=0, turns=(2, 9)), waiting(pace=0, turns=(2, 9), variants=16)
    texts = [f"word{number}" for number in range(24)]
    assert len({tuple(play(one, first=text)) for text in texts}) == 1
    ways = {tuple(play(many, first=text)) for text in texts}
    assert len({way[0] for way in ways}) == 1, "the first observation is the group's"
    assert len({len(way) for way in ways}) > 3
    assert play(many, first="word0") == play(many, first="word0")


def test_it_sleeps_as_long_as_planned() -> None:
    env = waiting(turns=(2, 2), latency={"kind": "constant", "seconds": 0.08})
    begin(env)
    began = time.monotonic()
    env.step(env.oracle())
    assert 0.08 <= time.monotonic() - began < 2.0
    quick = waiting(turns=(2, 2), latency={"kind": "constant", "seconds": 30}, pace=0)
    begin(quick)
    began = time.monotonic()
    quick.step("no")
    assert time.monotonic() - began < 5


def test_limits_follow_from_the_slowest_answer() -> None:
    env = waiting(turns=(30, 40), latency=MIXTURE, observation_words=(9000, 9000))
    assert env.max_turns == 40
    assert env.step_timeout > 30
    assert env.episode_timeout > 40 * 30
    assert env.max_observation_chars > 9000 * 5
    assert waiting(max_turns=3).max_turns == 3, "an argument wins"


def test_pictures_come_as_often_as_asked_for() -> None:
    env = waiting(turns=(5, 5), image_size=28, image_every=2, pace=0)
    assert env.modality == "image"
    observation, _ = env.reset(seed=0, options={"task": 0})
    found, over = [observation], False
    while not over:
        observation, _, over, _, _ = env.step(env.oracle())
        found.append(observation)
    pictures = [[image for one in seen for image in m.images_of(one)] for seen in found]
    assert [len(one) for one in pictures[:5]] == [1, 0, 1, 0, 1]
    assert pictures[0][0].shape == (28, 28, 3)
    assert (pictures[0][0] != pictures[2][0]).any()


@pytest.mark.parametrize(
    "arguments",
    [
        {"turns": (3, 2)},
        {"turns": 3},
        {"turns": (0, 2)},
        {"observation_words": (2, 5)},
        {"reply_words": (1, 1000)},
        {"variants": 0},
        {"pace": -1.0},
        {"image_every": 0},
        {"latency": {"kind": "gauss"}},
        {"latency": {"kind": "constant"}},
        {"latency": {"kind": "constant", "seconds": -1}},
        {"latency": {"kind": "constant", "seconds": 1, "high": 2}},
        {"latency": {"kind": "uniform", "low": 2, "high": 1}},
        {"latency": {"kind": "pareto", "least": 1, "alpha": 0}},
        {"latency": {**MIXTURE, "share": 2}},
        {"latency": {**MIXTURE, "long": {"kind": "pareto"}}},
        {"trace": "/no/such/file"},
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault):
        waiting(**arguments)


def drawn(spec: dict[str, Any], count: int = 4000) -> list[float]:
    latency.check(spec)
    draws = Draws("test")
    return [latency.draw(spec, draws) for _ in range(count)]


def test_distributions_have_their_shapes() -> None:
    log = drawn({"kind": "lognormal", "median": 0.5, "sigma": 1.0, "longest": 1e9})
    assert median(log) == pytest.approx(0.5, rel=0.1)
    assert fmean(map(math.log, log)) == pytest.approx(math.log(0.5), abs=0.06)
    par = drawn({"kind": "pareto", "least": 2.0, "alpha": 3.0, "longest": 1e9})
    assert min(par) >= 2.0
    assert fmean(par) == pytest.approx(3.0, rel=0.1)
    assert fmean(x > 4.0 for x in par) == pytest.approx(1 / 8, abs=0.03)
    even = drawn({"kind": "uniform", "low": 1.0, "high": 3.0})
    assert (min(even) >= 1.0, max(even) <= 3.0) == (True, True)
    assert fmean(even) == pytest.approx(2.0, abs=0.05)
    both = drawn(MIXTURE)
    assert fmean(x >= 3.0 for x in both) == pytest.approx(0.1, abs=0.02)
    assert max(both) == 30.0
    assert set(drawn({"kind": "constant", "seconds": 0.5}, 3)) == {0.5}


@given(
    spec=st.one_of(
        st.fixed_dictionaries(
            {"kind": st.just("lognormal"), "median": st.floats(0, 9), "sigma": st.floats(0, 3)}
        ),
        st.fixed_dictionaries(
            {"kind": st.just("pareto"), "least": st.floats(0, 9), "alpha": st.floats(0.2, 5)}
        ),
    ),
    longest=st.floats(0, 100),
    key=st.text(max_size=8),
)
def test_no_draw_is_above_the_longest_or_below_zero(spec: dict[str, Any], longest: float, key: str) -> None:
    spec = {**spec, "longest": longest}
    latency.check(spec)
    draws = Draws(key)
    for _ in range(5):
        assert 0.0 <= latency.draw(spec, draws) <= longest
    assert latency.longest(spec) == longest


def test_a_trace_is_played_as_recorded(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    first = [{"observation": 40, "reply": 7, "seconds": 0.5}, {"observation": 16, "reply": 3, "seconds": 0.0}]
    other = [*first[:1], {"observation": 30, "reply": 2, "seconds": 9.0}, first[1]]
    rows = [{"task": "a", "turns": first}, {"task": "b", "turns": other}, {"task": "b", "turns": first}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = waiting(trace=str(file), overhead=6, pace=0)
    assert env.task_lists.ids("train") == [0, 1]
    said = play(env, 0)
    assert [len(text.split()) for text in said] == [34, 10]
    assert [(turn.reply, turn.seconds) for turn in env.plan] == [(7, 0.5), (3, 0.0)]
    ways = {len(play(env, 1, first=f"word{number}")) for number in range(12)}
    assert ways == {2, 3}
    assert env.step_timeout > 9.0


@pytest.mark.parametrize(
    "text",
    ["", "no json\n", '{"task": 1}\n', '{"task": 1, "turns": []}\n', '{"task": 1, "turns": [{"reply": 1}]}'],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(EnvironmentFault, match="line 1" if text else "no task"):
        waiting(trace=str(file))
