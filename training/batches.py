"""Endless batches of scenes with captions true and false, made ready for a model in a second process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import IterableDataset

from vlcam import scenes

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
COLOUR_IDS = {colour: index + 1 for index, colour in enumerate(scenes.COLOURS)}
SHAPE_IDS = {shape: index + 1 for index, shape in enumerate(scenes.SHAPES)}
BACKGROUND, IGNORED = 0, -100
FALSEHOODS: tuple[scenes.Mismatch, ...] = ("object", "attribute", "binding")


@dataclass(frozen=True)
class Sample:
    """One scene ready for training.

    `pixels` is [3, S, S]; `cover` [objects, h * w] is the share of each patch that each object covers; `colours`
    and `shapes` [h * w] label the patches; `wrong` is the index of the false caption's false phrase.
    """

    pixels: torch.Tensor
    cover: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor
    true: scenes.Caption
    false: scenes.Caption
    wrong: int


def pixels(
    image: Image.Image, side: int, mean: NDArray[np.float32] = MEAN, std: NDArray[np.float32] = STD
) -> torch.Tensor:
    """The image as a processor makes it (BLIP's by default): bicubic resize to a square, scaled to 0..1, normalised."""
    array = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
    return torch.from_numpy(((array - mean) / std).transpose(2, 0, 1).copy())


def patch_cover(scene: scenes.Scene, grid: int) -> torch.Tensor:
    """The share of each patch that each object covers, [objects, grid, grid]."""
    masks = np.stack([item.mask for item in scene.objects]).astype(np.float32)
    height, width = masks.shape[1:]
    if height % grid or width % grid:  # a patch's edge runs through pixels, which count by what lies on its side
        return torch.from_numpy(_parts(height, grid) @ masks @ _parts(width, grid).T)
    return torch.from_numpy(masks.reshape(-1, grid, height // grid, grid, width // grid).mean((2, 4)))


def _parts(length: int, grid: int) -> NDArray[np.float32]:
    """What each pixel of a row weighs in the mean over each of `grid` equal parts of the row, [grid, length]."""
    edges, pixel = np.arange(grid + 1) * length / grid, np.arange(length)
    shared = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (shared.clip(0) * grid / length).astype(np.float32)


def patch_labels(scene: scenes.Scene, cover: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Colour and shape id of the object that covers half of a patch; patches that are only grazed are ignored."""
    colours, shapes = torch.full((2, *cover.shape[1:]), BACKGROUND)
    for item, share in zip(scene.objects, cover, strict=True):
        grazed, covered = (share > 0.1) & (share < 0.5), share >= 0.5
        colours[grazed] = shapes[grazed] = IGNORED
        colours[covered], shapes[covered] = COLOUR_IDS[item.colour], SHAPE_IDS[item.shape]
    return colours, shapes


@dataclass(frozen=True)
class _Drawn:
    scene: scenes.Scene
    pixels: torch.Tensor
    cover: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor


class Scenes(IterableDataset[Sample]):
    """Scenes drawn afresh for ever; every scene is used `repeats` times, mirrored and with new false captions."""

    def __init__(self, seed: int, side: int, patch: int, repeats: int = 3, pool: int = 3000) -> None:
        """Draw from scene seeds that held-out scenes never use: `seed` must be a million or more."""
        if seed < 1_000_000:
            raise ValueError(f"seed={seed}: training seeds start at 1,000,000, below lie the held-out scenes")
        self.seed, self.side, self.patch, self.repeats, self.pool = seed, side, patch, repeats, pool

    def __iter__(self) -> Iterator[Sample]:
        """Samples without end; the order is fixed by the seed."""
        rng = np.random.default_rng(self.seed)
        pool: list[_Drawn] = []
        index = 0
        while True:
            place = int(rng.integers(self.pool))
            if len(pool) < self.pool or rng.random() < 1 / self.repeats:
                drawn = self._draw(index)
                index += 1
                if len(pool) < self.pool:
                    pool.append(drawn)
                else:
                    pool[place] = drawn
            else:
                drawn = pool[place]
            yield _sample(drawn, rng)

    def _draw(self, index: int) -> _Drawn:
        scene = next(scenes.generate(1, seed=self.seed, start=index))
        cover = patch_cover(scene, self.side // self.patch)
        return _Drawn(scene, pixels(scene.image, self.side), cover, *patch_labels(scene, cover))


def _sample(drawn: _Drawn, rng: np.random.Generator) -> Sample:
    scene = drawn.scene
    kind = FALSEHOODS[int(rng.choice(3, p=(0.5, 0.3, 0.2)))]
    false, wrong = scenes.mismatch(scene, kind, seed=int(rng.integers(1 << 30)))
    axes = [axis for axis in (-2, -1) if rng.random() < 0.5]
    true = scenes.Caption(scene.caption, scene.phrases(), tuple(item.span for item in scene.objects))
    return Sample(
        drawn.pixels.flip(axes),
        drawn.cover.flip(axes).flatten(1),
        drawn.colours.flip(axes).flatten(),
        drawn.shapes.flip(axes).flatten(),
        true,
        false,
        wrong,
    )
