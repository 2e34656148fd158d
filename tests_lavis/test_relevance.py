"""Relevance across text and image on LAVIS's models: as derived by hand from their attention and its gradient."""

from __future__ import annotations

import lavis_models as models
import numpy as np
import pytest
import torch

import vlcam

TEXTS = ["a red dog", "the unaffable cat near a ball is on the grass"]
WORDS = "chefer-bimodal-words"


def matcher(kind):
    return vlcam.wrap(getattr(models, kind)(), models.processors())


def evidence(model, pixels, text, stream, site):
    """ReLU of attention times gradient, mean over heads, in float64, by block."""
    found = model.capture(pixels, text, stream=stream, site=site, layers="all", target="itm")
    made = {}
    for tap, attention in found.activations.items():
        product = attention[0].double() * found.gradients[tap][0].double()
        made[tap.layer] = product.clamp(min=0).mean(0)
    return made


def scaled_rows(less):
    sums = less.sum(-1, keepdim=True)
    return less / torch.where(sums == 0, 1, sums) + torch.eye(len(less), dtype=less.dtype)


def by_hand(model, pixels, text, *, image):
    own, looks = (evidence(model, pixels, text, "fusion", site) for site in ("F2", "CROSS"))
    seen = evidence(model, pixels, text, "vision", "F2")
    columns, rows = len(seen[0]), len(own[0])
    of_image, of_text = torch.eye(columns).double(), torch.eye(rows).double()
    for block in sorted(seen) if image else ():
        of_image = of_image + seen[block] @ of_image
    found = torch.zeros(rows, columns).double()
    for block in sorted(own):
        found, of_text = found + own[block] @ found, of_text + own[block] @ of_text
        if block in looks:
            shared = scaled_rows(of_image - torch.eye(columns))
            found = found + scaled_rows(of_text - torch.eye(rows)).T @ looks[block] @ shared
    return found.numpy()


@pytest.mark.parametrize("compose", ["vision", "none"])
@pytest.mark.parametrize("kind", ["blip", "albef"])
@pytest.mark.parametrize("text", TEXTS)
def test_matchers(kind, text, compose):
    model, pixels = matcher(kind), models.pixels(1)
    wanted = by_hand(model, pixels, text, image=compose == "vision")
    close = {"rtol": 0, "atol": 2e-5 * wanted.max()}
    found = model.explain(pixels, text, "chefer-bimodal", compose=compose)
    assert wanted[0].max() > 0
    np.testing.assert_allclose(found.tokens.ravel(), wanted[0, 1:], **close)
    words = model.explain(pixels, text, WORDS, compose=compose)
    np.testing.assert_allclose(words.tokens.ravel(), wanted[1:-1, 1:].mean(0), **close)
    for word in words.word_maps:
        np.testing.assert_allclose(word.tokens.ravel(), wanted[list(word.rows), 1:].mean(0), **close)


def test_blocks_of_albef_that_read_text_alone_take_part():
    model, pixels = matcher("albef"), models.pixels(2)
    run = model.explain(pixels, TEXTS[1], WORDS).provenance["run"]
    there = model.anatomy.stream("fusion").having("CROSS")
    assert 0 < len(there) < len(run["together_with"]["fusion"])
    assert run["layers"] == list(there)
    assert run["together_with"]["fusion"] == list(range(run["blocks"]))
    some = model.explain(pixels, TEXTS[1], WORDS, layer=there)
    assert some.provenance["run"]["together_with"]["fusion"] == list(there)
    with pytest.raises(vlcam.UnknownNameError, match="reads text alone"):
        model.explain(pixels, TEXTS[1], WORDS, layer=0)


@pytest.mark.parametrize("kind", ["blip", "albef"])
def test_a_padded_batch_gives_what_single_texts_give(kind):
    model, pixels = matcher(kind), models.pixels(3)
    for text, found in zip(TEXTS, model.explain(pixels, TEXTS, WORDS), strict=True):
        alone = model.explain(pixels, text, WORDS)
        np.testing.assert_allclose(found.tokens, alone.tokens, rtol=0, atol=1e-5 * alone.tokens.max())


def test_models_that_write():
    pixels = models.pixels(4)
    writer = vlcam.wrap(models.captioner(), models.processors())
    answerer = vlcam.wrap(models.answerer(), models.question_processors())
    for model, given in ((writer, {}), (answerer, {"answer": "the red ball"})):
        found = model.explain(pixels, "a dog on the grass", WORDS, **given)
        assert np.isfinite(found.tokens).all()
        assert found.status == "ok"


@pytest.mark.parametrize("name", ["grad-eclip", "grad-eclip-as-coded"])
@pytest.mark.parametrize("kind", ["blip", "albef"])
def test_grad_eclip_reads_the_values_of_lavis_towers(kind, name):
    module = getattr(models, kind)()
    model, pixels = vlcam.wrap(module, models.processors()), models.pixels(5)
    before = models.state(module)
    found = model.explain(pixels, TEXTS[0], name, relu="none")
    assert models.same(before, models.state(module))
    if name == "grad-eclip-as-coded":  # one head, of which the block with one head is the twin
        attention = module.visual_encoder.blocks[-1].attn
        heads, attention.num_heads = attention.num_heads, 1
        attention.scale *= heads**-0.5
    again = model.explain(pixels, TEXTS[0], "grad-eclip", relu="none")
    np.testing.assert_allclose(again.tokens, found.tokens, rtol=0, atol=1e-5 * np.abs(found.tokens).max())


@pytest.mark.parametrize("kind", ["blip", "albef"])
@pytest.mark.parametrize("recipe", ["chefer-bimodal", "lavis-itm"])
def test_pairs_of_one_call_come_out_bit_for_bit(kind, recipe):
    model, pixels = matcher(kind), models.pixels(1, batch=3)
    for made in (*model.explain(pixels[0], TEXTS, recipe), *model.explain(pixels, TEXTS[1], recipe)):
        assert made.verify(model).identical
