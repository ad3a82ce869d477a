"""The wire: values come back as they were, damage is an error, errors keep their class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tiderl import errors
from tiderl.errors import Busy, EnvironmentFault, InfrastructureError, TideError, UnknownEnvironment
from tiderl.hub import protocol
from tiderl.hub.base import SessionSpec
from tiderl.hub.protocol import (
    Acted,
    Failure,
    Observed,
    Open,
    Opened,
    Origin,
    ProtocolError,
    Request,
    Step,
    error_of,
    failure_of,
    pack,
    unpack_reply,
    unpack_request,
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
dtypes = st.sampled_from(["uint8", "int64", "float32", "float64", "bool", "complex64", "<U3"])
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and one == other


@settings(deadline=None, max_examples=60)
@given(values, st.lists(arrays, max_size=3))
def test_values_and_arrays_round_trip(value: Any, pictures: list[np.ndarray]) -> None:
    info = {"value": value, "pictures": pictures}
    frames = pack(Observed([{"content": pictures}], info, 0.1, True, False, 3.0))
    assert len(frames) == 1 + 2 * len(pictures)
    back = unpack_reply(frames)
    assert isinstance(back, Observed)
    assert equal(back.info, info)
    assert equal(back.messages, [{"content": pictures}])
    assert (back.reward, back.terminated, back.truncated, back.step_timeout) == (0.1, True, False, 3.0)


def test_arrays_are_raw_frames_and_snapshots() -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    frames = pack(Acted(picture[:, ::-1]))
    wanted = picture[:, ::-1].copy()
    assert frames[1] == wanted.tobytes()
    picture[:] = 0  # the environment draws on while the frame waits
    back = unpack_reply(frames)
    assert isinstance(back, Acted)
    assert np.array_equal(back.action, wanted)
    back.action[0, 0, 0] = 9  # it is ours


def test_numpy_scalars_become_numbers() -> None:
    back = unpack_reply(pack(Acted({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)})))
    assert back == Acted({"a": 3, "b": 0.5, "c": True})


@pytest.mark.parametrize("value", [object(), {1, 2}.__iter__(), 2**64, np.array([object()]), lambda: 0])
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        pack(Acted(value))


def damaged() -> list[list[bytes]]:
    header, raw = pack(Acted(np.arange(6, dtype=np.uint8)))
    return [
        [],
        [b""],
        [b"\xc1nonsense"],
        [header],
        [header, raw[:-1]],
        [header, raw + b"x"],
        [header, b"\xff" + raw[1:]],
        [header[:-1], raw],
        [pack(Request("s", 1, Step("x")))[0]],
        [b"\x91" * 5000],
    ]


@pytest.mark.parametrize("frames", damaged())
def test_damage_is_an_error_and_never_data(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        unpack_reply(frames)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_garbage_is_refused(frames: list[bytes]) -> None:
    for unpack in (unpack_request, unpack_reply):
        try:
            unpack(frames)
        except ProtocolError:
            continue


def test_requests_round_trip() -> None:
    for op in (Open("a/B-v0", {"n": 1}, Origin("m", "B", None, {}), 3.0), Step({"role": "assistant"}, 0.5)):
        request = Request("session", 7, op)
        assert unpack_request(pack(request)) == request


def test_specs_round_trip() -> None:
    spec = SessionSpec(
        "a/B-v0", [{"type": "function"}], 3, None, 60.0, (-1.0, math.inf), ("train",), 1.0, 2.0
    )
    assert unpack_reply(pack(Opened(spec))) == Opened(spec)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - it only gets its traceback
        return caught


OURS = [
    k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TideError) and k is not Busy
]


@pytest.mark.parametrize("kind", OURS)
def test_t11_our_errors_keep_class_text_and_traceback(kind: type[TideError]) -> None:
    error = raised(kind("it broke", where="here", fix="mend it"))
    back = error_of(failure_of(error, "elsewhere"))
    assert type(back) is kind
    assert str(back) == str(error)
    assert "test_protocol.py" in back.__notes__[0]


def test_busy_keeps_its_time() -> None:
    back = error_of(failure_of(Busy("full", retry_after=2.5), "hub"))
    assert isinstance(back, Busy)
    assert back.retry_after == 2.5


def test_a_plugins_own_subclass_arrives_as_ours() -> None:
    class Special(UnknownEnvironment):
        pass

    assert type(error_of(failure_of(Special("no such"), "x"))) is UnknownEnvironment


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError("gone"), InfrastructureError),
        (TimeoutError(), InfrastructureError),
        (MemoryError(), InfrastructureError),
        (ValueError("bad"), EnvironmentFault),
        (KeyError("x"), EnvironmentFault),
    ],
)
def test_t58_infrastructure_and_faults_are_told_apart(error: Exception, kind: type[TideError]) -> None:
    back = error_of(failure_of(raised(error), "step of a/B-v0"))
    assert type(back) is kind
    assert type(error).__name__ in str(back)
    assert "step of a/B-v0" in str(back)


def test_an_unknown_kind_is_infrastructure() -> None:
    assert type(error_of(Failure("SystemError", "odd"))) is InfrastructureError
    assert type(error_of(Failure("nearest", "odd"))) is InfrastructureError


def test_frames_are_bounded() -> None:
    assert protocol.MAX_FRAME_BYTES >= 3 * 4096 * 4096
