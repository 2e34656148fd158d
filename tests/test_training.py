"""The training of the embedded models: what it draws, what it calls true, and that a step can be taken."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from training import batches, blip_itm, blip_writing, clip, clip_maps, loop, pieces, written
from training.pictures import LABEL_IDS, LABELS
from training.vocabulary import QUESTION_WORDS, tokenizer, vocabulary
from vlcam import scenes

PLAN = blip_itm.Plan(batch=6, blind=1.0, width=32, feed_forward=32, vision_layers=1, text_layers=2)

WRITING_PLANS = {
    kind: replace(plan, start="", gallery=8, width=32, feed_forward=32, text_feed_forward=32, vision_layers=1)
    for kind, plan in blip_writing.PLANS.items()
}

CLIP_PLAN = clip.Plan(batch=6, blind=1.0, width=32, layers=2, text_width=16, text_layers=1, projection=16)


@pytest.fixture(scope="module")
def words():
    return tokenizer(40)


@pytest.fixture(scope="module")
def batch():
    return list(itertools.islice(batches.Scenes(1_000_000, 64, 8, pool=6), 6))


def test_training_scenes_are_never_held_out_ones():
    with pytest.raises(ValueError, match="training seeds start at 1,000,000"):
        batches.Scenes(7, 64, 8)


def test_the_stream_of_samples_is_fixed_by_its_seed(batch):
    again = list(itertools.islice(batches.Scenes(1_000_000, 64, 8, pool=6), 6))
    for one, other in zip(batch, again, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert (one.true, one.false, one.wrong) == (other.true, other.false, other.wrong)


def test_patches_are_labelled_by_the_object_that_covers_half_of_them():
    scene = next(scenes.generate(1, seed=3))
    cover = batches.patch_cover(scene, 8)
    colours, shapes = batches.patch_labels(scene, cover)
    for item, share in zip(scene.objects, cover, strict=True):
        assert (colours[share >= 0.5] == batches.COLOUR_IDS[item.colour]).all()
        assert (shapes[share >= 0.5] == batches.SHAPE_IDS[item.shape]).all()
        assert float(share.sum() * 16 * 16) == pytest.approx(item.mask.sum(), rel=1e-5)
    assert (colours[(cover <= 0.1).all(0)] == batches.BACKGROUND).all()


def test_every_word_of_a_caption_is_in_the_vocabulary_and_others_become_pieces(words):
    for scene in scenes.generate(50, seed=5):
        ids = words(scene.caption)["input_ids"]
        assert words.unk_token_id not in ids
        assert len(ids) <= 40
    assert words.tokenize("zebra") == ["z", "##e", "##b", "##r", "##a"]
    assert len(words) == len(vocabulary())


def test_tokens_belong_to_the_phrase_at_their_characters(words, batch):
    caption = batch[0].true
    coded = words([caption.text], return_offsets_mapping=True, return_tensors="pt")
    owner = blip_itm.phrase_of_token([caption], coded["offset_mapping"])[0]
    pieces = words.convert_ids_to_tokens(coded["input_ids"][0])
    for index, phrase in enumerate(caption.phrases):
        found = "".join(p.removeprefix("##") for p, o in zip(pieces, owner, strict=True) if o == index)
        assert found == phrase.replace(" ", "")


def test_a_dimmed_phrase_counts_as_true_only_as_far_as_it_is_seen(words, batch):
    torch.manual_seed(0)
    trainee = blip_itm.Trainee(PLAN, words)
    captions = [s.true for s in batch] + [s.false for s in batch]
    coded = words([c.text for c in captions], padding=True, return_offsets_mapping=True, return_tensors="pt")
    owner = blip_itm.phrase_of_token(captions, coded["offset_mapping"])
    gate, left = trainee._gates(batch, owner, torch.Generator().manual_seed(1))
    assert ((gate >= 0) & (gate <= blip_itm.BRIGHTEST)).all()
    assert (left[len(batch) :] == 1).all()
    assert ((left[: len(batch)] != 1).sum(1) == 1).all()
    for row, sample in enumerate(batch):
        which = int((left[row] - 1).abs().argmax())
        touched = gate[row, :, :, 1:][..., sample.cover[which] > 0]
        assert (touched != 1).any()
        kept = (sample.cover > 0)[[i for i in range(len(sample.cover)) if i != which]].any(0)
        others = gate[row, :, owner[row] != which][..., 1:][..., kept & (sample.cover[which] == 0)]
        assert (others == 1).all()


def test_losses_are_finite_and_a_step_changes_the_weights(words, batch):
    torch.manual_seed(0)
    trainee = blip_itm.Trainee(PLAN, words).train()
    parts = trainee.losses(batch, torch.Generator().manual_seed(0))
    assert {"itm", "token", "look", "dense", "contrastive"} <= parts.keys()
    assert all(torch.isfinite(value) for value in parts.values())
    torch.autograd.backward(sum(parts[name] for name in ("itm", "token", "look", "dense", "contrastive")))
    cross = trainee.blip.text_encoder.encoder.layer[0].crossattention.self
    assert cross.query.weight.grad.abs().sum() > 0
    assert all(module.gate is None and module.seen is None for module in trainee.gates)


def test_the_schedule_warms_up_and_falls():
    rates = [loop.schedule(step, PLAN.warmup, PLAN.steps) for step in range(PLAN.steps)]
    assert np.argmax(rates) in (PLAN.warmup - 1, PLAN.warmup)
    assert rates[0] == pytest.approx(1 / PLAN.warmup)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)


def test_what_is_saved_is_what_was_trained(words, tmp_path):
    import vlcam

    torch.manual_seed(0)
    trainee = blip_itm.Trainee(PLAN, words).eval()
    blip_itm.save(trainee, PLAN, words, tmp_path)
    scene = next(scenes.generate(1, seed=3))
    scores = vlcam.load(tmp_path).scores(scene.image, scene.caption)
    coded = words(scene.caption, return_tensors="pt")
    ids = coded["input_ids"].clone()
    ids[:, 0] = blip_itm.encode_token(words)
    with torch.no_grad():
        logits = trainee.blip(
            input_ids=ids,
            attention_mask=coded["attention_mask"],
            pixel_values=batches.pixels(scene.image, 64)[None],
        ).itm_score
    assert scores["itm_logit"].value == pytest.approx(float(logits[0, 1]), abs=5e-3)


@pytest.fixture(scope="module")
def crowd():
    return clip.joined(list(itertools.islice(batches.Scenes(1_000_000, 96, 8, pool=6), 6)))


@pytest.fixture(scope="module")
def clip_words():
    return pieces.tokenizer(32)


def test_patches_whose_edges_run_through_pixels_cover_as_much_as_the_object():
    scene = next(scenes.generate(1, seed=3))
    cover = batches.patch_cover(scene, 12)
    assert cover.shape[1:] == (12, 12)
    assert ((cover >= 0) & (cover <= 1 + 1e-6)).all()
    for item, share in zip(scene.objects, cover, strict=True):
        assert float(share.sum()) * (128 / 12) ** 2 == pytest.approx(item.mask.sum(), rel=1e-5)


def test_parts_of_whole_pixels_are_their_means():
    masks = np.random.default_rng(0).random((2, 24, 24), np.float32)
    found = batches._parts(24, 8) @ masks @ batches._parts(24, 8).T
    assert np.abs(found - masks.reshape(2, 8, 3, 8, 3).mean((2, 4))).max() < 1e-6


def test_the_words_of_the_scenes_are_one_piece_or_two(clip_words):
    for word in pieces.WORDS:
        parts = [part + pieces.LAST * (i == word.count(" ")) for i, part in enumerate(word.split())]
        assert clip_words.tokenize(word.replace(" ", "")) == parts
    for scene in scenes.generate(50, seed=5):
        assert len(clip_words(scene.caption)["input_ids"]) <= 32


def test_any_text_has_pieces_and_the_end_has_the_highest_id(clip_words):
    ids = clip_words("Zébra, 42 的 😀 don't\n\x00")["input_ids"]
    assert ids.count(clip_words.eos_token_id) == 1
    assert ids[0] == clip_words.bos_token_id
    assert (
        clip_words.eos_token_id == clip_words.pad_token_id == len(clip_words) - 1 == max(pieces.vocabulary().values())
    )
    assert len(clip_words) == len(pieces.vocabulary())
    assert clip_words.is_fast


def test_the_model_knows_where_its_texts_begin_and_end(clip_words):
    config = clip.bare(CLIP_PLAN, clip_words).config.text_config
    assert config.vocab_size == len(clip_words)
    found = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert found == (clip_words.bos_token_id, clip_words.eos_token_id, clip_words.pad_token_id)


def test_the_tower_in_training_is_the_one_that_is_saved(clip_words, crowd):
    trainee = clip.Trainee(replace(CLIP_PLAN, bfloat16=0)).eval()
    plain = clip.bare(CLIP_PLAN, clip_words).eval()
    plain.load_state_dict(trainee.net.state_dict())
    with torch.no_grad():
        found = trainee.net.visual_projection(trainee.sight(crowd.pixels))
        wanted = plain.get_image_features(crowd.pixels).pooler_output
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_the_map_that_is_trained_is_the_one_that_is_measured(clip_words, crowd):
    torch.manual_seed(0)
    trainee = clip.Trainee(replace(CLIP_PLAN, bfloat16=0)).eval()
    plain = clip.bare(CLIP_PLAN, clip_words).eval()
    plain.load_state_dict(trainee.net.state_dict())
    plain.vision_model.config._attn_implementation = "eager"
    texts = [clip_maps.prompt(LABELS[label]) for label in crowd.labels[:, 0]]
    image = torch.nn.functional.normalize(trainee.net.visual_projection(trainee.sight(crowd.pixels)), dim=-1)
    made = trainee.map_of(trainee.net.logit_scale.exp() * (image * trainee.text(texts)).sum(-1))
    wanted = clip_maps.phrase_maps(plain, clip_words, crowd.pixels, texts)["F1 last block, gradcam"]
    torch.testing.assert_close(made.detach().relu() / 144, wanted, atol=1e-6, rtol=1e-4)


def test_a_dimmed_object_counts_as_far_as_cls_sees_it(crowd):
    trainee = clip.Trainee(CLIP_PLAN)
    share = trainee._gates(crowd, torch.Generator().manual_seed(1))
    gate = trainee.attention.gates[trainee.blocks[-1].self_attn]
    assert gate.shape == (6, CLIP_PLAN.heads, 145)
    assert ((gate >= 0) & (gate <= clip.BRIGHTEST)).all()
    assert (gate[..., 0] == 1).all()
    assert ((share != 1).sum(1) == 1).all()
    for row, which in enumerate((share - 1).abs().argmax(1).tolist()):
        cover = crowd.cover[row, which]
        seen = (gate[row, :, 1:].mean(0) * cover).sum() / cover.sum()
        assert float(share[row, which]) == pytest.approx(float(seen), abs=1e-5)
        others = (crowd.cover[row].sum(0) > 0) & (cover == 0)
        assert (gate[row, :, 1:][:, others] == 1).all()


def test_captions_that_name_the_same_objects_are_equally_right(crowd):
    same = torch.arange(6) % 3
    captions = clip.Batch(
        *(crowd.pixels, crowd.cover, crowd.labels[same], crowd.false_labels, crowd.colours, crowd.shapes),
        *(crowd.true, crowd.false),
    )
    right = (same[:, None] == same).float()
    logits = 50 * torch.cat([right, torch.zeros(6, 6)], 1)
    clear = torch.ones(6, dtype=torch.bool)
    assert float(clip.matched(logits, captions, clear)) == pytest.approx(np.log(2), abs=1e-4)
    assert float(clip.matched(50 * torch.eye(6, 12), captions, clear)) > 10


def test_prompts_name_every_class_in_words_of_the_vocabulary(clip_words):
    found = clip.prompts(torch.Generator().manual_seed(0))
    assert all(label in text for label, text in zip(LABELS, found, strict=True))
    assert len({text.replace(label, "") for label, text in zip(LABELS, found, strict=True)}) > 3
    assert max(len(clip_words.tokenize(text)) for text in found) <= 8
    assert clip_maps.prompt("orange star") == "an orange star"


def test_the_losses_of_clip_are_finite_and_reach_both_towers(crowd):
    torch.manual_seed(0)
    trainee = clip.Trainee(CLIP_PLAN).train()
    alone = trainee.losses(crowd, torch.Generator().manual_seed(0), alone=True)
    assert alone.keys() == {"dense", "evidence", "shapes"}
    trainee = clip.Trainee(replace(CLIP_PLAN, blind=0.5, point=0.2)).train()
    parts = trainee.losses(crowd, torch.Generator().manual_seed(0), alone=False)
    assert {"phrase", "presence", "captions", "look", "point", "dense", "evidence"} <= parts.keys()
    assert all(torch.isfinite(value) for value in parts.values())
    torch.autograd.backward(sum(parts[name] for name in ("phrase", "presence", "captions", "look", "point")))
    for tower in (trainee.net.vision_model, trainee.net.text_model):
        assert tower.encoder.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    assert not trainee.attention.gates


def test_the_scale_stays_within_clips_bound():
    trainee = clip.Trainee(CLIP_PLAN)
    with torch.no_grad():
        trainee.net.logit_scale.fill_(9.0)
    trainee.clamp()
    assert float(trainee.net.logit_scale.detach().exp()) == pytest.approx(100, rel=1e-5)


def test_the_clip_that_is_saved_is_the_one_that_was_trained(tmp_path):
    from transformers import AutoModel, AutoProcessor

    trainee = clip.Trainee(CLIP_PLAN).eval()
    clip.save(trainee, CLIP_PLAN, tmp_path)
    model, processor = AutoModel.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    scene = next(scenes.generate(1, seed=3))
    given = processor(text=[scene.caption, "a red circle"], images=scene.image, padding=True, return_tensors="pt")
    torch.testing.assert_close(given["pixel_values"][0], batches.pixels(scene.image, 96), atol=2e-2, rtol=0)
    with torch.no_grad():
        found = model(**given).logits_per_image
        image = trainee.net.get_image_features(given["pixel_values"]).pooler_output
        text = trainee.text([scene.caption, "a red circle"])
        wanted = trainee.net.logit_scale.exp() * torch.nn.functional.normalize(image, dim=-1) @ text.T
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tiny_clip():
    from transformers import CLIPModel, CLIPTokenizer

    import vlcam

    folder = vlcam.models()["tiny-clip"].folder
    return CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)


def test_the_embedded_clip_names_single_objects(tiny_clip):
    alone = list(scenes.generate(60, seed=11, objects=(1, 1)))
    texts = [clip_maps.prompt(label) for label in LABELS]
    found = clip_maps.scored(*tiny_clip, clip_maps.images(alone, 96), texts).argmax(1)
    truth = torch.tensor([LABEL_IDS[scene.phrases()[0]] for scene in alone])
    assert (found == truth).float().mean() > 0.9


def test_maps_of_the_embedded_clip_point_at_the_object_that_is_named(tiny_clip):
    shares = clip_maps.pointing(*tiny_clip, count=20)
    assert shares["F1 last block, gradcam"][0] > 0.8
    for on_object, in_box in shares.values():
        assert 0 <= on_object <= in_box <= 1


@pytest.fixture(scope="module", params=WRITING_PLANS)
def writing_plan(request):
    return WRITING_PLANS[request.param]


@pytest.fixture(scope="module")
def writer(writing_plan):
    torch.manual_seed(0)
    return blip_writing.Trainee(writing_plan, blip_writing.words_of(writing_plan))


@pytest.fixture(scope="module")
def shown(writing_plan, writer):
    return blip_writing.gallery(writing_plan, writer.net.vision_model.eval())


def test_questions_have_one_answer():
    asked = blip_writing.questions(["red star", "blue star", "blue circle"])
    assert [(q.text, q.answer, q.about) for q in asked] == [
        ("what shape is red?", "star", 0),
        ("what colour is the circle?", "blue", 2),
    ]
    assert [q.text[slice(*q.span)] for q in asked] == ["red", "circle"]


def test_questions_add_words_behind_all_others(words):
    more = tokenizer(40, QUESTION_WORDS)
    assert {piece: more.get_vocab()[piece] for piece in words.get_vocab()} == words.get_vocab()
    assert more.tokenize("what colour is the star?") == ["what", "colour", "is", "the", "star", "?"]


def test_ids_that_open_and_end_what_is_written_are_those_of_the_configuration(writer):
    config = writer.net.config.text_config
    assert config.bos_token_id == blip_writing.decode_token(writer.words) == len(writer.words)
    assert config.eos_token_id == config.sep_token_id == writer.words.sep_token_id
    assert config.pad_token_id == writer.words.pad_token_id
    assert config.vocab_size == len(writer.words) + 2


def test_a_gallery_holds_what_the_tower_makes_of_scenes_and_where_their_objects_are(writing_plan, shown):
    drawn = list(scenes.generate(8, seed=writing_plan.seed))
    assert shown.seen.shape == (8, 65, 32)
    assert [[" ".join(pair) for pair in pairs] for pairs in shown.pairs] == [list(s.phrases()) for s in drawn]
    for cover, scene in zip(shown.cover, drawn, strict=True):
        assert cover.any(1).tolist() == [index < len(scene.objects) for index in range(3)]
        for place, share in zip(cover, batches.patch_cover(scene, 8), strict=False):
            assert float(place.sum()) == pytest.approx(float(share.sum()), rel=1e-5)
    with pytest.raises(ValueError, match="training seeds start at 1,000,000"):
        blip_writing.gallery(replace(writing_plan, seed=7), None)


def test_a_colour_is_told_as_far_as_its_object_is_seen(writer):
    size = writer.net.config.text_config.vocab_size
    red = writer.words.get_vocab()["red"]
    assert writer.rivals[red].sum() == 5
    assert not writer.rivals[writer.words.get_vocab()["and"]].any()
    ids, counted = torch.tensor([[0, red]]), torch.ones(1, 1, dtype=torch.bool)
    for share, likeliest in ((0.0, 1 / 6), (1.0, 0.95), (1.5, 1.0)):
        wanted = (1 + 5 * float(blip_itm.confirmed(torch.tensor(share)))) / 6
        logits = torch.full((1, 2, size), -30.0)
        logits[0, 0, red] = np.log(wanted)
        logits[0, 0, writer.rivals[red] > 0] = np.log((1 - wanted) / 5)
        best = blip_writing.told(logits, ids, counted, torch.tensor([[share]]), writer.rivals)["write"]
        logits[0, 0, red] += 0.1
        assert blip_writing.told(logits, ids, counted, torch.tensor([[share]]), writer.rivals)["write"] > best
        assert wanted == pytest.approx(likeliest, abs=0.05)


def test_losses_of_a_blip_that_writes_reach_all_that_learns(writer, shown):
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    writer.zero_grad()
    parts = writer.train().losses(shown, list(range(8)), rng, generator)
    assert parts.keys() == {"look", "write", "right"}
    torch.autograd.backward(parts["look"] + parts["write"])
    for name, parameter in writer.named_parameters():
        assert (parameter.grad is not None) == ("vision_model" not in name), name
    assert all(module.gate is None and module.seen is None for module in writer.gates)


def test_a_dimmed_object_is_seen_as_far_as_the_gate_says(writer, shown):
    writer.plan, plan = replace(writer.plan, blind=1.0, late=0.0), writer.plan
    owner = torch.zeros(8, 6, dtype=torch.long)
    share = writer._gate(shown.cover, torch.zeros(8, dtype=torch.long), owner, torch.Generator().manual_seed(1))
    gate = writer.gates[0].gate
    writer.plan = plan
    assert gate.shape == (8, 2, 6, 65)
    for row, cover in enumerate(shown.cover):
        assert float(gate[row, :, 0, 1:][:, cover[0] > 0].mean()) == pytest.approx(float(share[row]), abs=1e-5)
    for module in writer.gates:
        module.gate = None


def test_a_blip_that_writes_is_saved_as_it_was_trained(writer, writing_plan, tmp_path):
    import vlcam

    blip_writing.save(writer, writing_plan, tmp_path)
    model = vlcam.load(tmp_path)
    scene = next(scenes.generate(1, seed=3))
    pixels, words = batches.pixels(scene.image, 64)[None], writer.words
    net = writer.net.eval()
    with torch.no_grad():
        if writing_plan.model == "blip-vqa":
            coded = words("what shape is red?", return_tensors="pt")
            ids = blip_writing.opened(words("star", return_tensors="pt"), len(words))
            made = net(
                pixel_values=pixels,
                input_ids=blip_writing.opened(coded, blip_itm.encode_token(words)),
                attention_mask=coded["attention_mask"],
                decoder_input_ids=ids,
                labels=ids,
            )
            found = model.explain(scene.image, "what shape is red?", "attention-cross", layer=0, answer="star").scores
            name = "answer_log_probability"
        else:
            ids = blip_writing.opened(words("a red star", return_tensors="pt"), len(words))
            made = net(pixel_values=pixels, input_ids=ids, labels=ids)
            found, name = model.scores(scene.image, "a red star"), "caption_log_probability"
    assert found[name].value == pytest.approx(-float(made.loss) * (ids.shape[1] - 1), abs=2e-2)


def test_weights_of_the_matching_blip_are_taken_over():
    plan = blip_writing.PLANS["vqa"]
    trainee = blip_writing.Trainee(plan, blip_writing.words_of(plan))
    from transformers import BlipForImageTextRetrieval

    import vlcam

    old = BlipForImageTextRetrieval.from_pretrained(vlcam.models()["tiny-blip-itm"].folder, dtype=torch.float32)
    for name, tensor in old.vision_model.state_dict().items():
        assert torch.equal(trainee.net.vision_model.state_dict()[name], tensor)
    first, before = trainee.net.text_encoder.encoder.layer[0], old.text_encoder.encoder.layer[0]
    assert torch.equal(first.crossattention.self.query.weight, before.crossattention.self.query.weight)
    assert first.intermediate.dense.weight.shape == (plan.text_feed_forward, plan.width)
    opening = blip_itm.encode_token(trainee.words), blip_itm.encode_token(tokenizer(40))
    tables = (model.embeddings.word_embeddings.weight for model in (trainee.net.text_encoder, old.text_encoder))
    new, known = (table[row] for table, row in zip(tables, opening, strict=True))
    assert torch.equal(new, known)


def test_the_embedded_captioner_names_what_is_there_and_looks_at_it():
    import vlcam

    model = vlcam.load("tiny-blip-caption")
    figures = written.caption_figures(model, tokenizer(40), list(scenes.generate(20, seed=11)))
    assert figures["captions_true"] > 0.8
    assert figures["object_tokens_right"] > 0.8
    assert figures["pointing_game"]["blip-caption: A x ReLU(G)"][-1] > 0.85


def test_the_embedded_answerer_is_right_and_looks_at_what_is_asked_about():
    import vlcam

    figures = written.answer_figures(vlcam.load("tiny-blip-vqa"), list(scenes.generate(10, seed=11)))
    assert figures["answers_right"] > 0.9
    assert figures["pointing_game"]["blip-vqa: A x ReLU(G)"][0] > 0.9


def test_the_embedded_models_write_by_transformers_own_generate():
    from transformers import BlipForConditionalGeneration, BlipForQuestionAnswering, BlipProcessor

    import vlcam

    scene = next(scenes.generate(1, seed=7, objects=(1, 1)))
    for name, kind, text in (
        ("tiny-blip-caption", BlipForConditionalGeneration, None),
        ("tiny-blip-vqa", BlipForQuestionAnswering, f"what colour is the {scene.objects[0].shape}?"),
    ):
        folder = vlcam.models()[name].folder
        processor = BlipProcessor.from_pretrained(folder, backend="pil")
        given = processor(images=scene.image, text=text, return_tensors="pt")
        net = kind.from_pretrained(folder, dtype=torch.float32).eval()
        said = processor.decode(net.generate(**given, do_sample=False, max_new_tokens=30)[0], skip_special_tokens=True)
        assert said == scene.objects[0].colour if text else written.named(said) == list(scene.phrases())
