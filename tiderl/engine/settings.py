"""What the user may choose about an engine.

Invariant: frozen and checked on construction; the engine compares it with what vLLM really runs with and
refuses to start when they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiderl.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
WeightRoute = Literal["auto", "host"]
StartMethod = Literal["auto", "fork", "spawn"]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one inference engine.

    Raises:
        ConfigError: a value is out of range, or the KV cache cannot hold one context of `max_model_len`.
    """

    model: str | Path
    """Folder of the checkpoint (transformers layout)."""
    dtype: Dtype = "float32"
    max_model_len: int = 1024
    """Longest context, prompt and all turns together, in tokens."""
    kv_tokens: int = 32768
    """Size of the KV cache in tokens; rounded down to whole blocks."""
    block_size: int = 32
    """Tokens of a KV block; vLLM on a CPU wants a multiple of 32."""
    max_sessions: int = 64
    """Most sessions that may be open at once; each holds a slot of the model runner."""
    threads: int = 1
    """OpenMP threads of the engine process (CPU only); the parent's are left alone."""
    seed: int = 0
    max_batched_tokens: int = 2048
    """Most tokens computed in one engine step."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids never sampled (image placeholders); the log-probs stay those of the full softmax."""
    max_images: int = 0
    """Most images in one context; 0 = a text-only engine, which loads no processor."""
    turn_timeout: float = 120.0
    """Seconds until a turn that has not ended fails with EngineError."""
    admission_timeout: float = 3600.0
    """Seconds a session may wait for room before it fails with Busy."""
    publish_timeout: float = 300.0
    start_timeout: float = 180.0
    log_file: str | Path | None = None
    """Where the engine's log goes (appended); None keeps it in memory, for the text of errors."""
    weight_route: WeightRoute = "auto"
    """`auto`: CUDA IPC for tensors on the engine's own GPU, host memory for all others; or always `host`."""
    start_method: StartMethod = "auto"
    gpu_memory: float = 0.5
    """Share of the GPU's memory vLLM may plan with (ignored on a CPU)."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_sessions", "threads", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}", fix="set it to 1 or more")
        if self.kv_tokens < self.max_model_len:
            raise ConfigError(
                f"engine.kv_tokens is {self.kv_tokens}, less than engine.max_model_len {self.max_model_len}",
                fix="raise kv_tokens or lower max_model_len",
            )
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"engine.kv_tokens {self.kv_tokens} rounded down to blocks of {self.block_size} is less than"
                f" engine.max_model_len {self.max_model_len}",
                fix="raise kv_tokens by one block",
            )

    @property
    def kv_blocks(self) -> int:
        """Usable KV blocks."""
        return self.kv_tokens // self.block_size
