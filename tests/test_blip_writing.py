"""BLIP that writes: likelihoods as the library has them, maps of captions and answers re-derived, one's own texts."""

from __future__ import annotations

import copy
from functools import cache

import models
import numpy as np
import pytest
import torch
from models import assert_same, state
from transformers import BlipConfig, BlipForConditionalGeneration, BlipForQuestionAnswering

import vlcam
from vlcam.anatomy import Tap
from vlcam.catalogue import default
from vlcam.fitting import fitting

DEC, ENC, CLS = len(models.PIECES), len(models.PIECES) + 1, 2
PIXELS = models.pixels(batch=3)
CAPTIONS = ["a red dog", "a dog on the grass, and a ball", "unaffable ball"]
QUESTIONS = ["is the dog red", "a ball on the grass, is the ball blue", "is a circle"]
ANSWERS = ["red", "the blue ball", "a circle and a dog"]
LONG = CAPTIONS[1]


def coded(texts, first):
    """Ids that begin with that token, and the mask."""
    made = models.tokenizer()(texts, padding=True, return_tensors="pt")
    ids = made["input_ids"].clone()
    ids[:, 0] = first
    return ids, made["attention_mask"]


def own_loss(kind, module, pixels, captions, questions, answers, *, first=ENC):
    """The loss of the model's own forward: the mean over all tokens that it counts."""
    ids, mask = coded(captions if kind is BlipForConditionalGeneration else answers, DEC)
    labels = ids.masked_fill(mask == 0, -100)
    if kind is BlipForConditionalGeneration:
        return module(pixel_values=pixels, input_ids=ids, attention_mask=mask, labels=labels).loss
    asked, known = coded(questions, first)
    return module(
        pixel_values=pixels,
        input_ids=asked,
        attention_mask=known,
        decoder_input_ids=ids,
        decoder_attention_mask=mask,
        labels=labels,
    ).loss


@cache
def trained(kind):
    """A random model that has seen three images, so that what it writes has words and ends."""
    torch.manual_seed(0)
    blocks = {"intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {"vocab_size": len(models.PIECES) + 2, "hidden_size": 16, "max_position_embeddings": 16, "pad_token_id": 0}
    # The decoder of answers reads states of the question with projections as wide as the image's tokens.
    width = 12 if kind is BlipForConditionalGeneration else 16
    config = BlipConfig(
        text_config={**blocks, **text, "bos_token_id": DEC, "sep_token_id": 3},
        vision_config={**blocks, "hidden_size": width, "image_size": 32, "patch_size": 8},
    )
    module = kind(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.2)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(60):
        loss = own_loss(kind, module, PIXELS, CAPTIONS, QUESTIONS, ANSWERS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.3:
            break
    optimizer.zero_grad()
    return module


@pytest.fixture
def writing():
    return copy.deepcopy(trained(BlipForConditionalGeneration))


@pytest.fixture
def answering():
    return copy.deepcopy(trained(BlipForQuestionAnswering))


@pytest.fixture
def writer(writing):
    return vlcam.wrap(writing, models.processor())


@pytest.fixture
def answerer(answering):
    return vlcam.wrap(answering, models.processor())


def likelihoods(model, image, text, head, **more):
    """What the head returns, [P, N]."""
    taken = []
    model.explain(image, text, target=lambda output: taken.append(output.detach().clone()) or output.sum(1), **more)
    assert model.adapter.heads == {head: "tokens"}
    return taken[0]


# ---------------------------------------------------------------- likelihoods


def test_log_probabilities_of_a_caption_are_those_of_the_models_own_logits_and_loss(writer, writing):
    found = likelihoods(writer, list(PIXELS), CAPTIONS, "caption")
    assert found.shape == (3, 11)
    for row, (image, caption) in enumerate(zip(PIXELS, CAPTIONS, strict=True)):
        ids, _ = coded([caption], DEC)
        with torch.no_grad():
            chances = writing(pixel_values=image[None], input_ids=ids).logits.log_softmax(-1)[0]
            loss = own_loss(type(writing), writing, image[None], [caption], [], [])
        count = ids.shape[1] - 1  # the end token counts, as in the loss
        expected = chances[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(found[row, :count], expected, atol=1e-5, rtol=1e-5)
        assert not found[row, count:].any()
        assert float(found[row].sum()) == pytest.approx(-float(loss) * count, abs=1e-4)
        score = writer.scores(image, caption)["caption_log_probability"]
        assert (score.value, score.kind) == (pytest.approx(float(expected.sum()), abs=1e-4), "log-probability")


@pytest.mark.parametrize(("token", "first"), [("enc", ENC), ("cls", CLS)])
def test_log_probabilities_of_an_answer_are_those_of_the_models_own_loss(answering, token, first):
    model = vlcam.wrap(answering, models.processor(), first_token=token)
    found = likelihoods(model, list(PIXELS), QUESTIONS, "answer", answer=ANSWERS)
    for row, image in enumerate(PIXELS):
        asked = QUESTIONS[row : row + 1], ANSWERS[row : row + 1]
        with torch.no_grad():
            loss = own_loss(type(answering), answering, image[None], [], *asked, first=first)
        count = len(coded(asked[1], DEC)[0][0]) - 1
        assert not found[row, count:].any()
        assert bool((found[row, :count] < 0).all())
        assert float(found[row].sum()) == pytest.approx(-float(loss) * count, abs=1e-4)


def test_the_first_token_of_a_question_moves_score_and_map_and_is_on_record(answering):
    enc, cls = (
        vlcam.wrap(answering, models.processor(), first_token=token).explain(PIXELS[0], QUESTIONS[0], answer="blue")
        for token in ("enc", "cls")
    )
    assert enc.scores["answer_log_probability"].value != pytest.approx(cls.scores["answer_log_probability"].value)
    assert not np.allclose(enc.tokens, cls.tokens)
    assert (enc.provenance["text"]["pieces"][0], enc.provenance["text"]["ids"][0]) == ("[ENC]", ENC)
    assert (cls.provenance["text"]["pieces"][0], cls.provenance["text"]["ids"][0]) == ("[CLS]", CLS)
    assert (enc.provenance["answer"]["pieces"][0], enc.provenance["answer"]["ids"][0]) == ("[DEC]", DEC)
    assert enc.provenance["model"]["options"]["first_token"] == "enc"


def test_padding_of_a_question_does_not_reach_the_answer_though_in_transformers_it_does(answerer, answering):
    questions, answer = [QUESTIONS[0], QUESTIONS[1]], "blue"
    together = answerer.explain(PIXELS[0], questions, answer=answer)
    alone = answerer.explain(PIXELS[0], questions[0], answer=answer)
    score = alone.scores["answer_log_probability"].value
    assert together[0].scores["answer_log_probability"].value == pytest.approx(score, abs=1e-5)
    with torch.no_grad():
        first, second = (
            own_loss(type(answering), answering, PIXELS[:1], [], [question], [answer]) for question in questions
        )
        both = own_loss(type(answering), answering, PIXELS[[0, 0]], [], questions, [answer, answer])
    assert abs(float(2 * both - first - second)) > 1e-3


# ---------------------------------------------------------------- maps


class Double:
    """A float64 twin; attention of text on the image, and the log-probability of every token, with a graph."""

    def __init__(self, module, image, caption=None, question=None, answer=None):
        self.module = copy.deepcopy(module).double()
        self.seen = {}
        asked = question is not None
        stack = self.module.text_encoder.encoder if asked else self.module.text_decoder.bert.encoder
        for layer, block in enumerate(stack.layer):
            block.crossattention.self.register_forward_hook(
                lambda _, __, made, layer=layer: self.seen.__setitem__(("CROSS", layer), made[1])
            )
        for layer, block in enumerate(self.module.vision_model.encoder.layers):
            block.layer_norm1.register_forward_hook(
                lambda _, __, made, layer=layer: self.seen.__setitem__(("F1", layer), made)
            )
        tokens = self.module.vision_model(image.double()[None]).last_hidden_state
        self.seen["CONTEXT"] = tokens
        if asked:
            tokens = self.module.text_encoder(
                input_ids=coded([question], ENC)[0], encoder_hidden_states=tokens
            ).last_hidden_state
        ids, _ = coded([answer if asked else caption], DEC)
        logits = self.module.text_decoder(input_ids=ids, encoder_hidden_states=tokens).logits
        self.told = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        self.values = self.told.detach()

    def gradient(self, site, *, tokens=None):
        y = self.told.sum() if tokens is None else self.told[[token - 1 for token in tokens]].sum()
        (found,) = torch.autograd.grad(y, self.seen[site], retain_graph=True)
        return found

    def cross(self, layer, rows, *, tokens=None):
        weighted = self.seen["CROSS", layer] * self.gradient(("CROSS", layer), tokens=tokens).relu()
        return weighted[0].mean(0)[list(rows), 1:].mean(0).reshape(4, 4).detach().numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max(), rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_map_of_a_caption_is_that_of_its_formula_with_every_word_at_the_row_before_it(writer, writing, layer):
    exp = writer.explain(PIXELS[1], LONG, layer=layer)
    double = Double(writing, PIXELS[1], LONG)
    assert exp.recipe.name == "blip-caption"
    assert exp.provenance["run"]["rows"] == list(range(9))  # of ten tokens behind [DEC], the last is [SEP]
    close(exp.tokens, double.cross(layer, range(9)))
    places = {"a": 1, "dog": 2, "on": 3, "the": 4, "grass": 5, "and": 7, "a#2": 8, "ball": 9}  # 6 is the comma
    assert list(exp.words) == list(places)
    for word, place in places.items():
        assert exp.words[word].provenance["run"]["rows"] == [place - 1]
        close(exp.words[word].tokens, double.cross(layer, [place - 1]))
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(double.values.sum()), abs=1e-4)


def test_a_word_of_several_pieces_is_told_by_the_rows_before_each(writer, writing):
    exp = writer.explain(PIXELS[2], "unaffable ball")
    double = Double(writing, PIXELS[2], "unaffable ball")
    assert exp.words["unaffable"].provenance["run"]["rows"] == [0, 1, 2]
    close(exp.words["unaffable"].tokens, double.cross(2, [0, 1, 2]))
    assert exp.words["ball"].provenance["run"]["rows"] == [3]


def test_in_the_last_block_a_row_has_a_gradient_from_the_next_token_alone(writer, writing):
    found = writer.capture(PIXELS[1], LONG, stream="fusion", site="CROSS", layers="all")
    double = Double(writing, PIXELS[1], LONG)
    for layer in range(3):
        gradient = found.gradients[Tap("fusion", layer, "CROSS")][0]
        scale = float(gradient.abs().max())
        for row in range(10):
            alone = double.gradient(("CROSS", layer), tokens=[row + 1])[0, :, row].float()
            same = torch.allclose(gradient[:, row], alone, atol=2e-5 * scale)
            assert same == (layer == 2 or row == 9)
        assert not gradient[:, 10].any()  # nothing is told behind [SEP]
    for row in range(10):
        (gradient,) = (double.gradient(("CROSS", 2), tokens=[row + 1])[0],)
        assert [other for other in range(11) if gradient[:, other].any()] == [row]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_map_of_an_answer_is_that_of_its_formula_over_the_words_of_the_question(answerer, answering, layer):
    image, question, answer = PIXELS[1], QUESTIONS[1], ANSWERS[1]
    exp = answerer.explain(image, question, answer=answer, layer=layer)
    double = Double(answering, image, question=question, answer=answer)
    assert exp.recipe.name == "blip-vqa"
    assert exp.provenance["run"]["rows"] == list(range(1, 11))
    close(exp.tokens, double.cross(layer, range(1, 11)))
    places = {"a": 1, "ball": 2, "on": 3, "the": 4, "grass": 5, "is": 7, "the#2": 8, "ball#2": 9, "blue": 10}
    assert list(exp.words) == list(places)
    for word, place in places.items():
        close(exp.words[word].tokens, double.cross(layer, [place]))
    phrase = answerer.explain(image, question, answer=answer, layer=layer, phrase="the ball")
    close(phrase.tokens, double.cross(layer, [8, 9]))
    assert phrase.provenance["run"]["target_value"] == exp.provenance["run"]["target_value"]


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_maps_of_the_image_tokens_are_those_of_their_formula(kind, writer, answerer):
    model, more = (writer, {}) if kind == "caption" else (answerer, {"answer": ANSWERS[0]})
    text = CAPTIONS[0] if kind == "caption" else QUESTIONS[0]
    asked = {"caption": text} if kind == "caption" else {"question": text, **more}
    double = Double(model.adapter.module, PIXELS[0], **asked)
    for recipe, site in (("pgc-gradcam", ("F1", 2)), ("context-gradcam", "CONTEXT")):
        exp = model.explain(PIXELS[0], text, recipe, **more)
        weights = double.gradient(site)[0, 1:].mean(0)
        close(exp.tokens, (double.seen[site][0, 1:] @ weights).relu().reshape(4, 4).detach().numpy())
        assert exp.recipe.target == kind


@pytest.mark.parametrize("layer", [1, 2])
def test_a_phrase_of_a_caption_is_the_likelihood_of_its_tokens(writer, writing, layer):
    exp = writer.explain(PIXELS[1], LONG, phrase="the grass", layer=layer)
    double = Double(writing, PIXELS[1], LONG)
    assert (exp.recipe.prompt, exp.recipe.queries) == ("phrase", "phrase")
    assert exp.provenance["run"]["rows"] == [3, 4]
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(double.values[[3, 4]].sum()), abs=1e-5)
    close(exp.tokens, double.cross(layer, [3, 4], tokens=[4, 5]))
    assert exp.words["ball"].status == "zero gradient"  # it stands behind the phrase
    second = writer.explain(PIXELS[1], LONG, phrase="a", occurrence=2)
    assert second.provenance["run"]["target_value"] == pytest.approx(float(double.values[7]), abs=1e-5)


def test_a_phrase_is_scored_at_sites_without_rows_of_text_too(writer, writing, tmp_path):
    exp = writer.explain(models.photo(), LONG, "pgc-gradcam", phrase="the grass")
    assert exp.recipe.prompt == "phrase"
    assert exp.provenance["run"]["span"] == [9, 18]
    assert exp.verify(writer).identical
    assert vlcam.open(exp.save(tmp_path / "phrase.png")).verify(writer).identical
    pixels = writer.explain(PIXELS[1], LONG, "pgc-gradcam", phrase="the grass")
    double = Double(writing, PIXELS[1], LONG)
    weights = double.gradient(("F1", 2), tokens=[4, 5])[0, 1:].mean(0)
    close(pixels.tokens, (double.seen["F1", 2][0, 1:] @ weights).relu().reshape(4, 4).detach().numpy())


# ---------------------------------------------------------------- texts of the model's own


def test_a_caption_that_is_not_given_is_the_models_own(writer, writing):
    exp = writer.explain(PIXELS[1])
    with torch.no_grad():
        made = writing.generate(PIXELS[1:2], do_sample=False, num_beams=1, max_length=15)
    own = models.tokenizer().decode(made[0], skip_special_tokens=True)
    assert exp.text == own
    assert own == CAPTIONS[1]
    assert exp.provenance["text"]["written"] is True
    given = writer.explain(PIXELS[1], own)
    assert "written" not in given.provenance["text"]
    np.testing.assert_array_equal(exp.tokens, given.tokens)
    assert [each.text for each in writer.explain(list(PIXELS))] == CAPTIONS
    assert writer.scores(PIXELS[1]) == writer.scores(PIXELS[1], own)
    assert writer.explain(PIXELS[1], phrase="the grass").text == own
    batch = writer.explain({"pixel_values": PIXELS})
    assert [each.text for each in batch] == CAPTIONS
    assert writer.explain({"pixel_values": PIXELS}, "a red dog")[2].text == "a red dog"


@pytest.mark.parametrize(("token", "first"), [("enc", ENC), ("cls", CLS)])
def test_an_answer_that_is_not_given_is_the_models_own(answering, token, first):
    model = vlcam.wrap(answering, models.processor(), first_token=token)
    found = model.explain(list(PIXELS), QUESTIONS)
    for row, exp in enumerate(found):
        ids, _ = coded(QUESTIONS[row : row + 1], first)
        with torch.no_grad():
            made = answering.generate(ids, PIXELS[row : row + 1], do_sample=False, num_beams=1, max_length=11)
        own = models.tokenizer().decode(made[0], skip_special_tokens=True)
        assert (exp.text, exp.provenance["answer"]["given"]) == (QUESTIONS[row], own)
        assert own == ANSWERS[row]
        assert exp.provenance["answer"]["written"] is True
        alone = model.explain(PIXELS[row], QUESTIONS[row])
        assert alone.provenance["answer"]["given"] == own
    given = model.explain(PIXELS[0], QUESTIONS[0], answer=ANSWERS[0])
    assert given.provenance["answer"]["written"] is False


def test_what_is_written_stops_where_the_documentation_says(writer, writing, answerer, answering):
    for module in (writing, answering):
        with torch.no_grad():  # the end never comes
            module.text_decoder.cls.predictions.bias[models.tokenizer().sep_token_id] = -30
            module.text_decoder.cls.predictions.bias[models.PIECES.index("ball")] = 9
    assert writer.explain(PIXELS[0]).text.split() == ["ball"] * 14  # with [DEC] and [SEP] the table is full
    assert answerer.explain(PIXELS[0], "is").provenance["answer"]["given"].split() == ["ball"] * 10


def test_a_model_that_writes_nothing_says_what_to_give(writer, writing):
    with torch.no_grad():
        writing.text_decoder.cls.predictions.bias[models.tokenizer().sep_token_id] = 1e4
    with pytest.raises(vlcam.InputError, match=r"wrote nothing for image \[0\]; give the caption"):
        writer.explain(PIXELS[0])


# ---------------------------------------------------------------- pairs, precision, files


def test_three_at_once_are_those_alone_whatever_their_length(writer, answerer):
    together = writer.explain(list(PIXELS), CAPTIONS)
    for exp, image, caption in zip(together, PIXELS, CAPTIONS, strict=True):
        alone = writer.explain(image, caption)
        assert list(exp.words) == list(alone.words)
        close(exp.tokens, alone.tokens)
    together = answerer.explain(list(PIXELS), QUESTIONS, answer=ANSWERS)
    for exp, *own in zip(together, PIXELS, QUESTIONS, ANSWERS, strict=True):
        alone = answerer.explain(own[0], own[1], answer=own[2])
        assert list(exp.words) == list(alone.words)
        close(exp.tokens, alone.tokens)
        for word in exp.words:
            close(exp.words[word].tokens, alone.words[word].tokens)
    one = answerer.explain(PIXELS[0], QUESTIONS, answer="blue")
    assert [exp.provenance["answer"]["given"] for exp in one] == ["blue"] * 3


def test_ten_captions_of_one_image_run_the_vision_tower_once(writer, writing):
    calls, rows = [], []
    writing.vision_model.register_forward_hook(lambda *_: calls.append(1))
    writing.text_decoder.bert.encoder.layer[0].crossattention.self.key.register_forward_hook(
        lambda _, given, __: rows.append(len(given[0]))
    )
    captions = [f"{word} {rest}" for word in ("a", "the") for rest in ("dog", "ball", "circle", "red dog", "grass")]
    found = writer.explain(PIXELS[0], captions)
    assert (calls, rows) == ([1], [1])
    for exp, caption in zip(found[::4], captions[::4], strict=True):
        close(exp.tokens, writer.explain(PIXELS[0], caption).tokens)


@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_half_precision_gives_the_same_words_and_nearly_the_same_map(kind):
    module = copy.deepcopy(trained(kind))
    more = (QUESTIONS[1],) if kind is BlipForQuestionAnswering else ()
    whole = vlcam.wrap(module, models.processor()).explain(PIXELS[1], *more)
    half = vlcam.wrap(copy.deepcopy(module).bfloat16(), models.processor()).explain(PIXELS[1], *more)
    for part in ("text", "answer"):
        assert half.provenance[part] == whole.provenance[part]
    assert np.corrcoef(half.tokens.ravel(), whole.tokens.ravel())[0, 1] > 0.9
    assert half.provenance["run"]["target_value"] == pytest.approx(whole.provenance["run"]["target_value"], abs=0.3)


def test_texts_that_are_written_or_given_are_saved_and_verified(writer, answerer, tmp_path):
    photo = models.photo()
    for number, (model, arguments) in enumerate(
        [
            (writer, {}),
            (writer, {"text": LONG}),
            (writer, {"text": LONG, "phrase": "the grass", "layer": 0}),
            (writer, {"text": LONG, "phrase": "a", "occurrence": 2}),
            (answerer, {"text": QUESTIONS[1]}),
            (answerer, {"text": QUESTIONS[1], "answer": "a dog"}),
            (answerer, {"text": QUESTIONS[1], "answer": "a dog", "phrase": "the grass"}),
        ]
    ):
        exp = model.explain(photo, **arguments)
        opened = vlcam.open(exp.save(tmp_path / f"{number}.png"))
        assert opened.provenance == exp.provenance
        assert opened.verify(model).identical, arguments


# ---------------------------------------------------------------- the model is left as it was found


def refused(model, text):
    with pytest.raises(vlcam.InputError, match="'car' is not in the text"):
        model.explain(PIXELS[0], *text, phrase="car")


CALLS = {
    "own": lambda model, text: model.explain(PIXELS[0], *text),
    "batch": lambda model, text: model.explain(PIXELS, *text),
    "vision": lambda model, text: model.explain(PIXELS[0], *text, "pgc-gradcam"),
    "sweep": lambda model, text: model.sweep(PIXELS[0], *text, ["context-gradcam", "attention-cross"]),
    "scores": lambda model, text: model.scores(PIXELS[0], *text),
    "refused": refused,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_nothing_about_the_model_changes(kind, call):
    module = copy.deepcopy(trained(kind)).train()
    module.vision_model.eval()
    module.text_decoder.cls.predictions.transform.dense.weight.requires_grad_(False)
    text = (QUESTIONS[0],) if kind is BlipForQuestionAnswering else (None,)
    model = vlcam.wrap(module, models.processor())
    before = state(module)
    call(model, text)
    assert_same(before, state(module))


@pytest.mark.parametrize("place", ["target", "while writing", "decoder", "vision"])
@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_nothing_changes_when_it_breaks(kind, place, monkeypatch):
    module = copy.deepcopy(trained(kind)).train()
    model = vlcam.wrap(module, models.processor())
    asked = kind is BlipForQuestionAnswering
    given = {"text": QUESTIONS[0], "answer": "red"} if asked else {"text": CAPTIONS[0]}

    def fail(*_, **__):
        raise KeyboardInterrupt

    if place == "target":
        given["target"] = fail
    else:
        part = module.vision_model if place == "vision" else module.text_decoder.bert.encoder.layer[1]
        monkeypatch.setattr(part.encoder.layers[1].mlp if place == "vision" else part.output, "forward", fail)
    if place == "while writing":
        given = {"text": QUESTIONS[0]} if asked else {}
    before = state(module)
    with pytest.raises(KeyboardInterrupt):
        model.explain(PIXELS[0], **given)
    assert_same(before, state(module))
    monkeypatch.undo()
    assert model.explain(PIXELS[0], *((QUESTIONS[0],) if asked else ())).status == "ok"


# ---------------------------------------------------------------- anatomy, recipes, errors


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_every_site_of_every_block_is_captured_with_a_gradient(kind, writer, answerer):
    model, text = (writer, LONG) if kind == "caption" else (answerer, QUESTIONS[1])
    assert list(model.anatomy.streams) == ["vision", "fusion"]
    for stream in model.anatomy.streams.values():
        for site in stream.blocks[0].sites:
            found = model.capture(PIXELS[0], text, stream=stream.name, site=site)
            assert list(found.activations) == [Tap(stream.name, layer, site) for layer in range(3)]
            for tap, activation in found.activations.items():
                assert found.gradients[tap].shape == activation.shape
                assert found.gradients[tap].any(), tap
    last = Tap("fusion", 2, "CROSS")
    rows = model.capture(PIXELS[0], text, stream="fusion", site="CROSS").gradients[last][0].abs().sum((0, 2))
    assert bool((rows > 0).all()) == (kind == "answer")  # of a caption, all but the last


def test_anatomy_says_what_the_tokens_are_and_which_decoder_is_no_stream(writer, answerer):
    assert "[DEC], word pieces, [SEP], each of which tells the next" in str(writer.anatomy)
    assert "the row of the token before it" in str(writer.anatomy)
    assert "30 at most" in str(writer.anatomy)
    assert "[ENC], word pieces, [SEP] of the question" in str(answerer.anatomy)
    assert "the decoder that writes the answer is no stream" in str(answerer.anatomy)
    assert "10 at most" in str(answerer.anatomy)


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_the_default_recipe_and_the_sweep_are_of_what_the_model_writes(kind, writer, answerer):
    model, text = (writer, CAPTIONS[0]) if kind == "caption" else (answerer, QUESTIONS[0])
    own = "blip-caption" if kind == "caption" else "blip-vqa"
    assert default(model.adapter.heads) == own
    assert default({"contrastive": "prompts", "caption": "tokens"}) == "clip-gradcam"
    names = fitting(model.adapter)
    assert {own, "lavis-itm", "context-gradcam", "pgc-gradcam", "chefer-generic"} <= set(names)
    assert not {"blip-caption", "blip-vqa", "coca-caption", "clip-gradcam"} - {own} & set(names)
    found = model.sweep(PIXELS[0], text)
    assert [exp.recipe.name for exp in found] == names
    assert {exp.recipe.target for exp in found} == {kind, "none"}
    for exp in found[::5]:
        np.testing.assert_allclose(exp.tokens, model.explain(PIXELS[0], text, exp.recipe.name).tokens, atol=1e-6)
    lavis = found[names.index("lavis-itm")].provenance["run"]
    assert lavis["fitted"]["target"] == f"published for itm (logit); this model offers '{kind}'"
    assert lavis["rows"] == ([0, 1, 2] if kind == "caption" else [1, 2, 3, 4])


def test_a_recipe_of_the_other_kind_is_refused(writer, answerer):
    with pytest.raises(vlcam.RecipeError, match=r"'blip-vqa' is for the score 'answer'.*offers 'caption'"):
        writer.explain(PIXELS[0], LONG, "blip-vqa")
    with pytest.raises(vlcam.RecipeError, match=r"'blip-caption' is for the score 'caption'.*offers 'answer'"):
        answerer.explain(PIXELS[0], QUESTIONS[0], "blip-caption")
    with pytest.raises(vlcam.RecipeError, match="compose='pooler'"):
        writer.explain(PIXELS[0], LONG, "coca-caption")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no question was given"),
        ({"text": [QUESTIONS[0], " "]}, "the text is empty"),
        ({"text": QUESTIONS[0], "answer": "r\ud800d"}, "character 1 is half of a pair"),
        ({"text": QUESTIONS[0], "answer": " "}, "an answer is empty"),
        ({"text": QUESTIONS[0], "answer": ["red", 2]}, "a text of type int"),
        ({"text": QUESTIONS[0], "answer": ["red", "blue"]}, "2 answers for 1 pairs: give one, or one for each"),
        ({"text": QUESTIONS[0], "answer": "red", "phrase": "car"}, "phrase 'car' is not in the text 'is the dog red'"),
        ({"text": QUESTIONS[0], "answer": " and ".join(["red"] * 9), "strict": True}, "cut off: "),
    ],
)
def test_questions_and_answers_that_cannot_be_explained_are_refused(answerer, arguments, words):
    with pytest.raises(vlcam.InputError, match=words):
        answerer.explain(PIXELS[0], **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": " "}, "the text is empty"),
        ({"text": LONG, "phrase": "red dog"}, "phrase 'red dog' is not in the text"),
        ({"phrase": "car"}, "phrase 'car' is not in the text 'a red dog'"),
        ({"text": LONG, "phrase": "a"}, "stands 2 times in the text"),
        ({"text": LONG, "answer": "red"}, "this model answers no questions"),
    ],
)
def test_captions_that_cannot_be_explained_are_refused(writer, arguments, words):
    with pytest.raises(vlcam.InputError, match=words):
        writer.explain(PIXELS[0], **arguments)


def test_an_answer_that_is_cut_is_on_record(answerer):
    exp = answerer.explain(PIXELS[0], QUESTIONS[0], answer=" and ".join(["red"] * 9))
    assert exp.provenance["answer"]["cut"] == ["red", "and", "red"]
    assert len(exp.provenance["answer"]["ids"]) == 16


def test_ids_of_a_processor_are_opened_as_the_model_reads_them(writer, answerer):
    ids = models.tokenizer()(CAPTIONS, padding=True, return_tensors="pt")["input_ids"]
    for exp, image, caption in zip(
        writer.explain({"pixel_values": PIXELS, "input_ids": ids}), PIXELS, CAPTIONS, strict=True
    ):
        assert exp.provenance["text"]["ids"][0] == DEC
        close(exp.tokens, writer.explain(image, caption).tokens)
    assert ids[0, 0] == CLS
    asked = models.tokenizer()(QUESTIONS, padding=True, return_tensors="pt")
    found = answerer.explain({"pixel_values": PIXELS, **asked}, answer=ANSWERS)
    close(found[1].tokens, answerer.explain(PIXELS[1], QUESTIONS[1], answer=ANSWERS[1]).tokens)
    with pytest.raises(vlcam.InputError, match=r"begin with \[5\]: a text is opened by one of \[2, 20\]"):
        writer.explain({"pixel_values": PIXELS[:1], "input_ids": ids[:1, 1:]})


@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_a_checkpoint_loads_from_a_folder(kind, tmp_path):
    module = trained(kind)
    module.save_pretrained(tmp_path)
    models.processor().save_pretrained(tmp_path)
    text = (QUESTIONS[0],) if kind is BlipForQuestionAnswering else ()
    found = vlcam.load(tmp_path).explain(PIXELS[0], *text)
    expected = vlcam.wrap(module, models.processor()).explain(PIXELS[0], *text)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.verify(vlcam.load(tmp_path)).identical


@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_a_model_that_names_no_token_to_begin_with_is_refused(kind):
    module = copy.deepcopy(trained(kind))
    for odd in (None, 22):
        module.config.text_config.bos_token_id = odd
        with pytest.raises(vlcam.AdapterError, match=f"bos_token_id={odd} in the text configuration"):
            vlcam.wrap(module, models.processor())


@pytest.mark.parametrize("kind", [BlipForConditionalGeneration, BlipForQuestionAnswering])
def test_a_grid_that_is_not_square(kind):
    model = vlcam.wrap(
        copy.deepcopy(trained(kind)), models.processor(), image_size=(48, 32), interpolate_pos_encoding=True
    )
    text = (QUESTIONS[0],) if kind is BlipForQuestionAnswering else (LONG,)
    exp = model.explain(models.photo(), *text)
    assert exp.tokens.shape == (6, 4)
    assert exp.verify(model).identical
