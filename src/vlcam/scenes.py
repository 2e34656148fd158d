"""Synthetic scenes whose answer is known: coloured shapes, a caption, and the exact pixels of every phrase.

An explanation can only be checked against ground truth, and photographs carry none. A scene does: each object
has its phrase, the place of that phrase in the caption, and the mask of the pixels that the object covers.

>>> scene = next(generate(1, seed=7))
>>> scene.caption
'there is a yellow triangle, an orange square next to a yellow cross'
>>> [(item.phrase, item.span) for item in scene.objects]
[('yellow triangle', (11, 26)), ('orange square', (31, 44)), ('yellow cross', (55, 67))]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

__all__ = ["COLOURS", "SHAPES", "Caption", "Scene", "SceneObject", "generate", "mismatch"]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 42),
    "green": (52, 158, 72),
    "blue": (44, 88, 200),
    "yellow": (240, 208, 52),
    "purple": (134, 58, 172),
    "orange": (238, 132, 32),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross")

Span = tuple[int, int]
Mismatch = Literal["attribute", "object", "binding"]

_SUPERSAMPLE = 3
_RADIUS = (0.14, 0.24)  # of the shorter side: the smallest object still covers a cell of an 8 x 8 grid
_PLACEMENT_TRIES = 400


@dataclass(frozen=True)
class Caption:
    """A caption and where each of its phrases stands: `spans[i]` is the half-open character range of `phrases[i]`."""

    text: str
    phrases: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class SceneObject:
    """One object: its phrase, the phrase's character span in the caption, its pixels and its box.

    `mask` is bool [H, W], true where the object is drawn. `box` is (x0, y0, x1, y1) in pixels of the scene's
    image, half-open: it is the smallest box that holds the mask.
    """

    colour: str
    shape: str
    span: Span
    mask: NDArray[np.bool_]
    box: tuple[int, int, int, int]

    @property
    def phrase(self) -> str:
        """The colour and the shape as the caption names them."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, eq=False)
class Scene:
    """An RGB image, the caption that is true of it, and its objects in the order in which the caption names them."""

    image: Image.Image
    caption: str
    objects: tuple[SceneObject, ...]
    seed: tuple[int, int]

    def phrases(self) -> tuple[str, ...]:
        """The objects' phrases in caption order."""
        return tuple(item.phrase for item in self.objects)


def generate(
    count: int,
    *,
    seed: int,
    objects: tuple[int, int] = (1, 3),
    size: tuple[int, int] = (128, 128),
    start: int = 0,
) -> Iterator[Scene]:
    """Yield `count` scenes; scene i depends on `seed` and `start + i` alone.

    Args:
        count: how many scenes.
        seed: the same seed gives the same scenes, to the pixel.
        objects: least and greatest number of objects in a scene, both included. No two objects of a scene share
            colour and shape, so a phrase names one object.
        size: height and width in pixels.
        start: index of the first scene, so that a long run can be cut into pieces.

    Yields:
        Scenes with `objects` that do not overlap.

    Raises:
        ValueError: an empty or impossible range of objects, or a side below 32 pixels.
    """
    fewest, most = objects
    if not 1 <= fewest <= most <= 4:
        raise ValueError(f"objects={objects}: give (least, most) with 1 <= least <= most <= 4")
    if min(size) < 32:
        raise ValueError(f"size={size}: both sides must be 32 pixels or more, or shapes cannot be told apart")
    for index in range(start, start + count):
        yield _scene(seed, index, objects, size)


def mismatch(scene: Scene, kind: Mismatch = "attribute", *, seed: int = 0) -> tuple[Caption, int]:
    """Return a caption that is false of the scene in exactly one phrase, and the index of that phrase.

    Args:
        scene: the scene whose caption is changed.
        kind: `attribute` swaps one colour or one shape; `object` names another colour and another shape;
            `binding` gives it the colour of another object of the scene, or is `attribute` where that object has
            no such colour to take. Which object is changed is drawn first.
        seed: chooses among the possible changes.

    Returns:
        The caption, with the same wording around the phrases, and the index of the phrase that is now false.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ("attribute", "object", "binding"):
        raise ValueError(f"kind={kind!r}: choose from 'attribute', 'object', 'binding'")
    rng = np.random.default_rng([*scene.seed, seed, 1])
    pairs = [(item.colour, item.shape) for item in scene.objects]
    which = int(rng.integers(len(pairs)))
    options = _replacements(pairs, which, kind) or _replacements(pairs, which, "attribute")
    pairs[which] = options[int(rng.integers(len(options)))]
    return _reword(scene, pairs), which


def _replacements(pairs: Sequence[tuple[str, str]], which: int, kind: Mismatch) -> list[tuple[str, str]]:
    colour, shape = pairs[which]
    if kind == "object":
        options = [(c, s) for c in COLOURS for s in SHAPES if c != colour and s != shape]
    elif kind == "binding":
        options = [(c, shape) for c, _ in pairs if c != colour]
    else:
        options = [(c, shape) for c in COLOURS if c != colour] + [(colour, s) for s in SHAPES if s != shape]
    return [option for option in options if option not in pairs]


def _reword(scene: Scene, pairs: Sequence[tuple[str, str]]) -> Caption:
    """Put other phrases in the places of the scene's own, articles included."""
    text, spans, done = "", [], 0
    for item, (colour, shape) in zip(scene.objects, pairs, strict=True):
        article_end = item.span[0] - 1
        article_start = scene.caption.rindex("a", 0, article_end)
        text += scene.caption[done:article_start] + _article(colour) + " "
        spans.append((len(text), len(text) + len(colour) + 1 + len(shape)))
        text += f"{colour} {shape}"
        done = item.span[1]
    text += scene.caption[done:]
    return Caption(text, tuple(f"{c} {s}" for c, s in pairs), tuple(spans))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _scene(seed: int, index: int, objects: tuple[int, int], size: tuple[int, int]) -> Scene:
    rng = np.random.default_rng([seed, index])
    number = int(rng.integers(objects[0], objects[1] + 1))
    kinds = [(c, s) for c in COLOURS for s in SHAPES]
    chosen = [kinds[i] for i in rng.choice(len(kinds), number, replace=False)]
    places = _places(rng, number, size)
    canvas = _background(rng, size)
    masks = []
    for (colour, shape), (x, y, radius) in zip(chosen, places, strict=True):
        coverage = _coverage(shape, x, y, radius, float(rng.uniform(-0.25, 0.25)), size)
        shade = np.clip(np.array(COLOURS[colour], np.float32) + rng.uniform(-14, 14, 3), 0, 255).astype(np.float32)
        canvas = canvas * (1 - coverage[..., None]) + shade * coverage[..., None]
        masks.append(coverage >= 0.5)
    canvas = canvas + rng.standard_normal(canvas.shape, dtype=np.float32) * np.float32(rng.uniform(0.0, 9.0))
    image = Image.fromarray(np.clip(canvas, 0, 255).round().astype(np.uint8), "RGB")
    caption = _caption(rng, chosen)
    items = tuple(
        SceneObject(colour, shape, span, mask, _box(mask))
        for (colour, shape), span, mask in zip(chosen, caption.spans, masks, strict=True)
    )
    return Scene(image, caption.text, items, (seed, index))


def _caption(rng: np.random.Generator, chosen: Sequence[tuple[str, str]]) -> Caption:
    opening = ("", "there is ", "a picture of ")[int(rng.integers(3))]
    joiner = (" and ", " next to ", " with ")[int(rng.integers(3))]
    text, spans = opening, []
    for position, (colour, shape) in enumerate(chosen):
        if position:
            text += joiner if position == len(chosen) - 1 else ", "
        text += _article(colour) + " "
        spans.append((len(text), len(text) + len(colour) + 1 + len(shape)))
        text += f"{colour} {shape}"
    return Caption(text, tuple(f"{c} {s}" for c, s in chosen), tuple(spans))


def _places(rng: np.random.Generator, number: int, size: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Draw centre and radius of discs that lie inside the image and do not touch."""
    height, width = size
    side = min(size)
    while True:
        discs: list[tuple[float, float, float]] = []
        for _ in range(_PLACEMENT_TRIES):
            radius = float(rng.uniform(*_RADIUS)) * side
            x, y = float(rng.uniform(radius, width - radius)), float(rng.uniform(radius, height - radius))
            if all(math.hypot(x - u, y - v) > radius + r + 0.02 * side for u, v, r in discs):
                discs.append((x, y, radius))
            if len(discs) == number:
                return discs


def _background(rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float32]:
    """A muted colour that changes slowly across the image, float32 [H, W, 3]."""
    height, width = size
    base = rng.uniform(60, 215) + rng.uniform(-14, 14, 3)
    slope = rng.uniform(-28, 28, (2, 1, 1, 3))
    rows = np.linspace(-1, 1, height)[:, None, None]
    columns = np.linspace(-1, 1, width)[None, :, None]
    return np.asarray(base + rows * slope[0] + columns * slope[1], np.float32)


def _coverage(
    shape: str, x: float, y: float, radius: float, angle: float, size: tuple[int, int]
) -> NDArray[np.float32]:
    """Share of each pixel that the shape covers, float32 [H, W] in 0..1."""
    height, width = size
    left, top = max(0, int(x - radius) - 1), max(0, int(y - radius) - 1)
    right, bottom = min(width, int(x + radius) + 2), min(height, int(y + radius) + 2)
    zoom = _SUPERSAMPLE
    drawing = Image.new("L", ((right - left) * zoom, (bottom - top) * zoom), 0)
    pen = ImageDraw.Draw(drawing)
    centre = np.array([x - left, y - top])
    if shape == "circle":
        (x0, y0), (x1, y1) = (centre - radius) * zoom, (centre + radius) * zoom
        pen.ellipse([(x0, y0), (x1, y1)], fill=255)
    else:
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        corners = (_outline(shape) @ turn.T * radius + centre) * zoom
        pen.polygon([(float(u), float(v)) for u, v in corners], fill=255)
    coverage = np.zeros(size, np.float32)
    coverage[top:bottom, left:right] = np.asarray(drawing.reduce(zoom), np.float32) / 255
    return coverage


def _outline(shape: str) -> NDArray[np.float64]:
    """Corners of a shape inside the unit disc, [corners, (x, y)], y downwards."""
    if shape == "square":
        return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * math.sqrt(0.5)
    if shape == "triangle":
        return _ring(3, (1.0,))
    if shape == "star":
        return _ring(10, (1.0, 0.45))
    if shape == "cross":
        arm, reach = 0.34, 0.94
        corner = np.array([[arm, -reach], [arm, -arm], [reach, -arm]])
        quarter_turn = np.array([[0, 1], [-1, 0]])
        return np.concatenate([corner @ np.linalg.matrix_power(quarter_turn, k) for k in range(4)])
    raise ValueError(f"shape {shape!r} has no outline; known shapes: {', '.join(SHAPES)}")


def _ring(number: int, radii: Sequence[float]) -> NDArray[np.float64]:
    angles = -math.pi / 2 + 2 * math.pi * np.arange(number) / number
    reach = np.array([radii[i % len(radii)] for i in range(number)])
    return np.stack([np.cos(angles) * reach, np.sin(angles) * reach], axis=1)


def _box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
