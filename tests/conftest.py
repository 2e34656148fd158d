"""Fixtures: a random BLIP wrapped for explanation, and the embedded one."""

from __future__ import annotations

import models
import pytest
import torch

import vlcam

# Threads that wait for each other cost tiny models more than they give, most of all beside other work.
torch.set_num_threads(1)


@pytest.fixture
def blip():
    return models.blip()


@pytest.fixture
def model(blip):
    return vlcam.wrap(blip, models.processor(), name="random-blip")


@pytest.fixture(scope="session")
def embedded():
    return vlcam.load("tiny-blip-itm")
