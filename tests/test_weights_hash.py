"""The hash of a model's weights: what it is of, and that it follows every write."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from vlcam.provenance import WeightsHash

KINDS = {
    "single": torch.randn(3, 5),
    "bfloat": torch.randn(40).bfloat16(),
    "twofold": torch.randn(2, 2, dtype=torch.float64),
    "whole": torch.arange(9),
    "yes": torch.tensor(data=True),
    "empty": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).T,
}


@pytest.fixture
def module():
    made = nn.Linear(2, 2)
    for name, tensor in KINDS.items():
        made.register_buffer(name, tensor.clone())
    made.register_buffer("not_saved", torch.zeros(3), persistent=False)
    return made


def slow(module):
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        shown = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(np.ascontiguousarray(shown.numpy()).tobytes())
    return digest.hexdigest()


def test_it_is_of_names_types_shapes_and_values(module):
    assert WeightsHash(module).value() == slow(module)


@pytest.mark.parametrize("name", ["weight", *(name for name in KINDS if name != "empty")])
def test_a_write_that_nothing_counts_is_found_in_every_type(module, name):
    found = WeightsHash(module)
    before = found.value()
    assert found.value() == before
    tensor = dict(module.state_dict(keep_vars=True))[name]
    counted = tensor._version
    tensor.data.copy_(~tensor.data if tensor.dtype == torch.bool else tensor.data + 1)
    assert tensor._version == counted
    assert found.value() == slow(module) != before


def test_values_that_change_places_between_tensors_are_found(module):
    found = WeightsHash(module)
    before = found.value()
    module.single.data, module.weight.data = torch.full((3, 5), 2.0), torch.full((2, 2), 2.0)
    assert found.value() == slow(module) != before


def test_it_is_computed_once_as_long_as_nothing_changes(module, monkeypatch):
    found, runs = WeightsHash(module), []
    own = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda *given: runs.append(1) or own(*given))
    values = {found.value() for _ in range(3)}
    assert (len(values), len(runs)) == (1, 1)


def test_what_is_not_saved_does_not_count(module):
    found = WeightsHash(module)
    before = found.value()
    module.not_saved.add_(1)
    assert found.value() == before
