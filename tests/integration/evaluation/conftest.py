"""Environments in a plug-in of their own, as a user would install them."""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PLUGIN = '''
"""Environments of the evaluation's tests."""

import os
import time
from pathlib import Path

import tiderl


@tiderl.register("evalrun/Word-v0")
class Word(tiderl.AgentEnv):
    """Say the task's word."""

    splits = ("train", "test")

    def __init__(self, pause: float = 0.0, slow_task: int = -1, crash: str = "", log: str = "",
                 broken_close: bool = False) -> None:
        super().__init__()
        self.broken_close = broken_close
        self.pause, self.slow_task, self.crash, self.log = pause, slow_task, crash, log

    def tasks(self, split):
        return [{"id": i, "word": "right" if i % 4 else "other"} for i in range(40)]

    def start(self, task):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{task['id']}\\n")
        if self.crash and task["id"] == 3 and not Path(self.crash).exists():
            Path(self.crash).write_text("once")
            os._exit(17)
        time.sleep(600 if task["id"] == self.slow_task else self.pause)
        return f"Say {task['word']}."

    @tiderl.tool
    def say(self, word: str) -> str:
        """Say a word."""
        if word == self.task["word"]:
            self.finish(1.0)
            return "yes"
        self.finish(0.0)
        return "no"

    def close(self):
        if self.broken_close:
            raise RuntimeError("cannot close")

    def oracle(self):
        word = "right"  # wrong for every fourth task: real failures
        return tiderl.messages.assistant(None, [tiderl.messages.tool_call("say", word=word)])


@tiderl.register("evalrun/Picture-v0")
class Picture(tiderl.AgentEnv):
    """Look at a picture, twice."""

    modality = "image"

    def start(self, task):
        import numpy as np

        self.looked = 0
        return ["Look.", np.full((8, 8, 3), 7, np.uint8)]

    @tiderl.tool
    def look(self):
        """Look again."""
        import numpy as np

        self.looked += 1
        if self.looked == 2:
            self.finish(1.0)
        return np.full((8, 8, 3), self.looked, np.uint8)

    def oracle(self):
        return tiderl.messages.assistant(None, [tiderl.messages.tool_call("look")])
'''

POLICY = '''
"""A policy of a user's plug-in."""

import tiderl.agent.policy as base
from tiderl.env.messages import assistant, tool_call


class Says(base.Policy):
    """Always says the word given as the argument."""

    name = "says"

    def __init__(self, argument, options):
        self.word = argument

    def identity(self):
        return {"name": self.name, "word": self.word}

    async def act(self, messages, spec, state):
        return assistant(None, [tool_call("say", word=self.word)])
'''


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on PYTHONPATH, holds an installed distribution with two environments and a policy."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "evalrun_plugin.py").write_text(PLUGIN)
    (folder / "evalrun_policy.py").write_text(POLICY)
    info = folder / "evalrun-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evalrun\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tiderl.environments]\nevalrun = evalrun_plugin\n\n[tiderl.agents]\nsays = evalrun_policy:Says\n"
    )
    return folder


@pytest.fixture(scope="session")
def installed(plugin: Path) -> Iterator[Path]:
    """The plug-in is found by this process and by the processes it starts."""
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(str(plugin))
        importlib.import_module("evalrun_plugin")  # entry points may have been read before
        yield plugin


class ChatServer:
    """An endpoint that speaks chat completions and always says the word of the last user message."""

    def __init__(self) -> None:
        self.failing = False
        """While true, every task about the word `other` gets HTTP 500."""
        self.asked = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _send(self, status: int, data: dict[str, object]) -> None:
                content = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "parrot"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked += 1
                word = body["messages"][-1]["content"].removeprefix("Say ").rstrip(".")
                if server.failing and word == "other":
                    self._send(500, {"error": {"message": "out of memory"}})
                    return
                arguments = json.dumps({"word": word})
                call = {"id": "c", "type": "function", "function": {"name": "say", "arguments": arguments}}
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
                usage = {"prompt_tokens": 7, "completion_tokens": 3}
                self._send(
                    200, {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
                )

            def log_message(self, *_: object) -> None:
                pass

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop serving."""
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join(5)


@pytest.fixture
def parrot() -> Iterator[ChatServer]:
    """A running `ChatServer`."""
    server = ChatServer()
    yield server
    server.close()
