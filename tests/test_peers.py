"""The same map as other libraries give, on random models: grad-cam 1.5.7, torchcam 0.5.0, captum 0.9.0.

Peers work on copies of the models, because they zero gradients and switch training modes. Each comparison is of raw
token maps where the peer lets them be seen, and of the peer's own result after the peer's own tail on our tokens.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import models
import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import ViTConfig, ViTForImageClassification

import vlcam

SITES = [("F1", 2), ("F1", 1), ("F4", 1), ("F6", 0)]
"""The peers' usual site, and three of earlier blocks, of three blocks."""
PGC = {
    "pgc-gradcam": "GradCAM",
    "pgc-gradcam++": "GradCAMPlusPlus",
    "pgc-xgradcam": "XGradCAM",
    "pgc-hirescam": "HiResCAM",
    "pgc-layercam": "LayerCAM",
    "pgc-elementwise": "GradCAMElementWise",
}
EIGEN = {"pgc-eigencam": "EigenCAM", "pgc-eigengradcam": "EigenGradCAM"}
TORCHCAM = {
    "pgc-gradcam": "GradCAM",
    "pgc-xgradcam": "XGradCAM",
    "pgc-layercam": "LayerCAM",
    "torchcam-gradcam++-as-coded": "GradCAMpp",
}


@dataclass(frozen=True)
class Subject:
    """A model for us, a copy that returns logits for the peer, and where that has its parts."""

    explainer: Any
    twin: nn.Module
    pixels: torch.Tensor
    grid: tuple[int, int]
    label: int = 1

    def part(self, site, layer):
        blocks, first, second = parts(self.twin)
        return {"F1": getattr(blocks[layer], first), "F4": getattr(blocks[layer], second), "F6": blocks[layer]}[site]

    def to_grid(self, tokens):
        """What peers call a reshape transform: [B, D, h, w] from [B, 1 + h w, D]."""
        return tokens[:, 1:].reshape(len(tokens), *self.grid, -1).permute(0, 3, 1, 2)

    def tokens(self, recipe, **choices):
        return self.explainer.explain(self.pixels, recipe=recipe, **{"target": self.label, **choices}).tokens


class Logits(nn.Module):
    """A model of Hugging Face that returns a tensor."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, pixel_values):
        return self.module(pixel_values).logits


def parts(module):
    """The blocks, and the names of their two LayerNorms."""
    if isinstance(module, TimmViT):
        return module.blocks, "norm1", "norm2"
    if isinstance(module, TorchvisionViT):
        return module.encoder.layers, "ln_1", "ln_2"
    return module.module.vit.layers, "layernorm_before", "layernorm_after"


def randomised(module, width):
    """No zero hides a path; weights so small that a wide model is no more extreme than a narrow one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if name.endswith("weight") and ("norm" in name or "ln" in name) else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3 * (32 / width) ** 0.5)
    return module.eval()


@functools.cache
def subject(kind, *, dtype=torch.float32):
    torch.manual_seed(0)
    make = {"timm": timm_vit, "hf": hf_vit, "torchvision": torchvision_vit}[kind.partition("-")[0]]
    height, width, patch, hidden = {"wide": (32, 48, 8, 32), "small": (224, 224, 16, 384)}.get(
        kind.partition("-")[2], (32, 32, 8, 32)
    )
    module = randomised(make((height, width), patch, hidden), hidden).to(dtype)
    twin = copy.deepcopy(module)
    return Subject(
        explainer=vlcam.wrap(module),
        twin=Logits(twin) if kind.startswith("hf") else twin,
        # An image in which no channel nearly cancels over the patches: XGradCAM divides by that sum.
        pixels=models.pixels(4, height=height, width=width).to(dtype),
        grid=(height // patch, width // patch),
    )


def timm_vit(size, patch, hidden):
    depth, heads = (6, 6) if hidden == 384 else (3, 4)
    return TimmViT(img_size=size, patch_size=patch, embed_dim=hidden, depth=depth, num_heads=heads, num_classes=6)


def hf_vit(size, patch, hidden):
    config = ViTConfig(
        image_size=list(size),
        patch_size=patch,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_labels=6,
    )
    return ViTForImageClassification(config)


def torchvision_vit(size, patch, hidden):
    return TorchvisionViT(size[0], patch, 3, 4, hidden, 2 * hidden, num_classes=6)


def assert_same(ours, theirs):
    """Equal to 1e-5 of the largest value."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


# grad-cam


@pytest.fixture(scope="session")
def pgc():
    return pytest.importorskip("pytorch_grad_cam")


def pgc_tail(maps, pixels):
    """How grad-cam ends: ReLU and min-max of each layer's map, cv2's resize, their mean, and min-max again."""
    from pytorch_grad_cam.utils.image import scale_cam_image

    size = (pixels.shape[2], pixels.shape[1])
    layers = [scale_cam_image(np.maximum(tokens, 0)[None], size)[0] for tokens in maps]
    return scale_cam_image(np.mean(layers, 0)[None])[0]


def run_pgc(method, subject, layers, **choices):
    """Its result, and the raw map of each layer."""
    return run_pgc_open(method, subject, layers, **choices)[:2]


def run_pgc_open(method, subject, layers, **choices):
    """The same, and each layer's activations and gradients, [1, D, h, w]."""
    cam = method(subject.twin, layers, reshape_transform=subject.to_grid)
    base = getattr(cam, "base_cam", cam)
    pixels = subject.pixels[None]
    try:
        final = cam(input_tensor=pixels, **choices)[0]
        activations = [tensor.numpy() for tensor in base.activations_and_grads.activations]
        gradients = [tensor.numpy() for tensor in base.activations_and_grads.gradients] or [None] * len(layers)
        raw = [
            base.get_cam_image(pixels, layer, None, *tensors, eigen_smooth=False)[0]
            for layer, *tensors in zip(layers, activations, gradients, strict=True)
        ]
    finally:
        base.activations_and_grads.release()
        subject.twin.zero_grad()
    return final, raw, activations, gradients


def pgc_target(label):
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    return [ClassifierOutputTarget(label)]


@pytest.mark.parametrize(("site", "layer"), SITES)
@pytest.mark.parametrize("kind", ["timm", "timm-wide", "hf", "hf-wide"])
@pytest.mark.parametrize("recipe", PGC)
def test_grad_cam(pgc, recipe, kind, site, layer):
    model = subject(kind)
    final, (raw,) = run_pgc(
        getattr(pgc, PGC[recipe]), model, [model.part(site, layer)], targets=pgc_target(model.label)
    )
    assert_same(model.tokens(recipe, site=site, layer=layer, relu="none"), raw)
    assert_same(pgc_tail([model.tokens(recipe, site=site, layer=layer)], model.pixels), final)


@pytest.mark.parametrize("recipe", [name for name in PGC if name != "pgc-gradcam++"])
def test_grad_cam_on_a_model_of_plausible_size(pgc, recipe):
    model = subject("timm-small")
    final, (raw,) = run_pgc(getattr(pgc, PGC[recipe]), model, [model.part("F1", -1)], targets=pgc_target(model.label))
    assert_same(model.tokens(recipe, relu="none"), raw)
    assert_same(pgc_tail([model.tokens(recipe)], model.pixels), final)


@pytest.mark.parametrize(("label", "share"), [(0, 8), (1, 1165)])
def test_grad_cam_plus_plus_near_its_poles(pgc, label, share):
    """Where 2 G^2 and G^3 sum A nearly cancel, rounding grows: the one case that does not agree to 1e-5.

    For class 1 they cancel at one token of one channel, which gives it a share of 1165. From the same activations and
    gradients both sides then differ by 2.0e-4 of the largest value, and from the formula in double precision by 1.8e-4
    (here) and 1.8e-5 (there), within what one rounding of the terms to float32 can do. For class 0, where the largest
    share is 8, they differ by 9e-7.
    """
    model = subject("timm-small")
    _, (raw,), (features,), (gradient,) = run_pgc_open(
        pgc.GradCAMPlusPlus, model, [model.part("F1", -1)], targets=pgc_target(label)
    )
    ours = model.tokens("pgc-gradcam++", relu="none", target=label)
    expected, rounding, largest = plus_plus(features[0].astype(np.float64), gradient[0].astype(np.float64))
    assert largest == pytest.approx(share, rel=0.05)
    for found in (ours, raw):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2 * rounding)
    assert rounding < 1e-3 * np.abs(raw).max()
    if label == 0:
        assert_same(ours, raw)


def plus_plus(features, gradient):
    """The map in double precision, what a float32 rounding of the terms does to it, and the largest share."""
    total = features.sum((1, 2), keepdims=True)
    terms = [2 * gradient**2, total * gradient**3, 1e-6]
    share = gradient**2 / sum(terms)
    error = np.abs(share / sum(terms)) * sum(np.abs(term) for term in terms) * np.finfo(np.float32).eps
    weights, errors = ((np.maximum(gradient, 0) * each).sum((1, 2)) for each in (share, error))
    mapped = np.einsum("c,chw->hw", weights, features)
    return mapped, np.einsum("c,chw->hw", errors, np.abs(features)).max(), np.abs(share[gradient > 0]).max()


@pytest.mark.parametrize("kind", ["timm", "hf"])
def test_gradient_times_activation_is_zero_before_a_last_block_that_reads_one_token(pgc, kind):
    """Patches of the last block but one reach [CLS] only through a LayerNorm, which ignores the scale of its input.

    Hence the sum over channels of G A is zero for each patch but for the LayerNorm's epsilon, here and there; what is
    left is rounding, and no two maps of it agree.
    """
    model = subject(kind)
    _, (raw,), activations, gradients = run_pgc_open(
        pgc.HiResCAM, model, [model.part("F6", 1)], targets=pgc_target(model.label)
    )
    size = np.abs(activations[0] * gradients[0]).sum(1).max()
    assert np.abs(raw).max() < 1e-5 * size
    assert np.abs(model.tokens("pgc-hirescam", site="F6", layer=1, relu="none")).max() < 1e-5 * size


@pytest.mark.parametrize(
    ("kind", "site", "layer"),
    [(kind, *place) for kind in ("timm-wide", "hf") for place in SITES] + [("timm-small", "F1", 5)],
)
@pytest.mark.parametrize("recipe", EIGEN)
def test_grad_cam_principal_components_up_to_their_sign(pgc, recipe, kind, site, layer):
    model = subject(kind)
    targets = pgc_target(model.label)
    final, (raw,) = run_pgc(getattr(pgc, EIGEN[recipe]), model, [model.part(site, layer)], targets=targets)
    ours = model.tokens(recipe, site=site, layer=layer, relu="none")
    sign = np.sign((ours * raw).sum())
    assert_same(sign * ours, raw)
    assert_same(pgc_tail([sign * ours], model.pixels), final)
    np.testing.assert_array_equal(model.tokens(recipe, site=site, layer=layer), np.maximum(ours, 0))


@pytest.mark.parametrize("label", [None, 1, 4])
@pytest.mark.parametrize("kind", ["timm-wide", "hf"])
def test_grad_cam_finer(pgc, kind, label):
    """Without a class both explain the one with the highest logit."""
    model = subject(kind)
    final, (raw,) = run_pgc(pgc.FinerCAM, model, [model.part("F1", -1)], target_idx=label)
    assert_same(model.tokens("pgc-finercam", target=label, relu="none"), raw)
    assert_same(pgc_tail([model.tokens("pgc-finercam", target=label)], model.pixels), final)


def test_grad_cam_merges_layers_after_its_min_max_of_each(pgc):
    model = subject("timm-wide")
    layers = (1, 2)
    final, _ = run_pgc(
        pgc.GradCAM, model, [model.part("F1", layer) for layer in layers], targets=pgc_target(model.label)
    )
    assert_same(pgc_tail([model.tokens("pgc-gradcam", layer=layer) for layer in layers], model.pixels), final)
    merged = model.tokens("pgc-gradcam", layer=layers, layer_rule="mean")
    assert np.abs(pgc_tail([merged], model.pixels) - final).max() > 0.01


# torchcam


@pytest.fixture(scope="session")
def torchcam():
    return pytest.importorskip("torchcam.methods")


def run_torchcam(method, model, layers, **options):
    """The raw map of each layer, after the ReLU and before min-max; and each layer's activations and gradients."""
    with method(model.twin, layers, **options) as extractor:
        scores = model.twin(model.pixels[None])
        maps = extractor(model.label, scores, normalized=False)
        seen = extractor.hook_a, extractor.hook_g
    return [found[0].detach().numpy() for found in maps], seen


@pytest.mark.parametrize(("site", "layer"), SITES)
@pytest.mark.parametrize("kind", ["torchvision", "timm-wide"])
@pytest.mark.parametrize("recipe", TORCHCAM)
def test_torchcam(torchcam, recipe, kind, site, layer):
    model = subject(kind, dtype=torch.float64)
    method = getattr(torchcam, TORCHCAM[recipe])
    (raw,), _ = run_torchcam(method, model, [model.part(site, layer)], reshape_transform=model.to_grid)
    assert_same(model.tokens(recipe, site=site, layer=layer), raw)


def test_torchcam_gradcampp_leaves_its_denominator_out(torchcam):
    """The weights of what it computes, of what it means to compute, and of what it documents are three."""
    model = subject("torchvision", dtype=torch.float64)
    (raw,), ((features,), (gradient,)) = run_torchcam(
        torchcam.GradCAMpp, model, [model.part("F4", 1)], reshape_transform=model.to_grid
    )
    features, gradient = features[0].numpy(), gradient[0].numpy()
    square, cube = gradient**2, gradient**3

    def mapped(share):
        weights = (np.maximum(gradient, 0) * share).sum((1, 2))
        return np.maximum(np.einsum("c,chw->hw", weights, features), 0)

    coded = mapped(square)
    meant = mapped(square / (2 * square + (cube * features).sum((1, 2), keepdims=True) + 1e-8))
    documented = mapped(square / (2 * square + features.sum((1, 2), keepdims=True) * cube))
    assert_same(raw, coded)
    assert_same(model.tokens("torchcam-gradcam++", site="F4", layer=1), meant)
    assert_same(model.tokens("torchcam-gradcam++-as-coded", site="F4", layer=1), coded)
    for one, other in [(coded, meant), (coded, documented), (meant, documented)]:
        assert np.abs(one / one.max() - other / other.max()).max() > 0.1


@pytest.mark.parametrize("recipe", ["pgc-gradcam", "pgc-layercam"])
def test_torchcam_fuses_layers_by_their_maximum(torchcam, recipe):
    """LayerCAM takes tanh(2 M) of each map before, which is no part of the recipe."""
    model, layers = subject("timm-wide", dtype=torch.float64), (1, 2)
    method = getattr(torchcam, TORCHCAM[recipe])
    maps, _ = run_torchcam(
        method, model, [model.part("F1", layer) for layer in layers], reshape_transform=model.to_grid
    )
    fused = method.fuse_cams([torch.from_numpy(found)[None] for found in maps])[0].numpy()
    ours = model.tokens(recipe, layer=layers, layer_rule="max")
    assert_same(np.tanh(2 * ours) if recipe == "pgc-layercam" else ours, fused)


@pytest.mark.parametrize("layers", [(2,), (1, 2), (0, 1, 2)])
def test_torchcam_legrad_averages_the_layers(torchcam, layers):
    model = subject("torchvision", dtype=torch.float64)
    (raw,), _ = run_torchcam(torchcam.LeGrad, model, [model.part("F6", layer) for layer in layers])
    assert_same(model.tokens("legrad", layer=layers, layer_rule="mean"), raw)
    assert_same(model.tokens("legrad", layer=layers, layer_rule="sum") / len(layers), raw)


# captum


class Gridded(nn.Module):
    """A LayerNorm whose patch tokens pass through `grid` as [B, D, h, w], the layout that captum needs."""

    def __init__(self, norm, to_grid):
        super().__init__()
        self.norm, self.to_grid, self.grid = norm, to_grid, nn.Identity()

    def forward(self, tokens):
        tokens = self.norm(tokens)
        grid = self.grid(self.to_grid(tokens))
        return torch.cat([tokens[:, :1], grid.flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("kind", ["timm-wide", "hf", "torchvision"])
def test_captum_layer_gradcam(kind, layer):
    captum = pytest.importorskip("captum.attr")
    model = subject(kind)
    twin = copy.deepcopy(model.twin)
    blocks, first, _ = parts(twin)
    gridded = Gridded(getattr(blocks[layer], first), model.to_grid)
    setattr(blocks[layer], first, gridded)
    for relu in (False, True):
        found = captum.LayerGradCam(twin, gridded.grid).attribute(
            model.pixels[None], target=model.label, relu_attributions=relu
        )
        ours = model.tokens("pgc-gradcam", layer=layer, relu="map" if relu else "none")
        assert_same(ours, found[0, 0].detach().numpy())
