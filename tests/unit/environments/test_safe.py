"""tide/Safe-v0."""

from __future__ import annotations

import numpy as np
import pytest

import tiderl
from tiderl.env import messages as m


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_oracle_opens_every_safe_in_six_tries(split):
    env = tiderl.make("tide/Safe-v0")
    for task in env.task_lists.tasks(split):
        env.reset(options={"task": task["id"], "split": split})
        while env.end is None:
            _, reward, *_ = env.step(env.oracle())
        assert reward == 1.0
        assert env.turn <= 6


def test_codes_do_not_overlap_and_the_picture_gives_nothing_away():
    env = tiderl.make("tide/Safe-v0")
    codes = {split: {task["code"] for task in env.task_lists.tasks(split)} for split in env.splits}
    assert not codes["train"] & codes["test"]
    assert all(10 <= code <= 70 for code in codes["train"] | codes["test"])
    pictures = [m.images_of(env.reset(options={"task": n})[0][0])[0] for n in range(8)]
    assert all(np.array_equal(pictures[0], one) for one in pictures)


def test_it_answers_high_and_low():
    env = tiderl.make("tide/Safe-v0")
    env.reset(options={"task": 0})

    def tried(n: int) -> str:
        return m.text_of(env.step(m.assistant(None, [m.tool_call("try_code", n=n)]))[0][0])

    assert [tried(9), tried(11), tried(10)] == ["too low", "too high", "open"]
