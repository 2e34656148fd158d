"""Scores of two towers, image and text: maps over the image, and over the words."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import FEATURES, LAVIS, TOKENS, WEIGHTED, entry

__all__ = ["ENTRIES"]

_GRADECLIP = FEATURES.replace(
    name="grad-eclip",
    site="F3_HEADS",
    target="contrastive",
    scale="cosine",
    gradient_tokens="cls",
    weighting="value*gradient*similarity",
)
_OF_TEXT = {"stream": "text", "exclude": ("special_text", "padding"), "normalize": "sum"}
_CHEFER = WEIGHTED.replace(name="chefer-clip", target="contrastive", layer_rule="relevance")
_LEGRAD = LAVIS.replace(
    name="legrad-pooler",
    stream="pooler",
    layers=(-2, -1),
    target="contrastive",
    scale="cosine",
    gradient_path="block",
    queries=(0,),
    exclude=("cls",),
    weighting="gradient",
    layer_rule="sum",
)
_MASKCLIP = FEATURES.replace(
    name="maskclip",
    site="F6",
    attention="identity",
    target="contrastive",
    scale="cosine",
    weighting="similarity",
    relu="none",
)

ENTRIES = (
    entry(
        FEATURES.replace(name="clip-gradcam", target="contrastive"),
        citations.GRADCAM,
        "jacobgil/pytorch-grad-cam 1.5.7, GradCAM on the vision tower's last block's first LayerNorm, with the scaled "
        "cosine of image and text as the score",
        departs=f"{TOKENS} The similarity with a text stands for the score of a class.",
        notes="The scaled logit and the cosine give the same map. Patches have no gradient behind the last block's "
        "attention, where only the class token is read; before its first LayerNorm they have.",
        needs="contrastive",
    ),
    entry(
        FEATURES.replace(name="pgc-clip-softmax", target="contrastive", scale="probability"),
        citations.PGC,
        "jacobgil/pytorch-grad-cam 084273b, usage_examples/clip_example.py",
        departs="There is no paper. The example feeds pixels scaled by mean and deviation 0.5, not by CLIP's: load the "
        "model with image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5) for that.",
        notes="The softmax over the given prompts: the map depends on which others are given and on the temperature, "
        "and vanishes where the model is sure.",
        needs="contrastive",
    ),
    entry(
        FEATURES.replace(name="clip-es", target="contrastive_patches", scale="probability"),
        citations.CLIP_ES,
        "linyq2117/CLIP-ES 3893f81, generate_cams_voc12.py, before the affinity step",
        departs="The refinement by the affinity of attention, which the paper's maps go through, is not part of it.",
        notes="What is differentiated is not CLIP's score: the mean of the patches stands in place of the class token. "
        "Softmax over the labels of the image and a fixed list of backgrounds, which belong in the texts or in "
        "against.",
        needs="contrastive_patches",
    ),
    entry(
        WEIGHTED.replace(name="albef-itc", layers=(8,), target="contrastive", relu="gradient"),
        citations.ALBEF,
        "salesforce/ALBEF b9727e4, Grounding.py with gradcam_mode itc",
        depth=12,
        notes="Self-attention of the image encoder in place of cross-attention. At the last block the same as "
        "chefer-clip.",
        needs="contrastive",
    ),
    entry(
        _CHEFER,
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, CLIP_explainability.ipynb; Cyang-Zhao/Grad-Eclip 5c1b5cc, "
        "mm_interpret",
        departs="The paper's rule takes up every block; the notebook for CLIP takes the last one alone by default. "
        "With all blocks, as gScoreCAM's hilacam does, it is chefer-generic.",
        notes="With one block the relevance of the patches is that block's weighted attention: albef-itc at that "
        "block.",
        needs="contrastive",
    ),
    entry(
        _CHEFER.replace(name="chefer-clip-text", queries="pooled", **_OF_TEXT),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, CLIP_explainability.ipynb, show_heatmap_on_text",
        departs="The last block alone, as in the notebook; the paper's rule takes up every block: layers='all'.",
        notes="The row of the pooled token over the words, divided by its sum; start and end are left out.",
    ),
    entry(
        _GRADECLIP,
        citations.GRADECLIP,
        "the paper's formula on the model as it is, with its own heads; Cyang-Zhao/Grad-Eclip 5c1b5cc, "
        "grad_eclip_image.ipynb",
        departs="From the code: the last block keeps its own heads, where the code runs it again with one. That is "
        "another function: grad-eclip-as-coded.",
        notes="Queries and keys as they are, as in the notebook; the script compares them behind the output "
        "projection.",
    ),
    entry(
        _GRADECLIP.replace(name="grad-eclip-as-coded", attention="one_head"),
        citations.GRADECLIP,
        "Cyang-Zhao/Grad-Eclip 5c1b5cc, grad_eclip_image.ipynb, last block",
        departs="The last block runs with one head of full width, so that the score that is explained is not the "
        "model's.",
        notes="The notebooks for BLIP and for transformers' ViT leave scores on the scale of the model's own heads: "
        "departures='head_scale'.",
    ),
    entry(
        _GRADECLIP.replace(name="grad-eclip-text", gradient_tokens="pooled", **_OF_TEXT),
        citations.GRADECLIP,
        "the paper's formula on the model as it is; Cyang-Zhao/Grad-Eclip 5c1b5cc, grad_eclip_text.ipynb",
        departs="From the code: the last block keeps its own heads, and key similarity is scaled over the tokens of "
        "the text, in the code over padding too.",
        notes="The gradient is that of the token that the text tower reads.",
    ),
    entry(
        _GRADECLIP.replace(
            name="grad-eclip-text-as-coded",
            attention="one_head",
            gradient_tokens="pooled",
            **_OF_TEXT,
        ),
        citations.GRADECLIP,
        "Cyang-Zhao/Grad-Eclip 5c1b5cc, grad_eclip_text.ipynb, last block",
        departs="One head of full width in the last block, so that the score that is explained is not the model's. The "
        "code also scales key similarity over the padded context: departures='padded_similarity', for models that pad "
        "to it.",
        notes="The gradient is that of the token that the text tower reads.",
    ),
    entry(
        _LEGRAD,
        citations.LEGRAD,
        "WalBouss/LeGrad a9edb03, legrad/wrapper.py, for models that pool by attention, with their final norm",
        departs="From the code: each block is read as the model reads its last one, with the final norm, which the "
        "code skips. The last two blocks are the code's default; the paper's abstract speaks of all layers.",
        notes="The pooler reads the output of each block, and its attention is differentiated. Only where image tokens "
        "are pooled by attention: SigLIP, CoCa.",
    ),
    entry(
        _LEGRAD.replace(name="legrad-pooler-as-coded", departures="bare_pooler"),
        citations.LEGRAD,
        "WalBouss/LeGrad a9edb03, legrad/wrapper.py, compute_legrad_coca and compute_legrad_siglip",
        departs="Blocks are read without the final norm, and for CoCa without scaling to unit length, so that even the "
        "last block's score is not the model's. The threshold by an empty text that the code has for SigLIP is not "
        "part of it.",
        notes="Only where image tokens are pooled by attention: SigLIP, CoCa.",
    ),
    entry(
        _MASKCLIP,
        citations.MASKCLIP,
        "chongzhou96/MaskCLIP 245d31f, mmseg/models/backbones/vit.py and decode_heads/maskclip_head.py",
        departs="Key smoothing and prompt denoising are off, as in the code's default.",
        notes="Takes no gradient: the cosine of every token with the text, where the last block hands each token its "
        "own value; residual and FFN stay.",
    ),
    entry(
        _MASKCLIP.replace(
            name="clip-surgery",
            site="F3",
            layers=(-6, -5, -4, -3, -2, -1),
            attention="values",
            weighting="surgery",
            layer_rule="sum",
        ),
        citations.CLIP_SURGERY,
        "xmed-lab/CLIP_Surgery d4696d4, clip/clip_surgery_model.py and clip.py, clip_feature_surgery",
        departs="The ensemble of prompts is left to the caller.",
        notes="Takes no gradient, and at least two texts. With weighting='similarity', scale='difference' and "
        "against=[''] it is the variant with a redundant text.",
    ),
    entry(
        LAVIS.replace(
            name="coca-caption",
            layers="last",
            target="caption",
            compose="pooler",
        ),
        citations.COCA,
        "no published code: the rule of lavis-itm on the decoder's cross-attention, carried on to the patches",
        notes="The decoder looks at slots of an attention pooler, and each slot at the patches: a word's map is the "
        "product of both. A word is told by the row of the token before it.",
        needs="caption",
    ),
)
