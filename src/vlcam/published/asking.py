"""The model asked again, with something taken away."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import FEATURES, TOKENS, entry, pgc

__all__ = ["ENTRIES"]

ENTRIES = (
    entry(
        pgc("pgc-scorecam", "ScoreCAM", weighting="scorecam", departures="aligned_corners"),
        citations.SCORECAM,
        departs=f"{TOKENS} Masks are laid over the preprocessed image with corners aligned, though the final map is "
        "not.",
        notes="One forward pass per channel. The paper's baseline cancels in the softmax, which large logits turn into "
        "a choice of one channel.",
    ),
    entry(
        FEATURES.replace(name="torchcam-scorecam", weighting="scorecam"),
        citations.SCORECAM,
        "frgfm/torch-cam 0.5.0, torchcam/methods/activation.py, ScoreCAM",
        departs=f"{TOKENS} Masks are scaled to 0..1 on the grid before they are laid over the image, not after.",
        notes="One forward pass per channel. Masks have half-pixel centres, as the map has.",
    ),
    entry(
        FEATURES.replace(name="ablationcam", weighting="ablationcam"),
        citations.ABLATIONCAM,
        "the paper's formula",
        departs=f"{TOKENS} jacobgil/pytorch-grad-cam 1.5.7 departs further and is not offered: it sets a channel to "
        "its minimum less 1e7 times its place in the batch, so that weights depend on the batch size.",
        notes="One forward pass per channel, which is set to zero at every token. Divided by the score, whose sign so "
        "turns the map: a class of negative logit is explained upside down.",
    ),
    entry(
        FEATURES.replace(name="vit-reciprocam", weighting="reciprocam", relu="none"),
        citations.RECIPROCAM,
        "openvinotoolkit/openvino_xai 88f29ee, openvino_xai/methods/white_box/recipro_cam.py, ViTReciproCAM",
        departs="From the code: that scales each class' map to 0..255 and cuts off the fraction.",
        notes="One forward pass per cell: the last block sees the class token and a Gaussian neighbourhood of the "
        "cell.",
    ),
)
