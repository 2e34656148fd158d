"""Trains `tiny-blip-caption` and `tiny-blip-vqa`: BLIPs that write captions of coloured shapes, and answers about them.

`python -m training.blip_writing --run caption --out FOLDER` makes weights, processor and a training log from a seed.
Both begin with the weights of `tiny-blip-itm`, whose vision tower is left as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipForImageTextRetrieval,
    BlipForQuestionAnswering,
    BlipProcessor,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

import vlcam
from training import blip_itm
from training.batches import patch_cover, pixels
from training.blip_itm import BRIGHTEST, GatedDropout, confirmed, encode_token, phrase_of_token
from training.loop import Learning, command, write_plan
from training.vocabulary import BEGIN_TOKENS, QUESTION_WORDS, tokenizer
from vlcam import scenes

log = logging.getLogger("training")


@dataclass(frozen=True)
class Plan:
    """Every number of a training run; the same plan gives the same weights on the same machine.

    `start` is the folder of the BLIP with an ITM head whose weights it begins with, or the name of an embedded one;
    random ones if empty. `gallery` is how many scenes are drawn, once for all, and `stop` the step after which it ends,
    earlier than the learning rate would have it, 0 for `steps`. If `graded`, the look loss weighs patches by how much
    of them is covered.
    """

    model: str = "blip-caption"
    start: str = "tiny-blip-itm"
    seed: int = 3_000_017
    gallery: int = 6000
    steps: int = 1000
    stop: int = 0
    batch: int = 32
    rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.05
    side: int = 64
    patch: int = 8
    width: int = 128
    vision_layers: int = 4
    vision_heads: int = 4
    text_layers: int = 3
    text_heads: int = 2
    feed_forward: int = 384
    text_feed_forward: int = 384
    projection: int = 64
    spread: float = 0.06
    longest: int = 40
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.0
    look: float = 0.3
    blind: float = 0.6
    late: float = 0.3
    vacant: float = 0.5
    cls: float = 0.2
    graded: int = 1


PLANS = {
    "caption": Plan(),
    "vqa": Plan(model="blip-vqa", steps=700, text_layers=2, text_feed_forward=192),
}


@dataclass(frozen=True)
class Gallery:
    """Scenes as the vision tower, which does not learn, makes them: drawn once, and captioned anew each time.

    `seen` is [N, 1 + h * w, D]; `cover` [N, 3, h * w] is the share of each patch that each object covers,
    zero where a scene has fewer; `pairs` are colours and shapes of the objects.
    """

    seen: torch.Tensor
    cover: torch.Tensor
    pairs: list[list[tuple[str, str]]]


@dataclass(frozen=True)
class Question:
    """A question about one object of a scene, its answer, and where the word stands that tells which object."""

    text: str
    answer: str
    span: tuple[int, int]
    about: int


class Trainee(nn.Module):
    """A BLIP that writes, to be trained: what reads the image can be dimmed, and is asked where it looks."""

    net: Any

    def __init__(self, plan: Plan, words: BertTokenizer) -> None:
        """Build from the plan's sizes, and begin with the weights that the plan names."""
        super().__init__()
        self.plan, self.words = plan, words
        self.net = bare(plan, words)
        if plan.start:
            begin(self.net, plan.start, words)
        self.net.vision_model.requires_grad_(requires_grad=False)
        self.rivals = rivals(words, self.net.config.text_config.vocab_size)
        self.gates = [GatedDropout(plan.attention_dropout) for _ in self.readers]
        for gate, layer in zip(self.gates, self.readers, strict=True):
            layer.crossattention.self.dropout = gate
        if plan.model == "blip-vqa":
            for layer in self.net.text_decoder.bert.encoder.layer:
                layer.crossattention.self.register_forward_pre_hook(_heed_mask, with_kwargs=True)

    @property
    def readers(self) -> Sequence[Any]:
        """The blocks that look at the image."""
        if self.plan.model == "blip-vqa":
            return self.net.text_encoder.encoder.layer  # type: ignore[no-any-return]
        return self.net.text_decoder.bert.encoder.layer  # type: ignore[no-any-return]

    def losses(
        self, gallery: Gallery, chosen: Sequence[int], rng: np.random.Generator, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """Every part of the loss over the chosen scenes, unweighted, and the share of tokens told rightly."""
        way = self._answers if self.plan.model == "blip-vqa" else self._captions
        return way(gallery, chosen, rng, generator)

    def _captions(
        self, gallery: Gallery, chosen: Sequence[int], rng: np.random.Generator, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        captions, cover = [], gallery.cover[list(chosen)].clone()
        for row, scene in enumerate(chosen):
            order = rng.permutation(len(gallery.pairs[scene]))
            cover[row, : len(order)] = cover[row, order]
            captions.append(scenes._caption(rng, [gallery.pairs[scene][i] for i in order]))  # noqa: SLF001 - its wordings
        coded = self.words([c.text for c in captions], padding=True, return_offsets_mapping=True, return_tensors="pt")
        owner = phrase_of_token(captions, coded["offset_mapping"])
        teller = torch.full_like(owner, -1)  # a word is told by the row of the token before it
        teller[:, :-1] = owner[:, 1:]
        counts = torch.tensor([len(gallery.pairs[scene]) for scene in chosen])
        which = (torch.rand(len(counts), generator=generator) * counts).long()
        share = self._gate(cover, which, teller, generator)
        ids, mask = opened(coded, decode_token(self.words)), coded["attention_mask"]
        left = torch.where(teller == which[:, None], share[:, None], 1.0)[:, :-1]
        # How many objects there are, and what comes next, cannot be told where one of them is dimmed.
        counted = (mask[:, 1:] == 1) & ((teller[:, :-1] >= 0) | (share == 1)[:, None])
        image = gallery.seen[list(chosen)].float()
        logits = self.net.text_decoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=image).logits
        return {"look": self._look(cover, teller), **told(logits, ids, counted, left, self.rivals)}

    def _answers(
        self, gallery: Gallery, chosen: Sequence[int], rng: np.random.Generator, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        rows, asked = [], []
        for scene in chosen:
            known = questions([" ".join(pair) for pair in gallery.pairs[scene]])
            for place in rng.permutation(len(known))[:2]:
                rows.append(scene)
                asked.append(known[place])
        texts = [scenes.Caption(q.text, ("",), (q.span,)) for q in asked]
        coded = self.words([t.text for t in texts], padding=True, return_offsets_mapping=True, return_tensors="pt")
        named = phrase_of_token(texts, coded["offset_mapping"])
        owner = torch.where(named == 0, torch.tensor([q.about for q in asked])[:, None], -1)
        cover = gallery.cover[rows]
        share = self._gate(cover, torch.tensor([q.about for q in asked]), owner, generator)
        ids = opened(coded, encode_token(self.words))
        plain = torch.rand(len(ids), generator=generator) < self.plan.cls  # as the transformers class opens a question
        ids[plain, 0] = self.words.cls_token_id
        states = self.net.text_encoder(
            input_ids=ids,
            attention_mask=coded["attention_mask"],
            encoder_hidden_states=gallery.seen[rows].float(),
        ).last_hidden_state
        answers = self.words([q.answer for q in asked], padding=True, return_tensors="pt")
        written, mask = opened(answers, decode_token(self.words)), answers["attention_mask"]
        logits = self.net.text_decoder(
            input_ids=written,
            attention_mask=mask,
            encoder_hidden_states=states,
            encoder_attention_mask=coded["attention_mask"],
        ).logits
        left = share[:, None].expand(-1, mask.shape[1] - 1)
        return {"look": self._look(cover, owner), **told(logits, written, mask[:, 1:] == 1, left, self.rivals)}

    def _gate(
        self, cover: torch.Tensor, which: torch.Tensor, owner: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Dim or brighten an object for some texts, as in `blip_itm`: returns how much of it each text sees, [B].

        Background patches vanish at random, and some texts see the image in the last block alone.
        """
        texts, patches, heads = len(cover), cover.shape[-1], self.plan.text_heads
        place = cover[torch.arange(texts), which] > 0
        dimmed = torch.rand(texts, generator=generator) < self.plan.blind
        share = (torch.rand(texts, generator=generator) * 1.8 - 0.3).clamp(min=0)
        kind = torch.randint(3, (texts,), generator=generator)
        spread = torch.rand(texts, heads, patches, generator=generator) - 0.5
        scattered = (share[:, None, None] + spread).clamp(0, BRIGHTEST)
        seen = torch.where((kind == 2)[:, None, None], scattered, share[:, None, None])
        gate = torch.ones(texts, heads, owner.shape[1], 1 + patches)
        # Its words see less; or its patches are seen less; or each of these, in each head, by a share of its own.
        blind = ((kind == 0) & dimmed)[:, None] & (owner == which[:, None])
        gate = torch.where(blind[:, None, :, None], share[:, None, None, None], gate)
        hidden = ((kind > 0) & dimmed)[:, None] & place
        gate[..., 1:] = torch.where(hidden[:, None, None], seen[:, :, None], gate[..., 1:])
        share = torch.where(kind == 2, (scattered.mean(1) * place).sum(1) / place.sum(1), share)
        vacant = torch.rand(texts, 1, generator=generator) < self.plan.vacant
        gone = (torch.rand(texts, patches, generator=generator) < 0.4) & vacant & ~cover.any(1)
        gate[..., 1:] *= (~gone).float()[:, None, None]
        early = (torch.rand(texts, generator=generator) >= self.plan.late).float()[:, None, None, None]
        for module in self.gates:
            module.gate = gate if module is self.gates[-1] else gate * early
        return torch.where(dimmed, share, 1.0)

    def _look(self, cover: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """How far rows are from looking at the object that they own, in every block, as -log of the share."""
        rows, columns = torch.nonzero(owner >= 0, as_tuple=True)
        objects = cover[rows, owner[rows, columns]]
        objects = objects / objects.amax(1, keepdim=True) if self.plan.graded else (objects > 0).float()
        terms = []
        for module in self.gates:
            if module.seen is None:
                raise RuntimeError("cross-attention did not run")
            share = (module.seen[rows, :, columns, 1:].mean(1) * objects).sum(-1)
            terms.append(-share.clamp(min=1e-4).log().mean())
            module.seen = module.gate = None
        return torch.stack(terms).mean()


def _heed_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Cross-attention reads its mask by another name than transformers gives it; so padding would be seen."""
    return args, {**kwargs, "encoder_attention_mask": kwargs.get("attention_mask")}


def opened(coded: Any, first: int) -> torch.Tensor:
    """The ids of tokenised texts, [CLS] replaced by the token that opens them."""
    ids: torch.Tensor = coded["input_ids"].clone()
    ids[:, 0] = first
    return ids


def rivals(words: BertTokenizer, size: int) -> torch.Tensor:
    """For the first piece of every colour the other colours', for that of every shape the other shapes', [V, V]."""
    table = torch.zeros(size, size)
    for alike in (tuple(scenes.COLOURS), scenes.SHAPES):
        first = [words(word, add_special_tokens=False)["input_ids"][0] for word in alike]
        for piece in first:
            table[piece, [other for other in first if other != piece]] = 1.0
    return table


def told(
    logits: torch.Tensor, ids: torch.Tensor, counted: torch.Tensor, share: torch.Tensor, others: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The loss of the next tokens that are counted, and how many of those that are seen in full are the likeliest.

    A colour or a shape is to be told as far as its object is seen: with a share of zero it may be any.

    Args:
        logits: of each token, [B, T, V].
        ids: the tokens, [B, T].
        counted: which next tokens count, [B, T - 1].
        share: how much of its object each next token sees, 1 for the usual, [B, T - 1].
        others: `rivals`.
    """
    wanted, chances = ids[:, 1:], logits[:, :-1].log_softmax(-1)
    many = others[wanted].sum(-1)
    sure = torch.where(many > 0, (1 + many * confirmed(share)) / (1 + many), 1.0)
    own = chances.gather(-1, wanted[..., None])[..., 0]
    rest = (chances * others[wanted]).sum(-1) / many.clamp(min=1)
    loss = -(sure * own + (1 - sure) * rest)
    clear = counted & (share == 1)
    return {"write": loss[counted].mean(), "right": (chances.argmax(-1) == wanted)[clear].float().mean()}


def questions(phrases: Sequence[str]) -> list[Question]:
    """All questions about a scene's objects that have one answer: the colour of a shape, the shape of a colour."""
    pairs = [phrase.split() for phrase in phrases]
    colours, shapes = [colour for colour, _ in pairs], [shape for _, shape in pairs]
    found = []
    for about, (colour, shape) in enumerate(pairs):
        for opening, asked, answer, alike in (
            ("what colour is the ", shape, colour, shapes),
            ("what shape is ", colour, shape, colours),
        ):
            if alike.count(asked) == 1:
                span = (len(opening), len(opening) + len(asked))
                found.append(Question(f"{opening}{asked}?", answer, span, about))
    return found


def decode_token(words: BertTokenizer) -> int:
    """The id of [DEC], which opens what is written."""
    return len(words) + BEGIN_TOKENS.index("[DEC]")


def words_of(plan: Plan) -> BertTokenizer:
    """The tokenizer of `tiny-blip-itm`; for questions with the words that they need besides."""
    return tokenizer(plan.longest, QUESTION_WORDS if plan.model == "blip-vqa" else ())


def bare(plan: Plan, words: BertTokenizer) -> Any:
    """The model by itself, with random weights: real BLIP, small numbers."""
    sizes = {name: value for name, value in asdict(plan).items() if name in blip_itm.Plan.__dataclass_fields__}
    made = blip_itm.config(blip_itm.Plan(**sizes), words).to_dict()
    made["text_config"]["intermediate_size"] = plan.text_feed_forward
    kind = BlipForQuestionAnswering if plan.model == "blip-vqa" else BlipForConditionalGeneration
    return kind(BlipConfig(**{key: made[key] for key in ("text_config", "vision_config", "image_text_hidden_size")}))


def begin(net: Any, start: str, words: BertTokenizer) -> None:
    """Give a model the vision tower, and the blocks that look at the image, of a BLIP with an ITM head.

    Blocks with narrower feed-forward layers take the strongest neurons.
    """
    folder = vlcam.models()[start].folder if start in vlcam.models() else start
    old = BlipForImageTextRetrieval.from_pretrained(folder, dtype=torch.float32)
    known = BertTokenizer.from_pretrained(folder)
    net.vision_model.load_state_dict(old.vision_model.state_dict())
    new = net.text_encoder if hasattr(net, "text_encoder") else net.text_decoder.bert
    for to, block in zip(new.encoder.layer, old.text_encoder.encoder.layer, strict=False):
        weights = block.state_dict()
        rise, fall = weights["intermediate.dense.weight"], weights["output.dense.weight"]
        kept = (rise.norm(dim=1) * fall.norm(dim=0)).topk(to.intermediate.dense.out_features).indices.sort().values
        weights["intermediate.dense.weight"], weights["output.dense.weight"] = rise[kept], fall[:, kept]
        weights["intermediate.dense.bias"] = weights["intermediate.dense.bias"][kept]
        to.load_state_dict(weights)
    ids, before = ({**w.get_vocab(), **{t: len(w) + i for i, t in enumerate(BEGIN_TOKENS)}} for w in (words, known))
    tables = new.embeddings.word_embeddings.weight, old.text_encoder.embeddings.word_embeddings.weight
    with torch.no_grad():
        for piece in ids.keys() & before.keys():
            tables[0][ids[piece]] = tables[1][before[piece]]
    new.embeddings.position_embeddings.load_state_dict(old.text_encoder.embeddings.position_embeddings.state_dict())
    new.embeddings.LayerNorm.load_state_dict(old.text_encoder.embeddings.LayerNorm.state_dict())


def gallery(plan: Plan, tower: Any) -> Gallery:
    """Draw the scenes of a run, each mirrored or not, and let the vision tower see them."""
    if plan.seed < 1_000_000:
        raise ValueError(f"seed={plan.seed}: training seeds start at 1,000,000, below lie the held-out scenes")
    rng, grid = np.random.default_rng(plan.seed), plan.side // plan.patch
    cover, pairs = torch.zeros(plan.gallery, 3, grid * grid), []
    images, seen = [], []
    for index, scene in enumerate(scenes.generate(plan.gallery, seed=plan.seed)):
        axes = [axis for axis in (-2, -1) if rng.random() < 0.5]
        cover[index, : len(scene.objects)] = patch_cover(scene, grid).flip(axes).flatten(1)
        pairs.append([(item.colour, item.shape) for item in scene.objects])
        images.append(pixels(scene.image, plan.side).flip(axes))
        if len(images) == 50 or index + 1 == plan.gallery:
            with torch.no_grad():
                seen.append(tower(torch.stack(images)).last_hidden_state.half())
            images = []
    return Gallery(torch.cat(seen), cover, pairs)


def train(plan: Plan, out: Path) -> None:
    """Train by the plan; write model, processor and log into `out`, also from time to time on the way."""
    torch.manual_seed(plan.seed)
    trainee = Trainee(plan, words_of(plan)).train()
    learning = Learning(plan, [each for each in trainee.parameters() if each.requires_grad])
    generator, rng = torch.Generator().manual_seed(plan.seed), np.random.default_rng(plan.seed + 1)
    weights = {"write": 1.0, "look": plan.look}
    started = time.monotonic()
    kept = out.with_name(f"gallery-{plan.seed}-{plan.gallery}.pt")  # the runs have it in common
    if kept.exists():
        drawn = Gallery(**torch.load(kept))
    else:
        drawn = gallery(plan, trainee.net.vision_model.eval())
        torch.save(vars(drawn), kept)
    log.info("%d scenes drawn and seen  (%.0f s)", plan.gallery, time.monotonic() - started)
    for _ in range(learning.last):
        chosen = rng.integers(plan.gallery, size=plan.batch).tolist()
        learning.step(trainee.losses(drawn, chosen, rng, generator), weights)
        if learning.due(200):
            save(trainee, plan, out)


def save(trainee: Trainee, plan: Plan, out: Path) -> None:
    """Write the model in half precision and its processor, in the layout that `from_pretrained` reads."""
    net = bare(plan, trainee.words)
    net.load_state_dict(trainee.net.state_dict())
    net.half().save_pretrained(out)
    images = BlipImageProcessorPil(size={"height": plan.side, "width": plan.side})
    BlipProcessor(images, trainee.words).save_pretrained(out)
    write_plan(plan, out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: every number of the plan is an option."""
    command(__doc__, PLANS, train, arguments)


if __name__ == "__main__":
    main()
