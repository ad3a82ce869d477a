"""How one episode ends, whatever the policy or the environment does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tiderl.agent.policy import Action, EndReached, Message, Policy, PolicyState
from tiderl.agents.oracle import OraclePolicy
from tiderl.agents.random import RandomPolicy
from tiderl.env.ends import EndReason
from tiderl.env.messages import assistant, text_of, tool_call
from tiderl.errors import EndpointError, WorkerDied
from tiderl.evaluation.episode import PlayedEpisode, end_of, play_episode
from tiderl.evaluation.plan import PlannedEpisode


def say(word: str) -> Message:
    return assistant(None, [tool_call("say", word=word)])


class Scripted(Policy):
    """Plays a list; an exception in it is raised, a number is slept."""

    name = "scripted"

    def __init__(self, *script: Any) -> None:
        self.script = script

    async def act(self, messages: Sequence[Message], spec: Any, state: PolicyState) -> Action:
        step = self.script[min(state.model_calls, len(self.script) - 1)]
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, (int, float)):
            await asyncio.sleep(step)
            return "late"
        return step


async def play(direct: ModuleType, policy: Policy, task: str = "test-2", **limits: Any) -> PlayedEpisode:
    timeout = limits.pop("timeout", None)
    session = direct.DirectSession(direct.Steps(**limits))
    return await play_episode(policy, session, PlannedEpisode(0, task, 7, "test"), timeout=timeout)


async def test_oracle_wins_and_everything_is_recorded(direct: ModuleType) -> None:
    played = await play(direct, OraclePolicy())
    assert (played.end, played.success, played.turns, played.model_calls) == (EndReason.SUCCESS, True, 3, 3)
    assert [m["role"] for m in played.messages] == ["user", *["assistant", "tool"] * 3]
    assert len(played.latencies) == 3


async def test_t74_rewards_of_all_turns_are_kept_and_summed(direct: ModuleType) -> None:
    played = await play(direct, OraclePolicy())
    assert played.rewards == pytest.approx([0.1, 0.1, 0.8])
    record = played.record(PlannedEpisode(4, "test-2", 7, "test"), process=2, at=1.0)
    assert record.reward == pytest.approx(1.0)
    assert (record.index, record.process, record.valid, record.truncated) == (4, 2, True, False)


async def test_a_failed_task_is_a_valid_zero(direct: ModuleType) -> None:
    played = await play(direct, Scripted(say("stop")))
    assert (played.end, played.success, played.rewards) == (EndReason.FAILURE, False, [0.0])


async def test_t72_limit_on_turns_gives_partial_credit(direct: ModuleType) -> None:
    played = await play(direct, Scripted(say("right"), say("wrong")))
    assert played.end is EndReason.MAX_TURNS
    assert played.turns == 6
    assert sum(played.rewards) == pytest.approx(0.6)


async def test_t08_an_episode_that_never_replies_ends_as_time_with_partial_credit(direct: ModuleType) -> None:
    began = time.monotonic()
    played = await play(direct, Scripted(say("right"), 60), timeout=1.0)
    assert time.monotonic() - began < 3
    assert (played.end, played.turns, played.success) == (EndReason.TIME, 1, False)
    assert sum(played.rewards) == pytest.approx(0.6)
    assert played.record(PlannedEpisode(0, "t", 0, "test"), process=1, at=0.0).valid


async def test_the_environments_own_deadline_is_the_default(direct: ModuleType) -> None:
    played = await play(direct, Scripted(say("right"), 60), episode_timeout=0.2)
    assert played.end is EndReason.TIME


async def test_c70_no_reply_at_all_is_no_zero(direct: ModuleType) -> None:
    played = await play(direct, Scripted(60), timeout=0.2)
    assert played.end is EndReason.INFRASTRUCTURE
    assert "before the policy made one reply" in str(played.error)
    assert not played.record(PlannedEpisode(0, "t", 0, "test"), process=1, at=0.0).valid


@pytest.mark.parametrize("reason", [EndReason.CONTEXT_LENGTH, EndReason.MAX_TOKENS])
async def test_t59_t81_limits_on_tokens_keep_their_own_name(direct: ModuleType, reason: EndReason) -> None:
    played = await play(direct, Scripted(say("right"), EndReached(reason, "full")))
    assert (played.end, played.error) == (reason, "full")
    assert sum(played.rewards) == pytest.approx(0.6)


async def test_a_first_prompt_that_does_not_fit_is_no_zero(direct: ModuleType) -> None:
    played = await play(direct, Scripted(EndReached(EndReason.CONTEXT_LENGTH, "4097 of 4096 tokens")))
    assert played.end is EndReason.INFRASTRUCTURE
    assert "4097 of 4096 tokens" in str(played.too_long)


@pytest.mark.parametrize(
    "error", [EndpointError("gone"), WorkerDied("gone"), ValueError("a fault of the policy"), TimeoutError()]
)
async def test_t57_a_fault_around_the_task_is_infrastructure(direct: ModuleType, error: Exception) -> None:
    played = await play(direct, Scripted(say("right"), error))
    assert played.end is EndReason.INFRASTRUCTURE
    assert played.error
    assert not played.record(PlannedEpisode(0, "t", 0, "test"), process=1, at=0.0).success


async def test_t58_a_fault_of_the_environment_is_infrastructure(direct: ModuleType) -> None:
    class Broken(direct.Steps):  # type: ignore[name-defined, misc]
        def start(self, task: Any) -> str:
            raise ConnectionError("the site is down")

    session = direct.DirectSession(Broken())
    played = await play_episode(OraclePolicy(), session, PlannedEpisode(0, "test-0", 0, "test"))
    assert played.end is EndReason.INFRASTRUCTURE
    assert "the site is down" in str(played.error)


async def test_cancellation_passes_through(direct: ModuleType) -> None:
    task = asyncio.create_task(play(direct, Scripted(60)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_only_a_policy_that_cheats_is_offered_the_script(direct: ModuleType) -> None:
    seen: list[Any] = []

    class Curious(Scripted):
        async def act(self, messages: Sequence[Message], spec: Any, state: PolicyState) -> Action:
            seen.append(state.scripted)
            return await super().act(messages, spec, state)

    await play(direct, Curious(say("stop")))
    assert seen == [None]


async def test_random_is_decided_by_the_episodes_seed(direct: ModuleType) -> None:
    def words(played: PlayedEpisode) -> list[str]:
        return [
            str(m["tool_calls"][0]["function"]["arguments"]) for m in played.messages if m.get("tool_calls")
        ]

    one, two = await play(direct, RandomPolicy()), await play(direct, RandomPolicy())
    assert words(one) == words(two)
    assert len(words(one)) == one.turns
    other = await play_episode(
        RandomPolicy(), direct.DirectSession(direct.Steps()), PlannedEpisode(0, "test-2", 8, "test")
    )
    assert words(other) != words(one)


async def test_a_text_reply_becomes_a_message_in_the_record(direct: ModuleType) -> None:
    played = await play(direct, Scripted("hello", say("stop")))
    assert text_of(played.messages[1]) == "hello"
    assert played.messages[2]["role"] == "user"


@pytest.mark.parametrize(
    ("info", "terminated", "end"),
    [
        ({"end": "invalid_actions"}, False, EndReason.INVALID_ACTIONS),
        ({"success": True}, True, EndReason.SUCCESS),
        ({}, True, EndReason.FAILURE),
        ({}, False, EndReason.MAX_TURNS),
    ],
)
def test_end_of(info: dict[str, Any], terminated: bool, end: EndReason) -> None:
    assert end_of(info, terminated) is end
