"""New weights in a running engine: exact, stamped, never mixed with KV of older ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tiderl.engine.base import Sampling
from tiderl.engine.checkpoint import Checkpoint
from tiderl.engine.settings import EngineSettings
from tiderl.engine.tiny import make_tiny_model
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import EngineError

from .conftest import Live, load_reference, play, settle, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = tokens(42, 320)


async def test_c17_c18_c19_a_new_session_never_reads_kv_of_older_weights(live: Live) -> None:
    for seed in range(3):
        first = await play(live.engine, [SYSTEM + tokens(seed, 20)])
        second = await play(live.engine, [SYSTEM + tokens(seed + 1, 20)])
        assert second.turns[0][1].cached_tokens == 320  # the same weights: the repeated prompt is shared
        assert max(live.gap(first), live.gap(second)) <= 1e-4
        old = live.snapshot()
        await live.publish(20 + seed)
        third = await play(live.engine, [SYSTEM + tokens(seed, 20)])
        assert third.turns[0][1].cached_tokens == 0
        assert live.gap(third) <= 1e-4
        assert Live(live.engine, old, live.folder).gap(third) > 1e-2  # the update shows


async def test_requests_that_wait_across_an_update_start_on_the_new_weights(live: Live) -> None:
    """Sent under the old version's salt, scheduled after the update: they must not read the old KV."""
    await play(live.engine, [SYSTEM + tokens(1, 20)])
    async with live.engine.hold(4):
        waiting = [asyncio.create_task(play(live.engine, [SYSTEM + tokens(1, 20)], seed=k)) for k in range(4)]
        await asyncio.sleep(0.05)
        await live.publish(30)
    episodes = await asyncio.gather(*waiting)
    outputs = [e.turns[0][1] for e in episodes]
    # One of them computes the prompt; the others may share what that one computed.
    assert min(o.cached_tokens for o in outputs) == 0
    assert {v for o in outputs for v in o.versions} == {live.engine.version}
    assert max(live.gap(e) for e in episodes) <= 1e-4


async def test_c29_c30_publish_in_flight_loses_nothing_and_stamps_each_token(live: Live) -> None:
    engine = live.engine
    await settle(engine)
    start = engine.version
    async with engine.session(400) as idle:
        await idle.generate(tokens(5, 30), Sampling(4, ignore_eos=True))
        running = [
            asyncio.create_task(play(engine, [tokens(k, 40), tokens(k, 10)], max_tokens=180, seed=k))
            for k in range(8)
        ]
        for seed in range(3):
            await asyncio.sleep(0.08)
            await live.publish(40 + seed)
        episodes = await asyncio.wait_for(asyncio.gather(*running), 60)
        for episode in episodes:
            stamps = [v for _, o in episode.turns for v in o.versions]
            assert len(stamps) == 360
            assert stamps == sorted(stamps)
            assert stamps[0] >= start
            assert stamps[-1] <= start + 3
        assert len({v for e in episodes for _, o in e.turns for v in o.versions}) >= 3
        output = await idle.generate(tokens(6, 5), Sampling(4, ignore_eos=True))  # its old KV was kept
        assert output.cached_tokens == 33
        assert set(output.versions) == {start + 3}
    assert live.gap(await play(engine, [tokens(3, 50)])) <= 1e-4


@pytest.mark.parametrize(
    "parts",
    [
        ("model.layers.1.self_attn.q_proj.weight",),
        ("model.layers.0.self_attn.v_proj.bias",),
        ("model.layers.2.mlp.up_proj.weight", "model.layers.3.self_attn.k_proj.weight"),
        ("model.norm.weight", "model.layers.3.input_layernorm.weight"),
        ("lm_head.weight",),
        ("model.embed_tokens.weight",),
        tuple(
            f"model.layers.{i}.{part}.weight"
            for i in range(4)
            for part in (
                "self_attn.q_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.down_proj",
            )
        ),
    ],
    ids=lambda parts: f"{parts[0].removeprefix('model.')}-{len(parts)}",
)
async def test_a_partial_update_changes_what_was_sent_and_nothing_else(
    live: Live, parts: tuple[str, ...]
) -> None:
    await live.publish(50 + len(parts), parts)
    assert live.gap(await play(live.engine, [tokens(8, 60), tokens(9, 20)])) <= 1e-4
    # Sent again unchanged, whatever was filled in must be what was there, bit by bit.
    before = await play(live.engine, [tokens(8, 60), tokens(9, 20)])
    await live.publish(0, parts, scale=0.0)
    after = await play(live.engine, [tokens(8, 60), tokens(9, 20)])
    assert [o.logprobs for _, o in before.turns] == [o.logprobs for _, o in after.turns]
    assert [o.ids for _, o in before.turns] == [o.ids for _, o in after.turns]


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.04])
async def test_a_cancelled_publish_leaves_old_or_new_weights(live: Live, after: float) -> None:
    old, version = live.snapshot(), live.engine.version
    task = asyncio.create_task(live.publish(60))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert live.engine.version in (version, version + 1)
    if live.engine.version == version:
        live.reference = old
    episode = await play(live.engine, [tokens(3, 50), tokens(4, 5)])
    assert live.gap(episode) <= 1e-4
    assert set(episode.turns[0][1].versions) == {live.engine.version}


async def test_wrong_weights_are_refused_and_change_nothing(live: Live) -> None:
    import torch

    engine, version = live.engine, live.engine.version
    good = torch.zeros(128, 128)
    name = "model.layers.0.self_attn.q_proj.weight"
    for weights, text in (
        (
            [("model.layers.0.self_attn.qproj.weight", good)],
            "did you mean model.layers.0.self_attn.q_proj.weight",
        ),
        ([(name, torch.zeros(3, 3))], "shape"),
        ([(name, torch.full((128, 128), float("nan")))], "not finite"),
        ([(name, good), (name, good)], "twice"),
        ([], "no weights"),
    ):
        with pytest.raises(EngineError, match=text):
            await engine.publish(weights, version + 1)
    with pytest.raises(EngineError, match="not above"):
        await engine.publish([(name, good)], version)

    def broken() -> object:
        yield name, good
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await engine.publish(broken(), version + 1)  # type: ignore[arg-type]
    assert engine.version == version
    assert live.gap(await play(engine, [tokens(3, 50)])) <= 1e-4


async def test_offered_weights_are_a_safetensors_file_and_checked() -> None:
    import torch
    from safetensors.torch import load_file

    from tiderl.engine.publish import Offer

    shapes = {"a.weight": (2, 3), "b": (4,), "c": (), "d": (0, 2)}
    checkpoint = Checkpoint(Path(), shapes, tied=True, vocabulary=1, eos=(), architecture="X")
    offer = Offer(checkpoint, "bfloat16")
    weight = torch.randn(3, 2).t()  # not contiguous
    sent = {"a.weight": weight, "lm_head.weight": weight, "c": torch.tensor(2.0), "b": torch.ones(4)}
    offer.take([*sent.items(), ("d", torch.zeros(0, 2))])
    loaded = load_file(offer.told()["path"])
    assert set(loaded) == set(shapes)
    assert torch.equal(loaded["a.weight"], weight.bfloat16())
    assert loaded["b"].dtype == torch.bfloat16
    offer.close()
    for weights, text in (
        ([("a.wight", weight)], "did you mean a.weight"),
        ([("b", torch.ones(5))], "shape"),
        ([("b", torch.ones(4)), ("b", torch.ones(4))], "twice"),
        ([("b", torch.tensor([1, 2, 3, float("inf")]))], "not finite"),
        ([("b", torch.tensor([float("nan"), 2, 3, 1]))], "not finite"),
        ([], "no weights"),
    ):
        offer = Offer(checkpoint, "float32")
        with pytest.raises(EngineError, match=text):
            offer.take(weights)
        offer.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)
    settings = EngineSettings(model=folder, kv_tokens=2048, max_sessions=8, max_model_len=1024)
    async with VLLMEngine(settings) as engine:
        yield Live(engine, load_reference(folder), folder)


async def test_tied_embeddings_are_right_after_an_update(tied: Live, tmp_path: Path) -> None:
    assert "lm_head.weight" not in tied.engine._checkpoint.shapes  # type: ignore[union-attr]
    assert tied.gap(await play(tied.engine, [tokens(1, 60)])) <= 1e-4
    for seed in range(2):
        await tied.publish(seed)
        assert tied.gap(await play(tied.engine, [tokens(1, 60), tokens(2, 9)])) <= 1e-4
    await tied.publish(7, ["model.embed_tokens.weight"])
    assert tied.gap(await play(tied.engine, [tokens(1, 60), tokens(2, 9)])) <= 1e-4
    await tied.publish(8, ["model.layers.0.mlp.down_proj.weight"])
    assert tied.gap(await play(tied.engine, [tokens(1, 60), tokens(2, 9)])) <= 1e-4
    # A trainer that names the tied output layer too is understood.
    embedding = tied.reference.get_input_embeddings().weight
    weights = [("model.embed_tokens.weight", embedding), ("lm_head.weight", embedding)]
    await tied.engine.publish(weights, tied.engine.version + 1)
    assert tied.gap(await play(tied.engine, [tokens(1, 60)])) <= 1e-4
