"""Token maps, each derived again with plain loops in float64."""

from itertools import product

import numpy as np
import pytest
import torch

from vlcam import maps
from vlcam.catalogue import recipes
from vlcam.errors import RecipeError

LAVIS = recipes()["lavis-itm"].recipe
FEATURES = recipes()["pgc-gradcam"].recipe

RELUS = ("none", "gradient", "before_heads", "after_heads", "map")
HEADS = ("mean", "sum", "max", "min")
PLAIN = [LAVIS.replace(weighting="attention", target="none", scale="none", relu="none", heads=h) for h in HEADS]
ATTENTION = PLAIN + [
    LAVIS.replace(weighting=weighting, relu=relu, heads=heads)
    for weighting, relu, heads in product(("gradient", "attention*gradient"), RELUS, HEADS)
]
TOKENS = [
    FEATURES.replace(gradient_tokens=g, relu=r) for g in ("cls", "patches", "all") for r in ("none", "gradient", "map")
]


def attention_id(recipe):
    return f"{recipe.weighting}-{recipe.relu}-{recipe.heads}"


def feature_id(recipe):
    return f"{recipe.gradient_tokens}-{recipe.relu}"


def attention_pair(dtype=torch.float32):
    """Probabilities and a signed gradient, [B, H, Q, K] = [2, 3, 4, 5]."""
    generator = torch.Generator().manual_seed(1)
    scores, gradient = torch.randn(2, 2, 3, 4, 5, generator=generator)
    return scores.softmax(-1).to(dtype), gradient.to(dtype)


def feature_pair(dtype=torch.float32):
    """Signed features and gradient, [B, N, C] = [2, 7, 4]."""
    features, gradient = torch.randn(2, 2, 7, 4, generator=torch.Generator().manual_seed(2))
    return features.to(dtype), gradient.to(dtype)


def relu(value):
    return value if value > 0 else 0.0


def slow_rows(recipe, attention, gradient):
    attention, gradient = attention.double().numpy(), gradient.double().numpy()
    pairs, heads, queries, keys = attention.shape
    rows = np.zeros((pairs, queries, keys))
    for b, t, j in np.ndindex(pairs, queries, keys):
        values = []
        for h in range(heads):
            slope = gradient[b, h, t, j]
            if recipe.relu == "gradient":
                slope = relu(slope)
            if recipe.weighting == "attention":
                value = attention[b, h, t, j]
            elif recipe.weighting == "gradient":
                value = slope
            else:
                value = attention[b, h, t, j] * slope
            values.append(relu(value) if recipe.relu == "before_heads" else value)
        merged = {"mean": sum(values) / heads, "sum": sum(values), "max": max(values), "min": min(values)}[recipe.heads]
        rows[b, t, j] = relu(merged) if recipe.relu == "after_heads" else merged
    return rows


def slow_features(recipe, features, gradient, prefix):
    features, gradient = features.double().numpy(), gradient.double().numpy()
    pairs, tokens, channels = features.shape
    pooled = {"cls": [0], "patches": range(prefix, tokens), "all": range(tokens)}[recipe.gradient_tokens]
    found = np.zeros((pairs, tokens))
    for b, j in np.ndindex(pairs, tokens):
        total = 0.0
        for c in range(channels):
            slopes = [relu(gradient[b, i, c]) if recipe.relu == "gradient" else gradient[b, i, c] for i in pooled]
            total += sum(slopes) / len(slopes) * features[b, j, c]
        found[b, j] = relu(total) if recipe.relu == "map" else total
    return found


@pytest.mark.parametrize("recipe", ATTENTION, ids=attention_id)
def test_attention_rows_follow_the_formula(recipe):
    attention, gradient = attention_pair()
    found = maps.attention_rows(recipe, attention, gradient)
    assert found.shape == (2, 4, 5)
    assert np.allclose(found, slow_rows(recipe, attention, gradient), atol=1e-6)


def test_plain_attention_needs_no_gradient():
    attention, gradient = attention_pair()
    assert torch.equal(
        maps.attention_rows(PLAIN[0], attention, None), maps.attention_rows(PLAIN[0], attention, gradient)
    )


def test_a_gradient_recipe_without_a_gradient_is_refused():
    with pytest.raises(RecipeError, match=r"weighting='attention\*gradient' needs a gradient"):
        maps.attention_rows(LAVIS, attention_pair()[0], None)


@pytest.mark.parametrize("relu_at", ["none", "map"])
def test_row_means_follow_the_formula(relu_at):
    rows = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    selections = [(0, 2), (1,), (0, 1, 2, 3)]
    wanted = np.zeros((2, 3, 5))
    for b, r, j in np.ndindex(wanted.shape):
        mean = sum(float(rows[b, t, j]) for t in selections[r]) / len(selections[r])
        wanted[b, r, j] = relu(mean) if relu_at == "map" else mean
    assert (wanted < 0).any() == (relu_at == "none")
    assert np.allclose(maps.row_means(LAVIS.replace(relu=relu_at), rows, selections), wanted, atol=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("recipe", TOKENS, ids=feature_id)
def test_channel_weights_follow_the_formula(recipe, prefix):
    features, gradient = feature_pair()
    if recipe.gradient_tokens == "cls" and not prefix:
        with pytest.raises(RecipeError, match=r"gradient_tokens='cls'.*no class token; choose 'patches' or 'all'"):
            maps.channel_weighted(recipe, features, gradient, prefix)
        return
    found = maps.channel_weighted(recipe, features, gradient, prefix)
    assert found.shape == (2, 7)
    assert np.allclose(found, slow_features(recipe, features, gradient, prefix), atol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "sum", "max"])
def test_layers_are_merged_cell_by_cell(rule):
    layers = list(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(4)))
    wanted = np.zeros((2, 5))
    for cell in np.ndindex(2, 5):
        values = [float(layer[cell]) for layer in layers]
        wanted[cell] = {"mean": sum(values) / 3, "sum": sum(values), "max": max(values)}[rule]
    assert np.allclose(maps.merge_layers(LAVIS.replace(layers="all", layer_rule=rule), layers), wanted, atol=1e-6)


@pytest.mark.parametrize("recipe", [LAVIS, recipes()["context-gradcam"].recipe], ids=["single", "shared"])
def test_one_layer_stays_as_it_is(recipe):
    layer = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(maps.merge_layers(recipe, [layer]), layer)


@pytest.mark.parametrize(
    ("normalize", "wanted"),
    [("minmax", [8 / 11, 10 / 11, 1, 0]), ("max", [1 / 7, 3 / 7, 4 / 7, -1]), ("none", [1, 3, 4, -7])],
)
def test_a_map_is_scaled_as_the_recipe_says(normalize, wanted):
    found = maps.normalised(LAVIS.replace(normalize=normalize), torch.tensor([1.0, 3.0, 4.0, -7.0]))
    assert np.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("normalize", "value", "wanted"),
    [("minmax", 0.0, 0.0), ("minmax", 3.0, 0.0), ("max", 0.0, 0.0), ("max", -3.0, -1.0), ("none", 3.0, 3.0)],
)
def test_a_constant_map_gives_no_nan(normalize, value, wanted):
    found = maps.normalised(LAVIS.replace(normalize=normalize), torch.full((2, 3), value))
    assert torch.equal(found, torch.full((2, 3), wanted))


@pytest.mark.parametrize("heads", HEADS)
def test_for_probabilities_relu_on_the_gradient_is_relu_before_heads(heads):
    attention, gradient = attention_pair()
    one, other = (maps.attention_rows(LAVIS.replace(relu=r, heads=heads), attention, gradient) for r in RELUS[1:3])
    assert torch.equal(one, other)


@pytest.mark.parametrize("heads", ["mean", "sum"])
def test_relu_before_heads_is_not_relu_after_heads(heads):
    attention, gradient = attention_pair()
    one, other = (maps.attention_rows(LAVIS.replace(relu=r, heads=heads), attention, gradient) for r in RELUS[2:4])
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("recipe", [r for r in ATTENTION if r.needs_gradient], ids=attention_id)
def test_rescaling_the_score_leaves_the_scaled_attention_map(recipe):
    attention, gradient = attention_pair()
    one, other = (
        maps.row_means(recipe, maps.attention_rows(recipe, attention, g), [range(4)])
        for g in (gradient, 100 * gradient)
    )
    assert torch.allclose(100 * one, other, atol=1e-4)
    assert torch.allclose(maps.normalised(recipe, one[0]), maps.normalised(recipe, other[0]), atol=1e-5)


@pytest.mark.parametrize("recipe", TOKENS, ids=feature_id)
def test_rescaling_the_score_leaves_the_scaled_feature_map(recipe):
    features, gradient = feature_pair()
    one, other = (maps.channel_weighted(recipe, features, g, 1) for g in (gradient, 100 * gradient))
    assert torch.allclose(100 * one, other, atol=1e-4)
    assert torch.allclose(maps.normalised(recipe, one[0]), maps.normalised(recipe, other[0]), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_finite_float32(dtype):
    attention, gradient = attention_pair(dtype)
    features, slope = feature_pair(dtype)
    plain = maps.attention_rows(PLAIN[0], attention, None)
    rows = maps.attention_rows(LAVIS, attention, gradient)
    weighted = maps.channel_weighted(FEATURES, features, slope, 1)
    for found, slow in (
        (plain, slow_rows(PLAIN[0], attention, gradient)),
        (rows, slow_rows(LAVIS, attention, gradient)),
        (weighted, slow_features(FEATURES, features, slope, 1)),
    ):
        assert found.dtype == torch.float32
        assert np.allclose(found, slow, atol=1e-6)


def test_inputs_are_left_alone():
    tensors = [*attention_pair(), *feature_pair()]
    before = [tensor.clone() for tensor in tensors]
    attention, gradient, features, slope = tensors
    for recipe in ATTENTION:
        rows = maps.attention_rows(recipe, attention, gradient)
        kept = rows.clone()
        maps.row_means(recipe, rows, [range(4)])
        assert torch.equal(rows, kept)
    for recipe in TOKENS:
        maps.channel_weighted(recipe, features, slope, 1)
    for normalize in ("none", "minmax", "max"):
        maps.normalised(LAVIS.replace(normalize=normalize), gradient)
    for rule in ("mean", "sum", "max"):
        maps.merge_layers(LAVIS.replace(layers="all", layer_rule=rule), [features, slope])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
