"""BEiT that tells the class of every place: what is on the path, and classes explained over regions of an image."""

from __future__ import annotations

import copy

import models
import numpy as np
import pytest
import torch
from models import COMMON, FFN, assert_same, state
from PIL import Image
from torch import nn
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)
from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import Tap
from vlcam.capture import capture
from vlcam.regions import Region, on_model_input
from vlcam.targets import Class, Target
from vlcam_adapters.beit_segmentation_hf import BeitSegmentationHF
from vlcam_adapters.segformer_hf import SegformerHF

SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
NAMES = ["sky", "tree", "road", "house", "lamp"]
LABELS = dict(enumerate(NAMES))
EXACT = {"height": 32, "width": 48}
KINDS = {
    "relative": {"use_relative_position_bias": True},
    "shared": {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
    "absolute": {"use_absolute_position_embeddings": True, "layer_scale_init_value": 0.0},
}


def made(kind="relative", **changes):
    """Six blocks, of which the decoder reads the embedding and blocks 0, 1, 3; every parameter and statistic random."""
    torch.manual_seed(0)
    own = {"num_hidden_layers": 6, "out_indices": [1, 2, 3, 5], "auxiliary_channels": 8, "id2label": LABELS}
    return randomised(BeitForSemanticSegmentation(BeitConfig(**{**COMMON, **FFN, **own, **KINDS[kind], **changes})))


def randomised(module):
    module.eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.2))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
        # So that several classes are predicted.
        last = module.decode_head.classifier
        last.bias -= own_logits(copy.deepcopy(module), models.pixels(height=64, width=64, batch=2)).mean((0, 2, 3))
    return module


def own_logits(module, pixels):
    with torch.no_grad():
        return module(pixels).logits


def wrapped(module=None, processor=None, **options):
    return vlcam.wrap(made() if module is None else module, processor, **options)


def captured(model, pixels, *sites, target, layers=range(6)):
    adapter = model.adapter
    taps = [Tap("vision", layer, site) for site in sites for layer in layers]
    inputs = Inputs(adapter.accept_pixels(pixels), None, tuple(range(len(pixels))))
    (found,) = capture(adapter, inputs, taps, [target])
    return found


def summed(k=2):
    return Target("segmentation", "sum", lambda logits: logits[:, k].sum((1, 2)), classes=(k,))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def photo(height=40, width=60, seed=3):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8), "RGB")


# The family


def test_it_is_found_and_says_what_it_offers(kind):
    model = wrapped(made(kind))
    assert type(model.adapter) is BeitSegmentationHF
    assert model.adapter.heads == {"segmentation": "pixels"}
    assert list(model.adapter.labels) == NAMES
    assert model.adapter.reads == "patches"
    anatomy = model.anatomy
    assert anatomy.targets == ("segmentation: logit, probability, log-probability, over a region",)
    stream = anatomy.stream("vision")
    assert (len(stream.blocks), stream.width, stream.heads, stream.trunk) == (6, 32, 4, True)
    assert stream.tokens == "[CLS], then 4 x 4 patches in raster order"
    assert not model.adapter.reads_blocks
    with pytest.raises(vlcam.RecipeError, match="gradient_path='block': BeitSegmentationHF does not say how"):
        model.explain(models.pixels(), recipe="legrad")


@pytest.mark.parametrize("size", [(32, 32), (32, 48), (64, 16), (40, 24)])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tapping_changes_no_logit(kind, implementation, size):
    module, pixels = made(kind), models.pixels(height=size[0], width=size[1], batch=2)
    module.set_attn_implementation(implementation)
    expected = own_logits(module, pixels)
    assert expected.shape == (2, 5, size[0] // 2, size[1] // 2)
    found = captured(wrapped(module), pixels, *SITES, target=summed())
    rounding = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found.outputs["segmentation"], expected, atol=rounding, rtol=0)


@pytest.mark.parametrize("out_indices", [[1, 2, 3, 5], [2, 3, 4, 6], [0, 2, 3, 4], [3, 4, 5, 6]])
def test_the_notes_name_the_blocks_that_are_not_on_the_path(kind, out_indices):
    module = made(kind, out_indices=out_indices)
    model = wrapped(module)
    gradients = captured(model, models.pixels(batch=1), *SITES, target=summed()).gradients
    dead = [layer for layer in range(6) if gradients[Tap("vision", layer, "F6")] is None]
    assert dead == [layer for layer in range(6) if all(gradients[Tap("vision", layer, site)] is None for site in SITES)]
    notes = " ".join(model.anatomy.notes)
    deepest = 5 - len(dead)
    if dead:
        blocks = f"block{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}"
        assert f"no logit depends on {blocks}: nothing there has a gradient" in notes
        assert f"the last that has is block {deepest}" in notes
    else:
        assert "no logit depends on" not in notes
    assert f"(out_indices {', '.join(map(str, out_indices))})" in notes
    assert (", and the embedded patches" in notes) == (1 in out_indices)
    # What the deepest block on the path does to [CLS] is dropped.
    assert f"in block {deepest} it has no gradient from F3_HEADS on, nor its query in F2" in notes
    for site in SITES[1:]:
        rows = gradients[Tap("vision", deepest, site)][0].abs()
        rows = rows.sum((0, 2)) if site == "F2" else rows.sum(-1)
        assert torch.nonzero(rows).flatten().tolist() == list(range(1, 17)), site
    assert bool((gradients[Tap("vision", deepest, "F1")][0].abs().sum(-1) > 0).all())
    # The block before passes [CLS] on, unless there is none.
    assert bool((gradients[Tap("vision", deepest - 1, "F6")][0].abs().sum(-1) > 0).all())


def test_the_usual_indices_leave_the_last_two_of_twelve_out():
    model = wrapped(made(num_hidden_layers=12, out_indices=[3, 5, 7, 11]))
    assert model.adapter.blocks_read == (1, 3, 5, 9)
    gradients = captured(model, models.pixels(batch=1), "F6", target=summed(), layers=range(12)).gradients
    assert [tap.layer for tap, gradient in gradients.items() if gradient is None] == [10, 11]
    assert "no logit depends on blocks 10, 11" in " ".join(model.anatomy.notes)


@pytest.mark.parametrize("recipe", [None, "pgc-layercam", "attn-gradcam", "gscorecam-gradcam"])
def test_a_block_off_the_path_is_an_error_that_names_those_on_it(recipe):
    model = wrapped()
    words = (
        r"segmentation_logit does not depend on F. of vision block 5; in this model F. carries one in block 0, 1, 2, 3"
    )
    for layer in ({}, {"layer": "last"}):
        with pytest.raises(vlcam.EvidenceError, match=words):
            model.explain(models.pixels(), recipe=recipe, **layer)
    assert model.explain(models.pixels(), recipe=recipe, layer=3).status == "ok"
    (kept,) = model.sweep(models.pixels(), recipes=["pgc-gradcam"], empty="keep")
    assert kept.status == "zero gradient"


def test_a_recipe_over_all_blocks_needs_those_on_the_path():
    model = wrapped()
    with pytest.raises(vlcam.EvidenceError, match=r"not depend on F2 of vision block 4; .* in block 0, 1, 2, 3$"):
        model.explain(models.pixels(), recipe="chefer-generic")
    assert model.explain(models.pixels(), recipe="chefer-generic", layer=range(4)).tokens.any()


# Gradients


def by_hand(module, pixels, k, region):
    """The forward pass written out, with every tensor that a site names kept for autograd."""
    config, beit, kept = module.config, module.beit, {}
    hidden = beit.embeddings(pixels)
    shape, grid = (*hidden.shape[:2], 4, 8), (pixels.shape[2] // 8, pixels.shape[3] // 8)

    def keep(tensor, *name):
        kept[name] = tensor.requires_grad_() if tensor.is_leaf else tensor
        return kept[name]

    states = [hidden.detach()]
    for layer, block in enumerate(beit.layers):
        hidden = states[-1]
        attend = block.attention
        first = keep(block.layernorm_before(hidden), layer, "F1")
        query, key, value = (
            proj(first).view(shape).transpose(1, 2) for proj in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        scores = query @ key.transpose(2, 3) / 8**0.5
        if block.relative_position_bias is not None:
            scores = scores + block.relative_position_bias(grid)
        if beit.shared_position_bias is not None:
            scores = scores + beit.shared_position_bias(grid)
        attention = keep(scores.softmax(-1), layer, "F2")
        heads = keep((attention @ value).transpose(1, 2).flatten(2), layer, "F3_HEADS")
        hidden = hidden + block.lambda_1 * keep(attend.o_proj(heads), layer, "F3")
        second = keep(block.layernorm_after(hidden), layer, "F4")
        hidden = hidden + block.lambda_2 * keep(block.mlp(second), layer, "F5")
        states.append(keep(hidden, layer, "F6"))
    maps = [states[i - 1][:, 1:].transpose(1, 2).unflatten(2, grid) for i in config.out_indices]
    logits = module.decode_head(module.fpn(tuple(maps)))
    y = (logits[:, k] * region).sum()
    names = list(kept)
    return logits, dict(zip(names, torch.autograd.grad(y, [kept[n] for n in names], allow_unused=True), strict=True))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_gradients_are_those_of_a_pass_by_hand(kind, site, again):
    """Also in a model that has run before: transformers then has its hooks in front of those of a pass."""
    module, pixels = made(kind), models.pixels(height=32, width=48, batch=1)
    if again:
        own_logits(module, pixels)
    box = Region(box=(9, 3, 40, 21))
    inside = torch.from_numpy(on_model_input(box, wrapped(module).adapter.accept_pixels(pixels).placements[0]))
    region = inside.reshape(16, 2, 24, 2).mean((1, 3))  # two pixels to a place
    logits, wanted = by_hand(module, pixels, 1, region)
    model = wrapped(module)
    for layers in ("all", [1], [3]):
        found = model.capture(pixels[0], stream="vision", site=site, layers=layers, target=Class(1, region=box))
        torch.testing.assert_close(found.outputs["segmentation"], logits.detach(), atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(found.target[0], (logits[0, 1] * region).sum().detach(), atol=1e-2, rtol=1e-5)
        for tap, gradient in found.gradients.items():
            hand = wanted[tap.layer, site]
            assert (gradient is None) == (hand is None) == (tap.layer > 3)
            if hand is not None:
                torch.testing.assert_close(gradient, hand, atol=2e-5 * float(hand.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("again", [False, True])
def test_a_block_output_that_is_changed_reaches_the_decoder(again):
    module, pixels = made(), models.pixels(height=32, width=48)
    if again:
        own_logits(module, pixels[None])
    target = Class(1, region=Region(box=(0, 0, 30, 30)))
    found = wrapped(module).explain(pixels, recipe="ablationcam", site="F6", layer=3, target=target, relu="none")
    states = wrapped(module).capture(pixels, stream="vision", site="F6", layers=3).activations
    (output,) = states.values()

    def score(changed):
        # In front of the hook of transformers, so that the decoder sees it.
        handle = module.beit.layers[3].register_forward_hook(lambda *_: changed, prepend=True)
        logits = own_logits(module, pixels[None])
        handle.remove()
        return logits[0, 1, :15, :15].sum()

    drops = []
    for channel in range(32):
        changed = output.clone()
        changed[..., channel] = 0
        drops.append((score(output) - score(changed)) / score(output))
    wanted = (output[0, 1:] * torch.stack(drops)).sum(-1).reshape(4, 6)
    np.testing.assert_allclose(found.tokens, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


# Targets


def slow_mean(logits, k, weights):
    values, weights = logits.double(), weights.double()
    total = count = 0.0
    for row in range(values.shape[1]):
        for column in range(values.shape[2]):
            total += float(weights[row, column] * values[k, row, column])
            count += float(weights[row, column])
    return total, total / count


SCENES = {
    "squash": BeitImageProcessorPil(size=EXACT, do_center_crop=False),
    "crop": BitImageProcessorPil(size={"shortest_edge": 36}, crop_size={"height": 24, "width": 32}),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("what", ["predicted", "box", "mask"])
def test_the_value_is_the_sum_over_the_region_of_the_image(kind, scene, what):
    module, image = made(kind), photo()
    model = wrapped(module, SCENES[scene])
    prepared = SCENES[scene](image, return_tensors="pt")["pixel_values"].float()
    logits = own_logits(module, prepared)[0]
    (height, width), (x0, y0, x1, y1) = {
        "squash": ((32, 48), (0, 0, 60, 40)),
        # Resized to 36 x 54, of which rows 6 to 30 and columns 11 to 43 are kept.
        "crop": ((24, 32), (11 * 60 / 54, 6 * 40 / 36, 43 * 60 / 54, 30 * 40 / 36)),
    }[scene]
    assert logits.shape == (5, height // 2, width // 2)
    k = int(logits.argmax(0).flatten().mode().values)
    mask = np.random.default_rng(1).random((40, 60)) < 0.3
    region = {"predicted": None, "box": Region(box=(7, 5, 41, 33)), "mask": Region.of(mask)}[what]
    if region is None:
        shares = logits.argmax(0) == k
    else:
        # The centre of every pixel of the model's input, looked up in the original.
        inside = torch.zeros(height, width)
        for row in range(height):
            for column in range(width):
                x, y = x0 + (column + 0.5) / width * (x1 - x0), y0 + (row + 0.5) / height * (y1 - y0)
                inside[row, column] = float(mask[int(y), int(x)] if what == "mask" else 7 <= x < 41 and 5 <= y < 33)
        shares = inside.reshape(height // 2, 2, width // 2, 2).mean((1, 3))
    found = model.explain(image, target=Class(k, region=region), layer=2)
    total, mean = slow_mean(logits, k, shares)
    assert found.provenance["run"]["target_value"] == pytest.approx(total, rel=1e-4, abs=1e-2)
    assert float(found.scores["segmentation_logit"]) == pytest.approx(mean, rel=1e-4, abs=1e-4)
    assert found.scores["segmentation_logit"].kind == "mean logit of the region"
    record = {"index": k, "label": NAMES[k], "chosen": "as given", "region": region and region.to_dict()}
    assert found.provenance["run"]["class"] == record


def test_without_a_class_it_is_the_one_with_most_pixels():
    module, pixels = made(), models.pixels(height=32, width=48)
    most = int(own_logits(module, pixels[None]).argmax(1).flatten().bincount().argmax())
    found = wrapped(module).explain(pixels, layer=3)
    own = found.provenance["run"]["class"]
    assert own == {"index": most, "label": NAMES[most], "chosen": "most pixels", "region": None}
    again = wrapped(module).explain(pixels, layer=3, target=NAMES[most])
    np.testing.assert_array_equal(again.tokens, found.tokens)


def test_two_regions_of_an_image_have_different_maps():
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    left, right, whole = (Region(box=box) for box in ((0, 0, 24, 32), (24, 0, 48, 32), (0, 0, 48, 32)))
    one, other, both = (
        model.explain(pixels, recipe="pgc-hirescam", layer=2, target=Class(1, region=region), relu="none").tokens
        for region in (left, right, whole)
    )
    assert np.abs(one - other).max() > 0.1 * np.abs(one).max()
    # The target is a sum over places, and so is the map, which is linear in the gradient.
    np.testing.assert_allclose(one + other, both, atol=1e-4 * np.abs(both).max())


@pytest.mark.parametrize("recipe", ["pgc-gradcam", "chefer-generic", "pgc-scorecam"])
@pytest.mark.parametrize("region", [None, Region(box=(3, 3, 30, 20))])
def test_images_of_a_batch_are_explained_as_if_alone(recipe, region):
    model, layer = wrapped(), range(4) if recipe == "chefer-generic" else 3
    pixels = models.pixels(height=32, width=48, batch=2)
    for target in (Class(None, region=region), Class(1, region=region)):
        both = model.explain(pixels, recipe=recipe, target=target, layer=layer)
        for found, own in zip(both, pixels, strict=True):
            alone = model.explain(own, recipe=recipe, target=target, layer=layer)
            atol = 1e-4 * np.abs(alone.tokens).max()
            np.testing.assert_allclose(found.tokens, alone.tokens, rtol=1e-3, atol=atol)
            assert found.provenance["run"]["class"] == alone.provenance["run"]["class"]
            for name, score in alone.scores.items():
                assert float(found.scores[name]) == pytest.approx(float(score), rel=1e-3, abs=1e-3)


def test_images_of_different_sizes_have_the_region_each_at_its_place():
    model = wrapped(processor=SCENES["squash"])
    images = [photo(40, 60), photo(80, 30)]
    target = Class(1, region=Region(box=(5, 5, 25, 35)))
    both = model.explain(images, target=target, layer=3)
    for found, image in zip(both, images, strict=True):
        alone = model.explain(image, target=target, layer=3)
        np.testing.assert_allclose(found.tokens, alone.tokens, rtol=1e-3, atol=1e-4 * np.abs(alone.tokens).max())
    assert float(both[0].scores["segmentation_logit"]) != pytest.approx(float(both[1].scores["segmentation_logit"]))


def test_several_classes_of_one_image_are_a_list():
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    present = own_logits(model.adapter.module, pixels[None]).argmax(1).unique().tolist()
    assert len(present) > 1
    found = model.explain(pixels, target=present, layer=3)
    for one, k in zip(found, present, strict=True):
        alone = model.explain(pixels, target=k, layer=3)
        np.testing.assert_allclose(one.tokens, alone.tokens, atol=1e-4 * np.abs(alone.tokens).max())


@pytest.mark.parametrize("scale", ["probability", "log-probability"])
def test_scales_have_maps_of_their_own(scale):
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    region = Region(box=(0, 0, 48, 32))
    found = model.explain(pixels, target=Class(1, scale=scale, region=region), layer=3)
    logits = own_logits(model.adapter.module, pixels[None]).double()
    values = logits.log_softmax(1)[0, 1]
    wanted = values.exp().sum() if scale == "probability" else values.sum()
    assert found.provenance["run"]["target_value"] == pytest.approx(float(wanted), rel=1e-4)
    assert found.recipe.scale == scale
    with pytest.raises(vlcam.RecipeError, match="margin"):
        model.explain(pixels, target=Class(1, scale="margin", region=region), layer=3)


# Asking the model again


@pytest.mark.parametrize("region", [None, Region(box=(10, 4, 30, 28))])
def test_score_cam_masks_the_image_and_keeps_the_region(region):
    module, pixels = made(), models.pixels(height=32, width=48)
    model = wrapped(module)
    logits = own_logits(module, pixels[None])
    k = int(logits.argmax(1).flatten().mode().values)
    kept = (logits.argmax(1) == k)[0].float()  # of the whole image, and not of each masked one
    if region is not None:
        kept = torch.zeros(16, 24)
        kept[2:14, 5:15] = 1
    choices = {"layer": 3, "target": Class(k, scale="probability", region=region), "relu": "none"}
    found = model.explain(pixels, recipe="torchcam-scorecam", **choices)
    features = model.capture(pixels, stream="vision", site="F1", layers=3, target=k)
    (activation,) = features.activations.values()
    masks = activation[0, 1:].T.reshape(32, 1, 4, 6)
    low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
    laid = nn.functional.interpolate((masks - low) / (high - low), (32, 48), mode="bilinear", align_corners=False)
    scores = torch.stack([(own_logits(module, pixels[None] * mask).softmax(1)[0, k] * kept).sum() for mask in laid])
    wanted = (activation[0, 1:] * scores.softmax(0)).sum(-1).reshape(4, 6)
    np.testing.assert_allclose(found.tokens, wanted, rtol=1e-3, atol=1e-4)
    small = model.explain(pixels, recipe="torchcam-scorecam", batch=5, **choices)
    np.testing.assert_allclose(small.tokens, found.tokens, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", ["ablationcam", "vit-reciprocam"])
def test_recipes_that_ask_take_a_region(recipe):
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    one, other = (
        model.explain(pixels, recipe=recipe, layer=2, target=Class(1, region=Region(box=box)), relu="none").tokens
        for box in ((0, 0, 20, 20), (30, 5, 48, 32))
    )
    assert np.isfinite(one).all()
    assert not np.allclose(one, other)


@pytest.mark.parametrize("recipe", ["tam-transition", "beyond-intuition-headwise"])
def test_a_path_of_dimmed_images_keeps_the_predicted_pixels(recipe):
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    won = own_logits(model.adapter.module, pixels[None]).argmax(1)[0]
    k = int(won.flatten().mode().values)
    mask = (won == k).repeat_interleave(2, 0).repeat_interleave(2, 1)
    wanted = model.explain(pixels, recipe=recipe, layer=range(4), target=Class(k, region=Region.of(mask)))
    found = model.explain(pixels, recipe=recipe, layer=range(4), target=k)
    np.testing.assert_allclose(found.tokens, wanted.tokens, rtol=1e-3, atol=1e-5)


# Records


@pytest.mark.parametrize("recipe", ["pgc-gradcam", "attention-rollout", "pgc-scorecam"])
@pytest.mark.parametrize("what", ["predicted", "box", "mask"])
def test_an_explanation_is_saved_opened_and_verified(tmp_path, recipe, what):
    mask = np.random.default_rng(5).random((40, 60)) < 0.2
    region = {"predicted": None, "box": Region(box=(7, 5.5, 41, 33)), "mask": Region.of(mask)}[what]
    model = wrapped(processor=SCENES["crop"])
    layer = {} if recipe == "attention-rollout" else {"layer": 2}
    logits = own_logits(model.adapter.module, SCENES["crop"](photo(), return_tensors="pt")["pixel_values"].float())
    k = int(logits.argmax(1).flatten().mode().values)
    found = model.explain(photo(), recipe=recipe, target=Class(k, region=region), **layer)
    opened = vlcam.open(found.save(tmp_path / "map.png"))
    assert opened.record() == found.record()
    assert opened.provenance["run"]["class"]["region"] == (region and region.to_dict())
    outcome = opened.verify(wrapped(processor=SCENES["crop"]))
    assert outcome.identical
    assert outcome.differences == ()
    if region is not None:
        assert Region.from_dict(opened.provenance["run"]["class"]["region"]) == region


def test_scores_of_a_recipe_without_target_are_those_of_the_region():
    model, pixels, region = wrapped(), models.pixels(height=32, width=48), Region(box=(2, 2, 20, 20))
    one = model.explain(pixels, recipe="attention-rollout", target=Class(1, region=region))
    other = model.explain(pixels, layer=3, target=Class(1, region=region))
    assert one.provenance["run"]["class"] == other.provenance["run"]["class"]
    for name, score in other.scores.items():
        assert float(one.scores[name]) == pytest.approx(float(score), rel=1e-5)
    assert dict(model.scores(pixels))["segmentation_probability"].kind == "mean probability of the region"


# Wrong uses


def test_a_class_that_is_nowhere_predicted_is_an_error():
    module = made()
    with torch.no_grad():
        module.decode_head.classifier.bias[4] -= 1e4
    model = wrapped(module)
    with pytest.raises(vlcam.EvidenceError, match=r"class 4: the model predicts it at no pixel; .*region=\.\.\.\)"):
        model.explain(models.pixels(), target="lamp", layer=3)
    found = model.explain(models.pixels(), target=Class("lamp", region=Region(box=(0, 0, 32, 32))), layer=3)
    assert found.status == "ok"


def test_regions_that_do_not_fit_the_image_are_errors():
    model, image = wrapped(processor=SCENES["crop"]), photo()
    edge = np.zeros((40, 60))
    edge[:, :2] = 1
    for region in (Region(box=(0, 0, 3, 40)), Region.of(edge)):
        with pytest.raises(vlcam.InputError, match="outside of what the model saw"):
            model.explain(image, target=Class(1, region=region), layer=3)
    with pytest.raises(vlcam.InputError, match=r"mask of shape \(60, 40\) for an image of \(40, 60\)"):
        model.explain(image, target=Class(1, region=Region.of(edge.T)), layer=3)


def test_a_region_belongs_into_a_class():
    model, region = wrapped(), Region(box=(0, 0, 32, 32))
    with pytest.raises(vlcam.VlcamError, match="region"):
        model.explain(models.pixels(), target=lambda logits: logits[:, 1].sum((1, 2)), region=region, layer=3)
    with pytest.raises(vlcam.RecipeError, match="give a whole number or a label"):
        model.explain(models.pixels(), target=Class(lambda logits: logits, region=region), layer=3)
    with pytest.raises(vlcam.RecipeError, match="tells the class of an image, and not of its pixels"):
        vlcam.wrap(models.classifier("beit")).explain(models.pixels(), target=Class(1, region=region))
    with pytest.raises(vlcam.UnknownNameError, match="no class 5; the model has classes 0 to 4"):
        model.explain(models.pixels(), target=Class(5, region=region), layer=3)


def test_a_callable_reads_the_logits_of_all_places():
    model, pixels = wrapped(), models.pixels(height=32, width=48)
    wanted = model.explain(pixels, target=Class(1, region=Region(box=(0, 0, 48, 32))), layer=3)
    found = model.explain(pixels, target=lambda logits: logits[:, 1].sum((1, 2)), layer=3)
    np.testing.assert_allclose(found.tokens, wanted.tokens, rtol=1e-4, atol=1e-5 * np.abs(wanted.tokens).max())
    with pytest.raises(vlcam.InputError, match=r"returned \(1, 16, 24\)"):
        model.explain(pixels, target=lambda logits: logits[:, 1], layer=3)


@pytest.mark.parametrize("size", [(8, 32), (32, 8), (8, 8)])
def test_a_grid_that_the_decoder_cannot_halve_is_refused(size):
    with pytest.raises(vlcam.InputError, match="cannot halve; give images of at least 16 x 16 pixels"):
        wrapped().explain(models.pixels(height=size[0], width=size[1]), layer=3)


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(vlcam.AdapterError, match="labels has 2 names, but the model has 5 classes"):
        wrapped(labels=NAMES[:2])
    module = made()
    module.decode_head.classifier = nn.Sequential(nn.Conv2d(32, 8, 1), nn.Conv2d(8, 6, 1))
    with pytest.raises(vlcam.AdapterError, match=r"returned \(1, 6, 16, 16\), expected class logits \(1, 5, height, w"):
        wrapped(module).explain(models.pixels(), layer=3)


# The model is left as found


@pytest.mark.parametrize("training", [False, True])
def test_a_pass_leaves_the_model_as_it_was(training):
    """Transformers sets hooks of its own at the first run of the model, for good, with or without vlcam."""
    module, pixels = made(), models.pixels(height=32, width=48, batch=2)
    module.beit.layers[2].register_forward_hook(lambda *_: None)
    own_logits(module, pixels)
    module.beit.layers[1].register_forward_hook(lambda *_: None)
    module.train(training)
    before, orders = state(module), [list(layer._forward_hooks) for layer in module.beit.layers]
    expected = own_logits(made(), pixels)
    model = wrapped(module)
    found = model.capture(pixels, stream="vision", site="F6", target=1)
    torch.testing.assert_close(found.outputs["segmentation"], expected, rtol=1e-5, atol=1e-3)
    model.explain(pixels, target=Class(1, region=Region(box=(0, 0, 20, 20))), layer=3)
    model.explain(pixels[0], recipe="pgc-scorecam", target=Class(1, region=Region(box=(0, 0, 20, 20))), layer=3)
    with pytest.raises(vlcam.EvidenceError):
        model.explain(pixels)
    assert_same(before, state(module))
    assert orders == [list(layer._forward_hooks) for layer in module.beit.layers]
    assert all(part.num_batches_tracked == 0 for part in module.modules() if isinstance(part, nn.BatchNorm2d))


def test_hooks_that_came_during_the_first_run_stay_behind():
    module, pixels = made(), models.pixels(height=32, width=48)
    before = [list(layer._forward_hooks) for layer in module.beit.layers]
    wrapped(module).capture(pixels, stream="vision", site="F6", target=1)
    after = [list(layer._forward_hooks) for layer in module.beit.layers]
    assert [len(keys) - len(own) for keys, own in zip(after, before, strict=True)] == [1] * 6  # transformers' own
    torch.testing.assert_close(own_logits(module, pixels[None]), own_logits(made(), pixels[None]), rtol=0, atol=0)


# Types, sizes, loading


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_give_the_same_map_within_their_precision(dtype):
    pixels, region = models.pixels(height=32, width=48), Region(box=(3, 3, 40, 29))
    single = wrapped().explain(pixels, target=Class(1, region=region), layer=2, relu="none")
    model = wrapped(made().to(dtype))
    found = model.explain(pixels, target=Class(1, region=region), layer=2, relu="none")
    near = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 1e-4}[dtype]
    assert found.tokens.dtype == np.float32
    assert np.abs(found.tokens - single.tokens).max() < near * np.abs(single.tokens).max()
    logits = model.capture(pixels, stream="vision", site="F1", target=Class(1, region=region)).outputs["segmentation"]
    shares = torch.from_numpy(on_model_input(region, found.placement)).reshape(16, 2, 24, 2).mean((1, 3))
    total, mean = slow_mean(logits[0], 1, shares)
    assert found.provenance["run"]["target_value"] == pytest.approx(total, rel=1e-5)
    assert float(found.scores["segmentation_logit"]) == pytest.approx(mean, rel=1e-5)


def test_a_whole_checkpoint_loads(tmp_path):
    made().save_pretrained(tmp_path)
    SCENES["squash"].save_pretrained(tmp_path)
    model = vlcam.load(tmp_path)
    assert type(model.adapter) is BeitSegmentationHF
    found = model.explain(photo(), target="tree", layer=3)
    again = wrapped(processor=SCENES["squash"]).explain(photo(), target="tree", layer=3)
    np.testing.assert_array_equal(found.tokens, again.tokens)
    assert found.tokens.shape == (4, 6)
    sized = vlcam.load(tmp_path, image_size=(64, 32), labels=["a", "b", "c", "d", "e"])
    assert sized.explain(photo(), target="b", layer=3).tokens.shape == (8, 4)
    assert sized.adapter.options == {"image_size": [64, 32], "labels": ["a", "b", "c", "d", "e"]}


# SegFormer

BLOCKS = (0, 1, 1, 2, 3, 3)
"""The stage of every block."""


def segformer(**changes):
    torch.manual_seed(0)
    own = {
        "hidden_sizes": [8, 16, 24, 32],
        "num_attention_heads": [1, 2, 3, 4],
        "depths": [1, 2, 1, 2],
        "decoder_hidden_size": 16,
        "id2label": LABELS,
    }
    return randomised(SegformerForSemanticSegmentation(SegformerConfig(**{**own, **changes})))


def test_segformer_has_a_grid_per_stage_and_attention_where_keys_are_tokens():
    model, pixels = wrapped(segformer()), models.pixels(height=64, width=96)
    assert type(model.adapter) is SegformerHF
    stream = model.anatomy.stream("vision")
    assert (len(stream.blocks), stream.width, stream.heads, stream.windowed) == (6, 32, 4, False)
    assert stream.tokens.startswith("128 x 128 patches in block 0, 64 x 64 in blocks 1-2, 32 x 32 in block 3, 16 x 16")
    assert [("F2" in block.sites) for block in stream.blocks] == [False] * 4 + [True] * 2
    assert "keys are tokens merged 8 x 8 in block 0, 4 x 4 in blocks 1-2, 2 x 2 in block 3: those" in str(model.anatomy)
    for layer, stage in enumerate(BLOCKS):
        found = model.explain(pixels, target=1, layer=layer)
        assert found.tokens.shape == (64 // 4 // 2**stage, 96 // 4 // 2**stage)
        assert found.heatmap.shape == (64, 96)
    assert model.explain(pixels, recipe="raw-attention").tokens.shape == (2, 3)
    assert model.explain(pixels, recipe="chefer-generic", layer=(4, 5)).tokens.shape == (2, 3)
    with pytest.raises(vlcam.UnknownNameError, match=r"F2 of vision block 0 does not exist: .* tokens merged 8 x 8"):
        model.explain(pixels, recipe="raw-attention", layer=0)
    with pytest.raises(
        vlcam.UnknownNameError, match="F2 of vision block 0 does not exist: its queries are tokens, but"
    ):
        model.explain(pixels, recipe="attention-rollout")
    with pytest.raises(vlcam.RecipeError, match="whose grids have different sizes; choose blocks of one stage"):
        model.explain(pixels, recipe="pgc-gradcam", layer="all", layer_rule="mean")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_blocks_of_segformer_add_up_and_taps_change_no_logit(implementation):
    module, pixels = segformer(), models.pixels(height=64, width=96, batch=2)
    module.set_attn_implementation(implementation)
    expected = own_logits(module, pixels)
    assert expected.shape == (2, 5, 16, 24)
    model = wrapped(module)
    features = captured(model, pixels, *(site for site in SITES if site != "F2"), target=summed())
    attention = captured(model, pixels, "F2", target=summed(), layers=(4, 5))
    for found in (features, attention):
        rounding = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found.outputs["segmentation"], expected, atol=rounding, rtol=0)
    at = {(tap.layer, tap.site): tensor for tap, tensor in features.activations.items()}
    for layer, block in enumerate(model.anatomy.stream("vision").blocks):
        heads = block.sites["F3_HEADS"].module
        torch.testing.assert_close(heads(at[layer, "F3_HEADS"]), at[layer, "F3"], atol=1e-5, rtol=1e-5)
        if layer and BLOCKS[layer] == BLOCKS[layer - 1]:
            middle = at[layer - 1, "F6"] + at[layer, "F3"]
            torch.testing.assert_close(block.sites["F4"].module(middle), at[layer, "F4"], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(middle + at[layer, "F5"], at[layer, "F6"], atol=1e-5, rtol=1e-5)
    for tap, weights in attention.activations.items():
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
        attend = model.anatomy.stream("vision").blocks[tap.layer].sites["F2"].module
        values = attend.v_proj(at[tap.layer, "F1"]).unflatten(-1, (4, 8)).transpose(1, 2)
        mixed = (weights @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixed, at[tap.layer, "F3_HEADS"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("site", [site for site in SITES if site != "F2"])
def test_gradients_of_segformer_are_those_of_autograd(site):
    module, pixels, box = segformer(), models.pixels(height=64, width=96), Region(box=(10, 6, 70, 50))
    model = wrapped(module)
    region = torch.from_numpy(on_model_input(box, model.adapter.accept_pixels(pixels[None]).placements[0]))
    region = region.reshape(16, 4, 24, 4).mean((1, 3))
    readings, kept, handles = [block.sites[site] for block in model.anatomy.stream("vision").blocks], {}, []
    for layer, reading in enumerate(readings):

        def keep(_, args, output=None, layer=layer):
            first = args[0] if output is None else output
            kept[layer] = first[0] if isinstance(first, tuple) else first

        part = reading.module
        hook = part.register_forward_hook if reading.how == "output" else part.register_forward_pre_hook
        handles.append(hook(keep))
    y = (module(pixels[None]).logits[0, 1] * region).sum()
    wanted = torch.autograd.grad(y, [kept[layer] for layer in range(6)])
    for handle in handles:
        handle.remove()
    found = model.capture(pixels, stream="vision", site=site, target=Class(1, region=box))
    assert float(found.target) == pytest.approx(float(y.detach()), rel=1e-4)
    for gradient, hand in zip(found.gradients.values(), wanted, strict=True):
        assert bool((hand.abs().sum(-1) > 0).all())  # every token of every block is on the path
        torch.testing.assert_close(gradient, hand, atol=1e-5 * float(hand.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("region", [None, Region(box=(8, 8, 50, 30))])
def test_segformer_is_saved_and_verified_and_a_batch_is_as_if_alone(tmp_path, region):
    processor = BeitImageProcessorPil(size={"height": 64, "width": 96}, do_center_crop=False)
    model, images = wrapped(segformer(), processor), [photo(), photo(80, 100, seed=4)]
    both = model.explain(images, target=Class(None, region=region))
    for number, (found, image) in enumerate(zip(both, images, strict=True)):
        alone = model.explain(image, target=Class(None, region=region))
        np.testing.assert_allclose(found.tokens, alone.tokens, rtol=1e-3, atol=1e-4 * np.abs(alone.tokens).max())
        outcome = vlcam.open(alone.save(tmp_path / f"{number}.png")).verify(wrapped(segformer(), processor))
        assert outcome.identical
        assert outcome.differences == ()


@pytest.mark.parametrize("training", [False, True])
def test_segformer_is_left_as_it_was(training):
    module, pixels = segformer(), models.pixels(height=64, width=96)
    expected = own_logits(module, pixels[None])
    module.train(training)
    before = state(module)
    found = wrapped(module).capture(pixels, stream="vision", site="F6", target=1)
    torch.testing.assert_close(found.outputs["segmentation"], expected, rtol=1e-5, atol=1e-3)
    wrapped(module).explain(pixels, recipe="ablationcam", target=Class(1, region=Region(box=(0, 0, 50, 50))))
    assert_same(before, state(module))


def test_segformers_that_do_not_fit_are_refused():
    for size in ((48, 64), (64, 80), (16, 32)):
        with pytest.raises(vlcam.InputError, match="multiples of 32, so that the grid of every stage"):
            wrapped(segformer()).explain(models.pixels(height=size[0], width=size[1]))
    with pytest.raises(vlcam.AdapterError, match=r"strides=\[4, 4, 2, 2\].*halve the grid"):
        wrapped(segformer(strides=[4, 4, 2, 2]))
    with pytest.raises(vlcam.AdapterError, match="reshape_last_stage=False"):
        wrapped(SegformerForSemanticSegmentation(SegformerConfig(reshape_last_stage=False)))


def test_segformer_loads(tmp_path):
    segformer().save_pretrained(tmp_path)
    BeitImageProcessorPil(size={"height": 64, "width": 96}, do_center_crop=False).save_pretrained(tmp_path)
    model = vlcam.load(tmp_path, dtype="bfloat16")
    assert type(model.adapter) is SegformerHF
    found = model.explain(photo(), target="tree")
    single = vlcam.load(tmp_path).explain(photo(), target="tree")
    assert found.tokens.shape == single.tokens.shape == (2, 3)
    assert found.status == "ok"
    assert vlcam.load(tmp_path, image_size=(32, 64)).explain(photo(), target="tree").tokens.shape == (1, 2)
