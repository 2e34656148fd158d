"""Targets laid on the pairs of a call: each with its own text, its own tokens, or its region of the model input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vlcam.errors import RecipeError
from vlcam.pairing import Pairs
from vlcam.plan import Job
from vlcam.questions import Asked
from vlcam.readers import OF_TEXTS, HeadKind
from vlcam.regions import on_model_input
from vlcam.targets import Target
from vlcam.text import find_phrase

__all__ = ["of_tokens", "placed"]


def placed(targets: Sequence[Target], asked: Asked, pairs: Pairs, heads: Mapping[str, HeadKind]) -> Sequence[Target]:
    """The targets of these pairs: each with its own text, or with the region laid on its model input."""
    return [_of_texts(target, pairs, heads) for target in _within_region(targets, asked, pairs)]


def _of_texts(target: Target, pairs: Pairs, heads: Mapping[str, HeadKind]) -> Target:
    kind, taking = heads[target.head], pairs.compared
    if kind not in OF_TEXTS or taking is None:
        return target
    if target.compares and not target.differentiate and int(taking.sum(1).min()) < 2:
        raise RecipeError(
            "the recipe compares the text with others, and there is one; give several texts, or others with "
            "against=[...], for example ['']"
        )
    if target.compares and int(taking.sum(1).min()) < 2:
        raise RecipeError(
            f"{target.label} of one text: it compares the text with others, and without any it is the same for every "
            "image, so that its gradient is zero; give several texts, or others with against=[...], or take "
            "scale='logit' or 'cosine'"
        )
    own = target.of_classes(pairs.inputs.text_of)
    return own.within(taking) if target.compares and not bool(taking.all()) else own


def of_tokens(job: Job, target: Target, pairs: Pairs) -> Target:
    """For the likelihood of a phrase of a caption: the target of its tokens, which the rows before them tell."""
    texts = pairs.inputs.texts
    if job.recipe.target != "caption" or job.recipe.prompt != "phrase" or job.phrase is None or texts is None:
        return target
    counted = torch.zeros(len(pairs.inputs.text_of), next(iter(texts.tensors.values())).shape[1], device="cpu")
    for pair, text in enumerate(pairs.inputs.text_of):
        layout = texts.layouts[text]
        tokens = layout.tokens_of(find_phrase(layout, job.phrase, job.occurrence))
        counted[pair, [token - 1 for token in tokens]] = 1
    part = f"{job.phrase} {job.occurrence}"
    return replace(target, label=f"{target.label} of {job.phrase!r}", part=part).within(counted)


def _within_region(targets: Sequence[Target], asked: Asked, pairs: Pairs) -> Sequence[Target]:
    """The targets with the region laid on each pair's model input."""
    if asked.region is None:
        return targets
    images = pairs.inputs.images
    laid = [on_model_input(asked.region, images.placements[image]) for image in pairs.inputs.image_of]
    weights = torch.from_numpy(np.stack(laid)).to(images.pixel_values.device)
    return [target.within(weights) for target in targets]
