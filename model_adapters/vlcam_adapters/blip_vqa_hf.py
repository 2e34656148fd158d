"""BLIP that answers questions, as in Hugging Face transformers: `BlipForQuestionAnswering`.

The vision tower runs once per image. An encoder reads the question while it looks at the image tokens in every block
(stream `fusion`). A decoder then writes the answer: it attends to what the encoder made of the question, and to no
image token itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import BlipForQuestionAnswering, BlipProcessor

from vlcam.adapter import Inputs, PreparedTexts
from vlcam.anatomy import Anatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip_blocks import LACKS_NORMS
from vlcam_adapters.blip_parts import BlipAdapter, FirstToken, encoding, own_rows, writing
from vlcam_adapters.likelihoods import of_next

__all__ = ["LONGEST", "BlipVqaHF"]

LONGEST = 10
"""Most tokens of an answer that the model writes, the end token among them."""


class BlipVqaHF(BlipAdapter):
    """Adapter for `transformers.BlipForQuestionAnswering`.

    The original BLIP opens a question by [ENC]; the transformers class feeds [CLS] and so answers differently. vlcam
    feeds [ENC], as the weights were trained, unless `first_token="cls"` asks for the other. The answer is opened by
    [DEC]; every token behind that is counted, the [SEP] at the end too, as in the model's own loss.

    The transformers class lets the decoder attend to the padding of a question, so that its answer depends on what
    other questions are in the batch. Here the decoder does not see padding: the answer is that to the question alone.
    """

    architectures: ClassVar[tuple[str, ...]] = ("BlipForQuestionAnswering",)
    family = BlipForQuestionAnswering
    writes: ClassVar[Literal["", "caption", "answer"]] = "answer"
    heads: Mapping[str, HeadKind] = MappingProxyType({"answer": "tokens"})

    def __init__(
        self,
        module: BlipForQuestionAnswering,
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
            first_token: what opens the question.
            image_size: height and width that images are resized to, in place of the processor's.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: an option that the model cannot meet, or no token that opens an answer.
        """
        super().__init__(module, processor, image_size=image_size, interpolate_pos_encoding=interpolate_pos_encoding)
        self._first_token = first_token
        self.opening = encoding(self._tokenizer, module.config.text_config, first_token)
        self._answering = writing(self._tokenizer, module.config.text_config)

    @cached_property
    def anatomy(self) -> Anatomy:
        """Two streams: `vision`, pre-norm, and `fusion`, the encoder of the question."""
        return Anatomy(
            type(self.module).__name__,
            self.streams(f"{self.opening[0]}, word pieces, [SEP] of the question"),
            ("answer: log-probability",),
            (
                LACKS_NORMS,
                "the decoder that writes the answer is no stream: it attends to every token that the last fusion block "
                "makes of the question, padding aside, and to no image token",
                f"without an answer the model writes one: the likeliest token each time, {LONGEST} at most",
            ),
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """First token, image size and position interpolation."""
        return {"first_token": self._first_token, **super().options}

    @property
    def fusion_blocks(self) -> Sequence[Any]:
        """Those of the encoder of the question."""
        blocks: Sequence[Any] = self.module.text_encoder.encoder.layer
        return blocks

    def prepare_answers(self, answers: Sequence[str]) -> PreparedTexts:
        """Tokenise with padding; answers are opened by [DEC]."""
        return self.tokenised(answers, self._answering)

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Log-probability of each next token of the pair's answer, [P, M], 0 behind its last."""
        states, known = self._read(shared, inputs)
        missing = "BLIP tells how likely an answer is, but no answer was given"
        ids, mask = own_rows(inputs.answers, range(len(states)), self._answering, missing)
        made = self.module.text_decoder(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=states,
            encoder_attention_mask=known,
            use_cache=False,
        )
        return of_next(made.logits, ids, mask)

    def write(self, inputs: Inputs) -> list[str]:
        """An answer for each pair."""
        states, known = self._read(self.trunk(inputs)[list(inputs.image_of)], inputs)
        return self.written(self.module.text_decoder, self._answering, states, known, LONGEST)

    @contextmanager
    def running(self) -> Iterator[None]:
        """As in the base; and the decoder does not see the padding of a question."""
        with super().running(), ExitStack() as stack:
            for layer in self.module.text_decoder.bert.encoder.layer:
                stack.callback(_heed_mask(layer.crossattention.self).remove)
            yield

    def _read(self, shared: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What the encoder makes of the questions of P pairs, [P, N, D], and which tokens are no padding."""
        missing = "BLIP answers a question about an image, but no question was given"
        ids, mask = own_rows(inputs.texts, inputs.text_of, self.opening, missing)
        states: Tensor = self.module.text_encoder(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=shared
        ).last_hidden_state
        return states, mask


def _heed_mask(attention: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """A hook that hands cross-attention its mask by the name that it reads; transformers uses another."""
    owner = threading.get_ident()

    def rename(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if threading.get_ident() != owner or kwargs.get("encoder_attention_mask") is not None:
            return None
        return args, {**kwargs, "encoder_attention_mask": kwargs.get("attention_mask")}

    return attention.register_forward_pre_hook(rename, with_kwargs=True)
