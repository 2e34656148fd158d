"""Image-text models of open_clip with two towers: `CLIP` and `CustomTextCLIP`, SigLIP among them.

The vision tower is open_clip's own or one of timm's vision transformers. Each tower runs once per image or text; they
meet in a cosine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import open_clip
from open_clip.hf_model import HFTextEncoder
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import (
    TextTransformer,
)
from torch import Tensor, nn
from torch.nn.functional import normalize

from vlcam.adapter import Inputs, ModelAdapter, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam.readers import READERS
from vlcam.targets import HeadKind
from vlcam_adapters.classifier import Stack, given_pixels, pair
from vlcam_adapters.contrastive import NO_FUSION, pixel_statistics, similarities
from vlcam_adapters.hf_loading import cast, placed
from vlcam_adapters.hf_processing import whole_pixels
from vlcam_adapters.open_clip_texts import Texts
from vlcam_adapters.open_clip_towers import residual_stack, tower_of
from vlcam_adapters.timm_models import CHECKPOINTING, changed, loading_by
from vlcam_adapters.torchvision_processing import Pipeline, prepare

__all__ = ["ClipOpen", "OpenClipAdapter"]

_FUSED = "fused (scaled_dot_product_attention)"
_GIVE = (
    "give (preprocess, tokenizer): the last of the three that open_clip.create_model_and_transforms returns, and what "
    "open_clip.get_tokenizer returns; vlcam.wrap(model, (preprocess, tokenizer))"
)


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
        self.tower = tower_of(self.module.visual)
        self.text = _text_tower(self.module)
        self.prefix, self.reads = self.tower.prefix, self.tower.reads
        self._texts = Texts(tokenizer, self.text, self._context)
        wanted = None if image_size is None else whole_pixels(image_size)
        statistics = {
            "image_mean": pixel_statistics("image_mean", image_mean),
            "image_std": pixel_statistics("image_std", image_std),
        }
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
        return PreparedTexts(tensors, texts.layouts, texts.pooled, full=True)


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
        lacks = {"fusion": NO_FUSION}
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
