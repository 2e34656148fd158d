"""The model is left exactly as it was found, whatever happened, and nothing grows."""

from __future__ import annotations

import gc
import threading
import weakref

import models
import numpy as np
import pytest
import torch
from models import assert_same, state
from torch import nn

import vlcam
from vlcam.capture import as_found

TEXT = "a red circle and a blue dog"


@pytest.fixture
def lived_in(blip):
    """A model in the middle of training: gradients, mixed flags, hooks of its own."""
    blip.train()
    blip.vision_model.encoder.layers[0].eval()
    blip.itm_head.weight.requires_grad_(False)
    for parameter in list(blip.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    blip.text_encoder.register_forward_hook(lambda *_: None)
    return blip


def refused(model):
    with pytest.raises(vlcam.EvidenceError):
        model.explain(models.pixels(), TEXT, layer=-1)


CALLS = {
    "cross": lambda m: m.explain(models.pixels(), TEXT),
    "attention only": lambda m: m.explain(models.pixels(), TEXT, "attention-cross"),
    "vision": lambda m: m.explain(models.pixels(), TEXT, "pgc-gradcam"),
    "context": lambda m: m.explain(models.pixels(), [TEXT, "a dog"], "context-gradcam"),
    "scores": lambda m: m.scores(models.pixels(), TEXT),
    "capture": lambda m: m.capture(models.pixels(), TEXT, stream="fusion", site="F2"),
    "refused": refused,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_about_the_model_changes(lived_in, call):
    model = vlcam.wrap(lived_in, models.processor())
    before = state(lived_in)
    call(model)
    assert_same(before, state(lived_in))


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["target", "text forward", "vision forward"])
def test_nothing_changes_when_the_pass_breaks(lived_in, monkeypatch, error, place):
    model = vlcam.wrap(lived_in, models.processor())

    def fail(*_, **__):
        raise error

    target = None
    if place == "target":
        target = fail
    elif place == "text forward":
        monkeypatch.setattr(lived_in.text_encoder.encoder.layer[2].intermediate.dense, "forward", fail)
    else:
        monkeypatch.setattr(lived_in.vision_model.encoder.layers[1].mlp, "forward", fail)
    before = state(lived_in)
    with pytest.raises(error):
        model.explain(models.pixels(), TEXT, target=target)
    assert_same(before, state(lived_in))
    monkeypatch.undo()
    assert model.explain(models.pixels(), TEXT).status == "ok"


def test_train_mode_and_dropout_do_not_reach_the_map(blip):
    blip.text_encoder.config.hidden_dropout_prob = 0.5
    for part in blip.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    quiet = vlcam.wrap(blip.eval(), models.processor()).explain(models.pixels(), TEXT)
    noisy = vlcam.wrap(blip.train(), models.processor()).explain(models.pixels(), TEXT)
    np.testing.assert_array_equal(quiet.tokens, noisy.tokens)


def test_frozen_parameters_and_no_grad_give_the_same_map(blip):
    model = vlcam.wrap(blip, models.processor())
    free = model.explain(models.pixels(), TEXT).tokens
    blip.requires_grad_(False)
    with torch.no_grad():
        frozen = model.explain(models.pixels(), TEXT).tokens
        assert not torch.is_grad_enabled()
    np.testing.assert_array_equal(free, frozen)
    assert not any(parameter.requires_grad for parameter in blip.parameters())


def test_inference_mode_of_the_caller_does_not_matter(model):
    expected = model.explain(models.pixels(), TEXT).tokens
    with torch.inference_mode():
        found = model.explain(models.pixels(), TEXT)
        assert torch.is_inference_mode_enabled()
    np.testing.assert_array_equal(found.tokens, expected)


def test_the_callers_pixels_are_not_touched(model):
    image = models.pixels()
    before = image.clone()
    model.explain(image, TEXT, "pgc-gradcam")
    assert torch.equal(image, before)
    assert not image.requires_grad


def test_a_default_device_of_the_caller_does_not_matter(model):
    expected = model.explain(models.pixels(), TEXT).tokens
    image = models.pixels()
    with torch.device("meta"):
        found = model.explain(image, TEXT)
    np.testing.assert_array_equal(found.tokens, expected)


def test_a_hundred_calls_leave_no_hook_and_no_tensor(blip):
    model = vlcam.wrap(blip, models.processor())
    hooks = state(blip)["hooks"]
    image = models.pixels()
    for _ in range(3):
        model.explain(image, TEXT)
    gc.collect()
    tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    for _ in range(100):
        model.explain(image, TEXT)
    gc.collect()
    assert state(blip)["hooks"] == hooks
    assert sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()) <= tensors


def test_captured_tensors_die_with_the_capture(model):
    found = model.capture(models.pixels(), TEXT, stream="fusion", site="CROSS")
    held = [weakref.ref(tensor) for tensor in (*found.activations.values(), *found.gradients.values())]
    assert all(not ref().requires_grad and ref().grad_fn is None for ref in held)
    del found
    gc.collect()
    assert all(ref() is None for ref in held)


@pytest.mark.parametrize("recipe", ["lavis-itm", "context-gradcam"])
def test_another_thread_may_run_the_model_in_the_middle_of_a_pass(blip, recipe):
    model = vlcam.wrap(blip, models.processor())
    alone = model.explain(models.pixels(), [TEXT, "a dog"], recipe)
    coded = models.tokenizer()(["a dog", "the grass"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = blip(pixel_values=models.pixels(batch=2), **coded).itm_score
    seen = []

    def serve():
        with torch.no_grad():
            seen.append(blip(pixel_values=models.pixels(batch=2), **coded).itm_score)

    def target(logits):
        worker = threading.Thread(target=serve)
        worker.start()
        worker.join()
        return logits[:, 1]

    crowded = model.explain(models.pixels(), [TEXT, "a dog"], recipe, target=target)
    torch.testing.assert_close(seen[0], expected)
    for one, other in zip(alone, crowded, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_flags_come_back_when_the_body_raises():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    with pytest.raises(BrokenError), as_found(layer):
        raise BrokenError
    assert layer.training
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad


def test_flags_come_back_when_two_threads_explain_at_once(blip):
    blip.train()
    for part in blip.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3
    model = vlcam.wrap(blip, models.processor())
    expected = model.explain(models.pixels(), TEXT).tokens
    found = []

    def work():
        found.extend(model.explain(models.pixels(), TEXT).tokens for _ in range(15))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 45
    assert all(np.array_equal(tokens, expected) for tokens in found)
    assert all(part.training for part in blip.modules())
    assert all(parameter.requires_grad for parameter in blip.parameters())
