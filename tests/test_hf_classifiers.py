"""The adapters of Hugging Face classifiers: sites that reproduce the model, sizes, processors, labels, loading."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from models import ASKS, COMMON, FFN, KINDS, LIVE, PREFIX
from models import classifier as made
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BeitConfig,
    BeitModel,
    BitImageProcessor,
    Dinov2Config,
    Dinov2Model,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)
from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import Tap
from vlcam.capture import capture
from vlcam.images import open_image
from vlcam.targets import Target
from vlcam_adapters.classifier import ImageSizes

SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
THIRD = Target("class", "class_logit", lambda logits: logits[:, 2], classes=(2,))


def adapter_of(module, processor=None, **options):
    return vlcam.wrap(module, processor, **options).adapter


def inputs_of(adapter, pixels):
    return Inputs(adapter.accept_pixels(pixels), None, tuple(range(len(pixels))))


def captured(adapter, pixels, *sites, target=THIRD):
    depth = len(adapter.anatomy.stream("vision").blocks)
    taps = [Tap("vision", layer, site) for site in sites for layer in range(depth)]
    (found,) = capture(adapter, inputs_of(adapter, pixels), taps, [target])
    return found


def at(tensors, site):
    """The tensors of one site, in the order of the blocks."""
    return [tensor for tap, tensor in tensors.items() if tap.site == site]


def own_logits(module, pixels, **options):
    with torch.no_grad():
        return module(pixels, **options).logits


def scales(kind, module, layer):
    """What LayerScale multiplies the contributions of attention and FFN by."""
    if kind.startswith("dinov2"):
        block = module.base_model.encoder.layer[layer]
        return block.layer_scale1.lambda1, block.layer_scale2.lambda1
    if kind.startswith("beit"):
        return module.base_model.layers[layer].lambda_1, module.base_model.layers[layer].lambda_2
    return 1.0, 1.0


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# Sites


def test_blocks_add_up_and_heads_are_projected(kind):
    module = made(kind)
    found = captured(adapter_of(module), models.pixels(batch=2), *SITES).activations
    for layer, block in enumerate(adapter_of(module).anatomy.stream("vision").blocks):
        first, second = scales(kind, module, layer)
        got = {site: at(found, site)[layer] for site in SITES}
        projection = block.sites["F3_HEADS"].module
        torch.testing.assert_close(projection(got["F3_HEADS"]), got["F3"], atol=1e-5, rtol=1e-5)
        if layer:
            middle = at(found, "F6")[layer - 1] + first * got["F3"]
            torch.testing.assert_close(block.sites["F4"].module(middle), got["F4"], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(middle + second * got["F5"], got["F6"], atol=1e-5, rtol=1e-5)


def test_attention_times_values_gives_the_heads(kind):
    module = made(kind)
    adapter = adapter_of(module)
    found = captured(adapter, models.pixels(batch=2), *SITES).activations
    for layer, block in enumerate(adapter.anatomy.stream("vision").blocks):
        attention = at(found, "F2")[layer]
        tokens = len(adapter.prefix) + 16
        assert attention.shape == (2, 4, tokens, tokens)
        assert bool((attention >= 0).all())
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, tokens))
        attend = block.sites["F2"].module
        values = attend.v_proj(at(found, "F1")[layer]).unflatten(-1, (4, 8)).transpose(1, 2)
        mixed = (attention @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(attend.o_proj(mixed), at(found, "F3")[layer], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tapping_changes_no_logit(kind, implementation):
    module = made(kind)
    module.set_attn_implementation(implementation)
    adapter, pixels = adapter_of(module), models.pixels(batch=3)
    assert adapter.attention == implementation
    expected = own_logits(module, pixels)
    found = captured(adapter, pixels, *SITES)
    rounding = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found.outputs["class"], expected, atol=rounding, rtol=0)
    torch.testing.assert_close(found.target, expected[:, 2], atol=rounding, rtol=0)
    alone = captured(adapter, pixels[1:2], "F2")
    torch.testing.assert_close(at(found.gradients, "F2")[1][1:2], at(alone.gradients, "F2")[1], atol=1e-6, rtol=1e-4)


def test_the_notes_say_where_the_last_block_has_a_gradient(kind):
    adapter = adapter_of(made(kind))
    gradients = captured(adapter, models.pixels(batch=1), *SITES).gradients
    for site in SITES[1:]:
        rows = at(gradients, site)[-1][0].abs()
        rows = rows.sum((0, 2)) if site == "F2" else rows.sum(-1)
        assert torch.nonzero(rows).flatten().tolist() == list(LIVE[kind]), site
    assert bool((at(gradients, "F1")[-1][0].abs().sum(-1) > 0).all())
    notes = " ".join(adapter.anatomy.notes)
    assert {
        (0,): "reads [CLS] alone",
        (0, 1): "the mean of two heads, one on [CLS] and one on [DIST]",
    }.get(tuple(LIVE[kind]), "the mean of the patches") in notes
    scaled = kind.startswith(("dinov2", "beit")) and kind != "beit-plain"
    assert ("LayerScale" in notes) == scaled
    assert ("bias of relative positions" in notes) == (kind in ("beit", "beit-shared", "beit-cls"))
    assert ("[DIST] has no head" in notes) == (kind == "deit")


def test_anatomy_says_what_the_tokens_are(kind):
    anatomy = adapter_of(made(kind)).anatomy
    stream = anatomy.stream("vision")
    assert (len(stream.blocks), stream.width, stream.heads, stream.trunk) == (3, 32, 4, True)
    before = {1: "[CLS]", 2: "[CLS], [DIST]", 5: "[CLS], 4 registers"}[len(PREFIX.get(kind, ("cls",)))]
    assert stream.tokens == f"{before}, then 4 x 4 patches in raster order"
    assert anatomy.targets == ("class: logit, probability, log-probability, margin, finer",)
    assert anatomy.rows()[0][2] == " ".join(SITES)


def test_a_block_is_read_by_the_models_own_head_on_the_mean_of_all_tokens(kind):
    module = made(kind)
    adapter = adapter_of(module)
    inputs = inputs_of(adapter, models.pixels(batch=2))
    tokens = torch.randn(2, 9, 32)
    mean, model = tokens.mean(1), module.base_model
    with torch.no_grad():
        found = adapter.read_block("class", tokens, inputs)
        if kind in ("beit", "beit-shared", "beit-plain"):
            expected = module.classifier(model.pooler.layernorm(mean))
        elif kind == "deit-teacher":
            normed = model.layernorm(mean)
            expected = (module.cls_classifier(normed) + module.distillation_classifier(normed)) / 2
        elif kind.startswith("dinov2"):
            normed = model.layernorm(mean)
            expected = module.classifier(torch.cat([normed, normed], -1))
        else:
            expected = module.classifier(model.layernorm(mean))
    torch.testing.assert_close(found, expected)


def test_a_pass_leaves_the_model_as_it_was(kind):
    module = made(kind)
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flags = [parameter.requires_grad for parameter in module.parameters()]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    captured(adapter_of(module), models.pixels(batch=1), *SITES)
    assert all(part.training for part in module.modules())
    assert flags == [parameter.requires_grad for parameter in module.parameters()]
    assert hooks == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


# Sizes and grid


def options_of(kind):
    return {"interpolate_pos_encoding": True} if kind in ASKS else {}


@pytest.mark.parametrize("size", [(32, 32), (16, 64), (64, 24), (48, 48)])
def test_only_the_token_of_the_changed_patch_moves(kind, size):
    module = made(kind)
    adapter = adapter_of(module, **options_of(kind))
    before = models.pixels(height=size[0], width=size[1], batch=1)
    after = before.clone()
    after[..., 8:16, -8:] += 1.0
    seen = []
    # The block's input is what the first LayerNorm takes.
    first = adapter.anatomy.stream("vision").blocks[0].sites["F1"].module
    handle = first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for pixels in (before, after):
        inputs = inputs_of(adapter, pixels)
        with torch.no_grad():
            torch.testing.assert_close(adapter.trunk(inputs), own_logits(module, pixels, **interpolating(kind, size)))
    handle.remove()
    rows, columns = inputs.images.grid
    assert (rows * 8, columns * 8) == size
    assert adapter.prefix == PREFIX.get(kind, ("cls",))
    moved = (seen[0] - seen[2]).abs().sum(-1)[0]
    assert len(moved) == len(adapter.prefix) + rows * columns
    assert torch.nonzero(moved[len(adapter.prefix) :].reshape(rows, columns)).tolist() == [[1, columns - 1]]
    assert not moved[: len(adapter.prefix)].any()


def interpolating(kind, size):
    return {"interpolate_pos_encoding": size != (32, 32)} if kind in ASKS else {}


def test_another_size_is_on_record(kind):
    adapter = adapter_of(made(kind), **options_of(kind))
    step = {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 32]}
    steps = adapter.accept_pixels(models.pixels(height=48, batch=1)).steps[0]
    # Without any position embedding there is nothing to interpolate.
    assert (step in steps) == (kind != "beit-plain")
    assert adapter.accept_pixels(models.pixels(batch=1)).steps == (({"step": "given_preprocessed", "size": [32, 32]},),)


def test_sizes_that_a_model_cannot_take_are_refused(kind):
    adapter = adapter_of(made(kind))
    for height in (44, 4):
        with pytest.raises(vlcam.InputError, match=rf"\({height}, 32\).*must be multiples of the patch, 8"):
            adapter.accept_pixels(models.pixels(height=height, batch=1))
    if kind in ASKS:
        with pytest.raises(vlcam.InputError, match=r"\(48, 32\).*trained at \(32, 32\).*interpolate_pos_encoding=True"):
            adapter.accept_pixels(models.pixels(height=48, batch=1))
        with pytest.raises(vlcam.InputError, match=r"interpolate_pos_encoding=True"):
            adapter_of(made(kind), image_size=(48, 32))


def test_a_patch_that_is_not_square_is_named_with_both_sides():
    sizes = ImageSizes((8, 16), (32, 64), others=True)
    assert sizes.grid((32, 64)) == (4, 4)
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8 x 16"):
        sizes.check((32, 40))


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize(
    ("changes", "grid"),
    [({"image_size": (16, 64)}, (2, 8)), ({"image_size": (32, 64), "patch_size": (8, 16)}, (4, 4))],
)
def test_models_that_are_not_square_run_at_their_own_size(kind, changes, grid):
    module = made(kind, **changes)
    height, width = changes["image_size"]
    pixels = models.pixels(height=height, width=width, batch=1)
    for adapter in (adapter_of(module), adapter_of(module, interpolate_pos_encoding=True)):
        assert adapter.accept_pixels(pixels).grid == grid
        torch.testing.assert_close(captured(adapter, pixels, "F2").outputs["class"], own_logits(module, pixels))
        with pytest.raises(vlcam.InputError, match="square grids and patches only"):
            adapter.accept_pixels(models.pixels(height=64, width=64, batch=1))


def test_dinov2_takes_patches_that_are_not_square_on_a_square_grid():
    module = made("dinov2", image_size=(32, 64), patch_size=(8, 16))
    adapter, pixels = adapter_of(module), models.pixels(height=24, width=64, batch=1)
    assert adapter.accept_pixels(pixels).grid == (3, 4)
    torch.testing.assert_close(captured(adapter, pixels, "F2").outputs["class"], own_logits(module, pixels))


@pytest.mark.parametrize("kind", ["dinov2", "dinov2-registers", "beit"])
def test_tables_that_transformers_mixes_up_are_refused(kind):
    with pytest.raises(vlcam.AdapterError, match=r"trained at \(16, 64\).*only square grids"):
        adapter_of(made(kind, image_size=(16, 64)))


def test_beit_with_relative_positions_only_need_not_be_square():
    module = made("beit-cls", image_size=(16, 64))
    adapter, pixels = adapter_of(module), models.pixels(height=16, width=64, batch=1)
    assert adapter.accept_pixels(pixels).grid == (2, 8)
    torch.testing.assert_close(captured(adapter, pixels, "F2").outputs["class"], own_logits(module, pixels))
    assert "rows and columns exchanged" in adapter.anatomy.notes[-1]


# Processors

EXACT = {"height": 32, "width": 32}
CROPPING = {"size": {"height": 44, "width": 40}, "crop_size": EXACT}
SHORTER = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 24}}
PROCESSORS = {
    "exact": (ViTImageProcessorPil, {"size": EXACT}),
    "exact, torchvision": (ViTImageProcessor, {"size": EXACT}),
    "exact, beit": (BeitImageProcessorPil, {"size": EXACT}),
    "exact and crop": (DeiTImageProcessorPil, CROPPING),
    "shorter side and crop": (BitImageProcessorPil, SHORTER),
    "shorter side and crop, torchvision": (BitImageProcessor, SHORTER),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(150, 300), (300, 150), (170, 170), (40, 97)])
def test_a_painted_patch_is_found_where_the_placement_says(name, size):
    kind, settings = PROCESSORS[name]
    processor = kind(**settings)
    adapter = adapter_of(made("dinov2"), processor)
    blank = Image.new("RGB", (size[1], size[0]))
    placement = adapter.prepare_images([open_image(blank)]).placements[0]
    assert placement.original == size
    height, width = placement.model
    x0, y0, x1, y1 = placement.box
    # The square of the original that the model's pixels 8..16 show is painted white.
    down, across = (y1 - y0) / height, (x1 - x0) / width
    part = [round(x0 + 8 * across), round(y0 + 8 * down), round(x0 + 16 * across), round(y0 + 16 * down)]
    painted = blank.copy()
    painted.paste((255, 255, 255), part)
    prepared = adapter.prepare_images([open_image(painted)])
    assert prepared.pixel_values.shape == (1, 3, height, width)
    shown = adapter.display(prepared.pixel_values[0]).mean(0)
    assert float(shown[9:15, 9:15].min()) > 0.9
    shown[7:17, 7:17] = 0
    assert float(shown.abs().max()) < 0.1


def test_an_exact_resize_is_the_processors_own_and_on_record():
    processor = ViTImageProcessorPil(size=EXACT)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (30, 50, 3), np.uint8), "RGB")
    prepared = adapter_of(made("vit"), processor).prepare_images([open_image(image)])
    np.testing.assert_array_equal(prepared.pixel_values, processor(image, return_tensors="np")["pixel_values"])
    assert prepared.steps == (
        (
            {"step": "processor", "class": "ViTImageProcessorPil"},
            {"step": "resize", "to": [32, 32], "resample": "bilinear", "keeps_proportions": False},
            {"step": "rescale", "factor": pytest.approx(1 / 255)},
            {"step": "normalize", "mean": [0.5] * 3, "std": [0.5] * 3},
        ),
    )
    assert prepared.placements[0].box == (0, 0, 50, 30)


def test_each_image_has_its_own_steps_and_placement():
    processor = BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=EXACT)
    images = [Image.new("RGB", (60, 30)), Image.new("RGB", (20, 90))]
    prepared = adapter_of(made("dinov2"), processor).prepare_images([open_image(image) for image in images])
    assert prepared.pixel_values.shape == (2, 3, 32, 32)
    resizes = [next(step for step in steps if step["step"] == "resize") for steps in prepared.steps]
    crops = [next(step for step in steps if step["step"] == "center_crop") for steps in prepared.steps]
    assert [step["to"] for step in resizes] == [[40, 80], [180, 40]]
    assert all(step["shortest_edge"] == 40 and step["keeps_proportions"] for step in resizes)
    assert [step["corner"] for step in crops] == [[4, 24], [74, 4]]
    assert [placement.box for placement in prepared.placements] == [(18, 3, 42, 27), (2, 37, 18, 53)]


def test_an_image_size_is_resized_to_without_a_crop():
    adapter = adapter_of(made("dinov2"), BitImageProcessorPil(**SHORTER), image_size=(48, 64))
    prepared = adapter.prepare_images([open_image(Image.new("RGB", (50, 30)))])
    assert prepared.pixel_values.shape == (1, 3, 48, 64)
    assert prepared.grid == (6, 8)
    assert [step["step"] for step in prepared.steps[0]] == [
        *("processor", "resize", "rescale", "normalize", "interpolate_positions"),
    ]
    assert prepared.placements[0].box == (0, 0, 50, 30)
    assert adapter.options == {"image_size": [48, 64], "labels": None}
    assert "6 x 8 patches" in adapter.anatomy.stream("vision").tokens


def test_pixels_come_in_the_models_type(kind):
    adapter = adapter_of(made(kind).to(torch.bfloat16), ViTImageProcessorPil(size=EXACT))
    for prepared in (
        adapter.prepare_images([open_image(Image.new("RGB", (9, 9)))]),
        adapter.accept_pixels(torch.zeros(1, 3, 32, 32)),
    ):
        assert prepared.pixel_values.dtype == torch.bfloat16


def test_without_a_processor_an_image_is_an_error_and_a_tensor_is_not():
    adapter = adapter_of(made("vit"))
    with pytest.raises(vlcam.InputError, match=r"vlcam.wrap\(model, processor\).*already preprocessed"):
        adapter.prepare_images([open_image(Image.new("RGB", (32, 32)))])
    shown = adapter.display(models.pixels())
    assert (float(shown.min()), float(shown.max())) == (0, 1)


def test_pixels_are_shown_as_they_were_before_normalisation():
    image = Image.fromarray(np.random.default_rng(2).integers(0, 255, (32, 32, 3), np.uint8), "RGB")
    for settings in ({}, {"do_normalize": False}, {"do_rescale": False}, {"image_mean": 0.1, "image_std": 0.2}):
        adapter = adapter_of(made("vit"), ViTImageProcessorPil(size=EXACT, **settings))
        prepared = adapter.prepare_images([open_image(image)])
        shown = adapter.display(prepared.pixel_values[0]) * 255
        np.testing.assert_allclose(shown.permute(1, 2, 0), np.asarray(image), atol=1e-3)


class Tiling(ViTImageProcessorPil):
    def _preprocess(self, images, **options):
        made = super()._preprocess(images, **options)
        made["pixel_values"] = np.stack(made["pixel_values"])[..., :16]
        return made


class OtherProcessor:
    do_resize = True
    size = EXACT


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (ViTImageProcessorPil(size={"shortest_edge": 32}), r"'shortest_edge': 32.*knows processors that"),
        (ViTImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64}), "'longest_edge': 64"),
        (ViTImageProcessorPil(size=EXACT, do_resize=False), "do_resize=False"),
        (ViTImageProcessorPil(size=EXACT, do_pad=True), "do_pad"),
        (BitImageProcessorPil(size={"shortest_edge": 24}, crop_size=EXACT), "no larger than that"),
        (OtherProcessor(), "OtherProcessor.*an unknown class"),
        (object(), "processor=object: give the model's image processor"),
    ],
)
def test_a_processor_that_frames_otherwise_is_refused(processor, words):
    with pytest.raises(vlcam.AdapterError, match=words):
        adapter_of(made("vit"), processor)


def test_a_processor_that_does_not_do_what_it_says_is_refused():
    adapter = adapter_of(made("vit"), Tiling(size=EXACT))
    with pytest.raises(vlcam.AdapterError, match=r"Tiling made \(1, 3, 32, 16\).*expected \(1, 3, 32, 32\)"):
        adapter.prepare_images([open_image(Image.new("RGB", (9, 9)))])


@pytest.mark.parametrize("size", [64, "64", (64,), (32.0, 32.0), (True, 32)])
@pytest.mark.parametrize("processor", [None, ViTImageProcessorPil(size=EXACT)])
def test_an_image_size_is_two_whole_numbers(processor, size):
    with pytest.raises(vlcam.AdapterError, match=r"give \(height, width\)"):
        adapter_of(made("dinov2"), processor, image_size=size)


# Labels

NAMES = ["a bee", "a cat", "a dog", "an elk", "a fox"]


def test_labels_are_those_of_the_configuration_or_the_users():
    named = made("vit", id2label=dict(enumerate(NAMES)), num_labels=5)
    assert list(adapter_of(named).labels) == NAMES
    assert list(adapter_of(made("vit")).labels) == [f"LABEL_{index}" for index in range(5)]
    given = adapter_of(made("vit"), labels=NAMES)
    assert list(given.labels) == NAMES
    assert given.options == {"image_size": None, "interpolate_pos_encoding": False, "labels": NAMES}


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(vlcam.AdapterError, match="labels has 2 names, but the model has 5 classes"):
        adapter_of(made("vit"), labels=NAMES[:2])
    for labels in ("a bee", [1, 2, 3, 4, 5], 5):
        with pytest.raises(vlcam.AdapterError, match="give a list of class names"):
            adapter_of(made("vit"), labels=labels)
    module = made("vit")
    module.classifier = nn.Linear(32, 7)
    with pytest.raises(vlcam.AdapterError, match=r"the configuration \(id2label\) names 5 classes.*has 7 classes"):
        adapter_of(module)
    assert len(adapter_of(module, labels=[*NAMES, "a gnu", "a hen"]).labels) == 7
    module.config.id2label = {}
    nameless = adapter_of(module)
    assert nameless.labels == ()
    assert nameless.trunk(inputs_of(nameless, models.pixels(batch=2))).shape == (2, 7)


def test_a_head_of_several_layers_is_counted_when_it_runs():
    module = made("vit")
    module.classifier = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 6))
    adapter = adapter_of(module)
    with pytest.raises(vlcam.AdapterError, match=r"returned \(1, 6\), expected class logits \(1, 5\)"):
        adapter.trunk(inputs_of(adapter, models.pixels(batch=1)))
    named = adapter_of(module, labels=[*NAMES, "a gnu"])
    torch.testing.assert_close(
        named.trunk(inputs_of(named, models.pixels(batch=1))), own_logits(module, models.pixels(batch=1))
    )


@pytest.mark.parametrize("kind", ["vit", "deit-teacher", "dinov2", "beit"])
def test_a_model_without_classes_is_refused(kind):
    with pytest.raises(vlcam.AdapterError, match=r"no classifier \(num_labels=0\)"):
        adapter_of(made(kind, num_labels=0))


@pytest.mark.parametrize(
    ("model", "config", "extra"),
    [(ViTModel, ViTConfig, FFN), (Dinov2Model, Dinov2Config, {}), (BeitModel, BeitConfig, FFN)],
)
def test_a_model_that_embeds_only_is_accepted_by_no_adapter(model, config, extra):
    with pytest.raises(vlcam.AdapterError, match=rf"no adapter accepts.*{model.__name__}"):
        vlcam.wrap(model(config(**{**COMMON, **extra})))


def test_a_model_of_other_channels_is_refused():
    with pytest.raises(vlcam.AdapterError, match="takes 1 channels"):
        adapter_of(made("vit", num_channels=1))


def test_an_unknown_option_lists_those_there_are():
    with pytest.raises(vlcam.UnknownNameError, match="'image_size', 'interpolate_pos_encoding', 'labels'"):
        adapter_of(made("vit"), colour=1)
    with pytest.raises(
        vlcam.UnknownNameError, match="no option 'interpolate_pos_encoding'; it has 'image_size', 'labels'"
    ):
        adapter_of(made("beit"), interpolate_pos_encoding=True)


# Loading and wrapping


@pytest.fixture
def checkpoint(kind, tmp_path):
    made(kind).save_pretrained(tmp_path)
    BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=EXACT).save_pretrained(tmp_path)
    return tmp_path


def test_a_whole_checkpoint_loads(checkpoint, kind):
    adapter = vlcam.load(checkpoint, dtype="float64", labels=NAMES).adapter
    assert type(adapter.module) is KINDS[kind][0]
    assert type(adapter.processor) is BitImageProcessorPil
    assert not adapter.module.training
    pixels = models.pixels(batch=1)
    torch.testing.assert_close(
        adapter.trunk(inputs_of(adapter, pixels)), own_logits(made(kind).double(), pixels.double())
    )
    again = vlcam.load(checkpoint, **adapter.options).adapter
    assert again.options == adapter.options


@pytest.mark.parametrize("kind", ["vit", "dinov2-registers", "beit"])
def test_a_checkpoint_without_some_weights_is_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "classifier" not in k}, file, {"format": "pt"})
    with pytest.raises(vlcam.AdapterError, match=r"lacks 2 of the model.s weights: classifier.bias, classifier.weight"):
        vlcam.load(checkpoint)


@pytest.mark.parametrize("kind", ["vit"])
def test_weights_of_another_shape_and_missing_files_are_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "classifier.weight": torch.zeros(6, 32)}, file, {"format": "pt"})
    with pytest.raises(vlcam.AdapterError, match=r"lacks 1.*classifier.weight \(has shape \(6, 32\), not \(5, 32\)\)"):
        vlcam.load(checkpoint)
    save_file(weights, file, {"format": "pt"})
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded"):
        vlcam.load(checkpoint)


def test_wrappers_are_looked_through(kind):
    module = made(kind)
    for wrapped in (nn.DataParallel(module), torch.compile(module)):
        assert adapter_of(wrapped).module is module
