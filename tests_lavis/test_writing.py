"""BlipCaption and BlipVQA: log-probabilities and maps equal to what LAVIS's own forward gives."""

from __future__ import annotations

import copy

import lavis_models as models
import numpy as np
import pytest
import torch
from transformers import BlipConfig, BlipForConditionalGeneration, BlipForQuestionAnswering

import vlcam
from vlcam_adapters.blip_weights import to_transformers

CAPTIONS = ["dog on the grass", "unaffable cat near a ball, it is"]
QUESTIONS = ["is it a dog", "is the unaffable cat on the grass near a ball"]
ANSWERS = ["dog", "the cat is"]


@pytest.fixture(scope="module")
def captioner():
    return vlcam.wrap(models.captioner(), models.processors())


@pytest.fixture(scope="module")
def answerer():
    return vlcam.wrap(models.answerer(), models.question_processors())


def of_labels(logits, labels):
    """Log-probability of each label that counts, by sample."""
    told = logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:].clamp(0)[..., None])[..., 0]
    return (told * (labels[:, 1:] != -100)).sum(1)


def forward(module, pixels, samples):
    """LAVIS's own, on a copy that stores cross-attention by LAVIS's flags."""
    twin = copy.deepcopy(module)
    reader = twin.text_encoder if hasattr(twin, "text_encoder") else twin.text_decoder.bert
    layers = [layer.crossattention.self for layer in reader.encoder.layer]
    for layer in layers:
        layer.save_attention = True
    made = twin({"image": pixels, **samples}).intermediate_output
    told = of_labels(made.decoder_output.logits, made.decoder_labels)
    told.sum().backward()
    maps = [
        (layer.get_attention_map() * layer.get_attn_gradients().clamp(0)).mean(1)[..., 1:].detach().numpy()
        for layer in layers
    ]
    return told.tolist(), maps


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_caption_equals_lavis_on_a_padded_batch(captioner, layer):
    pixels = models.pixels(1, batch=2)
    samples = {"text_input": [f"a red {caption}" for caption in CAPTIONS]}
    told, maps = forward(captioner.adapter.module, pixels, samples)
    for sample, exp in enumerate(captioner.explain(pixels, CAPTIONS, layer=layer)):
        assert exp.provenance["run"]["target_value"] == pytest.approx(told[sample], abs=1e-4)
        expected = maps[layer][sample]
        for word in exp.word_maps:
            np.testing.assert_allclose(
                word.tokens.ravel(), expected[list(word.rows)].mean(0), atol=1e-5 * expected.max()
            )


def test_the_prompt_is_read_and_not_counted(captioner):
    exp = captioner.explain(models.pixels(), CAPTIONS[0], layer=1)
    text = exp.provenance["text"]
    assert text["pieces"] == ["[DEC]", "a", "red", "dog", "on", "the", "grass", "[SEP]"]
    assert text["special"] == [True, True, True, False, False, False, False, True]
    assert list(exp.words) == ["dog", "on", "the", "grass"]
    with_prompt = captioner.explain(models.pixels(), f"a red {CAPTIONS[0]}", layer=1)
    assert with_prompt.provenance["run"]["target_value"] == exp.provenance["run"]["target_value"]
    bare = vlcam.wrap(models.captioner(prompt=""), models.processors())
    assert bare.explain(models.pixels(), "a dog", layer=1).provenance["text"]["pieces"][:2] == ["[DEC]", "a"]


def test_captions_that_lavis_writes_are_written(captioner):
    module, pixels = captioner.adapter.module, models.pixels(2, batch=2)
    with torch.no_grad():
        own = module.generate({"image": pixels}, num_beams=1, min_length=1, max_length=3 + 29)
    exps = captioner.explain(pixels, layer=0)
    assert [exp.text for exp in exps] == [caption.strip() for caption in own]
    assert exps[0].provenance["text"]["written"]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_answer_equals_lavis_on_a_padded_batch(answerer, layer):
    pixels = models.pixels(1, batch=2)
    one = torch.tensor([1, 1])
    samples = {"text_input": QUESTIONS, "answer": ANSWERS, "weight": one, "n_answers": one}
    told, maps = forward(answerer.adapter.module, pixels, samples)
    for sample, exp in enumerate(answerer.explain(pixels, QUESTIONS, answer=ANSWERS, layer=layer)):
        assert exp.provenance["run"]["target_value"] == pytest.approx(told[sample], abs=1e-4)
        expected = maps[layer][sample]
        for word in exp.word_maps:
            np.testing.assert_allclose(
                word.tokens.ravel(), expected[list(word.rows)].mean(0), atol=1e-5 * expected.max()
            )


def test_answers_that_lavis_writes_are_written(answerer):
    module = answerer.adapter.module
    pixels = models.pixels(2)
    for question in QUESTIONS:
        with torch.no_grad():
            (own,) = module.predict_answers(
                {"image": pixels[None], "text_input": [question]},
                num_beams=1,
                inference_method="generate",
                max_len=11,
                min_len=1,
            )
        exp = answerer.explain(pixels, question, layer=0)
        assert exp.provenance["answer"]["given"] == own
        assert exp.provenance["answer"]["written"]
    many = answerer.explain(pixels, QUESTIONS, layer=0)
    alone = [answerer.explain(pixels, question, layer=0) for question in QUESTIONS]
    assert [exp.provenance["answer"] for exp in many] == [exp.provenance["answer"] for exp in alone]


def test_questions_pass_their_processor(answerer):
    exp = answerer.explain(models.pixels(), "Is it (a) DOG?", answer="dog", layer=0)
    assert list(exp.words) == ["Is", "it", "a", "DOG"]
    assert exp.provenance["text"]["pieces"][0] == "[ENC]"
    assert exp.provenance["answer"]["pieces"] == ["[DEC]", "dog", "[SEP]"]


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_weights_fit_the_class_of_transformers(kind, captioner, answerer):
    module = (captioner if kind == "caption" else answerer).adapter.module
    text = {"vocab_size": 24, "hidden_size": 24, "encoder_hidden_size": 16, "intermediate_size": 32, "pad_token_id": 0}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    of_kind = {"caption": BlipForConditionalGeneration, "answer": BlipForQuestionAnswering}[kind]
    twin = of_kind(BlipConfig(text_config=text, vision_config=vision)).eval()
    found, known = set(to_transformers(module.state_dict())), set(twin.state_dict())
    if kind == "answer":  # its decoder has blocks of another number and width
        found, known = ({n for n in each if "text_decoder" not in n} for each in (found, known))
    assert found == {name for name in known if not name.endswith("position_ids")}


@pytest.mark.parametrize("kind", ["caption", "answer"])
def test_a_writer_is_left_as_found(kind, captioner, answerer):
    model = captioner if kind == "caption" else answerer
    module = model.adapter.module
    before = [tensor.clone() for tensor in module.state_dict().values()]
    layers = [part for part in module.modules() if hasattr(part, "save_attention")]
    for layer in layers:
        layer.save_attention = True
    model.explain(models.pixels(), QUESTIONS[0], layer=1)
    for layer in layers:
        assert layer.save_attention
        assert not hasattr(layer, "attention_map")
        layer.save_attention = False
    assert all(torch.equal(one, other) for one, other in zip(before, module.state_dict().values(), strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
