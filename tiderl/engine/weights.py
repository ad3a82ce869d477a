"""Receiving new weights inside the engine's worker.

Invariant: after `finish_weight_update` every parameter of the model is either the tensor that was sent or
exactly what it was before; nothing is left uninitialised and no packed copy is stale.

vLLM's layerwise reload has two gaps that matter here. A layer of which only some tensors are sent (LoRA
merges a weight and not its bias; q and v without k) is rebuilt from *uninitialised* memory where nothing was
sent: `_fill_gaps` completes it from the live layer first. And on a CPU the packed copy of a tied embedding is
not rebuilt, so the output layer would silently keep the old weights: `_repack_embeddings` rebuilds it.

Imported by `worker.py`, which registers the transfer engines in the worker's process.
"""

from __future__ import annotations

import base64
import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """One safetensors file, under a path this process can open."""

    path: str


class TideWeights(IPCWeightTransferEngine):
    """The backend `tiderl`: weights from a file in host memory, or from the trainer's memory on one GPU.

    An update names either `path`, or what vLLM's CUDA IPC engine takes, the handles pickled by our parent.
    """

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        if "path" in update_dict:
            return SharedUpdate(**update_dict)
        handles = pickle.loads(base64.b64decode(update_dict.pop("handles")))
        return super().parse_update_info(update_dict | {"ipc_handles": handles})

    def receive_weights(self, update_info: Any) -> None:
        if not isinstance(update_info, SharedUpdate):
            super().receive_weights(update_info)
            return
        with safe_open(update_info.path, "pt") as file, disable_mtp_completeness_check():
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        _fill_gaps(self.model)
        super().finish_weight_update()
        _repack_embeddings(self.model)


if "tiderl" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("tiderl", TideWeights)


def _fill_gaps(model: torch.nn.Module) -> None:
    """Complete linear layers of which only some tensors came.

    For each, the live value of every parameter is put in front of what was sent, so that the rebuild starts
    from it. A packed CPU weight is read through the layer itself: its product with the identity is the
    weight, exactly, since each sum has one non-zero term.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, LinearBase) or not info.can_load() or info.kernel_tensors is None:
            continue
        if not 0 < info.load_numel < (info.load_numel_total or 0):
            continue
        if getattr(layer, "tp_size", 1) > 1:
            name = getattr(layer, "prefix", type(layer).__name__)
            raise RuntimeError(f"the model is split over ranks and only some tensors of {name} were sent")
        live = info.kernel_tensors[0]
        first = []
        for name, parameter in live.items():
            value = parameter.data
            if name == "weight" and not value.numel():
                value = _unpacked(layer, parameter.dtype)
            loader: Any = getattr(layer, name).weight_loader
            while loader.__name__ == "online_process_loader":
                loader = loader.__wrapped__
            bound = inspect.signature(loader).bind(getattr(layer, name), value.clone())
            bound.apply_defaults()
            first.append((name, bound))
        info.loaded_weights[:0] = first


def _unpacked(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight (outputs x inputs) inside a packed CPU layer."""
    width = layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.input_size
    columns = [
        layer.cpu_linear(rows, layer.weight, None) for rows in torch.eye(width, dtype=dtype).split(256)
    ]
    return torch.cat(columns).t().contiguous()


def _repack_embeddings(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
