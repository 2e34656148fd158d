"""Measures a BLIP that writes: what it writes on held-out scenes, and where the maps of its words point."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertTokenizer

import vlcam
from benchmarks import pointing
from training.batches import pixels
from training.blip_writing import decode_token, opened, questions
from vlcam import scenes
from vlcam.recipe import Recipe

Way = Callable[[vlcam.Explainer, list[scenes.Scene], Recipe], list[tuple[bool, ...]]]
Table = dict[str, list[float | None]]

CHUNK = 50
_OBJECT = re.compile(rf"\b({'|'.join(scenes.COLOURS)}) ({'|'.join(scenes.SHAPES)})\b")
_WORD = re.compile(rf"\b(?:{'|'.join((*scenes.COLOURS, *scenes.SHAPES))})\b")


def variants(published: str) -> dict[str, Recipe]:
    """The published recipe, attention alone, and relatives, by what they compute."""
    recipe = vlcam.recipes()[published].recipe
    return {
        f"{published}: A x ReLU(G)": recipe,
        "attention-cross: A": vlcam.recipes()["attention-cross"].recipe,
        "signed: A x G": recipe.replace(name="signed", relu="none"),
    }


def named(caption: str) -> list[str]:
    """The phrases of objects in a caption, "red circle", in order."""
    return [" ".join(found) for found in _OBJECT.findall(caption)]


def caption_figures(model: vlcam.Explainer, words: BertTokenizer, held_out: list[scenes.Scene]) -> dict[str, Any]:
    """Tokens told, captions written and maps of phrases."""
    right, total, of_objects, objects = 0, 0, 0, 0
    honest, complete, ended, heard = 0, 0, 0, 0
    examples: list[list[str | None]] = []
    for batch in _chunks(held_out):
        for hits, inside in _told(model, words, batch):
            right, total = right + int(hits.sum()), total + len(hits)
            of_objects, objects = of_objects + int(hits[inside].sum()), objects + int(inside.sum())
        for scene, own in zip(batch, model.explain([scene.image for scene in batch]), strict=True):
            said, there = named(own.text or ""), set(scene.phrases())
            ended += not own.provenance["text"]["cut"] and len(_WORD.findall(own.text or "")) == 2 * len(said)
            honest += bool(said) and set(said) <= there
            complete += sorted(said) == sorted(there)
            heard += len(there & set(said))
            if len(examples) < 4:
                examples.append([scene.caption, own.text])
    phrases = sum(len(scene.objects) for scene in held_out)
    return {
        "tokens_right": round(right / total, 3),
        "object_tokens_right": round(of_objects / objects, 3),
        "captions_true": round(honest / len(held_out), 3),
        "captions_true_and_complete": round(complete / len(held_out), 3),
        "objects_named": round(heard / phrases, 3),
        "captions_well_formed": round(ended / len(held_out), 3),
        "examples": examples,
        "pointing_game": _tables(model, held_out, "blip-caption", _captions)[0],
    }


def answer_figures(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> dict[str, Any]:
    """Answers written, by kind of question, and maps of the word that tells which object is asked about."""
    right: dict[str, list[bool]] = {"colour": [], "shape": []}
    examples: list[list[str | None]] = []
    for batch in _chunks(held_out):
        for scene, question, found in _asked(model, batch, "blip-vqa", own=True):
            said = found.provenance["answer"]["given"]
            right[question.text.split()[1]].append(said == question.answer)
            if len(examples) < 4 and (not examples or examples[-1][0] != scene.caption):
                examples.append([scene.caption, question.text, said])
    count = sum(map(len, right.values()))
    by_word, whole = _tables(model, held_out, "blip-vqa", _answers)
    return {
        "questions": {kind: len(found) for kind, found in right.items()},
        "answers_right": round(sum(map(sum, right.values())) / count, 3),
        **{f"{kind}_right": round(float(np.mean(found)), 3) for kind, found in right.items()},
        "examples": examples,
        "pointing_game": by_word,
        "pointing_game_whole": whole,
    }


def _told(
    model: vlcam.Explainer, words: BertTokenizer, batch: list[scenes.Scene]
) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """For each scene's own caption: whether each next token is the likeliest, and which ones name an object."""
    module: Any = model.adapter.module
    side = module.config.vision_config.image_size
    for scene in batch:
        coded = words([scene.caption], return_offsets_mapping=True, return_tensors="pt")
        ids = opened(coded, decode_token(words))
        with torch.no_grad():
            logits = module(pixel_values=pixels(scene.image, side)[None], input_ids=ids).logits
        starts = coded["offset_mapping"][0, 1:, 0].numpy()
        ends = coded["offset_mapping"][0, 1:, 1].numpy()
        inside = np.zeros(len(starts), bool)
        for item in scene.objects:
            inside |= (starts >= item.span[0]) & (ends <= item.span[1]) & (ends > starts)
        yield (logits[0, :-1].argmax(-1) == ids[0, 1:]).numpy(), inside


def _tables(model: vlcam.Explainer, held_out: list[scenes.Scene], published: str, way: Way) -> list[Table]:
    """Shares of maps that point right, by recipe and block, None without gradient; a table for each map of `way`."""
    depth = len(model.anatomy.stream("fusion").blocks)
    tables: dict[str, list[NDArray[np.float64] | None]] = {}
    for title, recipe in variants(published).items():
        tables[title] = []
        for layer in range(depth):
            hits: list[tuple[bool, ...]] = []
            try:
                for batch in _chunks(held_out):
                    hits += way(model, batch, recipe.replace(layers=(layer,)))
                tables[title].append(np.mean(hits, axis=0))
            except vlcam.EvidenceError:
                tables[title].append(None)
    count = next(len(shares) for row in tables.values() for shares in row if shares is not None)
    return [
        {title: [None if s is None else round(float(s[which]), 3) for s in row] for title, row in tables.items()}
        for which in range(count)
    ]


def _captions(model: vlcam.Explainer, batch: list[scenes.Scene], recipe: Recipe) -> list[tuple[bool, ...]]:
    found = model.explain([s.image for s in batch], [s.caption for s in batch], recipe)
    return [
        (pointing.points_right(pointing.phrase_map(whole, item), item),)
        for scene, whole in zip(batch, found, strict=True)
        for item in scene.objects
    ]


def _asked(model: vlcam.Explainer, batch: list[scenes.Scene], recipe: Recipe | str, *, own: bool) -> Iterator[Any]:
    """Every question about every scene, explained: scene, question, explanation; of the model's answer or the true."""
    asked = [(scene, question) for scene in batch for question in questions(scene.phrases())]
    how = {} if own else {"answer": [question.answer for _, question in asked]}
    found = model.explain([s.image for s, _ in asked], [q.text for _, q in asked], recipe, **how)
    for (scene, question), explanation in zip(asked, found, strict=True):
        yield scene, question, explanation


def _answers(model: vlcam.Explainer, batch: list[scenes.Scene], recipe: Recipe) -> list[tuple[bool, ...]]:
    """The map of the word that tells which object is meant, and that of the whole question."""
    hits = []
    for scene, question, whole in _asked(model, batch, recipe, own=False):
        (word,) = [w for w in whole.word_maps if w.span == question.span]
        maps, item = (replace(whole, tokens=word.tokens), whole), scene.objects[question.about]
        hits.append(tuple(pointing.points_right(found, item) for found in maps))
    return hits


def _chunks(items: list[scenes.Scene]) -> Iterable[list[scenes.Scene]]:
    return (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
