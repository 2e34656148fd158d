"""The user's image: what is read, what is refused, and what the record says was done."""

import hashlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from vlcam.errors import InputError
from vlcam.images import open_image, pixels_sha256

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def shown(source):
    return np.asarray(open_image(source).rgb)


def test_a_path_keeps_name_bytes_and_hash(tmp_path):
    data = encoded(PICTURE)
    path = tmp_path / "scene.png"
    path.write_bytes(data)
    for source in (path, str(path)):
        image = open_image(source)
        assert image.name == "scene.png"
        assert image.encoded == data
        assert image.sha256 == hashlib.sha256(data).hexdigest()
        assert image.size == (12, 20)
        assert image.steps == ()
        assert np.array_equal(np.asarray(image.rgb), PIXELS)


@pytest.mark.parametrize(
    ("source", "name"), [(encoded(PICTURE), "bytes"), (PICTURE, "PIL image"), (PIXELS, "array")], ids=["b", "pil", "np"]
)
def test_other_sources_are_named_by_their_kind_or_as_told(source, name):
    assert open_image(source).name == name
    assert open_image(source, name="mine").name == "mine"
    assert np.array_equal(shown(source), PIXELS)


def test_pixels_without_a_file_are_hashed():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(encoded(PICTURE, exif=exif)))
    for source in (turned, PICTURE, PIXELS):
        image = open_image(source)
        assert image.encoded is None
        assert image.sha256 == pixels_sha256(image.rgb)


def test_no_png_is_made_of_pixels_that_are_only_explained(monkeypatch):
    monkeypatch.setattr(Image.Image, "save", None)
    assert open_image(PIXELS).sha256 == open_image(PICTURE).sha256


def test_the_bytes_of_a_file_are_given_back_as_they_were():
    data = encoded(PICTURE, "JPEG")
    assert open_image(data).encoded is data


def test_the_hash_of_pixels_is_over_mode_size_and_every_byte():
    tall = np.random.default_rng(1).integers(0, 256, (600, 3, 3), dtype=np.uint8)
    assert pixels_sha256(Image.fromarray(tall)) == hashlib.sha256(b"RGB 3 600\n" + tall.tobytes()).hexdigest()
    same_bytes = [
        Image.frombytes(mode, size, bytes(12)) for mode, size in (("RGB", (2, 2)), ("RGB", (4, 1)), ("L", (4, 3)))
    ]
    assert len({pixels_sha256(image) for image in same_bytes}) == 3


def test_a_missing_file_a_folder_and_an_empty_file_are_told_apart(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"gone\.png': no such file"):
        open_image(tmp_path / "gone.png")
    with pytest.raises(InputError, match="is a folder; give one image file"):
        open_image(tmp_path)
    with pytest.raises(InputError, match=r"empty\.png': the file is empty \(0 bytes\)"):
        open_image(tmp_path / "empty.png")


@pytest.mark.parametrize("text", ["a red circle and a blue square " * 20, "a red circle\0"], ids=["long", "null"])
def test_a_caption_given_as_image_is_no_file(text):
    with pytest.raises(InputError, match="image 'a red circle"):
        open_image(text)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not an image")
    with pytest.raises(InputError, match=r"notes\.txt': not an image that Pillow can read"):
        open_image(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path, kind, share):
    data = encoded(PICTURE, kind)
    path = tmp_path / "cut.bin"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InputError, match=r"cut\.bin': truncated or damaged"):
        open_image(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_a_file_cut_anywhere_in_its_first_half_is_an_input_error(kind):
    data = encoded(PICTURE, kind)
    for end in range(1, len(data) // 2):
        with pytest.raises(InputError, match="image 'bytes'"):
            open_image(data[:end])


def test_a_damaged_png_is_refused():
    data = bytearray(encoded(PICTURE))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(InputError, match="truncated or damaged"):
        open_image(bytes(data))


def test_a_tiff_with_a_tag_of_another_type_is_refused():
    data = bytearray(encoded(PICTURE, "TIFF"))
    tag = data.index(struct.pack("<HHI", 273, 4, 1))  # where the pixels begin, a whole number
    data[tag + 2] = 11  # a float
    with pytest.raises(InputError, match="image 'bytes': truncated or damaged"):
        open_image(bytes(data))


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_an_avif_whose_picture_is_missing_is_refused():
    data = encoded(PICTURE, "AVIF").replace(b"av01", b"none")
    with pytest.raises(InputError, match="image 'bytes': truncated or damaged"):
        open_image(data)


def test_an_animation_is_refused_with_the_number_of_frames():
    frames = [Image.new("L", (8, 8), value) for value in (0, 100, 200)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match=r"an animation of 3 frames; pick one"):
        open_image(data)


def test_a_still_gif_is_read():
    assert np.array_equal(shown(encoded(Image.new("L", (8, 8), 100), "GIF")), np.full((8, 8, 3), 100))


def test_of_a_photograph_with_a_second_picture_the_first_is_read():
    data = encoded(PICTURE, "MPO", save_all=True, append_images=[PICTURE.rotate(180)])
    image = open_image(data)
    assert np.array_equal(np.asarray(image.rgb), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert image.steps == ({"step": "first_picture", "of": 2, "format": "MPO"},)


def test_a_cmyk_jpeg_becomes_rgb():
    image = open_image(encoded(Image.new("RGB", (16, 16), (200, 40, 40)).convert("CMYK"), "JPEG"))
    assert image.steps == ({"step": "convert", "from": "CMYK", "to": "RGB"},)
    assert np.abs(np.asarray(image.rgb).astype(int) - (200, 40, 40)).max() <= 8


def test_sixteen_bits_are_scaled_and_not_clipped():
    values = np.array([[0, 257, 128 * 257, 1000, 65535]], np.uint16)
    image = open_image(encoded(Image.fromarray(values)))
    assert np.asarray(image.rgb)[0].tolist() == [[v] * 3 for v in (0, 1, 128, 4, 255)]
    assert image.steps == ({"step": "convert", "from": "I;16", "to": "RGB", "divided_by": 257},)


def test_big_endian_sixteen_bits_read_alike():
    values = np.array([[0, 25700, 65535]], ">u2")
    image = Image.frombytes("I;16B", (3, 1), values.tobytes())
    assert shown(image)[0, :, 0].tolist() == [0, 100, 255]


def deep_png(*pixels):
    """A PNG of one row with 16 bits per channel, which Pillow cannot write."""
    kinds = {3: 2, 4: 6}  # channels -> the PNG's colour type
    header = struct.pack(">IIBBBBB", len(pixels), 1, 16, kinds[len(pixels[0])], 0, 0, 0)
    row = b"\0" + np.array(pixels, ">u2").tobytes()
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(row)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("pixels", "mode", "extra"),
    [
        ([(0, 256, 65535), (511, 51456, 1)], "RGB", {}),
        ([(0, 256, 65535, 65535), (511, 51456, 1, 0)], "RGBA", {"alpha": "dropped"}),
    ],
)
def test_sixteen_bits_of_colour_that_become_eight_are_recorded(pixels, mode, extra):
    image = open_image(deep_png(*pixels))
    colours = np.array([pixel[:3] for pixel in pixels])
    assert np.array_equal(np.asarray(image.rgb)[0], colours // 256)
    assert image.steps == ({"step": "convert", "from": f"{mode};16", "to": "RGB"} | extra,)


def palette_picture():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    return image


def test_a_palette_is_looked_up():
    image = open_image(encoded(palette_picture()))
    assert np.asarray(image.rgb).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert image.steps == ({"step": "convert", "from": "P", "to": "RGB"},)


@pytest.mark.parametrize("transparency", [1, b"\xff\x40"], ids=["index", "table"])
def test_a_transparent_palette_keeps_its_colours_and_says_that_alpha_is_gone(transparency):
    image = open_image(encoded(palette_picture(), transparency=transparency))
    assert np.asarray(image.rgb).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert image.steps == ({"step": "convert", "from": "P", "to": "RGB", "alpha": "dropped"},)


@pytest.mark.parametrize(
    ("mode", "value", "rgb", "extra"),
    [
        ("L", 77, (77, 77, 77), {}),
        ("LA", (77, 10), (77, 77, 77), {"alpha": "dropped"}),
        ("RGBA", (1, 2, 3, 0), (1, 2, 3), {"alpha": "dropped"}),
        ("1", 1, (255, 255, 255), {}),
    ],
)
def test_other_modes_become_rgb_and_are_recorded(mode, value, rgb, extra):
    picture = Image.new(mode, (3, 2), value)
    for source in (picture, encoded(picture)):
        image = open_image(source)
        assert image.rgb.mode == "RGB"
        assert np.array_equal(np.asarray(image.rgb), np.broadcast_to(rgb, (2, 3, 3)))
        assert image.steps == ({"step": "convert", "from": mode, "to": "RGB"} | extra,)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_a_mode_without_a_white_point_is_refused(mode):
    with pytest.raises(InputError, match=f"mode '{mode}' has no fixed white point; convert it to 8-bit RGB"):
        open_image(Image.new(mode, (4, 4)))


# Where the top left pixel of the stored image belongs, and whether width and height change places.
@pytest.mark.parametrize(
    ("orientation", "corner", "swaps"),
    [
        (2, (0, -1), False),
        (3, (-1, -1), False),
        (4, (-1, 0), False),
        (5, (0, 0), True),
        (6, (0, -1), True),
        (7, (-1, -1), True),
        (8, (-1, 0), True),
    ],
)
def test_exif_orientation_is_applied_and_recorded(orientation, corner, swaps):
    stored = Image.new("RGB", (5, 3))
    stored.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, exif=exif)
    for source in (data, Image.open(io.BytesIO(data))):
        image = open_image(source)
        pixels = np.asarray(image.rgb)
        assert image.size == ((5, 3) if swaps else (3, 5))
        assert pixels[corner].tolist() == [255, 0, 0]
        assert pixels.sum() == 255
        assert image.steps == ({"step": "exif_rotation", "orientation": orientation},)


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_an_orientation_that_turns_nothing_is_no_step(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = open_image(encoded(PICTURE, exif=exif))
    assert np.array_equal(np.asarray(image.rgb), PIXELS)
    assert image.steps == ()


def test_steps_are_in_the_order_in_which_they_were_taken():
    exif = Image.Exif()
    exif[0x0112] = 3
    image = open_image(encoded(Image.new("L", (4, 4), 9), exif=exif))
    assert [step["step"] for step in image.steps] == ["exif_rotation", "convert"]


@pytest.mark.parametrize(
    ("array", "rgb"),
    [
        (PIXELS[..., 0], np.repeat(PIXELS[..., :1], 3, -1)),
        (PIXELS[..., :1], np.repeat(PIXELS[..., :1], 3, -1)),
        (PIXELS, PIXELS),
        (PIXELS[:, ::-1], PIXELS[:, ::-1]),
        (np.concatenate([PIXELS, PIXELS[..., :1]], -1), PIXELS),
    ],
    ids=["HW", "HW1", "HW3", "strided", "HW4"],
)
def test_arrays_are_read_row_by_row(array, rgb):
    assert np.array_equal(shown(array), rgb)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), r"type float32 and shape \(4, 4, 3\): give uint8 \[H, W, 3\] in 0\.\.255"),
        (np.zeros((4, 4), bool), r"type bool and shape \(4, 4\)"),
        (np.zeros((3, 8, 9), np.uint8), r"uint8 array of shape \(3, 8, 9\): give \[H, W\]"),
        (np.zeros((8, 9, 2), np.uint8), r"shape \(8, 9, 2\)"),
        (np.zeros((1, 8, 9, 3), np.uint8), r"shape \(1, 8, 9, 3\)"),
        (np.zeros(9, np.uint8), r"shape \(9,\)"),
        (np.zeros((0, 4, 3), np.uint8), r"has no pixels"),
    ],
)
def test_an_array_that_does_not_say_what_it_shows_is_refused(array, message):
    with pytest.raises(InputError, match=message):
        open_image(array)


@pytest.mark.parametrize("source", [None, 7, ["scene.png"], bytearray(b"png")], ids=str)
def test_another_type_is_refused_by_name(source):
    with pytest.raises(InputError, match=f"an image of type {type(source).__name__}: give a path"):
        open_image(source)


def test_the_image_given_is_left_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(encoded(PICTURE, exif=exif)))
    palette = Image.open(io.BytesIO(encoded(palette_picture(), transparency=0)))
    for image in (turned, palette, PICTURE.copy()):
        image.load()
        before = (image.mode, image.size, image.tobytes(), dict(image.info))
        open_image(image).rgb.paste((1, 2, 3), (0, 0, 1, 1))
        assert (image.mode, image.size, image.tobytes(), dict(image.info)) == before


def test_later_changes_of_the_source_do_not_reach_the_image_read():
    array, picture = PIXELS.copy(), PICTURE.copy()
    images = open_image(array), open_image(picture)
    array[:] = 0
    picture.paste((0, 0, 0), (0, 0, *picture.size))
    for image in images:
        assert np.array_equal(np.asarray(image.rgb), PIXELS)
