"""CLIP of Hugging Face transformers: an image tower and a text tower, compared by the cosine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    CLIPModel,
    CLIPProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
)

from vlcam.adapter import Inputs, Prefix
from vlcam.errors import AdapterError, InputError
from vlcam.targets import HeadKind
from vlcam_adapters.clip_text import Pool
from vlcam_adapters.contrastive import similarities
from vlcam_adapters.dual_encoder_hf import DualEncoderHF
from vlcam_adapters.hf_loading import load_model, loading, placed

__all__ = ["ClipHF"]

_LEGACY_END = 2
"""The wrong `eos_token_id` of older CLIP configurations, for which transformers pools at the largest id."""
_CLS_ONLY = (
    "the image embedding reads [CLS] alone: in the last vision block only [CLS] has a gradient from F3_HEADS on, and "
    "only its query in F2"
)
_END_ONLY = (
    "the text embedding reads the end token: in the last text block only it has a gradient from F3_HEADS on, and "
    "tokens behind it have none anywhere"
)


class ClipHF(DualEncoderHF):
    """Adapter for `transformers.CLIPModel`."""

    kind: ClassVar[type[PreTrainedModel]] = CLIPModel
    parts: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        CLIPVisionModel,
        CLIPVisionModelWithProjection,
        CLIPTextModel,
        CLIPTextModelWithProjection,
    )
    architectures: ClassVar[tuple[str, ...]] = ("CLIPModel",)
    prefix: tuple[Prefix, ...] = ("cls",)
    heads: Mapping[str, HeadKind] = MappingProxyType({"contrastive": "prompts", "contrastive_patches": "prompts"})
    readouts: ClassVar[frozenset[str]] = frozenset({"contrastive_patches"})
    module: CLIPModel

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor."""
        with loading(source):
            module = load_model(CLIPModel, source, local=local, dtype=dtype)
            # Pillow resizes as the original preprocessing did, and needs no torchvision.
            processor = CLIPProcessor.from_pretrained(source, local_files_only=local, backend="pil")
        return cls(placed(module, device).eval(), processor, **options)

    def trunk(self, inputs: Inputs) -> Tensor:
        """The output of the last vision block, before the norm of the class token: [I, 1 + h * w, D]."""
        pixels = inputs.images.pixel_values
        made = self.module.vision_model(
            pixel_values=pixels, interpolate_pos_encoding=self._resized(pixels), return_dict=True
        )
        tokens: Tensor = made.last_hidden_state
        return tokens

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Cosine and logit with every text, [P, T, 2]; of `contrastive_patches`, of the mean of the normed patches."""
        normed = self.module.vision_model.post_layernorm
        pooled = normed(shared[:, 0]) if name == "contrastive" else normed(shared[:, len(self.prefix) :]).mean(1)
        return self._compared(self._embedded(pooled), inputs)

    def token_cosines(self, tokens: Tensor, inputs: Inputs) -> Tensor:
        """Cosines of every image token, read as the class token is, with every text: [P, N, T]."""
        if inputs.encoded is None:
            raise InputError("image tokens are compared with texts, but no text was given")
        return self._embedded(self.module.vision_model.post_layernorm(tokens)) @ inputs.encoded.every.T

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """Cosine and logit [I, T, 2] of the mean of all tokens, behind the final norm and the projection."""
        del name, bare
        return self._compared(self._embedded(self.module.vision_model.post_layernorm(tokens.mean(1))), inputs)

    @property
    def pool(self) -> Pool:
        """The first end token; by the rule of older configurations the largest id."""
        return "largest id" if self.module.text_model.eos_token_id == _LEGACY_END else "first end"

    @property
    def limit(self) -> int:
        """The most tokens of a text, of which the tokenizer may allow fewer than the model."""
        return min(super().limit, int(self._tokenizer.model_max_length))

    def _check(self) -> None:
        end, own = self.module.text_model.eos_token_id, self._tokenizer.eos_token_id
        if end not in (_LEGACY_END, own):
            raise AdapterError(
                f"the model pools a text at its end token, id {end}, and the tokenizer ends texts with "
                f"{self._tokenizer.eos_token!r}, id {own}: every text would be read at its first token; give the "
                "model's own tokenizer"
            )

    @property
    def _notes(self) -> tuple[str, ...]:
        return _CLS_ONLY, _END_ONLY

    @property
    def _text_words(self) -> str:
        tokenizer = self._tokenizer
        return f"{tokenizer.bos_token}, word pieces, {tokenizer.eos_token}, then padding; each sees those before it"

    def _embedded(self, normed: Tensor) -> Tensor:
        return normalize(self.module.visual_projection(normed), dim=-1)

    def _compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        return similarities(images, inputs, scale=self.module.logit_scale.exp())
