"""Cross-attention of text on the image, and the image tokens behind it."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import FEATURES, LAVIS, entry

__all__ = ["ENTRIES"]

_BLIP2 = LAVIS.replace(name="blip2-itm", stream="pooler", layers="last", exclude=("cls",))
_BIMODAL = LAVIS.replace(
    name="chefer-bimodal-words", layers="all", compose="vision", relu="before_heads", layer_rule="relevance"
)

ENTRIES = (
    entry(
        LAVIS,
        citations.BLIP,
        "salesforce/LAVIS 506965b, lavis/models/blip_models/blip_image_text_matching.py, compute_gradcam",
        depth=12,
        notes="Text-averaged map over the words, without [ENC] and [SEP]. In the last block only the first text "
        "token has a gradient, so words need an earlier one.",
    ),
    entry(
        LAVIS.replace(name="albef-itm", layers=(2,), exclude=("cls", "padding")),
        citations.ALBEF,
        "salesforce/ALBEF b9727e4, Grounding.py and visualization.ipynb",
        depth=6,
        departs="The code's mean over the text rows counts padding too, which only rescales the map.",
        notes="Mean over all text rows, special tokens included. ALBEF's 'layer 8' of 12 is the third of the six "
        "fusion blocks that have cross-attention, block 2 here.",
    ),
    entry(
        LAVIS.replace(name="pnp-vqa", layers=(7,)),
        citations.PNP_VQA,
        "salesforce/LAVIS 506965b, lavis/models/pnp_vqa_models/pnp_vqa.py and img2prompt_models, with block_num=7",
        depth=12,
        departs="The paper's formula takes the minimum of the gradient and zero, the code its maximum. This is the "
        "code; the formula is pnp-vqa-as-written.",
        notes="As lavis-itm, one block later, for questions without their mark. The raw map is what patches are drawn "
        "by.",
    ),
    entry(
        LAVIS.replace(name="pnp-vqa-as-written", layers=(7,), relu="negative_gradient"),
        citations.PNP_VQA,
        "the paper's formula, as quoted in salesforce/LAVIS issue 789",
        depth=12,
        departs="None from the formula. The code keeps what is positive in the gradient: pnp-vqa.",
        notes="The minimum of the gradient and zero: what speaks against a match, with its sign.",
    ),
    entry(
        LAVIS.replace(name="omnixai-itm", exclude=("cls", "padding")),
        citations.OMNIXAI,
        "salesforce/OmniXAI 33dd5ea, omnixai/explainers/vision_language/specific/gradcam/pytorch/gradcam.py",
        depth=12,
        notes="As lavis-itm, with the mean over all text rows, special tokens included.",
    ),
    entry(
        _BLIP2,
        citations.BLIP2,
        "no published code; asked for in salesforce/LAVIS issue 549, where rows of queries are taken for words",
        notes="The rows are the Q-Former's learned queries, and their mean is the map: no word of BLIP-2 looks at the "
        "image. Every second block has cross-attention; the last of those is taken.",
        needs="itm",
    ),
    entry(
        _BLIP2.replace(name="blip2-itc", target="contrastive", scale="cosine"),
        citations.BLIP2,
        "no published code",
        notes="The cosine is that of the query that fits the text best, so that behind its last block only that one "
        "has a gradient.",
        needs="contrastive",
    ),
    entry(
        LAVIS.replace(
            name="attention-cross",
            weighting="attention",
            target="none",
            scale="none",
            gradient_path="none",
            relu="none",
        ),
        citations.BLIP,
        "no published code: the probabilities of lavis-itm without their gradient",
        depth=12,
        notes="Does not depend on the score: the same map for 'match' and for 'no match'.",
    ),
    entry(
        FEATURES.replace(
            name="context-gradcam", site="CONTEXT", stream="fusion", layers="all", layer_rule="shared", target="itm"
        ),
        citations.GRADCAM,
        "no published code for an encoder-decoder model; the context side is named in the taxonomy of "
        f"{citations.TAXONOMY.families} ({citations.TAXONOMY.year})",
        departs="The paper weights the feature maps of a CNN. Here the image tokens that cross-attention reads stand "
        "for their pixels, the class token is left out, and the score of a match stands for that of a class.",
        notes="One map for the whole text: the image tokens carry no text rows. The gradient is the sum over every "
        "block that reads them; with one layer and layer_rule='single', over that block's reading alone.",
    ),
    entry(
        LAVIS.replace(name="blip-caption", layers="last", target="caption"),
        citations.BLIP,
        "no published code: the rule of lavis-itm on the decoder's cross-attention",
        notes="A word is told by the row of the token before it. In the last block that row has a gradient from this "
        "word alone; in earlier ones from every word behind it, too.",
        needs="caption",
    ),
    entry(
        LAVIS.replace(name="blip-vqa", target="answer"),
        citations.BLIP,
        "no published code for an answer: the rule of lavis-itm on the cross-attention of the question's encoder",
        depth=12,
        notes="Words are those of the question. The decoder that writes the answer looks at the question, and at no "
        "image token; every row of the last block of the encoder has a gradient.",
        needs="answer",
    ),
    entry(
        _BIMODAL.replace(name="chefer-bimodal", queries="cls", exclude=("cls", "padding")),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, DETR/modules/ExplanationGenerator.py and "
        "lxmert/lxmert/src/ExplanationGenerator.py, generate_ours with use_lrp=False",
        notes="The row of the token that the matching head reads. In BLIP and ALBEF text looks at the image, and the "
        "image never at text: the rules for two modalities come down to those for an encoder and a decoder, "
        "self-attention of the text before its cross-attention, as in the code for DETR. With compose='none' image "
        "tokens stand for themselves.",
        needs="itm",
    ),
    entry(
        _BIMODAL,
        citations.CHEFER,
        "no published code for words: chefer-bimodal with the mean over their rows",
        departs="The paper reads the row that is scored; here it is the mean over the rows of the words.",
        notes="Words have a map where rows of the last block alone have none: what a word gave to other rows by "
        "self-attention shares in what those saw. Of a decoder, a word is told by the row of the token before it, and "
        "the score is the likelihood of the whole text, or of the phrase.",
    ),
)
