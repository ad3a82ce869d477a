"""The registry as fresh interpreters see it: installed packages, scripts, spawned workers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def run(code: str, *args: str, cwd: Path, path: Path | None = None) -> str:
    """What a fresh interpreter prints."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path or ""), "HOME": str(cwd)}
    done = subprocess.run(
        [sys.executable, *args, "-c", textwrap.dedent(code)] if code else [sys.executable, *args],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def package(folder: Path, name: str, body: str, points: str) -> None:
    """A distribution as pip leaves it: a module and its metadata."""
    (folder / f"{name}.py").write_text(textwrap.dedent(body))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tiderl.environments]\n{points}\n")


GOOD = """
    import tiderl

    @tiderl.register("good/One-v0")
    class One(tiderl.AgentEnv):
        '''The first.'''
        def score(self, text):
            return 1.0

    class Two(tiderl.AgentEnv):
        '''The second.'''
        def score(self, text):
            return 1.0

    def late():
        tiderl.register("good/Three-v0", cls=Two)
"""


def test_installed_packages_appear_with_no_import_and_a_broken_one_hides_none(tmp_path):
    package(
        tmp_path, "good_envs", GOOD, "good = good_envs\ngood/Two-v0 = good_envs:Two\nlate = good_envs:late"
    )
    package(tmp_path, "bad_envs", "raise SystemExit('no key')", "bad = bad_envs")
    package(tmp_path, "worse_envs", "import no_such_thing", "worse = worse_envs")
    out = run(
        """
        import tiderl
        for spec in tiderl.list_environments():
            if spec.id.startswith("good/"):
                print(spec.id, spec.package, spec.entry)
        from tiderl.env.registry import broken_plugins
        for one in broken_plugins():
            print(one.name, one.package, one.error)
        print(type(tiderl.make("good/Two-v0")).__name__)
        try:
            tiderl.make("bad/One-v0")
        except tiderl.errors.UnknownEnvironment as error:
            print(error)
        """,
        cwd=tmp_path,
        path=tmp_path,
    )
    lines = out.splitlines()
    assert lines[:3] == [
        "good/One-v0 good_envs good_envs:One",
        "good/Three-v0 good_envs good_envs:Two",
        "good/Two-v0 good_envs good_envs:Two",
    ]
    assert lines[3] == "bad bad_envs SystemExit: no key"
    assert lines[4].startswith("worse worse_envs ModuleNotFoundError: No module named 'no_such_thing'")
    assert lines[5] == "Two"
    assert "bad of bad_envs (SystemExit: no key)" in lines[6]


def test_an_entry_point_named_like_the_id_is_found_without_the_others(tmp_path):
    package(tmp_path, "good_envs", GOOD, "good/Two-v0 = good_envs:Two")
    package(tmp_path, "loud_envs", "print('loud')", "loud = loud_envs")
    out = run("import tiderl; print(tiderl.make('good/Two-v0').spec.id)", cwd=tmp_path, path=tmp_path)
    assert out.splitlines() == ["good/Two-v0"]


def test_t88_gymnasiums_own_make_works_with_nothing_running(tmp_path):
    out = run(
        """
        import gymnasium
        env = gymnasium.make("tiderl:tide/Safe-v0")
        observation, info = env.reset(seed=1, options={"task": 0})
        print(type(env.unwrapped).__name__, info)
        """,
        cwd=tmp_path,
    )
    assert out.strip() == "Safe {'task': 0, 'turn': 0}"


def test_importing_the_package_loads_nothing_heavy(tmp_path):
    out = run(
        """
        import sys, tiderl
        print(any(name in sys.modules for name in ("numpy", "gymnasium", "tiderl.env")))
        import tiderl.env
        heavy = ("torch", "vllm", "transformers", "PIL", "pydantic", "tiderl.environments")
        print([name for name in heavy if name in sys.modules])
        """,
        cwd=tmp_path,
    )
    assert out.splitlines() == ["False", "[]"]


SCRIPT = """
import sys
import gymnasium
import tiderl

@tiderl.register("script/Mine-v0")
class Mine(tiderl.AgentEnv):
    def start(self, task):
        return "hello"
    def score(self, text):
        return 1.0

if __name__ == "__main__":
    envs = gymnasium.make_vec(
        "script/Mine-v0", num_envs=2, vectorization_mode="async",
        vector_kwargs={"context": "spawn", "shared_memory": False},
    )
    observations, _ = envs.reset(seed=1)
    print(len(observations), observations[0][0]["content"])
    _, rewards, *_ = envs.step(("a", "b"))
    print(rewards.tolist())
    envs.close()
    print(tiderl.spec("script/Mine-v0").entry == f"{__file__}:Mine")
"""


def test_t53_ids_registered_in_a_script_work_in_spawned_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run("", str(script), cwd=tmp_path).splitlines() == ["2 hello", "[1.0, 1.0]", "True"]


def test_t53_a_file_entry_can_be_loaded_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = run(
        f"""
        import tiderl
        tiderl.register("script/Mine-v0", cls={str(script) + ":Mine"!r})
        env = tiderl.make("script/Mine-v0")
        print(env.reset()[0][0]["content"], tiderl.spec("script/Mine-v0").entry)
        print(type(env.spec.make().unwrapped).__name__)
        """,
        cwd=tmp_path,
    )
    assert out.splitlines() == [f"hello {script}:Mine", "Mine"]
