"""A `BlipITM` of LAVIS with random weights, and what it gives: `python tests_lavis/make_golden.py` writes the files.

The tests of the main environment load the weights into the transformers class, and compare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lavis_models as models
import numpy as np
import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "lavis-blip-twin"
TEXTS = ["a red dog", "the unaffable cat near a ball is on the grass"]
BLOCK = 1


def model() -> Any:
    """Of 4 x 4 patches, 2 vision blocks and 3 text blocks."""
    return models.blip(seed=7, text={"layers": 3})


def golden(module: Any) -> dict[str, np.ndarray]:
    """Inputs, scores, and the cross-attention of one block with the gradient of the ITM logit."""
    pixels = models.pixels(7, batch=2)
    text = module.tokenizer(TEXTS, padding="longest", truncation=True, max_length=16, return_tensors="pt")
    samples = {"image": pixels, "text_input": TEXTS}
    seen = []
    attention = module.text_encoder.encoder.layer[BLOCK].crossattention.self
    hook = attention.dropout.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = module(samples, match_head="itm")
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), seen[0])
    found = {
        "pixel_values": pixels,
        "input_ids": text["input_ids"],
        "attention_mask": text["attention_mask"],
        "enc_token_id": torch.tensor(module.tokenizer.enc_token_id),
        "itm_logits": logits,
        "itc_cosines": module(samples, match_head="itc"),
        "C": seen[0],
        "G": gradient,
    }
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def main() -> None:
    """Write weights and values."""
    module = model()
    FOLDER.mkdir(exist_ok=True)
    save_file({name: t.clone() for name, t in module.state_dict().items()}, FOLDER / "model.safetensors")
    np.savez_compressed(FOLDER / "golden.npz", **golden(module))


if __name__ == "__main__":
    main()
