"""Pictures as arrays and as PNG bytes.

Invariant: `decode_image(encode_png(a))` equals `a` bit by bit, and two arrays have the same
`image_hash` exactly when they have the same shape and the same bytes.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np

from tiderl.errors import EnvironmentFault

MAX_PIXELS = 64 * 1024 * 1024


def image_problem(value: Any) -> str | None:
    """Why `value` is not an image of ours (HxWx3 uint8), or None when it is one."""
    if not isinstance(value, np.ndarray):
        return f"an image must be a NumPy array, not {type(value).__name__}"
    if value.dtype != np.uint8:
        return f"an image must have dtype uint8, not {value.dtype}"
    if value.ndim != 3 or value.shape[2] != 3:
        return f"an image must have shape (height, width, 3), not {value.shape}"
    if value.shape[0] == 0 or value.shape[1] == 0:
        return f"an image must not be empty, its shape is {value.shape}"
    return None


def image_hash(image: np.ndarray) -> str:
    """SHA-256 over shape and bytes, as 64 hex digits."""
    digest = hashlib.sha256(repr(tuple(map(int, image.shape))).encode())
    digest.update(np.ascontiguousarray(image).tobytes())
    return digest.hexdigest()


def encode_png(image: np.ndarray) -> bytes:
    """An HxWx3 uint8 array as the bytes of a PNG file.

    Raises:
        EnvironmentFault: the array is no image of ours.
    """
    from PIL import Image

    if problem := image_problem(image):
        raise EnvironmentFault(problem, fix="convert it to uint8 RGB first")
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image), "RGB").save(out, "PNG")
    return out.getvalue()


def decode_image(data: bytes) -> np.ndarray:
    """The HxWx3 uint8 array in the bytes of a PNG, JPEG or other picture; transparency is dropped.

    Raises:
        EnvironmentFault: the bytes are no picture, or one of more than 64 megapixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise EnvironmentFault(
                    f"a picture of {picture.width}x{picture.height} is too large", fix="send a smaller one"
                )
            return np.array(picture.convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise EnvironmentFault(f"a picture cannot be read: {error}", fix="send a PNG or JPEG") from error
