"""BLIP that writes captions, as in Hugging Face transformers: `BlipForConditionalGeneration`.

The vision tower runs once per image. The decoder then reads a caption word by word, and looks at the image tokens in
every block (stream `fusion`); each of its tokens tells the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import BlipForConditionalGeneration, BlipProcessor

from vlcam.adapter import Inputs
from vlcam.anatomy import Anatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip_blocks import LACKS_NORMS
from vlcam_adapters.blip_parts import BlipAdapter, own_rows, writing
from vlcam_adapters.likelihoods import of_next

__all__ = ["LONGEST", "BlipCaptionHF"]

LONGEST = 30
"""Most tokens of a caption that the model writes, the end token among them."""


class BlipCaptionHF(BlipAdapter):
    """Adapter for `transformers.BlipForConditionalGeneration`.

    A caption is opened by [DEC], as the weights were trained and as `generate` opens it; the processor's ids begin with
    [CLS], and the forward of the transformers class feeds them as they come. What is counted is what the model's own
    loss counts: every token behind the first, the [SEP] at the end too. The loss is smoothed where the configuration
    says so, the log-probabilities here are not.
    """

    architectures: ClassVar[tuple[str, ...]] = ("BlipForConditionalGeneration",)
    family = BlipForConditionalGeneration
    writes: ClassVar[Literal["", "caption", "answer"]] = "caption"
    heads: Mapping[str, HeadKind] = MappingProxyType({"caption": "tokens"})

    def __init__(
        self,
        module: BlipForConditionalGeneration,
        processor: BlipProcessor,
        *,
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its processor, with a fast tokenizer.
            image_size: height and width that images are resized to, in place of the processor's.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: an option that the model cannot meet, or no token that opens a caption.
        """
        super().__init__(module, processor, image_size=image_size, interpolate_pos_encoding=interpolate_pos_encoding)
        self.opening = writing(self._tokenizer, module.config.text_config)

    @cached_property
    def anatomy(self) -> Anatomy:
        """Two streams: `vision`, pre-norm, and `fusion`, the decoder."""
        return Anatomy(
            type(self.module).__name__,
            self.streams(f"{self.opening[0]}, word pieces, [SEP], each of which tells the next", tells_next=True),
            ("caption: log-probability",),
            (
                LACKS_NORMS,
                "a word is told by the row of the token before it; in the last fusion block that row has a gradient "
                "from this word alone, in earlier ones from all words behind it too",
                f"without a text the model writes one: the likeliest token each time, {LONGEST} at most",
            ),
        )

    @property
    def fusion_blocks(self) -> Sequence[Any]:
        """Those of the decoder."""
        blocks: Sequence[Any] = self.module.text_decoder.bert.encoder.layer
        return blocks

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Log-probability of each next token of the pair's caption, [P, N], 0 behind its last."""
        missing = "BLIP tells how likely a caption is, but no text was given"
        ids, mask = own_rows(inputs.texts, inputs.text_of, self.opening, missing)
        made = self.module.text_decoder(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=shared, use_cache=False
        )
        return of_next(made.logits, ids, mask)

    def write(self, inputs: Inputs) -> list[str]:
        """A caption for each image."""
        seen = self.trunk(inputs)
        mask = torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device)
        return self.written(self.module.text_decoder, self.opening, seen, mask, LONGEST)
