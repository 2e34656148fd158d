"""From activation and gradient to a token map: pure functions on tensors, which know no model and keep signs.

Axes: B pairs, H heads, Q query rows, K keys (image tokens), N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlcam.errors import RecipeError
from vlcam.recipe import Recipe

__all__ = ["attention_rows", "channel_weighted", "merge_layers", "normalised", "row_means"]


_HEADS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": Tensor.mean,
    "sum": Tensor.sum,
    "max": Tensor.amax,
    "min": Tensor.amin,
}


def attention_rows(recipe: Recipe, attention: Tensor, gradient: Tensor | None) -> Tensor:
    """Combine probabilities and gradient, and merge heads: float32 [B, Q, K] from [B, H, Q, K].

    `attention*gradient` with the ReLU on the gradient and the mean over heads is the rule of ALBEF (Li et al. 2021)
    and of LAVIS' `compute_gradcam`.
    """
    values = _weighted(recipe, attention.float(), None if gradient is None else gradient.float())
    if recipe.relu == "before_heads":
        values = values.relu()
    merged = _HEADS[recipe.heads](values, 1)
    return merged.relu() if recipe.relu == "after_heads" else merged


def _weighted(recipe: Recipe, attention: Tensor, gradient: Tensor | None) -> Tensor:
    if recipe.weighting == "attention":
        return attention
    if gradient is None:
        raise RecipeError(f"weighting={recipe.weighting!r} needs a gradient")
    kept = gradient.relu() if recipe.relu == "gradient" else gradient
    return kept if recipe.weighting == "gradient" else attention * kept


def row_means(recipe: Recipe, rows: Tensor, selections: Sequence[Sequence[int]]) -> Tensor:
    """Average query rows: [B, R, K] from [B, Q, K] and the row numbers of R selections."""
    means = torch.stack([rows[:, list(selection)].mean(1) for selection in selections], 1)
    return means.relu() if recipe.relu == "map" else means


def channel_weighted(recipe: Recipe, features: Tensor, gradient: Tensor, prefix: int) -> Tensor:
    """Grad-CAM on tokens: float32 [B, N] from [B, N, C].

    Channels are weighted by their gradient's mean over the recipe's gradient tokens (Selvaraju et al. 2017, with
    tokens in the place of pixels).

    Args:
        recipe: names the gradient tokens and the ReLU.
        features: the tensor read at the site.
        gradient: its gradient.
        prefix: tokens before the patches.

    Raises:
        RecipeError: class-token gradients are asked for where there is no class token.
    """
    features, gradient = features.float(), gradient.float()
    if recipe.relu == "gradient":
        gradient = gradient.relu()
    if recipe.gradient_tokens == "cls" and not prefix:
        raise RecipeError("gradient_tokens='cls': these tokens have no class token; choose 'patches' or 'all'")
    pooled = {"cls": gradient[:, :1], "patches": gradient[:, prefix:], "all": gradient}[recipe.gradient_tokens]
    values = torch.einsum("bc,bnc->bn", pooled.mean(1), features)
    return values.relu() if recipe.relu == "map" else values


def merge_layers(recipe: Recipe, maps: Sequence[Tensor]) -> Tensor:
    """One map from one per layer, element by element."""
    stacked = torch.stack(list(maps))
    if recipe.layer_rule == "sum":
        return stacked.sum(0)
    if recipe.layer_rule == "max":
        return stacked.amax(0)
    return stacked.mean(0)


def normalised(recipe: Recipe, values: Tensor) -> Tensor:
    """Scale one map: `minmax` to 0..1, `max` to a largest magnitude of 1, `none` as it is; a constant map gives zeros.

    NaN-free by construction: nothing is divided by a range of zero.
    """
    if recipe.normalize == "none":
        return values
    if recipe.normalize == "max":
        peak = values.abs().amax()
        return values / peak if peak > 0 else torch.zeros_like(values)
    low, high = values.amin(), values.amax()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)
