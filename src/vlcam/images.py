"""The user's image, read once: upright RGB pixels, the file's bytes, and every step that was taken on the way."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from vlcam.errors import InputError

__all__ = ["ImageSource", "SourceImage", "open_image", "pixels_sha256"]

ImageSource = str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]
Step = dict[str, Any]

_PLAIN_MODES = ("RGB", "L", "1", "P", "PA", "LA", "RGBA", "RGBX", "CMYK", "YCbCr")
_EXIF_ORIENTATION = 0x0112
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # where every PNG says how many bits a channel has
_STRIP = 256  # rows that are hashed at once


@dataclass(frozen=True, eq=False)
class SourceImage:
    """An image as the user sees it.

    Attributes:
        rgb: the upright RGB image, at its original size.
        encoded: the bytes of the file it came from; None where it came from pixels.
        sha256: hash of `encoded`; of the pixels, by `pixels_sha256`, where there was no file.
        name: file name, or what kind of object was given.
        steps: what was done to reach `rgb`, in order.
    """

    rgb: Image.Image
    encoded: bytes | None
    sha256: str
    name: str
    steps: tuple[Step, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.rgb.height, self.rgb.width


def open_image(source: ImageSource, *, name: str = "") -> SourceImage:
    """Read an image from a path, bytes, a PIL image or a uint8 array.

    Args:
        source: a path; the bytes of an image file; a PIL image; a uint8 array [H, W], [H, W, 1], [H, W, 3] or
            [H, W, 4].
        name: what to call it in the record; by default the file name or the kind of object.

    Returns:
        The upright RGB image with its origin.

    Raises:
        InputError: no such file, an empty, truncated or unreadable file, an animation, or an array whose shape or
            type does not say what it shows.
    """
    if isinstance(source, Image.Image):
        return _from_pil(source, name or "PIL image")
    if isinstance(source, np.ndarray):
        return _from_pil(_from_array(source), name or "array")
    if isinstance(source, bytes):
        return _from_bytes(source, name or "bytes")
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return _from_bytes(_read(path), name or path.name)
    raise InputError(
        f"an image of type {type(source).__name__}: give a path, a PIL image, a uint8 array [H, W, 3], or a float "
        "tensor [3, H, W] that is already preprocessed"
    )


def pixels_sha256(rgb: Image.Image) -> str:
    """Hash of mode, width, height and pixels, whatever file they are in."""
    digest = hashlib.sha256(f"{rgb.mode} {rgb.width} {rgb.height}\n".encode())
    for top in range(0, rgb.height, _STRIP):
        digest.update(rgb.crop((0, top, rgb.width, min(top + _STRIP, rgb.height))).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"image {str(path)!r}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"image {str(path)!r}: is a folder; give one image file") from None
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        raise InputError(f"image {str(path)!r}: cannot be read ({error})") from None
    if not data:
        raise InputError(f"image {str(path)!r}: the file is empty (0 bytes)")
    return data


def _from_bytes(data: bytes, name: str) -> SourceImage:
    with _decoding(name), Image.open(io.BytesIO(data)) as opened:
        frames = getattr(opened, "n_frames", 1)
        # A JPEG of a phone or stereo camera (MPO) has further pictures behind the one that is meant.
        if frames > 1 and opened.format != "MPO":
            raise InputError(
                f"image {name!r}: an animation of {frames} frames; pick one, for example image.seek(0) and "
                "image.convert('RGB') in Pillow"
            )
        first: list[Step] = [{"step": "first_picture", "of": frames, "format": "MPO"}] if frames > 1 else []
        return _from_pil(opened, name, data, first)


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn what Pillow raises on damaged data, of many types, into one error."""
    try:
        yield
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(f"image {name!r}: not an image that Pillow can read") from None
    except Image.DecompressionBombError as error:
        raise InputError(f"image {name!r}: {error}") from None
    except (OSError, EOFError, SyntaxError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"image {name!r}: truncated or damaged ({error})") from None


def _from_pil(image: Image.Image, name: str, encoded: bytes | None = None, before: Sequence[Step] = ()) -> SourceImage:
    if min(image.size) < 1:
        raise InputError(f"image {name!r}: has no pixels (width and height {image.size})")
    with _decoding(name):
        image.load()
    steps = list(before)
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    upright = image
    if orientation in range(2, 9):
        upright = ImageOps.exif_transpose(image)
        steps.append({"step": "exif_rotation", "orientation": int(orientation)})
    rgb = _to_rgb(upright, name, steps, deep=encoded is not None and _is_deep_png(encoded))
    sha256 = pixels_sha256(rgb) if encoded is None else hashlib.sha256(encoded).hexdigest()
    return SourceImage(rgb, encoded, sha256, name, tuple(steps))


def _is_deep_png(data: bytes) -> bool:
    """Whether the file is a PNG with 16 bits per channel, of which Pillow reads the upper 8 where there is colour."""
    return data.startswith(_PNG_SIGNATURE) and data[_PNG_DEPTH] == 16


def _to_rgb(image: Image.Image, name: str, steps: list[Step], *, deep: bool) -> Image.Image:
    mode = image.mode
    if mode.startswith("I;16"):
        # Pillow clips 16-bit values at 255 when it converts, which turns nearly every pixel white.
        array = (np.asarray(image, np.uint16).astype(np.float64) / 257).round().astype(np.uint8)
        steps.append({"step": "convert", "from": mode, "to": "RGB", "divided_by": 257})
        return Image.fromarray(array).convert("RGB")
    if mode not in _PLAIN_MODES:
        raise InputError(
            f"image {name!r}: Pillow mode {mode!r} has no fixed white point; convert it to 8-bit RGB first"
        )
    if mode == "RGB" and not deep:
        return image.copy()
    transparent = mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    found = f"{mode};16" if deep else mode
    steps.append({"step": "convert", "from": found, "to": "RGB"} | ({"alpha": "dropped"} if transparent else {}))
    return (image.convert("RGBA") if mode in ("P", "PA") and transparent else image).convert("RGB")


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8:
        raise InputError(
            f"an array of type {array.dtype} and shape {array.shape}: give uint8 [H, W, 3] in 0..255, or a float torch "
            "tensor [3, H, W] that is already preprocessed"
        )
    plain = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    if plain.ndim == 2 or (plain.ndim == 3 and plain.shape[-1] in (3, 4)):
        return Image.fromarray(np.ascontiguousarray(plain))
    raise InputError(f"a uint8 array of shape {array.shape}: give [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
