"""The saved file: a PNG that any viewer shows, with map, recipe, provenance and image in one private chunk.

The chunk `vlCM` holds safetensors: the arrays, and under the metadata key `vlcam` the record as JSON. A digest over
both, and the hash of the picture, tell when any of them was edited. Nothing is pickled. The same explanation always
makes the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from vlcam.errors import FileError, InputError
from vlcam.images import open_image, pixels_sha256

__all__ = ["SCHEMA", "Attachments", "Payload", "make_folder", "read", "write"]

SCHEMA = 1
_CHUNK = b"vlCM"  # ancillary, private, and not to be copied by a program that edits the picture
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Attachments:
    """The inputs that may travel with a map.

    Attributes:
        image: the image file's bytes; where there was no file the picture, which becomes a PNG when it is saved.
        pixel_values: pixels [3, H, W] that came preprocessed.
    """

    image: bytes | Image.Image | None = None
    pixel_values: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Payload:
    """What a file carries: the record (JSON values), the maps [h, w] and [words, h, w], the attachments."""

    record: dict[str, Any]
    tokens: NDArray[np.float32]
    words: NDArray[np.float32]
    attachments: Attachments


def make_folder(path: Path) -> Path:
    """Make a folder and those above it, where they do not exist.

    Raises:
        FileError: there is a file of that name, or no permission.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{str(path)!r}: cannot be made a folder ({error.strerror})") from None
    return path


def write(path: Path, picture: Image.Image, payload: Payload, *, overwrite: bool) -> Path:
    """Write picture and payload; the file appears whole or not at all.

    Raises:
        FileError: the ending is not `.png`, the folder does not exist, the file does, or the system refuses.
    """
    if path.suffix.lower() != ".png":
        raise FileError(f"{str(path)!r}: an explanation is saved as a PNG; give a name that ends in .png")
    data = _insert(_png(picture), _encode(payload, pixels_sha256(picture.convert("RGB"))))
    try:
        _place(data, path, overwrite=overwrite)
    except FileExistsError:
        raise FileError(f"{str(path)!r} exists already; choose another name or pass overwrite=True") from None
    except FileError:
        raise
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        raise FileError(f"{str(path)!r}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    return path


def read(path: Path) -> Payload:
    """Read what `write` wrote.

    Raises:
        FileError: no such file, not a PNG, a PNG without an explanation, a damaged one, one whose explanation or
            picture was edited, or one of a later schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{str(path)!r}: cannot be read ({error.strerror})") from None
    if not data.startswith(_SIGNATURE):
        raise FileError(f"{str(path)!r}: not a PNG file")
    body = dict(_chunks(data, path)).get(_CHUNK)
    if body is None:
        raise FileError(
            f"{str(path)!r}: a PNG without an explanation; programs that re-save a picture drop what it carried"
        )
    payload, picture = _decode(body, path)
    _check_picture(data, picture, path)
    return payload


def _place(data: bytes, path: Path, *, overwrite: bool) -> None:
    """Write beside the target, then give it the target's name, which a file of that name cannot lose unasked."""
    if not path.parent.is_dir():
        raise FileError(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if not overwrite and path.exists():
        raise FileExistsError
    temporary = path.with_name(f".{uuid4().hex}.png")
    try:
        with temporary.open("xb") as file:  # a file that is opened anew has the permissions of the umask
            file.write(data)
        if overwrite:
            temporary.replace(path)
        else:
            _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Unlike a renaming, a link fails where another process has made the file meanwhile."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        temporary.replace(path)


def _check_picture(data: bytes, wanted: str, path: Path) -> None:
    try:
        found = pixels_sha256(open_image(data).rgb)
    except InputError as error:
        raise FileError(f"{str(path)!r}: the picture that the PNG shows is damaged ({error})") from None
    if found != wanted:
        raise FileError(f"{str(path)!r}: the picture that the PNG shows was changed after it was saved")


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _encode(payload: Payload, picture: str) -> bytes:
    arrays: dict[str, NDArray[Any]] = {"tokens": payload.tokens, "words": payload.words}
    image = payload.attachments.image
    if image is not None:
        arrays["image"] = np.frombuffer(image if isinstance(image, bytes) else _png(image), np.uint8)
    if payload.attachments.pixel_values is not None:
        arrays["pixel_values"] = payload.attachments.pixel_values
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    content = {"digest": "", "schema": SCHEMA, "picture": picture, "record": payload.record}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    # One key only: safetensors writes several in random order.
    return save_tensors(arrays, {"vlcam": text.replace('""', f'"{_digest(text, arrays)}"', 1)})


def _decode(body: bytes, path: Path) -> tuple[Payload, str]:
    """The payload, and the hash of the picture that belongs to it."""
    try:
        arrays = load_tensors(body)
        length = struct.unpack("<Q", body[:8])[0]
        text = json.loads(body[8 : 8 + length])["__metadata__"]["vlcam"]
        content = json.loads(text)
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise FileError(f"{str(path)!r}: the explanation inside is damaged ({error})") from None
    if not isinstance(content, dict):
        raise FileError(f"{str(path)!r}: the explanation inside is damaged (its record is no table)")
    if content.get("schema") != SCHEMA:
        raise FileError(f"{str(path)!r}: schema {content.get('schema')!r}; this release of vlcam reads {SCHEMA}")
    digest = str(content.get("digest"))
    if digest != _digest(text.replace(digest, "", 1), arrays):
        raise FileError(f"{str(path)!r}: map, recipe or record were changed after they were saved (digest differs)")
    image = arrays.get("image")
    attachments = Attachments(None if image is None else image.tobytes(), arrays.get("pixel_values"))
    return Payload(content["record"], arrays["tokens"], arrays["words"], attachments), content["picture"]


def _digest(text: str, arrays: dict[str, NDArray[Any]]) -> str:
    """Over the JSON text, in which the digest itself is still empty, and over the arrays."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _insert(png: bytes, body: bytes) -> bytes:
    """Put the chunk behind the header chunk, whose end is at a fixed place in every PNG."""
    header = len(_SIGNATURE) + 25
    chunk = struct.pack(">I", len(body)) + _CHUNK + body + struct.pack(">I", zlib.crc32(_CHUNK + body))
    return png[:header] + chunk + png[header:]


def _chunks(data: bytes, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Every chunk's type and content, to the last."""
    place, kind = len(_SIGNATURE), b""
    while kind != b"IEND":
        (length,) = struct.unpack(">I", data[place : place + 4].rjust(4, b"\0"))
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        crc = data[place + 8 + length : place + 12 + length]
        if len(body) != length or crc != struct.pack(">I", zlib.crc32(kind + body)):
            raise FileError(f"{str(path)!r}: the PNG is truncated or damaged")
        yield kind, body
        place += 12 + length
