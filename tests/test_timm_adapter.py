"""The timm adapter: sites that reproduce the model, token order, sizes, preprocessing, labels, loading."""

from __future__ import annotations

import json

import models
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.layers import DiffAttention
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn
from torchvision import transforms
from torchvision.transforms import v2

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import Tap
from vlcam.capture import capture
from vlcam.images import open_image
from vlcam.targets import Target
from vlcam_adapters.torchvision_processing import Pipeline
from vlcam_adapters.vit_timm import VitTimm

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
ROPE = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True}
DINOV3 = {"rope_type": "dinov3", "use_abs_pos_emb": False, "num_reg_tokens": 4, "init_values": 0.1}
KINDS = {
    "vit": (VisionTransformer, {}),
    "deit3": (VisionTransformer, {"no_embed_class": True, "init_values": 0.1}),
    "avg": (VisionTransformer, {"global_pool": "avg", "qk_norm": True}),
    "reg": (VisionTransformer, {"reg_tokens": 4, "pre_norm": True}),
    "reg-gap": (VisionTransformer, {"class_token": False, "reg_tokens": 4, "global_pool": "avg"}),
    "distilled": (VisionTransformerDistilled, {}),
    "siglip": (VisionTransformer, {"class_token": False, "global_pool": "map"}),
    "wide": (VisionTransformer, {"img_size": (32, 48)}),
    "fine": (VisionTransformer, {"patch_size": 4}),
    "oblong": (VisionTransformer, {"patch_size": (8, 4)}),
    "inner-norm": (VisionTransformer, {"scale_attn_norm": True}),
    "post-norm": (VisionTransformer, {"block_fn": ResPostBlock}),
    "beit": (Beit, {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1}),
    "beit-shared": (Beit, {"use_shared_rel_pos_bias": True, "global_pool": "token"}),
    "eva": (Eva, {"init_values": 0.1}),
    "eva02": (Eva, ROPE),
    "eva-mixed": (Eva, {"use_rot_pos_emb": True, "rope_type": "mixed", "global_pool": "token"}),
    "dinov3": (Eva, {**ROPE, **DINOV3, "attn_type": "rope"}),
    "eva-post-norm": (Eva, {"use_post_norm": True}),
}
PREFIX = {
    "reg": ("cls", *["register"] * 4),
    "reg-gap": ("register",) * 4,
    "distilled": ("cls", "distillation"),
    "siglip": (),
    "dinov3": ("cls", *["register"] * 4),
}
SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
POST_NORM = ("post-norm", "eva-post-norm")
RESIZABLE = [kind for kind in KINDS if not kind.startswith("beit")]
SECOND = Target("class", "class_logit", lambda logits: logits[:, 1], classes=(1,))


def made(kind, **changes):
    model, extra = KINDS[kind]
    torch.manual_seed(0)
    return randomised(model(**{**TINY, **extra, **changes}))


def randomised(module):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3)
    return module.eval()


def registered(**changes):
    """A model out of timm's registry, which has a `pretrained_cfg`."""
    torch.manual_seed(0)
    return randomised(timm.create_model("vit_tiny_patch16_224", **{**TINY, **changes}))


def pixels_for(module, batch=1, seed=0):
    height, width = module.patch_embed.img_size
    return models.pixels(seed, height=height, width=width, batch=batch)


def captured(adapter, pixels, *sites):
    blocks = adapter.anatomy.stream("vision").blocks
    taps = [Tap("vision", layer, site) for site in sites for layer in range(len(blocks)) if site in blocks[layer].sites]
    inputs = Inputs(adapter.accept_pixels(pixels), None, tuple(range(len(pixels))))
    return capture(adapter, inputs, taps, [SECOND])[0]


def at(tensors, site, layer):
    return tensors[Tap("vision", layer, site)]


def logits_of(module, pixels):
    with torch.no_grad():
        return module(pixels)


def after_attention(block, x):
    """What a block adds for an attention output: timm scales it in one of three ways."""
    return _scaled(block, x, "ls1", "gamma_1", "norm1")


def after_mlp(block, x):
    return _scaled(block, x, "ls2", "gamma_2", "norm2")


def _scaled(block, x, layer_scale, gamma, norm):
    if type(block).__name__ in ("ResPostBlock", "EvaBlockPostNorm"):
        return getattr(block, norm)(x)
    if getattr(block, gamma, None) is not None:
        return getattr(block, gamma) * x
    return getattr(block, layer_scale)(x) if hasattr(block, layer_scale) else x


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# Sites


def test_blocks_add_up_and_heads_are_projected(kind):
    module = made(kind).double()
    found = captured(VitTimm(module), pixels_for(module, 2), *SITES).activations
    for layer in (1, 2):
        block = module.blocks[layer]
        middle = at(found, "F6", layer - 1) + after_attention(block, at(found, "F3", layer))
        total = middle + after_mlp(block, at(found, "F5", layer))
        torch.testing.assert_close(total, at(found, "F6", layer))
        projected = block.attn.proj(at(found, "F3_HEADS", layer))
        torch.testing.assert_close(projected, at(found, "F3", layer))
        if kind not in POST_NORM:
            torch.testing.assert_close(block.norm1(at(found, "F6", layer - 1)), at(found, "F1", layer))
            torch.testing.assert_close(block.norm2(middle), at(found, "F4", layer))


def test_attention_times_values_gives_the_heads(kind):
    module = made(kind).double()
    found = captured(VitTimm(module), pixels_for(module, 2), *SITES).activations
    for layer in range(3):
        attention, attn = at(found, "F2", layer), module.blocks[layer].attn
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]).double())
        if kind in POST_NORM and not layer:
            continue  # attention reads what comes before the first block, which is no site
        source = at(found, "F6", layer - 1) if kind in POST_NORM else at(found, "F1", layer)
        if attn.qkv is None:
            values = attn.v_proj(source)
        else:
            values = attn.qkv(source).chunk(3, -1)[2]
            values = values if getattr(attn, "v_bias", None) is None else values + attn.v_bias
        values = values.unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = (attention @ values).transpose(1, 2).flatten(2)
        mixed = attn.norm(mixed) if kind == "inner-norm" else mixed
        torch.testing.assert_close(mixed, at(found, "F3_HEADS", layer))


def test_taps_change_neither_logits_nor_flags(kind):
    module = made(kind).double()
    flags = [block.attn.fused_attn for block in module.blocks]
    pixels = pixels_for(module, 3).double()
    found = captured(VitTimm(module), pixels, *SITES)
    torch.testing.assert_close(found.outputs["class"], logits_of(module, pixels))
    assert [block.attn.fused_attn for block in module.blocks] == flags == [True] * 3
    assert all(gradient is not None for gradient in found.gradients.values())


def test_explicit_attention_gives_the_same(kind):
    fused, plain = made(kind), made(kind)
    for block in plain.blocks:
        block.attn.fused_attn = False
    one, two = (captured(VitTimm(module), pixels_for(module), "F2") for module in (fused, plain))
    for tap, activation in one.activations.items():
        torch.testing.assert_close(two.activations[tap], activation, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(two.gradients[tap], one.gradients[tap], atol=1e-5, rtol=1e-3)
    assert VitTimm(fused).attention == "fused (scaled_dot_product_attention)"
    assert VitTimm(plain).attention == "explicit"
    plain.blocks[0].attn.fused_attn = True
    assert VitTimm(plain).attention == "fused in some blocks, explicit in others"


def test_post_norm_blocks_say_which_sites_they_lack():
    stream = VitTimm(made("post-norm")).anatomy.stream("vision")
    with pytest.raises(vlcam.UnknownNameError, match=r"F1 of vision block 0 does not exist: the block is post-norm"):
        stream.reading(0, "F1")


def test_differential_attention_has_no_single_map():
    stream = VitTimm(made("vit", attn_layer=DiffAttention)).anatomy.stream("vision")
    assert "F2" not in stream.blocks[0].sites
    with pytest.raises(vlcam.UnknownNameError, match="difference of two softmaxes"):
        stream.reading(0, "F2")


def test_notes_say_what_is_special():
    assert "F3_HEADS comes after attn.norm" in str(VitTimm(made("inner-norm")).anatomy)
    assert "before LayerScale" in str(VitTimm(made("beit")).anatomy)
    assert "before LayerScale" in str(VitTimm(made("deit3")).anatomy)
    assert "mean of two heads" in str(VitTimm(made("distilled")).anatomy)
    assert "LayerScale" not in str(VitTimm(made("vit")).anatomy)


# Tokens


def test_prefix_is_named_in_the_models_order(kind):
    module = made(kind)
    adapter = VitTimm(module)
    assert adapter.prefix == PREFIX.get(kind, ("cls",))
    assert len(adapter.prefix) == module.num_prefix_tokens


@pytest.mark.parametrize("kind", ["reg", "dinov3", "reg-gap"])
def test_registers_lie_where_the_prefix_says(kind):
    module = made(kind)
    before = first_tokens(module)
    with torch.no_grad():
        module.reg_token += 1
    moved = (first_tokens(module) - before).abs().sum(-1)[0]
    assert torch.nonzero(moved)[:, 0].tolist() == [i for i, name in enumerate(PREFIX[kind]) if name == "register"]


def test_the_distillation_token_is_the_second():
    module = made("distilled")
    before = first_tokens(module)
    with torch.no_grad():
        module.dist_token += 1
    assert torch.nonzero((first_tokens(module) - before).abs().sum(-1)[0]).tolist() == [[1]]


def first_tokens(module, pixels=None, **options):
    """Tokens that enter the first block."""
    adapter, seen = VitTimm(module, **options), []
    handle = module.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    images = adapter.accept_pixels(pixels_for(module) if pixels is None else pixels)
    with torch.no_grad():
        adapter.trunk(Inputs(images, None, (0,)))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["vit", "reg", "wide", "fine", "oblong", "distilled", "beit", "eva02", "siglip"])
def test_only_the_cell_of_the_changed_patch_moves(kind):
    module = made(kind)
    before = pixels_for(module)
    after, (down, across) = before.clone(), module.patch_embed.patch_size
    after[..., :down, -across:] += 1
    check_moved(module, before, after)


@pytest.mark.parametrize("size", [(48, 24), (24, 48), (40, 40)])
@pytest.mark.parametrize("kind", ["vit", "reg-gap", "distilled", "eva02", "dinov3"])
def test_only_the_cell_of_the_changed_patch_moves_at_other_sizes(kind, size):
    before = models.pixels(height=size[0], width=size[1], batch=1)
    after = before.clone()
    after[..., :8, -8:] += 1
    check_moved(made(kind), before, after, dynamic_img_size=True)


def check_moved(module, before, after, **options):
    adapter = VitTimm(module, **options)
    rows, columns = adapter.accept_pixels(before).grid
    moved = (first_tokens(module, after, **options) - first_tokens(module, before, **options)).abs().sum(-1)[0]
    prefix = len(adapter.prefix)
    assert not moved[:prefix].any()
    assert torch.nonzero(moved[prefix:].reshape(rows, columns)).tolist() == [[0, columns - 1]]


# Sizes


def test_another_size_needs_to_be_asked_for():
    module = made("vit")
    with pytest.raises(
        vlcam.InputError, match=r"\(48, 24\): the model was trained at \(32, 32\); wrap or load it with"
    ):
        VitTimm(module).accept_pixels(models.pixels(height=48, width=24, batch=1))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8"):
        VitTimm(module, dynamic_img_size=True).accept_pixels(models.pixels(height=50, width=32, batch=1))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8 x 4"):
        VitTimm(made("oblong"), dynamic_img_size=True).accept_pixels(models.pixels(height=36, width=36, batch=1))
    with pytest.raises(vlcam.InputError, match=r"image size \(48, 48\)"):
        VitTimm(module, image_size=(48, 48))


@pytest.mark.parametrize("kind", RESIZABLE)
def test_another_size_gives_what_a_model_made_for_any_size_gives(kind):
    module, dynamic = made(kind), made(kind, dynamic_img_size=True)
    pixels = models.pixels(height=48, width=24, batch=1)
    adapter = VitTimm(module, dynamic_img_size=True)
    inputs = Inputs(adapter.accept_pixels(pixels), None, (0,))
    with torch.no_grad():
        torch.testing.assert_close(adapter.trunk(inputs), dynamic(pixels), atol=1e-5, rtol=1e-5)
        assert inputs.images.steps[0][-1]["step"] == "interpolate_positions"
        torch.testing.assert_close(module(pixels_for(module)), made(kind)(pixels_for(module)), atol=0, rtol=0)


def test_a_model_made_for_any_size_needs_no_option():
    adapter = VitTimm(made("vit", dynamic_img_size=True))
    images = adapter.accept_pixels(models.pixels(height=48, width=24, batch=1))
    assert images.grid == (6, 3)
    assert images.steps[0][-1] == {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 24]}
    assert adapter.trunk(Inputs(images, None, (0,))).shape == (1, 5)


@pytest.mark.parametrize("kind", ["vit", "eva02", "eva-mixed", "dinov3"])
def test_what_other_sizes_change_is_put_back_after_an_error_too(kind):
    module = made(kind)
    before = state_of(module)
    adapter = VitTimm(module, dynamic_img_size=True)
    inputs = Inputs(adapter.accept_pixels(models.pixels(height=48, width=24, batch=1)), None, (0,))

    def fail(*_):
        raise ZeroDivisionError

    handle = module.blocks[1].register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        adapter.trunk(inputs)
    handle.remove()
    assert_same(state_of(module), before)
    with torch.no_grad():
        adapter.trunk(inputs)
    assert_same(state_of(module), before)


def state_of(module):
    embed, rope = module.patch_embed, getattr(module, "rope", None)
    flags = [module.dynamic_img_size, embed.strict_img_size, embed.flatten, embed.output_fmt]
    return [*flags, getattr(rope, "feat_shape", None)], {name: b.clone() for name, b in module.named_buffers()}


def assert_same(now, before):
    assert now[0] == before[0]
    assert now[1].keys() == before[1].keys()
    for name, buffer in now[1].items():
        torch.testing.assert_close(buffer, before[1][name], atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm, about its own way to index
def test_beit_is_told_to_change_size_before_it_is_wrapped():
    module = made("beit")
    with pytest.raises(vlcam.AdapterError, match=r"for \(32, 32\) pixels; .*set_input_size\(img_size="):
        VitTimm(module, dynamic_img_size=True)
    with pytest.raises(vlcam.InputError, match=r"trained at \(32, 32\); .*set_input_size"):
        VitTimm(module).accept_pixels(models.pixels(height=48, width=24, batch=1))
    module.set_input_size(img_size=(48, 24))
    assert VitTimm(module).accept_pixels(models.pixels(height=48, width=24, batch=1)).grid == (6, 3)
    before = models.pixels(height=48, width=24, batch=1)
    after = before.clone()
    after[..., :8, -8:] += 1
    check_moved(module, before, after)


# Running


def test_gradient_checkpointing_is_off_while_the_model_runs():
    module = made("vit")
    module.set_grad_checkpointing(True)
    adapter = VitTimm(module)
    with adapter.running():
        assert module.grad_checkpointing is False
    assert module.grad_checkpointing is True
    with pytest.raises(ZeroDivisionError), adapter.running():
        raise ZeroDivisionError
    assert module.grad_checkpointing is True
    pixels = pixels_for(module)
    found = captured(adapter, pixels, *SITES)
    module.set_grad_checkpointing(False)
    plain = captured(adapter, pixels, *SITES)
    for tap, gradient in plain.gradients.items():
        torch.testing.assert_close(found.gradients[tap], gradient)
    assert "gradient checkpointing" in str(adapter.anatomy)


def test_bfloat16_and_training_mode():
    module = made("eva02").to(torch.bfloat16).train()
    found = captured(VitTimm(module), pixels_for(module), "F2", "F6")
    assert found.outputs["class"].dtype == torch.bfloat16
    assert module.training
    assert module.blocks[0].attn.training


# A block read on its own


@pytest.mark.parametrize("kind", ["vit", "avg", "reg-gap", "distilled", "beit", "eva02", "dinov3"])
def test_a_block_is_read_by_the_models_norm_and_head(kind):
    module = made(kind)
    tokens = torch.randn(2, 9, 32)
    norms = [part for part in (module.norm, module.fc_norm) if not isinstance(part, nn.Identity)]
    assert len(norms) == 1
    mean = torch.stack([row.mean(0) for row in tokens])
    normed = nn.functional.layer_norm(mean, (32,), norms[0].weight, norms[0].bias, norms[0].eps)
    wanted = normed @ module.head.weight.T + module.head.bias
    if kind == "distilled":
        wanted = (wanted + normed @ module.head_dist.weight.T + module.head_dist.bias) / 2
    torch.testing.assert_close(VitTimm(module).read_block("class", tokens, None), wanted, atol=1e-5, rtol=1e-5)


def test_a_model_that_pools_by_attention_has_no_such_reading():
    with pytest.raises(vlcam.RecipeError, match="use gradient_path='full'"):
        VitTimm(made("siglip")).read_block("class", torch.randn(1, 16, 32), None)


# Preprocessing

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 61, 3), np.uint8), "RGB")


def test_images_are_prepared_as_the_model_says():
    module = registered()
    adapter = VitTimm(module)
    config = timm.data.resolve_model_data_config(module, args={"input_size": (3, 32, 32)})
    wanted = timm.data.create_transform(**config, is_training=False)
    images = adapter.prepare_images([open_image(PHOTO), open_image(PHOTO.rotate(90, expand=True))])
    torch.testing.assert_close(images.pixel_values[0], wanted(PHOTO), atol=0, rtol=0)
    assert images.pixel_values.shape == (2, 3, 32, 32)
    assert images.grid == (4, 4)
    assert images.steps[0] == (
        {"step": "processor", "class": "Compose"},
        {"step": "resize", "to": [51, 35], "resample": "bicubic", "keeps_proportions": True, "shortest_edge": 35},
        {"step": "center_crop", "to": [32, 32], "corner": [10, 2]},
        {"step": "rescale", "factor": 1 / 255},
        {"step": "normalize", "mean": [0.5] * 3, "std": [0.5] * 3},
    )
    assert images.steps[1][1]["to"] == [35, 51]
    json.dumps(images.steps)
    shown = adapter.display(images.pixel_values[0])
    plain = transforms.Compose(wanted.transforms[:-1])(PHOTO)
    torch.testing.assert_close(shown, plain)


@pytest.mark.parametrize("size", [(61, 90), (90, 61), (64, 64), (20, 70)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("target", [(32, 32), (32, 48), (48, 32)])
def test_the_placement_is_where_the_model_looks(size, mode, target):
    transform = timm.data.create_transform(
        input_size=(3, *target), crop_pct=0.9, crop_mode=mode, interpolation="bilinear", is_training=False
    )
    check_placement(Pipeline(transform), size, target)


@pytest.mark.parametrize("size", [(61, 90), (90, 61), (20, 70)])
def test_the_placement_of_an_exact_resize_is_the_whole_image(size):
    pipeline = VitTimm(registered(img_size=(32, 48)), image_size=(32, 48))._pipeline
    check_placement(pipeline, size, (32, 48))
    assert pipeline(Image.new("RGB", size[::-1]))[2].box == (0, 0, size[1], size[0])


def check_placement(pipeline, size, target):
    """Paint the inside of each of many squares white: its centre of mass in the pixels is where the box says."""
    rows, columns = np.mgrid[0 : target[0], 0 : target[1]] + 0.5
    black, _, placement = pipeline(Image.new("RGB", size[::-1]))
    assert placement.original == size
    assert placement.model == target == tuple(black.shape[1:])
    x0, y0, x1, y1 = placement.box
    side, looked = max(4, min(size) // 6), 0
    for top in range(0, size[0] - side, side):
        for left in range(0, size[1] - side, side):
            image = Image.new("RGB", size[::-1])
            image.paste((255, 255, 255), (left, top, left + side, top + side))
            light = (pipeline(image)[0] - black)[0].numpy()
            # Squares that the frame cuts have another centre of mass.
            margin = 2 * max((y1 - y0) / target[0], (x1 - x0) / target[1])
            inside = left - margin > max(x0, 0) and left + side + margin < min(x1, size[1])
            if not inside or top - margin <= max(y0, 0) or top + side + margin >= min(y1, size[0]):
                continue
            down = (top + side / 2 - y0) / (y1 - y0) * target[0]
            across = (left + side / 2 - x0) / (x1 - x0) * target[1]
            assert (light * rows).sum() / light.sum() == pytest.approx(down, abs=0.1)
            assert (light * columns).sum() / light.sum() == pytest.approx(across, abs=0.1)
            looked += 1
    assert looked


def test_an_exact_size_squashes_with_the_same_numbers():
    module = registered(img_size=(48, 32))
    adapter = VitTimm(module, image_size=(48, 32))
    images = adapter.prepare_images([open_image(PHOTO)])
    wanted = transforms.ToTensor()(PHOTO.resize((32, 48), Image.Resampling.BICUBIC)) * 2 - 1
    torch.testing.assert_close(images.pixel_values[0], wanted)
    assert images.steps[0][1:] == (
        {"step": "resize", "to": [48, 32], "resample": "bicubic", "keeps_proportions": False},
        {"step": "rescale", "factor": 1 / 255},
        {"step": "normalize", "mean": [0.5] * 3, "std": [0.5] * 3},
    )
    assert adapter.options == {"labels": None, "image_size": [48, 32], "dynamic_img_size": False}


def test_an_exact_size_of_ones_own_with_interpolated_positions():
    adapter = VitTimm(registered(), image_size=(64, 40), dynamic_img_size=True)
    images = adapter.prepare_images([open_image(PHOTO)])
    assert images.grid == (8, 5)
    assert images.steps[0][-1] == {"step": "interpolate_positions", "trained": [32, 32], "used": [64, 40]}
    assert "8 x 5 patches" in str(adapter.anatomy)


NORMALIZE = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
OWN = {
    "v1": transforms.Compose(
        [
            transforms.Resize(40),
            transforms.CenterCrop(32),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float32),
            transforms.Normalize(*NORMALIZE),
        ]
    ),
    "nested": transforms.Compose(
        [transforms.Resize((32, 32)), transforms.Compose([transforms.ToTensor(), transforms.Normalize(*NORMALIZE)])]
    ),
    "sequential": nn.Sequential(
        v2.Resize((32, 32)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORMALIZE)
    ),
    "v2": v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(40, antialias=True),
            v2.CenterCrop(32),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*NORMALIZE),
        ]
    ),
    "v2-unscaled": v2.Compose(
        [
            v2.Resize((32, 32), interpolation="bicubic"),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32),
            v2.Normalize([25.5, 51, 76.5], [102, 127.5, 153]),
        ]
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_transform_of_ones_own_is_run_and_read(name):
    transform = OWN[name]
    adapter = VitTimm(made("vit"), transform)
    images = adapter.prepare_images([open_image(PHOTO)])
    torch.testing.assert_close(images.pixel_values[0], torch.as_tensor(transform(PHOTO)), atol=0, rtol=0)
    assert type(images.pixel_values) is torch.Tensor
    steps = {step["step"]: step for step in images.steps[0]}
    assert steps["resize"]["keeps_proportions"] == (name in ("v1", "v2"))
    assert ("antialias" in steps["resize"]) == (name == "v2")
    assert ("rescale" in steps) == (name != "v2-unscaled")
    assert steps["normalize"]["mean"] == [25.5, 51, 76.5] if name == "v2-unscaled" else list(NORMALIZE[0])
    json.dumps(images.steps)
    shown = adapter.display(images.pixel_values[0])
    assert shown.min() >= -1e-6
    assert shown.max() <= 1 + 1e-6
    assert shown.mean() == pytest.approx(np.asarray(PHOTO).mean() / 255, abs=0.03)
    check_placement(Pipeline(transform), (61, 90), (32, 32))
    exact = VitTimm(made("vit"), transform, image_size=(32, 32)).prepare_images([open_image(PHOTO)])
    assert exact.placements[0].box == (0, 0, 61, 90)
    assert exact.steps[0][1].get("antialias") == (True if name == "v2" else None)
    assert [step["step"] for step in exact.steps[0]].count("resize") == 1


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]),
            "torchvision.RandomHorizontal",
        ),
        (transforms.Compose([transforms.Lambda(lambda image: image)]), r"torchvision.Lambda.*float tensor \[3, H, W\]"),
        (lambda image: image, "builtins.function"),
        (transforms.Resize(32, max_size=64), "max_size=64"),
        (transforms.Compose([transforms.Resize(32), transforms.PILToTensor()]), "ends without float values"),
        (v2.Compose([v2.ToImage(), v2.ToDtype(torch.uint8)]), "a single floating type"),
    ],
)
def test_steps_that_are_not_known_are_refused(transform, words):
    with pytest.raises(vlcam.AdapterError, match=words):
        VitTimm(made("vit"), transform)


def test_a_step_of_a_known_name_that_does_something_else_is_refused():
    class Resize(transforms.Resize):
        pass

    with pytest.raises(vlcam.AdapterError, match="not known to vlcam"):
        VitTimm(made("vit"), transforms.Compose([Resize((32, 32)), transforms.ToTensor()]))
    lying = transforms.Resize((32, 32))
    lying.forward = lambda image: image
    adapter = VitTimm(made("vit"), transforms.Compose([lying, transforms.ToTensor()]))
    with pytest.raises(vlcam.AdapterError, match=r"returned \(3, 90, 61\); by its steps it makes \(3, 32, 32\)"):
        adapter.prepare_images([open_image(PHOTO)])


def test_a_transform_that_fits_only_some_images():
    uncut = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
    adapter = VitTimm(made("vit"), uncut, dynamic_img_size=True)
    square, wide = (open_image(Image.new("RGB", size)) for size in ((50, 50), (150, 100)))
    assert adapter.prepare_images([wide]).grid == (4, 6)
    with pytest.raises(vlcam.InputError, match=r"images of \(32, 32\), \(32, 48\)"):
        adapter.prepare_images([square, wide])
    with pytest.raises(vlcam.InputError, match=r"image size \(32, 48\): the model was trained at"):
        VitTimm(made("vit"), uncut).prepare_images([wide])


def test_a_transform_for_another_size_is_refused_at_once():
    with pytest.raises(vlcam.InputError, match=r"image size \(40, 40\): the model was trained at \(32, 32\)"):
        VitTimm(made("vit"), transforms.Compose([transforms.Resize((40, 40)), transforms.ToTensor()]))


def test_a_model_that_does_not_say_how_its_images_are_prepared():
    adapter = VitTimm(made("vit"))
    with pytest.raises(vlcam.InputError, match="no pretrained_cfg; give the transform"):
        adapter.prepare_images([open_image(PHOTO)])
    assert adapter.accept_pixels(models.pixels(batch=2)).pixel_values.shape == (2, 3, 32, 32)


# Labels


def test_labels_come_from_the_weights_or_the_user():
    module = registered()
    assert VitTimm(module).labels == ()
    module.pretrained_cfg |= {"num_classes": 5, "label_names": ["a", "b", "c", "d", "e"]}
    assert VitTimm(module).labels == ("a", "b", "c", "d", "e")
    module.pretrained_cfg |= {"label_descriptions": {name: name.upper() for name in "abcde"}}
    assert VitTimm(module).labels == ("A", "B", "C", "D", "E")
    module.pretrained_cfg |= {"label_names": {str(number): name for number, name in enumerate("abcde")}}
    assert VitTimm(module).labels == ("A", "B", "C", "D", "E")
    module.pretrained_cfg["label_names"] = {"0": "a", "7": "b"}
    assert VitTimm(module).labels == ()
    module.head = nn.Linear(32, 2)  # the weights' names are of another head now
    assert VitTimm(module).labels == ()
    given = VitTimm(module, labels=["cat", "dog"])
    assert given.labels == ("cat", "dog")
    assert given.options["labels"] == ["cat", "dog"]


def test_labels_of_another_number_are_refused():
    with pytest.raises(vlcam.AdapterError, match="labels has 2 names, but the model has 5 classes"):
        VitTimm(made("vit"), labels=["cat", "dog"])


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "tench, Tinca tinca"),
        ("vit_tiny_patch16_224.augreg_in21k", None),
    ],
)
def test_imagenet_labels_where_the_weights_are_of_imagenet(name, first):
    tiny = {"img_size": 32, "patch_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 1}
    labels = VitTimm(timm.create_model(name, **tiny)).labels
    assert (labels[:1], len(labels)) == (((first,), 1000) if first else ((), 0))
    assert VitTimm(timm.create_model(name, num_classes=1001, **tiny)).labels == ()


def test_logits_without_names_pass(kind):
    module = made(kind)
    adapter = VitTimm(module)
    pixels = pixels_for(module, 2)
    inputs = Inputs(adapter.accept_pixels(pixels), None, (0, 1))
    with torch.no_grad():
        shared = adapter.trunk(inputs)
    torch.testing.assert_close(adapter.head("class", shared, inputs), logits_of(module, pixels))


# Refusals


@pytest.mark.parametrize("kind", ["vit", "beit", "eva", "distilled"])
def test_a_model_without_classes_is_refused(kind):
    with pytest.raises(vlcam.AdapterError, match=r"num_classes=0.*an embedding of 32 numbers.*num_classes=\.\.\."):
        VitTimm(made(kind, num_classes=0))
    module = made(kind)
    module.head = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match="a head of type Identity has no classifier"):
        VitTimm(module)


def test_the_projection_of_a_clip_tower_is_no_classifier():
    tiny = {"img_size": 32, "embed_dim": 8, "depth": 1, "num_heads": 1}
    tower = timm.create_model("vit_base_patch16_clip_224.openai", **tiny)
    with pytest.raises(vlcam.AdapterError, match=r"clip_224\.openai has a head that projects .* embedding of 512"):
        VitTimm(tower)
    assert len(VitTimm(tower, labels=[str(number) for number in range(512)]).labels) == 512
    assert VitTimm(timm.create_model("vit_base_patch16_clip_224.openai", num_classes=3, **tiny)).labels == ()
    assert len(VitTimm(timm.create_model("vit_base_patch16_clip_224.openai_ft_in1k", **tiny)).labels) == 1000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_fn": ParallelScalingBlock}, "block 0 is of class .*ParallelScalingBlock; of timm's blocks"),
        ({"global_pool": ""}, "logits for every token"),
        ({"in_chans": 1}, "takes 1 channels"),
    ],
)
def test_models_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(vlcam.AdapterError, match=words):
        VitTimm(made("vit", **changes))


def test_a_prefix_that_the_model_contradicts_is_refused():
    module = made("vit")
    module.num_prefix_tokens = 2
    with pytest.raises(vlcam.AdapterError, match=r"num_prefix_tokens=2; no layout is guessed"):
        VitTimm(module)


def test_only_timms_classes_are_accepted():
    assert all(VitTimm.accepts(made(kind)) for kind in ("vit", "distilled", "beit", "eva"))
    assert not VitTimm.accepts(nn.Linear(1, 1))
    with pytest.raises(vlcam.AdapterError, match=r"expected a VisionTransformer, Beit or Eva of timm, found torch\.nn"):
        VitTimm.wrap(nn.Linear(1, 1), None)


@pytest.mark.parametrize("size", [64, (64,), (32.0, 32.0)])
def test_an_image_size_is_two_whole_numbers(size):
    with pytest.raises(vlcam.AdapterError, match=r"give \(height, width\)"):
        VitTimm(made("vit"), image_size=size, dynamic_img_size=True)


# Loading


@pytest.fixture
def checkpoint(tmp_path):
    timm.models.save_for_hf(registered(), tmp_path, safe_serialization=True)
    return tmp_path


def test_a_saved_folder_loads(checkpoint):
    model = vlcam.load(checkpoint, image_size=(48, 32), dynamic_img_size=True)
    assert isinstance(model.adapter, VitTimm)
    found = model.adapter.prepare_images([open_image(PHOTO)])
    own = VitTimm(registered(), image_size=(48, 32), dynamic_img_size=True)
    torch.testing.assert_close(found.pixel_values, own.prepare_images([open_image(PHOTO)]).pixel_values)
    inputs = Inputs(found, None, (0,))
    with torch.no_grad():
        torch.testing.assert_close(model.adapter.trunk(inputs), own.trunk(inputs))
    assert not model.adapter.module.training


def test_dtype_and_device_of_a_loaded_model(checkpoint):
    adapter = VitTimm.load(checkpoint, local=True, dtype="bfloat16", labels=list("abcde"))
    assert adapter.accept_pixels(models.pixels(batch=1)).pixel_values.dtype == torch.bfloat16
    with pytest.raises(vlcam.UnknownNameError, match="device='nowhere' cannot be used"):
        VitTimm.load(checkpoint, local=True, device="nowhere")


def test_checkpoints_of_other_families_are_left_to_others():
    assert VitTimm.loads({"architecture": "vit_tiny_patch16_224"})
    assert VitTimm.loads({"architecture": "beitv2_base_patch16_224"})
    assert not VitTimm.loads({"architecture": "resnet18"})
    assert not VitTimm.loads({"architecture": "nothing"})
    assert not VitTimm.loads({"architectures": ["ViTForImageClassification"]})


def test_damaged_or_missing_files_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded by timm"):
        VitTimm.load(checkpoint, local=True)
    weights.unlink()
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded by timm: No suitable checkpoints"):
        VitTimm.load(checkpoint, local=True)


def test_a_name_of_the_hub_without_network_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(vlcam.AdapterError, match="'nobody/nothing' cannot be loaded by timm"):
        VitTimm.load("nobody/nothing", local=False)


# Through the engine


@pytest.mark.parametrize("recipe", ["attn-gradcam", "legrad"])
def test_a_loaded_model_is_explained_and_verified(checkpoint, recipe):
    model = vlcam.load(checkpoint, labels=list("abcde"), image_size=(48, 32), dynamic_img_size=True)
    found = model.explain(PHOTO, None, recipe, target="c")
    assert found.tokens.shape == (6, 4)
    assert found.heatmap.shape == (90, 61)
    record = found.provenance
    assert record["image"]["steps"][-1] == {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 32]}
    assert record["model"]["attention"]["configured"] == "fused (scaled_dot_product_attention)"
    again = vlcam.load(checkpoint, **record["model"]["options"])
    assert found.verify(again).identical


def test_a_wrapped_model_is_explained():
    model = vlcam.wrap(made("dinov3"), dynamic_img_size=True)
    images = models.pixels(height=40, width=24, batch=2)
    together = model.explain(images, None, "chefer-generic")
    for exp, image in zip(together, images, strict=True):
        assert exp.tokens.shape == (5, 3)
        np.testing.assert_allclose(model.explain(image, None, "chefer-generic").tokens, exp.tokens, rtol=1e-3)


def test_a_model_with_a_convolutional_stem_has_the_grid_of_its_features():
    tiny = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 4}
    module = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=5, **tiny).eval()
    adapter = VitTimm(module, dynamic_img_size=True)
    assert adapter.accept_pixels(models.pixels(height=64, width=64, batch=1)).grid == (2, 2)
    exp = vlcam.wrap(module, dynamic_img_size=True).explain(models.pixels(height=96, width=64), None, "legrad")
    assert exp.tokens.shape == (3, 2)
