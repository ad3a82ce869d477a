"""tide/Calculator-v0."""

from __future__ import annotations

import json

import pytest

import tiderl
from tiderl.env import messages as m
from tiderl.environments.problems import HIGH, LOW, TEMPLATES, problem, solve
from tiderl.errors import EnvironmentFault


def calc(expression: str) -> dict:
    return m.assistant(None, [m.tool_call("calc", expression=expression)])


def answer(number: object) -> dict:
    return m.assistant(None, [m.tool_call("answer", number=number)])


@pytest.fixture
def env():
    env = tiderl.make("tide/Calculator-v0")
    env.reset(seed=0, options={"task": 5, "split": "test"})
    return env


def test_train_and_test_problems_do_not_overlap():
    train = {(p["question"]) for n in range(4096) for p in [problem("train", n)]}
    test = {(p["question"]) for n in range(512) for p in [problem("test", n)]}
    assert not train & test
    assert len(test) > 450
    assert len(train) > 3500


def test_problems_are_right_and_within_bounds():
    kinds = {}
    for number in range(600):
        one = problem("train", number)
        left, right = (int(x) for x in one["expression"].split(one["kind"]))
        assert all(LOW <= x <= HIGH for x in (left, right))
        assert one["answer"] == solve(one["kind"], left, right) >= 0
        assert str(left) in one["question"]
        assert str(right) in one["question"]
        kinds[one["kind"]] = kinds.get(one["kind"], 0) + 1
        assert one == problem("train", number)
    assert set(kinds) == {"*", "+", "-"}
    assert min(kinds.values()) > 150


def test_templates_are_shared_by_both_splits():
    for split in ("train", "test"):
        texts = [problem(split, number)["question"] for number in range(300)]
        for template in TEMPLATES:
            start = template.text.split("{")[0]
            assert any(text.startswith(start) for text in texts)
    assert all(sum(t.operator == o for t in TEMPLATES) >= 2 for o in "*+-")


def test_the_opening_has_a_system_prompt_and_demonstrations():
    opening, info = tiderl.make("tide/Calculator-v0").reset(options={"task": 5, "split": "test"})
    assert [one["role"] for one in opening] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    first = opening[2]["tool_calls"][0]["function"]
    assert (first["name"], json.loads(first["arguments"])) == ("calc", {"expression": "12*15"})
    assert opening[3]["content"] == "180"
    assert "*" in opening[2]["tool_calls"][0]["function"]["arguments"]
    assert "+" in opening[6]["tool_calls"][0]["function"]["arguments"]
    assert opening[-1]["content"] == problem("test", 5)["question"]
    assert info["task"] == 5
    none = tiderl.make("tide/Calculator-v0", demonstrations=0, system="Be brief.")
    brief, _ = none.reset()
    assert m.text_of(brief[0]) == "Be brief."
    assert len(brief) == 2
    with pytest.raises(EnvironmentFault, match="0 to 3"):
        tiderl.make("tide/Calculator-v0", demonstrations=9)


def test_tools_are_called_calc_and_answer(env):
    names = {one["function"]["name"]: one["function"]["parameters"] for one in env.tools}
    assert list(names) == ["calc", "answer"]
    assert names["calc"]["properties"]["expression"]["type"] == "string"
    assert names["answer"]["properties"]["number"]["type"] == "number"


def test_success_needs_the_calculator_first(env):
    right = env.task["answer"]
    (shown,), reward, terminated, *_ = env.step(calc(env.task["expression"]))
    assert (m.text_of(shown), reward, terminated) == (str(right), 0.0, False)
    _, reward, terminated, _, info = env.step(answer(right))
    assert (reward, terminated, info["end"]) == (1.0, True, "success")
    env.reset(options={"task": 5, "split": "test"})
    _, reward, _, _, info = env.step(answer(right))
    assert (reward, info["end"]) == (0.0, "failure")


def test_a_call_and_the_answer_in_one_reply_count(env):
    both = m.assistant(None, [*calc("1+1")["tool_calls"], *answer(env.task["answer"])["tool_calls"]])
    assert env.step(both)[1] == 1.0


def test_partial_reward_for_a_working_call(env):
    env.step(calc("1+1"))
    assert env.step(answer(-1))[1] == 0.1
    env.reset()
    env.step(calc("1+1"))
    observation, reward, terminated, *_ = env.step("I think it is two.")
    assert (observation, reward, terminated) == ((), 0.1, True)
    env.reset()
    for _ in range(3):
        env.step(calc("1+1"))
    _, reward, _, truncated, info = env.step(calc("1+1"))
    assert (reward, truncated, info["end"]) == (0.1, True, "max_turns")


def test_expressions_that_do_not_work_are_observations(env):
    (shown,), _, terminated, _, info = env.step(calc("twelve*15"))
    assert m.text_of(shown).startswith("Error: ")
    assert not terminated
    assert "not arithmetic" in info["invalid_action"]
    assert env.step("no idea")[1] == 0.0


@pytest.mark.parametrize("text", ["45", "45.0", 45, 45.0, "45."])
def test_answers_may_be_spelled_in_many_ways(env, text):
    env.task["answer"] = 45
    env.step(calc("1"))
    assert env.step(answer(text))[1] == 1.0
