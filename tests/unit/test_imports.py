"""Imports point one way, and the light parts of TideRL need neither torch nor vLLM.

The rules are those of docs/architecture.md; a new folder in `tiderl/` must be given its layer here.
"""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("agents", "configs", "environments", "sandboxes")

LAYERS: list[set[str]] = [
    {"errors", "cache", "processes"},
    {"env", "scheduling", "telemetry"},
    {"engine", "hub", "trajectory", "agent"},
    {"config"},
    {"rollout"},
    {"evaluation", "training"},
    {"bench"},
    {"cli"},
]
"""Lowest first. A part may import its own layer and every lower one, never a higher one."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

LIGHT = (
    "tiderl",
    "tiderl.env",
    "tiderl.hub",
    "tiderl.hub.local",
    "tiderl.hub.worker",
    "tiderl.agent",
    "tiderl.agent.chat",
    "tiderl.agent.tokenizer",
    "tiderl.trajectory",
    "tiderl.scheduling",
    "tiderl.telemetry",
    "tiderl.engine.base",
    "tiderl.engine.settings",
    "tiderl.cache",
    "tiderl.processes",
    "tiderl.config",
    "tiderl.config.check",
    "tiderl.evaluation",
    "tiderl.evaluation.runner",
    "tiderl.cli.main",
    "tiderl.cli.doctor",
    "tiderl.cli.train",
    "tiderl.cli.eval",
    "tiderl.cli.env",
    "tiderl.cli.bench",
    "tiderl.cli.plot",
    "tiderl.environments",
    "tiderl.agents",
    "tiderl.agents.hermes",
    "tiderl.agents.lines",
    "tiderl.agents.text",
    "tiderl.agents.oracle",
    "tiderl.agents.random",
    "tiderl.agents.openai",
)

LONGEST_FILE = 500
MOST_SHARED_NAMES = 8

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "peft",
    "safetensors",
    "gguf",
    "psutil",
    "tensorboard",
    "matplotlib",
)


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    """The installed name: outer folders sit below `tiderl`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "tiderl" else ["tiderl", *parts])


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import in a file, also those inside functions."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            for alias in node.names:  # `from tiderl import env` names the part only here
                yield node.lineno, f"{base}.{alias.name}"


def part_of(module: str) -> str | None:
    """`tiderl.engine.base` -> `engine`; None for what is not ours or is the top level itself."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "tiderl" and rest else None


CORE = modules(ROOT / "tiderl")
ALL = [path for folder in ("tiderl", *OUTER) for path in modules(ROOT / folder)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_part_has_a_layer() -> None:
    parts = {path.parent.name for path in (ROOT / "tiderl").glob("*/__init__.py")}
    assert parts - set(RANK) == set(), "give the new folder its layer in LAYERS"


def test_imports_point_downwards() -> None:
    wrong = [
        f"{relative(path)}:{line} {part_of(module_name(path))} imports {module}"
        for path in CORE
        for line, module in imported(path)
        if (mine := part_of(module_name(path))) in RANK
        and (other := part_of(module)) in RANK
        and RANK[other] > RANK[mine]
    ]
    assert wrong == []


def test_parts_of_one_layer_do_not_import_in_a_circle() -> None:
    edges: dict[str, set[str]] = {part: set() for part in RANK}
    for path in CORE:
        mine = part_of(module_name(path))
        if mine in RANK:
            edges[mine] |= {p for _, m in imported(path) if (p := part_of(m)) in RANK and p != mine}
    left = dict(edges)
    while free := [part for part, needs in left.items() if not needs & set(left)]:
        for part in free:
            del left[part]
    assert left == {}, f"these import each other in a circle: {sorted(left)}"


def test_scheduling_imports_nothing_of_ours_and_does_no_io() -> None:
    forbidden = {"torch", "asyncio", "time", "socket", "threading", "subprocess", "zmq", "random"}
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in modules(ROOT / "tiderl" / "scheduling")
        for line, module in imported(path)
        if module.split(".")[0] in forbidden or (part_of(module) or "scheduling") != "scheduling"
    ]
    assert wrong == []


def test_core_never_imports_the_outer_folders() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in CORE
        for line, module in imported(path)
        if part_of(module) in ("agents", "environments", "sandboxes")
    ]
    assert wrong == [], "the core finds plug-ins through entry points only"


def test_outer_folders_are_imported_only_under_their_installed_names() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in [*ALL, *modules(ROOT / "tests")]
        for line, module in imported(path)
        if module.split(".")[0] in OUTER
    ]
    assert wrong == [], "`import environments` loads the code a second time: write tiderl.environments"


def test_no_long_list_of_imports_stands_twice() -> None:
    """Two files that need so many names of one module import the module itself."""
    lists: list[tuple[str, str, set[str]]] = []
    for path in ALL:
        taken: dict[str, set[str]] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                taken.setdefault(node.module, set()).update(alias.name for alias in node.names)
        lists += [(relative(path), module, names) for module, names in taken.items()]
    wrong = [
        f"{one} and {other} both import {len(mine & theirs)} names of {module}"
        for (one, module, mine), (other, same, theirs) in itertools.combinations(lists, 2)
        if module == same and len(mine & theirs) > MOST_SHARED_NAMES
    ]
    assert wrong == []


def test_agents_and_environments_stay_below_the_rollout() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for folder in ("agents", "environments", "sandboxes")
        for path in modules(ROOT / folder)
        for line, module in imported(path)
        if RANK.get(part_of(module) or "", 0) >= RANK["rollout"] and part_of(module) != "evaluation"
    ]
    assert wrong == []


BLOCKER = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} was imported at import time", name=name)

sys.meta_path.insert(0, Blocker())
for module in LIGHT:
    importlib.import_module(module)
import tiderl
for name in tiderl.__all__:
    getattr(tiderl, name)
"""


def test_light_parts_import_without_torch_and_vllm() -> None:
    code = f"HEAVY = {HEAVY!r}\nLIGHT = {LIGHT!r}\n{BLOCKER}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr


def test_modules_are_documented_and_not_too_long() -> None:
    wrong = []
    for path in ALL:
        text = path.read_text()
        if not ast.get_docstring(ast.parse(text)):
            wrong.append(f"{relative(path)} has no docstring that says what it is")
        if (lines := text.count("\n")) > LONGEST_FILE:
            wrong.append(f"{relative(path)} has {lines} lines: split it")
    assert wrong == []
