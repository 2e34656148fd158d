"""Cross-attention with the self-attention on either side of it, against the rules of Chefer et al. (ICCV 2021).

Everything is derived again in float64, entry by entry, and in the order and with the identities of the published code.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import MappingProxyType

import models
import numpy as np
import pytest
import torch
from models import assert_same, state
from test_blip_writing import CAPTIONS, PIXELS, QUESTIONS, answerer, answering, coded, writer, writing
from test_clip_open import coca, wrapped

import vlcam
from vlcam import maps
from vlcam.explainer import Explainer
from vlcam.fitting import fitting

__all__ = ["answerer", "answering", "writer", "writing"]  # fixtures

TEXT = "a red circle and a blue dog"
TEXTS = ["a red dog", TEXT, "the unaffable ball is on grass"]
ENC = len(models.PIECES) + 1


class Slow:
    """A copy of a model in float64; its attention and the gradient of what it scores, a block at a time."""

    def __init__(self, module, vision, text, score):
        twin = copy.deepcopy(module).double()
        seen = {}

        def watch(key, part):
            def keep(_, __, output):
                output[1].retain_grad()
                seen[key] = output[1]

            part.register_forward_hook(keep)

        self.images = list(range(len(vision(twin))))
        self.texts = list(range(len(text(twin))))
        for number, block in enumerate(vision(twin)):
            watch(("image", number), block.self_attn)
        for number, block in enumerate(text(twin)):
            watch(("text", number), block.attention.self)
            watch(("cross", number), block.crossattention.self)
        self.y = score(twin)
        self.y.backward()
        self.y = float(self.y.detach())
        self.attention = {key: each[0].detach().numpy() for key, each in seen.items()}
        self.gradient = {key: each.grad[0].numpy() for key, each in seen.items()}

    def matrix(self, key, how="attention*gradient"):
        """ReLU before the mean over heads, entry by entry."""
        attention, gradient = self.attention[key], self.gradient[key]
        made = np.zeros(attention.shape[1:])
        for h, t, j in np.ndindex(*attention.shape):
            a, g = attention[h, t, j], gradient[h, t, j]
            made[t, j] += {"attention*gradient": max(a * g, 0), "attention": a, "gradient": max(g, 0)}[how]
        return made / len(attention)

    def relevance(self, *, blocks=None, image=True, how="attention*gradient"):
        """Of every image token for every row, with R, Q and X as the published code holds them."""
        texts = self.texts if blocks is None else blocks
        rows, columns = self.attention["cross", 0].shape[1:]
        of_image, of_text, found = np.eye(columns), np.eye(rows), np.zeros((rows, columns))
        for block in self.images if image else ():
            of_image = of_image + self.matrix(("image", block), how) @ of_image
        for block in texts:
            own = self.matrix(("text", block), how)
            found, of_text = found + own @ found, of_text + own @ of_text
            crossed = self.matrix(("cross", block), how)
            found = found + scaled_rows(of_text).T @ (crossed @ scaled_rows(of_image))
        return found


def scaled_rows(relevance):
    """R less the identity, each row over its sum, and the identity again; a row that sums to zero stays zero."""
    made = np.eye(len(relevance))
    for t, row in enumerate(relevance - np.eye(len(relevance))):
        total = sum(row)
        for j, value in enumerate(row):
            made[t, j] += value / total if total else 0
    return made


def matched(module, pixels, text, scale="logit"):
    """The matching head of BLIP on one image and text."""
    coded_text = models.tokenizer()(text, return_tensors="pt")
    ids = coded_text["input_ids"].clone()
    ids[:, 0] = ENC

    def score(twin):
        tokens = twin.vision_model(
            pixel_values=pixels.double()[None], interpolate_pos_encoding=pixels.shape[-1] != pixels.shape[-2]
        ).last_hidden_state
        made = twin.text_encoder(
            input_ids=ids, attention_mask=coded_text["attention_mask"], encoder_hidden_states=tokens
        ).last_hidden_state
        logits = twin.itm_head(made[:, 0])[0]
        return logits[1] if scale == "logit" else logits.softmax(-1)[1]

    return Slow(module, lambda m: m.vision_model.encoder.layers, lambda m: m.text_encoder.encoder.layer, score)


def assert_close(found, wanted, share=1e-5, *, of=None):
    found, wanted = np.asarray(found, np.float64).ravel(), np.asarray(wanted, np.float64).ravel()
    largest = np.abs(wanted if of is None else of).max()
    assert largest > 0
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * largest)


# The formula


@pytest.mark.parametrize("compose", ["vision", "none"])
@pytest.mark.parametrize("blocks", [None, [0], [1, 2], [2]])
def test_the_row_of_the_opening_token_and_of_every_word(model, blip, blocks, compose):
    pixels = models.pixels(2)
    wanted = matched(blip, pixels, TEXT).relevance(blocks=blocks, image=compose == "vision")
    layers = "all" if blocks is None else tuple(blocks)
    found = model.explain(pixels, TEXT, "chefer-bimodal", layer=layers, compose=compose)
    assert found.tokens.shape == (4, 4)
    assert_close(found.tokens, wanted[0, 1:])
    for word in found.word_maps:
        assert_close(word.tokens, wanted[list(word.rows), 1:].mean(0), of=wanted)  # some in one block alone are empty
    words = model.explain(pixels, TEXT, "chefer-bimodal-words", layer=layers, compose=compose)
    assert_close(words.tokens, wanted[1:-1, 1:].mean(0), of=wanted)


@pytest.mark.parametrize("how", ["attention*gradient", "attention", "gradient"])
def test_what_is_carried_is_the_recipes_weighting_on_all_sides(model, blip, how):
    pixels = models.pixels(3)
    wanted = matched(blip, pixels, TEXT).relevance(how=how)
    recipe = vlcam.recipes()["chefer-bimodal"].recipe.replace(weighting=how)
    found = model.explain(pixels, TEXT, recipe)
    assert_close(found.tokens, wanted[0, 1:])
    assert (found.recipe.target == "none") == (how == "attention")


@pytest.mark.parametrize("relu", ["gradient", "after_heads"])
def test_the_other_places_of_the_relu(model, relu):
    pixels = models.pixels(4)
    first, other = (model.explain(pixels, TEXT, "chefer-bimodal", relu=each) for each in ("before_heads", relu))
    if relu == "gradient":  # probabilities are never negative
        assert_close(other.tokens, first.tokens)
    else:
        assert np.abs(first.tokens - other.tokens).max() > 0.01 * first.tokens.max()


def test_phrases_and_rows_by_number_are_rows_of_the_same_matrix(model, blip):
    text, pixels = "a red unaffable dog", models.pixels(5)
    wanted = matched(blip, pixels, text).relevance()[:, 1:]
    phrase = model.explain(pixels, text, "chefer-bimodal-words", phrase="RED  unaffable")
    assert_close(phrase.tokens, wanted[2:6].mean(0))
    assert list(phrase.words) == ["a", "red", "unaffable", "dog"]
    rows = model.explain(pixels, text, "chefer-bimodal", queries=(0, -1))
    assert_close(rows.tokens, wanted[[0, -1]].mean(0))
    with pytest.raises(vlcam.RecipeError, match=r"phrase='red' with site='CROSS', queries='cls': only maps with text"):
        model.explain(pixels, text, "chefer-bimodal", phrase="red")


def test_words_have_a_map_where_the_last_block_alone_has_rows_of_zeros(model):
    pixels = models.pixels(6)
    assert model.explain(pixels, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).words["red"].status != "ok"
    found = model.explain(pixels, TEXT, "chefer-bimodal-words", layer=-1)
    statuses = [word.status for word in found.word_maps]
    assert statuses.count("ok") > len(statuses) / 2
    assert set(statuses) <= {"ok", "no positive evidence"}  # that of words to which the first row does not attend


def test_small_gradients_keep_their_digits(model, blip):
    """With the identity inside of R, float32 would round away what lies on its diagonal."""
    pixels = models.pixels(7)
    with torch.no_grad():
        blip.itm_head.weight.mul_(1e-6)
    for name, row in (("chefer-bimodal", [0]), ("chefer-bimodal-words", range(1, 8))):
        wanted = matched(blip, pixels, TEXT).relevance()[list(row), 1:].mean(0)
        assert wanted.max() < 1e-6
        assert_close(model.explain(pixels, TEXT, name).tokens, wanted, 1e-4)


def test_a_grid_that_is_not_square(blip):
    wide = vlcam.wrap(blip, models.processor(), image_size=(32, 64), interpolate_pos_encoding=True)
    pixels = models.pixels(8, width=64)
    found = wide.explain(pixels, TEXT, "chefer-bimodal")
    assert found.tokens.shape == (4, 8)
    assert_close(found.tokens, matched(blip, pixels, TEXT).relevance()[0, 1:])


# Models that write


def test_a_caption_is_read_by_the_rows_that_tell_it(writer, writing):
    caption = CAPTIONS[1]
    ids, mask = coded([caption], len(models.PIECES))

    def score(twin):
        tokens = twin.vision_model(pixel_values=PIXELS[:1].double()).last_hidden_state
        logits = twin.text_decoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=tokens).logits
        return logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum()

    slow = Slow(writing, lambda m: m.vision_model.encoder.layers, lambda m: m.text_decoder.bert.encoder.layer, score)
    wanted = slow.relevance()[:, 1:]
    found = writer.explain(PIXELS[0], caption, "chefer-bimodal-words")
    assert found.provenance["run"]["target_value"] == pytest.approx(slow.y, rel=1e-5)
    assert_close(found.tokens, wanted[found.provenance["run"]["rows"]].mean(0), 2e-5)
    for word in found.word_maps:
        assert_close(word.tokens, wanted[list(word.rows)].mean(0), 2e-5)
    phrase = writer.explain(PIXELS[0], caption, "chefer-bimodal-words", phrase="the grass")
    assert phrase.provenance["run"]["rows"] == [3, 4]
    assert phrase.provenance["run"]["target_value"] > slow.y  # fewer tokens are counted


def test_words_of_a_question_and_the_row_that_the_matching_head_reads(answerer, writer):
    found = answerer.explain(PIXELS[0], QUESTIONS[0], "chefer-bimodal-words", answer="red")
    assert found.status == "ok"
    assert found.recipe.target == "answer"
    assert list(found.words) == ["is", "the", "dog", "red"]
    for model, text in ((answerer, QUESTIONS[0]), (writer, CAPTIONS[0])):
        with pytest.raises(vlcam.RecipeError, match="'chefer-bimodal' is for the score 'itm'"):
            model.explain(PIXELS[0], text, "chefer-bimodal")


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_models_that_write_give_three_pairs_at_once_what_they_give_alone(kind, writer, answerer):
    model, texts = (writer, CAPTIONS) if kind == "caption" else (answerer, QUESTIONS)
    answers = {} if kind == "caption" else {"answer": ["red", "the blue ball", "a circle and a dog"]}
    for number, found in enumerate(model.explain(PIXELS, texts, "chefer-bimodal-words", **answers)):
        own = {key: values[number] for key, values in answers.items()}
        alone = model.explain(PIXELS[number], texts[number], "chefer-bimodal-words", **own)
        assert_close(found.tokens, alone.tokens, 2e-5)


# As every recipe


@pytest.mark.parametrize("name", ["chefer-bimodal", "chefer-bimodal-words"])
@pytest.mark.parametrize("images", [1, 3])
def test_three_pairs_at_once_are_three_single_pairs(model, name, images):
    pixels = models.pixels(9, batch=3)
    given = pixels if images == 3 else pixels[0]
    for number, found in enumerate(model.explain(given, TEXTS, name)):
        alone = model.explain(pixels[number if images == 3 else 0], TEXTS[number], name)
        assert_close(found.tokens, alone.tokens)
        for one, other in zip(found.word_maps, alone.word_maps, strict=True):
            assert_close(one.tokens, other.tokens)


def test_half_precision(model, blip):
    half = vlcam.wrap(copy.deepcopy(blip).bfloat16(), models.processor())
    for name in ("chefer-bimodal", "chefer-bimodal-words"):
        exact, found = (each.explain(models.pixels(1), TEXT, name) for each in (model, half))
        assert found.tokens.dtype == np.float32
        assert np.isfinite(found.tokens).all()
        assert np.corrcoef(exact.tokens.ravel(), found.tokens.ravel())[0, 1] > 0.95


def test_the_model_is_left_as_found(model, blip):
    before = state(blip)
    model.explain(models.pixels(), TEXTS, "chefer-bimodal-words")
    assert_same(before, state(blip))
    with pytest.raises(ZeroDivisionError):
        model.explain(models.pixels(), TEXT, "chefer-bimodal", target=lambda _: 1 / 0)
    assert_same(before, state(blip))


def test_all_recipes_of_the_matching_head_share_one_pass(model, blip):
    runs = []
    blip.vision_model.register_forward_hook(lambda *_: runs.append(1))
    names = ["chefer-bimodal", "lavis-itm", "chefer-bimodal-words", "attention-cross"]
    assert set(names) < set(fitting(model.adapter))
    for name, found in zip(names, model.sweep(models.pixels(), TEXT, names), strict=True):
        assert_close(found.tokens, model.explain(models.pixels(), TEXT, name).tokens, 1e-6)
    assert len(runs) == 1 + len(names)


def test_the_record_names_the_blocks_of_either_side(model, tmp_path):
    found = model.explain(models.photo(), TEXT, "chefer-bimodal-words", layer=(1, 2))
    run = found.provenance["run"]
    assert (run["layers"], run["together_with"]) == ([1, 2], {"fusion": [1, 2], "vision": [0, 1, 2]})
    outcome = vlcam.open(found.save(tmp_path / "both.png")).verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    alone = model.explain(models.photo(), TEXT, "chefer-bimodal", compose="none")
    assert alone.provenance["run"]["together_with"] == {"fusion": [0, 1, 2]}
    assert model.explain(models.photo(), TEXT).provenance["run"]["together_with"] is None


def test_nothing_is_made_of_a_score_that_does_not_depend_on_cross_attention(model):
    for name in ("chefer-bimodal", "chefer-bimodal-words"):
        with pytest.raises(vlcam.EvidenceError, match=r"zero on every row"):
            model.explain(models.pixels(), TEXT, name, target=lambda logits: 0 * logits[:, 0])
        kept = model.sweep(models.pixels(), TEXT, [name], target=lambda logits: 0 * logits[:, 0], empty="keep")
        assert kept[0].status == "zero gradient"


# Refused


def test_slots_have_no_place_on_the_image_that_relevance_could_be_carried_to():
    model = Explainer(wrapped(coca()), "x")
    for compose in ("vision", "none"):
        with pytest.raises(vlcam.RecipeError, match=r"site='CROSS': fusion of this model looks at .*the image$"):
            model.explain(models.photo(), "a red dog", "chefer-bimodal-words", target="caption", compose=compose)


def test_image_tokens_that_attend_within_windows_have_no_relevance_to_multiply(model, monkeypatch):
    anatomy = model.anatomy
    cut = replace(anatomy.streams["vision"], windowed=True)
    streams = MappingProxyType({**anatomy.streams, "vision": cut})
    monkeypatch.setitem(model.adapter.__dict__, "anatomy", replace(anatomy, streams=streams))
    with pytest.raises(vlcam.RecipeError, match=r"compose='vision': .* within windows, .* choose compose='none'"):
        model.explain(models.pixels(), TEXT, "chefer-bimodal")
    assert model.explain(models.pixels(), TEXT, "chefer-bimodal", compose="none").status == "ok"


# The pure function


def matrices(count, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, rows, columns, generator=generator) for _ in range(count)]


def published(texts, image):
    """The published order, in float64: the identity inside, rows over their sums, what is not a number is zero."""

    def without_residual(relevance):
        less = relevance - torch.eye(len(relevance), dtype=relevance.dtype)
        return less / less.sum(-1, keepdim=True) + torch.eye(len(relevance), dtype=relevance.dtype)

    made = []
    for pair in range(2):
        of_text = torch.eye(texts[0][0].shape[-1], dtype=torch.float64)
        of_image = torch.eye(image[0].shape[-1], dtype=torch.float64)
        found = torch.zeros(len(of_text), len(of_image), dtype=torch.float64)
        for matrix in image:
            of_image = of_image + matrix[pair].double() @ of_image
        for own, crossed in texts:
            more_text, more = own[pair].double() @ of_text, own[pair].double() @ found
            of_text, found = of_text + more_text, found + more
            if crossed is not None:
                behind = crossed[pair].double() @ without_residual(of_image)
                addition = without_residual(of_text).t() @ behind
                found = found + addition.nan_to_num(0)
        made.append(found)
    return torch.stack(made)


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_the_published_order_of_updates(alone):
    """With `alone` blocks first that read text and no image, as ALBEF has them."""
    texts = list(zip(matrices(4, 3, 3), [None] * alone + matrices(4 - alone, 3, 5, 1), strict=True))
    image = matrices(2, 5, 5, 2)
    torch.testing.assert_close(maps.bimodal(texts, image).double(), published(texts, image), rtol=1e-5, atol=0)


def test_rows_that_sum_to_zero_are_no_division_by_zero():
    (own,), (crossed,), image = matrices(1, 3, 3), matrices(1, 3, 5, 1), matrices(2, 5, 5, 2)
    own[:, 1] = 0  # nothing reads the second token's row
    for matrix in image:
        matrix[:, 3] = 0
    found = maps.bimodal([(own, crossed)], image)
    assert found.isfinite().all()
    other = crossed.clone()
    other[:, 0] = 0  # what the first row saw is the first row's and that of what it attends to
    assert not torch.equal(found, maps.bimodal([(own, other)], image))
    zeros = torch.zeros_like(own)
    assert torch.equal(maps.bimodal([(zeros, crossed)], []), crossed)
    assert torch.equal(maps.bimodal([(zeros, crossed)], [torch.zeros_like(image[0])]), crossed)


def test_without_self_attention_blocks_add_up():
    looks = matrices(3, 3, 5)
    texts = [(torch.zeros(2, 3, 3), each) for each in looks]
    torch.testing.assert_close(maps.bimodal(texts, []), sum(looks))
