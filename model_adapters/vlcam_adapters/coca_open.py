"""CoCa of open_clip: two towers that meet in a cosine, and a decoder that writes the text while it looks at the image.

The image tokens are pooled by attention to a row of slots. The first one is the image's embedding; the decoder attends
to the others, and to no image token itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from open_clip.coca_model import CoCa
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize

from vlcam.adapter import Encoded, Inputs
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.targets import HeadKind
from vlcam_adapters.clip_open import OpenClipAdapter
from vlcam_adapters.likelihoods import of_next
from vlcam_adapters.open_clip_towers import residual_block

__all__ = ["CocaOpen"]

_NO_TEXT = "CoCa scores an image with a text, but no text was given"


class CocaOpen(OpenClipAdapter):
    """Adapter for `open_clip.coca_model.CoCa`."""

    architectures: ClassVar[tuple[str, ...]] = ("CoCa",)
    families: ClassVar[tuple[type[nn.Module], ...]] = (CoCa,)

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether it is an `open_clip_config.json` of a model with a decoder."""
        return "multimodal_cfg" in (config.get("model_cfg") or {})

    @cached_property
    def anatomy(self) -> Anatomy:
        """Streams `vision`, `text` and `pooler`, and `fusion`, the decoder."""
        decoder, slots = self.module.text_decoder, len(self.module.visual.attn_pool.query) - 1
        blocks = tuple(
            _decoder_block(block, cross) for block, cross in zip(decoder.resblocks, decoder.cross_attn, strict=True)
        )
        fusion = StreamAnatomy(
            "fusion",
            blocks,
            int(decoder.width),
            int(decoder.resblocks[0].attn.num_heads),
            f"word pieces, padded to {self._context}, each of which predicts the next; keys of CROSS: {slots} slots",
            trunk=False,
            slots=f"{slots} pooled slots",
            tells_next=True,
            run_by=("caption",),
        )
        return Anatomy(
            type(self.module).__name__,
            {**self.towers, "fusion": fusion},
            self.targets,
            (
                *self.notes,
                f"keys of CROSS in fusion are {slots} pooled slots: rows 1 to {slots} of CROSS in pooler say which "
                "image tokens each slot holds; row 0 is the image's embedding, which contrastive reads",
                "contrastive does not run the decoder: fusion belongs to caption",
                "caption does not read the class token that stands behind each text in the stream text",
            ),
        )

    def text_tower(self, inputs: Inputs) -> Tensor:
        """The text tower's tokens before its final norm, [T, N + 1, W]: both heads begin with them.

        Raises:
            InputError: there are no texts.
        """
        made = self.text.forward_intermediates(
            self.ids(inputs), indices=1, intermediates_only=True, output_fmt="NLC", output_extra_tokens=True
        )
        return torch.cat((made["text_intermediates"][0], made["text_intermediates_suffix"][0]), 1)

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Answer P questions.

        `contrastive`: cosine and logit of each pair's image with every text, [P, T, 2]. `caption`: log-probability of
        each next token of the pair's own text after those up to it, [P, N], 0 behind its last.
        """
        if name == "contrastive":
            return self.compared(normalize(self.tower.pooled(shared), dim=-1), inputs)
        if inputs.encoded is None or inputs.texts is None:
            raise InputError(_NO_TEXT)
        _, slots = self.module.visual._pool(shared)  # noqa: SLF001 - the library's own pooling, with the slots besides
        logits = self.module.text_decoder(slots, inputs.encoded.own[:, :-1])
        own = list(inputs.text_of)
        ids = self.ids(inputs)[own]
        mask = inputs.texts.tensors["attention_mask"][own, : ids.shape[1]]
        return of_next(logits, ids, mask)

    def compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        """Cosines and logits of image embeddings with every text, [B, T, 2]."""
        known = inputs.encoded
        if known is not None:
            inputs = replace(inputs, encoded=Encoded(self._read(known.every), self._read(known.own)))
        return super().compared(images, inputs)

    def _heads(self) -> Mapping[str, HeadKind]:
        return {**super()._heads(), "caption": "tokens"}

    def _check_parts(self) -> None:
        """Refuse a CoCa with other parts than the released ones."""
        visual, text = self.module.visual, self.module.text
        found = {
            "visual of open_clip.transformer.VisionTransformer": isinstance(visual, VisionTransformer),
            "visual.attn_pool": getattr(visual, "attn_pool", None) is not None,
            "visual.pool_type 'tok'": getattr(visual, "pool_type", None) == "tok",
            "text.cls_emb": getattr(text, "cls_emb", None) is not None,
        }
        missing = [name for name, there in found.items() if not there]
        if missing:
            kinds = f"visual of {type(visual).__qualname__}, text of {type(text).__qualname__}"
            raise AdapterError(
                f"CoCa with {kinds} is not known: looked for {', '.join(found)}; did not find {', '.join(missing)}"
            )

    def _read(self, tokens: Tensor) -> Tensor:
        """From tokens [..., N + 1, W] of the text tower to text embeddings of unit length."""
        seen, projection = self.text.ln_final(tokens[:, -1]), self.text.text_projection
        if isinstance(projection, nn.Linear):
            return normalize(projection(seen), dim=-1)
        return normalize(seen if projection is None else seen @ projection, dim=-1)

    @property
    def _text_in_words(self) -> str:
        return f"{super()._text_in_words}; behind them a class token, which is the text's embedding"

    @property
    def _context(self) -> int:
        return min(int(self.text.context_length), int(self.module.text_decoder.context_length))


def _decoder_block(block: Any, cross: Any) -> Block:
    """One block of the decoder: text attends to text, then to the slots."""
    sites = dict(residual_block(block).sites)
    sites |= {
        "CROSS": Reading(cross.attn, "attention"),
        "CONTEXT": Reading(cross, "keyword", "k_x,v_x"),
        "F6": Reading(cross, "output"),
    }
    return Block(sites)
