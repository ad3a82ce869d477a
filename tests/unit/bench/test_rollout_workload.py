"""Workloads of `tiderl bench rollout`: the schema, shipped files, grids, and the sizes that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiderl
from tiderl.bench.rollout.files import find, load_grid, load_workload
from tiderl.bench.rollout.sizes import ENVIRONMENT, Overhead, measure_sizes
from tiderl.bench.rollout.workload import Workload
from tiderl.errors import ConfigError

HEAD = "name: mine\n"


def written(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", ["heavy_tail", "heavy_tail_images"])
def test_shipped_workloads_want_three_times_the_kv_and_have_heavy_tails(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert workload.load.oversubscription == 3
    assert workload.episodes.latency.kind == "mixture"
    assert (workload.model.image_size > 0) == name.endswith("images")
    assert load_workload(f"configs/bench/{name}.yaml") == workload or not Path("configs").is_dir()
    sizes = sizes_of(workload)
    assert 300 < sizes.middle < 1500, "contexts of several hundred tokens"
    assert 8 <= sizes.reply <= 32
    wanted = workload.load.concurrency * sizes.middle / sizes.kv_tokens
    assert wanted == pytest.approx(3, rel=0.02)


def sizes_of(workload: Workload) -> Any:
    env = tiderl.make(ENVIRONMENT, **workload.environment(), pace=0)
    return measure_sizes(workload, env, Overhead(8 + workload.episodes.system_words, 6, 1.0), 0)


def test_the_grid_is_twelve_workloads_along_three_axes() -> None:
    grid = load_grid("grid", ["measure.seconds=7"])
    assert len(grid) == len({one.name for one in grid}) == len({one.fingerprint for one in grid}) == 12
    assert {one.load.oversubscription for one in grid} == {0.5, 1, 3}
    assert {one.measure.seconds for one in grid} == {7}
    short, long = (next(o for o in grid if f"context={c}" in o.name) for c in ("short", "long"))
    assert sizes_of(long).middle > 2 * sizes_of(short).middle
    for one in grid:
        sizes_of(one)


def test_sizes_are_those_of_the_episodes() -> None:
    episodes = {
        **{"turns": (4, 4), "prompt_words": (100, 100), "observation_words": (20, 20)},
        **{"reply_tokens": (10, 10), "system_words": 0, "latency": {"kind": "constant", "seconds": 0.5}},
    }
    load = {"concurrency": 10, "oversubscription": 2.0}
    workload = Workload.model_validate({"name": "x", "episodes": episodes, "load": load})
    env = tiderl.make(ENVIRONMENT, **workload.environment(), pace=0)
    sizes = measure_sizes(workload, env, Overhead(5, 6, 1.0), 0)
    assert (sizes.turns, sizes.first, sizes.observation, sizes.reply) == (4, 105, 26, 10)
    assert sizes.end == 115 + 3 * 36
    assert sizes.middle == 160, "115 + 36 in whole blocks of 32"
    assert sizes.kv_tokens == 800
    assert sizes.longest >= sizes.end
    assert sizes.wait == pytest.approx(2.0)
    pictures = measure_sizes(workload, env, Overhead(5, 6, 1.0), 20)
    assert pictures.kv_tokens == 800, "no pictures where the environment shows none"
    two = workload.model_copy(update={"engine": workload.engine.model_copy(update={"count": 2})})
    assert measure_sizes(two, env, Overhead(5, 6, 1.0), 0).kv_tokens == 416


def test_a_pool_that_holds_no_episode_is_refused() -> None:
    workload = Workload.model_validate({"name": "x", "load": {"concurrency": 4, "oversubscription": 8}})
    with pytest.raises(ConfigError, match=r"raise load\.concurrency"):
        sizes_of(workload)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("load: {concurency: 3}", "did you mean 'load.concurrency'"),
        ("nam: x", "did you mean 'name'"),
        ("episodes: {latency: {kind: pareto, leest: 1}}", "did you mean 'episodes.latency.least'"),
        ("episodes: {latency: {kind: gauss}}", "gauss"),
        ("episodes: {latency: {kind: lognormal, median: 1}}", "'episodes.latency.sigma' is missing"),
        ("load: {oversubscription: 0}", "load.oversubscription"),
        ("episodes: {turns: [5, 2]}", "episodes.turns is \\[5, 2\\]"),
        ("episodes: {observation_words: [2, 9]}", "episodes.observation_words"),
        ("model: {hidden: 100}", "do not divide"),
        ("model: {image_size: 50}", "no multiple of patch"),
        ("model: {image_size: 56, path: x}", "pictures need the made model"),
        ("load: {concurrency: 2, group_size: 4}", "load.group_size"),
        ("episodes: {trace: none.jsonl}", "no trace none.jsonl"),
        ("axes: {}", "add --grid"),
        ("load: [", "not valid YAML"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_workload(written(tmp_path, text if text.startswith("nam:") else HEAD + text))


def test_overrides_and_unknown_files(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD)
    assert load_workload(file, ["load.max_staleness=5"]).load.max_staleness == 5
    with pytest.raises(ConfigError, match="has no '='"):
        load_workload(file, ["load"])
    with pytest.raises(ConfigError, match="one of: heavy_tail"):
        load_workload("heavy_tale")
    with pytest.raises(ConfigError, match="leave out --grid"):
        load_grid(file)


def test_the_fingerprint_changes_with_what_is_measured_only() -> None:
    base = load_workload("heavy_tail")
    assert base.model_copy(update={"about": "other", "policies": {"ttl": {}}}).fingerprint == base.fingerprint
    assert load_workload("heavy_tail", ["load.concurrency=49"]).fingerprint != base.fingerprint
    assert load_workload("heavy_tail", ["measure.seconds=41"]).fingerprint != base.fingerprint


def test_a_trace_is_found_beside_its_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"task": 0, "turns": [{"observation": 9, "reply": 2, "seconds": 0}]}\n'
    )
    file = written(tmp_path, HEAD + "episodes: {trace: t.jsonl}")
    monkeypatch.chdir("/")
    assert load_workload(file).episodes.trace == str(tmp_path / "t.jsonl")


def test_shipped_workloads_are_found_by_name() -> None:
    assert find("heavy_tail").name == "heavy_tail.yaml"
    assert find("heavy_tail.yaml").is_file()
