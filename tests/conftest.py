"""Fixtures: a random BLIP wrapped for explanation, and the embedded one."""

from __future__ import annotations

import models
import pytest
import torch

import vlcam
from vlcam import cli

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


@pytest.fixture
def run(capsys):
    """Run a command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        code = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        found = capsys.readouterr()
        return code, found.out, found.err

    return call
