"""Blip2ITM: scores equal to LAVIS's own forward, maps of learned queries by hand, and no map per word."""

from __future__ import annotations

import copy

import lavis_models as models
import numpy as np
import pytest
import torch
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer
from torch import nn
from torch.nn.functional import normalize

import vlcam
from vlcam.adapter import for_module
from vlcam_adapters.blip2_lavis import Blip2ClipLavis, Blip2ItmLavis

QUERIES = 4
TEXTS = ["a red dog", "the unaffable cat near a ball is on the grass", "a ball"]
TOWERS = {"eva": models.eva, "clip": models.clip_tower}


@pytest.fixture(scope="module", params=TOWERS)
def tower(request):
    return request.param


@pytest.fixture(scope="module")
def model(tower):
    return vlcam.wrap(models.blip2(tower=TOWERS[tower]()), models.processors(), name="random-blip2")


@pytest.fixture(scope="module")
def eva():
    return vlcam.wrap(models.blip2(), models.processors(), name="random-blip2")


def own(module, pixels, text, head):
    """LAVIS's own forward, which takes no texts of different length at once."""
    with torch.no_grad():
        return module({"image": pixels[None], "text_input": [text]}, match_head=head)[0]


def by_hand(module, head, pixels, text, layer):
    """Cross-attention of queries and its gradient in float64, stored by LAVIS's own flags on a copy."""
    twin = copy.deepcopy(module).double()
    for part in twin.modules():
        if isinstance(part, nn.LayerNorm):
            part.__class__ = nn.LayerNorm  # some of LAVIS's own cast to float32
    attention = twin.Qformer.bert.encoder.layer[layer].crossattention.self
    attention.save_attention = True
    tokens = twin.ln_vision(twin.visual_encoder(pixels[None].double()))
    words = twin.tokenizer(text, return_tensors="pt")
    if head == "itm":
        y = twin.compute_itm(tokens, words.input_ids, words.attention_mask)[0]
    else:
        seen = {"encoder_hidden_states": tokens, "encoder_attention_mask": torch.ones(tokens.shape[:2])}
        images = twin.Qformer.bert(query_embeds=twin.query_tokens, return_dict=True, **seen).last_hidden_state[0]
        text = normalize(twin.text_proj(twin.forward_text(words)[0]), dim=-1)
        y = (normalize(twin.vision_proj(images), dim=-1) @ text).max()
    y.backward()
    return attention.get_attention_map()[0].detach(), attention.get_attn_gradients()[0]


def test_each_tower_has_its_adapter(model, tower):
    assert type(model.adapter) is {"eva": Blip2ItmLavis, "clip": Blip2ClipLavis}[tower]
    assert for_module(models.blip2(kind=Blip2Qformer)) is Blip2ItmLavis
    assert not Blip2ItmLavis.accepts(models.blip())


def test_scores_are_those_of_the_model_itself(model):
    pixels, module = models.pixels(3, batch=3), model.adapter.module
    for sample, scores in enumerate(model.scores(pixels, TEXTS)):
        logits = own(module, pixels[sample], TEXTS[sample], "itm")
        assert scores["itm_logit"].value == pytest.approx(float(logits[1]), abs=1e-5)
        assert scores["itm_probability"].value == pytest.approx(float(logits.softmax(0)[1]), abs=1e-5)
        cosine = own(module, pixels[sample], TEXTS[sample], "itc")
        assert scores["contrastive_cosine"].value == pytest.approx(float(cosine), abs=1e-5)


@pytest.mark.parametrize(("name", "head"), [("blip2-itm", "itm"), ("blip2-itc", "contrastive")])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_mean_over_queries_by_hand(model, name, head, layer):
    pixels = models.pixels(1)
    attention, gradient = by_hand(model.adapter.module, head, pixels, TEXTS[1], layer)
    assert attention.shape == (2, QUERIES, 17)  # never rows of words
    by_query = (attention * gradient.relu()).mean(0)[:, 1:].reshape(QUERIES, 4, 4).numpy()
    assert by_query.any()
    found = model.explain(pixels, TEXTS[1], name, layer=layer)
    np.testing.assert_allclose(found.tokens, by_query.mean(0), atol=1e-5 * by_query.mean(0).max())
    for query, wanted in enumerate(by_query):
        if wanted.any():
            one = model.explain(pixels, TEXTS[1], name, layer=layer, queries=(query,))
            np.testing.assert_allclose(one.tokens, wanted, atol=1e-5 * by_query.max())


def test_the_last_block_is_the_last_that_has_cross_attention(eva):
    found = eva.explain(models.pixels(), TEXTS[0])
    assert found.recipe.name == "blip2-itm"
    assert found.provenance["run"]["layers"] == [2]
    with pytest.raises(vlcam.UnknownNameError, match=r"CROSS of pooler block 3 does not exist.*CROSS is in block 0, 2"):
        eva.explain(models.pixels(), TEXTS[0], layer=3)


def test_words_are_refused_with_the_reason(eva):
    with pytest.raises(vlcam.RecipeError, match="learned queries"):
        eva.explain(models.pixels(), TEXTS[0], phrase="dog")
    with pytest.raises(vlcam.UnknownNameError, match="no word of BLIP-2 looks at the image"):
        eva.explain(models.pixels(), TEXTS[0], "lavis-itm")
    assert len(eva.explain(models.pixels(), TEXTS[0]).words) == 0
    with pytest.raises(vlcam.InputError, match="no text was given"):
        eva.explain(models.pixels())


@pytest.mark.parametrize("name", ["blip2-itm", "blip2-itc", "pgc-gradcam", "chefer-clip"])
def test_a_batch_equals_single_calls(model, name):
    pixels, choices = models.pixels(4, batch=3), {"relu": "none"} if name == "pgc-gradcam" else {}
    for sample, exp in enumerate(model.explain(pixels, TEXTS, name, **choices)):
        alone = model.explain(pixels[sample], TEXTS[sample], name, **choices)
        assert alone.tokens.any()
        np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * np.abs(alone.tokens).max())


def test_many_texts_on_one_image_run_it_once(model):
    module, runs = model.adapter.module, []
    handle = module.ln_vision.register_forward_hook(lambda _, args, __: runs.append(len(args[0])))
    many = model.explain(models.pixels(), TEXTS)
    handle.remove()
    assert runs == [1]
    for text, exp in zip(TEXTS, many, strict=True):
        alone = model.explain(models.pixels(), text)
        np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * alone.tokens.max())


def of_plain_hooks(module, pixels, sites, *, swapped):
    """What modules give in LAVIS's own pass, and the gradient of the ITM logits, images first."""
    seen = {}

    def keep(site):
        def hook(_, __, output):
            seen[site] = output[0] if isinstance(output, tuple) else output
            seen[site].retain_grad()

        return hook

    handles = [part.register_forward_hook(keep(site)) for site, part in sites.items()]
    samples = {"image": pixels.requires_grad_(), "text_input": [TEXTS[0]] * len(pixels)}
    module(samples, match_head="itm")[:, 1].sum().backward()
    for handle in handles:
        handle.remove()
    return {
        site: [(t.transpose(0, 1) if swapped else t).detach() for t in (seen[site], seen[site].grad)] for site in seen
    }


@pytest.mark.parametrize("layer", [0, 1])
def test_sites_of_the_vision_tower_are_what_its_modules_give(model, tower, layer):
    twin = copy.deepcopy(model.adapter.module)
    if tower == "eva":
        block = twin.visual_encoder.blocks[layer]
        sites = {"F1": block.norm1, "F4": block.norm2}
    else:
        block = twin.visual_encoder.transformer.resblocks[layer]
        sites = {"F1": block.ln_1, "F4": block.ln_2}
    sites |= {"F3": block.attn, "F5": block.mlp, "F6": block}
    pixels = models.pixels(5, batch=2)
    wanted = of_plain_hooks(twin, pixels.clone(), sites, swapped=tower == "clip")
    for site, (value, gradient) in wanted.items():
        found = model.capture(pixels, TEXTS[0], stream="vision", site=site, layers=(layer,), target="itm")
        ((tap, activation),) = found.activations.items()
        torch.testing.assert_close(activation, value, rtol=0, atol=1e-5 * float(value.abs().max()))
        difference = (found.gradients[tap] - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max(), site


def test_attention_of_the_vision_tower_is_that_of_its_modules(model, tower):
    seen = []
    if tower == "eva":
        attention = model.adapter.module.visual_encoder.blocks[1].attn
        handle = attention.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    else:
        attention = model.adapter.module.visual_encoder.transformer.resblocks[1].attn
        handle = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pixels = models.pixels(5, batch=2)
    with torch.no_grad():
        model.adapter.module.visual_encoder(pixels)
        handle.remove()
        if tower == "clip":
            seen = [attention(seen[0], seen[0], seen[0], average_attn_weights=False)[1]]
    found = model.capture(pixels, TEXTS[0], stream="vision", site="F2", layers=(1,), target="itm")
    torch.testing.assert_close(next(iter(found.activations.values())), seen[0], rtol=0, atol=1e-6)


def test_every_site_of_every_block_is_reached(model):
    for stream in model.anatomy.streams.values():
        for site in stream.blocks[0].sites:
            found = model.capture(models.pixels(), TEXTS[0], stream=stream.name, site=site, target="itm")
            assert tuple(tap.layer for tap in found.activations) == stream.having(site)
            assert any(gradient is not None and gradient.any() for gradient in found.gradients.values()), site


def test_every_default_recipe_runs(model):
    assert len(model.sweep(models.pixels(), TEXTS[0], empty="keep")) > 10


def test_a_tower_under_checkpointing_gives_the_same_maps(tower):
    checkpointed = {
        "eva": lambda: models.eva(use_checkpoint=True),
        "clip": lambda: models.clip_tower(checkpointing=True),
    }
    plain, other = (
        vlcam.wrap(models.blip2(tower=made()), (None, None)) for made in (TOWERS[tower], checkpointed[tower])
    )
    for recipe in ("blip2-itm", "pgc-eigencam", "raw-attention", "chefer-generic"):
        one, two = (each.explain(models.pixels(), TEXTS[0], recipe) for each in (plain, other))
        np.testing.assert_array_equal(one.tokens, two.tokens)


def refuse(*_):
    raise ZeroDivisionError("on purpose")


def test_the_model_is_left_as_found_also_after_an_exception(tower):
    module = models.blip2(tower=models.eva(use_checkpoint=True) if tower == "eva" else models.clip_tower())
    module.train()
    module.Qformer.bert.encoder.layer[2].crossattention.self.save_attention = True
    module.itm_head.weight.requires_grad_(False)
    before = models.state(module)
    model = vlcam.wrap(module, models.processors())
    for recipe in ("blip2-itm", "blip2-itc", "pgc-eigencam"):
        model.explain(models.pixels(), TEXTS, recipe)
    assert models.same(before, models.state(module))
    handle = module.itm_head.register_forward_hook(refuse)
    before = models.state(module)
    with pytest.raises(ZeroDivisionError):
        model.explain(models.pixels(), TEXTS[0])
    assert models.same(before, models.state(module))
    handle.remove()


def test_dropout_of_training_is_off(eva):
    module = copy.deepcopy(eva.adapter.module).train()
    found = vlcam.wrap(module, models.processors()).explain(models.pixels(), TEXTS[0])
    np.testing.assert_array_equal(found.tokens, eva.explain(models.pixels(), TEXTS[0]).tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_tower_may_be_of_another_type(eva, dtype):
    module = models.blip2()
    module.visual_encoder.to(dtype)
    model = vlcam.wrap(module, models.processors())
    tolerance = 1e-5 if dtype == torch.float64 else 0.2
    for recipe in ("blip2-itm", "blip2-itc", "chefer-generic"):
        found, other = (each.explain(models.pixels(), TEXTS[0], recipe) for each in (model, eva))
        assert found.tokens.dtype == np.float32
        np.testing.assert_allclose(found.tokens, other.tokens, atol=tolerance * np.abs(other.tokens).max())
    logits = own(module, models.pixels().to(dtype), TEXTS[0], "itm")
    assert model.scores(models.pixels(), TEXTS[0])["itm_logit"].value == pytest.approx(float(logits[1]), abs=1e-5)


def test_the_rest_stays_in_float32():
    with pytest.raises(vlcam.AdapterError, match=r"ln_vision.*bfloat16.*only visual_encoder may be of another type"):
        vlcam.wrap(models.blip2().to(torch.bfloat16), models.processors())


def test_the_models_own_autocast_holds_and_the_callers_does_not(model):
    mixed = copy.deepcopy(model.adapter.module)
    mixed.maybe_autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # as LAVIS does on a GPU
    rounded = vlcam.wrap(mixed, models.processors())
    plain = model.explain(models.pixels(), TEXTS[0])
    found = rounded.explain(models.pixels(), TEXTS[0])
    assert 0 < np.abs(found.tokens - plain.tokens).max() < 0.05 * plain.tokens.max()
    logit = float(own(mixed, models.pixels(), TEXTS[0], "itm")[1])
    assert found.scores["itm_logit"].value == pytest.approx(logit, abs=1e-5)
    assert abs(logit - plain.scores["itm_logit"].value) > 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(model.explain(models.pixels(), TEXTS[0]).tokens, plain.tokens)


def test_a_tower_that_is_built_for_no_square():
    module = models.blip2(tower=models.eva(side=(32, 48)))
    model = vlcam.wrap(module, (None, None))
    pixels = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(0))
    found = model.explain(pixels, TEXTS[0], layer=0)
    attention, gradient = by_hand(module, "itm", pixels, TEXTS[0], 0)
    wanted = (attention * gradient.relu()).mean((0, 1))[1:].reshape(4, 6).numpy()
    np.testing.assert_allclose(found.tokens, wanted, atol=1e-5 * wanted.max())


def test_other_sizes_are_refused(model):
    with pytest.raises(vlcam.InputError, match=r"\(32, 48\).*trained at \(32, 32\).*interpolates no positions"):
        model.explain(torch.zeros(3, 32, 48), TEXTS[0])
    with pytest.raises(vlcam.InputError, match=r"\(64, 64\).*trained at \(32, 32\)"):
        vlcam.wrap(model.adapter.module, models.processors(64))


def test_texts_pass_the_text_processor_and_are_cut_where_the_model_cuts_them(eva):
    exp = eva.explain(models.pixels(), "A RED, unaffable DOG!!")
    text = exp.provenance["text"]
    assert text["pieces"] == ["[CLS]", "a", "red", ",", "un", "##aff", "##able", "dog", "[SEP]"]
    long = "a red dog on the grass near the unaffable cat near it, the ball"
    exp = eva.explain(models.pixels(), long)
    assert len(exp.provenance["text"]["ids"]) == 16
    assert exp.provenance["text"]["cut"] == ["the", "ball"]
    logits = own(eva.adapter.module, models.pixels(), long, "itm")
    assert exp.scores["itm_logit"].value == pytest.approx(float(logits[1]), abs=1e-5)


def test_ids_are_taken_as_they_are(eva):
    made = eva.adapter.module.tokenizer(TEXTS, padding=True, return_tensors="pt")
    batch = {"pixel_values": models.pixels(2, batch=3), **{k: made[k] for k in ("input_ids", "attention_mask")}}
    for one, other in zip(eva.explain(batch), eva.explain(models.pixels(2, batch=3), TEXTS), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_saved_map_is_verified(eva, tmp_path):
    found = eva.explain(models.picture(), TEXTS[1], "blip2-itc")
    assert found.heatmap.shape == (40, 64)
    outcome = vlcam.open(found.save(tmp_path / "map.png")).verify(eva)
    assert outcome.identical
    assert outcome.differences == ()
