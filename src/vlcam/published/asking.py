"""The model asked again, with something taken away."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import FEATURES, entry, pgc

__all__ = ["ENTRIES"]

ENTRIES = (
    entry(
        pgc("pgc-scorecam", "ScoreCAM", weighting="scorecam", departures="aligned_corners"),
        citations.SCORECAM,
        notes="One forward pass per channel. Masks are laid over the preprocessed image with corners aligned, though "
        "the final map is not. The paper's baseline cancels in the softmax, which large logits turn into a choice of "
        "one channel.",
    ),
    entry(
        FEATURES.replace(name="torchcam-scorecam", weighting="scorecam"),
        citations.SCORECAM,
        "frgfm/torch-cam 0.5.0, torchcam/methods/activation.py, ScoreCAM",
        notes="One forward pass per channel. Masks are scaled to 0..1 on the grid, then laid over with half-pixel "
        "centres.",
    ),
    entry(
        FEATURES.replace(name="ablationcam", weighting="ablationcam"),
        citations.ABLATIONCAM,
        "the paper's formula; jacobgil/pytorch-grad-cam 1.5.7 departs from it and cannot be reproduced: it sets a "
        "channel to its minimum less 1e7 times its place in the batch, so that weights depend on the batch size",
        notes="One forward pass per channel, which is set to zero at every token. Divided by the score, whose sign so "
        "turns the map: a class of negative logit is explained upside down.",
    ),
    entry(
        FEATURES.replace(name="vit-reciprocam", weighting="reciprocam", relu="none"),
        citations.RECIPROCAM,
        "openvinotoolkit/openvino_xai 88f29ee, methods/white_box/recipro_cam.py, ViTReciproCAM",
        notes="One forward pass per cell: the last block sees the class token and a Gaussian neighbourhood of the "
        "cell. The published code then scales each class' map to 0..255 and cuts off the fraction.",
    ),
)
