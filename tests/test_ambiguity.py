"""Ambiguity: the maps of one description, how far apart they are, and what would settle it."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from models import assert_same, state
from scipy.stats import spearmanr

import vlcam
from vlcam import cli, scenes
from vlcam.ambiguity import Ambiguity, fitting_recipes, statistics

NARROW = vlcam.Description(
    name="narrow", weighting=["gradcam", "attention*gradient"], target="class", scale=["logit", "probability"],
    heads=["mean", "none"], queries=["cls", "none"], map_axis=["keys", "none"], relu=["none", "map", "gradient"],
)  # fmt: skip


def wrapped(kind="vit", **changes):
    return vlcam.wrap(models.classifier(kind, **changes), name=f"random-{kind}")


@pytest.fixture(scope="module")
def scene():
    return next(scenes.generate(1, seed=7, start=3, objects=(3, 3)))


@pytest.fixture(scope="module")
def vit():
    return vlcam.load("tiny-vit")


@pytest.fixture(scope="module")
def last(vit, scene):
    return vit.ambiguity(scene.image, None, "gradcam-vit-last-layer", target=scene.objects[0].phrase)


@pytest.fixture(scope="module")
def narrow():
    return wrapped().ambiguity(models.pixels(), None, NARROW, target=1)


@pytest.fixture
def forwards():
    """Counts runs of a module: `count = forwards(module)`, then `len(count)`."""
    handles = []

    def watch(module):
        runs = []
        handles.append(module.register_forward_pre_hook(lambda *_: runs.append(1)))
        return runs

    yield watch
    for handle in handles:
        handle.remove()


# The members


def test_the_members_are_the_fitting_recipes_with_the_maps_of_a_sweep(narrow):
    model = wrapped()
    recipes = fitting_recipes(model, NARROW)
    assert [member.recipe for member in narrow.members] == recipes
    assert len(narrow) == len(recipes) > 50
    swept = model.sweep(models.pixels(), None, recipes, target=1, empty="keep")
    for member, exp in zip(narrow.members, swept, strict=True):
        assert member.status == exp.status
        np.testing.assert_array_equal(member.tokens, exp.tokens, err_msg=member.recipe.name)


def test_an_explanation_of_a_member_is_bit_for_bit_that_of_explain(narrow):
    model = wrapped()
    for member in narrow.shown[::17]:
        exp, own = model.explain(models.pixels(), None, member.recipe, target=1), member.explanation
        np.testing.assert_array_equal(own.tokens, exp.tokens)
        assert own.recipe == exp.recipe
        assert own.provenance["run"] == exp.provenance["run"]
        np.testing.assert_allclose(member.tokens, exp.tokens, atol=1e-5 * np.abs(exp.tokens).max())
    empty = next(member for member in narrow.members if member.status == "zero gradient")
    assert narrow.explanation(empty.number).status == "zero gradient"
    assert not empty.tokens.any()


@pytest.mark.parametrize("description", ["gradcam-vit-last-layer", "gradcam-vit"])
def test_all_maps_come_from_one_forward_and_one_backward_pass_per_scale(forwards, monkeypatch, description):
    module = models.classifier("vit")
    model = vlcam.wrap(module)
    runs, backward, own = forwards(module), [], torch.autograd.grad

    def counted(outputs, *args, **options):
        if outputs.ndim == 2:  # from the logits, not within a block
            backward.append(1)
        return own(outputs, *args, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    found = model.ambiguity(models.pixels(), None, description)
    str(found)
    assert len(runs) == 1
    assert len(backward) == 5
    found.members[0].explanation  # noqa: B018 - a pass of its own
    assert len(runs) == 2


def test_the_second_image_needs_no_planning(monkeypatch):
    model = wrapped()
    one = model.ambiguity(models.pixels(), None, NARROW, target=1)
    monkeypatch.setattr("vlcam.ambiguity.measure.fitting_jobs", None)
    other = model.ambiguity(models.pixels(3), None, NARROW, target=2)
    assert [member.recipe for member in one.members] == [member.recipe for member in other.members]
    assert (one.record["class"]["index"], other.record["class"]["index"]) == (1, 2)
    assert other.members[0].explanation.provenance["run"]["class"]["index"] == 2
    swept = model.sweep(models.pixels(3), None, [member.recipe for member in other.members], target=2, empty="keep")
    np.testing.assert_array_equal(other.members[5].tokens, swept[5].tokens)


def test_what_has_nothing_to_show_is_counted_by_its_reason(last):
    counted = Counter(member.status for member in last.members)
    assert last.statuses == dict(counted.most_common())
    assert counted["zero gradient"] > 0
    assert sum(last.statuses.values()) == len(last)
    assert len(last.shown) == counted["ok"]
    # Behind the last block's attention the patches of a ViT have no gradient.
    dead = [m for m in last.members if m.recipe.site in ("F4", "F5", "F6") and m.recipe.gradient_tokens == "patches"]
    assert {member.status for member in dead} == {"zero gradient"}
    for status, count in last.statuses.items():
        assert f"{count:>6} {'have a map' if status == 'ok' else f'have nothing to show: {status}'}" in str(last)


def test_a_map_that_overflows_is_named_and_the_others_stay():
    module = models.classifier("vit")
    with torch.no_grad():
        module.classifier.weight *= 1e25  # its gradient is finite, and the third power of that is not
    model = vlcam.wrap(module)
    description = NARROW.stating(site="F1", layers=1, scale="logit", weighting=["gradcam", "gradcam++"], heads=None)
    found = model.ambiguity(models.pixels(), None, description, target=1)
    by_weighting = {(member.recipe.weighting, member.status) for member in found.members}
    assert by_weighting == {("gradcam", "ok"), ("gradcam++", "not finite")}
    assert not any(member.tokens.any() for member in found.members if member.status == "not finite")
    with pytest.raises(vlcam.EvidenceError, match="is not finite"):
        model.explain(models.pixels(), None, found.members[-1].recipe, target=1)


@pytest.mark.parametrize("size", [(32, 48), (48, 32)])
def test_a_grid_that_is_not_square(size):
    model = vlcam.wrap(models.classifier("vit"), interpolate_pos_encoding=True)
    pixels = models.pixels(height=size[0], width=size[1])
    found = model.ambiguity(pixels, None, NARROW, target=1)
    assert found.grid == (size[0] // 8, size[1] // 8)
    assert found.mean.shape == found.spread.shape == found.grid
    assert found.mean_heatmap.shape == size
    member = found.shown[3]
    np.testing.assert_allclose(member.tokens, member.explanation.tokens, atol=1e-5 * np.abs(member.tokens).max())


def test_bfloat16_gives_the_maps_that_explain_gives():
    model = vlcam.wrap(models.classifier("vit").bfloat16(), name="random")
    found = model.ambiguity(models.pixels(), None, NARROW, target=1)
    assert found.record["model"]["dtype"] == "bfloat16"
    assert found.mean.dtype == np.float32
    recipes = [member.recipe for member in found.members]
    for member, exp in zip(
        found.members, model.sweep(models.pixels(), None, recipes, target=1, empty="keep"), strict=True
    ):
        np.testing.assert_array_equal(member.tokens, exp.tokens)


def test_the_model_is_left_as_found_also_after_an_error():
    module = models.classifier("vit").train()
    next(module.parameters()).requires_grad_(False)
    model, before = vlcam.wrap(module), state(module)
    model.ambiguity(models.pixels(), None, NARROW, target=1)
    assert_same(before, state(module))

    def broken(*_):
        raise RuntimeError("broken")

    handle = module.vit.layers[-1].register_forward_pre_hook(broken)
    before = state(module)
    with pytest.raises(RuntimeError, match="broken"):
        model.ambiguity(models.pixels(), None, NARROW, target=1)
    assert_same(before, state(module))
    handle.remove()


# Figures, against slow ones


def test_rank_correlations_are_spearmans_over_the_cells(narrow):
    maps = np.array([member.tokens.ravel().astype(np.float64) for member in narrow.shown])
    slow = spearmanr(maps, axis=1).statistic
    table = narrow.rank_correlations
    np.testing.assert_allclose(table, slow, atol=2e-6)
    pairs = slow[np.triu_indices(len(maps), 1)]
    found = narrow.correlations
    assert found.pairs == len(pairs) == found.counts.sum()
    assert found.median == pytest.approx(np.median(pairs), abs=1.1e-4)
    assert found.minimum == pytest.approx(pairs.min(), abs=2e-6)
    clear = np.abs(pairs) > 1e-6
    assert found.negative == pytest.approx((pairs[clear] < 0).mean(), abs=(~clear).mean() + 1e-9)
    one, other = narrow.most_different
    assert spearmanr(one.tokens.ravel(), other.tokens.ravel()).statistic == pytest.approx(pairs.min(), abs=1.1e-4)


def test_of_pairs_that_are_equally_far_apart_the_one_that_differs_least_is_shown(narrow):
    one, other = narrow.most_different
    tied = [(narrow.shown[a], narrow.shown[b]) for a, b in narrow.correlations.lowest]
    fewest = min(len(a.recipe.differences(b.recipe)) for a, b in tied)
    assert len(one.recipe.differences(other.recipe)) == fewest
    for field in narrow.fields:
        apart = getattr(one.recipe, field) != getattr(other.recipe, field)
        assert (f"{field} " in narrow.difference(one, other)) == apart


@pytest.mark.parametrize("count", [2, 3, 40, 600, 1100])
def test_pairs_are_counted_by_blocks_as_in_one_table(count):
    maps = np.random.default_rng(0).normal(size=(count, 30)).round(1).astype(np.float32)
    ranks = statistics.unit_ranks(maps)
    pairs = statistics.matrix(ranks)[np.triu_indices(count, 1)].astype(np.float64)
    found = statistics.correlations(ranks)
    assert found.pairs == len(pairs) == found.counts.sum()
    assert found.median == pytest.approx(np.median(pairs), abs=1e-4)
    assert found.minimum == pytest.approx(pairs.min(), abs=1e-6)
    exact = spearmanr(maps.astype(np.float64), axis=1).statistic
    exact = np.atleast_1d(exact)[np.triu_indices(count, 1)] if count > 2 else np.atleast_1d(exact)
    assert found.negative == pytest.approx((exact < -1e-9).mean(), abs=1e-9)  # many are 0, and some of these round down
    for first, second in found.lowest:
        assert first < second
        assert float(ranks[first] @ ranks[second]) <= pairs.min() + 1.1e-4


def test_cells_that_differ_by_little_keep_their_ranks():
    """Between 0 and 1 next to one large cell, small ones would round to the same number."""
    model = wrapped()
    found = model.ambiguity(models.pixels(), None, NARROW.stating(site="F1", layers=1), target=1)
    cells = found.shown[0].tokens.size
    steep = np.exp(np.linspace(0, 60, cells)).astype(np.float32).reshape(found.grid)
    members = [replace(found.shown[0], tokens=steep), replace(found.shown[1], tokens=-steep)]
    made = replace(found, members=tuple(members))
    assert len(np.unique(made.scaled[1])) < cells / 2
    assert made.correlations.minimum == pytest.approx(-1, abs=1e-6)
    np.testing.assert_allclose(made.rank_correlations, [[1, -1], [-1, 1]], atol=1e-6)


def test_the_median_is_not_below_the_minimum():
    ranks = statistics.unit_ranks(np.tile(np.arange(12, dtype=np.float32), (2, 1)))
    found = statistics.correlations(ranks)
    assert found.minimum <= found.median == pytest.approx(1, abs=1e-6)


def test_many_equal_maps_are_no_trouble():
    ranks = statistics.unit_ranks(np.tile(np.arange(12, dtype=np.float32), (1500, 1)))
    found = statistics.correlations(ranks)
    assert found.median == pytest.approx(1, abs=1e-4)
    assert len(found.lowest) <= 1000


def test_mean_and_spread_are_those_of_maps_from_0_to_1(narrow):
    scaled = []
    for member in narrow.shown:
        values = member.tokens.astype(np.float64)
        scaled.append((values - values.min()) / (values.max() - values.min()))
    np.testing.assert_allclose(narrow.scaled, scaled, atol=1e-6)
    np.testing.assert_allclose(narrow.mean, np.mean(scaled, 0), atol=1e-6)
    np.testing.assert_allclose(narrow.spread, np.std(scaled, 0), atol=1e-6)
    assert narrow.mean_heatmap.shape == narrow.spread_heatmap.shape == (32, 32)


def test_the_share_of_a_field_is_eta_squared(narrow):
    maps = narrow.scaled.reshape(len(narrow.shown), -1).astype(np.float64)
    mean = maps.mean(0)
    total = sum(float(((each - mean) ** 2).sum()) for each in maps)
    assert [share.field for share in narrow.shares] != []
    for share in narrow.shares:
        labels = [getattr(member.recipe, share.field) for member in narrow.shown]
        between = 0.0
        for label in set(labels):
            own = maps[[each == label for each in labels]]
            between += len(own) * float(((own.mean(0) - mean) ** 2).sum())
        assert share.share == pytest.approx(between / total, rel=1e-5)
        assert share.values == Counter(getattr(member.recipe, share.field) for member in narrow.members)
    assert [s.share for s in narrow.shares] == sorted((s.share for s in narrow.shares), reverse=True)


def test_a_field_alone_is_the_mean_over_pairs_that_differ_in_nothing_else(narrow):
    table, checked = narrow.rank_correlations, 0
    values = [tuple(getattr(member.recipe, field) for field in narrow.fields) for member in narrow.shown]
    alone = {field: [] for field in narrow.fields}
    for i, j in itertools.combinations(range(len(values)), 2):
        apart = [f for f, a, b in zip(narrow.fields, values[i], values[j], strict=True) if a != b]
        if len(apart) == 1:
            alone[apart[0]].append(float(table[i, j]))
    for share in narrow.shares:
        found = alone[share.field]
        assert share.pairs == len(found)
        assert (share.alone is None) == (not found)
        if found:
            assert share.alone == pytest.approx(np.mean(found), abs=1e-5)
            checked += 1
    assert checked >= 4


def test_what_is_left_on_average_is_what_the_share_leaves(narrow):
    maps = narrow.scaled.reshape(len(narrow.shown), -1).astype(np.float64)
    whole = maps.var(0).sum()
    for share in narrow.shares:
        labels = [getattr(member.recipe, share.field) for member in narrow.shown]
        for value, left in share.left.items():
            own = maps[[label == value for label in labels]]
            assert left == pytest.approx(own.var(0).sum() / whole, rel=1e-5, abs=1e-9)
        assert np.mean([share.left[label] for label in labels]) == pytest.approx(1 - share.share, rel=1e-5)
        assert set(share.left) == set(labels)


def test_groups_that_explain_all_or_nothing():
    maps = np.array([[0, 1], [0, 1], [1, 0], [1, 0]], np.float32)
    assert statistics.eta_squared(maps, ["a", "a", "b", "b"]) == pytest.approx(1)
    assert statistics.eta_squared(maps, ["a", "b", "a", "b"]) == pytest.approx(0)
    assert statistics.eta_squared(maps[:2], ["a", "b"]) == 0.0


def test_maps_that_look_alike_count_once(last):
    maps = np.random.default_rng(1).random((50, 9)).astype(np.float32)
    near = np.concatenate([maps, maps + 5e-5, maps[:10] + 3e-4])
    assert statistics.distinct(near[np.random.default_rng(2).permutation(len(near))]) in range(60, 71)
    assert statistics.distinct(np.concatenate([maps, maps])) == 50
    # Heads that are added in place of averaged give the same picture.
    assert 0 < last.distinct < 0.8 * len(last.shown)


def test_equal_ranks_are_shared_and_a_constant_map_has_none():
    ranks = statistics.unit_ranks(np.array([[1, 1, 2, 5], [3, 3, 3, 3]], np.float32))
    np.testing.assert_allclose(ranks[0], np.array([-1, -1, 0.5, 1.5]) / np.sqrt(4.5), atol=1e-6)
    assert not ranks[1].any()
    with pytest.raises(vlcam.InputError, match="1 maps to compare"):
        statistics.correlations(ranks[:1])


def test_extreme_values_are_scaled_without_overflow():
    maps = np.array([[-3e38, 0, 3e38], [1e-38, 2e-38, 3e-38]], np.float32)
    np.testing.assert_allclose(statistics.scaled(maps), [[0, 0.5, 1], [0, 0.5, 1]], atol=1e-6)


# Grids of several sizes


def test_maps_of_coarser_grids_are_laid_on_the_finest(scene):
    model = vlcam.load("tiny-swin")
    description = NARROW.stating(site="F1", weighting="gradcam", heads=None, queries=None, scale="logit")
    found = model.ambiguity(scene.image, None, description, target=scene.objects[0].phrase)
    sizes = {member.tokens.shape for member in found.shown}
    assert sizes == {(16, 16), (8, 8)}
    assert found.grid == (16, 16)
    member = next(member for member in found.shown if member.tokens.shape == (8, 8))
    own = torch.from_numpy(member.tokens)[None, None]
    laid = torch.nn.functional.interpolate(own, (16, 16), mode="bilinear", align_corners=False)[0, 0].numpy()
    laid = (laid - laid.min()) / (laid.max() - laid.min())
    np.testing.assert_allclose(found.scaled[found.shown.index(member)], laid, atol=1e-5)


# What to state


def test_the_sentence_is_of_the_field_with_the_largest_share(last):
    first = last.shares[0]
    advice = last.advice
    assert (advice.field, advice.share) == (first.field, first.share)
    assert "___" in advice.sentence
    assert {value: count for value, (_, count) in advice.choices.items()} == dict(first.values)
    assert sum(count for _, count in advice.choices.values()) == len(last)
    value, (words, count) = next(iter(advice.choices.items()))
    assert words in advice.filled(value)
    assert "___" not in advice.filled(value)
    assert f"{words}: {count}" in last.sentence


def test_what_remains_after_stating_a_field_is_what_was_said(vit, last):
    for share in last.shares[:2]:
        for value, count in share.values.items():
            assert len(fitting_recipes(vit, last.after(**{share.field: value}))) == count


@pytest.mark.filterwarnings("error")
def test_where_nothing_moves_the_map_nothing_is_advised(vit, scene):
    one = vlcam.Description.of(vlcam.recipes()["lavis-itm"].recipe).stating(
        name="heads", site="F2", stream="vision", target="class", queries="cls", layers="last", exclude=[["cls"]],
        heads=["mean", "sum"], weighting="attention*gradient",
    )  # fmt: skip
    found = vit.ambiguity(scene.image, description=one)  # four heads: adding them is four times their mean, exactly
    assert (len(found.shown), found.distinct) == (2, 1)
    assert found.advice is None
    assert found.sentence == "What is left open does not move this map."
    pytest.importorskip("matplotlib")
    assert found._repr_png_().startswith(b"\x89PNG")


def test_without_two_maps_no_field_has_a_share(vit, scene):
    last = vlcam.descriptions()["gradcam-vit-last-layer"].description
    found = vit.ambiguity(scene.image, description=last.stating(site="F6", gradient_tokens="patches"))
    assert found.statuses == {"zero gradient": len(found)}
    assert found.sentence.startswith("No two of the recipes have a map")
    assert "share of the variance" not in str(found)
    assert {share["share"] for share in found.to_dict()["shares"]} == {None}


def test_stating_what_no_member_has_is_refused(last):
    with pytest.raises(vlcam.RecipeError, match="weighting='layercam': no member has it; there are"):
        last.after(weighting="layercam")


def test_nothing_is_left_open_by_one_recipe(vit, scene):
    found = vit.ambiguity(scene.image, None, "pytorch-grad-cam-default", target=scene.objects[0].phrase)
    assert len(found) == len(found.shown) == found.distinct == 1
    assert found.shares == ()
    assert found.advice is None
    assert found.sentence == "Nothing is left open."
    assert found.variants == 1
    assert "1 recipe fits" in str(found)
    assert not found.spread.any()
    with pytest.raises(vlcam.EvidenceError, match="1 of 1 recipes have a map, and 2 are needed"):
        found.correlations  # noqa: B018
    assert found.to_dict()["rank_correlations"] is None
    assert found._repr_png_() is None


def test_heatmaps_of_each_token_map_are_counted(vit, scene):
    description = vlcam.descriptions()["pytorch-grad-cam-default"].description
    for stated, variants in (
        ({"upsample": None, "normalize": None}, 12),
        ({"upsample": None}, 3),
        ({"upsample": ["bilinear", "nearest"], "normalize": None}, 8),
    ):
        found = vit.ambiguity(scene.image, None, description.stating(**stated))
        assert (len(found), found.variants) == (1, variants)


# What is not varied


def test_what_is_held_is_said_everywhere(last):
    assert {"attention", "departures", "discard", "gradient_path", "upsample", "normalize"} <= set(last.held)
    assert not set(last.held) & set(last.description.stated)
    record, printed = last.to_dict(), str(last)
    assert record["held"] == last.held
    for field, words in last.held.items():
        assert f"{field} {words}" in printed
    assert f"stated: {last.description.in_short}" in printed
    assert vlcam.Description.of(last.members[0].recipe).stating(name="one").open == ()
    for member in last.members:
        assert (member.recipe.attention, member.recipe.discard, member.recipe.departures) == ("own", 0.0, ())


# What is refused


def test_a_model_that_cannot_meet_the_description_says_what_stands_in_the_way(vit, scene):
    with pytest.raises(vlcam.RecipeError, match=r"fits 'gradcam-clip' .*, and some would without target=contrastive"):
        vit.ambiguity(scene.image, None, "gradcam-clip")
    with pytest.raises(vlcam.RecipeError, match="none would if one stated field were left open"):
        vit.ambiguity(scene.image, None, vlcam.Description(stream="fusion", target="itm", site="CROSS"))


def test_a_target_that_the_description_contradicts_is_refused(vit, scene):
    target = vlcam.targets.Class(1, scale="probability")
    with pytest.raises(vlcam.RecipeError, match="means scale='probability', and 'narrow' states scale logit"):
        vit.ambiguity(scene.image, None, NARROW.stating(scale="logit"), target=target)


def test_several_images_or_texts_are_refused(vit, scene):
    with pytest.raises(vlcam.InputError, match="one image with one text or class"):
        vit.ambiguity([scene.image, scene.image], None, NARROW)
    with pytest.raises(vlcam.InputError, match="one image with one text or class"):
        vit.ambiguity(scene.image, None, NARROW, target=[1, 2])


def test_maps_over_the_image_and_over_words_are_not_compared(scene):
    model = vlcam.load("tiny-clip")
    stated = {"site": "F1", "weighting": "gradcam", "layers": "last", "scale": "cosine"}
    with pytest.raises(vlcam.RecipeError, match="maps over the image and maps over words"):
        model.ambiguity(scene.image, scene.caption, vlcam.Description(stream=["vision", "text"], **stated))
    words = vlcam.Description(stream="text", **stated)
    with pytest.raises(vlcam.RecipeError, match=r"over the words of different texts; state prompt='\.\.\.'"):
        model.ambiguity(scene.image, scene.caption, words, phrase=scene.objects[0].phrase)


def test_an_occurrence_of_no_phrase_is_refused(vit, scene):
    with pytest.raises(vlcam.RecipeError, match="occurrence=2: there is no phrase"):
        vit.ambiguity(scene.image, None, NARROW, occurrence=2)


def test_an_explanation_of_a_model_or_an_image_that_has_changed_is_refused(tmp_path):
    model, path = vlcam.load("tiny-vit"), tmp_path / "photo.png"
    models.photo().save(path)
    description = NARROW.stating(site="F1", layers=1, scale="logit")
    found = model.ambiguity(path, None, description, target=1)
    member = found.shown[0]
    np.testing.assert_array_equal(member.explanation.tokens, member.tokens)
    models.photo().transpose(0).save(path)
    with pytest.raises(vlcam.EvidenceError, match="the image is not that of the maps any more"):
        member.explanation  # noqa: B018
    models.photo().save(path)
    with torch.no_grad():
        model.adapter.module.classifier.weight *= 2
    with pytest.raises(vlcam.EvidenceError, match=r"the model is not that of the maps any more \(weights_sha256\)"):
        member.explanation  # noqa: B018


def test_too_many_maps_for_one_table(narrow, monkeypatch):
    monkeypatch.setattr("vlcam.ambiguity.result.LARGEST", 10)
    with pytest.raises(vlcam.InputError, match="it is made for 10 maps at most"):
        narrow.rank_correlations  # noqa: B018


# Targets


def test_a_scale_that_the_target_names_counts_as_stated(vit, scene):
    target = vlcam.targets.Class(1, scale="probability")
    found = vit.ambiguity(scene.image, None, NARROW, target=target)
    assert {member.recipe.scale for member in found.members} == {"probability"}
    assert found.record["class"]["index"] == 1


def test_recipes_without_a_target_stay_when_one_is_named(vit, scene):
    found = vit.ambiguity(scene.image, None, "attention-last-layer", target=scene.objects[0].phrase)
    assert {member.recipe.target for member in found.members} == {"none"}
    assert found.subject == f"class {vit.adapter.labels.index(scene.objects[0].phrase)}: {scene.objects[0].phrase}"


def test_a_target_of_ones_own(vit, scene):
    found = vit.ambiguity(scene.image, None, vlcam.Description(site="F1", layers=3), target=lambda z: z[:, 1] - z[:, 2])
    targets = {member.recipe.target for member in found.members}
    assert targets == {"custom", "none"}
    exp = vit.explain(scene.image, None, found.shown[0].recipe, target=lambda z: z[:, 1] - z[:, 2])
    np.testing.assert_allclose(found.shown[0].tokens, exp.tokens, atol=1e-5 * np.abs(exp.tokens).max())


def test_a_target_of_ones_own_for_one_of_several_equal_phrases(embedded, scene):
    phrase = scene.objects[0].phrase
    text = f"{phrase} and {phrase}"
    description = vlcam.Description(site="CROSS", layers=0, weighting="attention*gradient", relu="none", heads="mean")
    how = {"phrase": phrase, "target": lambda z: z[:, 1]}
    one, two = (embedded.ambiguity(scene.image, text, description, occurrence=n, **how) for n in (1, 2))
    assert (one.record["occurrence"], two.record["occurrence"]) == (1, 2)
    assert np.abs(one.members[0].tokens - two.members[0].tokens).max() > 0
    exp = embedded.explain(scene.image, text, two.members[0].recipe, occurrence=2, **how)
    np.testing.assert_array_equal(two.members[0].tokens, exp.tokens)
    assert one.record["custom"] == "test_a_target_of_ones_own_for_one_of_several_equal_phrases.<locals>.<lambda>"


def test_only_scores_that_run_cross_attention_are_tried_there(embedded, scene):
    found = embedded.ambiguity(scene.image, scene.caption, vlcam.Description(site="CROSS", layers=0, heads="mean"))
    assert {member.recipe.target for member in found.members} == {"itm", "none"}
    every = embedded.ambiguity(scene.image, scene.caption, vlcam.Description(site="F1", layers=0, weighting="gradcam"))
    assert {member.recipe.target for member in every.members} == {"itm", "contrastive"}


def test_maps_over_words(scene):
    model = vlcam.load("tiny-clip")
    description = vlcam.Description(stream="text", layers="last", scale="cosine", weighting=["gradcam", "hirescam"])
    found = model.ambiguity(scene.image, scene.caption, description)
    swept = model.sweep(scene.image, scene.caption, [member.recipe for member in found.members], empty="keep")
    for member, exp in zip(found.members, swept, strict=True):
        np.testing.assert_array_equal(member.tokens, exp.tokens)
    assert found.of_text
    assert found.mean.shape == found.grid == swept[0].tokens.shape
    assert found.sentence.startswith("Add: ")
    assert found.to_dict()["grid"] == list(found.grid)
    with pytest.raises(vlcam.InputError, match="over the words of the text, which have no place on the image"):
        found.figure()
    assert found._repr_png_() is None


def test_a_text_that_is_its_own_other_is_one_text(scene):
    model = vlcam.load("tiny-clip")
    description = vlcam.descriptions()["gradcam-clip"].description.stating(site="F1", layers="last", relu="map")
    one = model.ambiguity(scene.image, "a red star", description, against=["a red star"])
    assert one.comparing > 0
    assert {member.recipe.scale for member in one.members} == {"cosine", "logit"}


def test_one_text_leaves_out_what_compares_texts_and_counts_it(scene):
    model = vlcam.load("tiny-clip")
    description = vlcam.descriptions()["gradcam-clip"].description.stating(site="F1", layers="last", relu="map")
    one = model.ambiguity(scene.image, "a red star", description)
    assert {member.recipe.scale for member in one.members} == {"cosine", "logit"}
    several = model.ambiguity(scene.image, "a red star", description, against=["a blue star"])
    assert several.comparing == 0
    assert len(several) == len(one) + one.comparing
    assert f"{one.comparing:>6} more compare the text with others" in str(one)
    assert one.subject == "a red star"
    with pytest.raises(vlcam.RecipeError, match="compares the text with others, and there is one"):
        model.ambiguity(scene.image, "a red star", description.stating(scale="margin"))


def test_a_phrase_is_read_in_both_ways_by_a_contrastive_model(scene):
    model = vlcam.load("tiny-clip")
    phrase = scene.objects[0].phrase
    description = vlcam.descriptions()["gradcam-clip"].description.stating(site="F1", layers="last", scale="logit")
    found = model.ambiguity(scene.image, scene.caption, description, phrase=phrase)
    assert {member.recipe.prompt for member in found.members} == {"phrase", "in_place"}
    assert found.subject == phrase
    for prompt in ("phrase", "in_place"):
        member = next(each for each in found.shown if each.recipe.prompt == prompt)
        exp = model.explain(scene.image, scene.caption, member.recipe, phrase=phrase)
        np.testing.assert_allclose(member.tokens, exp.tokens, atol=1e-4 * np.abs(exp.tokens).max())


def test_cross_attention_of_a_phrase(embedded, scene, forwards):
    runs = forwards(embedded.adapter.module.text_encoder)
    phrase = scene.objects[0].phrase
    found = embedded.ambiguity(scene.image, scene.caption, "gradcam-cross-attention", phrase=phrase)
    assert len(runs) == 1
    assert {member.recipe.queries for member in found.members} == {"phrase"}
    member = found.shown[-1]
    exp = embedded.explain(scene.image, scene.caption, member.recipe, phrase=phrase)
    np.testing.assert_allclose(member.tokens, exp.tokens, atol=1e-5 * np.abs(exp.tokens).max())


# On record


def test_the_record_is_json_and_names_every_member(narrow, tmp_path):
    path = narrow.save(tmp_path / "new" / "ambiguity.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record == json.loads(json.dumps(narrow.to_dict()))
    assert vlcam.Description.from_dict(record["description"]) == narrow.description
    assert record["recipes"]["fit"] == len(record["members"]) == len(narrow)
    assert record["recipes"]["statuses"] == narrow.statuses
    for member, line in zip(narrow.members, record["members"], strict=True):
        fields = {field: line[field] for field in narrow.fields}
        whole = {**record["common"], **fields, "name": ""}
        assert vlcam.Recipe.from_dict(whole) == member.recipe
        assert line["fingerprint"] == member.recipe.fingerprint
    assert sum(record["rank_correlations"]["counts"]) == narrow.correlations.pairs
    np.testing.assert_allclose(record["mean"], narrow.mean, atol=1e-6)
    assert [each["field"] for each in record["shares"]] == [share.field for share in narrow.shares]
    assert record["model"]["id"] == "random-vit"
    assert record["class"]["index"] == 1
    with pytest.raises(vlcam.FileError, match="exists already"):
        narrow.save(path)
    narrow.save(path, overwrite=True)
    with pytest.raises(vlcam.FileError, match=r"an ambiguity is saved as JSON; give a name that ends in \.json"):
        narrow.save(tmp_path / "ambiguity.png")


def test_it_prints_on_one_screen(last):
    lines = str(last).splitlines()
    assert len(lines) < 30
    assert lines[0].startswith("gradcam-vit-last-layer: 1095 recipes fit")
    assert any(line.startswith("rank correlation of two of them: median") for line in lines)
    for share in last.shares:
        assert any(line.startswith(f"  {share.field} ") for line in lines)
    assert lines[-1] == last.sentence
    assert repr(last) == f"<Ambiguity of 'gradcam-vit-last-layer': 1095 recipes, {len(last.shown)} with a map>"


def test_the_figure_shows_image_mean_spread_extremes_shares_and_correlations(last):
    pytest.importorskip("matplotlib")
    figure = last.figure()
    figure.canvas.draw()
    below = figure.get_supxlabel()
    for part in (last.sentence, last.description.in_short, "attention own; gradient_path full"):
        assert "".join(part.split()) in "".join(below.split())
    titles = [ax.get_title() for ax in figure.findobj(lambda each: hasattr(each, "get_title"))]
    for part in ("image", "mean of", "standard deviation", "least alike, correlation", "share of the variance"):
        assert any(part in title for title in titles), part
    ticks = [text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text"))]
    assert {share.field for share in last.shares} <= set(ticks)
    assert last._repr_png_().startswith(b"\x89PNG")


# The command line


@pytest.fixture
def run(capsys):
    """Run a command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        code = 0
        try:
            cli.main(["ambiguity", *map(str, arguments)])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


@pytest.fixture
def photo(scene, tmp_path):
    path = tmp_path / "scene.png"
    scene.image.save(path)
    return path


def test_the_command_writes_a_figure_and_a_record(run, photo, tmp_path, scene):
    pytest.importorskip("matplotlib")
    phrase = scene.objects[0].phrase
    how = ("--model", "tiny-vit", "--image", photo, "--target", phrase, "--description", "gradcam-vit-last-layer")
    code, out, err = run(*how, "--state", "scale=logit", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert sorted(file.suffix for file in (tmp_path / "out").iterdir()) == [".json", ".png"]
    assert json.loads((tmp_path / "out" / printed["files"]["record"].rpartition("/")[2]).read_text()) == {
        key: value for key, value in printed.items() if key != "files"
    }
    assert printed["recipes"]["fit"] == 1095 // 5
    assert "219 recipes fit" in err
    code, _, err = run(*how, "--state", "scale=logit", "--out", tmp_path / "out")
    assert code == 1
    assert "exists already" in err


@pytest.mark.parametrize("ending", ["toml", "json", "yaml", "yml"])
def test_a_dry_run_counts_and_lists_without_an_image(run, tmp_path, ending):
    file, mine = tmp_path / f"mine.{ending}", vlcam.Description(name="mine", weighting="attention", layers=0)
    file.write_text(getattr(mine, f"to_{ending.replace('yml', 'yaml')}")(), encoding="utf-8")
    code, out, err = run("--model", "tiny-vit", "--description", file, "--dry-run", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["fit"] == len(printed["recipes"]) == 20
    assert "20 recipes of tiny-vit fit" in err
    states = ("--state", "layers=0", "--state", "layers=[1]", "--state", "heads=mean", "--open", "weighting")
    _, out, _ = run("--model", "tiny-vit", "--description", file, "--dry-run", "--json", *states)
    description = vlcam.Description.from_dict(json.loads(out)["description"])
    assert dict(description.stated) == {"layers": ((0,), (1,)), "heads": ("mean",)}


def test_a_dry_run_counts_what_the_run_would(run):
    how = ("--model", "tiny-blip-itm", "--dry-run", "--json", "--state", "site=F1", "--state", "layers=0")
    _, out, _ = run(*how, "--description", "gradcam-vit", "--open", "target")
    _, narrower, _ = run(*how, "--description", "gradcam-vit", "--open", "target", "--target", "itm")
    every, own = json.loads(out), json.loads(narrower)
    assert {recipe["target"] for recipe in every["recipes"]} == {"itm", "contrastive"}
    expected = [recipe["fingerprint"] for recipe in every["recipes"] if recipe["target"] == "itm"]
    assert [recipe["fingerprint"] for recipe in own["recipes"]] == expected


def test_a_dry_run_that_finds_nothing_says_why(run):
    code, _, err = run("--model", "tiny-vit", "--dry-run", "--state", "queries=registers")
    assert code == 0
    assert "0 recipes of tiny-vit fit" in err
    assert "some would without queries=registers" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--description", "nothing"), "no description 'nothing'; there are"),
        (("--description", "nothing.toml"), "no such file"),
        (("--description", __file__), "give one that ends in .toml, .json, .yaml, .yml"),
        (("--state", "layers"), "give FIELD=VALUE"),
        (("--state", "sight=F1"), "no field 'sight'"),
        (("--state", "heads=mean", "--open", "heads"), "give one of them"),
        ((), "--image and --out: give both"),
    ],
)
def test_a_wrong_command_says_so(run, arguments, message):
    code, _, err = run("--model", "tiny-vit", *arguments)
    assert code == 2
    assert message in err


def test_values_of_a_state_are_told_from_lists(run):
    states = ("--state", "exclude=cls", "--state", 'exclude=["cls", "registers"]', "--state", "discard=0")
    _, out, _ = run("--model", "tiny-vit", "--dry-run", "--json", *states, "--state", "layers=5")
    description = vlcam.Description.from_dict(json.loads(out)["description"])
    assert description.stated["exclude"] == (("cls",), ("cls", "registers"))
    assert description.stated["discard"] == (0.0,)
    assert description.stated["layers"] == ((5,),)


def test_it_is_a_public_name():
    assert vlcam.Ambiguity is Ambiguity


# What the page says


def test_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "ambiguity.md").read_text(encoding="utf-8")
    code, shown, toml = (
        re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        for language in ("python", "text", "toml")
    )
    namespace = {}
    for block in code:
        exec(compile(block, "ambiguity.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert printed.startswith(shown[0])
    assert (tmp_path / "ambiguity.png").is_file()
    assert toml == [namespace["mine"].to_toml()]
    assert "True\n()\n" in printed
    assert f"{statistics.BINS:,} equal steps" in page
    for name, preset in vlcam.descriptions().items():
        assert f'| `{name}` | "{preset.sentence}" |' in page
    for key in namespace["found"].to_dict():
        assert f"`{key}`" in page, key
