"""SmolLM2 from its wheel: converted once, whole, by whoever comes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiderl.engine.models import SMOLLM2

CODE = (
    "import json\n"
    "from tiderl.engine.models import resolve_model\n"
    f"found = resolve_model({SMOLLM2!r})\n"
    "print(json.dumps([str(found.path), found.source]))\n"
)


def start(cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TIDERL_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_conversion_survives_a_kill_and_happens_once(tmp_path: Path) -> None:
    killed = start(tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("models/.*.part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "models" / SMOLLM2.replace("/", "--")).exists()

    both = [start(tmp_path), start(tmp_path)]
    results = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    folder = tmp_path / "models" / SMOLLM2.replace("/", "--")
    assert all(str(folder) in out for out, _ in results)
    assert sum("converting" in errors for _, errors in results) == 1
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    from tiderl.engine.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(folder, 2048)
    assert checkpoint.vocabulary == 49152
    assert checkpoint.eos == (2,)
