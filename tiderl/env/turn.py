"""How a reply is answered.

Invariant: `respond` takes any value as a reply. Every tool call in it is answered exactly once, in
order, under its own id; after the episode has ended calls are answered and not executed. What a model
did wrong is in `faults`, never raised; what an author did wrong is raised, never answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiderl.env import messages as m
from tiderl.env.tools import ToolFault, call_name, call_tool
from tiderl.errors import EnvironmentFault

if TYPE_CHECKING:
    from tiderl.env.base import AgentEnv

ENDED = "The task has ended; this call was not executed."


@dataclass
class Answer:
    """The new messages, what was malformed, and whether anything was executed."""

    messages: list[m.Message]
    faults: list[str] = field(default_factory=list)
    executed: bool = True


def respond(env: AgentEnv, action: Any) -> Answer:
    """Answer one reply on `env`; its tools, `reply` or `score` run here."""
    if isinstance(action, str):
        action = {"role": "assistant", "content": action}
    content = action.get("content") if isinstance(action, dict) else None
    if not isinstance(action, dict) or not isinstance(content, (str, list, type(None))):
        return _fault(f"a reply must be text or an assistant message, not {type(action).__name__}")
    if calls := action.get("tool_calls"):
        return _answer_calls(env, calls if isinstance(calls, (list, tuple)) else [calls])
    return _answer_text(env, content if isinstance(content, str) else _loose_text(content or []))


def _answer_text(env: AgentEnv, text: str) -> Answer:
    try:
        if env.overrides("reply"):
            with env._author("reply", faults=True):
                parts = m.parts_of(env.reply(text))
        elif env.overrides("score"):
            with env._author("score", faults=True):
                scored = env.score(text)
                reward, feedback = scored if isinstance(scored, tuple) else (scored, None)
                env.finish(reward)
                parts = m.parts_of(feedback)
        elif env._tools:
            return _no_tool(env)
        else:
            raise EnvironmentFault(
                f"{type(env).__name__} cannot answer",
                fix="write score, reply, a @tiderl.tool method, or step",
            )
    except ToolFault as fault:
        return _fault(str(fault))
    return Answer([m.user(*parts)] if parts else [])


def _no_tool(env: AgentEnv) -> Answer:
    """A reply without a tool call where there are tools: as `on_no_tool` says."""
    names = ", ".join(env._tools)
    if env.on_no_tool == "finish":
        env.finish(0.0)
        return Answer([])
    if env.on_no_tool == "nudge":
        return Answer([m.user(f"Call one of the tools: {names}.")])
    return _fault(f"the reply calls no tool; the tools are: {names}")


def _answer_calls(env: AgentEnv, calls: Sequence[Any]) -> Answer:
    answer = Answer([], executed=False)
    for position, call in enumerate(calls):
        given = call.get("id") if isinstance(call, dict) else None
        call_id = given if isinstance(given, str) and given else f"call_{env.turn}_{position}"
        name = call_name(call) or "unknown"
        if env.end is not None:
            answer.messages.append(m.tool(call_id, name, ENDED))
            continue
        try:
            with env._author(f"tool {name!r}", faults=True):
                parts = m.parts_of(call_tool(env, env._tools, call))
            answer.executed = True
        except ToolFault as fault:
            answer.faults.append(str(fault))
            parts = m.parts_of(f"Error: {fault}.")
        answer.messages.append(m.tool(call_id, name, *parts))
    return answer


def _fault(text: str) -> Answer:
    return Answer([m.user(f"Error: {text}.")], [text], executed=False)


def _loose_text(parts: list[Any]) -> str:
    """The text of an assistant message's parts, whatever else a model put there."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
