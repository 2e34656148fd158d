"""Regions of an image: on record, on the model's input, and as what a class is summed over."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vlcam
from vlcam.catalogue import recipes
from vlcam.choices import SCALES
from vlcam.geometry import Placement
from vlcam.provenance import class_records
from vlcam.questions import read_target
from vlcam.readers import explained_classes, region_weights
from vlcam.regions import Region, on_model_input
from vlcam.scores import Scores
from vlcam.targets import Class, resolve

PIXELS = {"segmentation": "pixels"}
OF_PIXELS = recipes()["pgc-gradcam"].recipe.replace(target="segmentation")
NAMES = ("sky", "tree", "road")


def logits(seed=0, pairs=2, classes=3, height=4, width=6, dtype=torch.float64):
    return torch.randn(pairs, classes, height, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def target(scale="logit", classes=(None,), region=None, weights=None):
    found = resolve(OF_PIXELS.replace(scale=scale), PIXELS, classes=classes, region=region)
    return found if weights is None else found.within(weights)


# On record


@pytest.mark.parametrize("seed", range(40))
def test_a_mask_survives_its_record(seed):
    random = np.random.default_rng(seed)
    size = tuple(random.integers(1, 12, 2))
    mask = random.random(size) < random.choice([0.02, 0.5, 0.98])
    mask[tuple(random.integers(0, size))] = True
    region = Region.of(mask)
    record = json.loads(json.dumps(region.to_dict(), allow_nan=False))
    assert Region.from_dict(record) == region
    assert hash(Region.from_dict(record)) == hash(region)
    np.testing.assert_array_equal(np.array(Region.from_dict(record).mask), mask)


@pytest.mark.parametrize(
    ("mask", "changes"),
    [([[1, 1], [1, 1]], []), ([[0, 1], [1, 0]], [1, 3]), ([[1, 0], [0, 0]], [1]), ([[True]], [])],
)
def test_the_record_of_a_mask_is_where_it_changes(mask, changes):
    record = Region.of(mask).to_dict()
    assert record == {"mask": {"size": list(np.shape(mask)), "first": bool(mask[0][0]), "changes": changes}}


@pytest.mark.parametrize("box", [(0, 1.5, 4, 2), [0, 1.5, 4, 2], np.array([0, 1.5, 4, 2], np.float32)])
def test_a_box_survives_its_record(box):
    region = Region(box=box)
    record = json.loads(json.dumps(region.to_dict(), allow_nan=False))
    assert record == {"box": [0, 1.5, 4, 2]}
    assert Region.from_dict(record) == region == Region(box=(0, 1.5, 4, 2))
    assert len({region, Region.from_dict(record)}) == 1


def test_masks_come_as_arrays_tensors_and_lists():
    mask = np.array([[0, 2, 0], [0, 0, 1]])
    wanted = Region.of(mask > 0)
    for given in (mask, mask.tolist(), torch.tensor(mask), torch.tensor(mask) > 0, mask.astype(float)):
        assert Region.of(given) == wanted


def test_a_region_is_shown_in_few_words():
    assert repr(Region(box=(0, 1, 2, 3))) == "Region(box=(0.0, 1.0, 2.0, 3.0))"
    assert repr(Region.of(np.eye(3, 400))) == "Region.of(<mask of 3 x 400 with 3 pixels inside>)"


@pytest.mark.parametrize(
    "box",
    [(3, 0, 3, 5), (0, 5, 4, 5), (4, 0, 3, 5), (0, 0, 4), (0, 0, 4, 4, 1), (0, 0, np.inf, 1), (np.nan, 0, 1, 1), 7],
)
def test_a_box_without_pixels_is_refused(box):
    with pytest.raises(vlcam.InputError, match=r"box=.*give \(x0, y0, x1, y1\) with x0 < x1 and y0 < y1"):
        Region(box=box)


@pytest.mark.parametrize("mask", [np.zeros((3, 4)), np.ones(4), np.ones((2, 3, 1)), [], 1])
def test_a_mask_without_pixels_is_refused(mask):
    with pytest.raises(vlcam.InputError, match=r"a mask of shape \(.*\) with \d+ pixels inside: give \[H, W\] with"):
        Region.of(mask)


def test_a_class_takes_no_bare_array_for_its_region():
    with pytest.raises(vlcam.InputError, match=r"region of type ndarray: give .*Region\.of\(mask\)"):
        Class(1, region=np.ones((2, 2), bool))


def test_a_region_is_one_thing():
    for both in ({}, {"box": (0, 0, 1, 1), "mask": ((True,),)}):
        with pytest.raises(vlcam.InputError, match=r"a region is a box or a mask: .*Region\.of\(mask\)"):
            Region(**both)
    with pytest.raises(vlcam.InputError, match=r"mask of type ndarray: Region\.of\(mask\)"):
        Region(mask=np.ones((2, 2), bool))


# On the model's input

PLACEMENTS = {
    "same": Placement.squashed((12, 20), (12, 20)),
    "smaller": Placement.squashed((12, 20), (5, 7)),
    "larger": Placement.squashed((12, 20), (24, 31)),
    "crop": Placement.cropped((12, 20), (24, 40), (16, 16), (4, 12)),
    "crop, shrunk": Placement.cropped((12, 20), (6, 10), (4, 5), (1, 2.5)),
    "padded": Placement.cropped((12, 20), (12, 20), (20, 20), (-4, 0)),
}


def slow(region, placement):
    """Pixel by pixel: where its centre lies in the original, and whether that is inside."""
    (height, width), (rows, columns) = placement.model, placement.original
    x0, y0, x1, y1 = placement.box
    found = np.zeros((height, width), np.float32)
    for row in range(height):
        for column in range(width):
            x = x0 + (column + 0.5) * (x1 - x0) / width
            y = y0 + (row + 0.5) * (y1 - y0) / height
            if region.box is not None:
                left, top, right, bottom = region.box
                found[row, column] = left <= x < right and top <= y < bottom
            elif 0 <= x < columns and 0 <= y < rows:
                found[row, column] = region.mask[int(y)][int(x)]
    return found


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_region_lies_where_its_pixels_do(placement, seed):
    random = np.random.default_rng(seed)
    # Edges off the halves, on which a pixel's centre may fall in one rounding and not in another.
    box = Region(box=(*(random.uniform(0, 9, 2) + 0.013), *(random.uniform(11, 20, 2) + 0.013)))
    for region in (box, Region.of(random.random(placement.original) < 0.4)):
        found = on_model_input(region, placement)
        assert (found.dtype, found.shape) == (np.float32, placement.model)
        np.testing.assert_array_equal(found, slow(region, placement))


def test_a_box_is_half_open_and_a_mask_of_it_is_the_same():
    placement = PLACEMENTS["same"]
    mask = np.zeros((12, 20), bool)
    mask[2:5, 3:9] = True
    found = on_model_input(Region(box=(3, 2, 9, 5)), placement)
    np.testing.assert_array_equal(found, mask)
    np.testing.assert_array_equal(on_model_input(Region.of(mask), placement), mask)


def test_what_padding_shows_is_in_no_mask():
    found = on_model_input(Region.of(np.ones((12, 20))), PLACEMENTS["padded"])
    assert found.sum() == 12 * 20
    assert not found[:4].any()
    assert not found[16:].any()


@pytest.mark.parametrize("name", ["crop", "crop, shrunk"])
def test_a_region_that_the_model_never_saw_is_refused(name):
    mask = np.zeros((12, 20))
    mask[:, :3] = 1
    for region in (Region(box=(0, 0, 3, 12)), Region.of(mask), Region(box=(50, 50, 60, 60))):
        with pytest.raises(vlcam.InputError, match=r"outside of what the model saw, \(\d+, \d+, \d+, \d+\) of an im"):
            on_model_input(region, PLACEMENTS[name])


def test_a_region_between_two_pixels_is_refused():
    with pytest.raises(vlcam.InputError, match="or between two of its pixels"):
        on_model_input(Region(box=(0, 0, 0.5, 0.5)), PLACEMENTS["smaller"])


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(vlcam.InputError, match=r"mask of shape \(20, 12\) for an image of \(12, 20\): give one truth"):
        on_model_input(Region.of(np.ones((20, 12))), PLACEMENTS["same"])


# What a class is summed over


def slow_sum(values, scale, k, weights):
    """One pair: the class read at every place, times how much of the place is inside, place by place."""
    total = 0.0
    for row in range(values.shape[1]):
        for column in range(values.shape[2]):
            place = values[:, row, column].tolist()
            log = place[k] - np.log(np.sum(np.exp(place)))
            total += {"logit": place[k], "probability": np.exp(log), "log-probability": log}[scale] * float(
                weights[row, column]
            )
    return total


@pytest.mark.parametrize("scale", SCALES["segmentation"])
def test_the_scalar_is_a_sum_over_the_predicted_pixels(scale):
    values = logits()
    won = values.argmax(1)
    for classes in ((1, 2), (0,), (None,)):
        chosen = explained_classes(values, classes).tolist()
        wanted = [slow_sum(row, scale, k, place == k) for row, place, k in zip(values, won, chosen, strict=True)]
        np.testing.assert_allclose(target(scale, classes).read(values), wanted, rtol=1e-12)


@pytest.mark.parametrize("scale", SCALES["segmentation"])
@pytest.mark.parametrize("across", [1, 3])
def test_the_scalar_is_a_sum_over_the_region(scale, across):
    """A place counts with the share of its pixels that is inside."""
    values = logits()
    inside = torch.rand(2, 4 * across, 6 * across, generator=torch.Generator().manual_seed(1)) < 0.4
    shares = inside.double().reshape(2, 4, across, 6, across).mean((2, 4))
    wanted = [slow_sum(row, scale, k, share) for row, share, k in zip(values, shares, (2, 0), strict=True)]
    found = target(scale, (2, 0), weights=inside.float()).read(values)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_gradient_of_a_logit_is_the_region():
    values, inside = logits().requires_grad_(), torch.zeros(2, 4, 6)
    inside[:, 1:3, 2:5] = 1
    (gradient,) = torch.autograd.grad(target(classes=(1,), weights=inside).read(values).sum(), values)
    assert torch.equal(gradient[:, 1], inside.double())
    assert not gradient[:, [0, 2]].any()
    # Which pixels are predicted is no part of the graph.
    (gradient,) = torch.autograd.grad(target(classes=(1,)).read(values).sum(), values)
    assert torch.equal(gradient[:, 1], (values.argmax(1) == 1).double())


def test_without_a_class_it_is_the_one_with_most_pixels():
    values = torch.zeros(2, 3, 2, 3)
    values[0, 1, :, :2] = 1.0  # four pixels by little
    values[0, 2, :, 2] = 99.0  # two by much
    values[1, 2] = 0.1
    assert explained_classes(values, (None,)).tolist() == [1, 2]
    assert explained_classes(values, (0, None)).tolist() == [0, 2]
    with pytest.raises(vlcam.UnknownNameError, match="no class 3; the model has classes 0 to 2"):
        explained_classes(values, (3,))


def test_a_class_that_is_predicted_nowhere_needs_a_region():
    values = logits()
    values[1, 2] = -50.0
    words = r"class 2: the model predicts it at no pixel in pair 1 of 2, counted from 0; .*Class\(which, region=\.\.\."
    with pytest.raises(vlcam.EvidenceError, match=words):
        target(classes=(2,)).read(values)
    with pytest.raises(vlcam.EvidenceError, match="class 2: the model predicts it at no pixel; name another class"):
        target(classes=(2,)).read(values[1:])
    assert torch.isfinite(target(classes=(2,), weights=torch.ones(2, 8, 8)).read(values)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_single(dtype):
    values = logits(pairs=1, classes=2, height=120, width=80, dtype=torch.float32).to(dtype)
    inside = torch.rand(1, 240, 160, generator=torch.Generator().manual_seed(2)) < 0.3
    for weights in (None, inside.float()):
        shares = region_weights(values, torch.tensor([1]), weights)
        assert shares.dtype == torch.float32
        found = target(classes=(1,), weights=weights).read(values)
        wanted = (values[0, 1].double() * shares[0].double()).sum()
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        scores = Scores(PIXELS, 0, {"segmentation": values}, dict, (1,), weights)
        mean = wanted / shares.double().sum()
        np.testing.assert_allclose(float(scores["segmentation_logit"]), mean, rtol=1e-5, atol=1e-6)


def test_scores_are_means_and_say_so():
    values, inside = logits(), torch.zeros(2, 4, 6)
    inside[:, :2, 1:4] = 1
    scores = Scores(PIXELS, 1, {"segmentation": values}, dict, (1,), inside)
    chances = values[1].softmax(0)[1, :2, 1:4]
    wanted = {
        "segmentation_logit": ("mean logit of the region", values[1, 1, :2, 1:4].mean()),
        "segmentation_probability": ("mean probability of the region", chances.mean()),
        "segmentation_log_probability": ("mean log-probability of the region", chances.log().mean()),
    }
    assert list(scores) == list(wanted)
    for name, (kind, value) in wanted.items():
        assert scores[name].kind == kind
        np.testing.assert_allclose(float(scores[name]), value, rtol=1e-6)


def test_pairs_do_not_influence_each_other():
    values = logits(pairs=3)
    whole = target(classes=(0, 1, None)).read(values)
    alone = [float(target(classes=(k,)).read(row[None])) for row, k in zip(values, (0, 1, None), strict=True)]
    np.testing.assert_allclose(whole, alone, rtol=1e-12)


# As targets


def test_a_class_of_pixels_is_named_like_any_other():
    for given in (1, "tree", Class("tree")):
        asked = read_target(given, PIXELS, NAMES)
        assert (dict(asked.changes), asked.classes, asked.region) == ({"target": "segmentation"}, (1,), None)
    region = Region(box=(0, 0, 2, 2))
    asked = read_target(Class(2, scale="probability", region=region), PIXELS, NAMES)
    assert dict(asked.changes) == {"target": "segmentation", "scale": "probability"}
    assert (asked.classes, asked.region) == ((2,), region)
    assert read_target(["sky", 2], PIXELS, NAMES).count == 2


def test_targets_over_different_regions_differ():
    one, other = Region(box=(0, 0, 2, 2)), Region(box=(0, 0, 2, 3))
    assert target(region=one) == target(region=Region(box=(0, 0, 2, 2)))
    assert len({target(region=one), target(region=other), target()}) == 3


def test_a_recipe_without_a_target_keeps_the_region_for_its_scores():
    region = Region(box=(0, 0, 2, 2))
    of_none = recipes()["vitexplain-rollout"].recipe
    found = resolve(of_none, PIXELS, classes=(1,), region=region)
    assert (found.region, found.differentiate) == (region, False)


def test_a_region_on_a_classifier_is_an_error():
    for region in (Region(box=(0, 0, 2, 2)), Region.of(np.ones((300, 400)))):
        with pytest.raises(vlcam.RecipeError, match="tells the class of an image, and not of its pixels") as caught:
            read_target(Class(0, region=region), {"class": "classes"}, NAMES)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("region", [None, Region(box=(1, 2, 3, 4)), Region.of([[0, 1]])])
def test_the_region_is_on_record(region):
    found = SimpleNamespace(outputs={"segmentation": logits()})
    adapter = SimpleNamespace(heads=PIXELS, labels=NAMES[:2])
    records = class_records(adapter, target(classes=(2, None), region=region), found, (2, None))
    own = None if region is None else region.to_dict()
    assert records[0] == {"index": 2, "label": None, "chosen": "as given", "region": own}
    assert (records[1]["chosen"], records[1]["region"]) == ("most pixels", own)
