"""The saved file: a PNG that any viewer shows, with map, recipe, provenance and image in one private chunk.

The chunk `vlCm` holds safetensors: the arrays, and under the metadata key `vlcam` the record as JSON. A digest over
both tells when either was edited. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from vlcam.errors import FileError

__all__ = ["SCHEMA", "Attachments", "Payload", "make_folder", "read", "write"]

SCHEMA = 1
_CHUNK = b"vlCm"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Attachments:
    """The inputs that may travel with a map: the image file's bytes, or pixels and ids that came preprocessed."""

    image: bytes | None = None
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
        FileError: the ending is not `.png`, the folder does not exist, or the file does.
    """
    if path.suffix.lower() != ".png":
        raise FileError(f"{str(path)!r}: an explanation is saved as a PNG; give a name that ends in .png")
    if not path.parent.is_dir():
        raise FileError(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if path.exists() and not overwrite:
        raise FileError(f"{str(path)!r} exists already; choose another name or pass overwrite=True")
    handle, temporary = tempfile.mkstemp(suffix=".png", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            picture.save(file, "PNG")
            file.seek(0)
            data = file.read()
            file.seek(0)
            file.truncate()
            file.write(_insert(data, _encode(payload)))
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    return path


def read(path: Path) -> Payload:
    """Read what `write` wrote.

    Raises:
        FileError: no such file, not a PNG, a PNG without an explanation, a damaged or an edited one, or one of a
            later schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{str(path)!r}: cannot be read ({error.strerror})") from None
    if not data.startswith(_SIGNATURE):
        raise FileError(f"{str(path)!r}: not a PNG file")
    for kind, body in _chunks(data, path):
        if kind == _CHUNK:
            return _decode(body, path)
    raise FileError(
        f"{str(path)!r}: a PNG without an explanation; programs that re-save a picture drop what it carried"
    )


def _encode(payload: Payload) -> bytes:
    arrays: dict[str, NDArray[Any]] = {"tokens": payload.tokens, "words": payload.words}
    if payload.attachments.image is not None:
        arrays["image"] = np.frombuffer(payload.attachments.image, np.uint8)
    if payload.attachments.pixel_values is not None:
        arrays["pixel_values"] = payload.attachments.pixel_values
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    text = json.dumps({"schema": SCHEMA, "record": payload.record}, ensure_ascii=False, allow_nan=False)
    return save_tensors(arrays, {"vlcam": text, "digest": _digest(text, arrays)})


def _decode(body: bytes, path: Path) -> Payload:
    try:
        arrays = load_tensors(body)
        length = struct.unpack("<Q", body[:8])[0]
        metadata = json.loads(body[8 : 8 + length])["__metadata__"]
        content = json.loads(metadata["vlcam"])
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise FileError(f"{str(path)!r}: the explanation inside is damaged ({error})") from None
    if not isinstance(content, dict):
        raise FileError(f"{str(path)!r}: the explanation inside is damaged (its record is no table)")
    if content.get("schema") != SCHEMA:
        raise FileError(f"{str(path)!r}: schema {content.get('schema')!r}; this release of vlcam reads {SCHEMA}")
    if metadata.get("digest") != _digest(metadata["vlcam"], arrays):
        raise FileError(f"{str(path)!r}: map, recipe or record were changed after they were saved (digest differs)")
    image = arrays.get("image")
    attachments = Attachments(None if image is None else image.tobytes(), arrays.get("pixel_values"))
    return Payload(content["record"], arrays["tokens"], arrays["words"], attachments)


def _digest(text: str, arrays: dict[str, NDArray[Any]]) -> str:
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
    place, kind = len(_SIGNATURE), b""
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (crc,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length].rjust(4, b"\0"))
        if len(body) != length or crc != zlib.crc32(kind + body):
            raise FileError(f"{str(path)!r}: the PNG is truncated or damaged")
        yield kind, body
        place += 12 + length
    if kind != b"IEND":
        raise FileError(f"{str(path)!r}: the PNG is truncated or damaged")
