"""The saved file: written whole, read bit for bit, and refused when damaged or edited."""

import io
import json
import os
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load, save

from vlcam.archive import SCHEMA, Attachments, Payload, read, write
from vlcam.errors import FileError

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8))
RECORD = {"recipe": {"name": "caf\u00e9 \U0001f50d"}, "scores": {"itm": 0.1 + 0.2}, "none": None, "spans": [[0, 3]]}


def payload(**changes):
    generator = np.random.default_rng(1)
    tokens = generator.standard_normal((2, 3)).astype(np.float32)
    tokens[0] = -0.0, 1e-42, np.float32(1) / 3
    values = {
        "record": RECORD,
        "tokens": tokens,
        "words": generator.standard_normal((4, 2, 3)).astype(np.float32),
        "attachments": Attachments(bytes(range(256)), generator.standard_normal((3, 5, 4)).astype(np.float32)),
    }
    return Payload(**(values | changes))


def split(data):
    """A PNG's chunks as (kind, body)."""
    place, found = 8, []
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        found.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += length + 12
    return found


def joined(chunks):
    parts = [struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def edit(path, change):
    """Pass the private chunk's body through `change`; every checksum of the PNG is right again."""
    path.write_bytes(joined([(k, change(b) if k == b"vlCM" else b) for k, b in split(path.read_bytes())]))


def edit_record(path, change):
    """Pass the record's text through `change` and make the safetensors again; the digest is left."""

    def remake(body):
        (length,) = struct.unpack("<Q", body[:8])
        metadata = json.loads(body[8 : 8 + length])["__metadata__"]
        return save(load(body), {"vlcam": change(metadata["vlcam"])})

    edit(path, remake)


@pytest.fixture
def saved(tmp_path):
    return write(tmp_path / "map.png", PICTURE, payload(), overwrite=False)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_what_is_written_is_read_bit_for_bit(saved):
    wanted, found = payload(), read(saved)
    assert found.record == RECORD
    assert same_bits(found.tokens, wanted.tokens)
    assert same_bits(found.words, wanted.words)
    assert found.attachments.image == wanted.attachments.image
    assert same_bits(found.attachments.pixel_values, wanted.attachments.pixel_values)


def test_without_words_and_attachments_there_are_none(tmp_path):
    bare = payload(words=np.zeros((0, 2, 3), np.float32), attachments=Attachments())
    found = read(write(tmp_path / "map.png", PICTURE, bare, overwrite=False))
    assert found.words.shape == (0, 2, 3)
    assert found.attachments.image is None
    assert found.attachments.pixel_values is None


def test_views_are_written_as_the_values_they_show(tmp_path):
    turned = payload(tokens=payload().tokens.T, words=payload().words[::-1])
    found = read(write(tmp_path / "map.png", PICTURE, turned, overwrite=False))
    assert np.array_equal(found.tokens, payload().tokens.T)
    assert np.array_equal(found.words, payload().words[::-1])


def test_what_is_read_can_become_a_tensor(saved):
    tensor = torch.from_numpy(read(saved).tokens)
    tensor += 1
    assert not torch.equal(tensor, torch.from_numpy(read(saved).tokens))


def test_the_file_is_a_png_of_the_picture(saved):
    with Image.open(saved) as opened:
        assert opened.format == "PNG"
        assert np.array_equal(np.asarray(opened), np.asarray(PICTURE))


def test_every_chunk_has_its_checksum_and_ours_follows_the_header(saved):
    with Image.open(saved) as opened:
        opened.verify()
    kinds = [kind for kind, _ in split(saved.read_bytes())]
    assert kinds[:2] == [b"IHDR", b"vlCM"]
    assert kinds[-1] == b"IEND"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_the_permissions_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = write(tmp_path / "map.png", PICTURE, payload(), overwrite=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_the_same_explanation_makes_the_same_bytes(tmp_path):
    for number in range(12):
        write(tmp_path / f"{number}.png", PICTURE, payload(), overwrite=False)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_picture_without_a_file_is_carried_as_a_png(tmp_path):
    bare = payload(attachments=Attachments(PICTURE))
    found = read(write(tmp_path / "map.png", PICTURE, bare, overwrite=False)).attachments.image
    with Image.open(io.BytesIO(found)) as opened:
        assert opened.format == "PNG"
        assert np.array_equal(np.asarray(opened), np.asarray(PICTURE))


def test_the_ending_may_be_in_capitals(tmp_path):
    assert read(write(tmp_path / "MAP.PNG", PICTURE, payload(), overwrite=False)).record == RECORD


@pytest.mark.parametrize("name", ["map.jpg", "map", "map.png.txt"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(FileError, match=rf"{name}': an explanation is saved as a PNG; give a name that ends in \.png"):
        write(tmp_path / name, PICTURE, payload(), overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused_and_not_made(tmp_path):
    with pytest.raises(FileError, match=r"the folder '.*gone' does not exist"):
        write(tmp_path / "gone" / "map.png", PICTURE, payload(), overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_when_told(saved, tmp_path):
    before = saved.read_bytes()
    other = payload(record={"second": True})
    with pytest.raises(FileError, match=r"map\.png' exists already; choose another name or pass overwrite=True"):
        write(saved, PICTURE, other, overwrite=False)
    assert saved.read_bytes() == before
    assert read(write(saved, PICTURE, other, overwrite=True)).record == {"second": True}
    assert list(tmp_path.iterdir()) == [saved]


def test_a_file_that_another_made_meanwhile_is_not_replaced(saved, tmp_path, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(FileError, match="exists already"):
        write(saved, PICTURE, payload(record={}), overwrite=False)
    assert saved.read_bytes() == before
    assert list(tmp_path.iterdir()) == [saved]


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert read(write(tmp_path / "map.png", PICTURE, payload(), overwrite=False)).record == RECORD
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["/proc/x.png", "a" * 300 + ".png", "folder.png", "null\0.png"])
def test_what_the_system_refuses_is_an_error_of_ours(tmp_path, name, overwrite):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(FileError, match=r"\.png': cannot be written|does not exist|folder\.png' exists already"):
        write(tmp_path / name, PICTURE, payload(), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("picture", "record", "error"),
    [
        (PICTURE, {"score": float("nan")}, ValueError),
        (PICTURE, {"score": object()}, TypeError),
        (Image.new("F", (2, 2)), {}, OSError),
    ],
    ids=["nan", "object", "picture"],
)
def test_a_failure_leaves_nothing_behind(tmp_path, picture, record, error):
    with pytest.raises(error, match=r"JSON|write mode F"):
        write(tmp_path / "map.png", picture, payload(record=record), overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_old_file(saved, tmp_path):
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write(saved, PICTURE, payload(record={"score": float("inf")}), overwrite=True)
    assert saved.read_bytes() == before
    assert list(tmp_path.iterdir()) == [saved]


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path):
    with pytest.raises(FileError, match=r"gone\.png': cannot be read \(No such file or directory\)"):
        read(tmp_path / "gone.png")
    with pytest.raises(FileError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff\xe0 a JPEG", b"GIF89a"], ids=["empty", "jpeg", "gif"])
def test_another_kind_of_file_is_no_png(tmp_path, data):
    path = tmp_path / "map.png"
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"map\.png': not a PNG file"):
        read(path)


def test_a_plain_png_has_no_explanation(saved):
    with Image.open(saved) as opened:
        opened.load()
    opened.save(saved)
    with pytest.raises(FileError, match="a PNG without an explanation; programs that re-save a picture drop"):
        read(saved)


@pytest.mark.parametrize("end", [9, 20, 32, 33, 36, 45, 200, 1000, -1, -4, -12, -30], ids=str)
def test_a_file_that_ends_too_early_is_refused(saved, end):
    saved.write_bytes(saved.read_bytes()[:end])
    with pytest.raises(FileError, match="the PNG is truncated or damaged"):
        read(saved)


def test_a_file_without_the_picture_behind_the_chunk_is_refused(saved):
    saved.write_bytes(joined(split(saved.read_bytes())[:2]))
    with pytest.raises(FileError, match="the PNG is truncated or damaged"):
        read(saved)


def pixels_of(image):
    """The chunks that hold an image's pixels."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return split(buffer.getvalue())[1:]


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        (pixels_of(Image.new("RGB", PICTURE.size)), "was changed"),
        (pixels_of(PICTURE.transpose(Image.Transpose.FLIP_LEFT_RIGHT)), "was changed"),
        (
            [(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x03\0\0\0\0\0\0"), *pixels_of(PICTURE)],
            "was changed",
        ),
        ([(b"IDAT", b"no pixels"), (b"IEND", b"")], "is damaged"),
    ],
    ids=["black", "mirrored", "turned", "broken"],
)
def test_another_picture_around_the_chunk_is_refused(saved, chunks, told):
    saved.write_bytes(joined([*split(saved.read_bytes())[:2], *chunks]))
    with pytest.raises(FileError, match=f"the picture that the PNG shows {told}"):
        read(saved)


def test_the_same_picture_packed_otherwise_is_no_edit(saved):
    buffer = io.BytesIO()
    PICTURE.save(buffer, "PNG", compress_level=0)
    saved.write_bytes(joined([*split(saved.read_bytes())[:2], *split(buffer.getvalue())[1:]]))
    assert read(saved).record == RECORD


def test_a_program_that_edits_the_picture_may_not_copy_the_chunk(saved):
    kind = split(saved.read_bytes())[1][0]
    assert [bool(letter & 32) for letter in kind] == [True, True, False, False]  # ancillary, private, -, unsafe to copy


def test_a_flipped_byte_in_the_chunk_is_damage(saved):
    data = bytearray(saved.read_bytes())
    data[data.index(b"vlCM") + 500] ^= 1
    saved.write_bytes(data)
    with pytest.raises(FileError, match="the PNG is truncated or damaged"):
        read(saved)


def test_a_flipped_byte_with_a_right_checksum_is_an_edit(saved):
    edit(saved, lambda body: body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(FileError, match=r"were changed after they were saved \(digest differs\)"):
        read(saved)


def test_no_flipped_byte_passes_or_escapes_as_another_error(saved):
    whole = saved.read_bytes()
    length = len(dict(split(whole))[b"vlCM"])
    for place in range(0, length, 3):
        saved.write_bytes(whole)
        edit(saved, lambda body, at=place: body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
        with pytest.raises(
            FileError, match=r"map\.png': (schema|map, recipe or record|the explanation inside is damaged)"
        ):
            read(saved)


@pytest.mark.parametrize("old", ["caf\u00e9", "0.30000000000000004", "spans"])
def test_an_edited_record_is_refused(saved, old):
    edit_record(saved, lambda text: text.replace(old, old[::-1].strip("0.") or "1"))
    with pytest.raises(FileError, match="digest differs"):
        read(saved)


def test_remaking_the_chunk_without_an_edit_is_no_edit(saved):
    edit_record(saved, lambda text: text)
    assert read(saved).record == RECORD


@pytest.mark.parametrize("name", ["tokens", "words", "image", "pixel_values"])
def test_an_edited_array_is_refused(saved, name):
    def change(body):
        (length,) = struct.unpack("<Q", body[:8])
        arrays = load(body)
        arrays[name] = np.roll(arrays[name], 1)
        return save(arrays, json.loads(body[8 : 8 + length])["__metadata__"])

    edit(saved, change)
    with pytest.raises(FileError, match="digest differs"):
        read(saved)


@pytest.mark.parametrize("schema", [3, 0, None, "1", True])
def test_another_schema_is_refused_with_both_numbers(saved, schema):
    edit_record(saved, lambda text: json.dumps(json.loads(text) | {"schema": schema}))
    with pytest.raises(FileError, match=f"schema {schema!r}; this release of vlcam reads {SCHEMA}"):
        read(saved)


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "{"])
def test_a_record_that_is_no_table_is_damage(saved, text):
    edit_record(saved, lambda _: text)
    with pytest.raises(FileError, match="the explanation inside is damaged"):
        read(saved)


@pytest.mark.parametrize("body", [b"", b"{}", bytes(40)], ids=["empty", "short", "zeros"])
def test_a_chunk_of_something_else_is_damage(saved, body):
    edit(saved, lambda _: body)
    with pytest.raises(FileError, match="the explanation inside is damaged"):
        read(saved)
