"""Trains `tiny-blip-itm`: a BLIP with an image-text matching head that knows coloured shapes.

`python -m training.blip_itm --out FOLDER` makes weights, processor and a training log from a seed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipProcessor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from training.batches import BACKGROUND, COLOUR_IDS, IGNORED, SHAPE_IDS, Sample, Scenes
from training.loop import Learning, command, write_plan
from training.vocabulary import BEGIN_TOKENS, tokenizer
from vlcam import scenes

log = logging.getLogger("training")

BRIGHTEST = 1.5


@dataclass(frozen=True)
class Plan:
    """Every number of a training run; the same plan gives the same weights on the same machine."""

    seed: int = 1_000_003
    vision_steps: int = 1100
    steps: int = 4400
    batch: int = 48
    rate: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.05
    side: int = 64
    patch: int = 8
    width: int = 128
    vision_layers: int = 4
    vision_heads: int = 4
    text_layers: int = 3
    text_heads: int = 2
    feed_forward: int = 384
    projection: int = 64
    spread: float = 0.06
    longest: int = 40
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.0
    dense: float = 1.0
    look: float = 0.3
    token: float = 0.5
    contrastive: float = 0.2
    blind: float = 0.6
    smoothing: float = 0.02


PLANS = {"itm": Plan()}


class GatedDropout(nn.Dropout):
    """Attention dropout that can also dim and brighten what a query sees: `gate` is [B, H, T, K], or None.

    A caption must not be confirmed when the patches of one of its objects are dimmed, or when the words of one
    of its phrases cannot see. So evidence is made to add up, and to lie where the object lies: more attention
    to the object, more match.
    """

    gate: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def forward(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Drop out, then dim: [B, H, T, K] in and out; what came in is kept as `seen`."""
        self.seen = probabilities
        kept = super().forward(probabilities)
        return kept if self.gate is None else kept * self.gate


class Trainee(nn.Module):
    """The BLIP to be trained, with the heads that exist only while it learns."""

    def __init__(self, plan: Plan, words: BertTokenizer) -> None:
        """Build from the plan's sizes with random weights."""
        super().__init__()
        self.plan, self.words = plan, words
        self.blip = BlipForImageTextRetrieval(config(plan, words))
        self.colour_head = nn.Linear(plan.width, len(COLOUR_IDS) + 1)
        self.shape_head = nn.Linear(plan.width, len(SHAPE_IDS) + 1)
        self.token_head = nn.Linear(plan.width, 2)
        self.shape_accuracy = torch.zeros(())
        self.gates = [GatedDropout(plan.attention_dropout) for _ in self.blip.text_encoder.encoder.layer]
        for gate, layer in zip(self.gates, self.blip.text_encoder.encoder.layer, strict=True):
            layer.crossattention.self.dropout = gate

    def sight(self, batch: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """The losses of the first steps, in which the vision tower alone learns what covers each patch."""
        image = self.blip.vision_model(torch.stack([s.pixels for s in batch])).last_hidden_state
        return {"dense": self._dense(image, batch), "shapes": self.shape_accuracy}

    def losses(self, batch: Sequence[Sample], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Every part of the loss, unweighted, and the share of captions judged rightly."""
        half = len(batch)
        image = self.blip.vision_model(torch.stack([s.pixels for s in batch])).last_hidden_state
        captions = [s.true for s in batch] + [s.false for s in batch]
        coded = self.words([c.text for c in captions], padding=True, return_offsets_mapping=True, return_tensors="pt")
        owner = phrase_of_token(captions, coded["offset_mapping"])
        gate, dimmed = self._gates(batch, owner, generator)
        present = confirmed(dimmed)
        for row, sample in enumerate(batch):
            present[half + row, sample.wrong] = self.plan.smoothing
        match = present.amin(1)
        ids = coded["input_ids"].clone()
        ids[:, 0] = encode_token(self.words)
        hidden = self._fuse(ids, coded["attention_mask"], image.repeat(2, 1, 1), gate)
        logits = self.blip.itm_head(hidden[:, 0])
        parts = {"look": self._look(batch, owner), "itm": soft_cross_entropy(logits, match)}
        named = owner >= 0
        truth = present.gather(1, owner.clamp(min=0))[named]
        parts["token"] = soft_cross_entropy(self.token_head(hidden[named]), truth)
        parts["dense"] = self._dense(image, batch)
        parts["contrastive"] = self._contrastive(image, coded["input_ids"][:half], coded["attention_mask"][:half])
        clear = (dimmed == 1).all(1)
        parts["shapes"] = self.shape_accuracy
        parts["right"] = ((logits[:, 1] > logits[:, 0]) == (match > 0.5))[clear].float().mean()
        return parts

    def _gates(
        self, batch: Sequence[Sample], owner: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dim or brighten an object of some true captions: the gate [2B, H, T, K], and each phrase's share [2B, P]."""
        half, patches, heads = len(batch), batch[0].cover.shape[-1], self.plan.text_heads
        left = torch.ones(2 * half, 4)
        gate = torch.ones(2 * half, heads, owner.shape[1], 1 + patches)
        for row in range(2 * half):
            cover = batch[row % half].cover
            if torch.rand((), generator=generator) < 0.5:  # the background may vanish without consequence
                hidden = (torch.rand(patches, generator=generator) < 0.4) & ~(cover > 0).any(0)
                gate[row, :, :, 1:][..., hidden] = 0.0
            if row < half and torch.rand((), generator=generator) < self.plan.blind:
                which = int(torch.randint(len(cover), (), generator=generator))
                share = (torch.rand((), generator=generator) * 1.8 - 0.3).clamp(min=0)
                kind = int(torch.randint(3, (), generator=generator))
                if kind == 0:  # its words see less
                    gate[row, :, owner[row] == which] = share
                elif kind == 1:  # its patches are seen less
                    gate[row, :, :, 1:][..., cover[which] > 0] = share
                else:  # each of its patches, in each head, is seen less or more
                    spread = torch.rand(heads, patches, generator=generator) - 0.5
                    scattered = (share + spread).clamp(0, BRIGHTEST)
                    gate[row, :, :, 1:] *= torch.where(cover[which] > 0, scattered, torch.ones(()))[:, None]
                    share = (scattered.mean(0) * cover[which]).sum() / cover[which].sum()
                left[row, which] = share
        return gate, left

    def _fuse(self, ids: torch.Tensor, mask: torch.Tensor, image: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        for module in self.gates:
            module.gate = gate
        try:
            made = self.blip.text_encoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=image)
            hidden: torch.Tensor = made.last_hidden_state
            return hidden
        finally:
            for module in self.gates:
                module.gate = None

    def _look(self, batch: Sequence[Sample], owner: torch.Tensor) -> torch.Tensor:
        """How far the words of true phrases are from looking at their object, in every block, as -log of the share."""
        words = owner[: len(batch)]
        rows, columns = torch.nonzero(words >= 0, as_tuple=True)
        objects = torch.stack(
            [batch[row].cover[words[row, column]] > 0 for row, column in zip(rows, columns, strict=True)]
        )
        terms = []
        for module in self.gates:
            if module.seen is None:
                raise RuntimeError("cross-attention did not run")
            share = (module.seen[rows, :, columns, 1:].mean(1) * objects).sum(-1)
            terms.append(-share.clamp(min=1e-4).log().mean())
            module.seen = None
        return torch.stack(terms).mean()

    def _dense(self, image: torch.Tensor, batch: Sequence[Sample]) -> torch.Tensor:
        patches = image[:, 1:].flatten(0, 1)
        colours = torch.cat([s.colours for s in batch])
        shapes = torch.cat([s.shapes for s in batch])
        # Nine patches in ten are background: without a balance the shapes are not learned at all.
        balance = torch.where(colours == BACKGROUND, 0.1, 1.0) * (colours != IGNORED)
        colour = cross_entropy(self.colour_head(patches), colours, ignore_index=IGNORED, reduction="none")
        shape_logits, covered = self.shape_head(patches[shapes > 0]), shapes[shapes > 0]
        self.shape_accuracy = (shape_logits.argmax(-1) == covered).float().mean()
        return (colour * balance).sum() / balance.sum() + cross_entropy(shape_logits, covered)

    def _contrastive(self, image: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        text = self.blip.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        left = normalize(self.blip.vision_proj(image[:, 0]), dim=-1)
        right = normalize(self.blip.text_proj(text), dim=-1)
        logits = left @ right.t() / 0.07
        aim = torch.arange(len(logits))
        return (cross_entropy(logits, aim) + cross_entropy(logits.t(), aim)) / 2


def config(plan: Plan, words: BertTokenizer) -> BlipConfig:
    """The model's configuration: real BLIP, small numbers."""
    return BlipConfig(
        text_config={
            "vocab_size": len(words) + len(BEGIN_TOKENS),
            "hidden_size": plan.width,
            "encoder_hidden_size": plan.width,
            "intermediate_size": plan.feed_forward,
            "num_hidden_layers": plan.text_layers,
            "num_attention_heads": plan.text_heads,
            "initializer_range": plan.spread,
            "max_position_embeddings": plan.longest,
            "hidden_dropout_prob": plan.hidden_dropout,
            "attention_probs_dropout_prob": plan.attention_dropout,
            "pad_token_id": words.pad_token_id,
            "sep_token_id": words.sep_token_id,
            "eos_token_id": words.sep_token_id,
            "bos_token_id": len(words),
        },
        vision_config={
            "hidden_size": plan.width,
            "intermediate_size": plan.feed_forward,
            "num_hidden_layers": plan.vision_layers,
            "num_attention_heads": plan.vision_heads,
            # The default of the configuration class is 1e-10, from which a vision tower hardly learns.
            "initializer_range": plan.spread,
            "image_size": plan.side,
            "patch_size": plan.patch,
        },
        image_text_hidden_size=plan.projection,
    )


def confirmed(share: torch.Tensor) -> torch.Tensor:
    """How far a phrase counts as true when its object is seen to some share of the usual, 0 to `BRIGHTEST`.

    The logit rises with the share at a constant slope, also beyond the usual 1: a model whose answer peaked there
    would read more of the same evidence as evidence against.
    """
    return torch.sigmoid(6 * (share - 0.5))


def encode_token(words: BertTokenizer) -> int:
    """The id of [ENC], which opens the text when image and text are matched."""
    return len(words) + BEGIN_TOKENS.index("[ENC]")


def phrase_of_token(captions: Sequence[scenes.Caption], offsets: torch.Tensor) -> torch.Tensor:
    """The index of the phrase that each token belongs to, [B, T], -1 for tokens outside any phrase."""
    owner = torch.full(offsets.shape[:2], -1)
    starts, ends = offsets.unbind(-1)
    for row, caption in enumerate(captions):
        for index, (start, end) in enumerate(caption.spans):
            owner[row, (starts[row] >= start) & (ends[row] <= end) & (ends[row] > starts[row])] = index
    return owner


def soft_cross_entropy(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of two logits against the wanted probability of the second."""
    return cross_entropy(logits, torch.stack([1 - positive, positive], -1))


def train(plan: Plan, out: Path) -> None:
    """Train by the plan; write model, processor and log into `out`, also from time to time on the way."""
    torch.manual_seed(plan.seed)
    words = tokenizer(plan.longest)
    trainee = Trainee(plan, words).train()
    learning = Learning(plan, trainee.parameters())
    generator = torch.Generator().manual_seed(plan.seed)
    data = DataLoader(Scenes(plan.seed, plan.side, plan.patch), plan.batch, collate_fn=list, num_workers=1)
    weights = {"itm": 1.0, "token": plan.token, "look": plan.look, "dense": plan.dense, "contrastive": plan.contrastive}
    for batch in itertools.islice(data, learning.last):
        alone = learning.done < plan.vision_steps
        learning.step(trainee.sight(batch) if alone else trainee.losses(batch, generator), weights)
        if learning.due(500):
            save(trainee, plan, words, out)


def save(trainee: Trainee, plan: Plan, words: BertTokenizer, out: Path) -> None:
    """Write the model in half precision and its processor, in the layout that `from_pretrained` reads."""
    blip = BlipForImageTextRetrieval(config(plan, words))
    blip.load_state_dict(trainee.blip.state_dict())
    blip.half().save_pretrained(out)
    images = BlipImageProcessorPil(size={"height": plan.side, "width": plan.side})
    BlipProcessor(images, words).save_pretrained(out)
    write_plan(plan, out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: every number of the plan is an option."""
    command(__doc__, PLANS, train, arguments)


if __name__ == "__main__":
    main()
