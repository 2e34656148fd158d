"""BLIP with an image-text matching head, as in Hugging Face transformers: `BlipForImageTextRetrieval`.

The vision tower runs once per image. The text encoder then runs twice: with cross-attention on the image tokens for
the matching head (stream `fusion`), and without for the contrastive projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize
from transformers import BlipForImageTextRetrieval, BlipProcessor

from vlcam.adapter import Inputs
from vlcam.anatomy import Anatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip_blocks import LACKS_NORMS
from vlcam_adapters.blip_parts import BlipAdapter, FirstToken, encoding, own_rows

__all__ = ["BlipItmHF"]

_NO_TEXT = "BLIP scores an image with a text, but no text was given"


class BlipItmHF(BlipAdapter):
    """Adapter for `transformers.BlipForImageTextRetrieval`.

    The original BLIP opens a text that is matched with an image by [ENC]; the transformers class feeds [CLS] and so
    scores differently. vlcam feeds [ENC], as the weights were trained, unless `first_token="cls"` asks for the
    other. The contrastive pass keeps [CLS], in the original too.
    """

    architectures: ClassVar[tuple[str, ...]] = ("BlipForImageTextRetrieval",)
    family = BlipForImageTextRetrieval
    heads: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "cosine"})

    def __init__(
        self,
        module: BlipForImageTextRetrieval,
        processor: BlipProcessor,
        *,
        first_token: FirstToken = "enc",
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its processor, with a fast tokenizer.
            first_token: what opens the text for the matching head.
            image_size: height and width that images are resized to, in place of the processor's.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: an option that the model cannot meet.
        """
        super().__init__(module, processor, image_size=image_size, interpolate_pos_encoding=interpolate_pos_encoding)
        self._first_token = first_token
        self.opening = encoding(self._tokenizer, module.config.text_config, first_token)

    @cached_property
    def anatomy(self) -> Anatomy:
        """Two streams: `vision`, pre-norm, and `fusion`, the text encoder with cross-attention."""
        return Anatomy(
            type(self.module).__name__,
            self.streams(f"{self.opening[0]}, word pieces, [SEP]"),
            ("itm: logit, probability, log-probability, margin", "contrastive: cosine"),
            (
                LACKS_NORMS,
                "in the last fusion block only the first text token has a gradient; maps of words need an earlier one",
                "contrastive does not run cross-attention: CROSS and CONTEXT belong to itm",
            ),
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """First token, image size and position interpolation."""
        return {"first_token": self._first_token, **super().options}

    @property
    def fusion_blocks(self) -> Sequence[Any]:
        """Those of the text encoder."""
        blocks: Sequence[Any] = self.module.text_encoder.encoder.layer
        return blocks

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match). `contrastive`: cosine [P] of the two projections."""
        encoder, module = self.module.text_encoder, self.module
        if name == "itm":
            ids, mask = own_rows(inputs.texts, inputs.text_of, self.opening, _NO_TEXT)
            fused = encoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=shared).last_hidden_state
            logits: Tensor = module.itm_head(fused[:, 0])
            return logits
        ids, mask = own_rows(inputs.texts, inputs.text_of, ("[CLS]", self._tokenizer.cls_token_id), _NO_TEXT)
        plain = encoder(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        image = normalize(module.vision_proj(shared[:, 0]), dim=-1)
        return (image * normalize(module.text_proj(plain), dim=-1)).sum(-1)
