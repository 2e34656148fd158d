"""Trains `tiny-clip`: a CLIP that knows coloured shapes, by captions, phrases and what the patches tell.

`python -m training.clip --run first --out FOLDER` makes weights, processor and a training log from a seed, and so does
`--run last` from the weights of the first run.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.utils.data import DataLoader
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from training import clip_maps
from training.batches import BACKGROUND, COLOUR_IDS, IGNORED, SHAPE_IDS, Sample, Scenes
from training.classifiers import BRIGHTEST, entropy, one_hot, recall
from training.loop import Learning, command, write_plan
from training.pictures import LABEL_IDS, LABELS, MOST, NOBODY
from training.pieces import tokenizer
from vlcam import scenes

log = logging.getLogger("training")

BICUBIC = 3
MOST_SCALE = math.log(100)  # CLIP's own bound
# {0} is the phrase, {1} its article: a prompt's wording must not matter.
PROMPTS = (
    *("{1} {0}", "{0}", "the {0}", "this is {1} {0}"),
    *("there is {1} {0}", "a picture of {1} {0}", "a photo of {1} {0}"),
)


@dataclass(frozen=True)
class Plan:
    """Every number of a training run; the same plan gives the same weights on the same machine.

    `start` is a folder whose weights it begins with, random ones if empty; `stop` is the step after which it ends,
    earlier than the learning rate would have it, 0 for `steps`.
    """

    model: str = "clip"
    start: str = ""
    seed: int = 1_000_003
    vision_steps: int = 900
    steps: int = 4800
    stop: int = 0
    batch: int = 32
    rate: float = 1.5e-3
    warmup: int = 200
    weight_decay: float = 0.05
    side: int = 96
    patch: int = 8
    width: int = 96
    layers: int = 4
    heads: int = 4
    text_width: int = 64
    text_layers: int = 3
    projection: int = 64
    longest: int = 32
    bfloat16: int = 1
    spread: float = 0.06
    dense: float = 1.0
    look: float = 0.1
    presence: float = 0.5
    captions: float = 0.3
    point: float = 0.0
    steepness: float = 6.0
    blind: float = 0.6
    late: float = 0.5
    gated: int = 2
    scatter: float = 1.0
    measure: int = 800


PLANS = {
    "first": Plan(stop=2400),
    "last": Plan(
        start="runs/tiny-clip-first",
        seed=2_000_003,
        vision_steps=0,
        steps=2800,
        rate=1e-3,
        warmup=100,
        point=0.2,
        measure=400,
    ),
}


@dataclass(frozen=True)
class Batch:
    """Scenes with a true and a false caption each.

    `pixels` is [B, 3, S, S]; `cover` [B, 3, h * w] is the share of each patch that each object covers, zero where a
    scene has fewer objects; `labels` [B, 3] is each object's class, -1 where there is none, and `false_labels` what the
    false caption names; `colours` and `shapes` [B, h * w] label the patches.
    """

    pixels: torch.Tensor
    cover: torch.Tensor
    labels: torch.Tensor
    false_labels: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor
    true: list[str]
    false: list[str]


def joined(samples: Sequence[Sample]) -> Batch:
    """One batch out of many scenes."""
    cover = torch.zeros(len(samples), MOST, samples[0].cover.shape[-1])
    for row, sample in enumerate(samples):
        cover[row, : len(sample.cover)] = sample.cover
    return Batch(
        torch.stack([s.pixels for s in samples]),
        cover,
        labels([s.true for s in samples]),
        labels([s.false for s in samples]),
        torch.stack([s.colours for s in samples]),
        torch.stack([s.shapes for s in samples]),
        [s.true.text for s in samples],
        [s.false.text for s in samples],
    )


def labels(captions: Sequence[scenes.Caption]) -> torch.Tensor:
    """The classes that each caption names, [B, 3], -1 where it names fewer."""
    found = torch.full((len(captions), MOST), NOBODY)
    for row, caption in enumerate(captions):
        found[row, : len(caption.phrases)] = torch.tensor([LABEL_IDS[phrase] for phrase in caption.phrases])
    return found


class GatedAttention:
    """Attention in which what the first query, [CLS], sees can be dimmed and brightened after the softmax.

    `gates` holds, by attention module, [B, H, K] shares of the keys, `seen` the row of [CLS] before it was gated,
    [B, H, K].
    """

    def __init__(self) -> None:
        """No gate at first."""
        self.gates: dict[nn.Module, torch.Tensor] = {}
        self.seen: dict[nn.Module, torch.Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend: [B, H, T, D] in, [B, T, H, D] out, as transformers asks of such a function."""
        weights = (query @ key.transpose(2, 3) * scaling).softmax(-1)
        row = weights[:, :, :1].float()
        self.seen[module] = row[:, :, 0]
        gate = self.gates.get(module)
        found = [(row if gate is None else row * gate[:, :, None]) @ value.float()]
        if query.shape[2] > 1:
            found.append((weights[:, :, 1:].to(value.dtype) @ value).float())
        return torch.cat(found, 2).transpose(1, 2).contiguous(), None


class Trainee(nn.Module):
    """The CLIP to be trained, with what exists only while it learns."""

    def __init__(self, plan: Plan) -> None:
        """Build from the plan's sizes with random weights."""
        super().__init__()
        self.plan, self.words = plan, tokenizer(plan.longest)
        self.attention = GatedAttention()
        ALL_ATTENTION_FUNCTIONS.register("gated-clip", self.attention)
        self.net = bare(plan, self.words)
        self.net.vision_model.config._attn_implementation = "gated-clip"  # noqa: SLF001 - text stays as it is
        self.blocks = self.net.vision_model.encoder.layers
        self.colour_head = nn.Linear(plan.width, len(COLOUR_IDS) + 1)
        self.shape_head = nn.Linear(plan.width, len(SHAPE_IDS) + 1)
        self.evidence_head = nn.Linear(plan.width, len(LABELS))
        self.threshold = nn.Parameter(torch.tensor(plan.steepness / 2))
        self.normed: torch.Tensor = torch.zeros(())

    def losses(self, batch: Batch, generator: torch.Generator, alone: bool) -> dict[str, torch.Tensor]:
        """Every part of the loss, unweighted, and some shares of right answers; `alone`: only what patches tell."""
        share = torch.ones(batch.labels.shape) if alone else self._gates(batch, generator)
        try:
            pooled = self.sight(batch.pixels)
        finally:
            self.attention.gates.clear()
        parts = self._dense(batch)
        if alone:
            return parts
        image = normalize(self.net.visual_projection(pooled), dim=-1)
        text = self.text([*prompts(generator), *batch.true, *batch.false])
        logits = self.net.logit_scale.exp() * image @ text.T
        phrases, captions = logits[:, : len(LABELS)], logits[:, len(LABELS) :]
        wanted = self.plan.steepness * (one_hot(batch.labels) * share[..., None]).sum(1)
        parts["phrase"] = cross_entropy(phrases, wanted.softmax(-1)) - entropy(wanted)
        parts["presence"] = self._presence(phrases, wanted)
        parts["look"] = self._look(batch)
        if self.plan.point:
            parts["point"] = self._point(phrases, batch, generator)
        clear = ((share == 1) | (batch.labels == NOBODY)).all(1)
        if clear.any():
            parts["right"] = recall(phrases[clear], batch.labels[clear])
            parts["captions"] = matched(captions, batch, clear)
            own = torch.arange(len(clear))
            parts["true"] = (captions[own, own] > captions[own, own + len(own)])[clear].float().mean()
        return parts

    def sight(self, pixels: torch.Tensor) -> torch.Tensor:
        """What [CLS] holds at the end, [B, width], with the last block's patches kept as `normed`.

        The last block works for [CLS] alone, as nothing reads what it makes of the patches; in bfloat16 where the plan
        says so, for speed.
        """
        vision, last = self.net.vision_model, self.blocks[-1]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.bfloat16 > 0):
            stream = vision.pre_layrnorm(vision.embeddings(pixels))
            for block in self.blocks[:-1]:
                stream = block(stream, None)
            self.normed = last.layer_norm1(stream)
            first = stream[:, :1] + self._attended(last.self_attn, self.normed)
            first = first + last.mlp(last.layer_norm2(first))
        pooled: torch.Tensor = vision.post_layernorm(first[:, 0].float())
        return pooled

    def _attended(self, module: Any, tokens: torch.Tensor) -> torch.Tensor:
        """What [CLS] takes from all tokens, [B, 1, width]."""

        def split(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(*projected.shape[:2], module.num_heads, -1).transpose(1, 2)

        query, key, value = (
            split(module.q_proj(tokens[:, :1])),
            split(module.k_proj(tokens)),
            split(module.v_proj(tokens)),
        )
        found, _ = self.attention(module, query, key, value, None, scaling=module.scale)
        out: torch.Tensor = module.out_proj(found.flatten(2))
        return out

    def text(self, texts: list[str]) -> torch.Tensor:
        """The embeddings of texts, of length one, [N, projection]."""
        coded = self.words(texts, padding=True, return_tensors="pt")
        return normalize(self.net.get_text_features(**coded).pooler_output, dim=-1)

    def clamp(self) -> None:
        """Keep the logit scale within CLIP's bound."""
        with torch.no_grad():
            self.net.logit_scale.clamp_(max=MOST_SCALE)

    def _gates(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Dim or brighten one object in some scenes; sets the attention's gates.

        Returns:
            The share to which each object is seen, [B, 3].
        """
        plan = self.plan
        count, patches = len(batch.labels), batch.cover.shape[-1]

        def draw(*shape: int) -> torch.Tensor:
            return torch.rand(count, *shape, generator=generator)

        background = (batch.cover.sum(1) == 0) & (batch.colours == BACKGROUND)
        vanished = draw(1, 1).gt(0.5) & draw(1, patches).lt(draw(1, 1)) & background[:, None]
        which = (draw() * (batch.labels != NOBODY).sum(1)).long()
        cover = batch.cover[torch.arange(count), which]
        chosen = draw().lt(plan.blind)[:, None, None] & (cover > 0)[:, None]
        even = (draw(1, 1) * 1.8 - 0.3).clamp(min=0)
        spread = torch.where(draw(1, 1) < 0.5, plan.scatter, 0.0)
        level = (even + spread * (draw(plan.heads, patches) - 0.5)).clamp(0, BRIGHTEST)
        shares = torch.where(chosen, level, 1.0)
        seen = (shares.mean(1) * cover).sum(1) / cover.sum(1)
        self._set(shares.masked_fill(vanished, 0.0), draw())
        return torch.ones(batch.labels.shape).scatter_(1, which[:, None], seen[:, None])

    def _set(self, patches: torch.Tensor, luck: torch.Tensor) -> None:
        """Give every block its gate; [CLS] must also do without what it saw in blocks before the last ones."""
        blind_until = (luck / self.plan.late * len(self.blocks)).long()
        blind_until[luck >= self.plan.late] = 0
        for index, block in enumerate(self.blocks):
            seeing = torch.where(index < blind_until, 0.0, 1.0)[:, None, None]
            own = torch.ones(*patches.shape[:2], 1)
            self.attention.gates[block.self_attn] = torch.cat([own, patches * seeing], 2)

    def _presence(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Each phrase by itself: its logit lies as far above a threshold as its object is seen.

        The softmax alone would leave it open whether evidence raises a phrase or lowers all the others.
        """
        aim = (wanted - self.plan.steepness / 2).sigmoid()
        each = binary_cross_entropy_with_logits(logits - self.threshold, aim, reduction="none")
        each = each + aim * aim.log() + (1 - aim) * (1 - aim).log()
        named = wanted > 0
        return each[named].mean() + each[~named].mean()

    def _look(self, batch: Batch) -> torch.Tensor:
        """How far [CLS] is from looking at every object, as -log of the share."""
        terms = []
        for block in self.blocks[-self.plan.gated :]:
            row = self.attention.seen[block.self_attn].mean(1)[:, 1:]
            shares = (row[:, None] * (batch.cover > 0)).sum(-1)[batch.labels != NOBODY]
            terms.append(-shares.clamp(min=1e-4).log().mean())
        return torch.stack(terms).mean()

    def _point(self, logits: torch.Tensor, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """How far the map of one phrase of each scene is from its object, as cross-entropy over the patches."""
        rows = torch.arange(len(logits))
        which = (torch.rand(len(rows), generator=generator) * (batch.labels != NOBODY).sum(1)).long()
        made = self.map_of(logits[rows, batch.labels[rows, which]])
        cover = batch.cover[rows, which]
        # Squared, so that patches which the object only grazes count little: a peak there may miss it.
        aim = cover.square() / cover.square().sum(1, keepdim=True)
        return cross_entropy(made, aim) + (aim * aim.clamp(min=1e-9).log()).sum(1).mean()

    def map_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Grad-CAM of a logit of each image at the features before the last block, times h * w, no ReLU: [B, h * w].

        Its weights, the mean gradient, are constants to the loss: the features are to change, and not the way in which
        they are read.
        """
        (gradient,) = torch.autograd.grad(logits.sum(), self.normed, retain_graph=True)
        return torch.einsum("bpd,bd->bp", self.normed[:, 1:].float(), gradient[:, 1:].float().sum(1))

    def _dense(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What each patch tells before the last block: colour, shape, and the class itself as a linear reading."""
        patches = self.normed[:, 1:].float().flatten(0, 1)
        colours, shapes = batch.colours.flatten(), batch.shapes.flatten()
        # Nine patches in ten are background: without a balance the shapes are not learned at all.
        balance = torch.where(colours == BACKGROUND, 0.1, 1.0) * (colours != IGNORED)
        colour = cross_entropy(self.colour_head(patches), colours, ignore_index=IGNORED, reduction="none")
        covered = shapes > 0
        shape_logits = self.shape_head(patches[covered])
        cover = torch.einsum("bok,bop->bpk", one_hot(batch.labels), batch.cover).flatten(0, 1)
        miss = (self.evidence_head(patches) - (cover >= 0.5).float()).square().sum(-1)
        return {
            "dense": (colour * balance).sum() / balance.sum() + cross_entropy(shape_logits, shapes[covered]),
            "evidence": (miss * balance).sum() / balance.sum(),
            "shapes": (shape_logits.argmax(-1) == shapes[covered]).float().mean(),
        }


def prompts(generator: torch.Generator) -> list[str]:
    """Every class in a wording drawn for it."""
    wording = torch.randint(len(PROMPTS), (len(LABELS),), generator=generator).tolist()
    return [clip_maps.prompt(label, PROMPTS[index]) for label, index in zip(LABELS, wording, strict=True)]


def matched(logits: torch.Tensor, batch: Batch, clear: torch.Tensor) -> torch.Tensor:
    """The contrastive loss, both ways, of the images in which nothing is dimmed.

    `logits` [B, 2 B] are those of all true and then all false captions; captions that name the same objects are
    equally right, wherever they come from.
    """
    there = one_hot(batch.labels).sum(1)
    named = torch.cat([there, one_hot(batch.false_labels).sum(1)])
    same = (there[:, None] == named[None]).all(-1).float()
    rows, columns = same[clear], same[clear][:, : len(clear)][:, clear].T
    to_text = cross_entropy(logits[clear], rows / rows.sum(1, keepdim=True))
    own = logits[clear][:, : len(clear)][:, clear].T
    return (to_text + cross_entropy(own, columns / columns.sum(1, keepdim=True))) / 2


def bare(plan: Plan, words: CLIPTokenizer) -> Any:
    """The model that is shipped: plain transformers, small numbers, random weights."""
    shared = {
        "num_attention_heads": plan.heads,
        "projection_dim": plan.projection,
        "initializer_range": plan.spread,
    }
    return CLIPModel(
        CLIPConfig(
            vision_config={
                **shared,
                "hidden_size": plan.width,
                "intermediate_size": 4 * plan.width,
                "num_hidden_layers": plan.layers,
                "image_size": plan.side,
                "patch_size": plan.patch,
            },
            text_config={
                **shared,
                "hidden_size": plan.text_width,
                "intermediate_size": 4 * plan.text_width,
                "num_hidden_layers": plan.text_layers,
                "max_position_embeddings": plan.longest,
                "vocab_size": len(words),
                "bos_token_id": words.bos_token_id,
                "eos_token_id": words.eos_token_id,
                "pad_token_id": words.pad_token_id,
            },
            projection_dim=plan.projection,
        )
    )


def processor(plan: Plan, words: CLIPTokenizer) -> CLIPProcessor:
    """The processor that is shipped: bicubic to the model's square, no crop, CLIP's own mean and deviation."""
    square = {"height": plan.side, "width": plan.side}
    images = CLIPImageProcessorPil(size=square, crop_size=square, resample=BICUBIC, do_center_crop=False)
    return CLIPProcessor(images, words)


def train(plan: Plan, out: Path) -> None:
    """Train by the plan; write model, processor and log into `out`, also from time to time on the way."""
    torch.manual_seed(plan.seed)
    trainee = Trainee(plan).train()
    if plan.start:
        trainee.net.load_state_dict(CLIPModel.from_pretrained(plan.start).state_dict())
    learning = Learning(plan, trainee.parameters(), decayed=False)
    generator = torch.Generator().manual_seed(plan.seed)
    data = DataLoader(Scenes(plan.seed, plan.side, plan.patch), plan.batch, collate_fn=joined, num_workers=1)
    weights = {
        **{"phrase": 1.0, "presence": plan.presence, "captions": plan.captions},
        **{"look": plan.look, "point": plan.point, "dense": plan.dense, "evidence": plan.dense},
    }
    for batch in itertools.islice(data, learning.last):
        learning.step(trainee.losses(batch, generator, alone=learning.done < plan.vision_steps), weights)
        trainee.clamp()
        if learning.due(plan.measure):
            found = clip_maps.measure(save(trainee, plan, out), trainee.words)
            log.info("held out: %s", json.dumps(found))


def save(trainee: Trainee, plan: Plan, out: Path) -> Any:
    """Write the model and its processor in the layout that `from_pretrained` reads; returns the plain model."""
    net = bare(plan, trainee.words).eval()
    net.load_state_dict(trainee.net.state_dict())
    net.save_pretrained(out)
    processor(plan, trainee.words).save_pretrained(out)
    write_plan(plan, out)
    return net


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: every number of the plan is an option."""
    command(__doc__, PLANS, train, arguments)


if __name__ == "__main__":
    main()
