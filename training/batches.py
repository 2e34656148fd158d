"""Endless batches of scenes with captions true and false, made ready for a model in a second process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from vlcam import scenes

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
COLOUR_IDS = {colour: index + 1 for index, colour in enumerate(scenes.COLOURS)}
SHAPE_IDS = {shape: index + 1 for index, shape in enumerate(scenes.SHAPES)}
BACKGROUND, IGNORED = 0, -100


@dataclass(frozen=True)
class Sample:
    """One scene ready for training: pixels [3, S, S], patch labels [h, w] and its true and false captions."""

    pixels: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor
    true: scenes.Caption
    false: scenes.Caption
    wrong: int


def pixels(image: Image.Image, side: int) -> torch.Tensor:
    """The image as BLIP's processor makes it: bicubic resize to a square, scaled to 0..1, normalised."""
    array = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
    return torch.from_numpy(((array - MEAN) / STD).transpose(2, 0, 1).copy())


def patch_labels(scene: scenes.Scene, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Colour and shape id of the object that covers at least half of each patch; grazed patches are ignored."""
    colours = np.full((grid, grid), BACKGROUND)
    shapes = np.full((grid, grid), BACKGROUND)
    for item in scene.objects:
        height, width = item.mask.shape
        cover = item.mask.reshape(grid, height // grid, grid, width // grid).mean((1, 3))
        grazed = (cover > 0.1) & (cover < 0.5)
        colours[grazed] = shapes[grazed] = IGNORED
        colours[cover >= 0.5], shapes[cover >= 0.5] = COLOUR_IDS[item.colour], SHAPE_IDS[item.shape]
    return torch.from_numpy(colours), torch.from_numpy(shapes)


class Scenes(IterableDataset[Sample]):
    """Scenes drawn afresh for ever; every scene is used `repeats` times, mirrored and with new false captions."""

    def __init__(self, seed: int, side: int, patch: int, repeats: int = 3, pool: int = 3000) -> None:
        """Draw from scene seeds that held-out scenes never use: `seed` must be a million or more."""
        if seed < 1_000_000:
            raise ValueError(f"seed={seed}: training seeds start at 1,000,000, below lie the held-out scenes")
        self.seed, self.side, self.patch, self.repeats, self.pool = seed, side, patch, repeats, pool

    def __iter__(self) -> Iterator[Sample]:
        rng = np.random.default_rng(self.seed)
        pool: list[tuple[scenes.Scene, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        index = 0
        while True:
            if len(pool) < self.pool or rng.random() < 1 / self.repeats:
                scene = next(scenes.generate(1, seed=self.seed, start=index))
                index += 1
                made = (scene, pixels(scene.image, self.side), *patch_labels(scene, self.side // self.patch))
                if len(pool) < self.pool:
                    pool.append(made)
                else:
                    pool[int(rng.integers(self.pool))] = made
            else:
                made = pool[int(rng.integers(len(pool)))]
            yield self._sample(made, rng)

    def _sample(
        self, made: tuple[scenes.Scene, torch.Tensor, torch.Tensor, torch.Tensor], rng: np.random.Generator
    ) -> Sample:
        scene, image, colours, shapes = made
        kind = ("object", "attribute", "binding")[int(rng.choice(3, p=(0.5, 0.3, 0.2)))]
        false, wrong = scenes.mismatch(scene, kind, seed=int(rng.integers(1 << 30)))
        mirrored = [axis for axis in (-2, -1) if rng.random() < 0.5]
        true = scenes.Caption(scene.caption, scene.phrases(), tuple(item.span for item in scene.objects))
        return Sample(image.flip(mirrored), colours.flip(mirrored), shapes.flip(mirrored), true, false, wrong)
