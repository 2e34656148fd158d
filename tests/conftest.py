"""Fixtures: a random BLIP wrapped for explanation, and the embedded one."""

from __future__ import annotations

import models
import pytest

import vlcam


@pytest.fixture
def blip():
    return models.blip()


@pytest.fixture
def model(blip):
    return vlcam.wrap(blip, models.processor(), name="random-blip")


@pytest.fixture(scope="session")
def embedded():
    return vlcam.load("tiny-blip-itm")
