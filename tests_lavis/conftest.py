"""Fixtures: random models of LAVIS, wrapped for explanation."""

from __future__ import annotations

import lavis_models as models
import pytest
import torch

import vlcam

# Threads that wait for each other cost tiny models more than they give, most of all beside other work.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def blip():
    return models.blip()


@pytest.fixture(scope="session")
def albef():
    return models.albef()


@pytest.fixture(scope="session")
def matcher(blip):
    return vlcam.wrap(blip, models.processors(), name="random-blip")


@pytest.fixture(scope="session")
def retriever(albef):
    return vlcam.wrap(albef, models.processors(), name="random-albef")
