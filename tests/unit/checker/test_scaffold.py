"""`tiderl env new`: names, refusals, all or nothing."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tiderl.env import scaffold
from tiderl.env.registry import ENV_ID
from tiderl.errors import ConfigError, ResourceError


@pytest.mark.parametrize(
    ("name", "env_id", "module", "class_name"),
    [
        ("my-env", "my/Env-v0", "my_env", "MyEnv"),
        ("maze-run", "maze/Run-v0", "maze_run", "MazeRun"),
        ("maze_run-fast", "maze/RunFast-v0", "maze_run_fast", "MazeRunFast"),
        ("foo", "foo/Foo-v0", "foo", "Foo"),
        ("a1-2048", "a1/Env2048-v0", "a1_2048", "A12048"),
    ],
)
def test_all_names_follow_from_one(name: str, env_id: str, module: str, class_name: str) -> None:
    names = scaffold.derive_names(name)
    assert (names.package, names.env_id, names.module, names.class_name) == (name, env_id, module, class_name)
    assert ENV_ID.fullmatch(env_id)
    assert module.isidentifier()
    assert class_name.isidentifier()


@pytest.mark.parametrize(
    "name", ["", "My-Env", "my env", "-env", "env-", "7up", "a/b", "../x", "my.env", "é", "a--b", ".", "x\n"]
)
def test_bad_names_are_refused_with_a_good_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for instance '([a-z0-9-]+)'") as caught:
        scaffold.write_package(name, tmp_path)
    scaffold.derive_names(str(caught.value).rpartition("for instance '")[2].split("'")[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "tide-maze", "tiderl", "gymnasium-x", "class", "import"])
def test_names_that_hide_something_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="taken by Python or by TideRL"):
        scaffold.write_package(name, tmp_path)


def test_what_exists_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "my-env").mkdir()
    (tmp_path / "other-env").write_text("mine")
    (tmp_path / "link-env").symlink_to(tmp_path / "nowhere")
    for name in ("my-env", "other-env", "link-env"):
        with pytest.raises(ConfigError, match="exists already"):
            scaffold.write_package(name, tmp_path)
    assert (tmp_path / "other-env").read_text() == "mine"
    assert list((tmp_path / "my-env").iterdir()) == []
    with pytest.raises(ConfigError, match="is not a folder"):
        scaffold.write_package("my-env", tmp_path / "missing")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ResourceError, match="No space left"):
        scaffold.write_package("my-env", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_files_are_valid(tmp_path: Path) -> None:
    names, folder = scaffold.write_package("my-env", tmp_path)
    assert folder == tmp_path / "my-env"
    assert folder.stat().st_mode & 0o777 == 0o755
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["tiderl.environments"] == {"my_env": "my_env"}
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "README.md",
        "pyproject.toml",
        "src/my_env/__init__.py",
        "src/my_env/environment.py",
        "tests/test_my_env.py",
    ]
    for file in files:
        text = (folder / file).read_text()
        assert "$" not in text
        if file.endswith(".py"):
            ast.parse(text)
    assert names.env_id in (folder / "README.md").read_text()
