"""Token maps, each derived again with plain loops in float64."""

import math
import re
from itertools import product

import numpy as np
import pytest
import torch

from vlcam import maps
from vlcam.anatomy import KEYS, QUERIES, SCORES, VALUES, Tap
from vlcam.capture import Capture
from vlcam.catalogue import recipes
from vlcam.choices import ASKING, COMPARING, OF_VALUES
from vlcam.errors import EvidenceError, RecipeError
from vlcam.evidence import NoGradientError, token_maps
from vlcam.plan import Job
from vlcam.recipe import values_of
from vlcam.rows import select
from vlcam.targets import Target
from vlcam.tokens import ImageTokens

NAMED = {name: entry.recipe for name, entry in recipes().items()}
LAVIS = NAMED["lavis-itm"]
FEATURES = NAMED["pgc-gradcam"]
CHEFER = NAMED["chefer-generic"]
ROLLOUT = NAMED["attention-rollout"]
GRADECLIP = NAMED["grad-eclip"]

RELUS = ("none", "gradient", "negative_gradient", "before_heads", "after_heads", "map")
HEADS = ("mean", "sum", "max", "min")
PREFIX = ("cls", "register")
TOKENS = ImageTokens(PREFIX, (2, 3))
POOLS = {"cls": (0,), "patches": TOKENS.patches, "all": range(TOKENS.count), "none": ()}
AXES = {"keys": 2, "queries": 3}


def recipe_id(recipe):
    words = [recipe.weighting, recipe.relu, recipe.heads, recipe.gradient_tokens, *recipe.departures]
    return "-".join(word for word in words if word != "none")


def valid(base, **choices):
    """Every combination of the choices that a recipe allows."""
    found = []
    for values in product(*choices.values()):
        try:
            found.append(base.replace(**dict(zip(choices, values, strict=True))))
        except RecipeError:
            continue
    return list(dict.fromkeys(found))


CHANNELS = valid(
    FEATURES,
    weighting=[w for w in values_of("weighting") if w not in ASKING],
    gradient_tokens=("cls", "patches", "all", "none"),
    relu=RELUS,
    departures=((), ("summed_cubes",), ("no_denominator",)),
)
WEIGHTED_VALUES = valid(GRADECLIP, weighting=OF_VALUES, relu=RELUS)
PLAIN = valid(LAVIS, weighting=("attention",), heads=HEADS, relu=("none",))
CROSS = PLAIN + valid(LAVIS, weighting=("gradient", "attention*gradient"), relu=RELUS, heads=HEADS)
SIGMOID = valid(
    CHEFER, layers=("last",), layer_rule=("single",), weighting=("sigmoid*gradient",), relu=RELUS, heads=HEADS
)
HEAD_WEIGHTS = valid(
    NAMED["attn-gradcam"], weighting=("head_weights",), gradient_tokens=("patches", "all"), relu=RELUS, heads=HEADS
)
HEAD_CHANNELS = valid(
    NAMED["attn-gradcam"],
    heads=("channels",),
    weighting=values_of("weighting"),
    target=("class", "none"),
    scale=("logit", "none"),
    gradient_tokens=("cls", "patches", "all", "none"),
    relu=RELUS,
    departures=((), ("summed_cubes",), ("no_denominator",)),
)
DISCARDS = (0.0, 0.001, 0.3, 0.9, 0.99)


def attention_pair(dtype=torch.float32, *, queries=4, keys=5):
    """Probabilities and a signed gradient, [B, H, Q, K]."""
    generator = torch.Generator().manual_seed(1)
    scores, gradient = torch.randn(2, 2, 3, queries, keys, generator=generator)
    return scores.softmax(-1).to(dtype), gradient.to(dtype)


def self_attention(seed=5, tokens=TOKENS.count):
    """Scores, probabilities and a signed gradient, [B, H, N, N]."""
    scores, gradient = torch.randn(2, 2, 3, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    return scores, scores.softmax(-1), gradient


def feature_pair(dtype=torch.float32, *, channels=4):
    """Signed features and gradient, [B, N, C], with the first gradients at zero."""
    generator = torch.Generator().manual_seed(8)
    features, gradient = torch.randn(2, 2, TOKENS.count, channels, generator=generator)
    gradient[:, 3, 0] = 0
    return features.to(dtype), gradient.to(dtype)


def relu(value):
    return max(value, 0.0)


def close(found, wanted, tolerance=1e-5):
    found, wanted = np.asarray(found, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
    assert found.shape == wanted.shape
    assert np.isfinite(wanted).all()
    return np.abs(found - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max())


def slow_matrix(recipe, attention, gradient, scores=None, weights=None):
    """[B, Q, K], entry by entry."""
    attention, gradient = attention.double().numpy(), gradient.double().numpy()
    pairs, heads, queries, keys = attention.shape
    found = np.zeros((pairs, queries, keys))
    for b, t, j in np.ndindex(pairs, queries, keys):
        values = []
        for h in range(heads):
            slope = gradient[b, h, t, j]
            if recipe.relu == "gradient":
                slope = relu(slope)
            if recipe.relu == "negative_gradient":
                slope = min(slope, 0.0)
            value = {
                "attention": attention[b, h, t, j],
                "gradient": slope,
                "attention*gradient": attention[b, h, t, j] * slope,
                "sigmoid*gradient": 0 if scores is None else slope / (1 + math.exp(-float(scores[b, h, t, j]))),
                "head_weights": 0 if weights is None else weights[b][h] * attention[b, h, t, j],
            }[recipe.weighting]
            values.append(relu(value) if recipe.relu == "before_heads" else value)
        merged = {"mean": sum(values) / heads, "sum": sum(values), "max": max(values), "min": min(values)}[recipe.heads]
        found[b, t, j] = relu(merged) if recipe.relu == "after_heads" else merged
    return found


def slow_head_weights(recipe, gradient, rows, cells):
    """[B][H]: the mean of the gradients that count."""
    gradient = gradient.double().numpy()
    pairs, heads, queries, keys = gradient.shape
    if recipe.gradient_tokens == "all":
        rows, cells = range(queries), range(keys)
    found = []
    for b in range(pairs):
        found.append([])
        for h in range(heads):
            slopes = [gradient[b, h, t, j] for t in rows for j in cells]
            found[b].append(sum(relu(s) if recipe.relu == "gradient" else s for s in slopes) / len(slopes))
    return found


def slow_weight(recipe, values, slopes):
    """The weight of a channel from its values and slopes at the pooled tokens."""
    if recipe.weighting in ("gradcam", *OF_VALUES):
        return sum(slopes) / len(slopes)
    if recipe.weighting == "xgradcam":
        return sum(g * a for g, a in zip(slopes, values, strict=True)) / (sum(values) + 1e-7)
    weight = 0.0
    for slope in slopes:
        if slope == 0:
            continue
        if "no_denominator" in recipe.departures:
            weight += relu(slope) * slope**2
        elif "summed_cubes" in recipe.departures:
            cubes = sum(g**3 * a for g, a in zip(slopes, values, strict=True))
            weight += relu(slope) * slope**2 / (2 * slope**2 + cubes + 1e-8)
        else:
            weight += relu(slope) * slope**2 / (2 * slope**2 + sum(values) * slope**3 + 1e-6)
    return weight


def slow_term(recipe, value, slope, weight):
    """What a channel adds at one token."""
    return {
        "layercam": relu(slope) * value,
        "hirescam": slope * value,
        "elementwise": relu(slope * value),
        "none": value,
    }.get(recipe.weighting, weight * value)


def slow_channels(recipe, features, gradient, pool, cells, shares=None):
    """[B, cells], channel by channel, and each cell times its share."""
    features, gradient = features.double().numpy(), gradient.double().numpy()
    pairs, _, channels = features.shape
    found = np.zeros((pairs, len(cells)))
    for b in range(pairs):
        if recipe.weighting in ("eigencam", "eigengradcam"):
            scaled = features[b] * gradient[b] if recipe.weighting == "eigengradcam" else features[b]
            found[b] = slow_component(scaled[list(cells)])
        else:
            for c in range(channels):
                slopes = [relu(g) if recipe.relu == "gradient" else g for g in gradient[b, :, c]]
                weight = (
                    slow_weight(recipe, [features[b, i, c] for i in pool], [slopes[i] for i in pool]) if pool else 0.0
                )
                for place, j in enumerate(cells):
                    found[b, place] += slow_term(recipe, features[b, j, c], slopes[j], weight)
            if recipe.weighting == "none":
                found[b] /= channels
            if shares is not None:
                found[b] *= shares[b]
        if recipe.relu == "map":
            found[b] = [relu(value) for value in found[b]]
    return found


def slow_component(values):
    """The projection on the first right singular vector of the centred tokens; its largest magnitude is positive."""
    centred = values - values.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    projection = centred @ directions[0]
    return projection * np.sign(projection[np.abs(projection).argmax()])


# ---------------------------------------------------------------- taking tokens


@pytest.mark.parametrize("indices", [range(2, 5), (2, 3, 4), (0,), (4, 2), (1, 3), range(0), (), range(4, 0, -2)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_taken_are_the_rows_in_their_order(indices, axis):
    values = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
    found = maps.taken(values, indices, axis)
    assert np.array_equal(found, np.take(values.numpy(), np.array(list(indices), dtype=int), axis))


@pytest.mark.parametrize(("indices", "shares"), [(range(2, 5), True), ((2, 3), True), ((3, 2), False)])
def test_a_run_of_neighbours_is_not_copied(indices, shares):
    values = torch.randn(3, 6)
    assert (
        maps.taken(values, indices, 1).untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    ) == shares


# ---------------------------------------------------------------- channels


def test_every_channel_weighting_and_departure_is_derived():
    of_attention = {"attention", "gradient", "attention*gradient", "sigmoid*gradient", "head_weights"}
    # Those that compare tokens with texts are derived where the model is: tests/test_similarity.py.
    elsewhere = {*of_attention, *ASKING, *COMPARING}
    assert {r.weighting for r in [*CHANNELS, *WEIGHTED_VALUES]} == set(values_of("weighting")) - elsewhere
    weighted = {(r.weighting, r.gradient_tokens, r.relu) for r in WEIGHTED_VALUES}
    assert weighted == set(product(OF_VALUES, ("cls",), ("none", "gradient", "map")))
    pooled = {(r.gradient_tokens, r.relu) for r in CHANNELS if r.weighting == "gradcam"}
    assert pooled == set(product(("cls", "patches", "all"), ("none", "gradient", "map")))
    assert {r.departures for r in CHANNELS} == {(), ("summed_cubes",), ("no_denominator",)}


@pytest.mark.parametrize("channels", [4, 11], ids=["more cells than channels", "more channels than cells"])
@pytest.mark.parametrize("recipe", CHANNELS, ids=recipe_id)
def test_channel_maps_follow_the_formula(recipe, channels):
    features, gradient = feature_pair(channels=channels)
    pool = POOLS[recipe.gradient_tokens]
    found = maps.channel_map(recipe, features, gradient if recipe.needs_gradient else None, pool, TOKENS.patches)
    assert found.dtype == torch.float32
    assert found.shape == (2, 6)
    assert close(found, slow_channels(recipe, features, gradient, pool, TOKENS.patches))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with shares"])
@pytest.mark.parametrize("recipe", WEIGHTED_VALUES, ids=recipe_id)
def test_values_are_weighted_by_the_gradient_of_the_token_that_is_read(recipe, shared):
    features, gradient = feature_pair(channels=7)
    shares = torch.linspace(0, 1, 12).view(2, 6) if shared else None
    found = maps.channel_map(recipe, features, gradient, (0,), TOKENS.patches, None, shares)
    assert found.dtype == torch.float32
    slow = slow_channels(recipe, features, gradient, (0,), TOKENS.patches, None if shares is None else shares.numpy())
    assert close(found, slow)


def slow_similarity(queries, keys, row, over):
    """[B, N]: cosines of all heads side by side, scaled to 0..1 by the tokens `over`, token by token."""
    queries, keys = queries.double().numpy(), keys.double().numpy()
    pairs, heads, tokens, width = keys.shape
    found = np.zeros((pairs, tokens))
    for b in range(pairs):
        own = [queries[b, h, row, d] for h in range(heads) for d in range(width)]
        for j in range(tokens):
            other = [keys[b, h, j, d] for h in range(heads) for d in range(width)]
            length = math.sqrt(sum(q * q for q in own)) * math.sqrt(sum(k * k for k in other))
            found[b, j] = sum(q * k for q, k in zip(own, other, strict=True)) / length
        chosen = [found[b, j] for j in over]
        low, high = min(chosen), max(chosen)
        found[b] = [(value - low) / (high - low) for value in found[b]]
    return found


def heads_of(seed, *, pairs=2, width=2):
    """[B, H, N, d]."""
    return torch.randn(pairs, 3, TOKENS.count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("over", [TOKENS.patches, range(8), (7, 0, 3)], ids=["patches", "all", "scattered"])
@pytest.mark.parametrize("row", [0, 5])
def test_key_similarity_is_the_scaled_cosine_of_all_heads_side_by_side(row, over):
    queries, keys = heads_of(1), 3 * heads_of(2)
    found = maps.key_similarity(queries, keys, row, over)
    assert found.dtype == torch.float32
    assert close(found, slow_similarity(queries, keys, row, over))
    assert np.allclose([float(found[0, list(over)].min()), float(found[0, list(over)].max())], [0, 1])


def test_keys_that_are_all_alike_have_a_similarity_of_one():
    keys = heads_of(2)[:, :, :1].expand(-1, -1, TOKENS.count, -1)
    assert torch.equal(maps.key_similarity(heads_of(1), keys, 0, TOKENS.patches), torch.ones(2, TOKENS.count))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_key_similarity_of_half_precision_is_float32(dtype):
    queries, keys = heads_of(1).to(dtype), heads_of(2).to(dtype)
    found = maps.key_similarity(queries, keys, 0, TOKENS.patches)
    assert found.dtype == torch.float32
    assert close(found, slow_similarity(queries, keys, 0, TOKENS.patches))


@pytest.mark.parametrize("recipe", [r for r in CHANNELS if r.gradient_tokens in ("all", "patches")], ids=recipe_id)
def test_pooled_tokens_and_cells_may_be_scattered(recipe):
    features, gradient = feature_pair()
    pool, cells = (0, 2, 5, 6), (7, 3, 4)
    found = maps.channel_map(recipe, features, gradient, pool, cells)
    assert close(found, slow_channels(recipe, features, gradient, pool, cells))


@pytest.mark.parametrize("recipe", [*CHANNELS, *WEIGHTED_VALUES], ids=recipe_id)
def test_tokens_before_the_patches_count_only_where_gradients_are_pooled_over_them(recipe):
    features, gradient = feature_pair()
    pool, cells = POOLS[recipe.gradient_tokens], TOKENS.patches
    other_features, other_gradient = features.clone(), gradient.clone()
    other_features[:, :2] += 3
    other_gradient[:, :2] -= 3
    found, other = (
        maps.channel_map(recipe, f, g, pool, cells) for f, g in ((features, gradient), (other_features, other_gradient))
    )
    assert torch.equal(found, other) == (recipe.gradient_tokens not in ("cls", "all"))


@pytest.mark.parametrize("recipe", [r for r in [*CHANNELS, *WEIGHTED_VALUES] if r.needs_gradient], ids=recipe_id)
def test_a_channel_recipe_without_its_gradient_is_refused(recipe):
    with pytest.raises(RecipeError, match=re.escape(f"weighting='{recipe.weighting}' needs a gradient")):
        maps.channel_map(recipe, feature_pair()[0], None, TOKENS.patches, TOKENS.patches)


@pytest.mark.parametrize("recipe", [r for r in CHANNELS if not r.needs_gradient], ids=recipe_id)
def test_a_recipe_without_gradient_ignores_one(recipe):
    features, gradient = feature_pair()
    one, other = (maps.channel_map(recipe, features, g, (), TOKENS.patches) for g in (None, gradient))
    assert torch.equal(one, other)


def test_where_the_gradient_is_zero_grad_cam_plus_plus_weighs_nothing():
    recipe = NAMED["pgc-gradcam++"]
    features, gradient = feature_pair()
    found = maps.channel_map(recipe, features, torch.zeros_like(gradient), TOKENS.patches, TOKENS.patches)
    assert torch.equal(found, torch.zeros(2, 6))


@pytest.mark.parametrize("name", ["pgc-eigencam", "pgc-eigengradcam"])
@pytest.mark.parametrize("channels", [1, 2, 5, 6, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_component_is_that_of_a_singular_value_decomposition(name, channels, seed):
    generator = torch.Generator().manual_seed(seed)
    features, gradient = torch.randn(2, 2, TOKENS.count, channels, generator=generator)
    recipe = NAMED[name].replace(relu="none")
    found = maps.channel_map(recipe, features, gradient, (), TOKENS.patches).double().numpy()
    for b, values in enumerate(features * gradient if name == "pgc-eigengradcam" else features):
        own = values[2:].double().numpy()
        centred = own - own.mean(0)
        _, _, directions = np.linalg.svd(centred, full_matrices=False)
        projection = centred @ directions[0]
        error = min(np.abs(found[b] - projection).max(), np.abs(found[b] + projection).max())
        assert error < 2e-4 * np.abs(projection).max()
        assert found[b][np.abs(found[b]).argmax()] > 0  # the sign rule


@pytest.mark.parametrize("name", ["pgc-eigencam", "pgc-eigengradcam"])
def test_the_first_component_does_not_depend_on_the_sign_of_the_features(name):
    features, gradient = feature_pair()
    recipe = NAMED[name].replace(relu="none")
    one, other = (maps.channel_map(recipe, f, gradient, (), TOKENS.patches) for f in (features, -features))
    assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", ["pgc-eigencam", "pgc-eigengradcam"])
@pytest.mark.parametrize("value", [0.0, 0.1, 7.7, -1e6])
@pytest.mark.parametrize("cells", [range(2, 8), range(1, 8), (4,)], ids=["six", "seven", "one"])
def test_features_that_are_the_same_everywhere_have_no_component(name, value, cells):
    """Not even the rounding of their mean, which would be spread over 0..1 by a heatmap."""
    features = value * torch.tensor([1.0, 1 / 3, -0.7]).expand(2, 8, 3)
    found = maps.channel_map(NAMED[name].replace(relu="none"), features, torch.ones_like(features), (), cells)
    assert torch.equal(found, torch.zeros(2, len(cells)))


def test_one_pair_with_constant_features_leaves_the_other_alone():
    features, _ = feature_pair()
    recipe = NAMED["pgc-eigencam"]
    alone = maps.channel_map(recipe, features[1:], None, (), TOKENS.patches)
    features[0] = 0.3
    found = maps.channel_map(recipe, features, None, (), TOKENS.patches)
    assert torch.equal(found[0], torch.zeros(6))
    assert torch.allclose(found[1:], alone, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12, 1e30])
def test_the_first_component_of_tiny_and_of_huge_features_keeps_its_shape(factor):
    features, _ = feature_pair()
    recipe = NAMED["pgc-eigencam"].replace(relu="none")
    one, other = (maps.channel_map(recipe, f, None, (), TOKENS.patches) for f in (features, factor * features))
    assert torch.allclose(one, other / factor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", [*CHANNELS, *WEIGHTED_VALUES], ids=recipe_id)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_does_not_vanish_from_a_map(recipe, value):
    """The engine refuses such a map; here it must neither raise nor look sound, and the other pair stays sound."""
    features, gradient = feature_pair()
    pool = POOLS[recipe.gradient_tokens]
    sound = maps.channel_map(recipe, features, gradient, pool, TOKENS.patches)
    features[0, 4] = value
    found = maps.channel_map(recipe, features, gradient.abs(), pool, TOKENS.patches)
    assert not torch.isfinite(found[0]).all()
    assert torch.isfinite(found[1]).all()
    assert torch.isfinite(sound).all()


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("recipe", CROSS, ids=recipe_id)
def test_attention_matrices_follow_the_formula(recipe):
    attention, gradient = attention_pair()
    found = maps.attention_matrix(recipe, attention, gradient)
    assert found.dtype == torch.float32
    assert found.shape == (2, 4, 5)
    assert close(found, slow_matrix(recipe, attention, gradient))


@pytest.mark.parametrize("recipe", SIGMOID, ids=recipe_id)
def test_sigmoid_of_the_scores_times_gradient(recipe):
    scores, attention, gradient = self_attention()
    found = maps.attention_matrix(recipe, attention, gradient, scores=scores)
    assert close(found, slow_matrix(recipe, attention, gradient, scores))


@pytest.mark.parametrize("rows", [(0,), (1, 3), range(2, 8)], ids=["cls", "scattered", "patches"])
@pytest.mark.parametrize("recipe", HEAD_WEIGHTS, ids=recipe_id)
def test_head_weights_follow_the_formula(recipe, rows):
    _, attention, gradient = self_attention()
    weights = maps.head_weights(recipe, gradient, rows, TOKENS.patches)
    slow = slow_head_weights(recipe, gradient, rows, TOKENS.patches)
    assert weights.dtype == torch.float32
    assert close(weights, slow)
    found = maps.attention_matrix(recipe, attention, gradient, weights=weights)
    assert close(found, slow_matrix(recipe, attention, gradient, weights=slow))


@pytest.mark.parametrize("rows", [(0,), (1, 3), range(8)], ids=["one", "scattered", "all"])
@pytest.mark.parametrize("recipe", HEAD_CHANNELS, ids=recipe_id)
def test_heads_as_channels_are_token_features_of_the_rows_mean(recipe, rows):
    _, attention, gradient = self_attention()
    means = [np.stack([t.double().numpy()[:, :, i] for i in rows]).mean(0) for t in (attention, gradient)]
    features, slopes = (torch.from_numpy(np.swapaxes(mean, 1, 2).copy()) for mean in means)
    found = maps.head_channels(attention, rows)
    assert close(found, features)
    pool = POOLS[recipe.gradient_tokens]
    found = maps.channel_map(recipe, found, maps.head_channels(gradient, rows), pool, TOKENS.patches)
    # Where a denominator is small the rounding of the means shows.
    assert close(found, slow_channels(recipe, features, slopes, pool, TOKENS.patches), 1e-4)


def test_heads_can_take_every_channel_weighting():
    assert {r.weighting for r in HEAD_CHANNELS} == {r.weighting for r in CHANNELS}


def test_plain_attention_needs_no_gradient():
    attention, gradient = attention_pair()
    assert torch.equal(
        maps.attention_matrix(PLAIN[0], attention, None), maps.attention_matrix(PLAIN[0], attention, gradient)
    )


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        (LAVIS, {}, r"weighting='attention\*gradient' needs a gradient"),
        (NAMED["legrad"], {}, "weighting='gradient' needs a gradient"),
        (NAMED["agcam"], {}, r"weighting='sigmoid\*gradient' needs a gradient"),
        (NAMED["agcam"], {"gradient"}, r"weighting='sigmoid\*gradient' needs the scores before the softmax"),
        (NAMED["attn-gradcam"], {"gradient"}, "weighting='head_weights' needs a weight per head"),
    ],
)
def test_a_recipe_without_what_it_takes_is_refused(recipe, given, message):
    attention, gradient = attention_pair()
    with pytest.raises(RecipeError, match=message):
        maps.attention_matrix(recipe, attention, gradient if given else None)


def test_head_weights_without_a_gradient_are_refused():
    with pytest.raises(RecipeError, match="weighting='head_weights' needs a gradient"):
        maps.head_weights(NAMED["attn-gradcam"], None, (0,), TOKENS.patches)


# ---------------------------------------------------------------- products of matrices


def matrices_of(recipe, count=3):
    found = []
    for layer in range(count):
        _, attention, gradient = self_attention(seed=10 + layer)
        found.append(maps.attention_matrix(recipe, attention, gradient))
    return found


def slow_product(recipe, matrices):
    """[B, N, N]: the whole product, as the sources write it."""
    found = []
    for b in range(len(matrices[0])):
        product_ = np.eye(matrices[0].shape[-1])
        for matrix in matrices:
            own = matrix[b].double().numpy().copy()
            tokens = len(own)
            if recipe.layer_rule == "relevance":
                product_ = product_ + own @ product_
                continue
            flat = own.reshape(-1)
            first = flat[0]
            for place in sorted(range(len(flat)), key=flat.__getitem__)[: int(len(flat) * recipe.discard)]:
                flat[place] = 0
            if "unprotected" not in recipe.departures:
                flat[0] = first
            own = own + np.eye(tokens)
            sums = [sum(own[t]) for t in range(tokens)]
            for t, j in np.ndindex(tokens, tokens):
                own[t, j] /= sums[j if "column_scaling" in recipe.departures else t]
            product_ = own @ product_
        found.append(product_)
    return np.stack(found)


FLOWS = [
    ROLLOUT.replace(heads=heads, discard=discard, departures=departures)
    for heads in ("mean", "max", "min")
    for discard in DISCARDS
    for departures in ((), "column_scaling", "unprotected", ("column_scaling", "unprotected"))
]
FLOWS += valid(
    CHEFER,
    layer_rule=("rollout", "relevance"),
    weighting=("attention*gradient",),
    relu=("before_heads", "after_heads"),
    discard=(0.0, 0.9),
    departures=((), "column_scaling"),
)
FLOWS += valid(CHEFER, weighting=("attention", "gradient", "attention*gradient"), relu=RELUS, heads=HEADS)


def flow_id(recipe):
    return f"{recipe.layer_rule}-{recipe_id(recipe)}-{recipe.discard}"


@pytest.mark.parametrize("recipe", FLOWS, ids=flow_id)
def test_carried_rows_are_those_of_the_whole_product(recipe):
    matrices = matrices_of(recipe)
    rows = torch.zeros(3, TOKENS.count)
    rows[0, 0], rows[1, 4], rows[2, 2:] = 1, 1, 1 / 6
    kept = [matrix.clone() for matrix in matrices]
    found = maps.propagated(recipe, matrices, rows)
    assert found.dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(matrices, kept, strict=True))
    whole = slow_product(recipe, matrices)
    wanted = np.stack([[w[0], w[4], w[2:].mean(0)] for w in whole])
    assert close(found, wanted)
    every = maps.propagated(recipe, matrices, torch.eye(TOKENS.count))
    assert close(every, whole)


@pytest.mark.parametrize("discard", DISCARDS)
@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_rows_of_a_rollout_sum_to_one(heads, discard):
    recipe = ROLLOUT.replace(heads=heads, discard=discard)
    found = maps.propagated(recipe, matrices_of(recipe), torch.eye(TOKENS.count))
    assert torch.allclose(found.sum(-1), torch.ones(2, TOKENS.count), atol=1e-5)
    assert (found >= 0).all()


def test_scaled_columns_do_not_sum_to_one():
    recipe = NAMED["vitexplain-rollout-as-coded"]
    found = maps.propagated(recipe, matrices_of(recipe), torch.eye(TOKENS.count))
    assert (found.sum(-1) - 1).abs().max() > 0.01


def test_half_identity_half_attention_is_the_same_rollout():
    matrices = matrices_of(ROLLOUT)
    wanted = np.eye(TOKENS.count)
    for matrix in matrices:
        wanted = (matrix.double().numpy() + np.eye(TOKENS.count)) / 2 @ wanted
    assert close(maps.propagated(ROLLOUT, matrices, torch.eye(TOKENS.count)), wanted)


@pytest.mark.parametrize(("discard", "zeros"), [(0.5, 8), (0.9, 14), (0.05, 0)])
def test_discarded_entries_are_the_smallest_but_for_the_class_token_on_itself(discard, zeros):
    """One block, so that the carried rows show its matrix: E = R - I, from unscaled sums."""
    values = torch.arange(1.0, 17).reshape(1, 4, 4)  # [CLS, CLS] is the smallest
    for departures, first in (((), 1.0), (("unprotected",), 0.0 if zeros else 1.0)):
        recipe = ROLLOUT.replace(discard=discard, departures=departures)
        found = maps.propagated(recipe, [values], torch.eye(4))[0]
        wanted = values[0].clone().flatten()
        wanted[:zeros] = 0
        wanted[0] = first
        matrix = wanted.reshape(4, 4) + torch.eye(4)
        assert torch.allclose(found, matrix / matrix.sum(-1, keepdim=True), atol=1e-6)


def test_relevance_follows_its_recursion():
    matrices = matrices_of(CHEFER)
    relevance = torch.eye(TOKENS.count, dtype=torch.float64).expand(2, -1, -1)
    for matrix in matrices:
        relevance = relevance + matrix.double() @ relevance
    assert close(maps.propagated(CHEFER, matrices, torch.eye(TOKENS.count)), relevance)


@pytest.mark.parametrize("recipe", [CHEFER, NAMED["chefer-generic-heads-first"]], ids=lambda r: r.name)
def test_relevance_through_one_block_is_that_blocks_matrix(recipe):
    """Without the identity on the diagonal, which the class token's patches never see."""
    (matrix,) = matrices_of(recipe, 1)
    rows = torch.eye(TOKENS.count)[:1]
    assert torch.allclose(maps.propagated(recipe, [matrix], rows)[:, 0, 2:], matrix[:, 0, 2:], atol=1e-7)


# ---------------------------------------------------------------- layers, scaling


@pytest.mark.parametrize("rule", ["mean", "sum", "max"])
def test_layers_are_merged_cell_by_cell(rule):
    layers = list(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(4)))
    wanted = np.zeros((2, 5))
    for cell in np.ndindex(2, 5):
        values = [float(layer[cell]) for layer in layers]
        wanted[cell] = {"mean": sum(values) / 3, "sum": sum(values), "max": max(values)}[rule]
    assert np.allclose(maps.merge_layers(LAVIS.replace(layers="all", layer_rule=rule), layers), wanted, atol=1e-6)


@pytest.mark.parametrize("recipe", [LAVIS, NAMED["context-gradcam"]], ids=["single", "shared"])
def test_one_layer_stays_as_it_is(recipe):
    layer = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(maps.merge_layers(recipe, [layer]), layer)


@pytest.mark.parametrize(
    ("normalize", "wanted"),
    [
        ("minmax", [8 / 11, 10 / 11, 1, 0]),
        ("max", [1 / 7, 3 / 7, 4 / 7, -1]),
        ("sum", [1 / 15, 3 / 15, 4 / 15, -7 / 15]),
        ("none", [1, 3, 4, -7]),
    ],
)
def test_a_map_is_scaled_as_the_recipe_says(normalize, wanted):
    found = maps.normalised(LAVIS.replace(normalize=normalize), torch.tensor([1.0, 3.0, 4.0, -7.0]))
    assert np.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("normalize", "value", "wanted"),
    [
        ("minmax", 0.0, 0.0),
        ("minmax", 3.0, 0.0),
        ("max", 0.0, 0.0),
        ("max", -3.0, -1.0),
        ("sum", 0.0, 0.0),
        ("sum", -2.0, -1 / 6),
        ("none", 3.0, 3.0),
    ],
)
def test_a_constant_map_gives_no_nan(normalize, value, wanted):
    found = maps.normalised(LAVIS.replace(normalize=normalize), torch.full((2, 3), value))
    assert torch.equal(found, torch.full((2, 3), wanted))


def test_every_scaling_is_covered():
    assert set(values_of("normalize")) == {"none", "minmax", "max", "sum"}


@pytest.mark.parametrize("seed", range(4))
def test_a_map_that_is_never_negative_sums_to_one(seed):
    values = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    found = maps.normalised(LAVIS.replace(normalize="sum"), values)
    wanted = values.double().numpy() / sum(values.double().flatten().tolist())
    assert np.allclose(found, wanted, atol=1e-6)
    assert float(found.sum()) == pytest.approx(1)


# ---------------------------------------------------------------- relations between recipes


@pytest.mark.parametrize("heads", HEADS)
def test_for_probabilities_relu_on_the_gradient_is_relu_before_heads(heads):
    attention, gradient = attention_pair()
    one, other = (
        maps.attention_matrix(LAVIS.replace(relu=r, heads=heads), attention, gradient)
        for r in ("gradient", "before_heads")
    )
    assert torch.equal(one, other)


def test_for_token_features_relu_on_the_gradient_is_not_relu_on_the_product():
    features, gradient = feature_pair()
    one, other = (
        maps.channel_map(NAMED[name].replace(relu="none"), features, gradient, (), TOKENS.patches)
        for name in ("pgc-layercam", "pgc-elementwise")
    )
    assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("heads", ["mean", "sum"])
def test_relu_before_heads_is_not_relu_after_heads(heads):
    attention, gradient = attention_pair()
    one, other = (maps.attention_matrix(LAVIS.replace(relu=r, heads=heads), attention, gradient) for r in RELUS[2:4])
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("gradient_tokens", ["patches", "all"])
def test_xgradcam_conserves_gradient_times_activation(gradient_tokens):
    """The sum over the pooled tokens, before any ReLU, is that of gradient times activation there."""
    recipe = NAMED["pgc-xgradcam"].replace(relu="none", gradient_tokens=gradient_tokens)
    features, gradient = feature_pair()
    pool = POOLS[gradient_tokens]
    found = maps.channel_map(recipe, features, gradient, pool, pool)
    for b in range(2):
        total = sum(float(gradient[b, i] @ features[b, i]) for i in pool)
        assert math.isclose(float(found[b].sum()), total, rel_tol=1e-4)


def test_hirescam_summed_over_all_tokens_is_gradient_times_activation():
    features, gradient = feature_pair()
    recipe = NAMED["pgc-hirescam"].replace(relu="none")
    found = maps.channel_map(recipe, features, gradient, (), range(TOKENS.count))
    assert torch.allclose(found.sum(1), (features * gradient).sum((1, 2)), atol=1e-5)


def test_with_one_gradient_for_all_tokens_gradcam_hirescam_and_xgradcam_agree():
    features, gradient = feature_pair()
    gradient = gradient[:, 4:5].expand_as(gradient)
    one, two, three = (
        maps.channel_map(NAMED[name], features, gradient, TOKENS.patches, TOKENS.patches)
        for name in ("pgc-gradcam", "pgc-hirescam", "pgc-xgradcam")
    )
    assert torch.allclose(one, two, atol=1e-5)
    assert torch.allclose(one, three, atol=1e-4)


@pytest.mark.parametrize("recipe", [r for r in CROSS if r.needs_gradient], ids=recipe_id)
def test_rescaling_the_score_leaves_the_scaled_attention_map(recipe):
    attention, gradient = attention_pair()
    one, other = (maps.attention_matrix(recipe, attention, g).mean(1) for g in (gradient, 100 * gradient))
    assert torch.allclose(100 * one, other, atol=1e-4)
    assert torch.allclose(maps.normalised(recipe, one[0]), maps.normalised(recipe, other[0]), atol=1e-5)


FIRST_ORDER = [r for r in CHANNELS if r.needs_gradient and r.weighting != "gradcam++"]


@pytest.mark.parametrize("recipe", FIRST_ORDER, ids=recipe_id)
def test_rescaling_the_score_leaves_the_scaled_feature_map(recipe):
    features, gradient = feature_pair()
    pool = POOLS[recipe.gradient_tokens]
    one, other = (maps.channel_map(recipe, features, g, pool, TOKENS.patches) for g in (gradient, 100 * gradient))
    assert torch.allclose(100 * one, other, rtol=1e-4, atol=1e-3)
    assert torch.allclose(maps.normalised(recipe, one[0]), maps.normalised(recipe, other[0]), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", CHANNELS, ids=recipe_id)
def test_half_precision_features_give_finite_float32(recipe, dtype):
    features, gradient = feature_pair(dtype)
    pool = POOLS[recipe.gradient_tokens]
    found = maps.channel_map(recipe, features, gradient, pool, TOKENS.patches)
    assert found.dtype == torch.float32
    assert close(found, slow_channels(recipe, features, gradient, pool, TOKENS.patches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [*CROSS, *SIGMOID, *HEAD_WEIGHTS], ids=recipe_id)
def test_half_precision_attention_gives_finite_float32(recipe, dtype):
    scores, attention, gradient = (each.to(dtype) for each in self_attention())
    weights = slow = None
    if recipe.weighting == "head_weights":
        weights = maps.head_weights(recipe, gradient, (0,), TOKENS.patches)
        slow = slow_head_weights(recipe, gradient, (0,), TOKENS.patches)
    found = maps.attention_matrix(recipe, attention, gradient, scores=scores, weights=weights)
    assert found.dtype == torch.float32
    assert close(found, slow_matrix(recipe, attention, gradient, scores, slow))


def test_half_precision_does_not_lose_a_small_gradient():
    """6e-8 is the smallest step of float16: its product with a probability would vanish there."""
    attention, gradient = attention_pair(torch.float16)
    found = maps.attention_matrix(LAVIS, attention, torch.full_like(gradient, 6e-8))
    assert (found > 0).all()
    features = torch.full((1, 8, 4), 0.01, dtype=torch.float16)
    found = maps.channel_map(FEATURES, features, torch.full_like(features, 6e-8), TOKENS.patches, TOKENS.patches)
    assert (found > 0).all()


def test_inputs_are_left_alone():
    scores, attention, gradient = self_attention()
    features, slope = feature_pair()
    tensors = [scores, attention, gradient, features, slope]
    before = [tensor.clone() for tensor in tensors]
    for recipe in [*CROSS, *SIGMOID, *HEAD_WEIGHTS]:
        weights = maps.head_weights(recipe, gradient, (0,), TOKENS.patches)
        maps.attention_matrix(recipe, attention, gradient, scores=scores, weights=weights)
    for recipe in [*CHANNELS, *WEIGHTED_VALUES, *HEAD_CHANNELS]:
        maps.channel_map(recipe, features, slope, POOLS[recipe.gradient_tokens], TOKENS.patches)
        maps.channel_map(recipe, features, slope, range(TOKENS.count), range(TOKENS.count))
        maps.head_channels(attention, range(TOKENS.count))
    for recipe in FLOWS:
        maps.propagated(recipe, [attention[:, 0], gradient[:, 0]], torch.eye(TOKENS.count))
    maps.key_similarity(scores[..., :2], scores[..., 2:4], 0, TOKENS.patches)
    for normalize in values_of("normalize"):
        maps.normalised(LAVIS.replace(normalize=normalize), gradient)
    for rule in ("mean", "sum", "max"):
        maps.merge_layers(LAVIS.replace(layers="all", layer_rule=rule), [features, slope])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


# ---------------------------------------------------------------- from a capture to the map


def job_of(recipe, layers=(0, 1, 2)):
    return Job(recipe, layers, {}, Target("class", "class_logit", lambda output: output[:, 0]))


def captured(job, seeds=(21, 22, 23)):
    """Random attention of every block at the taps of a job, and the same by block: (scores, attention, gradient)."""
    blocks = [self_attention(seed) for seed in seeds[: len(job.layers)]]
    activations, gradients = {}, {}
    for layer, (scores, attention, gradient) in zip(job.layers, blocks, strict=True):
        activations[Tap("vision", layer, "F2")] = attention
        activations[Tap("vision", layer, SCORES)] = scores
        gradients[Tap("vision", layer, "F2")] = gradient
        gradients[Tap("vision", layer, SCORES)] = 0.5 * gradient.flip(-1)
    return Capture(activations, gradients, torch.ones(2), {}, torch.zeros(2)), blocks


def selected(recipe):
    return select(recipe, None, TOKENS, None, None)


def slow_map(recipe, blocks, rows, pair):
    """The map of one pair from the blocks' attention, [cells], of a recipe that merges maps, not matrices."""
    maps_ = []
    for scores, attention, gradient in blocks:
        own = [t[pair : pair + 1] for t in (attention, gradient, scores)]
        if recipe.map_axis == "queries":
            own = [t.transpose(-1, -2) for t in own]
        weights = slow_head_weights(recipe, own[1], rows, TOKENS.patches)
        matrix = slow_matrix(recipe, own[0], own[1], own[2], weights)[0]
        values = [sum(matrix[t, j] for t in rows) / len(rows) for j in TOKENS.patches]
        maps_.append([relu(v) for v in values] if recipe.relu == "map" else values)
    merge = {"mean": np.mean, "sum": np.sum, "max": np.max, "single": np.sum}[recipe.layer_rule]
    return merge(np.array(maps_), 0)


ROWS = {"cls": (0,), "registers": (1,), "patches": range(2, 8), "all": range(8), (-1, 2): (7, 2)}
LAYERED = valid(
    NAMED["grad-sam"],
    weighting=("attention", "gradient", "attention*gradient", "sigmoid*gradient", "head_weights"),
    target=("class", "none"),
    scale=("logit", "none"),
    gradient_tokens=("patches", "all", "none"),
    map_axis=("keys", "queries"),
    relu=("none", "gradient", "after_heads", "map"),
    heads=("sum", "max"),
)


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("queries", ROWS, ids=str)
@pytest.mark.parametrize("recipe", LAYERED, ids=lambda r: f"{recipe_id(r)}-{r.map_axis}")
def test_the_map_of_a_pair_follows_rows_axis_and_layers(recipe, queries, pair):
    recipe = recipe.replace(queries=queries)
    job = job_of(recipe)
    found, blocks = captured(job)
    made = token_maps(job, found, pair, selected(recipe))
    assert made.values.shape == (1, 6)
    assert (made.statuses == ("no positive evidence",)) == (recipe.relu != "none" and not made.values.any())
    assert close(made.values[0], slow_map(recipe, blocks, ROWS[queries], pair))


def test_excluded_registers_are_not_among_all_rows():
    recipe = NAMED["grad-sam"].replace(exclude=("cls", "registers"))
    job = job_of(recipe)
    found, blocks = captured(job)
    made = token_maps(job, found, 0, selected(recipe))
    assert close(made.values[0], slow_map(recipe, blocks, (0, *range(2, 8)), 0))


@pytest.mark.parametrize("rule", ["mean", "sum", "max"])
def test_layers_of_attention_are_merged_after_the_rows(rule):
    recipe = NAMED["grad-sam"].replace(layer_rule=rule, relu="map")
    job = job_of(recipe)
    found, blocks = captured(job)
    assert close(token_maps(job, found, 1, selected(recipe)).values[0], slow_map(recipe, blocks, range(8), 1))


def one_block(recipe, layer=0):
    """A recipe on one block, and what it is captured on."""
    recipe = recipe.replace(layers=(layer,))
    job = job_of(recipe, (layer,))
    found, blocks = captured(job)
    return token_maps(job, found, 0, selected(recipe)).values[0], blocks[0]


def test_agcam_is_a_sum_over_heads_and_layers_of_sigmoid_times_positive_gradient():
    recipe = NAMED["agcam"]
    job = job_of(recipe)
    found, blocks = captured(job)
    wanted = np.zeros(6)
    for (scores, _, gradient), h, j in product(blocks, range(3), range(6)):
        sigmoid = 1 / (1 + math.exp(-float(scores[0, h, 0, 2 + j])))
        wanted[j] += relu(float(gradient[0, h, 0, 2 + j])) * sigmoid
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], wanted)


def test_legrad_for_the_class_tokens_row_alone_is_a_share_of_that_row():
    """Where only row 0 has a gradient, the mean over all rows is row 0 divided by their number."""
    recipe = NAMED["legrad"].replace(layers=(0,))
    job = job_of(recipe, (0,))
    found, ((_, _, gradient),) = captured(job)
    gradient[:, :, 1:] = 0
    wanted = np.zeros(6)
    for h, j in product(range(3), range(6)):
        wanted[j] += relu(float(gradient[0, h, 0, 2 + j])) / 3 / TOKENS.count
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], wanted)


def test_relevance_through_one_block_is_albefs_map_of_that_block():
    """R = I + E, so R[0, patches] = E[0, patches]."""
    found, _ = one_block(CHEFER)
    other, _ = one_block(CHEFER.replace(layer_rule="mean", relu="gradient"))
    assert torch.allclose(found, other, atol=1e-7)


def test_the_two_head_weighted_recipes_differ():
    one, other = (one_block(NAMED[name])[0] for name in ("attn-gradcam", "attn-gradcam-full"))
    assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("queries", ["cls", "patches", "all"])
@pytest.mark.parametrize(
    "name",
    [
        "attention-rollout",
        "vitexplain-rollout",
        "vitexplain-rollout-as-coded",
        "vitexplain-grad-rollout",
        "chefer-generic",
        "chefer-generic-heads-first",
    ],
)
def test_flows_read_the_mean_of_their_rows(name, queries):
    recipe = NAMED[name].replace(queries=queries)
    job = job_of(recipe)
    found, blocks = captured(job)
    matrices = [torch.from_numpy(slow_matrix(recipe, attention, gradient)) for _, attention, gradient in blocks]
    wanted = slow_product(recipe, matrices)[1][list(ROWS[queries])].mean(0)[2:]
    assert close(token_maps(job, found, 1, selected(recipe)).values[0], wanted)


@pytest.mark.parametrize("gradient_tokens", ["patches", "all"])
@pytest.mark.parametrize("rule", ["rollout", "relevance"])
def test_flows_of_head_weighted_matrices(rule, gradient_tokens):
    recipe = NAMED["attn-gradcam"].replace(layers="all", layer_rule=rule, gradient_tokens=gradient_tokens)
    job = job_of(recipe)
    found, blocks = captured(job)
    matrices = []
    for _, attention, gradient in blocks:
        weights = slow_head_weights(recipe, gradient, (0,), TOKENS.patches)
        matrices.append(torch.from_numpy(slow_matrix(recipe, attention, gradient, weights=weights)))
    wanted = slow_product(recipe, matrices)[0][0, 2:]
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], wanted)


def test_flows_with_sigmoids():
    recipe = NAMED["agcam"].replace(layer_rule="relevance")
    job = job_of(recipe)
    found, blocks = captured(job)
    matrices = [torch.from_numpy(slow_matrix(recipe, a, g, s)) for s, a, g in blocks]
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], slow_product(recipe, matrices)[0][0, 2:])


def test_gradient_rollout_as_coded_is_vit_explains():
    """Mirrored layers, gradients before the softmax, scaled columns, [CLS, CLS] unprotected, step by step."""
    recipe = NAMED["vitexplain-grad-rollout-as-coded"]
    job = job_of(recipe)
    found, blocks = captured(job)
    tokens = TOKENS.count
    result = np.eye(tokens)
    for (_, attention, _), (_, _, slope) in zip(blocks, reversed(blocks), strict=True):
        at_scores = 0.5 * slope.flip(-1)
        fused = np.maximum((attention[0].double().numpy() * at_scores[0].double().numpy()).mean(0), 0)
        flat = fused.reshape(-1)
        flat[np.argsort(flat, kind="stable")[: int(tokens * tokens * 0.9)]] = 0
        scaled = (fused + np.eye(tokens)) / 2
        result = scaled / scaled.sum(-1) @ result
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], result[0, 2:])


@pytest.mark.parametrize("recipe", [r for r in HEAD_CHANNELS if r.relu == "none"], ids=recipe_id)
def test_heads_as_channels_from_a_capture(recipe):
    recipe = recipe.replace(queries="patches", layers="all", layer_rule="sum")
    job = job_of(recipe)
    found, blocks = captured(job)
    wanted = np.zeros(6)
    for _, attention, gradient in blocks:
        features, slopes = (t[:1, :, 2:].double().mean(2).transpose(1, 2) for t in (attention, gradient))
        wanted += slow_channels(recipe, features, slopes, selected(recipe).pool, TOKENS.patches)[0]
    assert close(token_maps(job, found, 0, selected(recipe)).values[0], wanted, 1e-4)


def values_captured(job, seeds=(31, 32, 33)):
    """Random heads of every block at the taps of a job, and the same by block."""
    blocks, activations, gradients = [], {}, {}
    for layer, seed in zip(job.layers, seeds, strict=False):
        values, queries, keys = (heads_of(seed + 10 * number) for number in range(3))
        gradient = torch.randn(2, TOKENS.count, 6, generator=torch.Generator().manual_seed(seed + 40))
        taps = {VALUES: values, QUERIES: queries, KEYS: keys}
        activations |= {Tap("vision", layer, site): tensor for site, tensor in taps.items()}
        gradients[Tap("vision", layer, "F3_HEADS")] = gradient
        blocks.append((values, queries, keys, gradient))
    return Capture(activations, gradients, torch.ones(2), {}, torch.zeros(2)), blocks


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("rule", ["single", "sum", "mean", "max"])
@pytest.mark.parametrize("recipe", WEIGHTED_VALUES, ids=recipe_id)
def test_weighted_values_from_a_capture_follow_heads_and_layers(recipe, rule, pair):
    layers = (1,) if rule == "single" else (0, 1, 2)
    job = job_of(recipe.replace(layers=layers, layer_rule=rule), layers)
    found, blocks = values_captured(job)
    each = []
    for values, queries, keys, gradient in blocks:
        joined = torch.cat([values[:, h] for h in range(3)], -1)  # the heads' channels side by side
        shares = None
        if recipe.weighting == "value*gradient*similarity":
            shares = slow_similarity(queries, keys, 0, TOKENS.patches)[:, 2:]
        each.append(slow_channels(recipe, joined, gradient, (0,), TOKENS.patches, shares)[pair])
    merge = {"mean": np.mean, "sum": np.sum, "max": np.max, "single": np.sum}[rule]
    assert close(token_maps(job, found, pair, selected(job.recipe)).values[0], merge(np.array(each), 0))


@pytest.mark.parametrize("weighting", OF_VALUES)
def test_values_without_a_gradient_at_the_token_that_is_read_give_no_map(weighting):
    recipe = GRADECLIP.replace(weighting=weighting)
    job = job_of(recipe, (0,))
    found, blocks = values_captured(job)
    blocks[0][3][:, 0] = 0
    with pytest.raises(NoGradientError, match="exactly zero on the class token"):
        token_maps(job, found, 0, selected(recipe))


@pytest.mark.parametrize("map_axis", AXES)
def test_where_the_rows_have_no_gradient_there_is_no_map(map_axis):
    recipe = NAMED["grad-sam"].replace(map_axis=map_axis, queries="cls")
    job = job_of(recipe)
    found, blocks = captured(job)
    for _, _, gradient in blocks:
        gradient.select(AXES[map_axis], 0).zero_()
    with pytest.raises(NoGradientError, match="exactly zero on rows"):
        token_maps(job, found, 0, selected(recipe))
    other = recipe.replace(queries="patches")
    assert token_maps(job_of(other), found, 0, selected(other)).statuses == ("ok",)


def test_heads_weighted_over_the_whole_matrix_need_no_gradient_in_their_row():
    recipe = NAMED["attn-gradcam-full"]
    job = job_of(recipe, (0,))
    found, blocks = captured(job)
    blocks[0][2][:, :, 0] = 0
    made = token_maps(job, found, 0, selected(recipe))
    assert close(made.values[0], slow_map(recipe, blocks, (0,), 0))


@pytest.mark.parametrize("name", ["pgc-eigencam", "pgc-eigengradcam", "pgc-gradcam", "pgc-gradcam++"])
def test_a_map_that_is_not_finite_is_an_error_of_ours(name):
    recipe = NAMED[name]
    features, gradient = feature_pair()
    features[0, 4] = math.inf
    tap = Tap("vision", 0, "F1")
    found = Capture({tap: features}, {tap: gradient.abs()}, torch.ones(2), {}, torch.zeros(2))
    with pytest.raises(EvidenceError, match="not finite"):
        token_maps(job_of(recipe, (0,)), found, 0, selected(recipe))


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_constant_features_are_reported_not_drawn(value):
    recipe = NAMED["pgc-eigencam"].replace(relu="none")
    tap = Tap("vision", 0, "F1")
    found = Capture({tap: torch.full((1, 8, 5), value)}, {}, torch.ones(1), {}, torch.zeros(1))
    made = token_maps(job_of(recipe, (0,)), found, 0, select(recipe, None, ImageTokens(("cls",), (1, 7)), None, None))
    assert made.statuses == ("constant",)
