"""Episodes on disk: what is read is what was written, whatever interrupted the writer."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import asdict

import numpy as np
import pytest

from tiderl.env import messages as m
from tiderl.env.ends import EndReason
from tiderl.errors import ResourceError
from tiderl.trajectory import store as module
from tiderl.trajectory.store import EpisodeStore, StoreError


def picture(shade):
    return np.full((3, 5, 3), shade, np.uint8)


@pytest.fixture
def episode(make_trajectory):
    return make_trajectory(
        rewards=(0.2, 0.8),
        messages=[
            m.user("Look: ä\u2028 <|im_end|>", picture(7)),
            m.assistant("", [m.tool_call("look", "call_0_0")]),
            m.tool("call_0_0", "look", picture(7), picture(8)),
        ],
        seconds={"total": 1.5},
        note="n",
    )


def test_t63_episode_comes_back_whole(tmp_path, episode):
    with EpisodeStore(tmp_path / "episodes", tokens=True) as store:
        store.append(episode)
        (back,) = store.iterate()
    assert asdict(back) | {"messages": None} == asdict(episode) | {"messages": None}
    assert m.jsonable(back.messages) == m.jsonable(episode.messages)
    assert (back.images.keys(), back.valid, back.reward) == (episode.images.keys(), True, 1.0)


def test_line_has_text_always_and_tokens_on_request(tmp_path, episode):
    EpisodeStore(tmp_path).append(episode)
    row = json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8"))
    assert row["messages"][0]["content"][0]["text"].startswith("Look: ä")
    assert (row["reward"], row["end"], row["valid"], row["sampled_tokens"]) == (1.0, "success", True, 6)
    assert "records" not in row
    (back,) = EpisodeStore(tmp_path).iterate()
    assert back.records == []
    assert back.valid


def test_picture_is_stored_once(tmp_path, episode):
    store = EpisodeStore(tmp_path)
    store.append(episode)
    store.append(episode)
    assert len(list((tmp_path / "images").iterdir())) == 2
    without = next(store.iterate(images=False))
    assert without.messages[0]["content"][1]["shape"] == [3, 5, 3]


def test_each_line_is_on_file_before_the_next_is_written(tmp_path, make_trajectory):
    store = EpisodeStore(tmp_path)
    for member in range(3):
        store.append(make_trajectory(member=member))
        assert [t.member for t in EpisodeStore(tmp_path).iterate()] == list(range(member + 1))


def test_parts_and_later_lines(tmp_path, make_trajectory):
    store = EpisodeStore(tmp_path)
    store.append(make_trajectory(rewards=(0.0,), end=EndReason.INFRASTRUCTURE))
    store.append(make_trajectory(member=1))
    store.append(make_trajectory(rewards=(1.0,)))
    store.append(make_trajectory(), part="eval-0010")
    assert store.parts() == ["eval-0010", "train"]
    assert [t.reward for t in store.iterate("train")] == [0.0, 1.0, 1.0]
    assert [(t.member, t.reward) for t in store.iterate("train", latest=True)] == [(1, 1.0), (0, 1.0)]
    assert len(list(store.iterate())) == 4


def test_split_with_a_slash_is_no_path(tmp_path, make_trajectory):
    trajectory = make_trajectory()
    trajectory.split = "../../train/hard"
    EpisodeStore(tmp_path / "episodes").append(trajectory)
    assert EpisodeStore(tmp_path / "episodes").parts() == ["train-hard"]
    with pytest.raises(ValueError, match="no name for a part"):
        EpisodeStore(tmp_path).append(trajectory, part="../x")


@pytest.mark.parametrize("torn", [b'{"episode_id": "half', b"x" * 200_000, b"{}"])
def test_t82_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(tmp_path, make_trajectory, torn):
    EpisodeStore(tmp_path).append(make_trajectory(member=1))
    path = tmp_path / "train.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [t.member for t in EpisodeStore(tmp_path).iterate()] == [1]
    EpisodeStore(tmp_path).append(make_trajectory(member=2))
    assert [t.member for t in EpisodeStore(tmp_path).iterate()] == [1, 2]
    assert path.read_bytes().startswith(whole + b'{"episode_id"')


def test_file_that_is_torn_from_its_first_byte_starts_afresh(tmp_path, make_trajectory):
    (tmp_path / "train.jsonl").write_bytes(b"y" * 70_000)
    EpisodeStore(tmp_path).append(make_trajectory())
    assert len(list(EpisodeStore(tmp_path).iterate())) == 1


@pytest.mark.parametrize("line", ["not json", "[1]", "{}", '{"rewards": 3}'])
def test_broken_line_is_named(tmp_path, make_trajectory, line):
    store = EpisodeStore(tmp_path)
    store.append(make_trajectory())
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(StoreError, match=r"line 2 .*train\.jsonl"):
        list(store.iterate())


def test_missing_part_names_those_that_are_there(tmp_path, make_trajectory):
    EpisodeStore(tmp_path).append(make_trajectory())
    with pytest.raises(StoreError, match=r"'test'.*train"):
        list(EpisodeStore(tmp_path).iterate("test"))


def test_t63_missing_or_changed_picture_is_an_error(tmp_path, episode):
    store = EpisodeStore(tmp_path)
    store.append(episode)
    first, second = sorted((tmp_path / "images").iterdir())
    first.write_bytes(second.read_bytes())
    with pytest.raises(StoreError, match="content hash differs"):
        list(store.iterate())
    first.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        list(store.iterate())


def test_not_a_number_is_stored_as_null(tmp_path, make_trajectory):
    EpisodeStore(tmp_path).append(make_trajectory(rewards=(float("nan"),)))
    row = json.loads((tmp_path / "train.jsonl").read_text())
    assert row["rewards"] == [None]


def test_full_disk_leaves_no_half_line(tmp_path, make_trajectory, monkeypatch):
    store = EpisodeStore(tmp_path)
    store.append(make_trajectory())
    size = (tmp_path / "train.jsonl").stat().st_size
    real, calls = os.write, []

    def write(file, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(file, data[:10])  # as a disk that fills up in the middle of a write
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", write)
        with pytest.raises(ResourceError, match="no space left"):
            store.append(make_trajectory(member=1))
    assert (tmp_path / "train.jsonl").stat().st_size == size
    store.append(make_trajectory(member=2))
    assert [t.member for t in store.iterate()] == [0, 2]


def test_folder_that_cannot_be_made_is_an_error(tmp_path, make_trajectory):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        EpisodeStore(tmp_path / "file" / "episodes").append(make_trajectory())


def test_many_threads_write_whole_lines(tmp_path, make_trajectory):
    store = EpisodeStore(tmp_path)

    def work(number):
        for member in range(20):
            store.append(make_trajectory(ordinal=number, member=member))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = {(t.ordinal, t.member) for t in store.iterate()}
    assert len(found) == 80
