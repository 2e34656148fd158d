"""Token features whose channels are weighted by gradients."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import FEATURES, TOKENS, entry, pgc

__all__ = ["ENTRIES"]

_GRADECLIP = FEATURES.replace(
    name="gradeclip-gradcam-baseline",
    site="F6",
    layers=(-2,),
    target="contrastive",
    scale="cosine",
    gradient_tokens="all",
)

ENTRIES = (
    entry(
        pgc("pgc-gradcam", "GradCAM"),
        citations.GRADCAM,
        departs=TOKENS,
        notes="The peer rescales to 0..1 twice and always; tokens here stay raw.",
    ),
    entry(
        FEATURES.replace(name="pgc-swin", site="F4"),
        citations.GRADCAM,
        "jacobgil/pytorch-grad-cam 084273b and 1.5.7, usage_examples/swinT_example.py: last block's second LayerNorm",
        departs="The paper weights the feature maps of a CNN. Here the tokens of a LayerNorm's output stand for their "
        "pixels. The peer's README and tutorial name the first LayerNorm, which is pgc-gradcam: two sites in one "
        "repository.",
        notes="The site of the peer's example for Swin. Only where heads read the patches.",
        reads="patches",
    ),
    entry(
        pgc("pgc-gradcam++", "GradCAMPlusPlus", weighting="gradcam++"),
        citations.PLUS_PLUS,
        departs=f"{TOKENS} The formula is for activations that are never negative; a LayerNorm's are signed.",
        notes="The denominator can vanish or turn negative, and weights grow without bound.",
    ),
    entry(
        pgc("pgc-xgradcam", "XGradCAM", weighting="xgradcam"),
        citations.XGRADCAM,
        departs=TOKENS,
        notes="Divides by the sum of a channel over the patches, which lies near zero for the outputs of a LayerNorm.",
    ),
    entry(
        pgc("pgc-hirescam", "HiResCAM", weighting="hirescam", gradient_tokens="none"),
        citations.HIRESCAM,
        departs=TOKENS,
        notes="Gradient times activation at each token, nothing is averaged.",
    ),
    entry(
        pgc("pgc-layercam", "LayerCAM", weighting="layercam", gradient_tokens="none"),
        citations.LAYERCAM,
        departs=f"{TOKENS} The paper fuses the maps of several layers, each behind tanh(2 M), as torch-cam does; here "
        "one block is read.",
        notes="The activations of a LayerNorm are signed, so terms can be negative before the outer ReLU.",
    ),
    entry(
        pgc("pgc-elementwise", "GradCAMElementWise", weighting="elementwise", gradient_tokens="none", relu="none"),
        citations.PGC,
        notes="The ReLU is inside the sum over channels.",
    ),
    entry(
        pgc(
            "pgc-eigencam",
            "EigenCAM",
            weighting="eigencam",
            gradient_tokens="none",
            target="none",
            scale="none",
            gradient_path="none",
        ),
        citations.EIGENCAM,
        departs=f"{TOKENS} From the peer: the token of largest magnitude is positive, there the sign is what the "
        "solver returns.",
        notes="Takes no gradient: one map for every class. The sign of a principal component is arbitrary, and the "
        "ReLU keeps one half of it.",
    ),
    entry(
        pgc("pgc-eigengradcam", "EigenGradCAM", weighting="eigengradcam", gradient_tokens="none"),
        citations.EIGENCAM,
        departs=f"{TOKENS} The paper takes no gradient; the product with it is the peer's own variant. The sign as in "
        "pgc-eigencam.",
        notes="The first principal component of gradient times activation.",
    ),
    entry(
        pgc("pgc-finercam", "FinerCAM with GradCAM", scale="finer"),
        citations.FINERCAM,
        departs=f"{TOKENS} The nearest classes are weighted by their probabilities, as in the peer; torch-cam takes "
        "their plain mean, times 0.6.",
        notes="Contrast with the three classes whose logits are nearest; with fewer classes, with all of them.",
    ),
    entry(
        FEATURES.replace(name="torchcam-gradcam++", weighting="gradcam++", departures="summed_cubes"),
        citations.PLUS_PLUS,
        "frgfm/torch-cam 0.5.0, torchcam/methods/gradient.py, GradCAMpp, with the denominator that it computes",
        departs=f"{TOKENS} The denominator holds the sum of G^3 A, where the paper (and the class' own docstring) "
        "multiplies G^3 by the sum of A. The code computes it and then does not use it: torchcam-gradcam++-as-coded.",
        notes="The paper's denominator is that of pgc-gradcam++.",
    ),
    entry(
        FEATURES.replace(name="torchcam-gradcam++-as-coded", weighting="gradcam++", departures="no_denominator"),
        citations.PLUS_PLUS,
        "frgfm/torch-cam 0.5.0, torchcam/methods/gradient.py, GradCAMpp",
        departs=f"{TOKENS} The division changes a temporary copy, so channel weights are the sum of ReLU(G) G^2.",
        notes="What the code computes.",
    ),
    entry(
        FEATURES.replace(name="gscorecam-gradcam", site="F6", target="contrastive", gradient_tokens="cls"),
        citations.GSCORECAM,
        "anguyen8/gScoreCAM 87c35a1, pytorch_grad_cam/grad_cam.py with is_transformer",
        departs="Not the paper's method, which asks the model with masked images, but the Grad-CAM that its repository "
        "sets beside it. Grad-CAM averages the gradient over the cells of the map; here it is the class token's alone.",
        notes="The class token's gradient weights the channels of the last block's output, where patches have none.",
    ),
    entry(
        _GRADECLIP,
        citations.GRADECLIP,
        "Cyang-Zhao/Grad-Eclip 5c1b5cc, generate_emap.py, grad_cam, on the model as it is",
        departs="Not the paper's method, but the Grad-CAM that it compares with. From the code: the last block keeps "
        "its own heads, where the code runs it again with one, which is another function: "
        "gradeclip-gradcam-baseline-as-coded.",
        notes="The input of the last block, gradients averaged over all tokens; the class token's dominates.",
    ),
    entry(
        _GRADECLIP.replace(name="gradeclip-gradcam-baseline-as-coded", attention="one_head"),
        citations.GRADECLIP,
        "Cyang-Zhao/Grad-Eclip 5c1b5cc, generate_emap.py, grad_cam",
        departs="Not the paper's method, but the Grad-CAM that it compares with. The last block runs with one head of "
        "full width, so that the score that is explained is not the model's.",
        notes="The input of the last block, gradients averaged over all tokens.",
    ),
)
