"""What the adapters of LAVIS share: a vision transformer of timm's layout, and a BERT that looks at its tokens.

LAVIS keeps attention by flags of its own (`save_attention`), for which a backward pass leaves gradients on modules and
parameters. None of that is used here.
"""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError, listing
from vlcam.images import SourceImage
from vlcam_adapters.blip_blocks import LACKS_NORMS, fusion_block, share_rows
from vlcam_adapters.classifier import ImageSizes, given_pixels, pair
from vlcam_adapters.hf_loading import cast, loading, placed
from vlcam_adapters.hf_processing import checked_ids, spelt_back
from vlcam_adapters.lavis_texts import BertTexts

if TYPE_CHECKING:
    from vlcam_adapters.torchvision_processing import Pipeline

__all__ = ["LavisAdapter", "everywhere", "named"]

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""What LAVIS's processors of BLIP and ALBEF normalise by."""
_SIZE = "LAVIS interpolates no positions; give images of that size, or build the model with another image_size"
_PROCESSOR = (
    "LAVIS models need their processors: vlcam.wrap(model, (vis_processors, txt_processors)), as "
    "load_model_and_preprocess returns them, or (processor, None) to read texts as typed; (None, None) takes images "
    "that are preprocessed already"
)
_NAMED = "lavis:"
_CHECKPOINTING = "fairscale.nn.checkpoint.checkpoint_activations"
_FLAGS = ("save_attention", "use_checkpoint")
"""By which parts of LAVIS store attention, or compute it anew in the backward pass, where no tap would see it."""


class LavisAdapter(ModelAdapter):
    """Base of the adapters of LAVIS: a vision transformer of timm's layout, and a BERT that looks at its tokens.

    A model gives `kind`, the name of its class, and `parts`, what else tells it; `architectures`, by which LAVIS loads
    it; `reader`, `opening`, `heads`, `targets` and `head`; and `lacks`, for streams that it lacks the reason.
    """

    library = "lavis"
    kind: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    lacks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    prefix: tuple[Prefix, ...] = ("cls",)
    module: Any

    def __init__(self, module: nn.Module, processor: Any) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: LAVIS's processors of images and of texts; each alone, or as `load_model_and_preprocess` returns
                them, by "train" and "eval"; None for a part that is not needed.

        Raises:
            AdapterError: processors whose work cannot be put on record.
        """
        self.module = module
        images, texts = _processors(processor)
        self._sizes = ImageSizes(*self.frame(), others=False, remedy=_SIZE)
        self._pipeline = None if images is None else _pipeline(images)
        if self._pipeline is not None and self._pipeline.size is not None:
            self._sizes.check(self._pipeline.size)
        self._texts = BertTexts(self.module.tokenizer, self.longest, texts, prompt=self.prompt)

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether a class of that name is among the module's, and it has the parts."""
        return any(each.__name__ == cls.kind for each in type(module).__mro__) and all(
            _has(module, part) for part in cls.parts
        )

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model and its processors."""
        if not cls.accepts(module):
            raise AdapterError(f"expected LAVIS's {cls.kind}, found {type(module).__name__}")
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load what LAVIS has under that name, with its processors, to `device` in `dtype`; needs a network.

        Args:
            source: `lavis:NAME/TYPE`, the name and the type as `load_model_and_preprocess` takes them.
            local: refused, for LAVIS has no folders.
            dtype: the type of all weights.
            device: where the model runs.
            **options: none.

        Raises:
            AdapterError: another name, no LAVIS in this environment, or it does not get the checkpoint.
        """
        if local or str(source) not in cls.architectures:
            raise AdapterError(f"{str(source)!r}: LAVIS loads models by name, {listing(cls.architectures)}")
        try:
            from lavis.models import load_model_and_preprocess  # in an environment of its own; see docs/blip.md
        except ImportError as error:
            raise AdapterError(
                f"{str(source)!r} needs LAVIS, and it cannot be imported here ({error}); docs/blip.md says how to "
                "install it"
            ) from None
        name, kind = str(source).removeprefix(_NAMED).split("/")
        with loading(source):
            module, images, texts = load_model_and_preprocess(name, kind, is_eval=True, device="cpu")
        return cls.wrap(placed(module.to(cast(dtype)), device), (images, texts), **options)

    @property
    @abstractmethod
    def reader(self) -> Any:
        """The BERT that looks at the image tokens."""

    @property
    @abstractmethod
    def opening(self) -> tuple[str, int]:
        """Piece and id of the token that opens a text which meets an image."""

    @property
    def prompt(self) -> str:
        """What is put before every text."""
        return ""

    @property
    def longest(self) -> int:
        """Most tokens of a text, those that open and end it among them."""
        return int(min(self.module.max_txt_len, self.reader.config.max_position_embeddings))

    def frame(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of a patch, and of the images that the vision tower was built for."""
        patches = self.module.visual_encoder.patch_embed
        return pair(patches.patch_size), pair(patches.img_size)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The streams of `streams`, with the targets and the notes."""
        streams = {each.name: each for each in self.streams()}
        return Anatomy(type(self.module).__name__, streams, self.targets(), self.notes(), lacks=self.lacks)

    def streams(self) -> tuple[StreamAnatomy, ...]:
        """`vision`, pre-norm, and `fusion`, post-norm, with cross-attention in some blocks or all."""
        text, (rows, columns) = self.reader, self._sizes.grid(self._sizes.trained)
        fusion = StreamAnatomy(
            "fusion",
            tuple(fusion_block(layer) for layer in text.encoder.layer),
            text.config.hidden_size,
            text.config.num_attention_heads,
            f"{self.opening[0]}, word pieces, [SEP]; keys of CROSS: [CLS], then {rows} x {columns} patches",
            trunk=False,
            run_by=tuple(name for name in self.heads if name != "contrastive"),  # which reads text by itself
        )
        return self.vision_stream(), fusion

    def vision_stream(self) -> StreamAnatomy:
        """The vision tower, pre-norm."""
        vision, (rows, columns) = self.module.visual_encoder, self._sizes.grid(self._sizes.trained)
        return StreamAnatomy(
            "vision",
            tuple(_vision_block(block) for block in vision.blocks),
            vision.embed_dim,
            vision.blocks[0].attn.num_heads,
            f"[CLS], then {rows} x {columns} patches in raster order",
            trunk=True,
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def attention(self) -> str:
        """LAVIS writes attention out."""
        return "eager"

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the image processor."""
        from vlcam_adapters.torchvision_processing import prepare  # not needed for pixels that are ready

        return prepare(self._pipeline, self.module, self._sizes, images, remedy=_PROCESSOR)

    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take normalised pixels [I, 3, H, W].

        Raises:
            InputError: a size that the model cannot take as it is.
        """
        return given_pixels(self.module, self._sizes, pixel_values)

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise as the model does, with padding; text beyond its limit is cut off and listed."""
        return self.tokenised(self._texts, texts, self.opening)

    def tokenised(self, how: BertTexts, texts: Sequence[str], opening: tuple[str, int]) -> PreparedTexts:
        """Texts on the model's device, opened by that token."""
        tensors, layouts = how(texts, opening=opening)
        return PreparedTexts(self._on_device(tensors), layouts)

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N] that begin with [CLS] or with the opening token; a missing mask is read off padding.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        config, tokenizer = self.reader.config, self.module.tokenizer
        rows, known = checked_ids(
            ids,
            mask,
            padding=tokenizer.pad_token_id,
            table=config.vocab_size,
            limit=config.max_position_embeddings,
        )
        openings = sorted({tokenizer.cls_token_id, self.opening[1]})
        if not set(rows[:, 0].tolist()) <= set(openings):
            raise InputError(f"input_ids begin with {rows[:, 0].tolist()}: a text is opened by one of {openings}")
        tensors = {"input_ids": rows.clone(), "attention_mask": known.long()}
        return PreparedTexts(self._on_device(tensors), spelt_back(tokenizer, rows, known, opening=self.opening))

    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the normalisation: that of the image processor, or LAVIS's own where there is none."""
        known = None if self._pipeline is None else self._pipeline.normalisation
        mean, std = (_MEAN, _STD) if known is None else (known.mean, known.std)
        return pixel_values * pixel_values.new_tensor(std)[:, None, None] + pixel_values.new_tensor(mean)[:, None, None]

    def trunk(self, inputs: Inputs) -> Tensor:
        """The vision tower with its final LayerNorm: [I, 1 + h * w, D]."""
        tokens: Tensor = self.module.visual_encoder.forward_features(inputs.images.pixel_values)
        return tokens

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep LAVIS from storing attention, and project an image's tokens to keys and values once for all its texts.

        The image tokens come to cross-attention by position; a hook hands them on by name, so that they can be tapped.
        """
        with ExitStack() as stack:
            stack.enter_context(_without_checkpointing())
            stack.enter_context(_flags_off(self.module))
            for layer in self.reader.encoder.layer:
                if not hasattr(layer, "crossattention"):
                    continue
                attention = layer.crossattention.self
                stack.callback(attention.register_forward_pre_hook(_by_name(), with_kwargs=True).remove)
                for handle in (*share_rows(attention.key), *share_rows(attention.value)):
                    stack.callback(handle.remove)
            yield

    def opened(self, prepared: PreparedTexts | None, rows: Sequence[int], opening: tuple[str, int]) -> list[Tensor]:
        """Ids and mask of the texts of P pairs, [P, N] each, opened by that token."""
        if prepared is None:
            raise InputError(f"{type(self.module).__name__} reads an image with a text, but no text was given")
        ids, mask = (prepared.tensors[name][list(rows)] for name in ("input_ids", "attention_mask"))
        ids = ids.clone()
        ids[:, 0] = opening[1]
        return [ids, mask]

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(self.module.parameters()).device
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    @abstractmethod
    def targets(self) -> tuple[str, ...]:
        """The targets with their scales, for people."""

    def notes(self) -> tuple[str, ...]:
        """What is to be known of the blocks."""
        there = [number for number, layer in enumerate(self.reader.encoder.layer) if hasattr(layer, "crossattention")]
        first = there[0] if there else 0
        alone = f"fusion blocks 0 to {first - 1} read text alone; those from {first} on look at the image too"
        return (LACKS_NORMS, alone) if first else (LACKS_NORMS,)


def named(*models: str, types: Sequence[str]) -> tuple[str, ...]:
    """The names by which LAVIS loads models, each of these types."""
    return tuple(f"{_NAMED}{model}/{each}" for model in models for each in types)


def everywhere(tokens: Tensor) -> Tensor:
    """A mask that hides none of the tokens [P, N, D], of the type that LAVIS makes."""
    return torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)


def _processors(processor: Any) -> tuple[Any, Any]:
    """The processor of images and that of texts.

    Raises:
        AdapterError: something else.
    """
    if not isinstance(processor, (tuple, list)) or len(processor) != 2:
        raise AdapterError(f"processor={type(processor).__name__}: {_PROCESSOR}")
    found = []
    for each in processor:
        chosen = each["eval"] if isinstance(each, Mapping) and "eval" in each else each
        if chosen is not None and not callable(chosen):
            raise AdapterError(f"processor has {type(chosen).__name__}: {_PROCESSOR}")
        found.append(chosen)
    return found[0], found[1]


def _pipeline(processor: Any) -> Pipeline:
    """What an image processor does, read off its transform."""
    from vlcam_adapters.torchvision_processing import Pipeline  # the processor has brought torchvision along

    return Pipeline(getattr(processor, "transform", processor))


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _vision_block(block: Any) -> Block:
    return Block(
        {
            "F1": Reading(block.norm1, "output"),
            "F2": Reading(block.attn, "attention"),
            "F3_HEADS": Reading(block.attn.proj, "input"),
            "F3": Reading(block.attn, "output"),
            "F4": Reading(block.norm2, "output"),
            "F5": Reading(block.mlp, "output"),
            "F6": Reading(block, "output"),
        }
    )


def _without_checkpointing() -> AbstractContextManager[Any]:
    """Keep fairscale from forgetting what attention computed, if any module is wrapped by it; in this thread."""
    found = sys.modules.get(_CHECKPOINTING)
    return nullcontext() if found is None else found.disable_checkpointing()


@contextmanager
def _flags_off(module: nn.Module) -> Iterator[None]:
    """Every part's flags off, and then as they were."""
    # Not by getattr: a module takes long to say that it lacks something, and there are hundreds of them.
    on = [(part, flag, vars(part)[flag]) for part in module.modules() for flag in _FLAGS if vars(part).get(flag)]
    try:
        for part, flag, _ in on:
            setattr(part, flag, False)
        yield
    finally:
        for part, flag, before in on:
            setattr(part, flag, before)


_ARGUMENTS = ("attention_mask", "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_value")


def _by_name() -> Any:
    """A hook that hands positional arguments of attention on by name."""
    owner = threading.get_ident()

    def named(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if threading.get_ident() != owner:
            return None
        names = (*_ARGUMENTS, "output_attentions")
        return args[:1], kwargs | dict(zip(names, args[1:], strict=False))

    return named
