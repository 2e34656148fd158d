"""The saved file: a PNG that any viewer shows, with map, recipe, provenance and image in one private chunk.

The chunk `vlCM` holds safetensors: the arrays, and under the metadata key `vlcam` the record as JSON. A digest over
every byte of the chunk, and the hash of the picture, tell when any of them was edited. Nothing is pickled. The same
explanation always makes the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
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
from vlcam.filekind import foreign
from vlcam.images import open_image, pixels_sha256

__all__ = ["SCHEMA", "Attachments", "Payload", "make_folder", "read", "write", "write_json", "write_text"]

SCHEMA = 2
"""Version of the file; what 1 wrote is read too. There the digest is over the content, and not over its bytes."""

_CHUNK = b"vlCM"  # ancillary, private, and not to be copied by a program that edits the picture
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ARRAYS = {
    "tokens": (np.float32, 2),
    "words": (np.float32, 3),
    "image": (np.uint8, 1),
    "pixel_values": (np.float32, 3),
}
"""Type and number of axes of each array."""
_BLANK = "0" * 64
"""Stands for the digest while that is computed."""


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
    return _write(path, _insert(_png(picture), _encode(payload, pixels_sha256(picture.convert("RGB")))), overwrite)


def write_text(path: Path, text: str, *, overwrite: bool) -> Path:
    """Write text as UTF-8; the file appears whole or not at all. What UTF-8 does not hold becomes an escape.

    Raises:
        FileError: the folder does not exist, the file does, or the system refuses.
    """
    # A name that was not UTF-8 on disk has such signs; within the strings of JSON their escape means them.
    return _write(path, text.encode("utf-8", "backslashreplace"), overwrite)


def write_json(path: Path, what: str, values: Any, *, overwrite: bool, indent: int | None = 2) -> Path:
    """Write JSON values as text; as `write_text`.

    Raises:
        FileError: besides, the ending is not `.json`; says what is saved so.
    """
    if path.suffix.lower() != ".json":
        raise FileError(f"{str(path)!r}: {what} is saved as JSON; give a name that ends in .json")
    text = json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return write_text(path, text, overwrite=overwrite)


def _write(path: Path, data: bytes, overwrite: bool) -> Path:
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
        FileError: no such file, not a PNG, a PNG without an explanation or with several, a damaged one, one whose
            explanation or picture was edited, or one of a later schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{str(path)!r}: cannot be read ({error.strerror})") from None
    what = foreign(data)
    if not data.startswith(_SIGNATURE):
        raise FileError(f"{str(path)!r}: not a PNG file" + (f", but {what}" if what else ""))
    bodies = [body for kind, body in _chunks(data, path) if kind == _CHUNK]
    if not bodies:
        why = what or "programs that re-save a picture drop what it carried"
        raise FileError(f"{str(path)!r}: a PNG without an explanation; {why}")
    if len(bodies) > 1:
        raise FileError(
            f"{str(path)!r}: {len(bodies)} explanations in one PNG; vlcam writes one, so that the file was edited"
        )
    payload, picture = _decode(bodies[0], path)
    _check_picture(data, picture, path)
    return payload


def _place(data: bytes, path: Path, *, overwrite: bool) -> None:
    """Write beside the target, then give it the target's name, which a file of that name cannot lose unasked."""
    if not path.parent.is_dir():
        raise FileError(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if not overwrite and path.exists():
        raise FileExistsError
    temporary = path.with_name(f".{uuid4().hex}{path.suffix}")
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
    content = {"digest": _BLANK, "schema": SCHEMA, "picture": picture, "record": payload.record}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    text = text.encode("utf-8", "backslashreplace").decode()  # see `write_text`
    # One key only: safetensors writes several in random order.
    body = save_tensors(arrays, {"vlcam": text})
    return body.replace(_BLANK.encode(), _digest(body).encode(), 1)


def _decode(body: bytes, path: Path) -> tuple[Payload, str]:
    """The payload, and the hash of the picture that belongs to it."""
    try:
        arrays = load_tensors(body)
        length = struct.unpack("<Q", body[:8])[0]
        text = _strictly(body[8 : 8 + length])["__metadata__"]["vlcam"]
        content = _strictly(text)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise FileError(f"{str(path)!r}: the explanation inside is damaged ({error})") from None
    if not isinstance(content, dict):
        raise FileError(f"{str(path)!r}: the explanation inside is damaged (its record is no table)")
    schema = content.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        later = "; a later release wrote it: update vlcam" if type(schema) is int and schema > SCHEMA else ""
        raise FileError(f"{str(path)!r}: schema {schema!r}; this release of vlcam reads {SCHEMA} and older{later}")
    digest = str(content.get("digest"))
    if digest != (_digest_of_content(text, digest, arrays) if schema == 1 else _digest(body, digest)):
        raise FileError(f"{str(path)!r}: map, recipe or record were changed after they were saved (digest differs)")
    _check_content(content, arrays, path)
    image = arrays.get("image")
    attachments = Attachments(None if image is None else image.tobytes(), arrays.get("pixel_values"))
    return Payload(content["record"], arrays["tokens"], arrays["words"], attachments), content["picture"]


def _strictly(text: str | bytes) -> Any:
    """Read JSON that says one thing only: no key twice, and no number that JSON does not know."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


def _check_content(content: dict[str, Any], arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """What a digest that was made anew does not tell: that the parts are there and fit each other."""
    lacking = [name for name in ("record", "picture") if name not in content]
    lacking += [name for name in ("tokens", "words") if name not in arrays]
    if lacking:
        raise FileError(f"{str(path)!r}: the explanation inside is damaged (it lacks {', '.join(lacking)})")
    for name, array in arrays.items():
        kind, axes = _ARRAYS.get(name, (array.dtype, array.ndim))
        if array.dtype != kind or array.ndim != axes:
            raise FileError(
                f"{str(path)!r}: the explanation inside is damaged ({name} of type {array.dtype} and shape "
                f"{array.shape}, in place of {axes} axes of {np.dtype(kind)})"
            )
    tokens, words = arrays["tokens"], arrays["words"]
    if not (np.isfinite(tokens).all() and np.isfinite(words).all()):
        raise FileError(f"{str(path)!r}: the explanation inside is damaged (a map with values that are not finite)")


def _digest(body: bytes, digest: str = _BLANK) -> str:
    """Over every byte of the chunk, in which the digest itself is still blank."""
    blank = body.replace(digest.encode(), _BLANK.encode(), 1) if len(digest) == len(_BLANK) else body
    return hashlib.sha256(blank).hexdigest()


def _digest_of_content(text: str, digest: str, arrays: dict[str, NDArray[Any]]) -> str:
    """The digest of schema 1: over the JSON text, in which the digest itself is still empty, and over the arrays."""
    found = hashlib.sha256(text.replace(digest, "", 1).encode())
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _insert(png: bytes, body: bytes) -> bytes:
    """Put the chunk behind the header chunk, whose end is at a fixed place in every PNG."""
    header = len(_SIGNATURE) + 25
    chunk = struct.pack(">I", len(body)) + _CHUNK + body + struct.pack(">I", zlib.crc32(_CHUNK + body))
    return png[:header] + chunk + png[header:]


def _chunks(data: bytes, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Every chunk's type and content, to the last, behind which there is nothing."""
    place, kind = len(_SIGNATURE), b""
    while kind != b"IEND":
        (length,) = struct.unpack(">I", data[place : place + 4].rjust(4, b"\0"))
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        crc = data[place + 8 + length : place + 12 + length]
        if len(body) != length or crc != struct.pack(">I", zlib.crc32(kind + body)):
            raise FileError(f"{str(path)!r}: the PNG is truncated or damaged")
        yield kind, body
        place += 12 + length
    if place < len(data):
        raise FileError(f"{str(path)!r}: {len(data) - place} bytes stand behind the end of the PNG: it was edited")
