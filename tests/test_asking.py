"""Recipes that ask the model again, and gradients along a path: authors' maps, peers, slow derivations, cost."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import interpolate

import vlcam
from vlcam.anatomy import HANDED, INPUT, VALUES, Tap
from vlcam.capture import STEPS, capture
from vlcam.pairing import pair_up
from vlcam.targets import Target

GOLDEN = Path(__file__).parent / "golden"
GRID = 4


@functools.cache
def golden(name):
    folder = GOLDEN / name
    spec = json.loads((folder / "model.json").read_text())
    module = VisionTransformer(**spec["args"], norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6))
    module.load_state_dict(load_file(folder / "model.safetensors"))
    values = dict(np.load(folder / "golden.npz"))
    return vlcam.wrap(module.eval()), values, torch.from_numpy(values["pixel_values"][0])


@pytest.fixture
def tiny():
    model, _, pixels = golden("r38-tam-transition")
    return model, pixels


def assert_same_map(ours, published):
    np.testing.assert_allclose(ours, published, rtol=0, atol=1e-5 * np.abs(published).max())


@pytest.mark.parametrize(
    ("key", "layers", "path"),
    [
        ("start4", (4, 5), "integrated"),
        ("start0", range(6), "integrated"),
        ("start4_nointegral", (4, 5), "full"),
        ("first_state", (5,), "integrated"),
    ],
)
def test_transition_maps_are_the_authors(key, layers, path):
    model, values, pixels = golden("r38-tam-transition")
    label = int(values["class_index"])
    exp = model.explain(pixels, target=label, recipe="tam-transition", layer=layers, gradient_path=path)
    assert_same_map(exp.tokens, values[f"raw_map__{key}"])


@pytest.mark.parametrize("start", [1, 4])
def test_headwise_maps_are_the_authors(start):
    model, values, pixels = golden("r39-bt-headwise")
    label = int(values["class_index"])
    exp = model.explain(pixels, target=label, recipe="beyond-intuition-headwise", layer=range(start - 1, 8))
    assert_same_map(exp.tokens, values[f"raw_map__start{start}__cls"])


@pytest.mark.parametrize("start", [1, 7])
def test_tokenwise_maps_are_the_authors(start):
    model, values, pixels = golden("r40-bt-tokenwise")
    label = int(values["class_index"])
    exp = model.explain(pixels, target=label, recipe="beyond-intuition-tokenwise", layer=range(start - 1, 8))
    assert_same_map(exp.tokens, values[f"raw_map__start{start}__cls"])


@pytest.mark.parametrize(("key", "departures"), [("gaussian", ()), ("onehot", ("one_token",))])
def test_reciprocam_maps_are_the_authors_for_every_class(key, departures):
    model, values, pixels = golden("r61-vit-reciprocam")
    classes = range(6)
    found = model.explain(pixels, target=list(classes), recipe="vit-reciprocam", departures=departures)
    for label in classes:
        assert_same_map(found[label].tokens, values[f"raw_map__{key}"][label])


def test_values_are_read_by_head_and_handed_on_projected_without_the_bias():
    model, _, pixels = golden("r40-bt-tokenwise")
    block = model.adapter.module.blocks[3]
    found = model.capture(pixels, stream="vision", site="F1", layers=3, target=0)
    with torch.no_grad():
        value = block.attn.qkv(found.activations[Tap("vision", 3, "F1")]).chunk(3, -1)[2]
        by_head = value.unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2)
        inside = model.capture(pixels, stream="vision", site=VALUES, layers=3, target=0)
        torch.testing.assert_close(inside.activations[Tap("vision", 3, VALUES)], by_head, rtol=1e-5, atol=1e-5)
        taps = [Tap("vision", 3, site) for site in (VALUES, INPUT)]
        target = Target("class", "class_logit", lambda output: output[:, 0])
        (both,) = capture(model.adapter, pair_up(model.adapter, pixels, None).inputs, taps, [target])
    expected = value @ block.attn.proj.weight.T
    torch.testing.assert_close(both.activations[Tap("vision", 3, HANDED)], expected, rtol=1e-5, atol=1e-5)
    assert Tap("vision", 3, HANDED) not in inside.activations


def test_an_integrated_gradient_is_the_mean_over_dimmed_images(tiny):
    model, pixels = tiny
    found = model.explain(pixels, target=2, recipe="pgc-hirescam", gradient_path="integrated", relu="none")
    tap = Tap("vision", 5, "F1")
    gradients = [
        model.capture(pixels * (step / (STEPS - 1)), stream="vision", site="F1", layers=5, target=2).gradients[tap]
        for step in range(STEPS)
    ]
    own = model.capture(pixels, stream="vision", site="F1", layers=5, target=2).activations[tap]
    expected = (torch.stack(gradients).double().mean(0) * own.double()).sum(-1)[0, 1:].reshape(GRID, GRID)
    np.testing.assert_allclose(found.tokens, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_along_the_path_the_class_stays_that_of_the_image(tiny):
    model, pixels = tiny
    top = model.explain(pixels, recipe="tam-transition")
    named = model.explain(pixels, recipe="tam-transition", target=top.provenance["run"]["class"]["index"])
    assert np.array_equal(top.tokens, named.tokens)


def slow_scorecam(model, pixels, label, *, aligned):
    """Every formula of Score-CAM in float64, one channel after the other."""
    module = model.adapter.module.double()
    try:
        found = vlcam.wrap(module).capture(pixels.double(), stream="vision", site="F1", layers="last", target=label)
        features = next(iter(found.activations.values()))[0, 1:]
        scores = []
        for channel in features.T:
            mask = channel.reshape(1, 1, GRID, GRID)
            if aligned:
                mask = interpolate(mask, pixels.shape[-2:], mode="bilinear", align_corners=True)
            mask = (mask - mask.min()) / (mask.max() - mask.min() + 1e-8)
            if not aligned:
                mask = interpolate(mask, pixels.shape[-2:], mode="bilinear", align_corners=False)
            with torch.no_grad():
                scores.append(module(pixels.double()[None] * mask)[0, label])
        weights = torch.stack(scores).softmax(0)
        return (features @ weights).relu().reshape(GRID, GRID).detach().numpy()
    finally:
        module.float()


@pytest.mark.parametrize(("name", "aligned"), [("pgc-scorecam", True), ("torchcam-scorecam", False)])
def test_scorecam_follows_the_formula(tiny, name, aligned):
    model, pixels = tiny
    exp = model.explain(pixels, target=1, recipe=name)
    np.testing.assert_allclose(exp.tokens, slow_scorecam(model, pixels, 1, aligned=aligned), rtol=0, atol=2e-5)


def grid(tokens):
    return tokens[:, 1:].reshape(len(tokens), GRID, GRID, -1).permute(0, 3, 1, 2)


def test_scorecam_is_that_of_pytorch_grad_cam(tiny):
    cam = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    model, pixels = tiny
    module = model.adapter.module
    with cam.ScoreCAM(model=module, target_layers=[module.blocks[-1].norm1], reshape_transform=grid) as peer:
        theirs = peer(input_tensor=pixels[None], targets=[targets.ClassifierOutputTarget(1)])[0]
    tokens = torch.from_numpy(model.explain(pixels, target=1, recipe="pgc-scorecam").tokens)
    once = (tokens - tokens.min()) / (1e-7 + (tokens - tokens.min()).max())
    laid = interpolate(once[None, None], pixels.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
    ours = (laid - laid.min()) / (1e-7 + (laid - laid.min()).max())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_scorecam_is_that_of_torchcam(tiny):
    methods = pytest.importorskip("torchcam.methods")
    model, pixels = tiny
    module = model.adapter.module
    peer = methods.ScoreCAM(module, module.blocks[-1].norm1, reshape_transform=grid)
    try:
        with torch.no_grad():
            scores = module(pixels[None])
        theirs = peer(1, scores)[0][0]
    finally:
        peer.remove_hooks()
    tokens = torch.from_numpy(model.explain(pixels, target=1, recipe="torchcam-scorecam").tokens)
    ours = (tokens - tokens.min()) / ((tokens - tokens.min()).max() + 1e-8)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_ablationcam_follows_the_formula(tiny):
    model, pixels = tiny
    module = model.adapter.module
    found = model.capture(pixels, stream="vision", site="F1", layers="last", target=3)
    features = next(iter(found.activations.values()))[0, 1:]
    whole, drops = float(found.target), []
    for channel in range(features.shape[1]):

        def ablate(_, __, output, channel=channel):
            left = output.clone()
            left[..., channel] = 0
            return left

        handle = module.blocks[-1].norm1.register_forward_hook(ablate)
        with torch.no_grad():
            drops.append((whole - float(module(pixels[None])[0, 3])) / whole)
        handle.remove()
    expected = (features.double() @ torch.tensor(drops, dtype=torch.float64)).relu().reshape(GRID, GRID)
    exp = model.explain(pixels, target=3, recipe="ablationcam")
    np.testing.assert_allclose(exp.tokens, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["pgc-scorecam", "ablationcam", "vit-reciprocam"])
def test_answers_do_not_depend_on_the_batch_size_or_on_the_other_images(tiny, name):
    model, pixels = tiny
    other = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    alone = model.explain(pixels, target=1, recipe=name)
    for batch in (1, 5, 1000):
        again = model.explain(pixels, target=1, recipe=name, batch=batch)
        np.testing.assert_allclose(again.tokens, alone.tokens, rtol=0, atol=1e-5 * np.abs(alone.tokens).max())
    _, second = model.explain(torch.stack([other, pixels]), target=1, recipe=name)
    np.testing.assert_allclose(second.tokens, alone.tokens, rtol=0, atol=1e-5 * np.abs(alone.tokens).max())


@pytest.mark.parametrize(("name", "count"), [("pgc-scorecam", 32), ("ablationcam", 32), ("vit-reciprocam", 16)])
def test_the_number_of_questions_is_stated_and_kept(tiny, name, count):
    model, pixels = tiny
    seen, told = [], []
    handle = model.adapter.module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    try:
        exp = model.explain(pixels, recipe=name, batch=5, progress=lambda done, total: told.append((done, total)))
    finally:
        handle.remove()
    assert exp.provenance["run"]["asked"] == count
    assert sum(seen) == count + 1
    assert len(seen) == -(-count // 5) + 1
    assert told[-1] == (count, count)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("name", ["pgc-scorecam", "ablationcam", "vit-reciprocam"])
def test_work_that_is_broken_off_leaves_the_model_as_found(tiny, name):
    model, pixels = tiny
    module = model.adapter.module.train()

    def stop(done, total):
        raise KeyboardInterrupt(f"{done} of {total}")

    try:
        with pytest.raises(KeyboardInterrupt, match="of"):
            model.explain(pixels, recipe=name, batch=4, progress=stop)
        assert all(part.training for part in module.modules())
        assert all(parameter.requires_grad for parameter in module.parameters())
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    finally:
        module.eval()


def test_a_top_class_stays_that_of_the_whole_image(tiny):
    model, pixels = tiny
    top = model.explain(pixels, recipe="pgc-scorecam")
    named = model.explain(pixels, recipe="pgc-scorecam", target=top.provenance["run"]["class"]["index"])
    assert np.array_equal(top.tokens, named.tokens)


def test_a_constant_channel_gets_a_weight_without_nan(tiny):
    model, pixels = tiny
    norm = model.adapter.module.blocks[-1].norm1
    weight = norm.weight.detach().clone()
    try:
        with torch.no_grad():
            norm.weight[3] = 0
        assert np.isfinite(model.explain(pixels, recipe="pgc-scorecam").tokens).all()
    finally:
        with torch.no_grad():
            norm.weight.copy_(weight)


@pytest.mark.parametrize("name", ["pgc-scorecam", "vit-reciprocam", "tam-transition", "beyond-intuition-tokenwise"])
def test_the_map_verifies_from_its_file(tiny, name, tmp_path):
    model, pixels = tiny
    exp = model.explain(pixels, target=2, recipe=name)
    exp.save(tmp_path / "exp.png")
    assert vlcam.open(tmp_path / "exp.png").verify(model).reproduced


def test_a_sweep_of_all_named_recipes_asks_nothing(tiny):
    model, pixels = tiny
    names = {exp.recipe.name for exp in model.sweep(pixels, target=1, empty="keep")}
    assert not names & {"pgc-scorecam", "torchcam-scorecam", "ablationcam", "vit-reciprocam", "tam-transition"}
    assert not any(recipe.asks for recipe in vlcam.all_recipes(model))
    assert any(recipe.asks for recipe in vlcam.all_recipes(model, weighting="scorecam"))


def test_reciprocam_needs_a_block_before(tiny):
    model, pixels = tiny
    with pytest.raises(vlcam.RecipeError, match="block 0"):
        model.explain(pixels, recipe="vit-reciprocam", layer=0)


def test_asking_takes_no_gradient_and_needs_a_target():
    recipe = vlcam.recipes()["pgc-scorecam"].recipe
    assert not recipe.needs_gradient
    with pytest.raises(vlcam.RecipeError, match="target='none'"):
        recipe.replace(target="none", scale="none")


def test_two_explicit_targets_share_one_capture(tiny):
    model, pixels = tiny
    inputs = vlcam.adapter.Inputs(model.adapter.accept_pixels(pixels[None]), None, (0,))
    jobs = [vlcam.plan.plan(model.adapter, "pgc-gradcam", {"scale": s}, classes=(1,)) for s in ("logit", "probability")]
    first, second = capture(model.adapter, inputs, jobs[0].taps, [job.target for job in jobs])
    tap = jobs[0].taps[0]
    assert first.activations[tap] is second.activations[tap]
    assert not torch.allclose(first.gradients[tap], second.gradients[tap])
