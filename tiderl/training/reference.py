"""Log-probs of the frozen reference policy: the model as it was loaded.

Invariant: the reference never changes, costs nothing when the KL weight is 0, and needs no second copy of
the weights under LoRA (the adapter is left out of the pass).
"""

from __future__ import annotations

import copy

import torch

from tiderl.training.model import CausalModel
from tiderl.training.packing import Pack


class Reference:
    """Scores packs under the initial weights."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._frozen: CausalModel | None = None
        if model.sites is None:
            self._frozen = copy.deepcopy(model)
            for parameter in self._frozen.base.parameters():
                parameter.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Log-probs of the pack's pairs, (pairs,) float32, no gradient."""
        if self._frozen is not None:
            return self._frozen.logprobs(pack)[0]
        return self._model.logprobs(pack, base=True)[0]
