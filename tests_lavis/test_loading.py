"""LAVIS's models by name: what `load_model_and_preprocess` returns is wrapped, and the command line reaches it."""

from __future__ import annotations

import warnings

import lavis_models as models
import numpy as np
import pytest
import torch
from lavis.models import model_zoo

import vlcam
from vlcam.adapter import adapters
from vlcam.cli import main
from vlcam_adapters.lavis_parts import LavisAdapter

MADE = {
    "lavis:blip_image_text_matching/base": models.blip,
    "lavis:albef_retrieval/coco": models.albef,
    "lavis:blip_caption/base_coco": models.captioner,
    "lavis:blip_vqa/vqav2": models.answerer,
    "lavis:blip2_image_text_matching/pretrain": models.blip2,
    "lavis:blip2_image_text_matching/pretrain_vitL": lambda: models.blip2(tower=models.clip_tower()),
}


@pytest.fixture(autouse=True, scope="module")
def said():
    """The word on adapters for newer libraries, which is said once, is said here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapters()


@pytest.fixture
def registry(monkeypatch):
    """In place of LAVIS's: small models of those names, in training mode unless asked otherwise; what was asked."""
    asked = []

    def load(name, model_type, is_eval=False, device="cpu"):
        asked.append((name, model_type, is_eval, device))
        made = MADE[f"lavis:{name}/{model_type}"]().train(not is_eval)
        return made, *({"train": None, "eval": each} for each in models.processors())

    monkeypatch.setattr("lavis.models.load_model_and_preprocess", load)
    return asked


@pytest.mark.parametrize("name", MADE)
def test_a_name_of_lavis_is_loaded_by_lavis(registry, name):
    model = vlcam.load(name)
    assert registry == [(*name.removeprefix("lavis:").split("/"), True, "cpu")]
    exp, wrapped = (each.explain(models.picture(), "a red dog") for each in (model, _wrapped(name)))
    np.testing.assert_array_equal(exp.tokens, wrapped.tokens)
    assert exp.provenance["model"]["id"] == name
    assert not model.adapter.module.training


def _wrapped(name):
    return vlcam.wrap(MADE[name](), models.processors())


@pytest.mark.usefixtures("registry")
def test_the_type_is_that_which_is_asked_for():
    model = vlcam.load("lavis:blip_image_text_matching/base", dtype="bfloat16")
    assert next(model.adapter.module.parameters()).dtype == torch.bfloat16
    with pytest.raises(vlcam.UnknownNameError, match="dtype='int8'"):
        vlcam.load("lavis:blip_image_text_matching/base", dtype="int8")
    with pytest.raises(vlcam.UnknownNameError, match="no option 'first_token'; it has 'dtype', 'device'"):
        vlcam.load("lavis:blip_image_text_matching/base", first_token="cls")


def test_every_name_is_one_of_lavis():
    known = {f"lavis:{name}/{kind}" for name, kinds in model_zoo for kind in kinds}
    offered = [name for each in adapters() if issubclass(each, LavisAdapter) for name in each.architectures]
    assert set(MADE) < set(offered) <= known
    assert len(set(offered)) == len(offered)


def test_other_names_are_refused_with_those_that_exist(registry):
    with pytest.raises(vlcam.AdapterError, match=r"'lavis:blip_nlvr/nlvr'.*no adapter loads.*lavis:blip_vqa/vqav2"):
        vlcam.load("lavis:blip_nlvr/nlvr")
    assert not registry


def test_a_checkpoint_that_cannot_be_had_is_said(monkeypatch):
    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("lavis.models.load_model_and_preprocess", fail)
    with pytest.raises(vlcam.AdapterError, match=r"'lavis:blip_vqa/okvqa' cannot be loaded: no network"):
        vlcam.load("lavis:blip_vqa/okvqa")


def test_a_folder_is_no_name(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["lavis:blip_vqa/okvqa"]}')
    with pytest.raises(vlcam.AdapterError, match="LAVIS loads models by name"):
        vlcam.load(tmp_path)


@pytest.mark.usefixtures("registry")
def test_the_command_line_reaches_them(tmp_path, monkeypatch, capsys):
    models.picture().save(tmp_path / "scene.png")
    monkeypatch.chdir(tmp_path)
    name = "lavis:blip2_image_text_matching/pretrain"
    words = ["--model", name, "--image", "scene.png", "--text", "a red dog", "--out", "out"]
    monkeypatch.setattr("sys.argv", ["vlcam", "explain", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr()
    (made,) = (file for file in (tmp_path / "out").iterdir() if file.suffix == ".png")
    assert vlcam.open(made).provenance["model"]["id"] == name
    assert vlcam.open(made).verify(vlcam.load(name)).identical
