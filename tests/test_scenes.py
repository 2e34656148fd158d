"""Synthetic scenes and captions that are false of them."""

from itertools import islice

import numpy as np
import pytest
from scipy.ndimage import binary_dilation, binary_erosion

from vlcam.scenes import COLOURS, SHAPES, Scene, SceneObject, generate, mismatch

KINDS = ("attribute", "object", "binding")


@pytest.fixture(scope="module")
def scenes():
    return list(generate(60, seed=3, objects=(1, 4), size=(64, 80)))


def same(one, other):
    return (
        one.caption == other.caption
        and np.array_equal(np.asarray(one.image), np.asarray(other.image))
        and all(np.array_equal(a.mask, b.mask) for a, b in zip(one.objects, other.objects, strict=True))
    )


def changed(scene, caption):
    """(index, old phrase, new phrase) for every phrase that differs."""
    pairs = zip(scene.phrases(), caption.phrases, strict=True)
    return [(index, old, new) for index, (old, new) in enumerate(pairs) if old != new]


def scene_of(caption, *phrases):
    """A scene without pixels, for captions that chance gives rarely."""
    objects, done = [], 0
    for phrase in phrases:
        start = caption.index(phrase, done)
        done = start + len(phrase)
        colour, shape = phrase.split()
        objects.append(SceneObject(colour, shape, (start, done), np.zeros((1, 1), bool), (0, 0, 1, 1)))
    return Scene(None, caption, tuple(objects), (0, 0))


def test_the_same_seed_gives_the_same_scenes(scenes):
    again = list(generate(60, seed=3, objects=(1, 4), size=(64, 80)))
    assert all(same(one, other) for one, other in zip(scenes, again, strict=True))


def test_another_seed_gives_other_scenes(scenes):
    other = list(generate(60, seed=4, objects=(1, 4), size=(64, 80)))
    assert not any(same(one, two) for one, two in zip(scenes, other, strict=True))


def test_a_scene_depends_on_its_index_alone(scenes):
    for start in (1, 30, 59):
        (one,) = generate(1, seed=3, objects=(1, 4), size=(64, 80), start=start)
        assert same(one, scenes[start])
        assert one.seed == (3, start)
    piece = islice(generate(1000, seed=3, objects=(1, 4), size=(64, 80), start=10), 3)
    assert all(same(one, two) for one, two in zip(piece, scenes[10:13], strict=True))


def test_no_scenes_are_none():
    assert list(generate(0, seed=1)) == []


def test_phrases_stand_at_their_spans_in_caption_order(scenes):
    for scene in scenes:
        assert tuple(scene.caption[a:b] for a, b in (item.span for item in scene.objects)) == scene.phrases()
        assert sorted(item.span for item in scene.objects) == [item.span for item in scene.objects]
        assert all(item.phrase == f"{item.colour} {item.shape}" for item in scene.objects)
        assert all(item.colour in COLOURS and item.shape in SHAPES for item in scene.objects)


def test_articles_fit_the_colours(scenes):
    found = {item.colour: scene.caption[: item.span[0]].split()[-1] for scene in scenes for item in scene.objects}
    assert found == {colour: "an" if colour == "orange" else "a" for colour in COLOURS}


def test_masks_are_disjoint_and_not_empty(scenes):
    for scene in scenes:
        masks = np.stack([item.mask for item in scene.objects])
        assert masks.dtype == bool
        assert masks.shape[1:] == (64, 80)
        assert masks.any((1, 2)).all()
        assert masks.sum(0).max() == 1


def test_a_box_is_tight_and_half_open(scenes):
    for item in (item for scene in scenes for item in scene.objects):
        x0, y0, x1, y1 = item.box
        inside = item.mask[y0:y1, x0:x1]
        assert inside.sum() == item.mask.sum()
        assert inside[0].any()
        assert inside[-1].any()
        assert inside[:, 0].any()
        assert inside[:, -1].any()


def test_no_two_objects_share_colour_and_shape(scenes):
    assert all(len(set(scene.phrases())) == len(scene.phrases()) for scene in scenes)


@pytest.mark.parametrize("objects", [(1, 1), (2, 2), (1, 3), (3, 4)])
def test_the_number_of_objects_takes_every_value_of_its_range(objects):
    found = {len(scene.objects) for scene in generate(40, seed=0, objects=objects, size=(32, 32))}
    assert found == set(range(objects[0], objects[1] + 1))


def test_the_colour_under_a_mask_is_nearest_to_the_one_named(scenes):
    table = np.array(list(COLOURS.values()), float)
    for scene in scenes:
        pixels = np.asarray(scene.image, float)
        for item in scene.objects:
            distance = np.linalg.norm(table - pixels[item.mask].mean(0), axis=1)
            assert list(COLOURS)[distance.argmin()] == item.colour


def test_a_mask_ends_where_the_object_covers_half_a_pixel(scenes):
    shares = {True: [], False: []}
    for scene in scenes:
        pixels = np.asarray(scene.image, float)
        for mask in (item.mask for item in scene.objects):
            grown = binary_dilation(mask)
            inner = pixels[binary_erosion(mask)].mean(0)
            outer = pixels[binary_dilation(grown) & ~grown].mean(0)
            for inside, edge in ((True, mask & ~binary_erosion(mask)), (False, grown & ~mask)):
                share = (pixels[edge] - outer) @ (inner - outer) / ((inner - outer) ** 2).sum()
                shares[inside].append(share.mean())
    assert min(shares[True]) > 0.5 > max(shares[False])


@pytest.mark.parametrize("size", [(32, 32), (48, 96), (96, 40)])
def test_the_size_is_height_and_width(size):
    for scene in generate(5, seed=1, size=size):
        assert scene.image.mode == "RGB"
        assert (scene.image.height, scene.image.width) == size
        assert all(item.mask.shape == size for item in scene.objects)


@pytest.mark.parametrize("objects", [(0, 1), (2, 1), (1, 5)])
def test_an_impossible_number_of_objects_is_refused(objects):
    with pytest.raises(ValueError, match=rf"objects=\({objects[0]}, {objects[1]}\): give \(least, most\)"):
        next(generate(1, seed=0, objects=objects))


@pytest.mark.parametrize("size", [(31, 64), (64, 8)])
def test_a_side_that_is_too_small_is_refused(size):
    with pytest.raises(ValueError, match=rf"size=\({size[0]}, {size[1]}\): both sides must be 32 pixels or more"):
        next(generate(1, seed=0, size=size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_is_false_in_exactly_one_phrase(scenes, kind):
    for scene in scenes:
        caption, which = mismatch(scene, kind)
        ((index, _, new),) = changed(scene, caption)
        assert index == which
        assert new not in scene.phrases()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_keeps_the_wording_around_its_phrases(scenes, kind):
    for scene in scenes:
        caption, which = mismatch(scene, kind, seed=1)
        assert tuple(caption.text[a:b] for a, b in caption.spans) == caption.phrases
        new, old = caption.phrases[which], scene.phrases()[which]
        articled = {phrase: f"{'an' if phrase.startswith('orange') else 'a'} {phrase}" for phrase in (new, old)}
        assert caption.text.replace(articled[new], articled[old]) == scene.caption


@pytest.mark.parametrize("kind", ["attribute", "object"])
def test_attribute_changes_one_word_and_object_both(scenes, kind):
    words_kept = set()
    for scene in scenes:
        caption, which = mismatch(scene, kind)
        pairs = zip(scene.phrases()[which].split(), caption.phrases[which].split(), strict=True)
        words_kept.add(tuple(old == new for old, new in pairs))
    assert words_kept == ({(True, False), (False, True)} if kind == "attribute" else {(False, False)})


def test_binding_gives_the_colour_of_another_object(scenes):
    bound = 0
    for scene in scenes:
        if len(scene.objects) == 2 and scene.objects[0].shape != scene.objects[1].shape:
            caption, which = mismatch(scene, "binding")
            item, other = scene.objects[which], scene.objects[1 - which]
            if item.colour != other.colour:
                assert caption.phrases[which] == f"{other.colour} {item.shape}"
                bound += 1
    assert bound > 3


@pytest.mark.parametrize("seed", range(12))
def test_binding_falls_back_only_where_the_drawn_object_has_no_colour_to_take(seed):
    # "blue circle" and "red circle" cannot change colour: only the square can.
    scene = scene_of("a red circle, a red square and a blue circle", "red circle", "red square", "blue circle")
    caption, which = mismatch(scene, "binding", seed=seed)
    if which == 1:
        assert caption.text == "a red circle, a blue square and a blue circle"
    assert caption.phrases[which] not in scene.phrases()


@pytest.mark.parametrize(
    "scene",
    [
        scene_of("a red circle", "red circle"),
        scene_of("a red circle and a red star", "red circle", "red star"),
        scene_of("a red star and a blue star", "red star", "blue star"),
    ],
    ids=["one object", "one colour", "one shape"],
)
def test_binding_falls_back_to_one_attribute(scene):
    caption, which = mismatch(scene, "binding")
    old, new = scene.phrases()[which].split(), caption.phrases[which].split()
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1
    assert caption.phrases[which] not in scene.phrases()


def test_articles_change_with_the_colour():
    scene = scene_of("there is an orange star", "orange star")
    texts = {mismatch(scene, "object", seed=seed)[0].text for seed in range(20)}
    assert len(texts) > 3
    assert all(text.startswith("there is a ") for text in texts)
    scene = scene_of("an orange star with a red star", "orange star", "red star")
    texts = {mismatch(scene, "attribute", seed=seed)[0].text for seed in range(60)}
    assert "an orange star with an orange cross" not in texts
    assert "an orange star with a purple star" in texts
    assert "a green star with a red star" in texts


def test_the_seed_of_a_mismatch_chooses_among_the_changes(scenes):
    texts = [mismatch(scenes[0], seed=seed)[0].text for seed in range(20)]
    assert texts == [mismatch(scenes[0], seed=seed)[0].text for seed in range(20)]
    assert len(set(texts)) > 1


def test_an_unknown_kind_is_refused(scenes):
    with pytest.raises(ValueError, match="kind='colour': choose from 'attribute', 'object', 'binding'"):
        mismatch(scenes[0], "colour")
