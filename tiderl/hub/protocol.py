"""The wire: what a client and a worker say to each other, and how it lies in frames.

A request is `[request id (8 bytes), header, raw, raw, ...]`, a reply the same with the id it answers.
The header is one msgpack struct; an array in it is a msgpack extension (index of its raw frame, dtype,
shape, sha256) and its bytes are a frame of their own.

Invariant: what is unpacked equals what was packed, value for value (tuples become lists); an array
whose bytes do not match its hash, or a frame that is missing, is an error and never data.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from tiderl import errors
from tiderl.env.plain import place_of
from tiderl.errors import Busy, EnvironmentFault, InfrastructureError, TideError
from tiderl.hub.base import SessionSpec

VERSION = 1
MAX_FRAME_BYTES = 256 * 2**20
_ARRAY = 1
_ARRAY_KINDS = "biufcSUMm"

T = TypeVar("T")


class ProtocolError(InfrastructureError):
    """A message that breaks the protocol: malformed, out of order, or damaged on the way."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where the code that registers an environment lies, and what it was registered with."""

    module: str
    name: str
    """Qualified name of the class or function in `module`."""
    file: str | None
    """Source file of `module`."""
    kwargs: dict[str, Any]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    version: int = VERSION


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    env_id: str
    kwargs: dict[str, Any]
    origin: Origin | None
    timeout: float


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    seed: int | None
    task: Any
    split: str
    timeout: float | None = None


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    action: Any
    timeout: float | None = None


class Oracle(msgspec.Struct, frozen=True, array_like=True, tag="oracle"):
    pass


class Tasks(msgspec.Struct, frozen=True, array_like=True, tag="tasks"):
    split: str


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag="truncate"):
    """End the episode from outside for `reason` (an `EndReason` value)."""

    reason: str


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    pass


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Close every session and leave."""


Operation = Ping | Open | Reset | Step | Oracle | Tasks | Truncate | Close | Stop


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`seq` grows by one per call of a session; the last number sent again means the last call."""

    session: str
    seq: int
    op: Operation


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    version: int
    pid: int
    capacity: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    spec: SessionSpec


class Observed(msgspec.Struct, frozen=True, array_like=True, tag="observed"):
    """The answer to `Reset` and `Step`; `step_timeout` is the limit of the next step (seconds)."""

    messages: list[Any]
    info: dict[str, Any]
    reward: float
    terminated: bool
    truncated: bool
    step_timeout: float


class Credited(msgspec.Struct, frozen=True, array_like=True, tag="credited"):
    """The answer to `Truncate`: partial credit and the final info."""

    reward: float
    info: dict[str, Any]


class Acted(msgspec.Struct, frozen=True, array_like=True, tag="acted"):
    action: Any


class TaskIds(msgspec.Struct, frozen=True, array_like=True, tag="task_ids"):
    ids: list[Any]


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    pass


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """An error on its way to the client; `kind` is the name of a class in `tiderl.errors`."""

    kind: str
    what: str
    where: str | None = None
    fix: str | None = None
    trace: str | None = None
    retry_after: float = 0.0


Reply = Pong | Opened | Observed | Credited | Acted | TaskIds | Closed | Failure


def pack(message: Request | Reply) -> list[bytes]:
    """Header frame and raw frames of a message.

    Raises:
        TypeError, OverflowError, ValueError: a value in it cannot be sent; the text names its type.
    """
    raw: list[bytes] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _pack_array(value, raw)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to another process"
        )

    header = Encoder(enc_hook=hook).encode(message)
    return [header, *raw]


def unpack_request(frames: Sequence[bytes]) -> Request:
    """The request in a header frame and its raw frames; `ProtocolError` when malformed."""
    return _unpack(frames, _REQUEST, Request)


def unpack_reply(frames: Sequence[bytes]) -> Reply:
    """The reply in a header frame and its raw frames; `ProtocolError` when malformed."""
    return _unpack(frames, _REPLY, Reply)


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension {code} without a raw frame")


_REQUEST: Decoder[Request] = Decoder(Request, ext_hook=_no_extension)
_REPLY: Decoder[Reply] = Decoder(Reply, ext_hook=_no_extension)
_DESCRIPTION = Decoder(tuple[int, str, tuple[int, ...], bytes])


def _unpack(frames: Sequence[bytes], plain: Decoder[T], kind: Any) -> T:
    if not frames:
        raise ProtocolError("a message has no header frame")
    decoder = plain
    if len(frames) > 1:
        decoder = Decoder(kind, ext_hook=lambda code, data: _unpack_array(code, data, frames))
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error


def _pack_array(array: np.ndarray, raw: list[bytes]) -> Ext:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"an array of dtype {array.dtype} cannot be sent to another process")
    data = array.tobytes()  # a copy: the environment may draw into its buffer while the frame is sent
    raw.append(data)
    description = (len(raw), array.dtype.str, array.shape, hashlib.sha256(data).digest())
    return Ext(_ARRAY, msgspec.msgpack.encode(description))


def _unpack_array(code: int, data: memoryview, frames: Sequence[bytes]) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    index, dtype_name, shape, digest = _DESCRIPTION.decode(data)
    if not 1 <= index < len(frames):
        raise ValueError(f"raw frame {index} is missing")
    dtype = np.dtype(dtype_name)
    content = frames[index]
    if dtype.kind not in _ARRAY_KINDS or any(n < 0 for n in shape):
        raise ValueError(f"array of dtype {dtype} and shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"raw frame {index} has {len(content)} bytes, shape {shape} of {dtype} needs others")
    if hashlib.sha256(content).digest() != digest:
        raise ValueError(f"the bytes of raw frame {index} do not match their sha256")
    return np.frombuffer(content, dtype=dtype).reshape(shape).copy()


def failure_of(error: BaseException, where: str) -> Failure:
    """The wire form of whatever an environment raised.

    Errors of ours keep their class. A lost connection, a time-out or another `OSError`, and memory that
    ran out, are infrastructure. All else is a fault of the environment.
    """
    trace = "".join(traceback.format_exception(error))[-8000:]
    if isinstance(error, TideError):
        known = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        retry_after = error.retry_after if isinstance(error, Busy) else 0.0
        return Failure(known, error.what, error.where or where, error.fix, trace, retry_after)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = f"{where}, {place}" if (place := place_of(error)) else where
    if isinstance(error, (OSError, MemoryError)):
        return Failure(InfrastructureError.__name__, text, where, None, trace)
    return Failure(EnvironmentFault.__name__, text, where, "repair the environment", trace)


def error_of(failure: Failure) -> TideError:
    """The exception a `Failure` stands for, with the remote traceback as a note."""
    kind = getattr(errors, failure.kind, None)
    error: TideError
    if kind is Busy:
        error = Busy(failure.what, retry_after=failure.retry_after, where=failure.where)
    elif isinstance(kind, type) and issubclass(kind, TideError):
        error = kind(failure.what, where=failure.where, fix=failure.fix)
    else:
        error = InfrastructureError(failure.what, where=failure.where, fix=failure.fix)
    if failure.trace:
        error.add_note("in the worker:\n" + failure.trace)
    return error
