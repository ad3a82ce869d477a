"""A training replica: gradient accumulation over groups, the optimizer step, and the weights to publish.

Invariant: the update depends on the groups given since the last step and on nothing else: not on their
order, not on how many calls or micro-batches they came in (up to rounding, <= 1e-6 relative in float32).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiderl.errors import ModelError
from tiderl.training import checkpoint
from tiderl.training.batch import Batch, Scored, build_batch, score_record
from tiderl.training.correction import correction_weights
from tiderl.training.kl import kl_penalty, mismatch_kl
from tiderl.training.losses import policy_loss
from tiderl.training.model import CausalModel
from tiderl.training.optimizer import Optimizer
from tiderl.training.packing import Pack
from tiderl.training.reference import Reference
from tiderl.training.settings import LossSettings, ModelSettings, OptimSettings
from tiderl.training.stats import StatSums, UpdateStats

if TYPE_CHECKING:
    from tiderl.trajectory.group import Group
    from tiderl.trajectory.record import TokenRecord

log = logging.getLogger(__name__)


class Replica:
    """Trains one copy of the model.

    `load()` first. Then either `update(groups, version)`, or any number of `accumulate(groups, version)`
    followed by `step()`.
    """

    def __init__(
        self,
        model: ModelSettings,
        optim: OptimSettings | None = None,
        loss: LossSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = model
        self.optim = optim or OptimSettings()
        self.loss = loss or LossSettings()
        self.seed = seed
        self._model: CausalModel | None = None
        self._optimizer: Optimizer | None = None
        self._reference: Reference | None = None
        self.skipped_in_a_row = 0
        self._begin()

    # -- life ---------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the checkpoint, attach the adapter, and prove on a probe that scoring is exact.

        Raises:
            ModelError, ConfigError: see `CausalModel`.
        """
        self._model = CausalModel(self.settings, self.seed)
        self._optimizer = Optimizer(self._model.parameters(), self.optim)
        if self.loss.kl_coef > 0:
            self._reference = Reference(self._model)

    @property
    def model(self) -> CausalModel:
        """The loaded model."""
        if self._model is None:
            raise ModelError("the replica has no model yet", fix="call load() first")
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the loaded model."""
        if self._optimizer is None:
            raise ModelError("the replica has no optimizer yet", fix="call load() first")
        return self._optimizer

    # -- training -----------------------------------------------------------------------------------

    def update(self, groups: Sequence[Group], version: int) -> UpdateStats:
        """One optimizer step on `groups`.

        Args:
            groups: finished groups; invalid members and useless groups are left out and counted.
            version: the policy version the trainer's weights have now; the gap to the sampler is
                measured on tokens of this version.

        Returns:
            Statistics; `skipped` is True when nothing was learned and the weights did not change.
        """
        self.discard()
        self.accumulate(groups, version)
        return self.step()

    def accumulate(self, groups: Sequence[Group], version: int) -> None:
        """Add the gradient of `groups` to the running, not yet normalised, sum."""
        started = time.perf_counter()
        batch = build_batch(groups, self.loss)
        self._note(batch)
        useful = batch.informative or (self._reference is not None and bool(batch.records))
        packs = self.model.pack([r.item for r in batch.records]) if batch.records else []
        self._add_seconds("pack", started)
        for pack in packs:
            self._microbatch(pack, batch.records, version, gradient=useful)

    def step(self) -> UpdateStats:
        """Divide the sum by the global denominator, clip, step; then start anew."""
        started = time.perf_counter()
        stats, sums = self._stats, self._sums
        has_gradient = any(m.grad is not None for m in self.optimizer.masters)
        if self._denominator and self._useful and has_gradient:
            stats.loss = self._loss_sum / self._denominator
            stats.policy_loss = self._policy_sum / self._denominator
            stats.grad_norm, stats.learning_rate = self.optimizer.step(self._denominator)
            self.model.refresh()
            self.skipped_in_a_row = 0
        else:
            self.optimizer.clear()
            self.skipped_in_a_row += 1
            stats.skipped = True
            log.warning(
                "no group has anything to learn from (%d zero-variance, %d with fewer than two valid"
                " members): step skipped, %d in a row",
                stats.zero_variance_groups,
                stats.skipped_groups,
                self.skipped_in_a_row,
            )
        stats.skipped_in_a_row = self.skipped_in_a_row
        stats.update = self.optimizer.updates
        sums.fill(stats)
        self._add_seconds("step", started)
        self._begin()
        return stats

    @property
    def denominator(self) -> float:
        """What the running gradient sum will be divided by."""
        return self._denominator

    def discard(self) -> None:
        """Forget everything accumulated since the last step."""
        self.optimizer.clear()
        self._begin()

    def logprobs(self, records: Sequence[TokenRecord]) -> list[np.ndarray]:
        """Log-probs (nats, float32) of each record's loss tokens under the current weights."""
        scored = [score_record(r) for r in records]
        present = [(i, s) for i, s in enumerate(scored) if s is not None]
        out = [np.empty(0, dtype=np.float32) for _ in records]
        if not present:
            return out
        with torch.no_grad():
            for pack in self.model.pack([s.item for _, s in present]):
                pairs, _ = self.model.logprobs(pack)
                values = pairs.cpu().numpy()[pack.entry_pair]
                for local, item in enumerate(pack.items):
                    out[present[item][0]] = values[pack.entry_item == local]
        return out

    # -- weights ------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor) of every tensor training can change, merged, in the model's dtype.

        The tensors are the live ones: copy or send them before the next update.
        """
        yield from self.model.checkpoint_names(self.model.named_weights()).items()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint that plain transformers and vLLM load, with `state/` for resuming.

        Raises:
            ResourceError: not enough free disk; nothing was written.
        """
        return checkpoint.save(self, Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs: trained parameters, optimizer, counters, RNG."""
        return {
            "parameters": [p.detach() for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "skipped_in_a_row": self.skipped_in_a_row,
            "rng": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any] | str | Path) -> None:
        """Restore `state_dict`'s value, or a folder written by `save`.

        Raises:
            ModelError: the state belongs to another model or adapter.
        """
        if not isinstance(state, dict):
            state = checkpoint.read_state(Path(state))
        own = self.model.parameters()
        saved = state["parameters"]
        if [tuple(p.shape) for p in own] != [tuple(p.shape) for p in saved]:
            raise ModelError(
                "the saved trainer state has other parameter shapes than this model",
                fix="resume with the model and adapter settings of the saved run",
            )
        with torch.no_grad():
            for parameter, value in zip(own, saved, strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        torch.set_rng_state(state["rng"].cpu())
        self.model.refresh()
        self.discard()

    # -- inside -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._stats = UpdateStats(update=self._optimizer.updates if self._optimizer else 0)
        self._sums = StatSums()
        self._denominator = self._loss_sum = self._policy_sum = 0.0
        self._useful = False

    def _add_seconds(self, name: str, since: float) -> None:
        seconds = self._stats.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - since

    def _note(self, batch: Batch) -> None:
        stats = self._stats
        for name in ("tokens", "episodes", "dropped_groups", "skipped_groups", "zero_variance_groups"):
            setattr(stats, name, getattr(stats, name) + getattr(batch, name))
        stats.masked_episodes += batch.masked_episodes
        self._denominator += batch.denominator
        self._useful |= batch.informative or (self._reference is not None and bool(batch.records))

    def _microbatch(self, pack: Pack, records: list[Scored], version: int, *, gradient: bool) -> None:
        """Forward and, when `gradient`, backward pass of one pack; adds to the sums."""
        here = [records[i] for i in pack.items]
        lengths = [len(r.old) for r in here]
        device = self.model.device

        def tensor(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

        rollout = tensor(np.concatenate([r.old for r in here]))
        advantages = tensor(np.repeat([r.advantage for r in here], lengths))
        weights = tensor(np.repeat([r.weight for r in here], lengths))
        sequence = tensor(pack.entry_item, torch.int64)
        pair = tensor(pack.entry_pair, torch.int64)

        reference = None
        if self._reference is not None:
            started = time.perf_counter()
            reference = self._reference.logprobs(pack)[pair]
            self._add_seconds("reference", started)

        started = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            pairs, entropy = self.model.logprobs(pack)
            logprobs = pairs[pair]
            old = rollout if self.loss.old == "rollout" else logprobs.detach()
            token = policy_loss(logprobs, old, advantages, sequence, len(here), self.loss)
            kappa = correction_weights(self.loss.correction, old, rollout, sequence, len(here), self.loss.cap)
            policy = token.loss if kappa is None else kappa * token.loss
            per_token = policy
            kl = None
            if reference is not None:
                kl = kl_penalty(logprobs, reference, self.loss.kl_kind)
                per_token = policy + self.loss.kl_coef * kl
            loss = (weights * per_token).sum()
        self._add_seconds("forward", started)
        if gradient:
            started = time.perf_counter()
            loss.backward()
            self.optimizer.collect()
            self._add_seconds("backward", started)

        self._loss_sum += float((weights * per_token).detach().double().sum())
        self._policy_sum += float((weights * policy).detach().double().sum())
        rows = tensor(pack.pair_row, torch.int64)
        values = {
            "mismatch": mismatch_kl(logprobs.detach() - rollout),
            "clipped": token.clipped.float(),
            "ratio": token.ratio,
            "entropy": entropy[rows][pair],
        }
        if kl is not None:
            values["kl"] = kl
        if kappa is not None:
            values["correction"] = kappa
        self._sums.add(values)
        self._note_gap((logprobs.detach() - rollout).abs(), here, version)
        self._stats.microbatches += 1
        self._stats.computed_tokens += pack.tokens
        self._stats.plain_tokens += pack.plain_tokens

    def _note_gap(self, gap: torch.Tensor, here: list[Scored], version: int) -> None:
        """The gap to the sampler over records sampled wholly at `version`, and over mixed ones.

        A record that was in flight during an update holds KV of older weights, which the sampler's later
        log-probs are conditioned on and the trainer's are not: its gap is no fault, and is told apart.
        """
        lengths = [len(r.old) for r in here]
        now = np.concatenate([r.versions for r in here]) == version
        pure = np.repeat([bool((r.versions == version).all()) for r in here], lengths)
        whole = torch.from_numpy(now & pure).to(gap.device)
        mixed = torch.from_numpy(now & ~pure).to(gap.device)
        if bool(whole.any()):
            turns = torch.from_numpy(np.concatenate([r.turns for r in here])).to(gap.device)
            self._sums.add_gap(gap[whole], turns[whole])
        if bool(mixed.any()):
            self._stats.mixed_tokens += int(mixed.sum())
            self._stats.max_mixed_gap = max(self._stats.max_mixed_gap, float(gap[mixed].max()))

    def close(self) -> None:
        """Let go of the model and optimizer."""
        self._model = self._optimizer = self._reference = None
        gc.unfreeze()  # an engine in this process froze what was there when it started
        gc.collect()
