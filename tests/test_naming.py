"""Blocks by the names of their modules (B26, B44)."""

from __future__ import annotations

import pytest
import torch
from transformers import Dinov2Config, Dinov2ForImageClassification, ViTConfig, ViTForImageClassification

import vlcam

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, intermediate_size=64, num_labels=5)).eval()


PIXELS = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "layer",
    [
        1,
        -2,
        "vit.layers.1",
        "vit.layers.1.layernorm_before",
        "vit.encoder.layer.1",
        "vit.encoder.layer.1.output",
        "module.vit.layers.1",
        ["vit.layers.1"],
    ],
)
def test_a_block_is_found_by_number_and_by_old_and_new_names(vit, layer):
    model = vlcam.wrap(vit)
    exp = model.explain(PIXELS, target=2, layer=layer)
    run = exp.provenance["run"]
    assert (run["layers"], run["modules"]) == ([1], ["vit.layers.1"])
    assert exp.recipe.layers in ((1,), (-2,))
    assert "transformers" in exp.provenance["versions"]


def test_another_family_has_other_names():
    module = Dinov2ForImageClassification(Dinov2Config(**SIZES, num_labels=5)).eval()
    exp = vlcam.wrap(module).explain(PIXELS, target=0, layer="dinov2.encoder.layer.2")
    assert exp.provenance["run"]["modules"] == ["dinov2.encoder.layer.2"]


@pytest.mark.parametrize("layer", ["vit.layers.7", "vit.layernorm", "classifier.x", "no.such.thing"])
def test_a_name_of_no_block_lists_the_blocks(vit, layer):
    with pytest.raises(vlcam.UnknownNameError, match=r"names no block of vision; its blocks are 'vit\.layers\.0'"):
        vlcam.wrap(vit).explain(PIXELS, target=2, layer=layer)


def test_several_names_at_once(vit):
    exp = vlcam.wrap(vit).explain(PIXELS, target=2, layer=["vit.layers.0", 1], layer_rule="mean")
    assert exp.provenance["run"]["layers"] == [0, 1]
