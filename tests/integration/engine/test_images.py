"""Sessions with images on a tiny vision-language model: exact, kept between turns, right after an update."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tiderl.engine.base import Replay, Sampling, TurnOutput
from tiderl.engine.settings import EngineSettings
from tiderl.engine.tiny import write_idefics3_processor
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import EngineError, PromptTooLong

from .conftest import tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PICTURES = [np.random.RandomState(k).randint(0, 255, (56, 56, 3), dtype=np.uint8) for k in range(4)]


def make_vision_model(folder: Path) -> int:
    """A random Idefics3 of 0.7 M parameters whose 56x56 images take 4 tokens; returns the placeholder id."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>"]
    specials += ["<global-img>", "<end_of_utterance>"]
    specials += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    vocabulary = {c: i for i, c in enumerate([*sorted(ByteLevel.alphabet()), *specials])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[s for s in specials if s not in ("<|im_end|>", "<|endoftext|>")],
    ).save_pretrained(folder)
    text = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "initializer_range": 0.1,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.to_dict() | {"model_type": "llama"},
        scale_factor=2,
        image_token_id=vocabulary["<image>"],
        tie_word_embeddings=False,
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(torch.float32)
    for name, parameter in model.named_parameters():
        if ("vision" in name or "connector" in name) and parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    write_idefics3_processor(folder, 56, 4)
    return vocabulary["<image>"]


class Vision:
    """An engine, its reference, and how a context with images looks when expanded."""

    def __init__(self, engine: VLLMEngine, folder: Path, placeholder: int) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.engine, self.folder, self.placeholder = engine, folder, placeholder
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    async def expand(self, ids: list[int], images: list[np.ndarray]) -> list[int]:
        prompt, _ = await self.engine.render(ids, images)
        return list(prompt["prompt_token_ids"])

    def gap(self, context: list[int], output: Any, images: list[np.ndarray]) -> float:
        import torch
        from PIL import Image

        pixels = self.processor.image_processor(
            images=[[Image.fromarray(i) for i in images]], return_tensors="pt"
        )
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([context + list(output.ids)]), **pixels).logits[0]
        rows = torch.log_softmax(logits.float(), -1)[len(context) - 1 : -1]
        ours = rows.gather(1, torch.tensor(output.ids)[:, None])[:, 0]
        return float((ours - torch.tensor(output.logprobs)).abs().max())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vision(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vision]:
    folder = tmp_path_factory.mktemp("vision")
    placeholder = make_vision_model(folder)
    settings = EngineSettings(
        model=folder,
        kv_tokens=2048,
        max_sessions=4,
        max_model_len=512,
        max_images=4,
        banned_token_ids=(placeholder,),
    )
    async with VLLMEngine(settings) as engine:
        yield Vision(engine, folder, placeholder)


async def test_images_in_every_turn_before_and_after_an_update(vision: Vision) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(vision.folder / "model.safetensors")
    for update in (False, True):
        if update:
            import torch

            changed = {n: t + 0.02 * torch.randn(t.shape) for n, t in weights.items()}
            await vision.engine.publish(changed.items(), vision.engine.version + 1)
            save_file(changed, vision.folder / "model.safetensors", metadata={"format": "pt"})
            vision.model = type(vision.model).from_pretrained(vision.folder, dtype=torch.float32).eval()
        one = [vision.placeholder]
        turns = [
            (tokens(1, 40) + one, PICTURES[:1]),
            (tokens(2, 10) + one + tokens(3, 5) + one, PICTURES[1:3]),
            (tokens(4, 10), []),
            (tokens(5, 3) + one + tokens(6, 3), PICTURES[:1]),
        ]
        context: list[int] = []
        images: list[np.ndarray] = []
        before = vision.engine.stats().reprefilled_tokens
        async with vision.engine.session(400) as session:
            for chunk, pictures in turns:
                context += await vision.expand(chunk, pictures) if pictures else chunk
                images += pictures
                output = await session.generate(chunk, Sampling(6, ignore_eos=True), pictures)
                assert output.prompt_tokens == len(context)
                assert vision.gap(context, output, images) <= 1e-4
                assert vision.gap(context, output, images[1:] + images[:1]) > 1e-2 or len(images) == 1
                assert vision.placeholder not in output.ids
                context += output.ids
                assert session.length == len(context)
            with pytest.raises(EngineError, match="5 images"):
                await session.generate(one, Sampling(6), PICTURES[:1])
        assert vision.engine.stats().reprefilled_tokens == before


async def test_an_image_counts_with_all_its_tokens(vision: Vision) -> None:
    chunk = [*tokens(1, 40), vision.placeholder]
    expanded = len(await vision.expand(chunk, PICTURES[:1]))
    assert expanded > len(chunk)
    async with vision.engine.session(expanded) as session:
        with pytest.raises(PromptTooLong):
            await session.generate(chunk, Sampling(1), PICTURES[:1])
    async with vision.engine.session(expanded + 1) as session:
        output = await session.generate(chunk, Sampling(9, ignore_eos=True), PICTURES[:1])
        assert len(output.ids) == 1


async def test_a_replay_passes_all_images_again(vision: Vision) -> None:
    """Held, found in the prefix cache, and computed on from scratch: equal tokens, images counted whole."""
    one = [vision.placeholder]
    turns = [
        (tokens(1, 40) + one, PICTURES[:1]),
        (tokens(2, 10) + one + tokens(3, 5) + one, PICTURES[1:3]),
        (tokens(4, 10), []),
        (one + tokens(6, 3), PICTURES[:1]),
    ]
    engine = vision.engine
    played: dict[str, list[TurnOutput]] = {}
    for how in ("held", "cached", "by hand"):
        context: list[int] = []
        images: list[np.ndarray] = []
        known = 0
        replay: Replay | None = None
        played[how] = []
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(engine.task_session(session_id=how))
            for number, (chunk, pictures) in enumerate(turns):
                new = await vision.expand(chunk, pictures) if pictures else chunk
                context += new
                images += pictures
                output = await session.generate(chunk, Sampling(6, seed=number, ignore_eos=True), pictures)
                assert output.prompt_tokens == len(context)
                assert output.new_tokens == len(context) - known
                assert output.cached_tokens + output.reprefilled + output.new_tokens >= len(context)
                assert vision.gap(context, output, images) <= 1e-4
                context += output.ids
                known = len(context) - 1
                assert session.length == len(context)
                assert session.promised_tokens == -(-len(context) // 32) * 32
                played[how].append(output)
                if how != "held":
                    await session.release()
                if how == "by hand":  # the expanded length is not told
                    replay = dataclasses.replace(session.snapshot(), length=0)
                    assert len(replay.images) == len(images)
                    await stack.aclose()
                    session = await stack.enter_async_context(
                        engine.task_session(session_id=how, replay=replay)
                    )
            with pytest.raises(EngineError, match="5 images"):
                await session.generate(one, Sampling(6), PICTURES[:1])
    for outputs in played.values():
        assert [o.ids for o in outputs] == [o.ids for o in played["held"]]
    assert all(o.cached_tokens > 0 for o in played["cached"][1:])
    assert engine.audit().promised_tokens == 0


async def test_a_picture_that_is_another_one_is_not_taken_from_the_cache(vision: Vision) -> None:
    chunk = [*tokens(1, 5), vision.placeholder, *tokens(2, 60)]
    contexts = []
    for picture in PICTURES[:2]:
        async with vision.engine.task_session(session_id="p") as session:
            output = await session.generate(chunk, Sampling(4, ignore_eos=True), [picture])
            await session.release()
            output = await session.generate([1, 2], Sampling(4, ignore_eos=True))
            context = await vision.expand([*session.snapshot().ids[: -len(output.ids)]], [picture])
            assert vision.gap(context, output, [picture]) <= 1e-4
            contexts.append(output.cached_tokens)
    assert min(contexts) >= 64


async def test_recompute_with_images_in_running_turns(vision: Vision) -> None:
    """The pictures' features are computed again, too, also where vLLM had sent the worker no pixels."""
    import torch
    from safetensors.torch import load_file, save_file

    engine = vision.engine
    generator = torch.Generator().manual_seed(9)
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(vision.folder / "model.safetensors").items()
    }
    before = engine.stats()
    async with AsyncExitStack() as stack:
        chunk = [*tokens(1, 30), vision.placeholder, *tokens(2, 9)]
        sessions = [
            await stack.enter_async_context(engine.task_session(session_id=f"r{n}")) for n in range(3)
        ]
        for session in sessions[
            1:
        ]:  # one goes on held, one from the prefix cache, with the same picture again
            await session.generate(chunk, Sampling(4, ignore_eos=True), PICTURES[2:3])
        await sessions[1].release()
        turns = [
            asyncio.create_task(s.generate(chunk, Sampling(300, ignore_eos=True), [PICTURES[n]]))
            for n, s in enumerate(sessions)
        ]
        await asyncio.sleep(0.15)
        await engine.publish(changed.items(), engine.version + 1, mode="recompute")
        outputs = await asyncio.wait_for(asyncio.gather(*turns), 60)
        save_file(changed, vision.folder / "model.safetensors", metadata={"format": "pt"})
        vision.model = type(vision.model).from_pretrained(vision.folder, dtype=torch.float32).eval()
        for number, (session, output) in enumerate(zip(sessions, outputs, strict=True)):
            assert set(output.versions) == {engine.version - 1, engine.version}
            assert output.kv_version == engine.version
            first = output.versions.index(engine.version)
            replay = session.snapshot()
            context = await vision.expand(list(replay.ids[: -len(output.ids)]), list(replay.images))
            later = dataclasses.replace(output, ids=output.ids[first:], logprobs=output.logprobs[first:])
            assert vision.gap([*context, *output.ids[:first]], later, list(replay.images)) <= 1e-4
            again = await session.generate([*tokens(number, 3)], Sampling(4, ignore_eos=True))
            context = [*context, *output.ids, *tokens(number, 3)]
            assert vision.gap(context, again, list(replay.images)) <= 1e-4
    assert engine.stats().preemptions == before.preemptions
