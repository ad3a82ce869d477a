"""tide/Pointer-v0 and what it draws."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tiderl
from tiderl.env import messages as m
from tiderl.environments.screen import COLOURS, SHAPES, WHITE, Item, draw, shape_mask
from tiderl.errors import EnvironmentFault


def act(name: str, **arguments: str) -> dict:
    return m.assistant(None, [m.tool_call(name, **arguments)])


def picture(observation) -> np.ndarray:
    (image,) = [image for message in observation for image in m.images_of(message)]
    return image


def test_every_turn_shows_a_picture():
    env = tiderl.make("tide/Pointer-v0")
    observation, _ = env.reset(options={"task": 0})
    assert picture(observation).shape == (56, 56, 3)
    assert m.text_of(observation[-1]) == f"Click the {env.target.name}."
    for direction in ("left", "right", "up", "down"):
        observation, reward, terminated, *_ = env.step(act("move", direction=direction))
        assert observation[0]["role"] == "tool"
        assert np.array_equal(picture(observation), env.screen())
        assert (reward, terminated) == (0.0, False)


def test_moves_change_the_picture_and_edges_stop():
    env = tiderl.make("tide/Pointer-v0")
    env.reset(options={"task": 3})
    env.cursor = (0, 0)
    before = env.screen()
    (answer,), *_ = env.step(act("move", direction="left"))
    assert "edge" in m.text_of(answer)
    assert np.array_equal(picture((answer,)), before)
    (answer,), *_ = env.step(act("move", direction="right"))
    assert env.cursor == (1, 0)
    assert not np.array_equal(picture((answer,)), before)


def test_a_click_ends_rightly_or_wrongly():
    env = tiderl.make("tide/Pointer-v0")
    env.reset(options={"task": 1})
    env.cursor = env.target.cell
    _, reward, terminated, _, info = env.step(act("click"))
    assert (reward, terminated, info["end"]) == (1.0, True, "success")
    env.reset(options={"task": 1})
    env.cursor = next(item.cell for item in env.items if item is not env.target)
    _, reward, terminated, _, info = env.step(act("click"))
    assert (reward, terminated, info["end"]) == (0.0, True, "failure")


def test_layouts_do_not_overlap_between_splits_and_targets_are_unique():
    env = tiderl.make("tide/Pointer-v0")
    seen = {}
    for split in env.splits:
        tasks = [env.task_lists.find(split, n) for n in range(256)]
        seen[split] = {json.dumps([t["cursor"], t["items"], t["target"]]) for t in tasks}
        for task in tasks:
            names = {(one["colour"], one["shape"]) for one in task["items"]}
            cells = {tuple(one["cell"]) for one in task["items"]} | {tuple(task["cursor"])}
            assert len(names) == 3
            assert len(cells) == 4
    assert not seen["train"] & seen["test"]


def test_the_text_gives_nothing_away():
    env = tiderl.make("tide/Pointer-v0")
    texts = set()
    for task in range(40):
        env.reset(options={"task": task})
        texts.add(m.text_of(env.step(act("move", direction="up"))[0][0]))
    assert texts == {"Moved.", "The cursor is at the edge."}


def test_backgrounds_tell_the_cell():
    plain = draw(56, 4, [], (0, 0))
    inner = {(c, r): tuple(plain[r * 14 + 7, c * 14 + 7]) for c in range(4) for r in range(4)}
    assert len(set(inner.values())) == 16
    assert all(inner[c, r][0] == inner[c, 0][0] for c in range(4) for r in range(4))
    assert all(inner[c, r][1] == inner[0, r][1] for c in range(4) for r in range(4))
    assert tuple(plain[0, 0]) == WHITE


def test_shapes_differ_and_stay_in_their_cell():
    masks = [shape_mask(shape, 14) for shape in SHAPES]
    assert len({mask.tobytes() for mask in masks}) == 3
    for mask in masks:
        assert 40 < mask.sum() < 120
        assert not mask[0].any()
        assert not mask[:, 0].any()
    for colour, rgb in COLOURS.items():
        shown = draw(56, 4, [Item(colour, "square", (2, 1))], (0, 0))
        assert tuple(shown[14 + 7, 28 + 7]) == rgb
        assert (shown != draw(56, 4, [], (0, 0))).any(axis=2).sum() == masks[0].sum()


@pytest.mark.parametrize(
    "arguments",
    [{"size": 50}, {"cells": 1}, {"size": 8}, {"shapes": 0}, {"shapes": 16}, {"cells": 8, "max_turns": 12}],
)
def test_screens_that_cannot_be_are_refused(arguments):
    with pytest.raises(EnvironmentFault):
        tiderl.make("tide/Pointer-v0", **arguments)


def test_other_sizes_work():
    env = tiderl.make("tide/Pointer-v0", size=84, cells=6, shapes=5)
    observation, _ = env.reset(seed=1)
    assert picture(observation).shape == (84, 84, 3)
    assert len(env.items) == 5
