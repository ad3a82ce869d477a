"""Tiny models on disk and groups whose log-probs come from the plain forward pass of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiderl.engine.tiny import make_tiny_model
from tiderl.env.ends import EndReason
from tiderl.training import LoraSettings, LossSettings, ModelSettings, OptimSettings
from tiderl.training.replica import Replica
from tiderl.trajectory.group import Group
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.trajectory import Trajectory

VOCABULARY = 320

Groups = Callable[..., list[Group]]
Replicas = Callable[..., Replica]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products on several threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with untied embeddings and biases."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def load_plain() -> Callable[[Path], Any]:
    """Load a folder in plain transformers."""
    from transformers import AutoModelForCausalLM

    return lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[[Any, TokenRecord], np.ndarray]:
    """Log-probs of a record's loss tokens from the model's own logits of that record alone."""

    def compute(model: Any, record: TokenRecord) -> np.ndarray:
        row = torch.tensor([record.ids])
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=row).logits[0, :-1].float(), -1)
        chosen = log_p.gather(1, row[0, 1:, None])[:, 0].numpy()
        return chosen[np.flatnonzero(record.mask) - 1]

    return compute


@pytest.fixture(scope="session")
def make_groups(
    model_folder: Path, load_plain: Callable[[Path], Any], plain_logprobs: Callable[..., np.ndarray]
) -> Groups:
    """groups(count, members, seed=, noise=, version=): two-turn records with a shared system prompt.

    The sampler's log-probs are the tiny model's own, plus `noise` x normal, so that ratios differ from 1.
    """
    model = load_plain(model_folder)

    def build(
        count: int = 3, members: int = 4, *, seed: int = 0, noise: float = 0.0, version: int = 0
    ) -> list[Group]:
        rng = np.random.default_rng(seed)
        system = rng.integers(1, 250, 9).tolist()
        groups = []
        for g in range(count):
            prompt = system + rng.integers(1, 250, 4 + g).tolist()
            group = Group(task=f"t{g}", ordinal=g)
            for m in range(members):
                record = TokenRecord()
                record.append_context(prompt)
                for turn in range(2):
                    # few choices in the first turn, so that members share sampled tokens too
                    ids = rng.integers(5, 7 if turn == 0 else 250, int(rng.integers(2, 5))).tolist()
                    record.append_sampled(ids, [0.0] * len(ids), [version] * len(ids))
                    record.append_context(rng.integers(1, 250, 3).tolist())
                values = plain_logprobs(model, record) + noise * rng.standard_normal(record.loss_tokens)
                for at, value in zip(np.flatnonzero(record.mask), values, strict=True):
                    record.logprobs[at] = float(min(value, 0.0))
                made = Trajectory(
                    f"e{g}-{m}",
                    f"t{g}",
                    f"g{g}",
                    g,
                    m,
                    0,
                    "test/X-v0",
                    "train",
                    [record],
                    [float((m + g) % 3)],
                )
                made.end, made.turns = EndReason.SUCCESS, 2
                group.members.append(made)
            groups.append(group)
        return groups

    return build


@pytest.fixture
def make_replica(model_folder: Path) -> Replicas:
    """replica(lora=True, model={...}, optim={...}, **loss settings), loaded."""

    def build(
        folder: Path = model_folder,
        *,
        lora: bool = True,
        seed: int = 0,
        model: dict[str, Any] | None = None,
        optim: dict[str, Any] | None = None,
        **loss: Any,
    ) -> Replica:
        adapter = LoraSettings(rank=4, alpha=8.0) if lora else None
        replica = Replica(
            ModelSettings(folder, lora=adapter, **(model or {})),
            OptimSettings(**{"learning_rate": 1e-3, "warmup": 0, **(optim or {})}),
            LossSettings(**loss),
            seed,
        )
        replica.load()
        return replica

    return build


@pytest.fixture(scope="session")
def gradient() -> Callable[[Replica, list[Group]], torch.Tensor]:
    """The flat, normalised gradient of a batch; the replica's running sum is dropped again."""

    def compute(replica: Replica, groups: list[Group]) -> torch.Tensor:
        replica.accumulate(groups, 0)
        grads = [m.grad for m in replica.optimizer.masters]
        flat = torch.cat([g.double().flatten() for g in grads if g is not None]) / replica.denominator
        replica.discard()
        return flat

    return compute
