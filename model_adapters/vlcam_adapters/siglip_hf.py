"""SigLIP of Hugging Face transformers: two towers, an attention pooler over the patches, a sigmoid for every pair."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    AutoImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Siglip2Model,
    Siglip2TextModel,
    Siglip2VisionModel,
    SiglipModel,
    SiglipTextModel,
    SiglipVisionModel,
)
from transformers.utils import cached_file

from vlcam.adapter import Inputs, Prefix, PreparedTexts
from vlcam.anatomy import Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError
from vlcam.targets import HeadKind
from vlcam_adapters.clip_text import Pool, TextWarning, tokenise
from vlcam_adapters.contrastive import similarities
from vlcam_adapters.dual_encoder_hf import DualEncoderHF
from vlcam_adapters.hf_loading import load_model, loading, placed

__all__ = ["SiglipHF"]

_LAST_ONLY = (
    "the text embedding reads the last position, padding or not: in the last text block only it has a gradient from "
    "F3_HEADS on; padding is attended to"
)


class SiglipHF(DualEncoderHF):
    """Adapter for `transformers.SiglipModel`, which fixed-size checkpoints of SigLIP 2 are too.

    `Siglip2Model` takes patches of images of any proportions (NaFlex), which have no common grid; it is refused.
    """

    kind: ClassVar[type[PreTrainedModel]] = SiglipModel
    parts: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        SiglipVisionModel,
        SiglipTextModel,
        Siglip2Model,
        Siglip2VisionModel,
        Siglip2TextModel,
    )
    architectures: ClassVar[tuple[str, ...]] = ("SiglipModel",)
    prefix: tuple[Prefix, ...] = ()
    reads: Literal["cls", "patches"] = "patches"
    heads: Mapping[str, HeadKind] = MappingProxyType({"contrastive": "sigmoid"})
    full: ClassVar[bool] = True
    module: SiglipModel

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether it is a checkpoint of SigLIP; one with NaFlex is refused by `load`, which says why."""
        return bool({*cls.architectures, "Siglip2Model"} & set(config.get("architectures") or ()))

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor.

        The tokenizer is the checkpoint's `tokenizer.json` as it stands; the class that transformers would take for
        SigLIP 1 gives no offsets.

        Raises:
            AdapterError: NaFlex, or files that are missing or damaged.
        """
        with loading(source):
            config, _ = SiglipModel.config_class.get_config_dict(source, local_files_only=local)
            if "Siglip2Model" in (config.get("architectures") or ()):
                raise AdapterError(f"{str(source)!r}: {cls._refusal('Siglip2Model')}")
            module = load_model(SiglipModel, source, local=local, dtype=dtype)
            images = AutoImageProcessor.from_pretrained(source, local_files_only=local, backend="pil")
            tokenizer = _tokenizer_of(source, local=local)
        processor = SimpleNamespace(image_processor=images, tokenizer=tokenizer)
        return cls(placed(module, device).eval(), processor, **options)

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise and pad to the context length; text beyond it is cut off and listed."""
        lower = [text.lower() for text in texts]
        made = super().prepare_texts(texts)
        if lower != list(texts):
            again = tokenise(self._tokenizer, lower, self.limit, pool=self.pool, full=True)
            if not torch.equal(again.ids, made.tensors["input_ids"].cpu()):
                warnings.warn(
                    "SigLIP was trained on text in lower case, and this tokenizer keeps capitals, which then are other "
                    "tokens; write texts in lower case",
                    TextWarning,
                    stacklevel=2,
                )
        return made

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N] as they are; SigLIP was trained on ids padded to its context length, without a mask.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        found = super().accept_ids(ids, mask)
        width = found.tensors["input_ids"].shape[1]
        if width < self.limit:
            warnings.warn(
                f"input_ids of {width} tokens: SigLIP was trained on texts padded to {self.limit}, and reads the last "
                "position; tokenise with padding='max_length', or give text",
                TextWarning,
                stacklevel=2,
            )
        if mask is not None and not bool(mask.bool().all()):
            warnings.warn(
                "an attention_mask that hides padding: SigLIP was trained without one and attends to padding; leave it "
                "out, or give text",
                TextWarning,
                stacklevel=2,
            )
        return found

    def trunk(self, inputs: Inputs) -> Tensor:
        """The patch tokens that enter the pooler, behind the final norm: [I, h * w, D]."""
        pixels, tower = inputs.images.pixel_values, self.module.vision_model
        # Not the tower's own forward, which would run the pooler here as well as in the head.
        embedded = tower.embeddings(pixels, interpolate_pos_encoding=self._resized(pixels))
        tokens: Tensor = tower.post_layernorm(tower.encoder(inputs_embeds=embedded).last_hidden_state)
        return tokens

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Cosine and logit with every text, [P, T, 2]."""
        del name
        return self._compared(self.module.vision_model.head(shared), inputs)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """Cosine and logit [I, T, 2] of what the pooler makes of the tokens, behind the final norm unless `bare`."""
        del name
        tower = self.module.vision_model
        return self._compared(tower.head(tokens if bare else tower.post_layernorm(tokens)), inputs)

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name == "Siglip2Model":
            return (
                "Siglip2Model takes NaFlex inputs (patches of images whose grids differ, with a mask of padding), not "
                "pixels [I, 3, H, W]; load a fixed-size checkpoint of SigLIP 2 (for example "
                "google/siglip2-base-patch16-224), which is a SiglipModel"
            )
        return super()._refusal(name)

    @property
    def pool(self) -> Pool:
        """The last position, padding or not."""
        return "last"

    def _check(self) -> None:
        if not self.module.vision_model.use_head:
            raise AdapterError(
                f"{type(self.module).__name__} without a pooling head (vision_use_head=False) has no image embedding; "
                "load a checkpoint that has one"
            )

    @property
    def _notes(self) -> tuple[str, ...]:
        return (_LAST_ONLY,)

    @property
    def _text_words(self) -> str:
        return f"word pieces, {self._tokenizer.eos_token}, then padding up to {self.limit} tokens"

    @property
    def _poolers(self) -> tuple[StreamAnatomy, ...]:
        config, head = self.module.config.vision_config, self.module.vision_model.head
        sites = {"CROSS": Reading(head.attention, "attention"), "CONTEXT": Reading(head, "input")}
        lacks = dict.fromkeys(
            ("F1", "F2", "F3", "F4", "F5", "F6"),
            "it is no block of the tower: one learned query reads the image tokens",
        )
        tokens = f"one learned query; keys of CROSS: {self._patches}"
        return (
            StreamAnatomy(
                "pooler",
                (Block(sites, lacks),),
                config.hidden_size,
                config.num_attention_heads,
                tokens,
                trunk=False,
                queries=1,
            ),
        )

    def _compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        unit, module = normalize(images, dim=-1), self.module
        return similarities(unit, inputs, scale=module.logit_scale.exp(), bias=module.logit_bias)


def _tokenizer_of(source: str | Path, *, local: bool) -> Any:
    try:
        cached_file(source, "tokenizer.json", local_files_only=local)
    except OSError as error:
        raise AdapterError(
            f"{str(source)!r} has no tokenizer.json ({str(error).splitlines()[0]}), and a SentencePiece model alone "
            "gives no character offsets, which maps of words need: put the checkpoint's tokenizer.json there, or load "
            "the model and give a processor with a fast tokenizer, vlcam.wrap(model, processor)"
        ) from None
    return PreTrainedTokenizerFast.from_pretrained(source, local_files_only=local)
