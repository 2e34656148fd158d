"""What people have reported of explanations of BLIP and its kin: each symptom as a test."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from test_blip2_hf import blip2
from test_blip2_hf import processor as blip2_processor
from torch.nn.functional import cross_entropy

import vlcam
from vlcam.anatomy import Tap
from vlcam.targets import Custom, TargetWarning, resolve

TEXT = "a red circle and a blue dog"
ENC = len(models.PIECES) + 1
CROSS = Tap("fusion", 1, "CROSS")


def cross(model, text=TEXT, **more):
    """Cross-attention of one block [H, T, K], and its gradient."""
    found = model.capture(models.pixels(), text, stream="fusion", site="CROSS", layers=CROSS.layer, **more)
    return found.activations[CROSS][0], found.gradients[CROSS][0]


def by_rows(attention, gradient):
    """A map per row of the text, [T, cells], as `lavis-itm` weights it."""
    return (attention * gradient.relu()).mean(0)[:, 1:].numpy()


@pytest.fixture(scope="module")
def of_queries():
    return vlcam.wrap(blip2(), blip2_processor())


# ---------------------------------------------------------------- which part of a map depends on what is asked


def test_attention_is_that_of_the_text_and_only_its_gradient_that_of_the_score(model):
    """The attention part of the map stays the same whatever score is explained (salesforce/LAVIS issue 336).

    It has to: no score is read before it. A map of attention alone is of image and text; the gradient makes it one of
    the score.
    """
    attention, gradient = cross(model)
    same, other = cross(model, target=lambda logits: logits[:, 0])
    assert torch.equal(attention, same)
    assert not np.allclose(by_rows(attention, gradient), by_rows(same, other), atol=1e-7)
    assert np.corrcoef(gradient.flatten(), other.flatten())[0, 1] < 0.9


def test_another_text_changes_attention_and_gradient(model):
    """One picture for whatever is asked of the image (salesforce/BLIP issue 80)."""
    texts = [TEXT, "a blue circle and a red dog"]  # the same words, so that nothing but their order tells them apart
    for recipe in ("attention-cross", "lavis-itm"):
        one, other = model.explain(models.pixels(), texts, recipe, layer=CROSS.layer)
        assert np.abs(one.tokens - other.tokens).max() > 1e-3 * np.abs(one.tokens).max(), recipe
    one, other = (cross(model, text)[1] for text in texts)
    assert not torch.allclose(one, other, rtol=1e-3)


# ---------------------------------------------------------------- rows that are no words


def test_rows_of_the_q_former_are_its_queries_however_long_the_text(of_queries):
    """Cross-attention of BLIP-2, cut to the length of the text, looks like noise (salesforce/LAVIS issue 646).

    Only learned queries look at the image, here 4, beside a text of 6 tokens: there is no fifth row, nor one of a word.
    """
    text = "a red dog on"
    found = of_queries.capture(models.pixels(), text, stream="pooler", site="CROSS")
    assert len(of_queries.adapter.prepare_texts([text]).layouts[0].ids) == 6
    assert {tap.layer: tuple(tensor.shape) for tap, tensor in found.activations.items()} == {
        0: (1, 2, 4, 17),
        2: (1, 2, 4, 17),
    }
    assert of_queries.explain(models.pixels(), text, queries=(3,), layer=0).provenance["run"]["rows"] == [3]
    with pytest.raises(vlcam.RecipeError, match="rows 0 to 3"):
        of_queries.explain(models.pixels(), text, queries=(4,), layer=0)
    with pytest.raises(vlcam.RecipeError, match="learned queries"):
        of_queries.explain(models.pixels(), text, phrase="red dog")


def test_the_map_of_a_text_is_the_mean_over_its_words_and_the_first_row_goes_by_its_own_name(model):
    """The row of the first token in the place of the mean over the words (salesforce/ALBEF issues 51 and 83)."""
    rows = by_rows(*cross(model))
    words = model.explain(models.pixels(), TEXT, "lavis-itm", layer=CROSS.layer)
    np.testing.assert_allclose(words.tokens.ravel(), rows[1:-1].mean(0), rtol=1e-5)
    assert words.provenance["run"]["rows"] == list(range(1, 8))
    first = model.explain(
        models.pixels(), TEXT, "lavis-itm", layer=CROSS.layer, queries="cls", exclude=("cls", "padding")
    )
    np.testing.assert_allclose(first.tokens.ravel(), rows[0], rtol=1e-5)
    assert (first.recipe.queries, first.provenance["run"]["rows"]) == ("cls", [0])
    assert np.corrcoef(words.tokens.ravel(), first.tokens.ravel())[0, 1] < 0.99


def test_words_and_map_of_a_text_do_not_depend_on_the_longest_text_of_the_batch(blip, model):
    """A text's map changes with what else is in the batch, and its words are one off (salesforce/ALBEF issue 51).

    Padding would count if the mask were left out, as is shown last.
    """
    alone = model.explain(models.pixels(), "a dog", layer=CROSS.layer)
    padded, _ = model.explain(models.pixels(), ["a dog", TEXT], layer=CROSS.layer)
    np.testing.assert_allclose(padded.tokens, alone.tokens, atol=1e-5 * alone.tokens.max())
    assert list(padded.words) == list(alone.words) == ["a", "dog"]
    for word in alone.words:
        np.testing.assert_allclose(
            padded.words[word].tokens, alone.words[word].tokens, atol=1e-5 * alone.tokens.max(), err_msg=word
        )
    assert float(padded.scores["itm_logit"]) == pytest.approx(float(alone.scores["itm_logit"]), abs=1e-5)
    coded = models.tokenizer()(["a dog", TEXT], padding=True, return_tensors="pt")
    coded["input_ids"][:, 0] = ENC
    with torch.no_grad():
        unmasked = blip(input_ids=coded["input_ids"], pixel_values=models.pixels()[None].expand(2, -1, -1, -1))
    assert abs(float(unmasked.itm_score[0, 1]) - float(alone.scores["itm_logit"])) > 1e-3


# ---------------------------------------------------------------- which image with which text


@pytest.mark.parametrize(
    ("images", "texts", "pairs"),
    [
        (2, ["a dog"], [(0, 0), (1, 0)]),
        (1, ["a dog", TEXT, "the red ball"], [(0, 0), (0, 1), (0, 2)]),
        (2, ["a dog", TEXT], [(0, 0), (1, 1)]),
    ],
)
def test_each_map_says_which_image_and_which_text_it_is_of(model, images, texts, pairs):
    """Many images with one text, or the reverse, fail in matching (salesforce/LAVIS issue 424)."""
    pixels = models.pixels(batch=images)
    found = model.explain(pixels, texts if len(texts) > 1 else texts[0], layer=0)
    assert len(found) == len(pairs)
    for exp, (image, text) in zip(found, pairs, strict=True):
        alone = model.explain(pixels[image], texts[text], layer=0)
        assert exp.text == texts[text]
        for key in ("sha256", "pixels_sha256"):
            assert exp.provenance["image"][key] == alone.provenance["image"][key]
        np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * alone.tokens.max())
        assert float(exp.scores["itm_logit"]) == pytest.approx(float(alone.scores["itm_logit"]), abs=1e-5)
    assert len({exp.provenance["image"]["pixels_sha256"] for exp in found}) == images


@pytest.mark.parametrize(("images", "texts"), [(2, 3), (3, 2)])
def test_all_pairs_are_never_made_unasked(model, images, texts):
    """Two texts with one image are silently scored as all pairs by the library (huggingface/transformers pull 25612).

    Counts that are neither one nor equal are refused, with both numbers and what to do.
    """
    with pytest.raises(vlcam.InputError, match=rf"^{images} images and {texts} texts: .*call once for each image"):
        model.explain(models.pixels(batch=images), [TEXT] * texts)


# ---------------------------------------------------------------- which score


def test_two_scores_of_one_pair_say_which_kind_they_are(model):
    """The match is sure at 99.9 %, the similarity is 0.46: which is right? (salesforce/LAVIS issue 672).

    Both are: one is a probability, the other a cosine, which nobody gets to call a probability.
    """
    scores = model.scores(models.pixels(), TEXT)
    assert (scores["itm_probability"].kind, scores["contrastive_cosine"].kind) == ("probability", "cosine")
    assert "contrastive_probability" not in scores
    logits = torch.tensor([0.0, float(scores["itm_margin"])])
    assert float(scores["itm_probability"]) == pytest.approx(float(logits.softmax(0)[1]), abs=1e-6)
    exp = model.explain(models.pixels(), TEXT, "pgc-gradcam", target="contrastive", scale="cosine")
    assert exp.provenance["run"]["target"] == "contrastive_cosine"
    for scale in ("probability", "log-probability", "logit"):
        with pytest.raises(vlcam.RecipeError, match=f"scale='{scale}' with target='contrastive'.* 'cosine'"):
            model.explain(models.pixels(), TEXT, "pgc-gradcam", target="contrastive", scale=scale)


def loss(logits):
    return cross_entropy(logits, torch.ones(len(logits), dtype=torch.long), reduction="none")


def test_a_loss_points_the_other_way_and_a_warning_says_so(model):
    """Maps of the cross-entropy make no sense (salesforce/ALBEF issue 54).

    Its gradient is minus that of the log-probability, so that what is left of it above zero is another map.
    """
    with pytest.warns(TargetWarning, match="'loss' falls as the logit of a match rises, as a loss does"):
        wrong = model.explain(models.pixels(), TEXT, layer=0, target=loss, relu="none")
    right = model.explain(models.pixels(), TEXT, layer=0, scale="log-probability", relu="none")
    np.testing.assert_allclose(wrong.tokens, -right.tokens, atol=1e-5 * np.abs(right.tokens).max())
    turned = model.explain(models.pixels(), TEXT, layer=0, target=lambda logits: -loss(logits), relu="none")
    np.testing.assert_allclose(turned.tokens, right.tokens, atol=1e-5 * np.abs(right.tokens).max())


@pytest.mark.parametrize(
    "against",
    [
        Custom(lambda cosines: 1 - cosines, head="contrastive"),
        Custom(lambda logits: logits.neg_()[:, 1]),
        Custom(lambda logits: logits.softmax(1)[:, 0]),
    ],
)
def test_every_target_that_falls_as_the_text_fits_better_is_warned_of(model, against):
    """The same of other losses, also of one that works in place."""
    with pytest.warns(TargetWarning, match=r"the target 'custom' falls as the (cosine|logit of a match) rises"):
        model.explain(models.pixels(), TEXT, "pgc-gradcam", layer=0, target=against)


def test_a_loss_of_a_caption_is_warned_of_whatever_its_padding():
    """A captioning model hands out log-probabilities, 0 behind the last token: a loss is minus their sum."""
    recipe = vlcam.recipes()["blip-caption"].recipe.replace(target="custom", scale="raw")
    logs = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.0, -2.0]], requires_grad=True)
    minus, plain = (
        resolve(recipe, {"caption": "tokens"}, custom=Custom(function)).read
        for function in (lambda told: -told[:, :2].sum(1), lambda told: told[:, :2].sum(1))
    )
    with pytest.warns(TargetWarning, match="falls as the likelihood of the text rises"):
        minus(logs)
    assert plain(logs).tolist() == [-3.0, -4.0]
    assert minus(logs.detach()).tolist() == [3.0, 4.0]  # no gradient is taken


@pytest.mark.parametrize(
    "chosen",
    [
        lambda logits: logits[:, 0],
        lambda logits: logits[:, 1] - logits[:, 0],
        lambda logits: -logits.neg_()[:, 1],
        lambda logits: torch.stack((logits[0, 1], -logits[1, 1])),
    ],
)
def test_targets_that_do_not_fall_are_not_warned_of(model, chosen):
    """No alarm for the logit of no match, for one that rises, nor for one that falls in some pairs only."""
    model.explain(models.pixels(batch=2), TEXT, "pgc-gradcam", layer=0, target=chosen)


# ---------------------------------------------------------------- which block


def test_the_listing_has_every_block_by_its_number_in_the_whole_stack(of_queries):
    """Is "layer 8" the eighth block, or the third that looks at the image? (salesforce/ALBEF issues 33 and 95).

    Blocks are counted over the whole stack. The listing says of each which sites it has, or why not.
    """
    stream = of_queries.anatomy.stream("pooler")
    listed = {
        blocks: "CROSS" in sites.split() for name, blocks, sites, _ in of_queries.anatomy.rows() if name == "pooler"
    }
    assert listed == {"0": True, "1": False, "2": True, "3": False}
    assert stream.having("CROSS") == (0, 2)
    blocks = of_queries.anatomy.to_dict()["streams"]["pooler"]["blocks"]
    for number, block in enumerate(blocks):
        assert ("CROSS" in block["sites"]) == (number in (0, 2))
        assert ("CROSS" in block["lacks"]) == (number in (1, 3))
    assert blocks[1]["lacks"]["CROSS"] == "this block has no cross-attention"
    assert of_queries.explain(models.pixels(), TEXT, layer=2).provenance["run"]["layers"] == [2]
    with pytest.raises(vlcam.UnknownNameError, match=r"CROSS of pooler block 1 does not exist.*is in block 0, 2"):
        of_queries.explain(models.pixels(), TEXT, layer=1)


def test_cross_attention_is_not_the_field_that_the_library_returns(blip, model):
    """The library's `attentions` are image by image, not text by image (huggingface/transformers pull 22515)."""
    coded = models.tokenizer()(TEXT, return_tensors="pt")
    given = {key: coded[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        field = blip(**given, pixel_values=models.pixels()[None], output_attentions=True).attentions
    assert field[0].shape == (1, 2, 17, 17)
    attention, _ = cross(model)
    assert attention.shape == (2, coded["input_ids"].shape[1], 17)
    own = model.capture(models.pixels(), TEXT, stream="vision", site="F2", layers=0)
    torch.testing.assert_close(own.activations[Tap("vision", 0, "F2")], field[0])


# ---------------------------------------------------------------- what words are called


def test_what_is_shown_of_a_word_is_what_was_typed_never_a_piece_of_it(model):
    """A box is labelled `##hy`, which nobody has typed (IDEA-Research/Grounded-Segment-Anything issue 240)."""
    text = "Unaffable  DOG, unaffable"
    found = model.ground(models.photo(), text, ["unaffable", "dog"], layer=0)
    pieces = found[0].explanation.provenance["text"]["pieces"]
    assert pieces[1:5] == ["un", "##aff", "##able", "dog"]
    assert [(each.phrase, each.span) for each in found] == [
        ("Unaffable", (0, 9)),
        ("unaffable", (16, 25)),
        ("DOG", (11, 14)),
    ]
    assert list(found[0].explanation.words) == ["Unaffable", "DOG", "unaffable"]
    labels = [made["phrase"] for made in found.to_coco(image_id=1)["annotations"]]
    assert labels == ["Unaffable", "unaffable", "DOG"]
    assert "##" not in str(found.to_coco(image_id=1))
