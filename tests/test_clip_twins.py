"""The same weights in the classes of transformers and of open_clip: equal scores, tensors and maps, at every site."""

from __future__ import annotations

import pytest
import test_clip_hf
import torch
from torch import nn

import vlcam
from vlcam.explainer import Explainer
from vlcam.fitting import fitting
from vlcam_adapters.clip_open import ClipOpen
from vlcam_adapters.clip_weights import open_clip_twin

open_clip = pytest.importorskip("open_clip")

TEXTS = ["a red dog", "a dog on grass and red", "red"]
MASKED = {"F2", "F2_SCORES"}


@pytest.fixture(scope="module")
def twins():
    ours = test_clip_hf.adapter_of("clip")
    preprocess = open_clip.image_transform(32, is_train=False)
    theirs = ClipOpen.wrap(open_clip_twin(ours.module), (preprocess, test_clip_hf.clip_tokenizer()))
    for each in (ours, theirs):  # in single precision the denominators of Grad-CAM++ make much of the last bits
        each.module.double()
    return Explainer(ours, "hf"), Explainer(theirs, "open_clip")


@pytest.fixture(scope="module")
def pixels():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3)).double()


def close(ours, theirs):
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1e-3, float(ours.abs().max()))


def test_scores_are_equal(twins, pixels):
    ours, theirs = (each.scores(pixels[0], TEXTS) for each in twins)
    for mine, other in zip(ours, theirs, strict=True):
        assert {name: score.value for name, score in other.items()} == pytest.approx(
            {name: score.value for name, score in mine.items()}, abs=1e-5
        )


@pytest.mark.parametrize("site", ["F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6"])
@pytest.mark.parametrize("stream", ["vision", "text"])
def test_tensors_and_gradients_are_equal_at_every_site(twins, pixels, stream, site):
    ours, theirs = (each.capture(pixels[0], TEXTS, stream=stream, site=site) for each in twins)
    for tap, mine in ours.activations.items():
        rows = mine.shape[-2]  # open_clip pads to the whole context, transformers to the longest text
        pairs = ((mine, theirs.activations[tap]), (ours.gradients[tap], theirs.gradients[tap]))
        for number, (one, other) in enumerate(pairs):
            cut = other[:, :, :rows, :rows] if site in MASKED else other[:, :rows]
            if stream == "text":  # behind the end token transformers masks what open_clip computes on padding
                ends = [len(layout.ids) for layout in twins[0].adapter.prepare_texts(TEXTS).layouts]
                for pair, end in enumerate(ends):
                    narrow = (..., slice(end), slice(end)) if site in MASKED else (slice(end),)
                    close(one[pair][narrow], cut[pair][narrow])
            else:
                assert number or one.shape == other.shape
                close(one, cut)


@pytest.mark.parametrize("name", sorted({*fitting(test_clip_hf.adapter_of("clip")), "pgc-scorecam", "ablationcam"}))
def test_every_named_recipe_gives_the_same_map(twins, pixels, name):
    for mine, other in zip(*(each.explain(pixels[0], TEXTS, name) for each in twins), strict=True):
        assert mine.status == other.status
        close(torch.from_numpy(mine.tokens), torch.from_numpy(other.tokens))


def test_maps_of_every_site_and_weighting_are_equal(twins, pixels):
    grids = [vlcam.all_recipes(each, layers=(1,)) for each in twins]
    assert grids[0] == grids[1]
    assert len(grids[0]) > 50
    found = [each.sweep(pixels, TEXTS[:2], grid, empty="keep") for each, grid in zip(twins, grids, strict=True)]
    for mine, other in zip(*found, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert one.status == two.status
            close(torch.from_numpy(one.tokens), torch.from_numpy(two.tokens))


def test_neither_is_changed(twins, pixels):
    before = [{k: v.clone() for k, v in each.adapter.module.state_dict().items()} for each in twins]
    for each in twins:
        each.explain(pixels[0], TEXTS, "grad-eclip-as-coded")
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in each.adapter.module.modules())
        assert isinstance(each.adapter.module, nn.Module)
    for each, state in zip(twins, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in each.adapter.module.state_dict().items())
