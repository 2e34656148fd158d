"""A saved file that was edited is refused, whatever byte of it was changed and however carefully."""

from __future__ import annotations

import copy
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save

import vlcam
from vlcam import archive

SCENE = next(vlcam.scenes.generate(1, seed=7))
START = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a saved explanation of one phrase, with its words and its image."""
    image = SCENE.image.resize((32, 32))
    made = vlcam.load("tiny-blip-itm").explain(image, SCENE.caption, phrase=SCENE.objects[0].phrase)
    return made.save(tmp_path_factory.mktemp("whole") / "whole.png").read_bytes()


@pytest.fixture
def opened(tmp_path):
    """Open bytes as an explanation."""

    def call(data):
        path = tmp_path / "map.png"
        path.write_bytes(data)
        return vlcam.open(path)

    return call


def split(data):
    place, found = 8, []
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        found.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += length + 12
    return found


def joined(chunks):
    parts = [struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks]
    return START + b"".join(parts)


def chunk_of(data):
    return dict(split(data))[b"vlCM"]


def with_chunk(data, body):
    """The same file with another private chunk, all checksums right."""
    return joined([(kind, body if kind == b"vlCM" else old) for kind, old in split(data)])


def flipped(body, place, bits):
    return body[:place] + bytes([body[place] ^ bits]) + body[place + 1 :]


def header(body):
    (length,) = struct.unpack("<Q", body[:8])
    return 8 + length


def parts(body):
    """Arrays and content of a private chunk."""
    return load(body), json.loads(json.loads(body[8 : header(body)])["__metadata__"]["vlcam"])


def forged(data, change):
    """The file as someone makes it who knows the format: edited, and its digest computed anew."""
    arrays, content = parts(chunk_of(data))
    change(arrays, content)
    text = json.dumps(content | {"digest": archive._BLANK}, ensure_ascii=False)
    body = save(arrays, {"vlcam": text})
    return with_chunk(data, body.replace(archive._BLANK.encode(), archive._digest(body).encode(), 1))


# Every byte of the private chunk


@pytest.mark.parametrize("bits", [1, 0x20, 0xFF], ids=hex)
def test_a_change_of_any_byte_of_the_header_is_refused(whole, bits):
    """The header holds the record: recipe, provenance, scores, placement, words, and where the arrays lie."""
    body = chunk_of(whole)
    assert all(refused(body, place, bits) for place in range(header(body)))


def test_a_change_of_any_byte_of_the_maps_and_of_the_image_is_refused(whole):
    body = chunk_of(whole)
    layout = json.loads(body[8 : header(body)])
    assert set(layout) == {"__metadata__", "tokens", "words", "image"}
    for name in ("tokens", "words"):
        begin, end = (header(body) + offset for offset in layout[name]["data_offsets"])
        assert all(refused(body, place, 1 << place % 8) for place in range(begin, end))
    begin, end = (header(body) + offset for offset in layout["image"]["data_offsets"])
    assert all(refused(body, place, 0x10) for place in range(begin, end, 7))


def refused(body, place, bits):
    try:
        archive._decode(flipped(body, place, bits), "map.png")
    except vlcam.FileError:
        return True
    return False


def test_the_file_itself_opens_and_the_test_of_single_bytes_is_one_of_the_file(whole, opened):
    assert opened(whole).status == "ok"
    body = chunk_of(whole)
    assert not refused(body, 100, 0)
    for place in range(9, len(body), 997):
        with pytest.raises(vlcam.FileError):
            opened(with_chunk(whole, flipped(body, place, 1)))


def test_a_change_of_any_other_byte_is_refused_or_changes_nothing(whole, opened):
    """Bytes of the picture, of lengths and of checksums: without the checksum made right again, all are refused."""
    inside = whole.index(b"vlCM")
    behind = inside + len(chunk_of(whole))
    for place in [*range(8, inside + 4), *range(behind, len(whole), 41)]:
        with pytest.raises(vlcam.FileError):
            opened(flipped(whole, place, 1))


@pytest.mark.parametrize("cut", [1, 2, 4, 12, 13, 100, 1000])
def test_a_truncated_file_is_refused(whole, opened, cut):
    with pytest.raises(vlcam.FileError, match="truncated or damaged"):
        opened(whole[:-cut])


# What is done to chunks as a whole


def test_bytes_behind_the_end_are_refused(whole, opened):
    for more in (b"\0", b"hello", whole):
        with pytest.raises(vlcam.FileError, match=f"{len(more)} bytes stand behind the end of the PNG"):
            opened(whole + more)


@pytest.mark.parametrize("place", [1, 2, -1])
def test_a_second_explanation_is_refused_also_an_equal_one(whole, opened, place):
    chunks = split(whole)
    other = forged(whole, lambda arrays, _: arrays.update(tokens=arrays["tokens"] + 1))
    for body in (chunk_of(whole), chunk_of(other), b""):
        edited = list(chunks)
        edited.insert(place, (b"vlCM", body))
        with pytest.raises(vlcam.FileError, match="2 explanations in one PNG"):
            opened(joined(edited))


def png(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def carried_by(data, picture):
    """A PNG of another picture with the private chunk of a file."""
    chunks = split(picture)
    return joined([chunks[0], (b"vlCM", chunk_of(data)), *chunks[1:]])


def test_the_chunk_in_another_picture_is_refused(whole, opened):
    with Image.open(io.BytesIO(whole)) as shown:
        own = shown.convert("RGB")
    for other in (SCENE.image, own.rotate(180), Image.new("RGB", own.size), own.resize((16, 16))):
        with pytest.raises(vlcam.FileError, match="the picture that the PNG shows was changed"):
            opened(carried_by(whole, png(other)))
    one_pixel = own.copy()
    one_pixel.putpixel((3, 3), tuple(255 - value for value in own.getpixel((3, 3))))
    with pytest.raises(vlcam.FileError, match="the picture that the PNG shows was changed"):
        opened(carried_by(whole, png(one_pixel)))
    moving = png(own, save_all=True, append_images=[Image.new("RGB", own.size)])
    with pytest.raises(vlcam.FileError, match=r"the picture that the PNG shows is damaged .*2 frames"):
        opened(carried_by(whole, moving))
    assert opened(carried_by(whole, png(own))).status == "ok"


def test_the_chunk_of_another_file_is_refused(whole, opened, tmp_path):
    other = vlcam.load("tiny-vit").explain(SCENE.image, target=3).save(tmp_path / "other.png").read_bytes()
    for data, body in ((whole, chunk_of(other)), (other, chunk_of(whole))):
        with pytest.raises(vlcam.FileError, match="the picture that the PNG shows was changed"):
            opened(with_chunk(data, body))


def padded(body, blank):
    """More blanks behind the JSON of the header, which mean nothing to a reader of safetensors."""
    (length,) = struct.unpack("<Q", body[:8])
    return struct.pack("<Q", length + 8) + body[8 : 8 + length] + blank * 8 + body[8 + length :]


@pytest.mark.parametrize("blank", [b" ", b"\n", b"\t"], ids=repr)
def test_a_padded_header_is_refused_although_it_reads_the_same(whole, opened, blank):
    body = padded(chunk_of(whole), blank)
    assert parts(body)[1] == parts(chunk_of(whole))[1]
    with pytest.raises(vlcam.FileError, match="digest differs"):
        opened(with_chunk(whole, body))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"record\\"', b'\\"r\\\\u0065cord\\"'),
        (b'\\"schema\\": ', b'\\"schema\\":  '),
        (b'"__metadata__"', b'"__metad\\u0061ta__"'),
    ],
    ids=["escape", "blank", "header"],
)
def test_the_same_record_in_other_letters_is_refused(whole, opened, old, new):
    body = chunk_of(whole)
    assert old in body
    longer = body.replace(old, new, 1)
    longer = struct.pack("<Q", header(body) - 8 + len(new) - len(old)) + longer[8:]
    with pytest.raises(vlcam.FileError, match=r"digest differs|damaged"):
        opened(with_chunk(whole, longer))


# Edits of the content, the digest left as it was


def edited(data, change):
    arrays, content = parts(chunk_of(data))
    change(arrays, content)
    return with_chunk(data, save(arrays, {"vlcam": json.dumps(content, ensure_ascii=False)}))


def set_score(_, content):
    content["record"]["scores"]["itm_probability"]["value"] = 0.99


def set_site(_, content):
    content["record"]["recipe"]["relu"] = "none"


def set_weights(_, content):
    content["record"]["provenance"]["model"]["weights_sha256"] = "0" * 64


def set_map(arrays, _):
    arrays["tokens"] = arrays["tokens"] * 2


def set_word(arrays, _):
    arrays["words"][1] = 0


def set_image(arrays, _):
    arrays["image"] = np.frombuffer(png(Image.new("RGB", (32, 32))), np.uint8)


def drop_image(arrays, _):
    del arrays["image"]


EDITS = [set_score, set_site, set_weights, set_map, set_word, set_image, drop_image]


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__)
def test_an_edit_by_hand_is_refused(whole, opened, change):
    with pytest.raises(vlcam.FileError, match=r"were changed after they were saved \(digest differs\)"):
        opened(edited(whole, change))


# Edits of someone who computes the digest anew: what contradicts itself is refused, the rest does not come out again


def test_a_forged_map_or_score_opens_and_does_not_verify(whole, opened):
    model = vlcam.load("tiny-blip-itm")
    assert opened(forged(whole, lambda *_: None)).verify(model).identical
    outcome = opened(forged(whole, set_map)).verify(model)
    assert not outcome.reproduced
    assert outcome.differing == ("numbers",)
    outcome = opened(forged(whole, set_score)).verify(model)
    assert outcome.numbers[0].startswith("score itm_probability: was 0.99")
    outcome = opened(forged(whole, set_weights)).verify(model)
    assert outcome.differing == ("weights",)


def rename(_, content):
    content["record"]["recipe"]["name"] = "another name"


def test_a_name_is_no_part_of_the_fingerprint(whole, opened):
    assert opened(forged(whole, rename)).recipe.name == "another name"


def set_fingerprint(_, content):
    content["record"]["recipe"]["fingerprint"] = "r1-0123456789ab"


@pytest.mark.parametrize("change", [set_site, set_fingerprint], ids=lambda change: change.__name__)
def test_a_fingerprint_that_does_not_fit_the_fields_is_refused(whole, opened, change):
    with pytest.raises(vlcam.FileError, match=r"the recipe's fields have the fingerprint r1-.*one of them was edited"):
        opened(forged(whole, change))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["tokens", "words"])
def test_a_map_that_is_not_finite_is_refused(whole, opened, name, value):
    def change(arrays, _):
        arrays[name].reshape(-1)[3] = value

    with pytest.raises(vlcam.FileError, match="a map with values that are not finite"):
        opened(forged(whole, change))


def test_a_score_that_is_not_finite_is_refused(whole, opened):
    def change(_, content):
        content["record"]["scores"]["itm_probability"]["value"] = float("nan")

    with pytest.raises(vlcam.FileError, match="NaN is no number"):
        opened(forged(whole, change))


def test_a_key_that_stands_twice_is_refused(whole, opened):
    """Readers of JSON take the first or the last of the two."""
    arrays, content = parts(chunk_of(whole))
    text = json.dumps(content | {"digest": archive._BLANK}, ensure_ascii=False)
    twice = text.replace('"status": "ok"', '"status": "constant", "status": "ok"', 1)
    assert json.loads(twice) == json.loads(text)
    body = save(arrays, {"vlcam": twice})
    body = body.replace(archive._BLANK.encode(), archive._digest(body).encode(), 1)
    with pytest.raises(vlcam.FileError, match="key 'status' twice"):
        opened(with_chunk(whole, body))


def lose_words(arrays, _):
    arrays["words"] = arrays["words"][1:]


def lose_placement(_, content):
    del content["record"]["placement"]


def lose_run(_, content):
    del content["record"]["provenance"]["run"]


def lose_field(_, content):
    del content["record"]["recipe"]["site"]


def add_field(_, content):
    content["record"]["recipe"]["temperature"] = 1


def later_recipe(_, content):
    content["record"]["recipe"]["schema"] = 2


def later_record(_, content):
    content["record"]["provenance"]["schema"] = 2


def later_file(_, content):
    content["schema"] = archive.SCHEMA + 1


def flat(arrays, _):
    arrays["tokens"] = arrays["tokens"].reshape(-1)


def no_map(arrays, _):
    del arrays["tokens"]


def no_record(_, content):
    del content["record"]


def odd_scores(_, content):
    content["record"]["scores"] = [1, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lose_words, r"the record inside is damaged \(the shape of the words' maps is"),
        (lose_placement, r"the record inside is damaged \(it lacks record.placement\)"),
        (lose_run, r"the record inside is damaged \(it lacks record.provenance.run\)"),
        (lose_field, r"its recipe cannot be read \(a recipe states every field: missing 'site'"),
        (add_field, "its recipe cannot be read .*unknown 'temperature'"),
        (later_recipe, "its recipe cannot be read .*recipe schema 2: this release of vlcam reads schema 1"),
        (later_record, "its record is of schema 2, and this release of vlcam reads 1; update vlcam"),
        (later_file, "schema 3; this release of vlcam reads 2 and older; a later release wrote it: update vlcam"),
        (flat, r"tokens of type float32 and shape \(64,\), in place of 2 axes of float32"),
        (no_map, "it lacks tokens"),
        (no_record, "it lacks record"),
        (odd_scores, "the record inside is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_contradicts_itself_or_comes_from_later_is_refused_with_the_reason(whole, opened, change, told):
    with pytest.raises(vlcam.FileError, match=rf"map\.png': .*{told}"):
        opened(forged(whole, change))


# Files of anybody's making, digest and checksums right

SAVED = Path(__file__).parent / "saved"
ODD = [None, -1, 1.5, 1e308, True, "x", "", [], {}, [[]], [None], {"a": 1}, 10**30]


def places(value, path=()):
    """Every place of a record; of a list the first two."""
    yield path
    keys = value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def put(record, path, value):
    """A copy of a record with another value in one place, or without the place, for `...`."""
    made = copy.deepcopy(record)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def read_everything(explanation):
    repr(explanation), explanation.subject, explanation.record(), dict(explanation.scores)
    for word in explanation.words.values():
        assert word.text == explanation.text
    read = explanation.word_scores if explanation.recipe.of_text else explanation.heatmap
    assert isinstance(read, tuple if explanation.recipe.of_text else np.ndarray)


@pytest.mark.parametrize(
    "name", ["2-vit-class", "1-itm-phrase", "3-seg-region", "3-swin-class", "4-clip-words", "5-answer-written"]
)
def test_a_record_with_an_odd_value_anywhere_is_refused_or_can_be_read(name, tmp_path, monkeypatch):
    data = (SAVED / f"{name}.png").read_bytes()
    arrays, content = parts(chunk_of(data))
    monkeypatch.setattr(archive, "read", lambda _: payload)
    opened = refused = 0
    for number, path in enumerate(places(content["record"])):
        for value in [..., *ODD[number % 2 :: 2]] if path else []:
            attachments = archive.Attachments(arrays["image"].tobytes())
            payload = archive.Payload(
                put(content["record"], path, value), arrays["tokens"], arrays["words"], attachments
            )
            try:
                explanation = vlcam.open(tmp_path / "map.png")
            except vlcam.FileError:
                refused += 1
            else:
                opened += 1
                read_everything(explanation)
    assert refused > 3 * opened > 0


def of_type(name, kind):
    def change(arrays, _):
        arrays[name] = arrays[name].astype(kind)

    return change


def other_grid(arrays, _):
    arrays["tokens"] = arrays["tokens"][:3]


def no_picture_inside(arrays, _):
    arrays["image"] = np.arange(10, dtype=np.uint8)


def another_picture_inside(arrays, _):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    arrays["image"] = np.frombuffer(buffer.getvalue(), np.uint8)


def other_pixels_inside(arrays, _):
    arrays["pixel_values"] = np.zeros((3, 4, 4), np.float32)


def beside_the_image(_, content):
    content["record"]["placement"]["box"] = [99.0, 0.0, 120.0, 32.0]


def infinite_score(_, content):
    next(iter(content["record"]["scores"].values()))["value"] = float("inf")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (of_type("tokens", np.float64), "tokens of type float64"),
        (of_type("words", np.int64), "words of type int64"),
        (of_type("image", np.float32), "image of type float32"),
        (other_grid, "the map's shape is"),
        (no_picture_inside, "the image inside is not that of its record"),
        (another_picture_inside, "the image inside is not that of its record .*another image"),
        (other_pixels_inside, "the image inside is not that of its record"),
        (beside_the_image, "shows nothing of an image"),
        (infinite_score, "Infinity is no number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_vlcam_writes_is_refused(whole, opened, change, told):
    with pytest.raises(vlcam.FileError, match=told):
        opened(forged(whole, change))


def test_a_number_beyond_all_numbers_is_refused(whole, opened):
    """`1e999` is a number of JSON, and infinite in Python."""
    arrays, content = parts(chunk_of(whole))
    next(iter(content["record"]["scores"].values()))["value"] = 0.123456789
    text = json.dumps(content | {"digest": archive._BLANK}).replace("0.123456789", "1e999")
    body = save(arrays, {"vlcam": text})
    body = body.replace(archive._BLANK.encode(), archive._digest(body).encode(), 1)
    with pytest.raises(vlcam.FileError, match="value is inf, and not a finite number"):
        opened(with_chunk(whole, body))


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 200_000, b"[" + b"1" * 5000 + b"]"], ids=["[", "{", "1"])
def test_deep_or_long_json_is_no_png(opened, data):
    with pytest.raises(vlcam.FileError, match="not a PNG file"):
        opened(data)
