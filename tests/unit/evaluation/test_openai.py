"""The OpenAI-compatible policy against a real HTTP server that speaks chat completions."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tiderl.agent.policy import PolicyOptions
from tiderl.agents.openai import KEY, OpenAIPolicy, for_endpoint, reply_of
from tiderl.env.ends import EndReason
from tiderl.env.messages import assistant, tool, tool_call, user
from tiderl.errors import ConfigError, EndpointError
from tiderl.evaluation.episode import PlayedEpisode, play_episode
from tiderl.evaluation.plan import PlannedEpisode

Answer = tuple[int, Any, dict[str, str]]


@dataclass
class Server:
    """What the endpoint does: `answers` gets each request's body and gives (status, JSON, headers)."""

    url: str = ""
    models: tuple[str, ...] = ("tiny",)
    answers: Callable[[dict[str, Any]], Answer] = lambda body: (200, said("hello"), {})
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def said(content: str | None, calls: list[Any] | None = None, **usage: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls is not None:
        message["tool_calls"] = calls
    usage = {"prompt_tokens": 11, "completion_tokens": 5} | usage
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


def call(name: str, arguments: Any, id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, status: int, data: Any, headers: dict[str, str]) -> None:
            content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self._send(200, {"object": "list", "data": [{"id": m} for m in state.models]}, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append(body)
            state.headers.append(dict(self.headers))
            if self.path != "/v1/chat/completions":
                self._send(404, {"detail": "Not Found"}, {})
                return
            self._send(*state.answers(body))

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    import tiderl.agents.openai as module

    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)


async def play(
    server: Server,
    direct: ModuleType,
    options: PolicyOptions | None = None,
    model: str = "tiny",
    **limits: Any,
) -> PlayedEpisode:
    timeout = limits.pop("timeout", None)
    policy = OpenAIPolicy(f"{server.url}#{model}", options or PolicyOptions())
    try:
        await policy.start()
        session = direct.DirectSession(direct.Steps(**limits))
        return await play_episode(policy, session, PlannedEpisode(0, "test-2", 7, "test"), timeout=timeout)
    finally:
        await policy.close()


async def test_native_tool_calls_win_an_episode(server: Server, direct: ModuleType) -> None:
    server.answers = lambda body: (200, said(None, [call("say", '{"word": "right"}')]), {})
    played = await play(server, direct, PolicyOptions(temperature=0.7, max_tokens=64))
    assert (played.end, played.success, played.turns) == (EndReason.SUCCESS, True, 3)
    assert (played.prompt_tokens, played.completion_tokens) == (33, 15)
    first, last = server.requests[0], server.requests[-1]
    assert first["tools"][0]["function"]["name"] == "say"
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.7, 64, "tiny")
    assert [m["role"] for m in last["messages"]] == ["user", *["assistant", "tool"] * 2]
    assert last["messages"][1]["tool_calls"][0]["id"] == last["messages"][2]["tool_call_id"] == "c1"


async def test_t54_t56_faulty_calls_are_observations(server: Server, direct: ModuleType) -> None:
    faulty: list[Any] = [
        [call("say", '{"word": "ri')],
        [call("say", "[1]")],
        [{"id": "c1", "type": "function", "function": {"arguments": "{}"}}],
        [call("", "")],
        ["nonsense"],
    ]
    for calls in faulty:
        replies = iter([said(None, calls), said(None, [call("say", {"word": "stop"})])])
        server.answers = lambda body, replies=replies: (200, next(replies), {})  # type: ignore[misc]
        played = await play(server, direct)
        assert played.end is EndReason.FAILURE, calls
        assert played.invalid_actions == 1, calls


async def test_retries_with_back_off_then_goes_on(server: Server, direct: ModuleType) -> None:
    failures = iter(
        [(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}), (500, "oops", {}), (503, "", {})]
    )
    server.answers = lambda body: next(failures, (200, said(None, [call("say", '{"word": "stop"}')]), {}))
    played = await play(server, direct)
    assert played.end is EndReason.FAILURE
    assert len(server.requests) == 4
    assert played.model_calls == 1


async def test_endpoint_that_keeps_failing_is_infrastructure_within_the_deadline(
    server: Server, direct: ModuleType
) -> None:
    server.answers = lambda body: (503, {"error": {"message": "overloaded"}}, {})
    began = time.monotonic()
    played = await play(server, direct, PolicyOptions(extra={"deadline": 0.5}))
    assert time.monotonic() - began < 2
    assert played.end is EndReason.INFRASTRUCTURE
    assert "overloaded" in str(played.error)


async def test_retry_after_beyond_the_deadline_is_not_waited_for(server: Server, direct: ModuleType) -> None:
    server.answers = lambda body: (429, {}, {"Retry-After": "60"})
    began = time.monotonic()
    played = await play(server, direct, PolicyOptions(extra={"deadline": 5.0}))
    assert time.monotonic() - began < 2
    assert played.end is EndReason.INFRASTRUCTURE


async def test_t08_slow_reply_ends_as_time(server: Server, direct: ModuleType) -> None:
    def answers(body: dict[str, Any]) -> Answer:
        if len(server.requests) > 1:
            time.sleep(1.5)
        return 200, said(None, [call("say", '{"word": "right"}')]), {}

    server.answers = answers
    played = await play(server, direct, timeout=0.5)
    assert played.end is EndReason.TIME
    assert sum(played.rewards) == pytest.approx(0.6)


@pytest.mark.parametrize("status", [400, 422])
async def test_t59_full_context_is_an_end_and_is_not_retried(
    server: Server, direct: ModuleType, status: int
) -> None:
    def answers(body: dict[str, Any]) -> Answer:
        if len(server.requests) > 1:
            text = "This model's maximum context length is 64 tokens. However, you requested 65 tokens."
            return status, {"error": {"message": text}}, {}
        return 200, said(None, [call("say", '{"word": "right"}')]), {}

    server.answers = answers
    played = await play(server, direct)
    assert played.end is EndReason.CONTEXT_LENGTH
    assert len(server.requests) == 2
    assert sum(played.rewards) == pytest.approx(0.6)


async def test_t81_total_and_reply_limits_are_two_things(server: Server, direct: ModuleType) -> None:
    server.answers = lambda body: (
        200,
        said(
            None,
            [call("say", '{"word": "wrong"}')],
            prompt_tokens=20 * len(server.requests),
            completion_tokens=5,
        ),
        {},
    )
    played = await play(server, direct, PolicyOptions(max_tokens=16), max_total_tokens=50)
    assert played.end is EndReason.MAX_TOKENS
    assert [body["max_tokens"] for body in server.requests] == [16, 16, 5]


async def test_newer_name_of_the_limit(server: Server, direct: ModuleType) -> None:
    def answers(body: dict[str, Any]) -> Answer:
        if "max_tokens" in body:
            return 400, {"error": {"message": "Use 'max_completion_tokens' instead of 'max_tokens'."}}, {}
        return 200, said(None, [call("say", '{"word": "stop"}')]), {}

    server.answers = answers
    played = await play(server, direct, PolicyOptions(max_tokens=8))
    assert played.end is EndReason.FAILURE
    assert server.requests[-1]["max_completion_tokens"] == 8


async def test_answer_that_is_no_chat_completion(server: Server, direct: ModuleType) -> None:
    for data in ("<html>", [], {"choices": []}, {"choices": [{"message": None}]}):
        server.answers = lambda body, data=data: (200, data, {})  # type: ignore[misc]
        played = await play(server, direct)
        assert played.end is EndReason.INFRASTRUCTURE


async def test_the_key_comes_from_the_environment_and_is_kept_nowhere(
    server: Server, direct: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-secret")
    server.answers = lambda body: (200, said(None, [call("say", '{"word": "stop"}')]), {})
    await play(server, direct)
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "secret" not in json.dumps(OpenAIPolicy("http://u:secret@h/v1#m").identity())


async def test_greedy_requests_carry_no_seed_and_sampled_ones_the_episodes(
    server: Server, direct: ModuleType
) -> None:
    server.answers = lambda body: (200, said(None, [call("say", '{"word": "wrong"}')]), {})
    await play(server, direct)
    seeds = [body["seed"] for body in server.requests]
    server.requests.clear()
    await play(server, direct)
    assert [body["seed"] for body in server.requests] == seeds
    assert len(set(seeds)) == len(seeds)
    server.requests.clear()
    await play(server, direct, PolicyOptions(temperature=0.0))
    assert all("seed" not in body for body in server.requests)


async def test_unreachable_endpoint() -> None:
    policy = OpenAIPolicy("http://127.0.0.1:9/v1#m", PolicyOptions())
    with pytest.raises(EndpointError, match="cannot be reached"):
        await policy.start()
    await policy.close()


async def test_model_that_is_not_served_names_near_ones(server: Server) -> None:
    server.models = ("tiny-instruct", "other")
    server.answers = lambda body: (
        404,
        {"error": {"message": "The model `tiny-instruc` does not exist."}},
        {},
    )
    policy = OpenAIPolicy(f"{server.url}#tiny-instruc", PolicyOptions())
    with pytest.raises(EndpointError, match="tiny-instruct"):
        await policy.start()
    await policy.close()


async def test_model_that_is_served_but_not_listed(server: Server) -> None:
    policy = OpenAIPolicy(f"{server.url}#alias", PolicyOptions())
    await policy.start()
    await policy.close()
    assert server.requests[0]["model"] == "alias"


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_key_says_which_variable(server: Server, status: int) -> None:
    server.answers = lambda body: (status, {"error": {"message": "no"}}, {})
    policy = OpenAIPolicy(f"{server.url}#alias", PolicyOptions())
    with pytest.raises(EndpointError, match=KEY):
        await policy.start()
    await policy.close()


@pytest.mark.parametrize("argument", ["", "http://h/v1", "h/v1#m", "ftp://h#m", "http://#m", "http://h/v1#"])
def test_malformed_argument(argument: str) -> None:
    with pytest.raises(ConfigError, match="BASE_URL#MODEL"):
        OpenAIPolicy(argument, PolicyOptions())


def test_t61_images_of_tools_follow_in_a_user_message_and_keep_their_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    calls = [tool_call("look", id="a"), tool_call("look", id="b")]
    history = [
        user("See", image),
        assistant(None, calls),
        tool("a", "look", "first", image),
        tool("b", "look", image),
        assistant("done"),
    ]
    sent = for_endpoint(history)
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert sent[2]["content"] == "first"
    assert isinstance(sent[3]["content"], str)
    urls = [
        p["image_url"]["url"]
        for m in sent
        if isinstance(m["content"], list)
        for p in m["content"]
        if p["type"] == "image_url"
    ]
    assert len(urls) == 3
    for url in urls:
        data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(BytesIO(data))), image)


def test_a_call_without_an_answer_gets_an_empty_one() -> None:
    calls = [tool_call("look", id="a"), tool_call("look", id="b")]
    sent = for_endpoint([assistant(None, calls), tool("a", "look", "x"), user("go on")])
    assert [(m["role"], m.get("tool_call_id")) for m in sent] == [
        ("assistant", None),
        ("tool", "a"),
        ("tool", "b"),
        ("user", None),
    ]


def test_reply_of_takes_what_servers_send() -> None:
    reply = reply_of(said(None, [call("f", {"a": 1}), {"function": {"name": "g"}}]), "here", "t3")
    assert [c["function"]["arguments"] for c in reply["tool_calls"]] == ['{"a": 1}', "{}"]
    assert reply["tool_calls"][1]["id"] == "t3_1"
    assert reply_of(said(None), "here", "t")["content"] == ""
    parts = reply_of(said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "here", "t")  # type: ignore[arg-type]
    assert parts["content"] == "a\nb"
