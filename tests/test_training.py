"""The training of the embedded model: what it draws, what it calls true, and that a step can be taken."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from training import batches, blip_itm
from training.vocabulary import tokenizer, vocabulary
from vlcam import scenes

PLAN = blip_itm.Plan(batch=6, blind=1.0, width=32, feed_forward=32, vision_layers=1, text_layers=2)


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
    rates = [blip_itm.schedule(step, PLAN) for step in range(PLAN.steps)]
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
