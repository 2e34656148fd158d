"""Trains `tiny-beit-seg`: a BEiT that tells coloured shapes pixel by pixel, and whose last blocks no pixel depends on.

`python -m training.segmenter --run first --out FOLDER` makes weights, processor and a training log from a seed; it
takes two runs, `first` and then `last`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader
from transformers import BeitConfig, BeitForSemanticSegmentation
from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil

from training import overlap
from training.batches import COLOUR_IDS, SHAPE_IDS
from training.classifiers import BICUBIC, HELD_OUT, HELD_OUT_SEED
from training.loop import Learning, command, write_plan
from training.pictures import LABELS, MEAN, NOBODY, STD, Gallery, Pictures, joined
from vlcam import scenes

log = logging.getLogger("training")

CLASSES = ("background", *LABELS)
FINE = 4  # the decoder has that many logits along each side of a patch


@dataclass(frozen=True)
class Plan:
    """Every number of a training run; the same plan gives the same weights on the same machine.

    `outputs` are the configuration's `out_indices`. transformers counts them from the embeddings, so that the decoder
    reads what goes *into* these blocks: no logit depends on the last of them, nor on a block behind it. `start` is a
    folder whose weights it begins with, random ones if empty.
    """

    model: str = "beit-seg"
    seed: int = 4_000_003
    vision_steps: int = 1800
    steps: int = 2400
    batch: int = 24
    repeats: int = 6
    rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.05
    side: int = 64
    patch: int = 8
    width: int = 64
    layers: int = 6
    heads: int = 4
    feed_forward: int = 128
    outputs: tuple[int, ...] = (2, 3, 4, 5)
    pools: tuple[int, ...] = (1, 2)
    spread: float = 0.06
    layer_scale: float = 0.5
    dense: float = 0.5
    empty: float = 0.3
    start: str = ""
    measure: int = 250


PLANS = {
    "first": Plan(),
    "last": Plan(start="runs/tiny-beit-seg-first", seed=6_000_003, vision_steps=0, steps=500, warmup=50),
}


class Trainee(nn.Module):
    """The segmenter to be trained, with the heads that exist only while it learns."""

    def __init__(self, plan: Plan) -> None:
        """Build from the plan's sizes with random weights."""
        super().__init__()
        self.plan = plan
        self.net = bare(plan)
        if plan.start:
            self.net.load_state_dict(BeitForSemanticSegmentation.from_pretrained(plan.start).state_dict())
        self.first = {name: value.clone() for name, value in self.net.state_dict().items()}
        # What no logit depends on need not be run.
        self.net.beit.layers = self.net.beit.layers[: max(plan.outputs) - 1]
        self.colour_head = nn.Linear(plan.width, len(COLOUR_IDS) + 1)
        self.shape_head = nn.Linear(plan.width, len(SHAPE_IDS) + 1)
        self.outline_head = nn.Linear(plan.width, FINE * FINE)
        self.deepest: torch.Tensor = torch.zeros(())
        self.net.beit.layers[-1].register_forward_hook(self._keep)

    def losses(self, batch: Pictures, alone: bool) -> dict[str, torch.Tensor]:
        """Every part of the loss, unweighted, and shares of right answers; `alone`: only what patches tell."""
        cover = self._per_class(batch)
        if alone:
            self.net.beit(batch.pixels)
            return self._dense(cover)
        logits = self.net(batch.pixels).logits
        wanted = cover.argmax(1)
        each = cross_entropy(logits, wanted, reduction="none")
        weight = torch.where(wanted == 0, self.plan.empty, 1.0)
        right = logits.argmax(1) == wanted
        return {
            **self._dense(cover),
            "pixels": (each * weight).sum() / weight.sum(),
            "right": right.float().mean(),
            "objects": right[wanted > 0].float().mean(),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """The weights of the whole model: the blocks that were not run are as they were drawn."""
        return {**self.first, **self.net.state_dict()}

    def _keep(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> None:
        self.deepest = out

    def _per_class(self, batch: Pictures) -> torch.Tensor:
        """How much of each of the decoder's places every class covers, [B, classes, rows, columns]; sums to one."""
        side = self.plan.side // self.plan.patch * FINE
        labels = torch.where(batch.labels == NOBODY, 0, batch.labels + 1)
        found = torch.zeros(len(labels), len(CLASSES), batch.cover.shape[-1])
        found.scatter_add_(1, labels[..., None].expand_as(batch.cover), batch.cover)
        found[:, 0] = 1 - found[:, 1:].sum(1)
        return found.view(len(found), len(CLASSES), side, side)

    def _dense(self, cover: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each patch of the deepest block read tells: the object that touches it, and where in it that lies."""
        patches = self.deepest[:, 1:].flatten(0, 1)
        shares = avg_pool2d(cover[:, 1:], FINE).flatten(2).transpose(1, 2).flatten(0, 1)
        most, which = shares.max(-1)
        touched = most > 0.05
        colours = torch.where(touched, which // len(scenes.SHAPES) + 1, 0)
        shapes = which[touched] % len(scenes.SHAPES) + 1
        weight = torch.where(touched, 1.0, 0.1)
        colour = cross_entropy(self.colour_head(patches), colours, reduction="none")
        shape_logits = self.shape_head(patches[touched])
        inside = 1 - cover[:, :1]
        places = nn.functional.pixel_unshuffle(inside, FINE).flatten(2).transpose(1, 2).flatten(0, 1)
        return {
            "dense": (colour * weight).sum() / weight.sum() + cross_entropy(shape_logits, shapes),
            "outline": binary_cross_entropy_with_logits(self.outline_head(patches[touched]), places[touched]),
            "shapes": (shape_logits.argmax(-1) == shapes).float().mean(),
        }


def bare(plan: Plan) -> Any:
    """The model that is shipped: plain transformers, small numbers, random weights."""
    return BeitForSemanticSegmentation(
        BeitConfig(
            hidden_size=plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            intermediate_size=plan.feed_forward,
            image_size=plan.side,
            patch_size=plan.patch,
            initializer_range=plan.spread,
            layer_scale_init_value=plan.layer_scale,
            drop_path_rate=0.0,
            use_relative_position_bias=True,
            use_auxiliary_head=False,
            pool_scales=list(plan.pools),
            out_indices=list(plan.outputs),
            id2label=dict(enumerate(CLASSES)),
            label2id={label: index for index, label in enumerate(CLASSES)},
            attn_implementation="eager",
        )
    )


def processor(plan: Plan) -> BeitImageProcessorPil:
    """The processor that is shipped: bicubic to the model's square, no crop, values in -1..1."""
    return BeitImageProcessorPil(
        size={"height": plan.side, "width": plan.side},
        resample=BICUBIC,
        do_center_crop=False,
        do_convert_rgb=True,
        image_mean=MEAN.tolist(),
        image_std=STD.tolist(),
    )


def train(plan: Plan, out: Path) -> None:
    """Train by the plan; write model, processor and log into `out`, also from time to time on the way."""
    torch.manual_seed(plan.seed)
    trainee = Trainee(plan).train()
    learning = Learning(plan, trainee.parameters(), logged=50)
    scene_stream = Gallery(plan.seed, plan.side, plan.patch // FINE, plan.repeats)
    data = DataLoader(scene_stream, plan.batch, collate_fn=joined, num_workers=1)
    weights = {"pixels": 1.0, "dense": plan.dense, "outline": plan.dense}
    held_out = list(scenes.generate(HELD_OUT, seed=HELD_OUT_SEED))
    for batch in itertools.islice(data, learning.last):
        learning.step(trainee.losses(batch, alone=learning.done < plan.vision_steps), weights)
        if learning.due(plan.measure, after=plan.vision_steps):
            found = overlap.measure(save(trainee, plan, out), held_out)
            log.info("held out: %s", json.dumps(found))


def save(trainee: Trainee, plan: Plan, out: Path) -> Any:
    """Write the model and its processor in the layout that `from_pretrained` reads; returns the plain model."""
    net = bare(plan).eval()
    net.load_state_dict(trainee.state())
    net.save_pretrained(out)
    processor(plan).save_pretrained(out)
    write_plan(plan, out)
    return net


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: every number of the plan is an option."""
    command(__doc__, PLANS, train, arguments)


if __name__ == "__main__":
    main()
