"""What verification says: of each kind of difference apart, how far the maps are, in which cell, and in which words."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import vlcam
from vlcam import scenes
from vlcam.differences import KINDS, Difference, by_kind, kind_of, leaves
from vlcam.filekind import foreign

SCENE = next(scenes.generate(1, seed=7))
PHRASE = SCENE.objects[0].phrase


@pytest.fixture(scope="module")
def vit():
    return vlcam.load("tiny-vit")


@pytest.fixture(scope="module")
def itm():
    return vlcam.load("tiny-blip-itm")


@pytest.fixture(scope="module")
def of_class(vit):
    return vit.explain(SCENE.image, target=3)


@pytest.fixture(scope="module")
def of_text(itm):
    return itm.explain(SCENE.image, SCENE.caption)


def told(explanation, path, value):
    """The explanation with another value in its provenance."""
    record = json.loads(json.dumps(explanation.provenance))
    place = record
    *above, last = path.split(".")
    for key in above:
        place = place[key]
    place[last] = value
    return replace(explanation, provenance=record)


# Kinds


@pytest.mark.parametrize(
    ("path", "value", "kind"),
    [
        ("model.weights_sha256", "0" * 64, "weights"),
        ("model.class", "mine.Model", "model"),
        ("model.adapter", "mine.Adapter", "model"),
        ("model.dtype", "bfloat16", "model"),
        ("model.id", "another", "model"),
        ("model.options.image_size", [9, 9], "model"),
        ("run.blocks", 99, "model"),
        ("run.prefix_tokens", ["cls", "register"], "model"),
        ("run.prefix_tokens", 2, "model"),
        ("image.steps", [], "preprocessing"),
        ("image.size", [1, 1], "preprocessing"),
        ("run.grid", [4, 16], "preprocessing"),
        ("run.layers", [0], "recipe"),
        ("run.asked", 7, "recipe"),
        ("run.class.label", "mine", "text"),
        ("versions.torch", "1.0", "versions"),
        ("versions.python", "2.7", "versions"),
    ],
)
def test_each_field_of_the_record_is_told_under_its_kind(of_class, vit, path, value, kind):
    outcome = told(of_class, path, value).verify(vit)
    assert outcome.differing == (kind,)
    (line,) = getattr(outcome, kind)
    assert line.startswith(f"{path}: was {value!r}, is ")
    assert outcome.differences == (line,)
    assert outcome.reproduced == (path not in ("run.layers", "run.grid"))


def test_the_text_is_told_as_text(of_text, itm):
    outcome = told(of_text, "text.ids", [1, 2]).verify(itm)
    assert outcome.differing == ("text",)
    assert outcome.text[0].startswith("text.ids: was [1, 2], is [")


def test_versions_alone_are_named_and_do_not_count(of_class, vit):
    outcome = told(of_class, "versions.torch", "1.0").verify(vit)
    assert outcome.identical
    now = of_class.provenance["versions"]["torch"]
    wanted = f"identical: largest difference 0\nversions differ:\n  versions.torch: was '1.0', is '{now}'"
    assert str(outcome) == wanted


def test_what_an_older_release_did_not_record_is_no_difference(of_class, vit):
    record = json.loads(json.dumps(of_class.provenance))
    for key in ("apart", "against", "asked", "modules", "windows", "pooled"):
        record["run"].pop(key)
    record.pop("answer")
    record["run"]["prefix_tokens"] = len(record["run"]["prefix_tokens"])
    record["run"]["dropped"] = [{**each, "why": "in other words"} for each in record["run"]["dropped"]]
    assert replace(of_class, provenance=record).verify(vit).differences == ()


def test_scores_and_maps_are_numbers(of_class, vit):
    scores = dict(of_class.scores)
    scores["class_logit"] = replace(scores["class_logit"], value=scores["class_logit"].value + 0.01)
    outcome = replace(of_class, scores=scores, tokens=of_class.tokens * np.float32(1.5)).verify(vit)
    assert not outcome.reproduced
    assert outcome.differing == ("numbers",)
    assert [line.split(":")[0] for line in outcome.numbers] == ["score class_logit", "map"]


def test_another_models_weights_code_and_numbers_are_told_apart(of_class):
    other = vlcam.load("tiny-vit")
    with torch.no_grad():
        next(other.adapter.module.parameters()).mul_(1.1)
    outcome = of_class.verify(other)
    assert not outcome.reproduced
    assert outcome.differing == ("weights", "numbers")
    outcome = of_class.verify(vlcam.load("tiny-beit"))
    assert {"weights", "model", "numbers"} <= set(outcome.differing)
    assert outcome.versions == ()
    assert outcome.text == ()


def test_every_kind_is_in_the_words_and_in_the_json(of_class, vit):
    outcome = told(told(of_class, "versions.torch", "1.0"), "model.id", "another").verify(vit)
    assert list(outcome.by_kind) == list(KINDS)
    assert outcome.to_dict()["differing"] == ["model", "versions"]
    assert outcome.to_dict()["by_kind"]["model"] == ["model.id: was 'another', is 'tiny-vit'"]
    assert outcome.to_dict()["differences"] == list(outcome.differences)
    assert "model differs:\n  model.id" in str(outcome)
    assert json.loads(json.dumps(outcome.to_dict())) == outcome.to_dict()


# How far, and where


def changed(array, place, value):
    found = array.copy()
    found[place] += np.float32(value)
    return found


def test_the_largest_difference_is_told_with_its_cell(of_class, vit):
    magnitude = float(np.abs(of_class.tokens).max())
    outcome = replace(of_class, tokens=changed(of_class.tokens, (2, 5), magnitude / 2)).verify(vit)
    scale = float(np.abs(changed(of_class.tokens, (2, 5), magnitude / 2)).max())
    assert outcome.largest == pytest.approx(magnitude / 2, rel=1e-5)
    assert outcome.relative == pytest.approx(magnitude / 2 / scale, rel=1e-5)
    assert outcome.where == "row 2, column 5"
    assert f"{outcome.relative:.3g} of the largest magnitude of the map, at row 2, column 5" in str(outcome)


def test_a_difference_in_a_words_map_names_the_word(of_text, itm):
    first, second, *rest = of_text.word_maps
    small = replace(second, tokens=changed(second.tokens, (7, 0), float(np.abs(second.tokens).max()) / 4))
    outcome = replace(of_text, word_maps=(first, small, *rest)).verify(itm)
    assert outcome.where == f"row 7, column 0 of the word {second.word!r}"
    assert not outcome.reproduced


def test_a_difference_in_a_map_over_the_text_names_the_token():
    model = vlcam.load("tiny-clip")
    made = model.explain(SCENE.image, "a red star and a blue circle", "chefer-clip-text")
    outcome = replace(made, tokens=changed(made.tokens, (0, 2), 1.0)).verify(model)
    text = made.provenance["text"]
    words = [piece for piece, special in zip(text["pieces"], text["special"], strict=True) if not special]
    assert outcome.where == f"token {words[2]!r}"


def test_maps_of_other_shapes_have_no_number(of_class, vit):
    outcome = replace(of_class, tokens=of_class.tokens[:4]).verify(vit)
    assert not outcome.reproduced
    assert np.isnan(outcome.largest)
    assert outcome.where == "a map of shape (8, 8) in place of (4, 8)"
    assert outcome.to_dict()["largest_difference"] is None
    assert outcome.to_dict()["largest_relative_difference"] is None


def test_within_the_tolerance_is_reproduced_with_its_cell(of_class, vit):
    outcome = replace(of_class, tokens=of_class.tokens * np.float32(1 + 3e-6)).verify(vit)
    assert (outcome.reproduced, outcome.identical, outcome.differences) == (True, False, ())
    assert 0 < outcome.relative < 1e-5
    assert outcome.where.startswith("row ")


# What cannot be verified


def test_a_callable_target_cannot_be_verified(vit, tmp_path, run):
    def first(output):
        return output[:, 0]

    made = vit.explain(SCENE.image, target=vlcam.targets.Custom(first))
    path = made.save(tmp_path / "custom.png")
    with pytest.raises(vlcam.InputError, match=r"is a Python callable.*call explain again with that callable"):
        vlcam.open(path).verify(vit)
    code, out, err = run("verify", path, "--json")
    assert (code, out) == (1, "")
    assert "it cannot be verified from the file" in err


def test_a_model_that_the_recipe_does_not_fit_is_told(of_text, vit):
    with pytest.raises(
        vlcam.InputError, match=r"cannot be computed with model 'tiny-vit'; it was made with 'tiny-blip"
    ):
        of_text.verify(vit)


# The command


@pytest.fixture(scope="module")
def files(of_class, of_text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    SCENE.image.save(folder / "scene.png")
    SCENE.image.rotate(90).save(folder / "turned.png")
    doubled = replace(of_class, tokens=of_class.tokens * 2)
    return {
        "class": of_class.save(folder / "class.png"),
        "text": of_text.save(folder / "text.png"),
        "lean": of_class.save(folder / "lean.png", embed_image=False),
        "false": doubled.save(folder / "false.png"),
        "scene": folder / "scene.png",
        "turned": folder / "turned.png",
    }


def test_several_files_are_verified_in_one_call_and_each_model_is_loaded_once(files, run, monkeypatch):
    loaded, load = [], vlcam.load
    monkeypatch.setattr(vlcam, "load", lambda name, **options: loaded.append(name) or load(name, **options))
    names = ("class", "text", "lean", "class")
    code, out, err = run("verify", *(files[name] for name in names), "--image", files["scene"], "--json")
    assert code == 0
    assert loaded == ["tiny-vit", "tiny-blip-itm"]
    found = json.loads(out)
    assert [each["file"] for each in found["verified"]] == [str(files[name]) for name in names[:3]]
    assert all(each["identical"] for each in found["verified"])
    assert found["failed"] == []
    assert len(re.findall(r"  identical +0 +0  nothing", err)) == 3


def test_one_of_several_that_fails_fails_the_call_and_stops_no_other(files, run, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(files["class"].read_bytes()[:-20])
    code, out, err = run("verify", files["false"], broken, files["lean"], files["class"], "--json")
    found = json.loads(out)
    assert code == 1
    assert [each["reproduced"] for each in found["verified"]] == [False, True]
    assert [path for path, _ in found["failed"]] == [str(broken), str(files["lean"])]
    assert "truncated or damaged" in found["failed"][0][1]
    assert "--image on the command line" in found["failed"][1][1]
    assert f"{files['lean']} is not verified: the file does not carry its image" in err
    assert "NOT reproduced" in err


def test_a_single_file_prints_what_differs(files, run):
    code, out, err = run("verify", files["false"], "--json")
    found = json.loads(out)
    assert code == 1
    assert found["differing"] == ["numbers"]
    assert found["largest_relative_difference"] == pytest.approx(0.5)
    assert re.fullmatch(r"row \d, column \d", found["largest_at"])
    assert "numbers differ:" in err


def test_the_image_that_belongs_to_a_file_is_found_among_several(files, run):
    code, _, err = run("verify", files["lean"], "--image", files["turned"], "--image", files["scene"])
    assert (code, err.startswith("identical")) == (0, True)
    code, _, err = run("verify", files["lean"], "--image", files["turned"])
    assert code == 1
    assert "another image: its SHA-256" in err


def test_a_model_that_moved_is_asked_for(of_class, files, run, tmp_path):
    path = told(of_class, "model.id", "my-model").save(tmp_path / "moved.png")
    code, _, err = run("verify", path)
    assert code == 1
    assert "the model of the record cannot be loaded: no model 'my-model'" in err
    assert "say where it is, --model" in err
    code, _, err = run("verify", path, "--model", "tiny-vit")
    assert code == 0
    assert "model.id: was 'my-model', is 'tiny-vit'" in err
    assert run("verify", files["class"], "--model", "nowhere")[0] == 2


# Files that are something else


def test_other_files_of_vlcam_are_told_for_what_they_are(itm, files, run, tmp_path):
    grounding = itm.ground(SCENE.image, SCENE.caption, empty="keep").save(tmp_path / "ground.json")
    record = tmp_path / "record.json"
    record.write_text(json.dumps(vlcam.open(files["class"]).record()))
    recipe = tmp_path / "recipe.json"
    recipe.write_text(vlcam.recipes()["legrad"].recipe.to_json())
    np.save(tmp_path / "map.npy", np.zeros((2, 2)))
    code, _, _ = run("sweep", "--model", "tiny-vit", "--image", files["scene"], "--recipe", "legrad", "--out", tmp_path)
    assert code == 0
    cases = {
        grounding: "the record of a grounding; the explanation of each of its phrases",
        record: "the record of an explanation as JSON, without its map",
        recipe: "a recipe; it says how a map is made",
        tmp_path / "map.npy": "a map as NumPy saves it",
        tmp_path / "scene-sweep.json": "the table of a sweep",
        tmp_path / "scene-sweep.png": "a figure that matplotlib drew, for example of a sweep",
        files["scene"]: "a PNG without an explanation; programs that re-save",
    }
    for path, words in cases.items():
        code, _, err = run("verify", path)
        assert code == 1, path
        assert words in err, path


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xd8\xff\xe0", "a JPEG picture"),
        (b'{"annotations": [], "images": []}', "boxes in the layout of COCO"),
        (b' [{"a": 1}]', "JSON"),
        (b"{broken", ""),
        (b"{\xff\xfe", ""),
        (b"", ""),
        (b"hello", ""),
        (b"<!DOCTYPE html><html>", "a page of HTML"),
    ],
)
def test_a_file_is_told_by_its_bytes(data, words):
    assert foreign(data) == words


# Comparing two


@pytest.fixture(scope="module")
def pair(vit, of_class):
    return of_class, vit.explain(SCENE.image, None, "raw-attention", target=3)


def test_a_comparison_names_the_fields_and_measures_the_maps(pair):
    one, other = pair
    found = one.compare(other)
    assert found.compared_on == "the token grid, 8 x 8"
    assert found.likeness == vlcam.likeness.likeness(one.tokens, other.tokens)
    fields = {each.field: (each.one, each.other) for each in found.differences["recipe"]}
    assert fields == {f"recipe.{k}": v for k, v in one.recipe.differences(other.recipe).items()}
    assert {kind for kind, each in found.differences.items() if each} == {"recipe"}
    assert "recipe.site: A 'F1', B 'F2'" in str(found)
    assert str(found).startswith("rank correlation ")
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_an_explanation_compared_with_itself_differs_in_nothing(of_class, of_text):
    for each in (of_class, of_text):
        found = each.compare(each)
        assert found.likeness.rank_correlation == pytest.approx(1)
        assert found.likeness.ssim == pytest.approx(1)
        assert found.likeness.top_overlap == 1
        assert str(found).endswith("\nno field differs")


def test_what_was_asked_and_what_ran_are_told_apart(vit, of_class):
    found = of_class.compare(vit.explain(SCENE.image, target=PHRASE)).differences
    assert [each.field for each in found["text"]] == ["run.class.index", "run.class.label"]
    assert {each.field for each in found["numbers"]} >= {"score class_logit"}
    found = of_class.compare(vlcam.load("tiny-swin").explain(SCENE.image, None, "pgc-gradcam", target=3)).differences
    assert "model.weights_sha256" in {each.field for each in found["weights"]}
    assert {"model.id", "model.class"} <= {each.field for each in found["model"]}
    assert {kind for kind, each in found.items() if each} <= {"recipe", "weights", "model", "numbers"}


def test_of_two_texts_only_the_texts_are_named(itm, of_text):
    found = of_text.compare(itm.explain(SCENE.image, "a blue star")).differences
    assert [(each.field, each.other) for each in found["text"]] == [("text.given", "a blue star")]
    phrase = of_text.compare(itm.explain(SCENE.image, SCENE.caption, phrase=PHRASE)).differences
    assert [each.field for each in phrase["text"]] == ["run.phrase", "run.span"]


def test_other_grids_are_compared_on_the_original_image(vit):
    one = vit.explain(SCENE.image, target=3)
    other = vlcam.load("tiny-clip").explain(SCENE.image, "a red star")
    assert other.tokens.shape != one.tokens.shape
    found = one.compare(other)
    assert found.compared_on == "heatmaps on the original image, 128 x 128 pixels"
    assert found.likeness == vlcam.likeness.likeness(one.heatmap, other.heatmap)
    assert "placement.model" in {each.field for each in found.differences["preprocessing"]}


def test_equal_grids_over_another_part_of_the_image_are_compared_on_the_original(of_class):
    moved = replace(of_class, placement=replace(of_class.placement, box=(0.0, 0.0, 64.0, 128.0)))
    found = of_class.compare(moved)
    assert found.compared_on.startswith("heatmaps on the original image")
    assert found.likeness == vlcam.likeness.likeness(of_class.heatmap, moved.heatmap)
    assert found.likeness.rank_correlation < 1
    assert [each.field for each in found.differences["preprocessing"]] == ["placement.box"]


def test_maps_over_a_text_are_compared_token_by_token():
    model = vlcam.load("tiny-clip")
    text = "a red star and a blue circle"
    one, other = (model.explain(SCENE.image, text, name) for name in ("chefer-clip-text", "grad-eclip-text"))
    found = one.compare(other)
    assert found.compared_on == f"the {one.tokens.shape[1]} tokens of the text"
    assert found.likeness.rank_correlation == vlcam.likeness.rank_correlation(one.tokens, other.tokens)
    assert found.to_dict()["ssim"] is None
    with pytest.raises(vlcam.InputError, match=r"maps over two texts, 'a red star and .*have no cell in common"):
        one.compare(model.explain(SCENE.image, "a star", "chefer-clip-text"))
    with pytest.raises(vlcam.InputError, match=r"'chefer-clip-text' over the text and 'clip-gradcam' over the image"):
        one.compare(model.explain(SCENE.image, text))


def test_maps_of_two_images_have_no_cell_in_common(vit, of_class):
    with pytest.raises(vlcam.InputError, match=r"explanations of two images, .*have no cell in common"):
        of_class.compare(vit.explain(SCENE.image.rotate(90), target=3))


def test_one_picture_in_two_files_is_one_image(vit, of_class, files):
    found = of_class.compare(vit.explain(files["scene"], target=3))
    assert found.likeness.rank_correlation == pytest.approx(1)
    assert [each.field for each in found.differences["image"]] == ["image.sha256"]
    assert found.differences["numbers"] == ()
    assert len(vlcam.gallery([of_class, vit.explain(files["scene"], target=3)]).axes) == 3
    with pytest.raises(vlcam.InputError, match="explanations of 2 images"):
        vlcam.gallery([of_class, vit.explain(files["turned"], target=3)])


def test_what_one_of_two_did_not_record_is_left_out(of_class):
    record = json.loads(json.dumps(of_class.provenance))
    for key in ("against", "class"):
        record["run"].pop(key)
    record["versions"].pop("pillow")
    record.pop("answer")
    older = replace(of_class, provenance=record)
    for found in (of_class.compare(older), older.compare(of_class)):
        assert not any(found.differences.values())


def test_the_share_of_the_strongest_is_passed_on(pair):
    found = pair[0].compare(pair[1], top=0.5)
    assert found.likeness.top == found.to_dict()["top"] == 0.5
    with pytest.raises(vlcam.InputError, match="share=2"):
        pair[0].compare(pair[1], top=2)


def test_the_command_compares_two_files_and_draws_both(files, pair, run, tmp_path):
    other = pair[1].save(tmp_path / "attention.png")
    figure = tmp_path / "both.png"
    call = ("compare", files["lean"], other, "--image", files["scene"], "--figure", figure, "--json")
    code, out, err = run(*call)
    assert code == 0
    found = json.loads(out)
    assert found["rank_correlation"] == pytest.approx(pair[0].compare(pair[1]).likeness.rank_correlation)
    assert found["files"] == {"figure": str(figure)}
    assert {"field": "recipe.site", "a": "F1", "b": "F2"} in found["differences"]["recipe"]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "on the token grid, 8 x 8" in err
    assert run(*call)[0] == 1
    assert run(*call, "--overwrite")[0] == 0


def test_the_command_refuses_two_images_and_an_ending_that_is_none(files, vit, run, tmp_path):
    turned = vit.explain(files["turned"], target=3).save(tmp_path / "turned.png")
    code, out, err = run("compare", files["class"], turned)
    assert (code, out) == (1, "")
    assert "explanations of two images" in err
    code, _, err = run("compare", files["class"], files["class"], "--figure", tmp_path / "both.nonsense")
    assert code == 1
    assert "nonsense" in err


# The parts


def test_kinds_by_the_longest_beginning_of_a_path():
    assert kind_of("model.weights_sha256") == "weights"
    assert kind_of("model.options.first_token") == "model"
    assert kind_of("run.class.index") == "text"
    assert kind_of("words.3.rows") == "text"
    assert kind_of("words.3.status") == "numbers"
    assert kind_of("status") == kind_of("anything") == "numbers"


def test_leaves_take_tables_apart_and_nothing_else():
    one, other = {"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}, "e": 0}
    found = list(leaves("run", one, other))
    assert [(each.field, each.one, each.other) for each in found] == [("run.a.b", 1, 2), ("run.e", None, 0)]
    assert [each.field for each in leaves("run", one, other, shared=True)] == ["run.a.b"]
    assert found[0].said("was", "is") == "run.a.b: was 1, is 2"
    sorted_ = by_kind([*found, Difference("weights", "w", 1, 2)])
    assert list(sorted_) == list(KINDS)
    assert [len(each) for each in sorted_.values()] == [2, 1, 0, 0, 0, 0, 0, 0]
