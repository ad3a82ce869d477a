"""Every command in README and docs/ works as printed.

A fenced `bash` block is run, in the order of its document, in one folder per document, unless the comment
before it says otherwise:

    <!-- test: small -->   run, with training on a tiny model and few episodes in place of the printed size
    <!-- test: check -->   not run (needs a person, minutes, or a server): each command, option, environment
                           id and make target in it is checked to exist, `tiderl train` by --dry-run

A `python` or `yaml` block whose first line is `# NAME.EXT` is written to that file in the folder first.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<mode>\w+) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
ENVIRONMENT = re.compile(r"[\w-]+/[\w.-]+-v\d+")
MODES = ("run", "small", "check")

SMALL = [
    "model.max_length=2048",
    "model.lora=null",
    "rollout.max_episode_tokens=1800",
    "rollout.max_turn_tokens=8",
    "rollout.groups_per_update=1",
    "rollout.group_size=2",
    "engine.kv_tokens=24576",
    "training.updates=1",
    "training.stop=null",
    "evaluation.episodes=2",
    "checkpoint.every=0",
]


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    language: str
    text: str
    mode: str
    line: int


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    return [
        Block(found["language"], found["text"], found["mode"] or "run", text[: found.start()].count("\n") + 1)
        for found in BLOCK.finditer(text)
    ]


def commands(block: Block) -> list[list[str]]:
    """The words of each line, without `.venv/bin/`."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(re.sub(r"(^|\s)#.*", "", line)) for line in lines]
    return [[found[0].removeprefix(".venv/bin/"), *found[1:]] for found in words if found]


def shrink(line: str, model: Path) -> str:
    """The same command on a tiny model with little work."""
    if line.startswith("tiderl train") and "--dry-run" not in line:
        return f"{line} model.path={model} {' '.join(SMALL)}"
    return re.sub(r"--episodes \d+", "--episodes 2", line)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    code = f"from tiderl.engine.tiny import make_tiny_model; make_tiny_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment that sees this one's packages and can be installed into."""
    venv = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name, module in (("tiderl", "tiderl.cli.main"), ("pip", "pip._internal.cli.main")):
        script = venv / "bin" / name
        script.write_text(f"#!{venv}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    return venv / "bin"


def test_every_block_has_a_known_mode() -> None:
    wrong = [f"{d}:{b.line} {b.mode}" for d in DOCUMENTS for b in blocks(d) if b.mode not in MODES]
    assert wrong == []
    assert sum(b.language == "bash" for d in DOCUMENTS for b in blocks(d)) >= 10


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    here = (ROOT / document).parent
    assert [target for target in targets if not (here / target).exists()] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if any(b.language == "bash" and b.mode != "check" for b in blocks(d))]
)
def test_commands_run(
    document: str, tmp_path: Path, interpreter: Path, request: pytest.FixtureRequest
) -> None:
    environment = {
        **os.environ,
        "PATH": f"{interpreter}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(interpreter.parent),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    for block in blocks(document):
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", block.text)
        if block.language in ("python", "yaml") and named:
            (tmp_path / named[1]).write_text(block.text)
            if block.language == "python":
                compile(block.text, named[1], "exec")
        if block.language != "bash" or block.mode == "check":
            continue
        script = block.text.replace("\\\n", " ")
        if block.mode == "small":
            tiny_model = request.getfixturevalue("tiny_model")
            script = "\n".join(shrink(line, tiny_model) for line in script.splitlines())
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{document}:{block.line}\n{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        pytest.param(d, words, id=f"{d}: {' '.join(words)}")
        for d in DOCUMENTS
        for b in blocks(d)
        if b.language == "bash" and b.mode == "check"
        for words in commands(b)
    ],
)
def test_commands_exist(document: str, words: list[str], tmp_path: Path) -> None:
    program, *rest = words
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        known = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(targets) <= known
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    elif program == "tiderl":
        check_tiderl(rest, tmp_path)
    else:
        assert (Path(sys.executable).parent / program).exists(), f"{program} does not come with `make setup`"


def check_tiderl(words: list[str], folder: Path) -> None:
    """The command, its options, its environment id and its policy exist."""
    from tiderl.env.registry import spec
    from tiderl.evaluation.policies import parse_spec

    run = [sys.executable, "-m", "tiderl.cli.main"]
    if words[0] == "train":
        subprocess.run([*run, *words, "--dry-run"], cwd=folder, check=True, timeout=60, capture_output=True)
        return
    path = words[:2] if words[0] in ("env", "bench") else words[:1]
    help = subprocess.run(
        [*run, *path, "--help"], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    assert [w for w in words if w.startswith("--") and w not in help] == []
    for word in words:
        if ENVIRONMENT.fullmatch(word):
            assert spec(word).id == word
    if "--policy" in words:
        parse_spec(words[words.index("--policy") + 1])
