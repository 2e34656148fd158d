"""Measures a CLIP in plain torch: what it recognises, and where its maps point. No recipe of the package runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from training.batches import pixels
from training.maps import CAMS, cam, on_object, relevance
from training.pictures import LABEL_IDS, LABELS
from vlcam import scenes

SEED = 7
ALONE, HELD_OUT, CROWD, GALLERIES = 300, 200, 64, 4
KINDS: tuple[scenes.Mismatch, ...] = ("attribute", "object", "binding")
WORDINGS = ("{1} {0}", "there is {1} {0}", "a picture of {1} {0}")  # those of the scenes' captions


def prompt(label: str, wording: str = WORDINGS[0]) -> str:
    """A class as a text: {0} of the wording becomes its name, {1} the article."""
    return wording.format(label, "an" if label[0] in "aeiou" else "a")


def images(found: Sequence[scenes.Scene], side: int) -> torch.Tensor:
    """The scenes as the processor makes them, [N, 3, side, side]."""
    return torch.stack([pixels(scene.image, side) for scene in found])


def scored(model: Any, words: Any, pictures: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """The logit of every picture with every text, [pictures, texts]."""
    coded = words(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        left = torch.cat(
            [model.get_image_features(pictures[i : i + 64]).pooler_output for i in range(0, len(pictures), 64)]
        )
        right = model.get_text_features(**coded).pooler_output
        table: torch.Tensor = model.logit_scale.exp() * normalize(left, dim=-1) @ normalize(right, dim=-1).T
    return table


def zero_shot(model: Any, words: Any) -> dict[str, float]:
    """The share of scenes with one object whose class has the highest logit of all, by the prompts' wording."""
    alone = list(scenes.generate(ALONE, seed=SEED, objects=(1, 1)))
    pictures = images(alone, model.config.vision_config.image_size)
    truth = torch.tensor([LABEL_IDS[scene.phrases()[0]] for scene in alone])
    right = {}
    for wording in WORDINGS:
        found = scored(model, words, pictures, [prompt(label, wording) for label in LABELS]).argmax(1)
        right[prompt("...", wording)] = round(float((found == truth).float().mean()), 3)
    return right


def present(model: Any, words: Any, held_out: Sequence[scenes.Scene]) -> dict[str, float]:
    """Whether the prompts of what is in a scene are those with the highest logits, as of a classifier."""
    pictures = images(held_out, model.config.vision_config.image_size)
    logits = scored(model, words, pictures, [prompt(label) for label in LABELS])
    whole, named, mass = 0, 0, 0.0
    for row, scene in zip(logits, held_out, strict=True):
        there = {LABEL_IDS[phrase] for phrase in scene.phrases()}
        found = len(there & set(row.topk(len(there)).indices.tolist()))
        whole, named = whole + (found == len(there)), named + found
        mass += float(row.softmax(0)[list(there)].sum())
    return {
        "topk_recall": round(whole / len(held_out), 3),
        "object_recall": round(named / sum(len(scene.objects) for scene in held_out), 3),
        "probability_of_present": round(mass / len(held_out), 3),
    }


def retrieval(model: Any, words: Any) -> dict[str, float]:
    """How often the own caption, or image, is the first among those of 64 scenes with two or three objects."""
    many = list(scenes.generate(CROWD * GALLERIES, seed=SEED, objects=(2, 3)))
    own = torch.arange(CROWD)
    hits = []
    for start in range(0, len(many), CROWD):
        part = many[start : start + CROWD]
        pictures = images(part, model.config.vision_config.image_size)
        table = scored(model, words, pictures, [scene.caption for scene in part])
        hits.append([(table.argmax(1) == own).float().mean(), (table.argmax(0) == own).float().mean()])
    to_text, to_image = torch.tensor(hits).mean(0).tolist()
    return {"image to text": round(to_text, 3), "text to image": round(to_image, 3)}


def told_apart(model: Any, words: Any, held_out: Sequence[scenes.Scene]) -> dict[str, float]:
    """How often the true caption has a higher logit than one that is wrong in one phrase, by kind."""
    pictures = images(held_out, model.config.vision_config.image_size)
    true = scored(model, words, pictures, [scene.caption for scene in held_out]).diagonal()
    shares: dict[str, float] = {}
    for kind in KINDS:
        texts = [scenes.mismatch(scene, kind)[0].text for scene in held_out]
        false = scored(model, words, pictures, texts).diagonal()
        shares[kind] = round(float((true > false).float().mean()), 3)
    return shares


def phrase_maps(model: Any, words: Any, pictures: torch.Tensor, texts: list[str]) -> dict[str, torch.Tensor]:
    """Every measured map of each picture's logit with its own text, [B, h * w], by name; needs eager attention."""
    blocks = model.vision_model.encoder.layers
    normed: list[torch.Tensor] = []
    attention: list[torch.Tensor] = []
    handles = []
    for block in blocks:
        handles.append(block.layer_norm1.register_forward_hook(lambda _m, _i, out: normed.append(out)))
        handles.append(block.self_attn.register_forward_hook(lambda _m, _i, out: attention.append(out[1])))
    try:
        left = model.get_image_features(pictures).pooler_output
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        right = model.get_text_features(**words(texts, padding=True, return_tensors="pt")).pooler_output
    own = (normalize(left, dim=-1) * normalize(right, dim=-1)).sum() * model.logit_scale.exp()
    gradients = torch.autograd.grad(own, [*normed, *attention])
    by_normed, by_attention = gradients[: len(blocks)], gradients[len(blocks) :]
    made = {f"F1 last block, {kind}": cam(normed[-1], by_normed[-1], kind) for kind in CAMS}
    made |= {f"F1 block before last, {kind}": cam(normed[-2], by_normed[-2], kind) for kind in CAMS}
    made["A, last block"] = attention[-1].mean(1)[:, 0, 1:]
    made["A x ReLU(G), last block"] = (attention[-1] * by_attention[-1].relu()).mean(1)[:, 0, 1:]
    made["relevance, all blocks"] = relevance(attention, by_attention, mean_rows=False)
    return {name: found.detach() for name, found in made.items()}


def pointing(model: Any, words: Any, count: int = HELD_OUT, batch: int = 50) -> dict[str, list[float]]:
    """The share of phrases whose map has its peak on their object, and in its box: `count` scenes with two objects."""
    pairs = list(scenes.generate(count, seed=SEED, objects=(2, 2)))
    before = model.vision_model.config._attn_implementation  # noqa: SLF001 - the one place where it is kept
    model.vision_model.config._attn_implementation = "eager"  # noqa: SLF001
    hits: dict[str, list[tuple[bool, bool]]] = {}
    try:
        for start in range(0, len(pairs), batch):
            part = pairs[start : start + batch]
            pictures = images(part, model.config.vision_config.image_size)
            for which in range(2):
                items = [scene.objects[which] for scene in part]
                found = phrase_maps(model, words, pictures, [prompt(item.phrase) for item in items])
                for name, maps in found.items():
                    hits.setdefault(name, []).extend(on_object(m, item) for m, item in zip(maps, items, strict=True))
    finally:
        model.vision_model.config._attn_implementation = before  # noqa: SLF001
    return {
        name: [round(share, 3) for share in torch.tensor(found).float().mean(0).tolist()]
        for name, found in hits.items()
    }


def measure(model: Any, words: Any) -> dict[str, Any]:
    """All figures over held-out scenes."""
    model.eval()
    points = pointing(model, words)
    held_out = list(scenes.generate(HELD_OUT, seed=SEED))
    return {
        "zero_shot": zero_shot(model, words),
        **present(model, words, held_out),
        "retrieval": retrieval(model, words),
        "true_above_false": told_apart(model, words, held_out),
        "pointing_game": {name: mask for name, (mask, _) in points.items()},
        "pointing_game_box": {name: box for name, (_, box) in points.items()},
        "logit_scale": round(float(model.logit_scale.detach().exp()), 2),
    }
