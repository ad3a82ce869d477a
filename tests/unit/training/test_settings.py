"""A settings object that exists is valid; a wrong value is named with its remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tiderl.errors import ConfigError
from tiderl.training import LoraSettings, LossSettings, ModelSettings, OptimSettings


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: LossSettings(aggregation="mean"), "aggregation"),  # type: ignore[arg-type]
        (lambda: LossSettings(advantage="gae"), "advantage"),  # type: ignore[arg-type]
        (lambda: LossSettings(clip_low=1.0), "clip_low"),
        (lambda: LossSettings(dual_clip=0.5), "dual_clip"),
        (lambda: LossSettings(kl_coef=-1.0), "kl_coef"),
        (lambda: LossSettings(correction="tis_token"), "correction"),
        (lambda: LossSettings(old="recomputed", correction="tis"), "correction"),  # type: ignore[arg-type]
        (lambda: OptimSettings(learning_rate=-1e-4), "learning_rate"),
        (lambda: OptimSettings(betas=(0.9, 1.0)), "betas"),
        (lambda: ModelSettings("x", dtype="float16"), "dtype"),  # type: ignore[arg-type]
        (lambda: ModelSettings("x", max_tokens_per_microbatch=0), "max_tokens_per_microbatch"),
        (lambda: ModelSettings("x", dtype="bfloat16", backward_dtype="float32"), "backward_dtype"),
        (lambda: ModelSettings("x", lora=None, backward_dtype="bfloat16"), "backward_dtype"),
        (lambda: LoraSettings(rank=0), "rank"),
    ],
)
def test_wrong_values_are_named(make: object, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make()  # type: ignore[operator]


def test_a_learning_rate_of_zero_is_allowed() -> None:
    assert OptimSettings(learning_rate=0.0).learning_rate == 0.0


def test_settings_and_advantages_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tiderl.training, tiderl.training.advantages, tiderl.training.packing, tiderl.training.batch"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
