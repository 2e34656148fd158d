"""The command line: what it writes, prints where, and with which exit code it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vlcam
from vlcam import cli, scenes


@pytest.fixture(scope="module")
def scene():
    return next(scenes.generate(1, seed=7))


@pytest.fixture
def photo(scene, tmp_path):
    path = tmp_path / "scene.png"
    scene.image.save(path)
    return path


def explain(photo, scene, out, *more):
    return ("explain", "--model", "tiny-blip-itm", "--image", photo, "--text", scene.caption, "--out", out, *more)


def test_explain_writes_picture_record_and_map(run, photo, scene, tmp_path):
    phrase = scene.objects[0].phrase
    code, out, err = run(*explain(photo, scene, tmp_path / "new" / "folder", "--phrase", phrase, "--json", "--words"))
    assert code == 0
    printed = json.loads(out)
    assert printed["provenance"]["run"]["phrase"] == phrase
    exp = vlcam.open(printed["files"]["explanation"])
    np.testing.assert_array_equal(np.load(printed["files"]["map"]), exp.tokens)
    assert json.loads(Path(printed["files"]["record"]).read_text()) == exp.record()
    assert sum(key.startswith("word ") for key in printed["files"]) == len(exp.words)
    assert "itm_probability" in err


def test_without_json_stdout_stays_empty(run, photo, scene, tmp_path):
    code, out, err = run(*explain(photo, scene, tmp_path / "o"))
    assert (code, out) == (0, "")
    assert "explanation:" in err


def test_a_file_in_place_of_the_folder_is_refused(run, photo, scene):
    code, _, err = run(*explain(photo, scene, photo))
    assert code == 1
    assert "cannot be made a folder" in err


def test_images_of_one_name_are_refused(run, photo, scene, tmp_path):
    code, _, err = run(*explain(photo, scene, tmp_path / "o", "--image", tmp_path / "other" / "scene.png"))
    assert code == 1
    assert "two images are called 'scene'" in err


def test_layers_can_be_merged(run, photo, scene, tmp_path):
    more = ("--layer", "0", "--layer", "1", "--layer-rule", "mean", "--json")
    code, out, _ = run(*explain(photo, scene, tmp_path / "o", *more))
    assert code == 0
    assert json.loads(out)["provenance"]["run"]["layers"] == [0, 1]


def test_existing_results_are_kept_unless_told(run, photo, scene, tmp_path):
    assert run(*explain(photo, scene, tmp_path / "o"))[0] == 0
    code, _, err = run(*explain(photo, scene, tmp_path / "o"))
    assert code == 1
    assert "exists already" in err
    assert run(*explain(photo, scene, tmp_path / "o", "--overwrite"))[0] == 0


def test_one_bad_image_does_not_stop_the_others(run, photo, scene, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    code, out, err = run(*explain(photo, scene, tmp_path / "o", "--image", bad, "--json"))
    assert code == 1
    printed = json.loads(out)
    assert [item["image"] for item in printed["explained"]] == [str(photo)]
    assert printed["failed"][0][0] == str(bad)
    assert "0 bytes" in err


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--recipe", "gradcam"), 2, "there are 'lavis-itm'"),
        (("--layer", "9"), 2, "has blocks 0 to"),
        (("--target", "caption"), 2, "target='caption'"),
        (("--device-name", "x"), 2, "No such option"),
        (("--phrase", "pink elephant"), 1, "is not in the text"),
        (("--option", "first_token=dec"), 1, "choose from 'enc', 'cls'"),
        (("--option", "first_token"), 2, "give NAME=VALUE"),
        (("--option", "colour=1"), 2, "has no option 'colour'"),
        (("--dtype", "int8"), 2, "choose from float32"),
        (("--recipe", "nowhere.toml"), 2, "no such file"),
    ],
)
def test_refusals_are_one_line_with_the_right_exit_code(run, photo, scene, tmp_path, more, code, words):
    found, out, err = run(*explain(photo, scene, tmp_path / "o", *more))
    assert found == code
    assert words in err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("model", ["tiny-vit", "tiny-beit"])
def test_a_class_is_explained_by_label_or_index_and_verifies(run, photo, tmp_path, model):
    labels = vlcam.load(model).adapter.labels
    for target, chosen in ((labels[1], "as given"), ("1", "as given"), (None, "highest logit")):
        out = tmp_path / str(target)
        given = () if target is None else ("--target", target)
        code, printed, err = run("explain", "--model", model, "--image", photo, "--out", out, *given, "--json")
        assert code == 0
        found = json.loads(printed)
        explained = found["provenance"]["run"]["class"]
        assert explained["chosen"] == chosen
        assert explained["label"] == labels[explained["index"]]
        assert target is None or explained["index"] == 1
        assert f"class {explained['index']}: {explained['label']}" in err
        assert run("verify", found["files"]["explanation"])[0] == 0


def test_an_answer_is_given_or_the_models_own_and_verifies(run, photo, scene, tmp_path):
    colour, shape = scene.objects[0].phrase.split()
    question = ("--text", f"what colour is the {shape}?")
    for more, written in ((("--answer", "blue" if colour == "red" else "red"), False), ((), True)):
        out = tmp_path / str(written)
        found, printed, _ = run(
            "explain", "--model", "tiny-blip-vqa", "--image", photo, *question, *more, "--out", out, "--json"
        )
        assert found == 0
        record = json.loads(printed)
        answer = record["provenance"]["answer"]
        assert (answer["written"], answer["given"]) == (written, colour if written else more[1])
        assert run("verify", record["files"]["explanation"])[0] == 0


def test_a_model_that_takes_no_text_and_a_class_that_is_not_there_are_refused(run, photo, tmp_path):
    command = ("explain", "--model", "tiny-vit", "--image", photo, "--out", tmp_path / "o")
    for more, code, words in (
        (("--text", "a red circle"), 1, "this model takes no text"),
        (("--target", "zebra crossing"), 2, "no class 'zebra crossing'"),
        (("--target", "999"), 2, "no class 999"),
        (("--target", "itm"), 2, "it offers 'class'"),
    ):
        found, out, err = run(*command, *more)
        assert (found, out) == (code, "")
        assert words in err


def test_debug_shows_the_error_itself(scene, tmp_path):
    with pytest.raises(vlcam.InputError):
        cli.main([str(part) for part in (*explain(tmp_path / "no.png", scene, tmp_path / "o"), "--debug")])


def test_a_recipe_file_is_read(run, photo, scene, tmp_path):
    recipe = vlcam.recipes()["lavis-itm"].recipe.replace(name="mine", layers=(0,), relu="none")
    for ending, text in ((".toml", recipe.to_toml()), (".json", recipe.to_json())):
        file = tmp_path / f"mine{ending}"
        file.write_text(text)
        code, out, _ = run(*explain(photo, scene, tmp_path / ending, "--recipe", file, "--json"))
        assert code == 0
        assert json.loads(out)["recipe"]["fingerprint"] == recipe.fingerprint


def test_verify_reproduces_a_saved_file(run, photo, scene, tmp_path):
    _, out, _ = run(*explain(photo, scene, tmp_path / "o", "--json"))
    file = json.loads(out)["files"]["explanation"]
    code, out, err = run("verify", file, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["file"] == file
    assert (found["reproduced"], found["identical"], found["largest_difference"]) == (True, True, 0.0)
    assert found["differences"] == found["differing"] == []
    assert not any(found["by_kind"].values())
    assert err.startswith("identical")


def test_verify_fails_when_the_map_does_not_come_out(run, photo, scene, tmp_path):
    exp = vlcam.load("tiny-blip-itm").explain(photo, scene.caption)
    object.__setattr__(exp, "tokens", exp.tokens * 2)
    file = exp.save(tmp_path / "false.png")
    code, out, err = run("verify", file, "--json")
    assert code == 1
    assert json.loads(out)["reproduced"] is False
    assert "NOT reproduced" in err


def test_verify_refuses_what_is_no_explanation(run, photo):
    code, _, err = run("verify", photo)
    assert code == 1
    assert "without an explanation" in err


def test_models_recipes_and_anatomy_list_what_exists(run):
    code, out, err = run("models", "--json")
    assert code == 0
    assert "tiny-blip-itm" in json.loads(out)
    assert "tiny-blip-itm" in err
    code, out, _ = run("recipes", "--json")
    assert code == 0
    assert list(json.loads(out)) == list(vlcam.recipes())
    code, out, err = run("recipes", "lavis-itm", "--json")
    assert code == 0
    assert json.loads(out)["recipe"]["weighting"] == "attention*gradient"
    assert "mean over h of A[h,t,j] * ReLU(G[h,t,j])" in err
    code, out, err = run("anatomy", "tiny-blip-itm", "--json")
    assert code == 0
    assert "CROSS" in json.loads(out)["streams"]["fusion"]["blocks"][0]["sites"]
    assert run("recipes", "nothing")[0] == 2
    assert run("anatomy", "nothing")[0] == 2


def test_the_demo_writes_overlays_figure_and_record(run, tmp_path):
    code, out, err = run("demo", "--out", tmp_path / "demo", "--json")
    assert code == 0
    files = json.loads(out)["files"]
    assert {"image", "explanation", "record", "figure"} <= files.keys()
    assert sum(key.startswith("word ") for key in files) >= 4
    assert vlcam.open(files["explanation"]).status == "ok"
    assert str(tmp_path) in err
    assert run("demo", "--out", tmp_path / "demo")[0] == 0


def test_version_prints_the_libraries_too(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith(f"vlcam {vlcam.__version__}\n")
    assert "torch" in out


def test_the_command_is_installed():
    found = subprocess.run(
        [sys.executable, "-m", "vlcam", "recipes"], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0
    assert "lavis-itm" in found.stderr
