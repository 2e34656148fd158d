"""BLIP and ALBEF as in LAVIS: `BlipITM` and `AlbefRetrieval`, which match texts with images.

Models are told by the names of their class and of its parts, and LAVIS itself is imported by `load` alone: it cannot be
installed beside a current transformers, and code that was copied out of it has the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from vlcam.adapter import Inputs, PreparedTexts
from vlcam.targets import HeadKind
from vlcam_adapters.contrastive import similarities
from vlcam_adapters.lavis_parts import LavisAdapter, everywhere, named

__all__ = ["AlbefLavis", "BlipItmLavis"]

_ONLY_ITM = "contrastive does not run cross-attention: CROSS and CONTEXT belong to itm"
_NO_WORDS = "in the last fusion block only the first text token has a gradient; maps of words need an earlier one"


class MatcherLavis(LavisAdapter):
    """Base of the adapters of matchers: a head that tells whether text and image match, and two projections."""

    @property
    def reader(self) -> Any:
        """The text encoder."""
        return self.module.text_encoder

    def matched(self, shared: Tensor, inputs: Inputs) -> Tensor:
        """Logits [P, 2] of (no match, match), each text opened by the opening token."""
        ids, mask = self.opened(inputs.texts, inputs.text_of, self.opening)
        fused = self.module.text_encoder(
            ids,
            attention_mask=mask,
            encoder_hidden_states=shared,
            encoder_attention_mask=everywhere(shared),
            return_dict=True,
        )
        logits: Tensor = self.module.itm_head(fused.last_hidden_state[:, 0])
        return logits

    def embedded_texts(self, texts: PreparedTexts | None, rows: Sequence[int]) -> Tensor:
        """Texts that meet no image, [T, E], of unit length."""
        ids, mask = self.opened(texts, rows, ("[CLS]", self.module.tokenizer.cls_token_id))
        plain = self.module.text_encoder(ids, attention_mask=mask, return_dict=True, mode="text")
        return normalize(self.module.text_proj(plain.last_hidden_state[:, 0]), dim=-1)

    def embedded_images(self, shared: Tensor) -> Tensor:
        """Images, [P, E], of unit length."""
        return normalize(self.module.vision_proj(shared[:, 0]), dim=-1)

    def notes(self) -> tuple[str, ...]:
        """What is true of every matcher besides."""
        return (*super().notes(), _NO_WORDS, _ONLY_ITM)


class BlipItmLavis(MatcherLavis):
    """Adapter for LAVIS's `BlipITM`. As there, a text that meets the image is opened by [ENC], otherwise by [CLS]."""

    kind = "BlipITM"
    parts = ("visual_encoder.forward_features", "text_encoder.encoder.layer", "itm_head", "vision_proj", "text_proj")
    architectures = named("blip_image_text_matching", types=("base", "large"))
    heads: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "cosine"})

    @property
    def opening(self) -> tuple[str, int]:
        """[ENC], with the id that LAVIS has found for it."""
        return "[ENC]", int(self.module.tokenizer.enc_token_id)

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match). `contrastive`: cosine [P] of the two projections."""
        if name == "itm":
            return self.matched(shared, inputs)
        return (self.embedded_images(shared) * self.embedded_texts(inputs.texts, inputs.text_of)).sum(-1)

    def targets(self) -> tuple[str, ...]:
        """Those of both heads."""
        return "itm: logit, probability, log-probability, margin", "contrastive: cosine"


class AlbefLavis(MatcherLavis):
    """Adapter for LAVIS's `AlbefRetrieval`: text blocks, then fusion blocks; a text is opened by [CLS] in both."""

    kind = "AlbefRetrieval"
    parts = (*BlipItmLavis.parts, "temp")
    architectures = named("albef_retrieval", types=("coco", "flickr"))
    heads: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "prompts"})

    @property
    def opening(self) -> tuple[str, int]:
        """[CLS]."""
        return "[CLS]", int(self.module.tokenizer.cls_token_id)

    def text_tower(self, inputs: Inputs) -> Tensor | None:
        """Unit embeddings [T, E] of all texts, with which each image is compared."""
        if inputs.texts is None:
            return None
        return self.embedded_texts(inputs.texts, range(len(inputs.texts.layouts)))

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2]. `contrastive`: cosine and cosine by temperature with every text, [P, T, 2]."""
        if name == "itm":
            return self.matched(shared, inputs)
        return similarities(self.embedded_images(shared), inputs, scale=1 / self.module.temp)

    def targets(self) -> tuple[str, ...]:
        """Those of both heads."""
        scales = "cosine, logit (by temperature), probability, log-probability, margin, difference, finer"
        return "itm: logit, probability, log-probability, margin", f"contrastive: {scales}"
