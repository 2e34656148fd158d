"""Files that earlier states of vlcam wrote open, keep their fingerprints, and come out again."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import vlcam
from vlcam import archive

SAVED = Path(__file__).parent / "saved"
FINGERPRINTS = {
    "1-itm-phrase": "r1-09f6c81bfd81",
    "2-itm-attention": "r1-a048b0947811",
    "2-vit-class": "r1-4bab14910920",
    "3-seg-region": "r1-e26d5cd8cbbc",
    "3-swin-class": "r1-811a2fafff18",
    "3-vit-scorecam": "r1-154d6a29f4bf",
    "4-clip-margin": "r1-aeee2be420b2",
    "4-clip-words": "r1-390b066af25b",
    "5-answer-written": "r1-2c8d774cad26",
    "5-caption-written": "r1-f99346fa716c",
    "5-clip-in-place": "r1-beb539d2041e",
}
"""As the releases that wrote the files printed them."""
TRAINED_AGAIN = "2-vit-class"


def opened(name):
    return vlcam.open(SAVED / f"{name}.png")


def model_of(explanation):
    record = explanation.provenance["model"]
    return vlcam.load(record["id"], **{name: value for name, value in record["options"].items() if value is not None})


def content_of(path):
    data = path.read_bytes()
    start = data.index(b"vlCM") + 4
    (length,) = struct.unpack("<Q", data[start : start + 8])
    return json.loads(json.loads(data[start + 8 : start + 8 + length])["__metadata__"]["vlcam"])


def test_every_file_has_a_line_here_and_is_small_and_of_the_first_schema():
    files = sorted(SAVED.glob("*.png"))
    assert [file.stem for file in files] == list(FINGERPRINTS)
    for file in files:
        assert file.stat().st_size < 60_000
        assert content_of(file)["schema"] == 1 < archive.SCHEMA


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_file_opens_with_its_fingerprint_and_everything_that_is_read_of_it(name):
    found = opened(name)
    assert found.recipe.fingerprint == FINGERPRINTS[name]
    assert found.status == "ok"
    assert found.overlay().size[0] > 0
    assert vlcam.describe(found.recipe)
    assert found.subject
    for word, view in found.words.items():
        assert view.heatmap.shape == (64, 64), word


@pytest.mark.parametrize("name", [name for name in FINGERPRINTS if name != TRAINED_AGAIN])
def test_a_file_comes_out_again_with_todays_code_and_weights(name):
    found = opened(name)
    outcome = found.verify(model_of(found))
    assert outcome.reproduced
    assert set(outcome.differing) <= {"versions"}  # of what is installed here


def test_words_of_the_first_files_come_out_again_too():
    found = opened("1-itm-phrase")
    model = model_of(found)
    assert len(found.words) == 13
    assert all(view.verify(model).reproduced for view in found.words.values())


def test_weights_that_were_trained_again_are_named():
    found = opened(TRAINED_AGAIN)
    outcome = found.verify(model_of(found))
    assert not outcome.reproduced
    assert {"weights", "numbers"} <= set(outcome.differing) <= {"weights", "numbers", "versions"}
    assert "model.weights_sha256: was 'f3d7eff977f3" in outcome.weights[0]


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_file_that_is_saved_again_is_of_todays_schema_and_the_same(name, tmp_path):
    old = opened(name)
    path = old.save(tmp_path / "again.png")
    again = vlcam.open(path)
    assert content_of(path)["schema"] == archive.SCHEMA
    assert again.record() == old.record()
    assert again.tokens.tobytes() == old.tokens.tobytes()
    assert [w.tokens.tobytes() for w in again.word_maps] == [w.tokens.tobytes() for w in old.word_maps]


def test_old_files_are_guarded_by_their_own_digest():
    """The first schema's digest is over what the chunk says; bytes that say nothing may differ."""
    data = (SAVED / "1-itm-phrase.png").read_bytes()
    start = data.index(b"vlCM") + 4
    (length,) = struct.unpack(">I", data[start - 8 : start - 4])
    body = data[start : start + length]
    wanted = archive._decode(body, Path("old.png"))
    for place in range(0, length, 5):
        try:
            found = archive._decode(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :], Path("old.png"))
        except vlcam.FileError:
            continue
        assert found[1] == wanted[1]
        assert found[0].record == wanted[0].record
        assert found[0].tokens.tobytes() == wanted[0].tokens.tobytes()
        assert found[0].words.tobytes() == wanted[0].words.tobytes()
        assert found[0].attachments.image == wanted[0].attachments.image


def test_old_and_new_are_compared():
    old = opened("3-vit-scorecam")
    new = model_of(old).explain(old.picture(), None, "pgc-scorecam", target="yellow triangle")
    found = old.compare(new)
    assert found.likeness.rank_correlation == pytest.approx(1)
    assert {kind for kind, each in found.differences.items() if each} <= {"image", "versions"}  # a file, and pixels
