"""BLIP that writes, as in LAVIS: `BlipCaption`, and `BlipVQA`, which answers questions.

The twins of transformers are in `blip_caption_hf` and `blip_vqa_hf`. LAVIS's own loss is smoothed by 0.1 whatever one
asks for; the log-probabilities here are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vlcam.adapter import Inputs, PreparedTexts
from vlcam.targets import HeadKind
from vlcam_adapters.lavis_parts import LavisAdapter, everywhere, named
from vlcam_adapters.lavis_texts import BertTexts
from vlcam_adapters.likelihoods import of_next

__all__ = ["BlipCaptionLavis", "BlipVqaLavis"]

_CAPTION, _ANSWER = 30, 10
"""Most tokens that are written, as by default in LAVIS, the end token among them."""


class WriterLavis(LavisAdapter):
    """Base of the adapters of models with a decoder; what it writes is opened by [DEC]."""

    @property
    def writing(self) -> tuple[str, int]:
        """Piece and id of the token that opens what is written."""
        return "[DEC]", int(self.module.tokenizer.bos_token_id)

    def told(self, ids: Tensor, mask: Tensor, seen: Tensor, known: Tensor) -> Tensor:
        """Log-probability of each next token of what is written, [P, N], 0 behind its last.

        Args:
            ids: what is written, [P, N].
            mask: which of these are no padding, [P, N].
            seen: what the decoder attends to, [P, K, D].
            known: which of these are no padding, [P, K].
        """
        made = self.module.text_decoder(
            ids, attention_mask=mask, encoder_hidden_states=seen, encoder_attention_mask=known, return_dict=True
        )
        return of_next(made.logits, ids, mask)

    def written(self, ids: Tensor, seen: Tensor, known: Tensor, count: int) -> list[str]:
        """What the decoder writes behind `ids`: always the likeliest token, until that is [SEP] or `count` are written.

        Args:
            ids: how it begins, [P, N].
            seen: what the decoder attends to, [P, K, D].
            known: which of these are no padding, [P, K].
            count: most tokens.
        """
        tokenizer = self.module.tokenizer
        limit = self.module.text_decoder.config.max_position_embeddings
        made = self.module.text_decoder.generate(
            input_ids=ids,
            max_length=min(ids.shape[1] + count, limit),
            min_length=0,
            num_beams=1,
            do_sample=False,
            eos_token_id=tokenizer.sep_token_id,
            pad_token_id=tokenizer.pad_token_id,
            encoder_hidden_states=seen,
            encoder_attention_mask=known,
        )
        return list(tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True))


class BlipCaptionLavis(WriterLavis):
    """Adapter for LAVIS's `BlipCaption`.

    A caption is read behind the model's prompt ("a picture of", by default in LAVIS), as in training and as `generate`
    writes it. The tokens of the prompt are not counted.
    """

    kind = "BlipCaption"
    parts = ("visual_encoder.forward_features", "text_decoder.bert.encoder.layer", "prompt_length")
    architectures = named("blip_caption", types=("base_coco", "large_coco"))
    writes: ClassVar[Literal["", "caption", "answer"]] = "caption"
    heads: Mapping[str, HeadKind] = MappingProxyType({"caption": "tokens"})

    @property
    def reader(self) -> Any:
        """The decoder."""
        return self.module.text_decoder.bert

    @property
    def opening(self) -> tuple[str, int]:
        """[DEC]."""
        return self.writing

    @property
    def prompt(self) -> str:
        """The model's own, with a blank behind it."""
        found = (self.module.prompt or "").strip()
        return f"{found} " if found else ""

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Log-probability of each next token of the pair's caption, [P, N], 0 before its first and behind its last."""
        ids, mask = self.opened(inputs.texts, inputs.text_of, self.opening)
        told = self.told(ids, mask, shared, everywhere(shared))
        # Row t tells token t + 1; the prompt's are no part of the caption.
        prompt = torch.arange(told.shape[1], device=told.device) < self.module.prompt_length - 1
        return told.masked_fill(prompt, 0)

    def write(self, inputs: Inputs) -> list[str]:
        """A caption for each image."""
        seen = self.trunk(inputs)
        tokenizer = self.module.tokenizer
        begin = list(tokenizer(self.prompt)["input_ids"])[:-1]
        ids = torch.tensor([[self.opening[1], *begin[1:]]] * len(seen), device=seen.device)
        return self.written(ids, seen, everywhere(seen), _CAPTION)

    def targets(self) -> tuple[str, ...]:
        """That of the caption."""
        return ("caption: log-probability",)

    def notes(self) -> tuple[str, ...]:
        """What is to be known of a decoder, and how captions are written."""
        prompt = (f"captions are read and written behind the prompt {self.prompt.strip()!r}",) if self.prompt else ()
        return (
            *super().notes(),
            "a word is told by the row of the token before it; in the last fusion block that row has a gradient from "
            "this word alone, in earlier ones from all words behind it too",
            *prompt,
            f"without a text the model writes one: the likeliest token each time, {_CAPTION} at most",
        )


class BlipVqaLavis(WriterLavis):
    """Adapter for LAVIS's `BlipVQA`: an encoder reads the question, opened by [ENC], and a decoder writes the answer.

    The decoder does not see the padding of a question. LAVIS's `generate` shows it to the decoder, so that there an
    answer may depend on the other questions of the batch; its loss and its ranking do not.
    """

    kind = "BlipVQA"
    parts = ("visual_encoder.forward_features", "text_encoder.encoder.layer", "text_decoder.bert.encoder.layer")
    architectures = named("blip_vqa", types=("vqav2", "okvqa", "aokvqa"))
    writes: ClassVar[Literal["", "caption", "answer"]] = "answer"
    heads: Mapping[str, HeadKind] = MappingProxyType({"answer": "tokens"})

    def __init__(self, module: nn.Module, processor: Any) -> None:
        """Hold a loaded model; processors as in the base, that of texts is for questions."""
        super().__init__(module, processor)
        self._answers = BertTexts(self.module.tokenizer, self.module.text_decoder.config.max_position_embeddings)

    @property
    def reader(self) -> Any:
        """The encoder of the question."""
        return self.module.text_encoder

    @property
    def opening(self) -> tuple[str, int]:
        """[ENC]."""
        return "[ENC]", int(self.module.tokenizer.enc_token_id)

    def prepare_answers(self, answers: Sequence[str]) -> PreparedTexts:
        """Tokenise with padding; answers are opened by [DEC]."""
        return self.tokenised(self._answers, answers, self.writing)

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Log-probability of each next token of the pair's answer, [P, M], 0 behind its last."""
        states, known = self._read(shared, inputs)
        ids, mask = self.opened(inputs.answers, range(len(states)), self.writing)
        return self.told(ids, mask, states, known)

    def write(self, inputs: Inputs) -> list[str]:
        """An answer for each pair."""
        states, known = self._read(self.trunk(inputs)[list(inputs.image_of)], inputs)
        ids = torch.full((len(states), 1), self.writing[1], device=states.device)
        return self.written(ids, states, known, _ANSWER)

    def targets(self) -> tuple[str, ...]:
        """That of the answer."""
        return ("answer: log-probability",)

    def notes(self) -> tuple[str, ...]:
        """What the decoder attends to, and how answers are written."""
        return (
            *super().notes(),
            "the decoder that writes the answer is no stream: it attends to every token that the last fusion block "
            "makes of the question, padding aside, and to no image token",
            f"without an answer the model writes one: the likeliest token each time, {_ANSWER} at most",
        )

    def _read(self, shared: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What the encoder makes of the questions of P pairs, [P, N, D], and which tokens are no padding."""
        ids, mask = self.opened(inputs.texts, inputs.text_of, self.opening)
        made = self.module.text_encoder(
            ids,
            attention_mask=mask,
            encoder_hidden_states=shared,
            encoder_attention_mask=everywhere(shared),
            return_dict=True,
        )
        states: Tensor = made.last_hidden_state
        return states, mask
