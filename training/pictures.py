"""Endless batches of scenes for the image classifiers: no captions, made ready in a second process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterableDataset

from training.batches import BACKGROUND, patch_cover, patch_labels, pixels
from vlcam import scenes

LABELS: tuple[str, ...] = tuple(f"{colour} {shape}" for colour in scenes.COLOURS for shape in scenes.SHAPES)
LABEL_IDS = {label: index for index, label in enumerate(LABELS)}
MOST = 3
NOBODY = -1
MEAN = np.full(3, 0.5, np.float32)
STD = np.full(3, 0.5, np.float32)


@dataclass(frozen=True)
class Pictures:
    """A batch of scenes.

    `pixels` is [B, 3, S, S]; `cover` [B, 3, h * w] is the share of each patch that each object covers, zero where a
    scene has fewer objects; `labels` [B, 3] is each object's class, -1 where there is none; `colours` and `shapes`
    [B, h * w] label the patches.
    """

    pixels: torch.Tensor
    cover: torch.Tensor
    labels: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor


def picture(scene: scenes.Scene, side: int, patch: int) -> Pictures:
    """One scene, ready for training or measuring: a batch of one."""
    found = patch_cover(scene, side // patch)
    colours, shapes = patch_labels(scene, found)
    cover = torch.zeros(MOST, *found.shape[1:])
    cover[: len(found)] = found
    labels = torch.full((MOST,), NOBODY)
    labels[: len(found)] = torch.tensor([LABEL_IDS[phrase] for phrase in scene.phrases()])
    image = pixels(scene.image, side, MEAN, STD)
    return Pictures(image[None], cover[None], labels[None], colours[None], shapes[None])


def joined(parts: list[Pictures]) -> Pictures:
    """One batch out of many, patches in one row."""
    return Pictures(
        torch.cat([part.pixels for part in parts]),
        torch.cat([part.cover for part in parts]).flatten(2),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.colours for part in parts]).flatten(1),
        torch.cat([part.shapes for part in parts]).flatten(1),
    )


def background(batch: Pictures) -> torch.Tensor:
    """The patches that no object touches, bool [B, h * w]."""
    return (batch.cover.sum(1) == 0) & (batch.colours == BACKGROUND)


class Gallery(IterableDataset[Pictures]):
    """Scenes drawn afresh for ever; every scene is used `repeats` times, mirrored."""

    def __init__(self, seed: int, side: int, patch: int, repeats: int = 3, pool: int = 3000) -> None:
        """Draw from scene seeds that held-out scenes never use: `seed` must be a million or more."""
        if seed < 1_000_000:
            raise ValueError(f"seed={seed}: training seeds start at 1,000,000, below lie the held-out scenes")
        self.seed, self.side, self.patch, self.repeats, self.pool = seed, side, patch, repeats, pool

    def __iter__(self) -> Iterator[Pictures]:
        """Pictures without end, each a batch of one; the order is fixed by the seed."""
        rng = np.random.default_rng(self.seed)
        pool: list[Pictures] = []
        index = 0
        while True:
            place = int(rng.integers(self.pool))
            if len(pool) < self.pool or rng.random() < 1 / self.repeats:
                drawn = picture(next(scenes.generate(1, seed=self.seed, start=index)), self.side, self.patch)
                index += 1
                if len(pool) < self.pool:
                    pool.append(drawn)
                else:
                    pool[place] = drawn
            else:
                drawn = pool[place]
            axes = [axis for axis in (-2, -1) if rng.random() < 0.5]
            yield Pictures(
                drawn.pixels.flip(axes),
                drawn.cover.flip(axes),
                drawn.labels,
                drawn.colours.flip(axes),
                drawn.shapes.flip(axes),
            )
