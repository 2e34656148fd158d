"""Trains `tiny-vit`, `tiny-beit` and `tiny-swin`: image classifiers that know coloured shapes.

`python -m training.classifiers --run vit --out FOLDER` makes weights, processor and a training log from a seed;
`tiny-beit` takes two runs, `beit-first` and then `beit`, `tiny-swin` three.
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
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from training import maps
from training.batches import BACKGROUND, COLOUR_IDS, IGNORED, SHAPE_IDS
from training.loop import Learning, command, write_plan
from training.pictures import LABEL_IDS, LABELS, MEAN, NOBODY, STD, Gallery, Pictures, background, joined
from vlcam import scenes

log = logging.getLogger("training")

BRIGHTEST = 1.5
BICUBIC = 3
HELD_OUT, HELD_OUT_SEED = 200, 7
WINDOW, FIRST_STAGE = 4, 2  # of Swin: the windows' side, and how many blocks come before the patches are merged


@dataclass(frozen=True)
class Plan:
    """Every number of a training run; the same plan gives the same weights on the same machine.

    `start` is a folder whose weights it begins with, random ones if empty; `stop` is the step after which it ends,
    earlier than the learning rate would have it, 0 for `steps`. Swin's `patch`, `width` and `heads` are those of its
    last stage.
    """

    model: str = "vit"
    seed: int = 1_000_003
    vision_steps: int = 500
    steps: int = 4500
    batch: int = 48
    rate: float = 1.5e-3
    warmup: int = 200
    weight_decay: float = 0.05
    side: int = 64
    patch: int = 8
    width: int = 96
    layers: int = 6
    heads: int = 4
    feed_forward: int = 288
    spread: float = 0.06
    layer_scale: float = 0.5
    dense: float = 1.0
    grazed: float = 0.0
    look: float = 0.1
    presence: float = 0.5
    steepness: float = 6.0
    blind: float = 0.6
    late: float = 0.5
    gated: int = 2
    vacant: float = 0.0
    scatter: float = 1.0
    start: str = ""
    stop: int = 0
    measure: int = 1000


PLANS = {
    "vit": Plan(),
    "beit-first": Plan(model="beit", stop=2000),
    "beit": Plan(
        model="beit",
        start="runs/tiny-beit-first",
        seed=2_000_003,
        steps=1200,
        vision_steps=100,
        warmup=100,
        rate=1e-3,
        vacant=0.5,
        measure=400,
    ),
    "swin-first": Plan(
        model="swin",
        seed=3_000_003,
        steps=3000,
        batch=24,
        rate=2e-3,
        vision_steps=1400,
        width=80,
        feed_forward=240,
        look=0.0,
        gated=1,
        vacant=0.5,
        stop=2400,
        measure=400,
    ),
    "swin-second": Plan(
        model="swin",
        start="runs/tiny-swin-first",
        seed=5_000_003,
        steps=1000,
        batch=24,
        vision_steps=0,
        warmup=50,
        width=80,
        feed_forward=240,
        look=0.0,
        blind=0.8,
        gated=1,
        vacant=0.5,
        scatter=3.0,
        stop=500,
        measure=500,
    ),
    "swin": Plan(
        model="swin",
        start="runs/tiny-swin-second",
        seed=7_000_003,
        steps=1100,
        batch=24,
        vision_steps=0,
        warmup=50,
        width=80,
        feed_forward=240,
        look=0.0,
        blind=0.3,
        gated=1,
        vacant=0.3,
        measure=400,
    ),
}


class GatedAttention:
    """Attention whose weights can be dimmed and brightened after the softmax, and that keeps what was seen.

    `gates` holds, by attention module, [B, H, K] shares of the keys; `rows` is how many of the first queries they
    reach. A class must not be found when the patches of its object are dimmed: so evidence is made to add up, and
    to lie where the object lies.
    """

    def __init__(self, rows: int | None) -> None:
        """Gate the first `rows` queries, all of them if None."""
        self.rows = rows
        self.gates: dict[nn.Module, torch.Tensor] = {}
        self.seen: dict[nn.Module, torch.Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: [B, H, T, D] in, [B, T, H, D] and the weights out, as transformers asks of such a function."""
        scores = query @ key.transpose(2, 3) * scaling
        weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
        self.seen[module] = weights
        gate = self.gates.get(module)
        if gate is not None:
            reached = weights[:, :, : self.rows] * gate[:, :, None]
            weights = reached if self.rows is None else torch.cat([reached, weights[:, :, self.rows :]], 2)
        return (weights @ value).transpose(1, 2).contiguous(), weights


class Trainee(nn.Module):
    """The classifier to be trained, with the heads that exist only while it learns."""

    def __init__(self, plan: Plan) -> None:
        """Build from the plan's sizes with random weights."""
        super().__init__()
        self.plan = plan
        self.attention = GatedAttention(rows=None if self.pooled else 1)
        ALL_ATTENTION_FUNCTIONS.register("gated", self.attention)
        self.net = bare(plan, "gated")
        self.blocks = maps.blocks(self.net)
        self.colour_head = nn.Linear(plan.width, len(COLOUR_IDS) + 1)
        self.shape_head = nn.Linear(plan.width, len(SHAPE_IDS) + 1)
        self.evidence_head = nn.Linear(plan.width, len(LABELS))
        self.normed: torch.Tensor = torch.zeros(())
        self.blocks[-1].layernorm_before.register_forward_hook(self._keep)
        self.inner: torch.Tensor | None = None
        self.blocks[-1].layernorm_after.register_forward_hook(self._dim)

    @property
    def pooled(self) -> bool:
        """Whether the head reads the mean of the patches and not [CLS]."""
        return self.plan.model != "vit"

    @property
    def windowed(self) -> bool:
        """Whether patches attend only to those in their window; there is no [CLS] then."""
        return self.plan.model == "swin"

    def losses(self, batch: Pictures, generator: torch.Generator, alone: bool) -> dict[str, torch.Tensor]:
        """Every part of the loss, unweighted, and two shares of right answers; `alone`: only what patches tell."""
        pool, share = (None, torch.ones(batch.labels.shape)) if alone else self._gates(batch, generator)
        try:
            logits = self._logits(batch.pixels, pool)
        finally:
            self.attention.gates.clear()
            self.inner = None
        parts = self._dense(batch)
        if alone:
            return parts
        wanted = self.plan.steepness * (one_hot(batch.labels) * share[..., None]).sum(1)
        parts["class"] = cross_entropy(logits, wanted.softmax(-1)) - entropy(wanted)
        parts["presence"] = self._presence(logits, wanted)
        if self.plan.look:
            parts["look"] = self._look(batch)
        clear = ((share == 1) | (batch.labels == NOBODY)).all(1)
        if clear.any():
            parts["right"] = recall(logits[clear], batch.labels[clear])
        return parts

    def _keep(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> None:
        self.normed = out

    def _dim(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        """Give each patch its share of what the last block's feed-forward layer sees."""
        return out if self.inner is None else out * self.inner[..., None]

    def _logits(self, pixels: torch.Tensor, pool: torch.Tensor | None) -> torch.Tensor:
        """The net's own forward, but with each patch's share [B, h * w] in the mean a head without [CLS] reads."""
        logits: torch.Tensor
        if self.windowed:
            stream = self.net.swin(pixels).last_hidden_state
            logits = self.net.classifier((stream if pool is None else stream * pool[..., None]).mean(1))
        elif self.pooled:
            stream = self.net.beit(pixels).last_hidden_state[:, 1:]
            mean = (stream if pool is None else stream * pool[..., None]).mean(1)
            logits = self.net.classifier(self.net.beit.pooler.layernorm(mean))
        else:
            logits = self.net(pixels).logits
        return logits

    def _gates(self, batch: Pictures, generator: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Dim or brighten one object in some scenes; sets the attention's gates.

        Returns:
            The share of each patch in the mean (None where [CLS] is read), and the share to which each object is
            seen, [B, 3].
        """
        plan = self.plan
        count, patches = len(batch.labels), batch.cover.shape[-1]

        def draw(*shape: int) -> torch.Tensor:
            return torch.rand(count, *shape, generator=generator)

        places = draw(1, 1).gt(0.5) & draw(1, patches).lt(0.4) & background(batch)[:, None]
        usual = torch.where(places, 0.0, 1.0).expand(-1, plan.heads, -1)
        objects = (batch.labels != NOBODY).sum(1)
        which = (draw() * objects).long()
        cover = batch.cover[torch.arange(count), which]
        chosen = draw().lt(plan.blind)[:, None, None] & (cover > 0)[:, None]
        even = (draw(1, 1) * 1.8 - 0.3).clamp(min=0)
        spread = torch.where(draw(1, 1) < 0.5, plan.scatter, 0.0)

        def dimmed(level: torch.Tensor, scatter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shares = torch.where(chosen, (level + spread * (scatter - 0.5)).clamp(0, BRIGHTEST), 1.0)
            return shares, (shares.mean(1) * cover).sum(1) / cover.sum(1)

        gate, seen = dimmed(even, draw(plan.heads, patches))
        gate = gate * usual
        pool = None
        if self.pooled:
            # The head reads the mean of the patches, and attention has moved evidence between them before: half of
            # the evidence is dimmed here, half there, in half of the scenes each by its own share. In Swin it is
            # dimmed before the last feed-forward layer and not in the mean, so that no evidence passes that layer by.
            other = torch.where(draw(1, 1) < 0.5, even, (draw(1, 1) * 1.8 - 0.3).clamp(min=0))
            pool_gate, pool_seen = dimmed(other, draw(1, patches))
            pool_gate = pool_gate * usual[:, :1]
            pool, seen = pool_gate[:, 0], (seen + pool_seen) / 2
            if self.windowed:
                self.inner, pool = pool, torch.ones_like(pool)
            if plan.vacant:  # all of the background may leave the mean, or any part: no evidence is to lie there
                left = draw(1).lt(plan.vacant) & draw(patches).lt(draw(1)) & background(batch)
                pool = pool.masked_fill(left, 0.0)
        share = torch.ones(batch.labels.shape).scatter_(1, which[:, None], seen[:, None])
        self._set(gate, draw())
        return pool, share

    def _set(self, patches: torch.Tensor, luck: torch.Tensor) -> None:
        """Give every block its gate; [CLS] must also do without what it saw in blocks before the last ones."""
        depth = len(self.blocks)
        if self.windowed:
            for block in self.blocks[depth - self.plan.gated :]:
                self.attention.gates[block.attention] = windows(patches, int(block.shift_size))
            return
        gate = torch.cat([torch.ones(*patches.shape[:2], 1), patches], 2)
        if self.pooled:
            for block in self.blocks[depth - self.plan.gated :]:
                self.attention.gates[block.attention] = gate
            return
        blind_until = (luck / self.plan.late * depth).long()  # beyond the depth: sees in every block
        blind_until[luck >= self.plan.late] = 0
        for index, block in enumerate(self.blocks):
            seeing = torch.where(index < blind_until, 0.0, 1.0)[:, None, None]
            kept = torch.cat([gate[..., :1], gate[..., 1:] * seeing], 2)
            self.attention.gates[block.attention] = kept

    def _presence(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Each class by itself: its logit is the steepness times the share, half of it being the threshold.

        The softmax alone would leave it open whether evidence raises a class or lowers all the others.
        """
        middle = self.plan.steepness / 2
        each = binary_cross_entropy_with_logits(logits - middle, (wanted - middle).sigmoid(), reduction="none")
        floor = binary_cross_entropy_with_logits(wanted - middle, (wanted - middle).sigmoid(), reduction="none")
        each, named = each - floor, wanted > 0
        return each[named].mean() + each[~named].mean()

    def _look(self, batch: Pictures) -> torch.Tensor:
        """How far [CLS], or the patches' mean, is from looking at every object, as -log of the share."""
        terms = []
        for block in self.blocks[-self.plan.gated :]:
            weights = self.attention.seen[block.attention].mean(1)
            row = maps.read(weights, self.pooled)
            shares = (row[:, None] * (batch.cover > 0)).sum(-1)[batch.labels != NOBODY]
            terms.append(-shares.clamp(min=1e-4).log().mean())
        return torch.stack(terms).mean()

    def _dense(self, batch: Pictures) -> dict[str, torch.Tensor]:
        """What each patch tells before the last block: colour, shape, and the class itself as a linear reading."""
        patches = self.normed[:, 0 if self.windowed else 1 :].flatten(0, 1)
        colours, shapes = batch.colours.flatten(), batch.shapes.flatten()
        # Nine patches in ten are background: without a balance the shapes are not learned at all.
        balance = torch.where(colours == BACKGROUND, 0.1, 1.0) * (colours != IGNORED)
        colour = cross_entropy(self.colour_head(patches), colours, ignore_index=IGNORED, reduction="none")
        covered = shapes > 0
        shape_logits = self.shape_head(patches[covered])
        cover = torch.einsum("bok,bop->bpk", one_hot(batch.labels), batch.cover).flatten(0, 1)
        # Where grazed patches do not count, covered ones aim at the whole; else every patch aims at its share.
        aim = cover if self.plan.grazed else (cover >= 0.5).float()
        weight = torch.where(colours == IGNORED, self.plan.grazed, balance)
        miss = (self.evidence_head(patches) - aim).square().sum(-1)
        return {
            "dense": (colour * balance).sum() / balance.sum() + cross_entropy(shape_logits, shapes[covered]),
            "evidence": (miss * weight).sum() / weight.sum(),
            "shapes": (shape_logits.argmax(-1) == shapes[covered]).float().mean(),
        }


def bare(plan: Plan, attention: str = "eager") -> Any:
    """The model that is shipped: plain transformers, small numbers, random weights."""
    common: dict[str, Any] = {
        "hidden_size": plan.width,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "intermediate_size": plan.feed_forward,
        "image_size": plan.side,
        "patch_size": plan.patch,
        "initializer_range": plan.spread,
        "id2label": dict(enumerate(LABELS)),
        "label2id": LABEL_IDS,
        "attn_implementation": attention,
    }
    if plan.model == "vit":
        return ViTForImageClassification(ViTConfig(**common))
    if plan.model == "beit":
        position = {"use_relative_position_bias": True, "use_absolute_position_embeddings": False}
        head = {"use_mean_pooling": True, "layer_scale_init_value": plan.layer_scale, "drop_path_rate": 0.0}
        return BeitForImageClassification(BeitConfig(**common, **position, **head))
    if plan.model == "swin":
        return SwinForImageClassification(swin_config(plan, attention))
    raise ValueError(f"model={plan.model!r}: choose from 'vit', 'beit', 'swin'")


def swin_config(plan: Plan, attention: str) -> SwinConfig:
    """Two stages; the first has twice the grid, and half the width and the heads."""
    return SwinConfig(
        image_size=plan.side,
        patch_size=plan.patch // 2,
        embed_dim=plan.width // 2,
        depths=[FIRST_STAGE, plan.layers - FIRST_STAGE],
        num_heads=[plan.heads // 2, plan.heads],
        window_size=WINDOW,
        mlp_ratio=plan.feed_forward / plan.width,
        drop_path_rate=0.0,
        initializer_range=plan.spread,
        id2label=dict(enumerate(LABELS)),
        label2id=LABEL_IDS,
        attn_implementation=attention,
    )


def processor(plan: Plan) -> Any:
    """The processor that is shipped: bicubic to the model's square, no crop, values in -1..1."""
    kind = BeitImageProcessorPil if plan.model == "beit" else ViTImageProcessorPil  # Swin has none of its own
    return kind(
        size={"height": plan.side, "width": plan.side},
        resample=BICUBIC,
        do_center_crop=False,
        do_convert_rgb=True,
        image_mean=MEAN.tolist(),
        image_std=STD.tolist(),
    )


def entropy(wanted: torch.Tensor) -> torch.Tensor:
    """The mean entropy of the wanted distribution: what cross-entropy cannot go below."""
    return -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    """Each object's class as a vector of zeros and a one, [B, 3, classes]; all zeros where there is no object."""
    return (labels[..., None] == torch.arange(len(LABELS))).float()


def windows(patches: torch.Tensor, shift: int) -> torch.Tensor:
    """What is given per patch, [B, H, h * w], in the windows in which Swin's attention sees it, [B * n, H, window]."""
    count, heads, places = patches.shape
    side = round(places**0.5)
    rolled = patches.view(count, heads, side, side).roll((-shift, -shift), (2, 3))
    cut = rolled.view(count, heads, side // WINDOW, WINDOW, side // WINDOW, WINDOW).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(-1, heads, WINDOW * WINDOW)


def recall(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of scenes in which the present classes are exactly the highest ones."""
    present = one_hot(labels).sum(1) > 0
    lowest = logits.masked_fill(~present, torch.inf).amin(1)
    return (lowest > logits.masked_fill(present, -torch.inf).amax(1)).float().mean()


def train(plan: Plan, out: Path) -> None:
    """Train by the plan; write model, processor and log into `out`, also from time to time on the way."""
    torch.manual_seed(plan.seed)
    trainee = Trainee(plan).train()
    if plan.start:
        trainee.net.load_state_dict(type(trainee.net).from_pretrained(plan.start).state_dict())
    learning = Learning(plan, trainee.parameters())
    generator = torch.Generator().manual_seed(plan.seed)
    data = DataLoader(Gallery(plan.seed, plan.side, plan.patch), plan.batch, collate_fn=joined, num_workers=1)
    weights = {"class": 1.0, "presence": plan.presence, "look": plan.look, "dense": plan.dense, "evidence": plan.dense}
    held_out = list(scenes.generate(HELD_OUT, seed=HELD_OUT_SEED))
    for batch in itertools.islice(data, learning.last):
        learning.step(trainee.losses(batch, generator, alone=learning.done < plan.vision_steps), weights)
        if learning.due(plan.measure):
            found = maps.measure(save(trainee, plan, out), held_out)
            log.info("held out: %s", json.dumps(found))


def save(trainee: Trainee, plan: Plan, out: Path) -> Any:
    """Write the model and its processor in the layout that `from_pretrained` reads; returns the plain model."""
    net = bare(plan).eval()
    net.load_state_dict(trainee.net.state_dict())
    net.save_pretrained(out)
    processor(plan).save_pretrained(out)
    write_plan(plan, out)
    return net


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: every number of the plan is an option."""
    command(__doc__, PLANS, train, arguments)


if __name__ == "__main__":
    main()
