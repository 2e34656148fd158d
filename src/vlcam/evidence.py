"""From a capture to the token maps of one pair: the main map, a map per word, and whether there is anything in them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from vlcam import maps
from vlcam.anatomy import Tap
from vlcam.capture import Capture
from vlcam.choices import ATTENTION_SITES, CARRIED, COMPARING, FLOWS, OF_VALUES, POOLED
from vlcam.errors import EvidenceError
from vlcam.plan import Job
from vlcam.recipe import Recipe
from vlcam.rows import Selection
from vlcam.tokens import Windows

__all__ = ["Known", "NoGradientError", "NotFiniteError", "Status", "TokenMaps", "nothing", "token_maps"]

_ROUNDING = 1e-6
_CANCELLED = 1e-5
"""What is left of terms that cancel in float32, as a share of their magnitudes; other maps are above a hundredth."""
_WINDOWED = 5  # axes of attention within windows: pair, window, head, query, key

Status = Literal["ok", "constant", "no positive evidence", "zero gradient", "rounding noise", "not finite"]


class NoGradientError(EvidenceError):
    """The gradient is zero, or missing, wherever the map would use it."""


class NotFiniteError(EvidenceError):
    """A map holds what is no number."""


@dataclass(frozen=True, eq=False)
class TokenMaps:
    """The maps of one pair, [1 + words, cells] in raster order on a grid, the status of each, and what is apart."""

    values: Tensor
    grid: tuple[int, int]
    statuses: tuple[Status, ...]
    apart: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What one block gave for one pair, [1, ...] each; attention within windows is [windows, ...]."""

    activation: Tensor
    gradient: Tensor | None
    scores: Tensor | None
    windows: Windows | None
    known: dict[Hashable, Tensor] = field(default_factory=dict, repr=False)

    def once(self, make: Callable[[], Tensor], *key: Hashable) -> Tensor:
        """What is made of this block, worked out once for all recipes that share it."""
        key = tuple(tuple(part) if isinstance(part, list) else part for part in key)
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def rows(self, indices: Sequence[int]) -> _Layer:
        """Some query rows of an attention map."""
        gradient = None if self.gradient is None else maps.taken(self.gradient, indices, 2)
        scores = None if self.scores is None else maps.taken(self.scores, indices, 2)
        return _Layer(maps.taken(self.activation, indices, 2), gradient, scores, self.windows)


Known = dict[Hashable, list[_Layer]]
"""What was read of the blocks of one pass for one pair, for the next recipe that reads the same."""


def token_maps(
    job: Job,
    found: Capture,
    pair: int,
    selection: Selection,
    answers: Tensor | None = None,
    known: Known | None = None,
) -> TokenMaps:
    """Compute the maps of one pair.

    Args:
        job: the recipe on this model.
        found: what the pass gave.
        pair: index of the pair.
        selection: the rows of the main map and of every word, and the map's cells.
        answers: what the model gave when it was asked again, for a recipe that asks.
        known: for many recipes of one pass and pair, where what they share is kept.

    Raises:
        NoGradientError: the gradient is zero wherever the main map would use it.
        EvidenceError: a map is not finite.
    """
    recipe = job.recipe
    layers = _shared_layers(job, found, pair, selection, {} if known is None else known)
    live = _live(job, found, pair, selection)
    if not live[0]:
        taps = ", ".join(map(str, job.gradient_taps))
        raise NoGradientError(
            f"the gradient of {job.target.label} at {taps} is exactly zero on {_used(recipe, selection)}"
        )
    if recipe.site not in ATTENTION_SITES:
        merged = _features(job, found, pair, layers, selection, answers)
    else:
        merged = _rows(job, found, pair, layers, selection)
    apart = {name: float(merged[0, list(cells)].sum()) for name, cells in selection.apart}
    if selection.shown is not None:
        merged = maps.taken(merged, selection.shown, 1)
    if not bool(torch.isfinite(merged).all()):
        raise NotFiniteError(f"the map at {job.taps[0]} is not finite: the model's activations or gradients overflow")
    statuses = tuple(_status(recipe, values, live=alive) for values, alive in zip(merged, live, strict=True))
    cancels = recipe.weighting == "hirescam" and recipe.site not in ATTENTION_SITES
    if cancels and statuses[0] == "ok" and _cancelled(merged, layers, selection):
        statuses = ("rounding noise",)
    return TokenMaps(merged, selection.grid, statuses, apart)


def nothing(selection: Selection, status: Status = "zero gradient") -> TokenMaps:
    """Maps of zeros with a status that says why."""
    count, cells = len(selection.all_rows), selection.grid[0] * selection.grid[1]
    apart = {name: 0.0 for name, _ in selection.apart}
    zeros = torch.zeros(count, cells, device="cpu", dtype=torch.float32)
    return TokenMaps(zeros, selection.grid, (status,) * count, apart)


def _shared_layers(job: Job, found: Capture, pair: int, selection: Selection, known: Known) -> list[_Layer]:
    recipe = job.recipe
    read = (job.taps, job.gradient_taps if recipe.needs_gradient else (), job.score_taps)
    key = (id(found), *read, recipe.map_axis, len(selection.cells), recipe.weighting in OF_VALUES)
    if key not in known:
        known[key] = _layers(job, found, pair, selection)
    return known[key]


def _layers(job: Job, found: Capture, pair: int, selection: Selection) -> list[_Layer]:
    attention = job.recipe.site in ATTENTION_SITES
    read = len(selection.cells)

    def row(tensor: Tensor) -> Tensor:
        own = tensor[pair] if attention and tensor.ndim == _WINDOWED else tensor[pair : pair + 1]
        if job.recipe.of_text and attention:  # without padding that nothing reads
            own = own[..., :read, :read]
        return own.transpose(-1, -2) if job.recipe.map_axis == "queries" else own

    gradients: list[Tensor | None] = [None] * len(job.taps)
    if job.recipe.needs_gradient:
        for number, tap in enumerate(job.gradient_taps):
            gradient = found.gradients[tap]
            if gradient is None:
                raise NoGradientError(f"{job.target.label} does not depend on {tap}")
            gradients[number] = row(gradient)
        if job.recipe.of_text and attention:  # keys that are masked have a gradient, though no attention
            shown = [row(found.activations[tap]) for tap in job.taps]
            gradients = [g if g is None else g.where(a != 0, 0) for g, a in zip(gradients, shown, strict=True)]
    scores: Sequence[Tensor | None] = [row(found.activations[tap]) for tap in job.score_taps]
    parts = zip(job.taps, gradients, scores or [None] * len(job.taps), strict=True)
    return [
        _Layer(
            _side_by_side(job, row(found.activations[tap])),
            gradient,
            scored,
            found.windows.get(tap) if attention else None,
        )
        for tap, gradient, scored in parts
    ]


def _side_by_side(job: Job, tensor: Tensor) -> Tensor:
    """Values of all heads as the channels of each token, for a recipe that weights those."""
    return tensor.transpose(1, 2).flatten(2) if job.recipe.weighting in OF_VALUES else tensor


def _features(
    job: Job, found: Capture, pair: int, layers: Sequence[_Layer], selection: Selection, answers: Tensor | None
) -> Tensor:
    """[1, cells] from token features."""
    recipe = job.recipe
    if recipe.weighting in COMPARING:
        return maps.channel_map(recipe, layers[0].activation, None, (), (), answers)
    if recipe.layer_rule == "shared":
        gradients = [layer.gradient for layer in layers if layer.gradient is not None]
        total = torch.stack(gradients).float().sum(0) if gradients else None
        return maps.channel_map(recipe, layers[0].activation, total, selection.pool, selection.cells)
    return maps.merge_layers(
        recipe,
        [
            maps.channel_map(
                recipe,
                layer.activation,
                layer.gradient,
                selection.pool,
                selection.cells,
                answers,
                _key_shares(job, found, pair, number, selection),
            )
            for number, layer in enumerate(layers)
        ],
    )


def _key_shares(job: Job, found: Capture, pair: int, number: int, selection: Selection) -> Tensor | None:
    if not job.key_taps:
        return None
    queries, keys = (found.activations[tap][pair : pair + 1] for tap in job.key_taps[number])
    over = selection.cells if selection.similar is None else selection.similar
    return maps.taken(maps.key_similarity(queries, keys, selection.pool[0], over), selection.cells, 1)


def _rows(job: Job, found: Capture, pair: int, layers: Sequence[_Layer], selection: Selection) -> Tensor:
    """[1 + words, cells] from attention."""
    recipe = job.recipe
    if recipe.layer_rule in CARRIED:
        return _carried(job, found, pair, layers, selection)
    if recipe.bimodal:
        return _bimodal(job, found, pair, layers, selection)
    if recipe.layer_rule in FLOWS:
        return _flow(recipe, layers, selection)
    slots = None if job.pooler_tap is None else found.activations[job.pooler_tap][pair : pair + 1].float().mean(1)
    return maps.merge_layers(recipe, [_attention(recipe, layer, selection, slots) for layer in layers])


def _attention(recipe: Recipe, layer: _Layer, selection: Selection, slots: Tensor | None) -> Tensor:
    """[1 + words, cells] from the attention of one block; through a pooler's, if its keys are slots of that."""
    if layer.windows is not None:
        values = _windowed(recipe, layer, layer.windows, selection)
    elif recipe.heads == "channels":
        values = torch.cat([_channels(recipe, layer, rows, selection) for rows in selection.all_rows])
    else:
        if recipe.weighting == "head_weights":
            found = [_weighted_heads(recipe, layer, rows, selection) for rows in selection.all_rows]
        else:
            needed, places = _needed(selection.all_rows)
            chosen = layer.rows(needed)
            matrix = layer.once(
                lambda: maps.attention_matrix(recipe, chosen.activation, chosen.gradient, scores=chosen.scores),
                *_matrix_key(recipe, needed),
            )
            found = [maps.taken(matrix, place, 1).mean(1) for place in places]
        merged = torch.cat(found)
        if slots is not None:
            merged = merged @ slots[0, -merged.shape[1] :]
        values = maps.taken(merged, selection.cells, 1)
    return values.relu() if recipe.relu == "map" else values


def _windowed(recipe: Recipe, layer: _Layer, windows: Windows, selection: Selection) -> Tensor:
    """[1, cells] from attention within windows: the mean over the rows of each token's own window.

    Padding is no token: its rows count as zero. The map is thus that of the matrix over all N tokens, in which tokens
    of different windows have zero, times N / (places in a window).
    """
    layer = _unpadded(layer, windows)
    rows = range(layer.activation.shape[2])
    if recipe.heads == "channels":
        features = windows.raster(maps.head_channels(layer.activation, rows))
        gradient = None if layer.gradient is None else windows.raster(maps.head_channels(layer.gradient, rows))
        return maps.channel_map(recipe, features, gradient, selection.pool, selection.cells)
    weights = None
    if recipe.weighting == "head_weights":
        every = maps.head_weights(recipe, layer.gradient, rows, rows).mean(0, keepdim=True)
        weights = every.expand(len(layer.activation), -1)
    matrix = maps.attention_matrix(recipe, layer.activation, layer.gradient, scores=layer.scores, weights=weights)
    return windows.raster(matrix.mean(1))


def _unpadded(layer: _Layer, windows: Windows) -> _Layer:
    """Attention within windows with zeros in the rows and columns of padding."""
    held = windows.held.to(layer.activation.device)
    if bool(held.all()):
        return layer
    kept = held[:, None, :, None] & held[:, None, None, :]
    gradient = None if layer.gradient is None else layer.gradient.where(kept, 0)
    return replace(layer, activation=layer.activation.where(kept, 0), gradient=gradient)


def _needed(selections: Sequence[Sequence[int]]) -> tuple[Sequence[int], list[Sequence[int]]]:
    """Every row that some selection takes, and where the rows of each selection lie among them."""
    if len(selections) == 1:
        return selections[0], [range(len(selections[0]))]
    needed = sorted({row for rows in selections for row in rows})
    place = {row: index for index, row in enumerate(needed)}
    return needed, [[place[row] for row in rows] for rows in selections]


def _channels(recipe: Recipe, layer: _Layer, rows: Sequence[int], selection: Selection) -> Tensor:
    features = maps.head_channels(layer.activation, rows)
    gradient = None if layer.gradient is None else maps.head_channels(layer.gradient, rows)
    return maps.channel_map(recipe, features, gradient, selection.pool, selection.cells)


def _weighted_heads(recipe: Recipe, layer: _Layer, rows: Sequence[int], selection: Selection) -> Tensor:
    by = (recipe.gradient_tokens, recipe.relu == "gradient", *recipe.exclude)
    weights = layer.once(
        lambda: maps.head_weights(recipe, layer.gradient, rows, selection.cells, selection.pool), "weights", rows, *by
    )
    matrix = layer.once(
        lambda: maps.attention_matrix(recipe, layer.rows(rows).activation, None, weights=weights),
        *_matrix_key(recipe, rows),
        *by,
    )
    return matrix.mean(1)


def _matrix_key(recipe: Recipe, rows: Sequence[int]) -> tuple[Hashable, ...]:
    """What the matrix of a block depends on, besides its tensors; a ReLU of the map comes later."""
    relu = "none" if recipe.relu == "map" else recipe.relu
    return "matrix", rows if isinstance(rows, range) else tuple(rows), recipe.weighting, recipe.heads, relu


def _flow(recipe: Recipe, layers: Sequence[_Layer], selection: Selection) -> Tensor:
    """[1 + words, cells] from the product of every block's matrix."""
    matrices = []
    for layer in layers:
        weights = None
        if recipe.weighting == "head_weights":
            weights = maps.head_weights(recipe, layer.gradient, selection.rows, selection.cells, selection.pool)
        matrices.append(
            maps.attention_matrix(recipe, layer.activation, layer.gradient, scores=layer.scores, weights=weights)
        )
    rows = matrices[0].new_zeros(len(selection.all_rows), matrices[0].shape[-1])
    for number, chosen in enumerate(selection.all_rows):
        rows[number, list(chosen)] = 1 / len(chosen)
    found = maps.taken(maps.propagated(recipe, matrices, rows, protect=selection.cells[0] > 0)[0], selection.cells, 1)
    return found.relu() if recipe.relu == "map" else found


def _bimodal(job: Job, found: Capture, pair: int, layers: Sequence[_Layer], selection: Selection) -> Tensor:
    """[1 + words, cells] from cross-attention together with the self-attention on either side of it."""
    crossed = {
        layer: maps.attention_matrix(job.recipe, each.activation, each.gradient)
        for layer, each in zip(job.layers, layers, strict=True)
    }
    texts = [(_around(job, found, pair, tap), crossed.get(tap.layer)) for tap in job.text_taps]
    image = [_around(job, found, pair, tap) for tap in job.image_taps]
    relevance = maps.bimodal(texts, image)
    rows = torch.cat([maps.taken(relevance, chosen, 1).mean(1) for chosen in selection.all_rows])
    return maps.taken(rows, selection.cells, 1)


def _around(job: Job, found: Capture, pair: int, tap: Tap) -> Tensor:
    """[1, N, N] from self-attention; zeros where the target does not depend on it."""
    attention = found.activations[tap][pair : pair + 1]
    gradient = found.gradients[tap] if job.recipe.needs_gradient else None
    if gradient is None and job.recipe.needs_gradient:
        return torch.zeros_like(attention[:, 0], dtype=torch.float32)
    return maps.attention_matrix(job.recipe, attention, None if gradient is None else gradient[pair : pair + 1])


def _carried(job: Job, found: Capture, pair: int, layers: Sequence[_Layer], selection: Selection) -> Tensor:
    """[1, cells]: attention carried through the blocks, times the gradient at the last of them."""
    last, rows = layers[-1], selection.rows
    if job.recipe.layer_rule == "transition":
        flow = maps.carried([layer.activation.float().mean(1) for layer in layers], rows)
    else:
        weighted = _by_head if job.recipe.layer_rule == "headwise" else _by_token
        matrices = [weighted(job, found, pair, number, layer.activation.float()) for number, layer in enumerate(layers)]
        every = torch.eye(matrices[0].shape[-1], device=matrices[0].device, dtype=matrices[0].dtype)
        one_each = every[list(rows)]
        flow = maps.propagated(job.recipe, matrices, one_each)
    if last.gradient is None:
        raise NoGradientError(f"{job.target.label} does not depend on {job.gradient_taps[-1]}")
    weights = maps.taken(last.gradient.float().relu().mean(1), rows, 1)
    values = maps.taken((flow * weights).mean(1), selection.cells, 1)
    return values.relu() if job.recipe.relu == "map" else values


def _by_head(job: Job, found: Capture, pair: int, number: int, attention: Tensor) -> Tensor:
    plain = found.plain_gradient(job.gradient_taps[number])[pair : pair + 1]
    return torch.einsum("bh,bhqk->bqk", maps.head_shares(attention, plain), attention)


def _by_token(job: Job, found: Capture, pair: int, number: int, attention: Tensor) -> Tensor:
    values, tokens = (found.activations[tap][pair : pair + 1] for tap in job.norm_taps[number])
    return attention.mean(1) * maps.token_shares(values, tokens)[:, None]


def _live(job: Job, found: Capture, pair: int, selection: Selection) -> tuple[bool, ...]:
    """For the main map and every word: whether any gradient that it uses is not zero."""
    recipe, taps = job.recipe, job.gradient_taps
    count = len(selection.all_rows)
    if not recipe.needs_gradient:
        return (True,) * count
    if recipe.layer_rule in CARRIED:
        return (found.alive(taps[-1], pair, {2: selection.rows, 3: selection.shown_cells}),)
    attention = recipe.site in ATTENTION_SITES
    whole = recipe.layer_rule in FLOWS or recipe.gradient_tokens == "all" or any(tap in found.windows for tap in taps)
    if attention and whole:
        return (any(found.alive(tap, pair, {}) for tap in taps),) * count
    if attention and job.pooler_tap is not None:
        return tuple(any(found.alive(tap, pair, {2: chosen}) for tap in taps) for chosen in selection.all_rows)
    if attention:
        rows, cells = (3, 2) if recipe.map_axis == "queries" else (2, 3)
        return tuple(
            any(found.alive(tap, pair, {rows: chosen, cells: selection.shown_cells}) for tap in taps)
            for chosen in selection.all_rows
        )
    used = selection.pool if recipe.weighting in POOLED else selection.shown_cells
    return (any(found.alive(tap, pair, {1: used}) for tap in taps),)


def _used(recipe: Recipe, selection: Selection) -> str:
    """The tokens whose gradient a recipe uses, in words."""
    if selection.rows:
        return "every row" if recipe.layer_rule in FLOWS else f"rows {_short(selection.rows)}"
    chosen = recipe.gradient_tokens if recipe.weighting in POOLED else "patches"
    return {
        "cls": "the class token",
        "patches": "the patches",
        "pooled": "the token that is pooled",
        "all": "all tokens",
    }[chosen]


def _short(rows: Sequence[int]) -> str:
    return str(list(rows)) if len(rows) <= 12 else f"{rows[0]} to {rows[-1]}"


def _cancelled(merged: Tensor, layers: Sequence[_Layer], selection: Selection) -> bool:
    """Whether the terms of gradient times activation cancel to what float32 leaves of them.

    Before a LayerNorm they do so but for the small number that it adds to the variance: its output does not change with
    the scale of its input, so that at the last input before the final norm a token's gradient is orthogonal to the
    token.
    """
    peak = float(merged.abs().amax())
    rounding = max(_CANCELLED, 4 * torch.finfo(layers[0].activation.dtype).eps)
    pairs = [(layer.activation, layer.gradient) for layer in layers if layer.gradient is not None]
    # No sum of magnitudes is larger than this, which is soon found; most maps are far above.
    if peak >= rounding * max(float(a.abs().amax() * g.abs().amax()) * a.shape[-1] for a, g in pairs):
        return False
    terms = (maps.taken((a.float() * g.float()).abs().sum(-1), selection.cells, 1).amax() for a, g in pairs)
    return peak < rounding * float(max(terms))


def _status(recipe: Recipe, values: Tensor, *, live: bool) -> Status:
    if not live:
        return "zero gradient"
    rectified = recipe.relu != "none" or recipe.weighting == "elementwise"
    if rectified and not bool(values.any()):
        return "no positive evidence"
    low, high = values.aminmax()
    return "constant" if bool(high - low <= _ROUNDING * values.abs().amax()) else "ok"
