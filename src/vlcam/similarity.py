"""Image tokens embedded as the model embeds an image, and compared with texts: maps without a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vlcam.adapter import Inputs, ModelAdapter
from vlcam.anatomy import INPUT, VALUES, Tap
from vlcam.capture import Capture, as_found
from vlcam.errors import RecipeError
from vlcam.plan import Job
from vlcam.rows import Selection

__all__ = ["compared"]


def compared(
    adapter: ModelAdapter, inputs: Inputs, job: Job, found: Capture, pair: int, selection: Selection, others: Tensor
) -> Tensor:
    """Compare the image tokens of one pair with its text, [1, cells].

    With c[j,t] the cosine of token j's embedding with text t:

    - `similarity`: M[j] = c[j,own], on the scale `difference` less the mean over the other texts. With the last block
      attending to nothing but each token itself, that of MaskCLIP (Zhou et al., ECCV 2022).
    - `surgery`: M[j] = w[own] c[j,own] less the mean over all texts t of w[t] c[j,t], where w[t] is the softmax over
      texts of 2 cos(image, t), over its mean (Li et al., CLIP Surgery, arXiv 2304.05653).

    Args:
        adapter: the model.
        inputs: the pairs.
        job: the recipe on this model.
        found: what the pass gave.
        pair: the pair that is explained.
        selection: the cells of the map.
        others: which texts the pair's own is compared with, [T], itself among them.

    Raises:
        RecipeError: there is no other text to compare with, or the model embeds no single tokens.
    """
    inputs = replace(inputs, encoded=found.encoded)
    tokens = _tokens(adapter, job, found, pair)
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        cosines = adapter.token_cosines(tokens, inputs)[0, list(selection.cells)].float()
    taking, own = others.to(cosines.device), inputs.text_of[pair]
    alone = job.recipe.weighting == "similarity" and job.recipe.scale == "cosine"
    if not alone and int(taking.sum()) < 2:
        raise RecipeError(
            f"weighting={job.recipe.weighting!r}, scale={job.recipe.scale!r}: the text is compared with others, and "
            "there is one; give several texts, or against=[...], for example ['']"
        )
    if job.recipe.weighting == "surgery":
        whole = found.outputs[job.target.head][pair, :, 0].float()
        weights = (2 * whole[taking]).softmax(0)
        weighted = cosines * (2 * whole).exp() / (2 * whole[taking]).exp().sum() / weights.mean()
        return (weighted[:, own] - weighted[:, taking].mean(1))[None]
    if job.recipe.scale == "difference":
        taking = taking.clone()
        taking[own] = False
        return (cosines[:, own] - cosines[:, taking].mean(1))[None]
    return cosines[None, :, own]


def _tokens(adapter: ModelAdapter, job: Job, found: Capture, pair: int) -> Tensor:
    """What is embedded of one pair: the block's output [1, N, D], or what values alone add to the first's input."""
    if job.recipe.attention != "values":
        return found.activations[job.taps[0]][pair : pair + 1]
    stream = adapter.anatomy.stream(job.recipe.stream)
    tokens = found.activations[Tap(stream.name, job.layers[0], INPUT)][pair : pair + 1]
    for layer in job.layers:
        values = found.activations[Tap(stream.name, layer, VALUES)][pair : pair + 1]
        attention = (values @ values.transpose(-1, -2) / values.shape[-1] ** 0.5).softmax(-1)
        projection: Any = stream.projection(layer)
        mixed = (attention @ values).transpose(1, 2).flatten(2)
        tokens = tokens + linear(mixed, projection.weight.detach(), projection.bias)
    return tokens
