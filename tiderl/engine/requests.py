"""Between our words and vLLM's: prompts, sampling parameters, version stamps.

Invariant: pure translation; lists handed to vLLM are copies, since it extends them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiderl.engine.base import Sampling
from tiderl.errors import EngineError

if TYPE_CHECKING:
    import numpy as np


async def render_prompt(
    llm: Any, ids: Sequence[int], images: Sequence[np.ndarray], salt: str
) -> tuple[Any, int]:
    """(prompt as vLLM takes it, its length in tokens); an image placeholder becomes all its tokens."""
    from vllm.inputs.engine import tokens_input

    if not len(images):
        return tokens_input(list(ids), cache_salt=salt), len(ids)
    from PIL import Image
    from vllm import TokensPrompt
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    pictures = [Image.fromarray(image) for image in images]
    raw = TokensPrompt(prompt_token_ids=list(ids), multi_modal_data={"image": pictures}, cache_salt=salt)
    (prompt,) = await llm.renderer.render_cmpl_async([parse_model_prompt(llm.model_config, raw)])
    return prompt, len(prompt["prompt_token_ids"])


def expansion(prompt: Any, first: int) -> int:
    """How many tokens longer a rendered prompt is for its images from number `first` on."""
    places = prompt.get("mm_placeholders", {}).get("image", ())
    return sum(place.length - 1 for place in places[first:])


def sampling_params(sampling: Sampling, max_tokens: int, eos: Sequence[int]) -> Any:
    """vLLM's parameters of one turn. `eos`: the model's own end ids, which vLLM has no tokenizer to know."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(eos)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sorted(stops),
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def token_versions(spans: Any, start: int, end: int, newest: int) -> tuple[int, ...]:
    """The policy version of each sampled token `start..end` of a session, as the engine stamped it.

    Args:
        spans: vLLM's `WeightVersionSpan`s over all tokens the session has sampled.
        newest: the latest version published.

    Raises:
        EngineError: the stamps do not cover the tokens, go back, or name a version never published.
    """
    versions: list[int] = []
    for span in spans or ():
        count = min(span.end, end) - max(span.start, start)
        if count > 0:
            versions.extend([int(span.version)] * count)
    if len(versions) != end - start or sorted(versions) != versions or versions[-1] > newest:
        raise EngineError(
            f"the engine stamped its tokens {start} to {end} with {spans} while at version {newest}"
        )
    return tuple(versions)
