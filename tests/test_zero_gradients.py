"""Where gradients are zero: the facts of every family, the error that names what else to read, exact relations."""

from __future__ import annotations

import re

import models
import numpy as np
import pytest
import torch

import vlcam
from vlcam.adapter import Inputs
from vlcam.capture import capture
from vlcam.evidence import NoGradientError
from vlcam.plan import plan

FAMILIES = ("vit", "deit", "deit-teacher", "dinov2", "dinov2-registers", "beit", "beit-cls")
BEHIND = ("F3_HEADS", "F3", "F4", "F5", "F6")
"""Sites behind the mixing of tokens by the last block's attention."""
BY_CLASS_TOKEN = ("vit", "deit", "deit-teacher", "beit-cls")


@pytest.fixture(params=FAMILIES)
def kind(request):
    return request.param


def wrapped(kind):
    return vlcam.wrap(models.classifier(kind), name=f"random-{kind}")


def rows(tensor):
    """The tokens (for attention the queries) of one image at which a gradient is not zero."""
    sizes = tensor[0].abs().sum((0, 2)) if tensor.ndim == 4 else tensor[0].abs().sum(-1)
    return torch.nonzero(sizes).flatten().tolist()


def live_rows(model, site, target=1):
    """Those of every block."""
    found = model.capture(models.pixels(), stream="vision", site=site, target=target)
    return [rows(gradient) for gradient in found.gradients.values()]


def everything_of(adapter):
    return list(range(len(adapter.prefix) + 16))


def everything(model):
    return everything_of(model.adapter)


def assert_close(found, expected, share=1e-5):
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


# The facts


@pytest.mark.parametrize("site", BEHIND)
def test_behind_the_last_attention_only_what_the_head_reads_has_a_gradient(kind, site):
    model = wrapped(kind)
    *earlier, last = live_rows(model, site)
    assert last == list(models.LIVE[kind])
    # F3_HEADS and F3 of an earlier block reach the answer from every token, through the blocks behind.
    assert earlier == [everything(model)] * 2


def test_in_the_last_attention_only_the_queries_that_the_head_reads_have_a_gradient(kind):
    model = wrapped(kind)
    *earlier, last = live_rows(model, "F2")
    assert last == list(models.LIVE[kind])
    assert earlier == [everything(model)] * 2
    found = model.capture(models.pixels(), stream="vision", site="F2", layers=-1, target=1)
    (gradient,) = found.gradients.values()
    keys = gradient[0].abs().sum((0, 1))
    assert bool((keys > 0).all())  # every key of those rows


def test_before_the_last_attention_every_token_has_a_gradient(kind):
    model = wrapped(kind)
    assert live_rows(model, "F1") == [everything(model)] * 3


def test_where_patches_are_pooled_their_gradients_at_the_last_output_are_equal():
    for kind, equal in (("beit", True), ("beit-cls", False)):
        found = wrapped(kind).capture(models.pixels(), stream="vision", site="F6", layers=-1, target=1)
        (gradient,) = found.gradients.values()
        patches = gradient[0, 1:]
        assert bool(patches.any()) == equal
        torch.testing.assert_close(patches, patches[:1].expand_as(patches), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", ["logit", "probability", "log-probability", "margin", "finer"])
def test_the_pattern_does_not_depend_on_the_scale(kind, scale):
    model = wrapped(kind)
    found = model.capture(models.pixels(), stream="vision", site="F4", target=1, scale=scale)
    assert rows(list(found.gradients.values())[-1]) == list(models.LIVE[kind])


# The error


def tokens_of(name, model):
    prefix = model.adapter.prefix
    return {"cls": [0], "patches": list(range(len(prefix), len(prefix) + 16)), "all": everything(model)}[name]


def fails(kind, tokens, model):
    """Whether no such token has a gradient in the last block."""
    return not set(tokens_of(tokens, model)) & set(models.LIVE[kind])


def named_by(error):
    """What the message offers: blocks, sites, and choices of tokens."""
    text = str(error).partition("; in this model ")[2]
    site = re.match(r"(\w+) carries one in block ([\d, ]+)", text)
    others = re.search(r"of block \d ((?:F\w+(?:, )?)+) does", text)
    return {
        "layer": [int(number) for number in site[2].split(", ")] if site else [],
        "site": others[1].split(", ") if others else [],
        "tokens": re.findall(r"with (?:queries|gradient_tokens)='(\w+)'", text),
    }


def works(model, recipe, **changes):
    try:
        exp = model.explain(models.pixels(), None, recipe, target=1, **changes)
    except NoGradientError:
        return False
    assert exp.status in ("ok", "no positive evidence")
    return True


@pytest.mark.parametrize("site", BEHIND)
def test_the_error_names_blocks_sites_and_tokens_that_carry_a_gradient_and_no_others(kind, site):
    model = wrapped(kind)
    for tokens in ("cls", "patches"):
        choices = {"site": site, "layer": -1, "gradient_tokens": tokens, "relu": "none"}
        if not fails(kind, tokens, model):
            assert works(model, "pgc-gradcam", **choices)
            continue
        with pytest.raises(NoGradientError, match=f"class_logit at {site} of vision block 2 is exactly zero") as caught:
            model.explain(models.pixels(), target=1, **choices)
        named = named_by(caught.value)
        assert {"F1"} <= set(named["site"])
        assert named["layer"] == [0, 1]
        for layer in range(3):
            assert works(model, "pgc-gradcam", **choices | {"layer": layer}) == (layer in named["layer"])
        for other in {"F1", *BEHIND} - {site}:
            assert works(model, "pgc-gradcam", **choices | {"site": other}) == (other in named["site"]), other
        for other in {"cls", "patches", "all"} - {tokens}:
            assert works(model, "pgc-gradcam", **choices | {"gradient_tokens": other}) == (other in named["tokens"])


@pytest.mark.parametrize("recipe", ["raw-attention", "attn-gradcam"])
@pytest.mark.parametrize("queries", ["cls", "patches"])
def test_the_error_for_attention_names_blocks_and_rows(kind, recipe, queries):
    model = wrapped(kind)
    choices = {"layer": -1, "queries": queries}
    if recipe == "raw-attention" or not fails(kind, queries, model):
        assert works(model, recipe, **choices)  # attention alone has a map whatever the head reads
        return
    with pytest.raises(NoGradientError, match="class_logit at F2 of vision block 2 is exactly zero on rows") as caught:
        model.explain(models.pixels(), None, recipe, target=1, **choices)
    named = named_by(caught.value)
    assert named["layer"] == [0, 1]
    assert named["site"] == []
    for layer in range(3):
        assert works(model, recipe, **choices | {"layer": layer}) == (layer in named["layer"])
    for other in {"cls", "patches", "all"} - {queries}:
        assert works(model, recipe, **choices | {"queries": other}) == (other in named["tokens"])


def test_registers_have_no_gradient_in_the_last_block_and_the_error_says_what_has():
    model = wrapped("dinov2-registers")
    with pytest.raises(
        NoGradientError, match=r"exactly zero on rows \[1, 2, 3, 4\]; in this model F2 carries"
    ) as caught:
        model.explain(models.pixels(), None, "attn-gradcam", queries="registers")
    assert named_by(caught.value) == {"layer": [0, 1], "site": [], "tokens": ["cls", "patches", "all"]}
    assert works(model, "attn-gradcam", queries="registers", layer=1)


@pytest.mark.parametrize("weighting", ["hirescam", "layercam", "elementwise", "eigengradcam"])
@pytest.mark.parametrize("kind", BY_CLASS_TOKEN)
def test_weightings_that_pool_nothing_offer_no_choice_of_tokens(kind, weighting):
    model = wrapped(kind)
    with pytest.raises(NoGradientError, match="F4 of vision block 2 is exactly zero on the patches") as caught:
        model.explain(models.pixels(), None, f"pgc-{weighting}", site="F4", layer=-1)
    assert named_by(caught.value) == {"layer": [0, 1], "site": ["F1"], "tokens": []}


def test_where_nothing_has_a_gradient_the_error_says_so():
    with pytest.raises(
        NoGradientError,
        match="in this model no block of vision carries one at F4 for nothing, as with a class of constant logit",
    ):
        wrapped("vit").explain(
            models.pixels(), site="F4", target=vlcam.targets.Custom(lambda logits: 0 * logits[:, 1], label="nothing")
        )
    with pytest.raises(NoGradientError, match="does not depend on"):
        wrapped("vit").explain(models.pixels(), target=lambda logits: torch.ones(len(logits)))


@pytest.mark.parametrize("kind", BY_CLASS_TOKEN)
def test_a_sweep_that_keeps_them_says_zero_gradient_and_refuses_to_draw(kind, tmp_path):
    model = wrapped(kind)
    base = model.explain(models.pixels(), target=1).recipe.replace(layers=(2,))
    recipes = [base.replace(site=site) for site in ("F1", *BEHIND)]
    with pytest.raises(NoGradientError, match="F3_HEADS of vision block 2 is exactly zero"):
        model.sweep(models.pixels(), None, recipes, target=1)
    alive, *empty = model.sweep(models.pixels(), None, recipes, target=1, empty="keep")
    assert_close(alive.tokens, model.explain(models.pixels(), None, base, target=1).tokens)
    for exp in empty:
        assert exp.status == "zero gradient"
        assert exp.tokens.shape == (4, 4)
        assert exp.tokens.dtype == np.float32
        assert not exp.tokens.any()
        with pytest.raises(vlcam.EvidenceError, match=r"nothing to draw \(zero gradient\)"):
            exp.overlay()
        with pytest.raises(vlcam.EvidenceError, match="nothing to draw"):
            exp.peak()
        assert exp._repr_png_() is None
    outcome = vlcam.open(empty[0].save(tmp_path / "empty.png")).verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_a_kept_map_of_zeros_is_float32_whatever_the_default_type():
    model = wrapped("vit")
    recipe = model.explain(models.pixels()).recipe.replace(site="F4")
    pixels = models.pixels()
    torch.set_default_dtype(torch.float64)
    try:
        (exp,) = model.sweep(pixels, None, [recipe], empty="keep")
    finally:
        torch.set_default_dtype(torch.float32)
    assert exp.tokens.dtype == np.float32


def test_in_a_batch_only_the_pairs_without_gradient_are_empty():
    model = wrapped("vit")
    recipe = model.explain(models.pixels()).recipe
    first = vlcam.targets.Custom(lambda logits: logits[:, 1] * torch.tensor([1.0, 0.0, 1.0]), label="first and last")
    (found,) = model.sweep(models.pixels(batch=3), None, [recipe], target=first, empty="keep")
    assert [exp.status for exp in found] == ["ok", "zero gradient", "ok"]
    assert_close(found[0].tokens, model.explain(models.pixels(batch=3)[0], None, recipe, target=1).tokens)


# The direct path


def test_on_the_direct_path_only_the_rows_that_the_head_reads_have_a_gradient_in_every_block(kind):
    adapter = wrapped(kind).adapter
    job = plan(adapter, "agcam", {}, classes=(1,))
    inputs = Inputs(adapter.accept_pixels(models.pixels(batch=1)), None, (0,))
    for direct in (True, False):
        (found,) = capture(adapter, inputs, job.read, [job.target], direct=direct)
        live = [rows(found.gradients[tap]) for tap in job.gradient_taps]
        read = list(models.LIVE[kind])
        assert live == ([read] * 3 if direct else [everything_of(adapter)] * 2 + [read])


@pytest.mark.parametrize("kind", BY_CLASS_TOKEN)
def test_agcam_has_nothing_to_read_in_other_rows(kind):
    model = wrapped(kind)
    assert model.explain(models.pixels(), None, "agcam", target=1).tokens.any()
    with pytest.raises(NoGradientError, match="exactly zero on rows"):
        model.explain(models.pixels(), None, "agcam", target=1, queries="patches")
    assert works(model, "agcam", queries="patches", gradient_path="full")


# Relations


@pytest.mark.parametrize("kind", ["vit", "beit-cls"])
def test_the_mean_over_all_rows_of_the_last_block_is_the_class_row_over_the_number_of_tokens(kind):
    model = wrapped(kind)
    gradient = {"weighting": "gradient", "relu": "gradient", "layer": -1, "layer_rule": "single", "target": 1}
    plain = {"gradient_path": "full", **gradient}
    everywhere = model.explain(models.pixels(), None, "legrad", **plain).tokens
    cls = model.explain(models.pixels(), None, "legrad", queries="cls", **plain).tokens
    assert everywhere.any()
    assert_close(everywhere, cls / 17)
    # The same from the captured gradient: T4, LeGrad of the last block is E_h ReLU(G)[0, :] / N.
    (captured,) = model.capture(models.pixels(), stream="vision", site="F2", layers=-1, target=1).gradients.values()
    assert_close(everywhere.ravel(), captured[0, :, 0, 1:].relu().mean(0).numpy() / 17)


@pytest.mark.parametrize("kind", FAMILIES)
def test_legrad_reads_every_row_for_it_averages_the_blocks_tokens(kind):
    model = wrapped(kind)
    found = model.explain(models.pixels(), None, "legrad", layer=-1, layer_rule="single", target=1)
    cls = model.explain(models.pixels(), None, "legrad", layer=-1, layer_rule="single", target=1, queries="cls")
    assert found.status == cls.status == "ok"
    count = len(everything(model))
    assert np.abs(found.tokens - cls.tokens / count).max() > 0.01 * np.abs(found.tokens).max()


def test_relevance_of_one_block_is_that_blocks_weighted_attention(kind):
    model = wrapped(kind)
    flow = model.explain(models.pixels(), None, "chefer-generic", layer=-1, target=1)
    single = model.explain(
        models.pixels(), None, flow.recipe.replace(layer_rule="single", layers="last"), target=1
    ).tokens
    assert single.any()
    rows_read = flow.recipe.queries
    identity = np.zeros((4, 4)) if rows_read == "cls" else np.full((4, 4), 1 / 16)
    assert_close(flow.tokens, single + identity)


LINEAR = (
    *("pgc-gradcam", "pgc-hirescam", "pgc-layercam", "pgc-elementwise", "pgc-eigengradcam", "attn-gradcam"),
    *("attn-gradcam-full", "agcam", "legrad", "grad-sam", "grad-sam-queries", "gradeclip-gradcam-baseline"),
)


def test_a_score_times_a_positive_number_gives_the_map_times_that_number(kind):
    model = wrapped(kind)
    plain = model.sweep(models.pixels(), None, LINEAR, target=lambda logits: logits[:, 3])
    scaled = model.sweep(models.pixels(), None, LINEAR, target=lambda logits: 7 * logits[:, 3])
    for once, times in zip(plain, scaled, strict=True):
        assert once.status == times.status
        np.testing.assert_allclose(times.heatmap, once.heatmap, atol=1e-5, err_msg=once.recipe.name)
        np.testing.assert_allclose(times.tokens, 7 * once.tokens, atol=1e-5 * 7 * np.abs(once.tokens).max())


def test_a_probability_is_another_map_and_its_logarithm_is_not():
    model = wrapped("vit")
    choices = {"target": 3, "relu": "none"}
    logit, share, log = (
        model.explain(models.pixels(), scale=scale, **choices) for scale in ("logit", "probability", "log-probability")
    )
    assert np.abs(share.heatmap - logit.heatmap).max() > 0.05
    np.testing.assert_allclose(share.heatmap, log.heatmap, atol=1e-4)  # p grad(log p) = grad(p)
    probability = share.scores["class_probability"].value
    assert_close(share.tokens, probability * log.tokens, 1e-4)
    hot = models.classifier("vit")
    with torch.no_grad():
        hot.classifier.weight.mul_(20)
        hot.classifier.bias.mul_(20)
    hotter = vlcam.wrap(hot)
    np.testing.assert_allclose(hotter.explain(models.pixels(), **choices).heatmap, logit.heatmap, atol=1e-5)
    other = hotter.explain(models.pixels(), scale="probability", **choices)
    assert np.abs(other.heatmap - share.heatmap).max() > 0.05  # it depends on how sure the model is
