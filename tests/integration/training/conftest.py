"""A tiny Qwen2 on disk and groups whose log-probs come from its plain forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiderl.trajectory.record import TokenRecord

VOCABULARY = 80


@dataclass
class Member:
    """The part of a trajectory that training reads."""

    records: list[TokenRecord]
    reward: float
    valid: bool = True


@dataclass
class MemberGroup:
    """The part of a group that training reads."""

    task: str
    ordinal: int
    members: list[Member] = field(default_factory=list)


def make_model(folder: Path, **changes: Any) -> Path:
    """Write a tiny random Qwen2 (2 layers, width 32) with sharpened logits."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **changes,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2"))


def plain_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-prob of every id but the first, from the model's own logits of the record alone."""
    row = torch.tensor([ids])
    log_p = torch.log_softmax(model(input_ids=row).logits[0, :-1].float(), -1)
    return log_p.gather(1, row[0, 1:, None])[:, 0]


@pytest.fixture(scope="session")
def plain(model_folder: Path) -> Any:
    """The checkpoint as plain transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def make_groups(plain: Any) -> Callable[..., list[MemberGroup]]:
    """groups(count, members, seed=, shift=): two-turn records that share a system prompt and a group prompt.

    `shift` is added to the true log-probs (as noise of that size), so that ratios differ from 1.
    """

    def build(
        count: int = 3, members: int = 4, *, seed: int = 0, shift: float = 0.0, version: int = 0
    ) -> list[MemberGroup]:
        rng = np.random.default_rng(seed)
        system = rng.integers(1, VOCABULARY, 9).tolist()
        groups = []
        for g in range(count):
            prompt = system + rng.integers(1, VOCABULARY, 4 + g).tolist()
            group = MemberGroup(task=f"t{g}", ordinal=g)
            for m in range(members):
                ids, spans = list(prompt), []
                for turn in range(2):
                    # few choices in the first turn, so that members share sampled tokens too
                    choices = [5, 6] if turn == 0 else range(1, VOCABULARY)
                    sampled = rng.choice(list(choices), int(rng.integers(2, 5))).tolist()
                    spans.append((len(ids), len(ids) + len(sampled)))
                    ids += sampled + rng.integers(1, VOCABULARY, 3).tolist()
                with torch.no_grad():
                    true = plain_logprobs(plain, ids).numpy()
                record, at = TokenRecord(), 0
                for start, end in spans:
                    record.append_context(ids[at:start])
                    noise = shift * rng.standard_normal(end - start)
                    values = np.minimum(true[start - 1 : end - 1] + noise, 0.0)
                    record.append_sampled(ids[start:end], values.tolist(), [version] * (end - start))
                    at = end
                record.append_context(ids[at:])
                group.members.append(Member([record], reward=float((m + g) % 3)))
            groups.append(group)
        return groups

    return build
