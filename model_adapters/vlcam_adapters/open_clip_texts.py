"""Texts for open_clip: its tokenizers, their cleaning undone, so that every token knows its characters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from open_clip.model import CLIP
from open_clip.tokenizer import HFTokenizer, SigLipTokenizer, SimpleTokenizer, basic_clean, canonicalize_text
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import RobertaProcessing
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from vlcam.adapter import PreparedTexts
from vlcam.errors import AdapterError, InputError, listing
from vlcam.text import Span, TextLayout, lay_out
from vlcam_adapters.clip_text import Pool, TextWarning, check_tokenizer, read_back, tokenise

__all__ = ["Texts"]

_GIVE = (
    "give (preprocess, tokenizer): the last of the three that open_clip.create_model_and_transforms returns, and what "
    "open_clip.get_tokenizer returns; vlcam.wrap(model, (preprocess, tokenizer))"
)
_POOLS: dict[str, Pool] = {"argmax": "largest id", "eos": "first end", "last": "last"}


class Texts:
    """How texts become the ids that an open_clip text tower takes: always padded to its full context length."""

    def __init__(self, tokenizer: Any, tower: Any, length: int) -> None:
        """Hold a tokenizer and what a text tower says of itself.

        Args:
            tokenizer: open_clip's, or a fast tokenizer of transformers.
            tower: a `TextTransformer`, or a `CLIP`, which holds the parts of one.
            length: how many tokens a text has.

        Raises:
            AdapterError: a tokenizer that cannot be used, or that belongs to another model.
        """
        whole = isinstance(tower, CLIP)
        kind = tower.text_pool_type if whole else tower.pool_type
        self._appended = not whole and tower.cls_emb is not None
        if kind not in _POOLS:
            raise AdapterError(f"the text tower pools by pool_type={kind!r}: looked for {listing(_POOLS)}")
        self._pool: Pool = "first end" if self._appended else _POOLS[kind]
        self._simple = tokenizer if isinstance(tokenizer, SimpleTokenizer) else None
        self._fast, self._clean, own, self._stripped = _opened(tokenizer)
        # Behind the end a causal tower reads nothing, or hides the padding by this id.
        model = (0 if whole else tower.pad_id) if tower.attn_mask is not None else self._fast.pad_token_id
        self._padding = int(own if own is not None else model or 0)
        self._length, self._table = length, int(tower.vocab_size)
        if self._pool != "last":  # the tables of towers that are read at the last position may be larger or smaller
            check_tokenizer(self._fast, self._table)
        end = tower.text_eos_id if whole else tower.eos_id
        if kind == "eos" and end != self._fast.eos_token_id:
            raise AdapterError(
                f"the model pools a text at id {end}, and the tokenizer ends texts with id {self._fast.eos_token_id}: "
                f"they do not belong together; {_GIVE}"
            )

    def prepared(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise; what does not fit is cut off and listed.

        Raises:
            AdapterError: the places of tokens in the text cannot be told.
            InputError: ids that the model does not embed.
        """
        cleaned = [self._clean(text) for text in texts]
        found = tokenise(self._fast, cleaned, self._length, pool=self._pool, padding=self._padding, full=True)
        if int(found.ids.max()) >= self._table:
            raise InputError(
                f"the tokenizer gave id {int(found.ids.max())}, but the model embeds 0 to {self._table - 1}; {_GIVE}"
            )
        if self._simple is not None:
            _check_same(self._simple, texts, found.ids)
        layouts = [_placed(*each) for each in zip(texts, cleaned, found.layouts, strict=True)]
        ids, mask = found.ids, found.mask
        if self._stripped is not None:
            gone = ids == self._stripped
            ids, mask = ids.masked_fill(gone, self._padding), mask.masked_fill(gone, 0)
            layouts = [_without(layout, self._stripped) for layout in layouts]
        return self._found(ids, mask, tuple(layouts), found.pooled)

    def given(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take ids [T, N]; shorter ones than the context are padded.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        rows = ids if ids.ndim == 2 else ids[None]
        found = read_back(self._fast, rows, mask, pool=self._pool, table=self._table, limit=self._length)
        missing = self._length - found.ids.shape[1]
        if missing and self._pool == "last":
            warnings.warn(
                f"input_ids of {found.ids.shape[1]} tokens: the model reads a text at the last of {self._length}, so "
                f"that {missing} tokens of padding, id {self._padding}, were added to each text",
                TextWarning,
                stacklevel=4,
            )
        filled = pad(found.ids, (0, missing), value=self._padding)
        return self._found(filled, pad(found.mask, (0, missing)), found.layouts, found.pooled)

    def _found(
        self, ids: Tensor, mask: Tensor, layouts: tuple[TextLayout, ...], pooled: tuple[int, ...]
    ) -> PreparedTexts:
        if self._appended:  # a place for the token that the tower appends, whose id it does not read
            ids, mask = pad(ids, (0, 1), value=self._padding), pad(mask, (0, 1), value=1)
        if self._appended or self._pool == "last":
            pooled = (ids.shape[1] - 1,) * len(layouts)
        return PreparedTexts({"input_ids": ids, "attention_mask": mask}, layouts, pooled)


def _opened(tokenizer: Any) -> tuple[Any, Callable[[str], str], int | None, int | None]:
    """A fast tokenizer, what is done to a text before, the id of the padding, and one that becomes padding, if any."""
    if isinstance(tokenizer, SimpleTokenizer):
        if tokenizer.reduction_fn is not None:
            raise AdapterError(
                f"{type(tokenizer).__name__} with a reduction_mask leaves out words at random, so that a text has no "
                "tokens of its own; make it without"
            )
        return _fast(tokenizer), tokenizer.clean_fn, 0, None
    wrapped = isinstance(tokenizer, (HFTokenizer, SigLipTokenizer))
    bare = tokenizer.tokenizer if wrapped else tokenizer
    if not getattr(bare, "is_fast", False):
        raise AdapterError(f"{type(bare).__name__} gives no character offsets, which maps of words need; {_GIVE}")
    if not wrapped:
        return bare, str, None, None
    mode = getattr(tokenizer, "tokenizer_mode", "")
    if mode or bare.padding_side != "right":
        raise AdapterError(
            f"{type(tokenizer).__name__} with tokenizer_mode={mode!r}, padding_side={bare.padding_side!r}: this "
            "adapter knows texts that are padded at their end, and no mode"
        )
    clean = getattr(tokenizer, "clean_fn", lambda text: canonicalize_text(basic_clean(text)))
    strips = getattr(tokenizer, "strip_sep_token", False)
    return bare, clean, 0 if strips else bare.pad_token_id, bare.sep_token_id if strips else None


def _fast(tokenizer: Any) -> Any:
    """open_clip's own tokenizer as one that tells where each token lies; it takes texts that are cleaned already."""
    merges = sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.get)
    made = Tokenizer(BPE(tokenizer.encoder, merges, continuing_subword_prefix="", end_of_word_suffix="</w>"))
    cut = Split(Regex(f"(?i){tokenizer.pat.pattern}"), "removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    first, last = (tokenizer.decoder[id_] for id_ in (tokenizer.sot_token_id, tokenizer.eot_token_id))
    made.post_processor = RobertaProcessing(
        (last, tokenizer.eot_token_id), (first, tokenizer.sot_token_id), trim_offsets=False, add_prefix_space=False
    )
    # The mark of a word's end becomes the byte of a blank, as that alphabet writes it.
    made.decoder = decoders.Sequence(
        [decoders.Replace("</w>", "\u0120"), decoders.ByteLevel(), decoders.Strip(" ", 0, 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=first, eos_token=last, padding_side="right")


def _check_same(tokenizer: Any, texts: Sequence[str], ids: Tensor) -> None:
    """The places of tokens come from another tokenizer than the model's own, which must agree with it."""
    for text, row in zip(texts, ids.tolist(), strict=True):
        own = [tokenizer.sot_token_id, *tokenizer.encode(text)[: len(row) - 2], tokenizer.eot_token_id]
        if row[: len(own)] != own:
            raise AdapterError(
                f"{text!r}: the places of its tokens cannot be told, for {type(tokenizer).__name__} makes {own} of it, "
                f"and a tokenizer with places {row[: len(own)]}; write it without the signs that they read differently"
            )


def _placed(text: str, cleaned: str, layout: TextLayout) -> TextLayout:
    """The layout of a text as typed, from that of the cleaned text."""
    if text == cleaned:
        return layout
    matcher = SequenceMatcher(None, [c.lower() for c in text], [c.lower() for c in cleaned], autojunk=False)
    places: list[Span] = []
    for kind, begin, end, first, last in matcher.get_opcodes():
        alike = [(index, index + 1) for index in range(begin, end)]
        places += alike if kind == "equal" else [(begin, end)] * (last - first)
    spans = [(places[begin][0], places[end - 1][1]) if begin < end else (0, 0) for begin, end in layout.spans]
    truncated = bool(layout.cut_text)
    return lay_out(text, layout.ids, layout.pieces, spans, layout.special, truncated=truncated)


def _without(layout: TextLayout, id_: int) -> TextLayout:
    """A layout without the tokens of an id, which are none of a word."""
    rows = zip(layout.ids, layout.pieces, layout.spans, layout.special, strict=True)
    ids, pieces, spans, special = zip(*(row for row in rows if row[0] != id_), strict=True)
    return lay_out(layout.text, ids, pieces, spans, special, truncated=bool(layout.cut_text))
