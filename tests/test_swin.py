"""The Swin adapters, both versions in three libraries: order of the windows, grids, sites, sizes, maps, peers."""

from __future__ import annotations

import copy
import itertools
import warnings

import models
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from torch import nn
from torchvision.models import Swin_T_Weights
from torchvision.models import SwinTransformer as TorchvisionSwin
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.transforms._presets import ImageClassification
from transformers import SwinConfig, SwinForImageClassification, SwinModel, Swinv2Config, Swinv2ForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import SCORES, Tap
from vlcam.capture import capture
from vlcam.catalogue import named
from vlcam.targets import Target
from vlcam.tokens import Windows
from vlcam_adapters.swin_hf import SwinHF
from vlcam_adapters.swin_timm import SwinTimm
from vlcam_adapters.swin_torchvision import SwinTorchvision
from vlcam_adapters.vit_timm import VitTimm

ADAPTERS = {"hf": SwinHF, "timm": SwinTimm, "torchvision": SwinTorchvision}
KINDS = list(itertools.product(ADAPTERS, (1, 2)))
SIZES = [(32, 32), (64, 32), (40, 32), (40, 24), (48, 56)]
SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
TINY = {"embed_dim": 8, "num_heads": (2, 4), "depths": (2, 2), "window_size": 4, "patch_size": 4}
SECOND = Target("class", "class_logit", lambda logits: logits[:, 1], classes=(1,))
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 61, 3), np.uint8), "RGB")


def randomised(module):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = name.endswith("weight") and ("norm" in name or (name.startswith("features.0.2") and "2.w" in name))
            scale = 1.0 if "bias_table" in name or "logit_scale" in name else 0.3
            parameter.copy_(float(norm) + torch.randn_like(parameter) * scale)
    return module.eval()


def hf(version, **changes):
    config, kind = ((SwinConfig, SwinForImageClassification), (Swinv2Config, Swinv2ForImageClassification))[version - 1]
    return kind(config(**{**TINY, "image_size": 32, "num_labels": 5, **changes}))


def timm_(version, **changes):
    return (TimmSwin, TimmSwinV2)[version - 1](**{**TINY, "img_size": 32, "num_classes": 5, **changes})


def torchvision_(version, **changes):
    parts = {} if version == 1 else {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    pairs = {name: [TINY[name]] * 2 for name in ("window_size", "patch_size")}
    return TorchvisionSwin(**{**TINY, **pairs, "num_classes": 5, **parts, **changes})


def made(library, version, **changes):
    torch.manual_seed(0)
    make = {"hf": hf, "timm": timm_, "torchvision": torchvision_}[library]
    return randomised(make(version, **changes))


def wrapped(module, **options):
    """A model that takes any size that it can."""
    dynamic = {"dynamic_img_size": True} if isinstance(module, (TimmSwin, TimmSwinV2)) else {}
    return vlcam.wrap(module, **dynamic, **options)


def pixels_of(size, batch=2, seed=0):
    return models.pixels(seed, height=size[0], width=size[1], batch=batch)


def taken_by(kind, size):
    return kind != ("hf", 1) or size != (40, 24)


def each_kind_and_size(function):
    cases = [(*kind, size) for kind in KINDS for size in SIZES if taken_by(kind, size)]
    return pytest.mark.parametrize(("library", "version", "size"), cases)(function)


def each_kind(function):
    return pytest.mark.parametrize(("library", "version"), KINDS)(function)


def inputs_of(adapter, pixels):
    return Inputs(adapter.accept_pixels(pixels), None, tuple(range(len(pixels))))


def captured(adapter, pixels, *sites, target=SECOND):
    blocks = adapter.anatomy.stream("vision").blocks
    taps = [Tap("vision", n, s) for s in sites for n in range(len(blocks)) if s in blocks[n].sites or s == SCORES]
    (found,) = capture(adapter, inputs_of(adapter, pixels), taps, [target])
    return found


def at(tensors, site, layer):
    return tensors[Tap("vision", layer, site)]


def logits_of(module, pixels):
    with torch.no_grad():
        found = module(pixels)
    return found if isinstance(found, torch.Tensor) else found.logits


def layers_of(adapter):
    return [block.sites["F6"].module for block in adapter.anatomy.stream("vision").blocks]


def norms_of(layer):
    names = ("norm1", "norm2") if hasattr(layer, "norm1") else ("layernorm_before", "layernorm_after")
    return [getattr(layer, name) for name in names]


def block_inputs(adapter, pixels):
    """The input of every block in raster order, [I, N, C], from a run without any of our hooks."""
    seen = []

    def keep(_, args):
        seen.append(args[0].detach())

    handles = [layer.register_forward_pre_hook(keep) for layer in layers_of(adapter)]
    with torch.no_grad(), adapter.running():
        adapter.trunk(inputs_of(adapter, pixels))
    for handle in handles:
        handle.remove()
    return [each.flatten(1, 2) if each.ndim == 4 else each for each in seen]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


# How windows lie, worked out slowly


def slow_windows(windows):
    """For every window its places in order: the number of the token there, or None for padding."""
    (rows, columns), (high, wide), (down, across) = windows.grid, windows.window, windows.shift
    tall, broad = -(-rows // high) * high, -(-columns // wide) * wide
    padded = {(r, c): r * columns + c for r in range(rows) for c in range(columns)}
    if windows.pads_first:
        placed = {
            (r, c): padded.get(((r + down) % tall, (c + across) % broad)) for r in range(tall) for c in range(broad)
        }
    else:
        placed = {
            (r, c): padded[(r + down) % rows, (c + across) % columns] if r < rows and c < columns else None
            for r in range(tall)
            for c in range(broad)
        }
    return [
        [placed[top + r, left + c] for r in range(high) for c in range(wide)]
        for top in range(0, tall, high)
        for left in range(0, broad, wide)
    ]


@pytest.mark.parametrize("pads_first", [True, False])
@pytest.mark.parametrize("shift", [(0, 0), (2, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("window", [(4, 4), (4, 3)])
@pytest.mark.parametrize("grid", [(8, 8), (8, 4), (5, 4), (5, 7), (3, 3), (9, 2)])
def test_window_order_and_back(grid, window, shift, pads_first):
    windows = Windows(grid, window, shift, pads_first)
    order = slow_windows(windows)
    count, places = grid[0] * grid[1], window[0] * window[1]
    assert sorted(place for each in order for place in each if place is not None) == list(range(count))
    assert windows.across[0] * windows.across[1] == len(order)
    values = torch.randn(2, count, 3)
    cut = torch.full((2, len(order), places, 3), torch.nan)
    for number, each in enumerate(order):
        for place, token in enumerate(each):
            if token is not None:
                cut[:, number, place] = values[:, token]
    assert torch.equal(windows.raster(cut.flatten(0, 1)), values)
    assert torch.equal(windows.raster(cut[..., 0].flatten(0, 1)), values[..., 0])
    assert windows.held.tolist() == [[token is not None for token in each] for each in order]


def windows_of(adapter, pixels, layer):
    """What the adapter says after a pass."""
    with torch.no_grad(), adapter.running():
        adapter.trunk(inputs_of(adapter, pixels))
        return adapter.windows("vision", layer, adapter.accept_pixels(pixels))


@pytest.mark.parametrize(
    ("library", "version", "size", "wanted"),
    [
        # window 4, shift 2: where a grid is no longer than the window, each library has its own rule
        ("hf", 1, (32, 32), [((8, 8), (2, 2)), ((4, 4), (0, 0))]),
        ("hf", 1, (64, 32), [((16, 8), (2, 2)), ((8, 4), (0, 0))]),
        ("hf", 2, (32, 32), [((8, 8), (2, 2)), ((4, 4), (0, 0))]),
        ("hf", 2, (48, 56), [((12, 14), (2, 2)), ((6, 7), (0, 0))]),
        ("timm", 1, (64, 32), [((16, 8), (2, 2)), ((8, 4), (0, 0))]),
        ("timm", 2, (48, 56), [((12, 14), (2, 2)), ((6, 7), (0, 0))]),
        ("torchvision", 1, (32, 32), [((8, 8), (2, 2)), ((4, 4), (0, 0))]),
        ("torchvision", 1, (64, 32), [((16, 8), (2, 2)), ((8, 4), (2, 0))]),
        ("torchvision", 2, (48, 56), [((12, 14), (2, 2)), ((6, 7), (2, 2))]),
    ],
)
def test_grid_and_shift_of_the_second_block_of_each_stage(library, version, size, wanted):
    adapter = wrapped(made(library, version)).adapter
    found = [windows_of(adapter, pixels_of(size, 1), layer) for layer in (1, 3)]
    assert [(each.grid, each.shift) for each in found] == wanted
    assert {each.window for each in found} == {(4, 4)}
    assert {each.pads_first for each in found} == {library != "timm"}
    assert [windows_of(adapter, pixels_of(size, 1), layer).shift for layer in (0, 2)] == [(0, 0)] * 2


# Sites


@each_kind_and_size
def test_blocks_add_up(library, version, size):
    adapter = wrapped(made(library, version).double()).adapter
    pixels = pixels_of(size).double()
    found = captured(adapter, pixels, *SITES).activations
    for layer, before in enumerate(block_inputs(adapter, pixels)):
        first, second = norms_of(layers_of(adapter)[layer])
        attended, fed, after = (at(found, site, layer) for site in ("F3", "F5", "F6"))
        grid = adapter.grid("vision", layer, adapter.accept_pixels(pixels))
        assert attended.shape == before.shape == (2, grid[0] * grid[1], (8, 8, 16, 16)[layer])
        if version == 1:
            close(attended, after - fed - before)  # the residual stream after attention less the block's input
            close(at(found, "F1", layer), first(before))
            close(at(found, "F4", layer), second(before + attended))
        else:
            close(first(attended), after - second(fed) - before)
        if "F3_HEADS" in adapter.anatomy.stream("vision").blocks[layer].sites:
            project = adapter.anatomy.stream("vision").blocks[layer].sites["F3_HEADS"].module
            close(project(at(found, "F3_HEADS", layer)), attended)


def values_and_projection(layer):
    """The value projection of a block, and what follows the heads."""
    attend = getattr(layer, "attn", None)
    if attend is None and hasattr(layer.attention, "o_proj"):
        return layer.attention.v_proj, layer.attention.o_proj
    if attend is None:
        return layer.attention.self.value, layer.attention.output.dense
    bias = attend.v_bias if hasattr(attend, "v_bias") else attend.qkv.bias.chunk(3)[2]
    return lambda tokens: nn.functional.linear(tokens, attend.qkv.weight.chunk(3)[2], bias), attend.proj


@each_kind_and_size
def test_attention_times_values_is_what_is_projected(library, version, size):
    adapter = wrapped(made(library, version).double()).adapter
    pixels = pixels_of(size).double()
    found = captured(adapter, pixels, *SITES)
    for layer, read in enumerate(block_inputs(adapter, pixels)):
        windows = found.windows[Tap("vision", layer, "F2")]
        order, heads = slow_windows(windows), (2, 2, 4, 4)[layer]
        attention = at(found.activations, "F2", layer)
        assert attention.shape == (2, len(order), heads, 16, 16)
        close(attention.sum(-1), torch.ones(2, len(order), heads, 16).double())
        read = at(found.activations, "F1", layer) if version == 1 else read
        to_values, project = values_and_projection(layers_of(adapter)[layer])
        wanted = torch.full_like(at(found.activations, "F3", layer), torch.nan)
        for number, each in enumerate(order):
            # Padding is a token of zeros, in front of the projections.
            own = torch.stack([torch.zeros(2, read.shape[-1]).double() if t is None else read[:, t] for t in each], 1)
            values = to_values(own).unflatten(-1, (heads, -1)).transpose(1, 2)
            mixed = project((attention[:, number] @ values).transpose(1, 2).flatten(2))
            for place, token in enumerate(each):
                if token is not None:
                    wanted[:, token] = mixed[:, place]
        close(at(found.activations, "F3", layer), wanted)


@each_kind_and_size
def test_tapping_changes_no_logit_and_all_tokens_have_gradients(library, version, size):
    module = made(library, version)
    adapter, pixels = wrapped(module).adapter, pixels_of(size, 3)
    found = captured(adapter, pixels, *SITES)
    plain = dynamic(module) if library == "timm" else copy.deepcopy(module)
    torch.testing.assert_close(found.outputs["class"], logits_of(plain, pixels), atol=1e-5, rtol=1e-5)
    for tap, gradient in found.gradients.items():
        assert gradient.shape == found.activations[tap].shape
        if tap.site != "F2":
            assert bool((gradient.abs().sum(-1) > 0).all()), tap
        else:
            held = found.windows[tap].held
            rows = gradient.abs().sum((2, 4)) > 0
            assert torch.equal(rows, held.expand_as(rows)), tap


def dynamic(module):
    """The same model of timm, made for any size."""
    twin = made("timm", 1 if isinstance(module, TimmSwin) else 2, dynamic_img_size=True)
    twin.load_state_dict(module.state_dict())
    return twin.eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_of_transformers_is_read_with_either_implementation(implementation):
    module = made("hf", 1)
    module.set_attn_implementation(implementation)
    adapter = wrapped(module).adapter
    assert adapter.attention == implementation
    pixels = pixels_of((40, 32))
    close(captured(adapter, pixels, *SITES).outputs["class"], logits_of(copy.deepcopy(module), pixels))


def test_fused_attention_of_timm_is_read():
    module, pixels = made("timm", 1), pixels_of((32, 32))
    plain = captured(wrapped(module).adapter, pixels, *SITES)
    for block in layers_of(wrapped(module).adapter):
        block.attn.fused_attn = True
    adapter = wrapped(module).adapter
    assert adapter.attention == "fused (scaled_dot_product_attention)"
    found = captured(adapter, pixels, *SITES)
    for tap in found.activations:
        close(found.activations[tap], plain.activations[tap])
        close(found.gradients[tap], plain.gradients[tap])


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_are_those_of_a_run_without_our_hooks(version):
    module, pixels = made("timm", version, dynamic_img_size=True).double(), pixels_of((40, 32)).double()
    adapter = wrapped(module).adapter
    found = captured(adapter, pixels, *SITES)
    twin, kept = copy.deepcopy(module), {}

    def keep(tap, tensor):
        tensor.retain_grad()
        kept[tap] = tensor

    blocks = [block for stage in twin.layers for block in stage.blocks]
    for number, block in enumerate(blocks):
        parts = {"F1": block.norm1, "F2": block.attn.softmax, "F3": block.attn, "F4": block.norm2, "F5": block.mlp}
        for site, part in (parts | {"F6": block}).items():
            tap = Tap("vision", number, site)
            part.register_forward_hook(lambda _, __, output, tap=tap: keep(tap, output))
        tap = Tap("vision", number, "F3_HEADS")
        block.attn.proj.register_forward_pre_hook(lambda _, args, tap=tap: keep(tap, args[0]))
    twin(pixels)[:, 1].sum().backward()
    for tap, gradient in found.gradients.items():
        wanted, order = kept[tap].grad, slow_windows(found.windows[tap])
        if tap.site == "F2":
            wanted = wanted.reshape(2, len(order), *wanted.shape[1:])
        elif tap.site in ("F3", "F3_HEADS"):
            wanted = torch.stack(
                [
                    wanted.reshape(2, -1, wanted.shape[-1])[:, [t for w in order for t in w].index(token)]
                    for token in range(gradient.shape[1])
                ],
                1,
            )
        torch.testing.assert_close(gradient, wanted.reshape(gradient.shape), atol=1e-10, rtol=1e-8)


def ends_of(adapter, pixels, module, direction, step):
    """The logit of class 1 with the output of a module moved; the direction is drawn to fit and handed out."""

    def nudge(_, __, output):
        first = output[0] if isinstance(output, tuple) else output
        torch.manual_seed(1)
        direction.append(torch.randn_like(first))
        moved = first + step * direction[-1]
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    handle = module.register_forward_hook(nudge)
    with torch.no_grad(), adapter.running():
        end = adapter.trunk(inputs_of(adapter, pixels))[0, 1]
    handle.remove()
    return end


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_gradient_is_the_slope_of_the_logit(library):
    """Finite differences, at every site that is the output of a module."""
    module, pixels = made(library, 1).double(), pixels_of((40, 32), 1).double()
    adapter = wrapped(module).adapter
    found = captured(adapter, pixels, *SITES)
    for tap, gradient in found.gradients.items():
        reading = adapter.anatomy.stream("vision").reading(tap.layer, tap.site)
        if reading.how != "output":
            continue
        direction = []
        up, down = (ends_of(adapter, pixels, reading.module, direction, step) for step in (1e-5, -1e-5))
        moved = direction[0]
        if tap.site == "F3" and moved.ndim == 3:
            moved = found.windows[tap].raster(moved)
        slope = (gradient * moved.reshape(gradient.shape)).sum()
        torch.testing.assert_close((up - down) / 2e-5, slope, atol=1e-6, rtol=1e-5)


# Which cell is which


@each_kind
def test_only_the_cell_of_the_changed_patch_moves(library, version):
    """And of what attention gives, those in the window of that patch."""
    adapter = wrapped(made(library, version)).adapter
    before = pixels_of((40, 32), 1)
    for row, column in [(0, 0), (2, 5), (9, 7)]:
        after = before.clone()
        after[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        one, other = (captured(adapter, each, "F1", "F3") for each in (before, after))

        def moved(site, one=one, other=other):
            differs = (at(other.activations, site, 0) - at(one.activations, site, 0)).abs().sum(-1)[0] > 1e-9
            return set(torch.nonzero(differs).flatten().tolist())

        cell = row * 8 + column
        if version == 1:
            assert moved("F1") == {cell}
        (window,) = [each for each in slow_windows(one.windows[Tap("vision", 0, "F3")]) if cell in each]
        assert moved("F3") == set(window) - {None}


@each_kind
@pytest.mark.parametrize(("layer", "columns", "count"), [(0, 8, 80), (1, 8, 80), (3, 4, 20)])
def test_a_hot_token_comes_back_at_its_place(library, version, layer, columns, count):
    adapter, pixels = wrapped(made(library, version)).adapter, pixels_of((40, 32), 1)
    module = adapter.anatomy.stream("vision").reading(layer, "F3").module
    order = slow_windows(windows_of(adapter, pixels, layer))
    for token in (0, columns + 1, count - 1):
        (window,) = [each for each in order if token in each]

        def heat(_, __, output, token=token, window=window):
            first = (output[0] if isinstance(output, tuple) else output).clone()
            in_order = (order.index(window), window.index(token))
            first[in_order if first.ndim == 3 else (0, token // columns, token % columns)] += 1000
            return (first, *output[1:]) if isinstance(output, tuple) else first

        handle = module.register_forward_hook(heat)
        found = at(captured(adapter, pixels, "F3").activations, "F3", layer)
        handle.remove()
        assert torch.nonzero(found[0].amin(-1) > 500).flatten().tolist() == [token]


# The model is left as found


def sizes_in(module):
    return [
        (getattr(part, "shift_size", None), getattr(part, "window_size", None), getattr(part, "dynamic_mask", None))
        for part in module.modules()
        if hasattr(part, "window_size")
    ]


def breaking(_):
    raise ZeroDivisionError("as a test")


@each_kind
def test_the_model_is_left_as_found(library, version):
    module = made(library, version)
    model = wrapped(module)
    module.train()
    state, sizes, large = models.state(module), sizes_in(module), pixels_of((64, 64), 1)
    first = model.explain(large[0], recipe="pgc-layercam", target=1, layer=0, site="F3")
    # In the last stage its grid is one window, upon which transformers gives the shift up.
    model.explain(pixels_of((32, 32), 1)[0], recipe="raw-attention", layer=3)
    with pytest.raises(ZeroDivisionError):
        model.explain(pixels_of((32, 32), 1)[0], recipe="pgc-layercam", target=breaking, site="F6")
    models.assert_same(state, models.state(module))
    assert sizes_in(module) == sizes
    again = model.explain(large[0], recipe="pgc-layercam", target=1, layer=0, site="F3")
    np.testing.assert_array_equal(first.tokens, again.tokens)
    close(captured(model.adapter, large).outputs["class"], captured(model.adapter, large, *SITES).outputs["class"])


def test_transformers_itself_loses_the_shift():
    module, large = made("hf", 1), pixels_of((64, 64), 1)
    before = logits_of(module, large)
    captured(wrapped(module).adapter, pixels_of((32, 32), 1), *SITES)
    assert torch.equal(logits_of(module, large), before)
    logits_of(module, pixels_of((32, 32), 1))
    assert not torch.allclose(logits_of(module, large), before)


def test_a_shift_that_was_lost_before_is_noted():
    module = made("hf", 1, image_size=64)
    assert "shift from" not in wrapped(module).anatomy.notes[-1]
    logits_of(module, pixels_of((32, 32), 1))
    assert "has taken the shift from blocks 3 before" in wrapped(module).anatomy.notes[-1]


def test_a_model_that_a_small_image_has_broken_is_refused():
    module = made("hf", 1)
    with pytest.raises(RuntimeError, match="must match"):
        logits_of(module, pixels_of((40, 24), 1))
    with pytest.raises(
        vlcam.AdapterError, match=r"block 2 has a window of 3, its table of positions is for 4: .* load"
    ):
        wrapped(module).explain(pixels_of((32, 32), 1)[0], recipe="pgc-gradcam", target=1)


def test_gradient_checkpointing_of_timm_is_off_while_it_runs():
    module, pixels = made("timm", 1), pixels_of((32, 32))
    plain = captured(wrapped(module).adapter, pixels, *SITES)
    module.set_grad_checkpointing()
    found = captured(wrapped(module).adapter, pixels, *SITES)
    for tap in found.gradients:
        close(found.gradients[tap], plain.gradients[tap])
    assert all(stage.grad_checkpointing for stage in module.layers)
    assert "gradient checkpointing" in str(wrapped(module).anatomy)


# Sizes and grids


@each_kind
def test_the_last_grid_of_a_wide_image_is_used_whole(library, version):
    """B46: 64 x 32 at patch 4 and two stages is 8 x 4."""
    model = wrapped(made(library, version))
    for site, recipe in [("F3", "pgc-layercam"), ("F6", "pgc-layercam"), ("F2", "raw-attention")]:
        found = model.explain(pixels_of((64, 32), 1)[0], recipe=recipe, site=site, relu="none")
        assert found.tokens.shape == (8, 4)
        assert np.all(found.tokens != 0)
        assert found.provenance["run"]["grid"] == [8, 4]
        assert found.provenance["run"]["prefix_tokens"] == []
        assert found.heatmap.shape == (64, 32)
    assert model.explain(pixels_of((64, 32), 1)[0], recipe="pgc-layercam", site="F6", layer=1).tokens.shape == (16, 8)


@each_kind
def test_padding_has_no_cell(library, version):
    """B47: 40 x 32 is 10 x 8 and then 5 x 4, which windows of 4 x 4 pad to 8 x 4."""
    model = wrapped(made(library, version))
    image = pixels_of((40, 32), 1)[0]
    for site in ("F3", "F5", "F6"):
        assert model.explain(image, recipe="pgc-layercam", site=site).tokens.shape == (5, 4)
    assert model.explain(image, recipe="attn-gradcam").tokens.shape == (5, 4)
    assert model.explain(image, recipe="raw-attention", layer=1).tokens.shape == (10, 8)


def test_the_smallest_size_of_transformers_is_stated():
    model = wrapped(made("hf", 1))
    message = (
        r"image size \(40, 24\): stage 1 would have a grid of 5 x 3, and transformers' Swin takes none smaller "
        "than its window, 4 x 4; give images of at least 28 x 28 pixels"
    )
    with pytest.raises(vlcam.InputError, match=message):
        model.explain(pixels_of((40, 24), 1)[0], recipe="pgc-gradcam")
    assert model.explain(pixels_of((28, 28), 1)[0], recipe="pgc-gradcam").tokens.shape == (4, 4)
    for library, version in KINDS[1:]:
        found = wrapped(made(library, version)).explain(pixels_of((40, 24), 1)[0], recipe="attn-gradcam")
        assert found.tokens.shape == (5, 3)


@each_kind
def test_a_size_between_two_patches_is_refused(library, version):
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 4"):
        wrapped(made(library, version)).adapter.accept_pixels(pixels_of((34, 32)))


def test_timm_takes_other_sizes_where_asked():
    module = made("timm", 1)
    with pytest.raises(vlcam.InputError, match=r"trained at \(32, 32\); wrap or load it with dynamic_img_size=True"):
        vlcam.wrap(module).adapter.accept_pixels(pixels_of((64, 32)))
    asked = vlcam.wrap(module, dynamic_img_size=True)
    assert asked.adapter.options == {"labels": None, "image_size": None, "dynamic_img_size": True}
    twin = vlcam.wrap(dynamic(module))
    for size in ((32, 32), (64, 32), (40, 24)):
        one, other = (
            each.explain(pixels_of(size, 1)[0], recipe="attn-gradcam", target=1, layer=1) for each in (asked, twin)
        )
        np.testing.assert_allclose(one.tokens, other.tokens, rtol=1e-4, atol=1e-7)
    assert not any(block.dynamic_mask for block in layers_of(asked.adapter))


def test_a_timm_that_makes_masks_for_one_size_is_not_asked_for_others():
    module = made("timm", 1)
    del layers_of(vlcam.wrap(module).adapter)[1].dynamic_mask
    assert vlcam.wrap(module).adapter.sizes.others is False
    with pytest.raises(vlcam.AdapterError, match=r"this version of timm makes the masks .* for one size"):
        vlcam.wrap(module, dynamic_img_size=True)


@pytest.mark.parametrize("version", [1, 2])
def test_timm_with_windows_that_are_not_square(version):
    module = made("timm", version)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as timm resizes its table of positions
        module.set_input_size(img_size=(64, 32))
    adapter, pixels = vlcam.wrap(module).adapter, pixels_of((64, 32))
    assert windows_of(adapter, pixels, 1) == Windows((16, 8), (8, 4), (4, 2))
    found = captured(adapter, pixels, *SITES)
    close(found.outputs["class"], logits_of(module, pixels))
    for layer, before in enumerate(block_inputs(adapter, pixels)):
        first, second = norms_of(layers_of(adapter)[layer])
        added = [at(found.activations, site, layer) for site in ("F3", "F5")]
        if version == 2:
            added = [norm(each) for norm, each in zip((first, second), added, strict=True)]
        close(before + added[0] + added[1], at(found.activations, "F6", layer))


def test_absolute_positions_allow_the_trained_size_only():
    adapter = wrapped(made("hf", 1, use_absolute_embeddings=True)).adapter
    assert captured(adapter, pixels_of((32, 32)), *SITES).target.shape == (2,)
    with pytest.raises(vlcam.InputError, match=r"trained at \(32, 32\); its absolute positions are made for that size"):
        adapter.accept_pixels(pixels_of((64, 32)))


# Maps


R12 = [(library, site) for library in ("hf", "timm") for site in ("F1", "F4")]


class Logits(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, pixels):
        return self.module(pixels).logits


@pytest.mark.parametrize(("library", "site"), R12)
def test_grad_cam_of_the_peer(library, site):
    """R12: its README reads norm1 of the last block, its example norm2."""
    pgc = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.utils.image import scale_cam_image
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    module = made(library, 1) if library == "hf" else made("timm", 1, dynamic_img_size=True)
    twin, image = copy.deepcopy(module), pixels_of((64, 32), 1, seed=4)
    last = twin.swin.encoder.layers[-1].blocks[-1] if library == "hf" else twin.layers[-1].blocks[-1]
    part = norms_of(last)[0 if site == "F1" else 1]

    def to_grid(tokens):
        return tokens.reshape(1, 8, 4, -1).permute(0, 3, 1, 2)

    with pgc.GradCAM(Logits(twin) if library == "hf" else twin, [part], reshape_transform=to_grid) as cam:
        theirs = cam(input_tensor=image, targets=[ClassifierOutputTarget(1)])[0]
    ours = wrapped(module).explain(image[0], recipe="pgc-gradcam", target=1, site=site).tokens
    laid = scale_cam_image(scale_cam_image(np.maximum(ours, 0)[None], (32, 64)))[0]
    np.testing.assert_allclose(laid, theirs, atol=1e-5, rtol=0)


BY_ROWS = {
    "attention": {"weighting": "attention", "relu": "none", "target": "none", "scale": "none", "gradient_path": "none"},
    "product": {"weighting": "attention*gradient", "relu": "before_heads"},
    "product, largest head": {"weighting": "attention*gradient", "relu": "none", "heads": "max"},
    "product, after heads": {"weighting": "attention*gradient", "relu": "after_heads", "heads": "sum"},
    "gradient": {"weighting": "gradient", "relu": "gradient"},
    "gradient, signed": {"weighting": "gradient", "relu": "none"},
    "sigmoid": {"weighting": "sigmoid*gradient", "relu": "gradient", "heads": "sum"},
    "queries": {"weighting": "attention*gradient", "relu": "gradient", "map_axis": "queries"},
    "head weights": {"weighting": "head_weights", "relu": "after_heads", "gradient_tokens": "patches"},
}


def full(values, order, count):
    """Over all tokens, [H, N, N]: zero where two tokens are not in one window. Padding is no token."""
    whole = torch.zeros(values.shape[1], count, count, dtype=torch.float64)
    for number, each in enumerate(order):
        held = [(place, token) for place, token in enumerate(each) if token is not None]
        for place, token in held:
            for other, seen in held:
                whole[:, token, seen] = values[number, :, place, other]
    return whole


def by_rows(recipe, attention, gradient, scores):
    """The map of a full matrix: heads merged, then the mean over all rows."""
    if recipe.map_axis == "queries":
        attention, gradient, scores = (each.transpose(1, 2) for each in (attention, gradient, scores))
    kept = gradient.relu() if recipe.relu == "gradient" else gradient
    values = {
        "attention": attention,
        "gradient": kept,
        "attention*gradient": attention * kept,
        "sigmoid*gradient": kept * scores.sigmoid(),
        "head_weights": attention * gradient.mean((1, 2))[:, None, None],
    }[recipe.weighting]
    if recipe.relu == "before_heads":
        values = values.relu()
    merged = {"mean": values.mean(0), "sum": values.sum(0), "max": values.amax(0)}[recipe.heads]
    return (merged.relu() if recipe.relu == "after_heads" else merged).mean(0)


@pytest.mark.parametrize("choice", BY_ROWS)
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize(("library", "size"), [("hf", (40, 32)), ("timm", (40, 24)), ("torchvision", (40, 24))])
def test_attention_maps_are_those_of_the_whole_matrix(library, size, layer, choice):
    model = wrapped(made(library, 1).double())
    image = pixels_of(size, 1).double()
    base = {"layers": layer, "queries": "patches", "map_axis": "keys", "gradient_tokens": "none", "heads": "mean"}
    recipe = named("attn-gradcam").recipe.replace(**base | BY_ROWS[choice])
    target = {} if recipe.target == "none" else {"target": 1}
    found = model.explain(image[0], recipe=recipe, **target).tokens

    raw = captured(model.adapter, image, "F2", SCORES)
    windows = raw.windows[Tap("vision", layer, "F2")]
    order, count = slow_windows(windows), windows.grid[0] * windows.grid[1]
    attention, scores = (full(at(raw.activations, site, layer)[0], order, count) for site in ("F2", SCORES))
    gradient = full(at(raw.gradients, "F2", layer)[0], order, count)
    wanted = by_rows(recipe, attention, gradient, scores)
    # The mean over the 16 places of a window instead of all N; so for the heads' weights, over the windows' squares.
    factor = count / 16
    if recipe.weighting == "head_weights":
        factor *= count**2 / (len(order) * 16**2)
    np.testing.assert_allclose(found, (wanted * factor).reshape(windows.grid), atol=1e-6 * abs(found).max(), rtol=1e-5)


@pytest.mark.parametrize("weighting", ["gradcam", "layercam", "hirescam"])
@pytest.mark.parametrize(("library", "layer"), [("hf", 1), ("timm", 3), ("torchvision", 0)])
def test_heads_as_channels(library, layer, weighting):
    model = wrapped(made(library, 1).double())
    image = pixels_of((40, 32), 1).double()
    tokens = "patches" if weighting == "gradcam" else "none"
    choices = {"heads": "channels", "weighting": weighting, "relu": "none", "gradient_tokens": tokens}
    found = model.explain(
        image[0], recipe=named("attn-gradcam").recipe.replace(queries="patches", layers=layer, **choices), target=1
    )
    raw = captured(model.adapter, image, "F2")
    windows = raw.windows[Tap("vision", layer, "F2")]
    order, count = slow_windows(windows), windows.grid[0] * windows.grid[1]
    features, gradient = (
        full(at(tensors, "F2", layer)[0], order, count).mean(1).T * (count / 16)
        for tensors in (raw.activations, raw.gradients)
    )
    weights = {"gradcam": gradient.mean(0), "layercam": gradient.relu(), "hirescam": gradient}[weighting]
    wanted = (features * weights).sum(1).reshape(windows.grid)
    np.testing.assert_allclose(found.tokens, wanted, rtol=1e-5, atol=1e-6 * abs(found.tokens).max())


CHOICES = (
    {"recipe": "pgc-layercam", "site": "F3", "relu": "none"},
    {"recipe": "pgc-layercam", "site": "F6", "layer": 1},
    {"recipe": "attn-gradcam", "layer": 1},
)


@each_kind
def test_three_images_are_three_times_one(library, version):
    model, images = wrapped(made(library, version)), pixels_of((40, 32), 3)
    for choices in CHOICES:
        for one, image in zip(model.explain(images, target=1, **choices), images, strict=True):
            alone = model.explain(image, target=1, **choices)
            np.testing.assert_allclose(one.tokens, alone.tokens, rtol=1e-3, atol=1e-5 * abs(alone.tokens).max())


@each_kind
def test_several_classes_of_one_image(library, version):
    model, image = wrapped(made(library, version)), pixels_of((40, 32), 1)[0]
    for choices in CHOICES:
        together = model.explain(image, target=[0, 1], **choices)
        for label, one in enumerate(together):
            alone = model.explain(image, target=label, **choices)
            np.testing.assert_allclose(one.tokens, alone.tokens, rtol=1e-3, atol=1e-5 * abs(alone.tokens).max())


@each_kind
def test_half_precision_is_finite(library, version):
    model = wrapped(made(library, version).to(torch.bfloat16))
    for choices in CHOICES:
        assert np.isfinite(model.explain(pixels_of((40, 32), 1)[0], target=1, **choices).tokens).all()


@each_kind
def test_every_recipe_of_the_grid_has_a_map(library, version):
    model, image = wrapped(made(library, version)), pixels_of((40, 32), 1)[0]
    recipes = vlcam.all_recipes(model)
    assert len(recipes) > 100
    for found in model.sweep(image, recipes=recipes, target=1, empty="keep"):
        layer = found.provenance["run"]["layers"][0]
        assert found.tokens.shape == ((10, 8), (10, 8), (5, 4), (5, 4))[layer]
        assert np.isfinite(found.tokens).all()


def test_layers_of_two_stages_have_two_grids():
    model, image = wrapped(made("timm", 1)), pixels_of((40, 32), 1)[0]
    both = {"recipe": "pgc-layercam", "layer_rule": "mean"}
    with pytest.raises(
        vlcam.RecipeError, match=r"of stages \[0, 1\], whose grids have different sizes; choose blocks of one stage"
    ):
        model.explain(image, layer=(1, 2), **both)
    assert model.explain(image, layer=(2, 3), **both).tokens.shape == (5, 4)


@pytest.mark.parametrize("recipe", ["attention-rollout", "chefer-generic", "vitexplain-grad-rollout"])
def test_there_are_no_matrices_to_multiply(recipe):
    """B48."""
    model = wrapped(made("hf", 1))
    with pytest.raises(
        vlcam.RecipeError, match=r"attend within windows, and stages merge tokens, so that there are no"
    ):
        model.explain(pixels_of((32, 32), 1)[0], recipe=recipe)


def test_there_is_no_class_token():
    model, image = wrapped(made("hf", 1)), pixels_of((32, 32), 1)[0]
    with pytest.raises(vlcam.RecipeError, match="there is no class token; queries='patches'"):
        model.explain(image, recipe="attn-gradcam", queries="cls")
    with pytest.raises(vlcam.RecipeError, match="there is no class token"):
        model.explain(image, recipe="attn-gradcam", queries=(0,))
    assert model.adapter.reads == "patches"


# A block read on its own


def final_norm_and_head(module):
    if hasattr(module, "swin") or hasattr(module, "swinv2"):
        return module.base_model.layernorm, module.classifier
    return module.norm, module.head.fc if hasattr(module.head, "fc") else module.head


@each_kind
def test_a_block_of_the_last_stage_is_read_by_norm_and_head(library, version):
    module = made(library, version)
    adapter = wrapped(module).adapter
    norm, head = final_norm_and_head(module)
    tokens = torch.randn(2, 9, 16)
    with torch.no_grad():
        close(adapter.read_block("class", tokens, None), head(norm(tokens.sum(1) / 9)))
    with pytest.raises(vlcam.RecipeError, match=r"read 16 channels, and this block has 8: only blocks .* 2 to 3, can"):
        adapter.read_block("class", torch.randn(2, 9, 8), None)


@each_kind
def test_legrad_reads_blocks_of_the_last_stage(library, version):
    module = made(library, version)
    model, image = wrapped(module), pixels_of((40, 32), 1)
    found = model.explain(image[0], recipe="legrad", target=1, normalize="none")
    assert found.provenance["run"]["layers"] == [2, 3]
    norm, head = final_norm_and_head(module)
    total = 0
    for layer in (2, 3):
        twin, kept = copy.deepcopy(module), {}
        adapter = wrapped(twin).adapter
        reading = adapter.anatomy.stream("vision").reading(layer, "F2").module

        def soften(scores, *args, _plain=torch.nn.functional.softmax, kept=kept, **given):
            kept["attention"] = _plain(scores, *args, **given).detach().requires_grad_()
            return kept["attention"]

        with pytest.MonkeyPatch.context() as patch:
            start = reading.register_forward_pre_hook(
                lambda *_, patch=patch, soften=soften: patch.setattr(torch.nn.functional, "softmax", soften)
            )
            stop = reading.register_forward_hook(lambda *_, patch=patch: patch.undo())
            layers_of(adapter)[layer].register_forward_hook(
                lambda _, __, output, kept=kept: kept.update(output=output[0] if isinstance(output, tuple) else output)
            )
            if library == "hf":
                twin.set_attn_implementation("eager")
            with adapter.running():
                adapter.trunk(inputs_of(adapter, image))
                windows = adapter.windows("vision", layer, adapter.accept_pixels(image))
            start.remove()
            stop.remove()
        tokens = kept["output"].reshape(1, -1, 16)
        (gradient,) = torch.autograd.grad(head(norm(tokens.mean(1)))[0, 1], kept["attention"])
        order = slow_windows(windows)
        total = total + full(gradient.relu(), order, 20).mean(0).mean(0) * 20 / 16
    np.testing.assert_allclose(found.tokens, total.reshape(5, 4), rtol=1e-3, atol=1e-5 * float(total.max()))
    with pytest.raises(vlcam.RecipeError, match="only blocks of the last stage, 2 to 3"):
        model.explain(image[0], recipe="legrad", target=1, layer=1)


@pytest.mark.parametrize("library", ADAPTERS)
def test_the_direct_path_needs_a_norm_before_attention(library):
    image = pixels_of((40, 32), 1)[0]
    found = wrapped(made(library, 1)).explain(image, recipe="agcam", layer=1, layer_rule="single")
    assert found.tokens.shape == (10, 8)
    with pytest.raises(
        vlcam.UnknownNameError, match=r"F1 of vision block 0 does not exist: the block is res-post-norm"
    ):
        wrapped(made(library, 2)).explain(image, recipe="agcam", layer=1, layer_rule="single")


# Which models


@each_kind
def test_the_adapter_is_found_and_says_what_it_sees(library, version):
    model = wrapped(made(library, version))
    assert type(model.adapter) is ADAPTERS[library]
    stream = model.anatomy.stream("vision")
    assert (stream.width, stream.heads, stream.windowed, len(stream.blocks)) == (16, 4, True, 4)
    lacking = {"F1", "F4"} if version == 2 else set()
    lacking |= {"F3_HEADS"} if library == "torchvision" else set()
    assert set(SITES) - set(stream.blocks[0].sites) == lacking == set(stream.blocks[0].lacks)
    assert stream.tokens == "8 x 8 patches in blocks 0-1, 4 x 4 in blocks 2-3, in raster order"
    notes = " ".join(model.anatomy.notes)
    for said in ("attend within windows, shifted in block", "padded to whole windows", "merged", "mean of all tokens"):
        assert said in notes
    assert ("before the LayerNorm" in notes) == (version == 2)
    assert model.adapter.prefix == ()


def test_sites_that_are_missing_have_reasons():
    image = pixels_of((32, 32), 1)[0]
    for library in ADAPTERS:
        heads = "" if library == "torchvision" else "'F3_HEADS', "
        message = (
            rf"F1 of vision block 3 .*: the block is res-post-norm: .*; this block has 'F2', {heads}'F3', 'F5', 'F6'"
        )
        with pytest.raises(vlcam.UnknownNameError, match=message):
            wrapped(made(library, 2)).explain(image, recipe="pgc-gradcam")
    with pytest.raises(vlcam.UnknownNameError, match=r"F3_HEADS of vision block 3 .* inside a function"):
        wrapped(made("torchvision", 1)).explain(image, recipe="pgc-gradcam", site="F3_HEADS")


def test_other_variants_are_refused():
    cr = timm.create_model(
        "swinv2_cr_tiny_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 4)
    )
    with pytest.raises(vlcam.AdapterError, match=r"SwinTransformerV2Cr \(swinv2_cr_\*\) is another implementation"):
        vlcam.wrap(cr)
    assert not SwinTimm.loads({"architecture": "swinv2_cr_tiny_224"})
    assert SwinTimm.loads({"architecture": "swinv2_tiny_window8_256"})
    assert SwinTimm.loads({"architecture": "swin_s3_tiny_224"})
    assert not VitTimm.loads({"architecture": "swin_tiny_patch4_window7_224"})
    with pytest.raises(vlcam.AdapterError, match=r"no adapter accepts .*SwinModel"):
        vlcam.wrap(SwinModel(made("hf", 1).config))
    with pytest.raises(
        vlcam.AdapterError, match=r"expected SwinForImageClassification or Swinv2ForImageCl.*, found Lin"
    ):
        SwinHF.wrap(nn.Linear(1, 1), None)
    with pytest.raises(vlcam.AdapterError, match=r"SwinTransformer, SwinTransformerV2 or SwinTransformerV2Cr of timm"):
        SwinTimm.wrap(nn.Linear(1, 1), None)
    with pytest.raises(vlcam.AdapterError, match="expected torchvision's SwinTransformer, found Linear"):
        SwinTorchvision.wrap(nn.Linear(1, 1), None)


def test_models_without_classes_are_refused():
    with pytest.raises(vlcam.AdapterError, match="has no classifier"):
        vlcam.wrap(made("timm", 1, num_classes=0))
    with pytest.raises(vlcam.AdapterError, match="gives logits for every token"):
        vlcam.wrap(made("timm", 1, global_pool=""))
    with pytest.raises(vlcam.AdapterError, match="has no classifier"):
        vlcam.wrap(made("hf", 1, num_labels=0))
    module = made("torchvision", 1)
    module.head = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match=r"model\.head = nn\.Linear\(16, classes\)"):
        vlcam.wrap(module)


def test_blocks_that_are_not_known_are_refused():
    module = made("timm", 1)
    module.layers[1].blocks[0] = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match="block 2 is of class torch"):
        vlcam.wrap(module)
    module = made("torchvision", 1)
    module.features[1][1] = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match="block 1 is of class torch"):
        vlcam.wrap(module)
    module = made("torchvision", 1)
    module.features[2] = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match="stages of blocks with PatchMerging between them"):
        vlcam.wrap(module)


@pytest.mark.parametrize("pool", ["max", "catavgmax"])
def test_other_pooling_of_timm_is_not_called_a_mean(pool):
    model = vlcam.wrap(made("timm", 1, global_pool=pool))
    assert "mean of all tokens" not in str(model.anatomy)
    assert model.explain(pixels_of((32, 32), 1)[0], recipe="legrad", target=1).tokens.shape == (4, 4)


# Images and checkpoints


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_transformers_is_loaded_and_verified(version, tmp_path):
    made("hf", version).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 64, "width": 32}).save_pretrained(tmp_path)
    model = vlcam.load(tmp_path, labels=list("abcde"))
    assert type(model.adapter) is SwinHF
    found = model.explain(PHOTO, recipe="attn-gradcam", target="c")
    assert found.tokens.shape == (8, 4)
    assert found.heatmap.shape == (90, 61)
    assert [step["step"] for step in found.provenance["image"]["steps"]] == [
        "processor",
        "resize",
        "rescale",
        "normalize",
    ]
    again = vlcam.load(tmp_path, **found.provenance["model"]["options"])
    assert found.verify(again).identical


def test_a_folder_of_timm_is_loaded_and_verified(tmp_path):
    torch.manual_seed(0)
    tiny = {**TINY, "img_size": 32, "num_classes": 5}
    module = randomised(timm.create_model("swin_tiny_patch4_window7_224", **tiny))
    timm.models.save_for_hf(module, tmp_path, safe_serialization=True, model_args=tiny)
    model = vlcam.load(tmp_path, labels=list("abcde"), image_size=(64, 32), dynamic_img_size=True)
    assert type(model.adapter) is SwinTimm
    found = model.explain(PHOTO, recipe="pgc-layercam", target="c", layer=1)
    assert found.tokens.shape == (16, 8)
    again = vlcam.load(tmp_path, **found.provenance["model"]["options"])
    assert found.verify(again).identical


def test_torchvision_takes_weights_or_their_transforms():
    module = made("torchvision", 1)
    model = vlcam.wrap(module, ImageClassification(crop_size=40, resize_size=48), labels=list("abcde"))
    assert model.explain(PHOTO, recipe="pgc-layercam", target="c").tokens.shape == (5, 5)
    with pytest.raises(vlcam.InputError, match=r"for example vlcam\.wrap\(model, Swin_T_Weights\.DEFAULT\)"):
        vlcam.wrap(module).explain(PHOTO, recipe="pgc-layercam")
    with pytest.raises(vlcam.AdapterError, match="names 1000 classes, but the model has 5"):
        vlcam.wrap(module, Swin_T_Weights.DEFAULT)
    with pytest.raises(vlcam.AdapterError, match=r"weights = Swin_T_Weights\.DEFAULT, model = swin_t"):
        SwinTorchvision.load("anywhere", local=True)
