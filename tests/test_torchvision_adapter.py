"""The torchvision adapter: sites that reproduce the model, its one size, the transforms of its weights, labels."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models as torchvision_models
from torchvision import transforms
from torchvision.models import VisionTransformer, ViT_B_16_Weights
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import Tap
from vlcam.capture import capture
from vlcam.images import open_image
from vlcam.targets import Target
from vlcam_adapters.vit_torchvision import VitTorchvision

TINY = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
SECOND = Target("class", "class_logit", lambda logits: logits[:, 1], classes=(1,))
PRESET = ImageClassification(crop_size=32, resize_size=40)
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 61, 3), np.uint8), "RGB")


def made(**changes):
    torch.manual_seed(0)
    module = VisionTransformer(**{**TINY, "num_classes": 5, **changes})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "ln" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3)
    return module.eval()


@pytest.fixture
def module():
    return made()


def captured(module, pixels, *sites):
    adapter = VitTorchvision(module)
    taps = [Tap("vision", layer, site) for site in sites for layer in range(3)]
    inputs = Inputs(adapter.accept_pixels(pixels), None, tuple(range(len(pixels))))
    return capture(adapter, inputs, taps, [SECOND])[0]


def at(tensors, site, layer):
    return tensors[Tap("vision", layer, site)]


def logits_of(module, pixels):
    with torch.no_grad():
        return module(pixels)


# Sites


def test_blocks_add_up_and_heads_are_projected(module):
    found = captured(module.double(), models.pixels(batch=2), *SITES).activations
    for layer, block in enumerate(module.encoder.layers):
        projected = block.self_attention.out_proj(at(found, "F3_HEADS", layer))
        torch.testing.assert_close(projected, at(found, "F3", layer))
        if layer:
            before = at(found, "F6", layer - 1)
            middle = before + at(found, "F3", layer)
            torch.testing.assert_close(block.ln_1(before), at(found, "F1", layer))
            torch.testing.assert_close(block.ln_2(middle), at(found, "F4", layer))
            torch.testing.assert_close(middle + at(found, "F5", layer), at(found, "F6", layer))


def test_attention_times_values_gives_the_heads(module):
    found = captured(module.double(), models.pixels(batch=2), *SITES).activations
    for layer, block in enumerate(module.encoder.layers):
        attention, own = at(found, "F2", layer), block.self_attention
        assert attention.shape == (2, 4, 17, 17)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 17).double())
        weight, bias = own.in_proj_weight.chunk(3)[2], own.in_proj_bias.chunk(3)[2]
        values = nn.functional.linear(at(found, "F1", layer), weight, bias).unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = (attention @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixed, at(found, "F3_HEADS", layer))


def test_taps_do_not_change_the_logits(module):
    pixels = models.pixels(batch=3).double()
    found = captured(module.double(), pixels, *SITES)
    torch.testing.assert_close(found.outputs["class"], logits_of(module, pixels))
    assert all(gradient is not None for gradient in found.gradients.values())


def test_anatomy_names_tokens_and_sites(module):
    adapter = VitTorchvision(module)
    assert adapter.prefix == ("cls",)
    assert "vision  0-2     F1 F2 F3_HEADS F3 F4 F5 F6  [CLS], then 4 x 4 patches" in str(adapter.anatomy)
    assert adapter.attention == "torch.nn.MultiheadAttention"
    stream = adapter.anatomy.stream("vision")
    assert (stream.width, stream.heads) == (32, 4)


def test_only_the_cell_of_the_changed_patch_moves(module):
    before = models.pixels(batch=1)
    after = before.clone()
    after[..., :8, -8:] += 1
    seen = []
    module.encoder.dropout.register_forward_hook(lambda *given: seen.append(given[2].detach()))
    for pixels in (before, after):
        logits_of(module, pixels)
    moved = (seen[1] - seen[0]).abs().sum(-1)[0]
    assert torch.nonzero(moved[1:].reshape(VitTorchvision(module).accept_pixels(before).grid)).tolist() == [[0, 3]]
    assert not moved[0]


# A block read on its own


@pytest.mark.parametrize("size", [None, 16])
def test_a_block_is_read_by_the_models_norm_and_head(size):
    module = made(representation_size=size)
    tokens = torch.randn(2, 9, 32)
    seen = nn.functional.layer_norm(tokens.sum(1) / 9, (32,), module.encoder.ln.weight, module.encoder.ln.bias, 1e-6)
    if size:
        seen = torch.tanh(seen @ module.heads.pre_logits.weight.T + module.heads.pre_logits.bias)
    wanted = seen @ module.heads.head.weight.T + module.heads.head.bias
    torch.testing.assert_close(VitTorchvision(module).read_block("class", tokens, None), wanted, atol=1e-5, rtol=1e-5)


# Sizes


def test_only_the_trained_size_is_taken(module):
    with pytest.raises(vlcam.InputError, match=r"\(48, 32\): the model was trained at \(32, 32\); torchvision cannot"):
        VitTorchvision(module).accept_pixels(models.pixels(height=48, width=32, batch=1))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8"):
        VitTorchvision(module).accept_pixels(models.pixels(height=50, width=32, batch=1))
    with pytest.raises(vlcam.InputError, match=r"image size \(224, 224\): the model was trained at \(32, 32\)"):
        VitTorchvision(module, ImageClassification(crop_size=224))


# Preprocessing


def test_images_are_prepared_by_the_preset(module):
    adapter = VitTorchvision(module, PRESET)
    images = adapter.prepare_images([open_image(PHOTO), open_image(PHOTO.rotate(90, expand=True))])
    torch.testing.assert_close(images.pixel_values[0], PRESET(PHOTO), atol=0, rtol=0)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    assert images.steps[0] == (
        {"step": "processor", "class": "ImageClassification"},
        {"step": "resize", "to": [59, 40], "resample": "bilinear", "keeps_proportions": True, "shortest_edge": 40},
        {"step": "center_crop", "to": [32, 32], "corner": [14, 4]},
        {"step": "rescale", "factor": 1 / 255},
        {"step": "normalize", "mean": mean, "std": std},
    )
    assert images.grid == (4, 4)
    assert images.placements[0].original == (90, 61)
    assert images.placements[0].box == pytest.approx((6.1, 14 * 90 / 59, 54.9, 46 * 90 / 59))
    shown = adapter.display(images.pixel_values[0])
    torch.testing.assert_close(shown * 255, (shown * 255).round(), atol=1e-4, rtol=0)


def test_the_crop_lies_where_the_placement_says(module):
    adapter = VitTorchvision(module, PRESET)
    rows, columns = np.mgrid[0:32, 0:32] + 0.5
    for left, top in ((34, 40), (70, 20), (50, 30)):
        image = Image.new("RGB", (120, 80))
        image.paste((255, 255, 255), (left, top, left + 12, top + 12))
        images = adapter.prepare_images([open_image(image)])
        light = adapter.display(images.pixel_values[0])[0].numpy()
        x0, y0, x1, y1 = images.placements[0].box
        assert (light * columns).sum() / light.sum() == pytest.approx((left + 6 - x0) / (x1 - x0) * 32, abs=0.1)
        assert (light * rows).sum() / light.sum() == pytest.approx((top + 6 - y0) / (y1 - y0) * 32, abs=0.1)


def test_an_exact_size_squashes_with_the_same_numbers(module):
    preset = ImageClassification(crop_size=24, resize_size=40, interpolation=InterpolationMode.BICUBIC, mean=[0.5] * 3)
    adapter = VitTorchvision(module, preset, image_size=(32, 32))
    images = adapter.prepare_images([open_image(PHOTO)])
    resized = PHOTO.resize((32, 32), Image.Resampling.BICUBIC)
    wanted = transforms.Normalize([0.5] * 3, preset.std)(transforms.ToTensor()(resized))
    torch.testing.assert_close(images.pixel_values[0], wanted)
    assert images.placements[0].box == (0, 0, 61, 90)
    assert [step["step"] for step in images.steps[0]] == ["processor", "resize", "rescale", "normalize"]
    assert adapter.options == {"labels": None, "image_size": [32, 32]}


def test_a_compose_will_do(module):
    compose = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    images = VitTorchvision(module, compose).prepare_images([open_image(PHOTO)])
    torch.testing.assert_close(images.pixel_values[0], compose(PHOTO), atol=0, rtol=0)


def test_without_a_processor_only_tensors_are_taken(module):
    adapter = VitTorchvision(module)
    with pytest.raises(vlcam.InputError, match=r"ViT_B_16_Weights.DEFAULT\); or preprocess the image yourself"):
        adapter.prepare_images([open_image(PHOTO)])
    assert adapter.accept_pixels(models.pixels(batch=2)).pixel_values.shape == (2, 3, 32, 32)


# Labels


def test_weights_bring_transforms_and_labels():
    weights = ViT_B_16_Weights.IMAGENET1K_V1
    module = made(image_size=224, patch_size=56, num_classes=1000)
    adapter = VitTorchvision(module, weights)
    assert adapter.labels == tuple(weights.meta["categories"])
    images = adapter.prepare_images([open_image(PHOTO)])
    torch.testing.assert_close(images.pixel_values[0], weights.transforms()(PHOTO), atol=0, rtol=0)
    with torch.no_grad():
        assert adapter.trunk(Inputs(images, None, (0,))).shape == (1, 1000)
    with pytest.raises(vlcam.AdapterError, match="names 1000 classes, but the model has 5 classes"):
        VitTorchvision(made(image_size=224, patch_size=56), weights)


def test_labels_of_the_user_and_none(module):
    assert VitTorchvision(module, labels=list("abcde")).labels == tuple("abcde")
    with pytest.raises(vlcam.AdapterError, match="labels has 1 names, but the model has 5 classes"):
        VitTorchvision(module, labels=["a"])
    adapter = VitTorchvision(module)
    assert adapter.labels == ()
    pixels = models.pixels(batch=2)
    inputs = Inputs(adapter.accept_pixels(pixels), None, (0, 1))
    with torch.no_grad():
        shared = adapter.trunk(inputs)
    torch.testing.assert_close(adapter.head("class", shared, inputs), logits_of(module, pixels))


# Refusals


def test_a_model_without_classes_is_refused():
    for module, swap in ((made(), "all"), (made(), "head"), (made(representation_size=16), "head")):
        if swap == "all":
            module.heads = nn.Identity()
        else:
            module.heads.head = nn.Identity()
        with pytest.raises(
            vlcam.AdapterError, match=r"gives an embedding.*model\.heads\.head = nn\.Linear\(32, classes"
        ):
            VitTorchvision(module)


def test_a_head_that_was_swapped_counts(module):
    module.heads = nn.Linear(32, 2)
    assert VitTorchvision(module, labels=["cat", "dog"]).labels == ("cat", "dog")


def test_a_block_of_another_class_is_refused(module):
    module.encoder.layers[1] = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match=r"block 1 is of class .*Identity; this adapter knows"):
        VitTorchvision(module)


def test_only_torchvisions_class_is_accepted(module):
    assert VitTorchvision.accepts(module)
    assert not VitTorchvision.accepts(torchvision_models.resnet18())
    with pytest.raises(vlcam.AdapterError, match="found Linear"):
        VitTorchvision.wrap(nn.Linear(1, 1), None)


def test_there_is_no_folder_to_load_from(tmp_path):
    assert not VitTorchvision.loads({"architectures": ["VisionTransformer"]})
    with pytest.raises(vlcam.AdapterError, match=r"vlcam\.wrap\(model, weights\)"):
        VitTorchvision.load(tmp_path, local=True)


# Through the engine


@pytest.mark.parametrize("recipe", ["attn-gradcam", "legrad", "agcam"])
def test_a_wrapped_model_is_explained_and_verified(module, recipe):
    model = vlcam.wrap(module, PRESET, labels=list("abcde"))
    found = model.explain(PHOTO, None, recipe, target="c")
    assert found.tokens.shape == (4, 4)
    assert found.heatmap.shape == (90, 61)
    # What lies outside the crop was not seen.
    assert np.isnan(found.heatmap[0]).all()
    assert found.verify(model).identical
