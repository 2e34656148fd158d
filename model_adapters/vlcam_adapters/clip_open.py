"""Image-text models of open_clip with two towers: `CLIP` and `CustomTextCLIP`, SigLIP among them.

The vision tower is open_clip's own or one of timm's vision transformers. Each tower runs once per image or text; they
meet in a cosine.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import HFTokenizer, SigLipTokenizer, SimpleTokenizer, basic_clean, canonicalize_text
from open_clip.transformer import (
    CustomResidualAttentionBlock,
    ResidualAttentionBlock,
    TextTransformer,
    VisionTransformer,
)
from timm.layers import AttentionPoolLatent
from timm.models.deit import VisionTransformerDistilled
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import RobertaProcessing
from torch import Tensor, nn
from torch.nn.functional import normalize, pad
from transformers import PreTrainedTokenizerFast

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError, listing
from vlcam.images import SourceImage
from vlcam.readers import READERS
from vlcam.targets import HeadKind
from vlcam.text import Span, TextLayout, lay_out
from vlcam_adapters.classifier import ImageSizes, Stack, given_pixels, pair
from vlcam_adapters.clip_text import Pool, TextWarning, check_tokenizer, read_back, tokenise
from vlcam_adapters.contrastive import similarities
from vlcam_adapters.hf_loading import cast, placed
from vlcam_adapters.hf_processing import whole_pixels
from vlcam_adapters.torchvision_processing import Pipeline, prepare
from vlcam_adapters.vit_timm import CHECKPOINTING, VitTimm, changed, fused_or_explicit, loading_by, prefix_of, stack_of

__all__ = ["ClipOpen", "OpenClipAdapter", "Texts", "Tower", "residual_block", "residual_stack"]

_FUSED = "fused (scaled_dot_product_attention)"
_CHECKPOINTING = (
    "gradient checkpointing, which open_clip and timm keep on in evaluation too, is off while vlcam runs the model"
)
_LAYER_SCALE = "F3 and F5 are the branches before LayerScale"
_FIXED = (
    "open_clip fits positions to another size only where it loads weights: create the model with "
    "force_image_size=(height, width), or load it with image_size=(height, width)"
)
_NO_FUSION = (
    "it has no cross-attention; its cross-modal evidence is the cosine of its two towers, whose maps the streams "
    "vision and text give"
)
_GIVE = (
    "give (preprocess, tokenizer): the last of the three that open_clip.create_model_and_transforms returns, and what "
    "open_clip.get_tokenizer returns; vlcam.wrap(model, (preprocess, tokenizer))"
)
_POOLS: dict[str, Pool] = {"argmax": "largest id", "eos": "first end", "last": "last"}
_CHANNELS = 3


class Tower(ABC):
    """A vision tower: how its image tokens are made, pooled and projected.

    Attributes:
        visual: the tower, as it stands in the model.
        stack: its blocks.
        prefix: image tokens before the patches.
        reads: whether the class token is pooled, or the patches are.
        sizes: which image sizes it takes.
        entry: its first layer, whose device and type images must have.
        loop: the module that runs the blocks.
        attention: how attention is computed, in words.
        pools: whether it pools by attention.
    """

    visual: Any
    stack: Stack
    prefix: tuple[Prefix, ...]
    reads: Literal["cls", "patches"]
    sizes: ImageSizes
    entry: nn.Module
    loop: nn.Module
    attention: str
    pools: bool

    def tokens(self, pixel_values: Tensor) -> Tensor:
        """The last block's output, [I, prefix + h * w, D]."""
        made = self.visual.forward_intermediates(
            pixel_values, indices=1, intermediates_only=True, output_fmt="NLC", output_extra_tokens=True
        )
        patches: Tensor = made["image_intermediates"][0]
        prefix = made.get("image_intermediates_prefix")
        return patches if prefix is None else torch.cat((prefix[0], patches), 1)

    @abstractmethod
    def pooled(self, tokens: Tensor) -> Tensor:
        """From what `tokens` gave to the image's embedding [I, E], not yet of unit length."""

    @abstractmethod
    def norm(self, tokens: Tensor) -> Tensor:
        """The final norm, which tokens [..., D] have to pass."""

    @abstractmethod
    def projected(self, vectors: Tensor) -> Tensor:
        """From vectors [..., D] behind the final norm to embeddings [..., E]."""

    @abstractmethod
    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        """What the pooler makes of any block's tokens [I, N, D]; see `ModelAdapter.read_block`."""

    @abstractmethod
    def pooler(self, tokens: str) -> StreamAnatomy | None:
        """The stream of the pooler, whose keys are tokens as described in words; None where there is none."""

    def in_words(self, size: tuple[int, int]) -> str:
        """The image tokens in order."""
        rows, columns = self.sizes.grid(size)
        names = [f"[{name.upper()}]" for name in self.prefix]
        return f"{', '.join(names)}{', then ' if names else ''}{rows} x {columns} patches in raster order"


class _NativeTower(Tower):
    """A tower of open_clip's own."""

    prefix: tuple[Prefix, ...] = ("cls",)

    def __init__(self, visual: VisionTransformer) -> None:
        """Hold a tower.

        Raises:
            AdapterError: it pools in a way that is not known.
        """
        self.visual, self.entry, self.loop = visual, visual.conv1, visual.transformer
        self.pools = visual.attn_pool is not None
        if visual.pool_type not in ("tok", "avg"):
            raise AdapterError(
                f"visual pools by pool_type={visual.pool_type!r}, attentional_pool="
                f"{getattr(visual, 'attn_pool_type', False)!r}: looked for pool_type 'tok' or 'avg', with "
                "attentional_pool on or off"
            )
        self.reads = "patches" if self.pools or visual.pool_type == "avg" else "cls"
        self.sizes = ImageSizes(pair(visual.patch_size), pair(visual.image_size), others=False, remedy=_FIXED)
        self.stack = residual_stack(visual.transformer, "visual")
        self.attention = _FUSED

    def pooled(self, tokens: Tensor) -> Tensor:
        seen, _ = self.visual._pool(tokens)  # noqa: SLF001 - the order of norm and pooling is the library's own
        return self._out(seen)

    def norm(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.ln_post(tokens)
        return found

    def projected(self, vectors: Tensor) -> Tensor:
        return self._out(vectors)

    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        if not bare:
            return normalize(self.pooled(tokens), dim=-1)
        slots = self.visual.attn_pool(tokens)
        return self._out(slots[:, 0] if self.visual.pool_type == "tok" else slots[:, 1:].mean(1))

    def pooler(self, tokens: str) -> StreamAnatomy | None:
        if not self.pools:
            return None
        module, queries = self.visual.attn_pool, len(self.visual.attn_pool.query)
        sites = {"CROSS": Reading(module.attn, "attention"), "CONTEXT": Reading(module, "input")}
        said = f"{queries} learned queries; keys of CROSS: {tokens}"
        width, heads = int(module.attn.embed_dim), int(module.attn.num_heads)
        return StreamAnatomy("pooler", (Block(sites),), width, heads, said, trunk=False, queries=queries)

    def _out(self, vectors: Tensor) -> Tensor:
        return vectors if self.visual.proj is None else vectors @ self.visual.proj


class _TimmTower(Tower):
    """A tower that wraps a vision transformer of timm."""

    def __init__(self, visual: TimmModel) -> None:
        """Hold a tower.

        Raises:
            AdapterError: it pools in a way that is not known, or has blocks that are not.
        """
        trunk = visual.trunk
        self.visual, self.entry, self.loop = visual, trunk.patch_embed, trunk
        self.prefix = prefix_of(trunk)
        pool = getattr(trunk, "attn_pool", None)
        self.pools = pool is not None
        keeps_all = not self.prefix or getattr(trunk, "pool_include_prefix", True)
        if not trunk.global_pool or (pool is not None and not (isinstance(pool, AttentionPoolLatent) and keeps_all)):
            raise AdapterError(
                f"visual.trunk pools by global_pool={trunk.global_pool!r}, attn_pool={type(pool).__name__}: looked for "
                "a pool of the class token or of patches, or an AttentionPoolLatent that reads all tokens"
            )
        self.reads = "cls" if trunk.global_pool == "token" else "patches"
        embed = trunk.patch_embed
        self.sizes = ImageSizes(
            tuple(embed.feat_ratio(as_scalar=False)),
            tuple(embed.img_size),
            getattr(trunk, "dynamic_img_size", False),
            _FIXED,
        )
        self.stack = stack_of(trunk)
        self.attention = fused_or_explicit(trunk.blocks)

    def tokens(self, pixel_values: Tensor) -> Tensor:
        """The last block's output; where it is pooled by attention, behind the final norm, as the pooler reads it."""
        made = super().tokens(pixel_values)
        return self.norm(made) if self.pools else made

    def pooled(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.head(self.visual.trunk.forward_head(tokens if self.pools else self.norm(tokens)))
        return found

    def norm(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.trunk.norm(tokens)
        return found

    def projected(self, vectors: Tensor) -> Tensor:
        trunk = self.visual.trunk
        found: Tensor = self.visual.head(trunk.head(trunk.head_drop(trunk.fc_norm(vectors))))
        return found

    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        return normalize(self.pooled(tokens if bare else self.norm(tokens)), dim=-1)

    def pooler(self, tokens: str) -> StreamAnatomy | None:
        if not self.pools:
            return None
        module = self.visual.trunk.attn_pool
        sites = {"CROSS": Reading(module, "attention"), "CONTEXT": Reading(module, "input")}
        queries, heads = int(module.latent_len), int(module.num_heads)
        said = f"{queries} learned {'query' if queries == 1 else 'queries'}; keys of CROSS: {tokens}"
        width = heads * int(module.head_dim)
        return StreamAnatomy("pooler", (Block(sites),), width, heads, said, trunk=False, queries=queries)


def _tower(visual: Any) -> Tower:
    if isinstance(visual, VisionTransformer):
        return _NativeTower(visual)
    trunk: Any = getattr(visual, "trunk", None)
    if isinstance(visual, TimmModel) and VitTimm.accepts(trunk) and not isinstance(trunk, VisionTransformerDistilled):
        return _TimmTower(visual)
    found = " around ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in (visual, trunk) if each)
    kinds = ", ".join(kind.__name__ for kind in VitTimm.families)
    raise AdapterError(
        f"visual is {found}, which this adapter does not know; looked for open_clip.transformer.VisionTransformer, and "
        f"for open_clip.timm_model.TimmModel around one of timm's {kinds}"
    )


def residual_stack(transformer: Any, name: str) -> Stack:
    """The blocks of one of open_clip's transformers.

    Raises:
        AdapterError: blocks that are not known.
    """
    if not transformer.batch_first:
        raise AdapterError(f"{name}.transformer has batch_first=False; this adapter reads [batch, tokens, width] alone")
    blocks, first = tuple(residual_block(block) for block in transformer.resblocks), transformer.resblocks[0]
    notes = [_CHECKPOINTING]
    if not isinstance(first.ls_1, nn.Identity):
        notes.append(_LAYER_SCALE)
    if isinstance(first, CustomResidualAttentionBlock):
        if not isinstance(first.ln_attn, nn.Identity):
            notes.append("F3 comes before ln_attn, which attention passes on its way to the residual stream")
        if not isinstance(first.attn.ln_inner, nn.Identity) or first.attn.head_scale is not None:
            notes.append("F3_HEADS comes after the scale of heads and attn.ln_inner, where there are such")
    return Stack(blocks, int(transformer.width), int(first.attn.num_heads), tuple(notes))


def residual_block(block: Any) -> Block:
    """The sites of a block of open_clip.

    Raises:
        AdapterError: a block that is not known.
    """
    if isinstance(block, CustomResidualAttentionBlock):
        heads = Reading(block.attn.out_proj, "input")
    elif isinstance(block, ResidualAttentionBlock):
        heads = Reading(block.attn, "heads")
    else:
        raise AdapterError(
            f"a block is {type(block).__module__}.{type(block).__qualname__}; looked for ResidualAttentionBlock and "
            "CustomResidualAttentionBlock of open_clip.transformer"
        )
    return Block(
        {
            "F1": Reading(block.ln_1, "output"),
            "F2": Reading(block.attn, "attention"),
            "F3_HEADS": heads,
            "F3": Reading(block.attn, "output"),
            "F4": Reading(block.ln_2, "output"),
            "F5": Reading(block.mlp, "output"),
            "F6": Reading(block, "output"),
        }
    )


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


class OpenClipAdapter(ModelAdapter):
    """Base of the adapters of open_clip's models: images, texts and the contrastive head.

    A family names its classes in `families` and adds `anatomy`, `text_tower` and its heads.
    """

    library = "open_clip"
    families: ClassVar[tuple[type[nn.Module], ...]]
    module: Any

    def __init__(
        self,
        module: nn.Module,
        processor: Any,
        *,
        image_size: tuple[int, int] | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: the transform for images, as open_clip makes it for validation, and the tokenizer.
            image_size: height and width that images are resized to, in place of the transform's resize and crop.
            image_mean: what is subtracted from each channel, in place of the transform's numbers.
            image_std: what each channel is divided by, in place of the transform's numbers.

        Raises:
            AdapterError: a tower that is not known, a processor that cannot be used, or an option that cannot be met.
            InputError: an image size that the model cannot take.
        """
        transform, tokenizer = _both(processor)
        self.module = module
        self._check_parts()
        self.tower = _tower(self.module.visual)
        self.text = _text_tower(self.module)
        self.prefix, self.reads = self.tower.prefix, self.tower.reads
        self._texts = Texts(tokenizer, self.text, self._context)
        wanted = None if image_size is None else whole_pixels(image_size)
        statistics = {"image_mean": _numbers("image_mean", image_mean), "image_std": _numbers("image_std", image_std)}
        pipeline = Pipeline(transform)
        if wanted is not None:
            pipeline = pipeline.exactly(wanted)
        if image_mean is not None or image_std is not None:
            pipeline = pipeline.normalising(*statistics.values())
        self._pipeline = pipeline
        self.size = pipeline.size or self.tower.sizes.trained
        self.tower.sizes.check(self.size)
        self._options = {"image_size": None if wanted is None else list(wanted), **statistics}
        self._interpolated: tuple[dict[str, Any], ...] = ()
        self.heads = self._heads()

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is one of open_clip's classes, or of a subclass."""
        return isinstance(module, cls.families)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; processor and options as in the constructor."""
        if not cls.accepts(module):
            names = " or ".join(kind.__name__ for kind in cls.families)
            raise AdapterError(
                f"expected a {names} of open_clip, found {type(module).__module__}.{type(module).__qualname__}"
            )
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint to `device` in `dtype`; the other options as in the constructor.

        With `image_size` other than the trained one, open_clip interpolates the positions for it.
        """
        name = f"local-dir:{source}" if local else f"hf-hub:{str(source).removeprefix('hf-hub:')}"
        asked = options.get("image_size")
        wanted = None if asked is None else whole_pixels(asked)
        with loading_by("open_clip", source):
            trained = pair(open_clip.get_model_config(name)["vision_cfg"].get("image_size", 224))
            module, transform = open_clip.create_model_from_pretrained(name, force_image_size=wanted)
            tokenizer = open_clip.get_tokenizer(name)
        made = cls.wrap(placed(module.to(cast(dtype)), device).eval(), (transform, tokenizer), **options)
        if wanted is not None and wanted != trained:
            made._interpolated = (  # noqa: SLF001 - of this very class
                {"step": "interpolate_positions", "trained": list(trained), "used": list(wanted)},
            )
        return made

    @property
    def options(self) -> Mapping[str, Any]:
        """Image size, and the statistics of pixels."""
        return self._options

    @property
    def attention(self) -> str:
        """What open_clip and timm chose when the model was made: fused or explicit attention."""
        vision = self.tower.attention
        return vision if vision == _FUSED else f"{vision} in the vision tower, {_FUSED} elsewhere"

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the transform.

        Raises:
            InputError: the transform makes a size that the model cannot take.
        """
        return self._marked(prepare(self._pipeline, self.tower.entry, self.tower.sizes, images, remedy=_GIVE))

    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take normalised pixels [I, 3, H, W].

        Raises:
            InputError: a size that the model cannot take as it is.
        """
        return self._marked(given_pixels(self.tower.entry, self.tower.sizes, pixel_values))

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise; text beyond the context length is cut off and listed."""
        return self._on_device(self._texts.prepared(texts))

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N]; shorter ones than the context are padded to it.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        return self._on_device(self._texts.given(ids, mask))

    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the normalisation."""
        known = self._pipeline.normalisation
        mean, std = (pixel_values.new_tensor(values)[:, None, None] for values in (known.mean, known.std))
        return pixel_values * std + mean

    def trunk(self, inputs: Inputs) -> Tensor:
        """The vision tower's image tokens, [I, prefix + h * w, D]: the last block's, as its pooling reads them."""
        return self.tower.tokens(inputs.images.pixel_values)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The contrastive head on the mean of all tokens of a block, or on what the pooler makes of them.

        Raises:
            RecipeError: another head.
        """
        if name != "contrastive":
            return super().read_block(name, tokens, inputs, bare=bare)
        if self.tower.pools:
            return self.compared(self.tower.of_block(tokens, bare=bare), inputs)
        return self.compared(normalize(self._embedded(tokens.mean(1)), dim=-1), inputs)

    def ids(self, inputs: Inputs) -> Tensor:
        """The ids [T, N] that the text tower takes, without a place for a token that it appends itself.

        Raises:
            InputError: there are no texts.
        """
        if inputs.texts is None:
            raise InputError("an image is scored with texts, but no text was given")
        return inputs.texts.tensors["input_ids"][:, : self._context]

    def compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        """Cosines and logits of image embeddings with every text, [B, T, 2]."""
        return similarities(images, inputs, scale=self.module.logit_scale.exp(), bias=self.module.logit_bias)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Switch gradient checkpointing off, under which every hook would fire again in the backward pass."""
        with ExitStack() as stack:
            for part in (self.tower.loop, self.text.transformer, getattr(self.module, "text_decoder", None)):
                if part is not None:
                    stack.enter_context(changed(part, grad_checkpointing=False))
            yield

    @property
    def targets(self) -> tuple[str, ...]:
        """Every score with its scales, in words."""
        return tuple(
            f"{name}: {', '.join(READERS[kind])}" for name, kind in self.heads.items() if name not in self.readouts
        )

    @property
    def towers(self) -> dict[str, StreamAnatomy]:
        """The streams of the two towers, and of the pooler where there is one."""
        vision, text, tokens = self.tower.stack, self._text_stack, self.tower.in_words(self.size)
        streams = [
            StreamAnatomy("vision", vision.blocks, vision.width, vision.heads, tokens, trunk=True),
            StreamAnatomy("text", text.blocks, text.width, text.heads, self._text_in_words, trunk=True),
            self.tower.pooler(tokens),
        ]
        return {stream.name: stream for stream in streams if stream is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known of the towers."""
        found = dict.fromkeys((*self._text_stack.notes, *self.tower.stack.notes))
        return tuple(note for note in found if note != CHECKPOINTING)  # which timm's blocks say in their own words

    @cached_property
    def _text_stack(self) -> Stack:
        return residual_stack(self.text.transformer, "text")

    @property
    def _text_in_words(self) -> str:
        seen = "each token sees those before it" if self.text.attn_mask is not None else "all tokens see each other"
        return f"word pieces, padded to {self._context}; {seen}"

    @property
    def _context(self) -> int:
        return int(self.text.context_length)

    @property
    def _kind(self) -> HeadKind:
        """With a bias, as in SigLIP, each pair is scored by itself."""
        return "prompts" if self.module.logit_bias is None else "sigmoid"

    def _heads(self) -> Mapping[str, HeadKind]:
        return {"contrastive": self._kind}

    def _check_parts(self) -> None:
        """Refuse a model that is put together in a way that the family does not know."""

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.tower.projected(self.tower.norm(tokens))

    def _marked(self, images: PreparedImages) -> PreparedImages:
        if not self._interpolated:
            return images
        steps = tuple((*own, *self._interpolated) for own in images.steps)
        return PreparedImages(images.pixel_values, images.placements, steps, images.grid)

    def _on_device(self, texts: PreparedTexts) -> PreparedTexts:
        device = self.module.logit_scale.device
        tensors = {name: tensor.to(device) for name, tensor in texts.tensors.items()}
        return PreparedTexts(tensors, texts.layouts, texts.pooled)


class ClipOpen(OpenClipAdapter):
    """Adapter for `CLIP` and `CustomTextCLIP` of open_clip, whose cosines a temperature turns into logits.

    With a `logit_bias`, as SigLIP has, each logit stands for itself; without, those of all texts are compared.
    """

    architectures: ClassVar[tuple[str, ...]] = ("CLIP", "CustomTextCLIP")
    families: ClassVar[tuple[type[nn.Module], ...]] = (CLIP, CustomTextCLIP)
    readouts: ClassVar[frozenset[str]] = frozenset({"contrastive_patches"})

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether it is an `open_clip_config.json` of a model with two towers."""
        return "vision_cfg" in (config.get("model_cfg") or {}) and "multimodal_cfg" not in config["model_cfg"]

    @cached_property
    def anatomy(self) -> Anatomy:
        """Streams `vision` and `text`, and `pooler` where image tokens are pooled by attention."""
        lacks = {"fusion": _NO_FUSION}
        if not self.tower.pools:
            what = "reads its class token" if self.reads == "cls" else "takes the mean of its tokens"
            lacks["pooler"] = f"the vision tower {what}, and has no attention that pools"
        return Anatomy(type(self.module).__name__, self.towers, self.targets, self.notes, lacks)

    def text_tower(self, inputs: Inputs) -> Tensor:
        """Text embeddings of unit length, [T, E].

        Raises:
            InputError: there are no texts.
        """
        found: Tensor = self.module.encode_text(self.ids(inputs), normalize=True)
        return found

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Cosine and logit of each pair's image with every text, [P, T, 2].

        `contrastive` reads the image as the model does; `contrastive_patches` reads the mean of its patches behind the
        final norm in place of the class token.
        """
        if name == "contrastive":
            image = self.tower.pooled(shared)
        else:
            image = self.tower.projected(self.tower.norm(shared[:, len(self.prefix) :]).mean(1))
        return self.compared(normalize(image, dim=-1), inputs)

    def token_cosines(self, tokens: Tensor, inputs: Inputs) -> Tensor:
        """Cosine of every token's embedding with every text, [P, N, T].

        Raises:
            RecipeError: the tower pools tokens by attention, and embeds none by itself.
        """
        if self.tower.pools or inputs.encoded is None:
            return super().token_cosines(tokens, inputs)
        return normalize(self._embedded(tokens), dim=-1) @ inputs.encoded.every.T

    def _heads(self) -> Mapping[str, HeadKind]:
        patches: dict[str, HeadKind] = {"contrastive_patches": self._kind} if self.reads == "cls" else {}
        return {**super()._heads(), **patches}


def _text_tower(module: Any) -> Any:
    """The text tower; a `CLIP` holds its parts."""
    if isinstance(module, CLIP):
        return module
    if isinstance(module.text, TextTransformer):
        return module.text
    kind = type(module.text)
    hint = ", a text tower of transformers" if isinstance(module.text, HFTextEncoder) else ""
    raise AdapterError(
        f"text is {kind.__module__}.{kind.__qualname__}{hint}, which this adapter does not know; looked for "
        "open_clip.transformer.TextTransformer"
    )


def _both(processor: Any) -> tuple[Any, Any]:
    """Transform and tokenizer out of what the user gave."""
    if not isinstance(processor, (tuple, list)) or len(processor) != 2 or not all(callable(part) for part in processor):
        raise AdapterError(f"processor={type(processor).__name__}: {_GIVE}")
    transform, tokenizer = processor
    steps = getattr(transform, "transforms", [transform])
    random = [type(step).__name__ for step in steps if type(step).__name__.startswith("Random")]
    if random:
        raise AdapterError(f"processor: the transform is the one for training, with {', '.join(random)}; {_GIVE}")
    return transform, tokenizer


def _numbers(name: str, given: Any) -> list[float] | None:
    if given is None:
        return None
    if (
        not isinstance(given, (list, tuple))
        or len(given) != _CHANNELS
        or not all(type(n) in (int, float) for n in given)
    ):
        raise AdapterError(f"{name}={given!r}: give three numbers, one per channel")
    return [float(number) for number in given]
