"""Self-attention, alone or with its gradient."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import ATTENTION, WEIGHTED, entry

__all__ = ["ENTRIES"]

ENTRIES = (
    entry(
        ATTENTION,
        citations.CHEFER_LRP,
        "hila-chefer/Transformer-Explainability c3e578f, baselines; jiaminchen-1031/transformerinterp a76854a, "
        "generate_attn",
        departs="Not the paper's method, but a baseline that it compares with.",
        notes="The class token's row of the last block. Where patches are pooled, its row says nothing of the answer; "
        "take queries='patches'.",
    ),
    entry(
        ATTENTION.replace(name="attention-rollout", layers="all", layer_rule="rollout"),
        citations.ROLLOUT,
        "samiraabnar/attention_flow 8044f53; hila-chefer/Transformer-Explainability c3e578f, generate_rollout",
        notes="Does not depend on a class. Evaluation scripts often leave out the first block: layers=(1, 2, ...).",
    ),
    entry(
        ATTENTION.replace(
            name="vitexplain-rollout", layers="all", layer_rule="rollout", heads="max", discard=0.9, normalize="max"
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_rollout.py, with each row divided by its own sum",
        departs="From the code: each row is divided by its own sum. As it runs it is vitexplain-rollout-as-coded.",
        notes="The command line's defaults: the heads' maximum, nine tenths of each matrix set to zero.",
    ),
    entry(
        ATTENTION.replace(
            name="vitexplain-rollout-as-coded",
            layers="all",
            layer_rule="rollout",
            heads="max",
            discard=0.9,
            departures="column_scaling",
            normalize="max",
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_rollout.py",
        departs="The sum loses its axis, so column j is divided by the sum of row j and rows do not sum to 1.",
        notes="The command line's defaults: the heads' maximum, nine tenths of each matrix set to zero.",
    ),
    entry(
        WEIGHTED.replace(
            name="vitexplain-grad-rollout",
            layers="all",
            layer_rule="rollout",
            relu="after_heads",
            discard=0.9,
            normalize="max",
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_grad_rollout.py, as its description says",
        departs="From the code, in four ways: vitexplain-grad-rollout-as-coded.",
        notes="As intended: attention times its own gradient in every block.",
    ),
    entry(
        WEIGHTED.replace(
            name="vitexplain-grad-rollout-as-coded",
            layers="all",
            layer_rule="rollout",
            relu="after_heads",
            discard=0.9,
            departures=("column_scaling", "mirrored_layers", "scores_gradient", "unprotected"),
            normalize="max",
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_grad_rollout.py, a fresh object per call",
        departs="Block l is weighted by the gradient of block L - 1 - l, taken before the softmax; columns are scaled; "
        "[CLS, CLS] may be discarded.",
        notes="Its maps have little in common with the intended ones.",
    ),
    entry(
        WEIGHTED.replace(name="attn-gradcam", weighting="head_weights", gradient_tokens="patches", relu="after_heads"),
        citations.CHEFER_LRP,
        "hila-chefer/Transformer-Explainability c3e578f, generate_cam_attn",
        departs="Not the paper's method, but a baseline that it compares with: Grad-CAM with heads for channels.",
        notes="Heads are weighted by the mean gradient of the class token's row over the patches; heads first, then "
        "ReLU.",
    ),
    entry(
        WEIGHTED.replace(name="attn-gradcam-full", weighting="head_weights", gradient_tokens="all", relu="after_heads"),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, lxmert/lxmert/src/ExplanationGenerator.py and "
        "DETR/modules/ExplanationGenerator.py",
        departs="Not the paper's method, but a baseline that it compares with: Grad-CAM with heads for channels.",
        notes="Heads are weighted by the mean gradient over the whole matrix, the class token's key included.",
    ),
    entry(
        WEIGHTED.replace(name="chefer-generic", layers="all", layer_rule="relevance"),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, Transformer_MM_explainability_ViT.ipynb",
        notes="ReLU first, then the mean over heads; no scaling of rows.",
    ),
    entry(
        WEIGHTED.replace(name="chefer-generic-heads-first", layers="all", layer_rule="relevance", relu="after_heads"),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_genattr",
        departs="Not the paper's method, but its re-implementation of chefer-generic, which has the mean over heads "
        "before the ReLU. The repository starts at the second block: layers=(1, 2, ...).",
        notes="Heads first, then ReLU; no scaling of rows.",
    ),
    entry(
        WEIGHTED.replace(
            name="agcam",
            layers="all",
            layer_rule="sum",
            gradient_path="direct",
            weighting="sigmoid*gradient",
            relu="gradient",
            heads="sum",
        ),
        citations.AGCAM,
        "LeemSaebom/Attention-Guided-CAM-Visual-Explanations-of-Vision-Transformer-Guided-by-Self-Attention 7202d31, "
        "Methods/AGCAM/AGCAM.py",
        notes="The published code patches the model to detach the input of attention; here the graph is cut for the "
        "one pass.",
    ),
    entry(
        WEIGHTED.replace(
            name="legrad",
            layers=(-2, -1),
            target="contrastive",
            scale="cosine",
            layer_rule="sum",
            gradient_path="block",
            queries="all",
            weighting="gradient",
            relu="gradient",
        ),
        citations.LEGRAD,
        "WalBouss/LeGrad a9edb03, legrad/wrapper.py; frgfm/torch-cam 0.5.0, LeGrad (mean over the layers given)",
        departs="The last two blocks are the code's default; the paper's abstract speaks of all layers: layers='all'.",
        notes="Each block is read at its own output, averaged over all tokens.",
    ),
    entry(
        WEIGHTED.replace(name="grad-sam", layers="all", layer_rule="mean", queries="all", relu="gradient"),
        citations.GRADSAM,
        "no official code; of the public re-implementations those that average over the queries",
        departs="The paper explains texts. Re-implementations disagree on the axis that its score of a token is summed "
        "over; this is one reading, grad-sam-queries the other.",
        notes="The key side: attention that a token receives.",
    ),
    entry(
        WEIGHTED.replace(
            name="grad-sam-queries", layers="all", layer_rule="mean", queries="all", map_axis="queries", relu="gradient"
        ),
        citations.GRADSAM,
        "no official code; of the public re-implementations those that sum over the keys",
        departs="The paper explains texts. Re-implementations disagree on the axis that its score of a token is summed "
        "over; this is one reading, grad-sam the other.",
        notes="The query side: attention that a token gives. With a class-token head the last block's patches give "
        "nothing to the answer.",
    ),
)
