"""From activation and gradient to a token map: pure functions on tensors, which know no model and keep signs.

Axes: B pairs, H heads, Q query rows, K keys, N tokens, C channels. Maps are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlcam.choices import COMPARING
from vlcam.errors import RecipeError
from vlcam.recipe import Recipe

__all__ = [
    "attention_matrix",
    "bimodal",
    "carried",
    "channel_map",
    "head_channels",
    "head_shares",
    "head_weights",
    "key_similarity",
    "merge_layers",
    "normalised",
    "propagated",
    "taken",
    "token_shares",
]

_HEADS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": Tensor.mean,
    "sum": Tensor.sum,
    "max": Tensor.amax,
    "min": Tensor.amin,
}


def taken(tensor: Tensor, indices: Sequence[int], axis: int) -> Tensor:
    """The rows of an axis; a run of neighbours is a view, not a copy."""
    first, count = indices[0] if indices else 0, len(indices)
    if indices == range(first, first + count) or list(indices) == list(range(first, first + count)):
        return tensor.narrow(axis, first, count)
    return tensor.index_select(axis, torch.tensor(list(indices), device=tensor.device))


def channel_map(
    recipe: Recipe,
    features: Tensor,
    gradient: Tensor | None,
    pool: Sequence[int],
    cells: Sequence[int],
    answers: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Weight the channels of token features: float32 [B, cells] from [B, N, C].

    With A the features, G the gradient, i over the pooled tokens, j a cell, c a channel:

    - `gradcam`: M[j] = sum over c of (mean over i of G[i,c]) A[j,c] (Selvaraju et al., ICCV 2017, tokens for pixels).
    - `gradcam++`: weights sum over i of ReLU(G[i,c]) a[i,c] with a = G^2 / (2 G^2 + (sum over i of A) G^3 + 1e-6)
      (Chattopadhay et al., WACV 2018, as in pytorch-grad-cam).
    - `xgradcam`: weights sum over i of G[i,c] A[i,c] / (sum over i of A[i,c] + 1e-7) (Fu et al., BMVC 2020).
    - `layercam`: M[j] = sum over c of ReLU(G[j,c]) A[j,c] (Jiang et al., IEEE TIP 2021).
    - `hirescam`: M[j] = sum over c of G[j,c] A[j,c] (Draelos and Carin, arXiv 2011.08891).
    - `elementwise`: M[j] = sum over c of ReLU(G[j,c] A[j,c]) (pytorch-grad-cam, GradCAMElementWise).
    - `eigencam`, `eigengradcam`: the first principal component of A, or of G A, over the cells (Muhammad and Yeasin,
      IJCNN 2020). Its sign is arbitrary; here the cell of largest magnitude is positive.
    - `scorecam`, `ablationcam`: M[j] = sum over c of w[c] A[j,c], w the answers of the model; `reciprocam`: M[j] is the
      answer for cell j. See `vlcam.asking.ask`.
    - `value*gradient`, `value*gradient*similarity`: M[j] = sum over c of G[i,c] v[j,c], times l[j]: i the token that is
      read, G the gradient of what the heads make of their values v, l the key similarity (Zhao et al., ICML 2024).
    - `similarity`, `surgery`: M[j] is the answer for cell j; see `vlcam.similarity.compared`.
    - `none`: M[j] = mean over c of A[j,c].

    Args:
        recipe: names the weighting, the ReLU and the departures.
        features: A.
        gradient: G; None for a weighting that takes none.
        pool: tokens over which channel weights are pooled.
        cells: tokens that are the map's cells.
        answers: what the model gave when it was asked again, for the weightings that ask or compare.
        shares: l [B, cells], for a weighting that takes it.
    """
    features = features.float()
    own = taken(features, cells, 1) if recipe.weighting not in COMPARING else features
    if not recipe.needs_gradient:
        values = _without_gradient(recipe, own, answers)
        return values.relu() if recipe.relu == "map" else values
    gradient = _needed(recipe, gradient, "a gradient").float()
    if recipe.relu == "gradient":
        gradient = gradient.relu()
    if recipe.weighting in _POOLED:
        weights = _POOLED[recipe.weighting](recipe, taken(features, pool, 1), taken(gradient, pool, 1))
        values = torch.einsum("bc,bnc->bn", weights, own)
        values = values if shares is None else values * shares
    else:
        values = _ELEMENTS[recipe.weighting](own, taken(gradient, cells, 1))
    return values.relu() if recipe.relu == "map" else values


def _without_gradient(recipe: Recipe, own: Tensor, answers: Tensor | None) -> Tensor:
    if recipe.weighting == "eigencam":
        return _first_component(own)
    if recipe.weighting == "none":
        return own.mean(-1)
    answers = _needed(recipe, answers, "the answers of the model").to(own)
    return answers if recipe.weighting in ("reciprocam", *COMPARING) else torch.einsum("bc,bnc->bn", answers, own)


def _mean_gradient(_: Recipe, __: Tensor, gradient: Tensor) -> Tensor:
    return gradient.mean(1)


def _plus_plus(recipe: Recipe, features: Tensor, gradient: Tensor) -> Tensor:
    square = gradient * gradient
    numerator = gradient.relu() * square
    if "no_denominator" in recipe.departures:
        return numerator.sum(1)
    cube = square * gradient
    if "summed_cubes" in recipe.departures:
        rest = (cube * features).sum(1, keepdim=True) + 1e-8
    else:
        rest = cube.mul_(features.sum(1, keepdim=True)).add_(1e-6)
    # Where the gradient is zero so is the numerator: no case of its own is needed there.
    return (numerator / torch.add(rest, square, alpha=2)).sum(1)


def _conserving(_: Recipe, features: Tensor, gradient: Tensor) -> Tensor:
    return (gradient * features).sum(1) / (features.sum(1) + 1e-7)


_POOLED: dict[str, Callable[[Recipe, Tensor, Tensor], Tensor]] = {
    "gradcam": _mean_gradient,
    "gradcam++": _plus_plus,
    "xgradcam": _conserving,
    "value*gradient": _mean_gradient,
    "value*gradient*similarity": _mean_gradient,
}
_ELEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layercam": lambda features, gradient: (gradient.relu() * features).sum(-1),
    "hirescam": lambda features, gradient: (gradient * features).sum(-1),
    "elementwise": lambda features, gradient: (gradient * features).relu().sum(-1),
    "eigengradcam": lambda features, gradient: _first_component(gradient * features),
}


def _first_component(values: Tensor) -> Tensor:
    """Projection of tokens on their first principal component, [B, N] from [B, N, C].

    Through the token-token Gram matrix, which is the smaller one for images of few patches.
    """
    # A channel that is the same everywhere adds nothing, not even the rounding of its mean.
    constant = values.amax(1, keepdim=True) == values.amin(1, keepdim=True)
    centred = (values - values.mean(1, keepdim=True)).masked_fill(constant, 0)
    size = centred.abs().amax((1, 2), keepdim=True)
    # On a scale of 1 squares neither overflow nor vanish. What is not finite stays so: eigh() would refuse it.
    unit = torch.where(size.isfinite() & (size > 0), centred / size, 0)
    spread, directions = torch.linalg.eigh(unit @ unit.transpose(1, 2))
    projection = directions[..., -1] * spread[:, -1:].clamp(min=0).sqrt() * size[:, 0]
    peak = projection.gather(1, projection.abs().argmax(1, keepdim=True))
    found: Tensor = projection * peak.sign()
    return found


def attention_matrix(
    recipe: Recipe,
    attention: Tensor,
    gradient: Tensor | None,
    *,
    scores: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Combine probabilities and gradient, and merge heads: float32 [B, Q, K] from [B, H, Q, K].

    `attention*gradient` with the ReLU on the gradient and the mean over heads is the rule of ALBEF (Li et al. 2021)
    and of LAVIS' `compute_gradcam`; with the ReLU before heads that of Chefer et al. (ICCV 2021). `gradient` alone is
    LeGrad's (Bousselham et al. 2024). `sigmoid*gradient` is AGCAM's (Leem and Seo, AAAI 2024).

    Args:
        recipe: names the weighting, the ReLU and the heads.
        attention: A.
        gradient: G; None for `attention`.
        scores: what the softmax of A takes, for `sigmoid*gradient`.
        weights: a weight per head [B, H], for `head_weights`.
    """
    values = _weighted(recipe, attention, gradient, scores, weights)
    if recipe.relu == "before_heads":
        values = values.relu()
    merged = _HEADS[recipe.heads](values, 1)
    return merged.relu() if recipe.relu == "after_heads" else merged


def _weighted(
    recipe: Recipe, attention: Tensor, gradient: Tensor | None, scores: Tensor | None, weights: Tensor | None
) -> Tensor:
    if recipe.weighting == "attention":
        return attention.float()
    if recipe.weighting == "head_weights":
        return attention.float() * _needed(recipe, weights, "a weight per head")[:, :, None, None]
    kept = _needed(recipe, gradient, "a gradient").float()
    if recipe.relu == "gradient":
        kept = kept.relu()
    if recipe.relu == "negative_gradient":
        kept = kept.clamp(max=0)
    if recipe.weighting == "gradient":
        return kept
    if recipe.weighting == "sigmoid*gradient":
        return kept * _needed(recipe, scores, "the scores before the softmax").float().sigmoid()
    return kept * attention.float()


def _needed(recipe: Recipe, tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise RecipeError(f"weighting={recipe.weighting!r} needs {what}")
    return tensor


def head_weights(
    recipe: Recipe, gradient: Tensor | None, rows: Sequence[int], cells: Sequence[int], pool: Sequence[int] = ()
) -> Tensor:
    """A weight per head, [B, H]: the mean gradient over the rows' patch keys, or over the whole matrix [B, H, Q, K].

    The first is `generate_cam_attn` of Chefer et al. (CVPR 2021), the second the Grad-CAM baseline of Chefer et al.
    (ICCV 2021).
    """
    gradient = _needed(recipe, gradient, "a gradient").float()
    if recipe.relu == "gradient":
        gradient = gradient.relu()
    if recipe.gradient_tokens == "patches":
        gradient = taken(taken(gradient, rows, 2), cells, 3)
    elif pool:
        gradient = taken(taken(gradient, pool, 2), pool, 3)
    return gradient.mean((2, 3))


def head_channels(attention: Tensor, rows: Sequence[int]) -> Tensor:
    """Heads as channels: features [B, K, H] from [B, H, Q, K], the mean of the chosen rows."""
    return taken(attention.float(), rows, 2).mean(2).transpose(1, 2)


def key_similarity(queries: Tensor, keys: Tensor, row: int, over: Sequence[int]) -> Tensor:
    """How similar each token's key is to the query of one token, [B, N], from [B, H, N, d] each.

    The cosine of all heads' channels side by side, scaled to 0..1 over the tokens `over` (Zhao et al., ICML 2024).
    """
    joined = [each.float().transpose(1, 2).flatten(2) for each in (queries, keys)]
    cosines = torch.nn.functional.cosine_similarity(joined[0][:, row : row + 1], joined[1], dim=-1)
    chosen = taken(cosines, over, 1)
    low, high = chosen.amin(1, keepdim=True), chosen.amax(1, keepdim=True)
    return torch.where(high > low, (cosines - low) / (high - low), torch.ones_like(cosines))


def propagated(recipe: Recipe, matrices: Sequence[Tensor], rows: Tensor, *, protect: bool = True) -> Tensor:
    """Carry rows through the blocks' attention: [B, R, K] from matrices [B, N, N], first block first, and rows [R, N].

    - `rollout`: each matrix plus the identity, its rows scaled to a sum of 1, then the product (Abnar and Zuidema, ACL
      2020). `discard` sets the smallest entries to zero before, but for [CLS, CLS] (vit-explain).
    - `relevance`: R <- R + E R from the first block on, which is the product of identity plus E (Chefer et al., ICCV
      2021).

    Only the chosen rows of the product are computed, from the last block down.

    Args:
        recipe: names the rule, the share that is discarded, and the departures.
        matrices: E of every block.
        rows: weights of the query rows of every selection.
        protect: whether entry [0, 0] is that of the class token, which is not discarded.
    """
    found = rows.to(matrices[-1]).expand(len(matrices[-1]), *rows.shape)
    for matrix in reversed(matrices):
        identity = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
        if recipe.layer_rule != "rollout":
            found = found @ (matrix + identity)
        else:
            found = found @ _row_scaled(recipe, _pruned(recipe, matrix, protect=protect) + identity)
    return found


def bimodal(texts: Sequence[tuple[Tensor, Tensor | None]], image: Sequence[Tensor]) -> Tensor:
    """What each image token gave to each row of a text that looks at the image: [B, T, K].

    With E the matrix of a block, R the relevance of text for text, Q of the image for the image, X of the image for the
    text, N as in `_shared_out`; for each block of text R <- R + E R and X <- X + E X, then, where it looks at the image
    by C, X <- X + N(R)^T C N(Q). Before, Q <- Q + E Q for each block of the image. That is the rule for encoders and
    decoders of Chefer et al. (ICCV 2021): text is never read by the image.

    Args:
        texts: for each block, first to last, self-attention [B, T, T], and cross-attention [B, T, K] where it has that.
        image: self-attention [B, K, K] of the blocks of the image, first to last; none for Q = identity.
    """
    rows = texts[0][0]
    own, (columns,) = torch.zeros_like(rows), {each.shape[-1] for _, each in texts if each is not None}
    behind = None
    for matrix in image:
        behind = matrix if behind is None else behind + matrix + matrix @ behind
    found = rows.new_zeros(*rows.shape[:2], columns)
    for matrix, crossed in texts:
        # R and Q without the identity, of which float32 would leave nothing where gradients are small.
        own = own + matrix + matrix @ own
        found = found + matrix @ found
        if crossed is not None:
            seen = crossed if behind is None else crossed @ _shared_out(behind)
            found = found + _shared_out(own).transpose(1, 2) @ seen
    return found


def _shared_out(relevance: Tensor) -> Tensor:
    """Relevance [B, N, N] without its identity, with each row scaled to a sum of 1, and then with it.

    A row of zeros stays one; the published code divides by its sum, and calls what is not a number zero.
    """
    sums = relevance.sum(-1, keepdim=True)
    identity = torch.eye(relevance.shape[-1], device=relevance.device, dtype=relevance.dtype)
    return relevance / torch.where(sums > 0, sums, 1) + identity


def head_shares(attention: Tensor, gradient: Tensor) -> Tensor:
    """The share of each head, [B, H]: mean over i, j of |(A^T G)[i,j]|, scaled to a sum of 1.

    Chen et al., Beyond Intuition, TMLR 2023.
    """
    importance = (attention.float().transpose(-1, -2) @ gradient.float()).abs().mean((2, 3))
    return importance / importance.sum(1, keepdim=True)


def token_shares(values: Tensor, tokens: Tensor) -> Tensor:
    """What each token hands on, [B, N]: the norm of its projected values against its own norm, from [B, N, C] each.

    Chen et al., Beyond Intuition, TMLR 2023.
    """
    handed, own = (torch.linalg.vector_norm(each.float(), dim=-1) for each in (values, tokens))
    found: Tensor = handed / own
    return found


def carried(matrices: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Rows of attention carried through the blocks: [B, R, K] from head means [B, N, N], first block first.

    k <- rows of the last block, then k <- k E + k for every block below (Yuan et al., NeurIPS 2021 workshop,
    Transition Attention Maps).
    """
    found = taken(matrices[-1], rows, 1)
    for matrix in reversed(matrices[:-1]):
        found = found @ matrix + found
    return found


def _row_scaled(recipe: Recipe, matrix: Tensor) -> Tensor:
    sums = matrix.sum(-1)
    # vit-explain divides without keeping the axis, and so column j by the sum of row j.
    return matrix / (sums[..., None, :] if "column_scaling" in recipe.departures else sums[..., None])


def _pruned(recipe: Recipe, matrix: Tensor, *, protect: bool) -> Tensor:
    count = int(matrix.shape[-1] ** 2 * recipe.discard)
    if not count:
        return matrix
    flat = matrix.flatten(1)
    smallest = flat.topk(count, largest=False).indices
    kept = flat.scatter(1, smallest, 0)
    if protect and "unprotected" not in recipe.departures:
        kept[:, 0] = flat[:, 0]
    return kept.view_as(matrix)


def merge_layers(recipe: Recipe, maps: Sequence[Tensor]) -> Tensor:
    """One map from one per layer, element by element."""
    if len(maps) == 1:
        return maps[0]
    stacked = torch.stack(list(maps))
    if recipe.layer_rule == "sum":
        return stacked.sum(0)
    if recipe.layer_rule == "max":
        return stacked.amax(0)
    return stacked.mean(0)


def normalised(recipe: Recipe, values: Tensor) -> Tensor:
    """Scale one map: `minmax` to 0..1, `max` to a largest magnitude of 1, `sum` to magnitudes that add up to 1.

    With `none` it stays as it is. A constant map gives zeros with `minmax`: nothing is divided by a range of zero.
    """
    if recipe.normalize == "none":
        return values
    if recipe.normalize == "sum":
        total = values.abs().sum()
        return values / total if total > 0 else torch.zeros_like(values)
    if recipe.normalize == "max":
        peak = values.abs().amax()
        return values / peak if peak > 0 else torch.zeros_like(values)
    low, high = values.amin(), values.amax()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)
