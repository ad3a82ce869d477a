"""The trained causal language model: loaded, packed for, and scored.

Invariant: `logprobs` of a pack equals log_softmax of the model's own logits, record by record, whatever
the packing. `load` proves this on a probe for the model at hand and falls back to padded rows, or refuses
the model, where it does not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiderl.errors import ModelError
from tiderl.training import attention
from tiderl.training.decoder import TreeDecoder
from tiderl.training.head import selected_logprobs
from tiderl.training.lora import LoraSites, attach
from tiderl.training.packing import Item, Pack, pack_rows, pack_tree
from tiderl.training.settings import ModelSettings

log = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}
"""Largest difference of a log-prob that rounding may cause on the probe."""


class CausalModel:
    """A transformers causal model, with LoRA adapters or all weights trainable."""

    def __init__(self, settings: ModelSettings, seed: int = 0) -> None:
        """Load the checkpoint folder.

        Raises:
            ModelError: the folder is missing, is no checkpoint, or its architecture cannot be scored.
            ConfigError: the adapter's targets do not exist.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import (
            disable_progress_bar,
            enable_progress_bar,
            is_progress_bar_enabled,
        )

        self.settings = settings
        self.folder = Path(settings.path)
        self.device = torch.device(settings.device)
        dtype = getattr(torch, settings.dtype)
        if not (self.folder / "config.json").is_file():
            raise ModelError(
                f"no model at {str(self.folder)!r}: it has no config.json", fix="give a checkpoint folder"
            )
        if settings.threads:
            torch.set_num_threads(settings.threads)
        attention.register()
        bar = is_progress_bar_enabled()
        disable_progress_bar()
        try:
            self.base: Any = AutoModelForCausalLM.from_pretrained(
                str(self.folder), dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"the model at {str(self.folder)!r} cannot be loaded: {reason}",
                fix="use a causal language model saved by transformers",
            ) from error
        finally:
            if bar:
                enable_progress_bar()
        self.base.to(self.device).eval()  # eval: no dropout, ever; it would make ratios meaningless
        self.dtype = dtype
        self.backward_dtype = getattr(torch, settings.backward_dtype or settings.dtype)
        self.wrapped: Any = None
        self.sites: LoraSites | None = None
        if settings.lora is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.wrapped, self.sites = attach(self.base, settings.lora, self.backward_dtype)
        self.config = self.base.config.get_text_config()
        self.decoder = self.base.get_decoder()
        self.shares_prefix = settings.share_prefix == "auto" and self._full_attention()
        self.tree_decoder = TreeDecoder.of(self.decoder) if self.shares_prefix else None
        self._probe()

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters, in a fixed order."""
        return [p for p in self.base.parameters() if p.requires_grad]

    def refresh(self) -> None:
        """Must follow every change of `parameters`."""
        if self.sites is not None:
            self.sites.refresh()

    def pack(self, items: Sequence[Item]) -> list[Pack]:
        """Packs for these records; every record is in exactly one."""
        pack = pack_tree if self.shares_prefix else pack_rows
        return pack(items, self.settings.max_tokens_per_microbatch)

    def logprobs(self, pack: Pack, *, base: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs (nats, float32) of the pack's pairs and entropy of its rows (no gradient).

        Args:
            base: compute with the weights below the adapter (LoRA only), without gradient.
        """
        if base and self.sites is None:
            raise ValueError("base weights exist only below a LoRA adapter")
        context = self.sites.disabled() if base and self.sites else nullcontext()
        with context, torch.no_grad() if base else nullcontext():
            return selected_logprobs(
                self._hidden(pack),
                self.base.get_output_embeddings().weight,
                torch.from_numpy(pack.pair_row).to(self.device),
                torch.from_numpy(pack.pair_target).to(self.device),
                self.backward_dtype,
            )

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, effective weight) of every tensor that training can change, under module names."""
        if self.sites is not None:
            for site in self.sites:
                yield site.name + ".weight", site.merged
        else:
            for name, parameter in self.base.named_parameters():
                yield name, parameter.detach()

    def checkpoint_names(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The same tensors under the names a checkpoint of this architecture has."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.base, dict(tensors))

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the merged model under module names; the live adapter is not touched."""
        changed = dict(self.named_weights())
        state = {}
        for name, tensor in self.base.state_dict().items():
            if ".lora_A." in name or ".lora_B." in name:
                continue
            plain = name.replace(".base_layer.", ".")
            state[plain] = changed.get(plain, tensor).detach()
        return state

    def save_merged(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Write `full_state()` as a plain checkpoint: safetensors shards and config.json."""
        from safetensors.torch import save_file

        tied = self.base.config.get_text_config().tie_word_embeddings
        state = {name: tensor.contiguous() for name, tensor in self.checkpoint_names(state.items()).items()}
        if tied:  # one storage, one name; loaders tie the other to it
            state = {n: t for n, t in state.items() if n != "lm_head.weight"}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        self.base.config.save_pretrained(str(folder))

    def _hidden(self, pack: Pack) -> torch.Tensor:
        """Last hidden states of the pack's rows, (rows, width)."""
        rows = torch.from_numpy(pack.rows).to(self.device)
        ids = torch.from_numpy(pack.ids).to(self.device)
        positions = torch.from_numpy(pack.positions).to(self.device)
        if pack.attention_mask is None:
            plan = attention.TreePlan(pack.blocks, self.device, self.dtype, self.backward_dtype)
            if self.tree_decoder is not None:
                return self.tree_decoder.hidden(ids[0], positions[0], plan, rows)
            with self._attention(attention.NAME):
                out = self.decoder(input_ids=ids, position_ids=positions, use_cache=False, tree_plan=plan)
        else:
            mask = torch.from_numpy(pack.attention_mask).to(self.device)
            out = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        return out.last_hidden_state.flatten(0, 1)[rows]

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        before, self.config._attn_implementation = self.config._attn_implementation, name
        try:
            yield
        finally:
            self.config._attn_implementation = before

    def _full_attention(self) -> bool:
        """True when every layer attends to the whole past, so equal prefixes have equal states."""
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        window = getattr(self.config, "sliding_window", None)
        windowed = window is not None and getattr(self.config, "use_sliding_window", True)
        return kinds == {"full_attention"} and not windowed and not hasattr(self.base.config, "vision_config")

    def _probe(self) -> None:
        """Compare both packings with the model's own logits on a few tokens."""
        vocabulary = int(self.base.get_output_embeddings().weight.shape[0])
        ids = np.arange(1, 13, dtype=np.int64) * 7 % min(vocabulary, 97)
        other = np.concatenate([ids[:6], ids[::-1][:5]])
        items = [Item(r, np.arange(4, len(r), dtype=np.int64)) for r in (ids, other)]
        expected = [self._plain(item) for item in items]
        tolerance = PROBE_TOLERANCE[self.dtype]
        if self.tree_decoder is not None and self._gap(items, expected) > tolerance:
            log.warning(
                "%s: the fused decoder does not fit this model; its own modules are used", self.folder
            )
            self.tree_decoder = None
        if self.shares_prefix and self._gap(items, expected) > tolerance:
            log.warning("%s: sharing prefixes is not exact for this model; padded rows are used", self.folder)
            self.shares_prefix = False
        if not self.shares_prefix and self._gap(items, expected) > tolerance:
            raise ModelError(
                f"the log-probs of {type(self.base).__name__} are not log_softmax(head x hidden)",
                where=str(self.folder),
                fix="use a model whose logits are a plain projection of its hidden states",
            )

    @torch.no_grad()
    def _plain(self, item: Item) -> torch.Tensor:
        logits = self.base(input_ids=torch.from_numpy(item.ids)[None].to(self.device)).logits[0].float()
        at = torch.from_numpy(item.targets).to(self.device)
        chosen = torch.from_numpy(item.ids).to(self.device)[at]
        return torch.log_softmax(logits[at - 1], -1).gather(1, chosen[:, None])[:, 0]

    @torch.no_grad()
    def _gap(self, items: list[Item], expected: list[torch.Tensor]) -> float:
        try:
            gaps = []
            for pack in self.pack(items):
                pairs, _ = self.logprobs(pack)
                entries = pairs[torch.from_numpy(pack.entry_pair).to(self.device)]
                gaps.append((entries - torch.cat([expected[i] for i in pack.items])).abs().max().item())
            return max(gaps)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            log.warning("%s: %s", self.folder, error)
            return float("inf")
