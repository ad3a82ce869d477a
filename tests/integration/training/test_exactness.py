"""Packed scoring and its gradient equal the model's own, record by record, for every way of packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiderl.errors import ModelError
from tiderl.training import ModelSettings
from tiderl.training.model import CausalModel

WAYS = {
    "fused tree": {},
    "tree, split": {"max_tokens_per_microbatch": 40},
    "record by record": {"max_tokens_per_microbatch": 1},
    "padded rows": {"share_prefix": "off"},
    "padded rows, split": {"share_prefix": "off", "max_tokens_per_microbatch": 70},
}


def settings_of(kind: str) -> Any:
    """A tiny random configuration of an architecture."""
    import transformers

    common = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": kind in ("Llama", "Gemma2"),
    }
    extra: dict[str, dict[str, Any]] = {
        "Mistral": {"sliding_window": None},
        "Gemma2": {"sliding_window": 8, "head_dim": 8, "final_logit_softcapping": None},
        "Phi3": {"pad_token_id": 0},
        "Qwen3": {"head_dim": 8},
    }
    return getattr(transformers, f"{kind}Config")(**common, **extra.get(kind, {}))


def random_model(kind: str, folder: Path, **changes: Any) -> Path:
    import transformers

    config = settings_of(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_equal_a_separate_forward(
    way: str, make_replica: Any, make_groups: Any, model_folder: Path, load_plain: Any, plain_logprobs: Any
) -> None:
    replica = make_replica(model=WAYS[way])
    records = [m.records[0] for g in make_groups(4, 6) for m in g.members]
    model = load_plain(model_folder)
    for got, record in zip(replica.logprobs(records), records, strict=True):
        np.testing.assert_allclose(got, plain_logprobs(model, record), atol=1e-5)


def move(replica: Any) -> None:
    """Give the trained parameters other values, the same in every replica (B starts at 0)."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    replica.model.refresh()


@pytest.mark.parametrize("lora", [True, False])
def test_gradients_are_equal_whatever_the_packing(
    lora: bool, make_replica: Any, make_groups: Any, gradient: Any
) -> None:
    groups = make_groups(4, 6, noise=0.1)
    grads = {}
    for way, model in WAYS.items():
        replica = make_replica(lora=lora, model=model, kl_coef=0.1)
        move(replica)
        grads[way] = gradient(replica, groups)
    replica.model.tree_decoder, replica.model.shares_prefix = None, True
    grads["tree through the model's own modules"] = gradient(replica, groups)
    want = grads["padded rows"]
    assert want.norm() > 0
    for way, got in grads.items():
        assert (got - want).norm() <= 1e-5 * want.norm(), way


def test_the_adapters_gradient_is_pefts_own(make_replica: Any, make_groups: Any) -> None:
    """Merged weights against peft's two branches, by plain autograd."""
    replica = make_replica(old="recomputed")
    groups = make_groups(2, 4)
    replica.update(groups, 0)
    replica.accumulate(groups, 0)
    mine = [p.grad / replica.denominator for p in replica.model.parameters()]
    replica.discard()

    wrapped = replica.model.wrapped
    for _, module in wrapped.named_modules():
        module.__dict__.pop("forward", None)
    total = torch.zeros(())
    tokens = 0
    for group in groups:
        rewards = torch.tensor([m.reward for m in group.members])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for member, advantage in zip(group.members, advantages, strict=True):
            row = torch.tensor([member.records[0].ids])
            mask = torch.tensor(member.records[0].mask[1:], dtype=torch.bool)
            log_p = torch.log_softmax(wrapped(input_ids=row).logits[0, :-1], -1)
            chosen = log_p.gather(1, row[0, 1:, None])[:, 0][mask]
            total = total - (advantage * (chosen - chosen.detach()).exp()).sum()
            tokens += int(mask.sum())
    theirs = torch.autograd.grad(total / tokens, replica.model.parameters())
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-8


def test_a_cheaper_backward_pass_leaves_log_probs_and_turns_the_gradient_little(
    make_replica: Any, make_groups: Any, gradient: Any
) -> None:
    groups = make_groups(4, 6, noise=0.1)
    exact, cheap = make_replica(), make_replica(model={"backward_dtype": "bfloat16"})
    for replica in (exact, cheap):
        move(replica)
    records = [m.records[0] for g in groups for m in g.members]
    for a, b in zip(exact.logprobs(records), cheap.logprobs(records), strict=True):
        np.testing.assert_array_equal(a, b)
    want, got = gradient(exact, groups), gradient(cheap, groups)
    assert (got - want).norm() <= 0.03 * want.norm()
    one, two = exact.update(groups, 0), cheap.update(groups, 0)
    assert one.loss == two.loss


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3", "Phi3", "Gemma2"])
def test_other_architectures(
    kind: str, tmp_path: Path, make_replica: Any, make_groups: Any, load_plain: Any, plain_logprobs: Any
) -> None:
    folder = random_model(kind, tmp_path / "model")
    replica = make_replica(folder)
    assert replica.model.shares_prefix is (kind != "Gemma2"), "a sliding window is scored in padded rows"
    assert (replica.model.tree_decoder is not None) is (kind in ("Llama", "Mistral", "Qwen3"))
    groups = make_groups(2, 4)
    stats = replica.update(groups, 0)
    assert stats.grad_norm > 0
    records = [m.records[0] for g in groups for m in g.members]
    replica.save(tmp_path / "saved")
    model = load_plain(tmp_path / "saved")
    for got, record in zip(replica.logprobs(records), records, strict=True):
        np.testing.assert_allclose(got, plain_logprobs(model, record), atol=2e-5)


def test_a_head_that_is_no_plain_projection_is_refused(tmp_path: Path) -> None:
    folder = random_model("Gemma2", tmp_path / "model", final_logit_softcapping=1.0)
    with pytest.raises(ModelError, match="Gemma2ForCausalLM"):
        CausalModel(ModelSettings(folder))


def test_c41_no_gradient_reaches_what_predicts_an_observation_token(
    make_replica: Any, make_groups: Any
) -> None:
    """The gradient at the last hidden state, and so at the logits, of every position."""
    replica = make_replica(lora=False, model={"share_prefix": "off"})
    groups = make_groups(1, 4, noise=0.1)
    caught: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        caught.append(output.last_hidden_state)

    handle = replica.model.decoder.register_forward_hook(keep)
    replica.accumulate(groups, 0)
    handle.remove()
    (state,) = caught
    assert state.grad is not None
    norms = state.grad.norm(dim=-1)
    records = sorted(
        (m.records[0] for m in groups[0].members),
        key=lambda r: (int(np.flatnonzero(r.mask)[-1]), r.ids),
    )
    for row, record in enumerate(records):
        last = int(np.flatnonzero(record.mask)[-1])
        predicts_sampled = np.array(record.mask[1 : last + 1], dtype=bool)
        advantage = norms[row, predicts_sampled.nonzero()[0][0]] > 0
        assert (norms[row, :last][~predicts_sampled] == 0).all()
        if advantage:
            assert (norms[row, :last][predicts_sampled] > 0).all()
    assert (norms > 0).any()


def test_c41_what_a_later_observation_says_changes_no_bit(
    make_replica: Any, make_groups: Any, gradient: Any
) -> None:
    replica = make_replica()
    groups = make_groups(2, 4, noise=0.1)
    want = gradient(replica, groups)
    for group in groups:
        for member in group.members:
            record = member.records[0]
            end = record.turns[-1][1]
            record.ids[end:] = [9] * (len(record.ids) - end)
    assert torch.equal(gradient(replica, groups), want)
    groups[0].members[0].records[0].ids[groups[0].members[0].records[0].turns[0][1]] ^= 1
    assert not torch.equal(gradient(replica, groups), want), "an observation before a sampled token counts"
