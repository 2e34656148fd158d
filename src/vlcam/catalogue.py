"""Published recipes by name, each with its source and the depth of the model it was published on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vlcam import citations
from vlcam.choices import SCALES
from vlcam.errors import RecipeError, UnknownNameError, listing
from vlcam.recipe import Recipe

if TYPE_CHECKING:
    from vlcam.adapter import ModelAdapter
    from vlcam.targets import HeadKind

__all__ = ["Entry", "default", "named", "recipes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A named recipe and where it comes from.

    Attributes:
        recipe: the choices, as the source makes them.
        citation: authors, title, venue and year.
        code: the implementation that the formula was checked against, or that there is none.
        depth: number of blocks of the stream in the published model; 0 where `layers` is not an index.
        notes: what a reader should know before using it.
        reads: `patches`, if it needs a model whose heads read these; see `ModelAdapter.reads`.
    """

    recipe: Recipe
    citation: str
    code: str
    depth: int
    notes: str
    reads: str = ""

    def at_depth(self, depth: int) -> tuple[Recipe, str]:
        """Return the recipe for a stream of `depth` blocks, and a sentence that says how its layers were found.

        A published index b of n blocks stands for the same relative depth: floor(b (depth - 1) / (n - 1)).
        """
        if not self.depth or depth == self.depth or not isinstance(self.recipe.layers, tuple):
            return self.recipe, "as published"
        layers = tuple(dict.fromkeys(b * (depth - 1) // (self.depth - 1) for b in self.recipe.layers))
        rule = f"published on block {list(self.recipe.layers)} of {self.depth}; same relative depth of {depth} blocks"
        return self.recipe.replace(layers=layers), rule

    def fitted(self, depth: int, adapter: ModelAdapter) -> tuple[Recipe, dict[str, str]]:
        """Return the recipe for a model, and for every choice that depends on it a sentence: how it was found.

        Layers as in `at_depth`. A score that the model does not offer is replaced by its first one, on the scale of the
        same name if that has it. The class token is replaced by the patches in a model whose heads read those.

        Args:
            depth: number of blocks of the stream.
            adapter: the model.

        Raises:
            RecipeError: the recipe is for models whose heads read other tokens.
        """
        if self.reads and adapter.reads != self.reads:
            raise RecipeError(
                f"recipe {self.recipe.name!r} is for models whose heads read the {self.reads}; this one's read the "
                "class token, and patches have no gradient at that site; 'pgc-gradcam' reads one where they have"
            )
        recipe, layers = self.at_depth(depth)
        heads, rules = adapter.heads, {"layers": layers, "target": "as published", "tokens": "as published"}
        if recipe.target not in (*heads, "none"):
            head = next(iter(heads))
            plain = recipe.scale == "logit" and "logit" not in SCALES[head]
            scale = SCALES[head][0] if plain else recipe.scale
            rules["target"] = f"published for {recipe.target} ({recipe.scale}); this model offers {listing(heads)}"
            recipe = recipe.replace(target=head, scale=scale)
        by_class_token = [f for f in ("queries", "gradient_tokens") if getattr(recipe, f) == "cls"]
        if by_class_token and recipe.stream == "vision" and adapter.reads == "patches":
            rules["tokens"] = f"published for the class token; this model's heads read the patches: {by_class_token[0]}"
            recipe = recipe.replace(**dict.fromkeys(by_class_token, "patches"))
        return recipe, rules


def default(heads: Mapping[str, HeadKind]) -> str:
    """The recipe that is used where none is named: the published one of the model's kind."""
    return "lavis-itm" if "itm" in heads else "pgc-gradcam"


_FEATURES = Recipe(
    name="pgc-gradcam",
    site="F1",
    stream="vision",
    layers="last",
    target="class",
    scale="logit",
    gradient_path="full",
    gradient_tokens="patches",
    queries="none",
    map_axis="none",
    exclude=("cls",),
    weighting="gradcam",
    relu="map",
    heads="none",
    layer_rule="single",
    discard=0.0,
    departures=(),
    reshape="raster",
    upsample="bilinear",
    normalize="minmax",
)
_ATTENTION = _FEATURES.replace(
    name="raw-attention",
    site="F2",
    target="none",
    scale="none",
    gradient_path="none",
    gradient_tokens="none",
    queries="cls",
    map_axis="keys",
    weighting="attention",
    relu="none",
    heads="mean",
)
_WEIGHTED = _ATTENTION.replace(
    target="class", scale="logit", gradient_path="full", weighting="attention*gradient", relu="before_heads"
)
_LAVIS = _WEIGHTED.replace(
    name="lavis-itm",
    site="CROSS",
    stream="fusion",
    layers=(6,),
    target="itm",
    queries="all",
    exclude=("cls", "special_text", "padding"),
    relu="gradient",
)


def _pgc(name: str, module: str, **changes: Any) -> tuple[Recipe, str]:
    code = f"jacobgil/pytorch-grad-cam 084273b and 1.5.7, {module}, last block's first LayerNorm, class token dropped"
    return _FEATURES.replace(name=name, **changes), code


def _entry(made: Recipe | tuple[Recipe, str], citation: str, code: str = "", *, depth: int = 0, **facts: str) -> Entry:
    recipe, source = made if isinstance(made, tuple) else (made, code)
    return Entry(recipe=recipe, citation=citation, code=source, depth=depth, **facts)


_CROSS_ENTRIES = (
    _entry(
        _LAVIS,
        citations.BLIP,
        "salesforce/LAVIS 506965b, lavis/models/blip_models/blip_image_text_matching.py, compute_gradcam",
        depth=12,
        notes="Text-averaged map over the words, without [ENC] and [SEP]. In the last block only the first text "
        "token has a gradient, so words need an earlier one.",
    ),
    _entry(
        _LAVIS.replace(name="albef-itm", layers=(2,), exclude=("cls", "padding")),
        citations.ALBEF,
        "salesforce/ALBEF b9727e4, Grounding.py and visualization.ipynb",
        depth=6,
        notes="Mean over all text rows, special tokens included. ALBEF's 'layer 8' of 12 is the third of the six "
        "fusion blocks that have cross-attention, block 2 here. Its mean also counts padding, which only rescales.",
    ),
    _entry(
        _LAVIS.replace(
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
    _entry(
        _FEATURES.replace(
            name="context-gradcam", site="CONTEXT", stream="fusion", layers="all", layer_rule="shared", target="itm"
        ),
        citations.GRADCAM,
        "no published code for an encoder-decoder model; the context side is named in the taxonomy of Wall, "
        "Wang, Rizk, Santosh (2026)",
        notes="One map for the whole text: the image tokens carry no text rows. The gradient is the sum over every "
        "block that reads them; with one layer and layer_rule='single', over that block's reading alone.",
    ),
)
_FEATURE_ENTRIES = (
    _entry(
        _pgc("pgc-gradcam", "GradCAM"),
        citations.GRADCAM,
        notes="The peer rescales to 0..1 twice and always; tokens here stay raw.",
    ),
    _entry(
        _FEATURES.replace(name="pgc-swin", site="F4"),
        citations.GRADCAM,
        "jacobgil/pytorch-grad-cam 084273b and 1.5.7, usage_examples/swinT_example.py: last block's second LayerNorm",
        notes="The site of the peer's example for Swin. Its README and tutorial name the first LayerNorm, which is "
        "pgc-gradcam: two sites in one repository. Only where heads read the patches.",
        reads="patches",
    ),
    _entry(
        _pgc("pgc-gradcam++", "GradCAMPlusPlus", weighting="gradcam++"),
        citations.PLUS_PLUS,
        notes="Written for activations that are never negative. A LayerNorm's are signed, so the denominator can "
        "vanish or turn negative, and weights grow without bound.",
    ),
    _entry(
        _pgc("pgc-xgradcam", "XGradCAM", weighting="xgradcam"),
        citations.XGRADCAM,
        notes="Divides by the sum of a channel over the patches, which lies near zero for the outputs of a LayerNorm.",
    ),
    _entry(
        _pgc("pgc-hirescam", "HiResCAM", weighting="hirescam", gradient_tokens="none"),
        citations.HIRESCAM,
        notes="Gradient times activation at each token, nothing is averaged.",
    ),
    _entry(
        _pgc("pgc-layercam", "LayerCAM", weighting="layercam", gradient_tokens="none"),
        citations.LAYERCAM,
        notes="The activations of a LayerNorm are signed, so terms can be negative before the outer ReLU. torch-cam "
        "also takes tanh(2 M) before it fuses several layers; for one layer both agree.",
    ),
    _entry(
        _pgc("pgc-elementwise", "GradCAMElementWise", weighting="elementwise", gradient_tokens="none", relu="none"),
        citations.PGC,
        notes="The ReLU is inside the sum over channels.",
    ),
    _entry(
        _pgc(
            "pgc-eigencam",
            "EigenCAM",
            weighting="eigencam",
            gradient_tokens="none",
            target="none",
            scale="none",
            gradient_path="none",
        ),
        citations.EIGENCAM,
        notes="Takes no gradient: one map for every class. The sign of a principal component is arbitrary and the ReLU "
        "keeps one half of it; here the token of largest magnitude is positive, in the peer what the solver returns.",
    ),
    _entry(
        _pgc("pgc-eigengradcam", "EigenGradCAM", weighting="eigengradcam", gradient_tokens="none"),
        citations.EIGENCAM,
        notes="The first principal component of gradient times activation. Its sign as in pgc-eigencam.",
    ),
    _entry(
        _pgc("pgc-finercam", "FinerCAM with GradCAM", scale="finer"),
        citations.FINERCAM,
        notes="Contrast with the three classes whose logits are nearest; with fewer classes, with all of them. "
        "torch-cam takes their plain mean, times 0.6.",
    ),
    _entry(
        _FEATURES.replace(name="torchcam-gradcam++", weighting="gradcam++", departures="summed_cubes"),
        citations.PLUS_PLUS,
        "frgfm/torch-cam 0.5.0, torchcam/methods/gradient.py, GradCAMpp, with the denominator that it computes",
        notes="The denominator holds the sum of G^3 A, where the paper (and the class' own docstring) multiplies G^3 "
        "by the sum of A. The code computes it and then does not use it; that is torchcam-gradcam++-as-coded.",
    ),
    _entry(
        _FEATURES.replace(name="torchcam-gradcam++-as-coded", weighting="gradcam++", departures="no_denominator"),
        citations.PLUS_PLUS,
        "frgfm/torch-cam 0.5.0, torchcam/methods/gradient.py, GradCAMpp",
        notes="What the code computes: the division changes a temporary copy, so channel weights are the sum of "
        "ReLU(G) G^2.",
    ),
    _entry(
        _FEATURES.replace(name="gscorecam-gradcam", site="F6", gradient_tokens="cls"),
        citations.GSCORECAM,
        "anguyen8/gScoreCAM 87c35a1, pytorch_grad_cam/grad_cam.py with is_transformer",
        notes="Published for CLIP's similarity logit: the class token's gradient weights the channels of the last "
        "block's output, where patches have none.",
    ),
    _entry(
        _FEATURES.replace(name="gradeclip-gradcam-baseline", site="F6", layers=(-2,), gradient_tokens="all"),
        citations.GRADECLIP,
        "Cyang-Zhao/Grad-Eclip 5c1b5cc, generate_emap.py, grad_cam",
        notes="The input of the last block, gradients averaged over all tokens; the class token's dominates. Published "
        "for CLIP's cosine, and there on a last block that is run again with one head, which is another function; "
        "here the model is explained as it is.",
    ),
)
_ATTENTION_ENTRIES = (
    _entry(
        _ATTENTION,
        citations.CHEFER_LRP,
        "hila-chefer/Transformer-Explainability c3e578f, baselines; jiaminchen-1031/transformerinterp a76854a, "
        "generate_attn",
        notes="The class token's row of the last block. Where patches are pooled, its row says nothing of the answer; "
        "take queries='patches'.",
    ),
    _entry(
        _ATTENTION.replace(name="attention-rollout", layers="all", layer_rule="rollout"),
        citations.ROLLOUT,
        "samiraabnar/attention_flow 8044f53; hila-chefer/Transformer-Explainability c3e578f, generate_rollout",
        notes="Does not depend on a class. Evaluation scripts often leave out the first block: layers=(1, 2, ...).",
    ),
    _entry(
        _ATTENTION.replace(
            name="vitexplain-rollout", layers="all", layer_rule="rollout", heads="max", discard=0.9, normalize="max"
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_rollout.py, with each row divided by its own sum",
        notes="As intended. The command line's defaults: the heads' maximum, nine tenths of each matrix set to zero.",
    ),
    _entry(
        _ATTENTION.replace(
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
        notes="As coded: the sum loses its axis, so column j is divided by the sum of row j and rows do not sum to 1.",
    ),
    _entry(
        _WEIGHTED.replace(
            name="vitexplain-grad-rollout",
            layers="all",
            layer_rule="rollout",
            relu="after_heads",
            discard=0.9,
            normalize="max",
        ),
        citations.VIT_EXPLAIN,
        "jacobgil/vit-explain 15a81d3, vit_grad_rollout.py, as its description says",
        notes="As intended: attention times its own gradient in every block.",
    ),
    _entry(
        _WEIGHTED.replace(
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
        notes="As coded: block l is weighted by the gradient of block L - 1 - l, taken before the softmax; columns are "
        "scaled; [CLS, CLS] may be discarded. Its maps have little in common with the intended ones.",
    ),
    _entry(
        _WEIGHTED.replace(name="attn-gradcam", weighting="head_weights", gradient_tokens="patches", relu="after_heads"),
        citations.CHEFER_LRP,
        "hila-chefer/Transformer-Explainability c3e578f, generate_cam_attn",
        notes="Heads are weighted by the mean gradient of the class token's row over the patches; heads first, then "
        "ReLU.",
    ),
    _entry(
        _WEIGHTED.replace(
            name="attn-gradcam-full", weighting="head_weights", gradient_tokens="all", relu="after_heads"
        ),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, lxmert/lxmert/src/ExplanationGenerator.py and "
        "DETR/modules/ExplanationGenerator.py",
        notes="Heads are weighted by the mean gradient over the whole matrix, the class token's key included.",
    ),
    _entry(
        _WEIGHTED.replace(name="chefer-generic", layers="all", layer_rule="relevance"),
        citations.CHEFER,
        "hila-chefer/Transformer-MM-Explainability 58eaea8, Transformer_MM_explainability_ViT.ipynb",
        notes="ReLU first, then the mean over heads; no scaling of rows.",
    ),
    _entry(
        _WEIGHTED.replace(name="chefer-generic-heads-first", layers="all", layer_rule="relevance", relu="after_heads"),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_genattr",
        notes="A re-implementation of chefer-generic with the mean over heads before the ReLU. The repository starts "
        "at the second block, layers=(1, 2, ...).",
    ),
    _entry(
        _WEIGHTED.replace(
            name="agcam",
            layers="all",
            layer_rule="sum",
            gradient_path="direct",
            weighting="sigmoid*gradient",
            relu="gradient",
            heads="sum",
        ),
        citations.AGCAM,
        "LeemSaebom/Attention-Guided-CAM 7202d31, Methods/AGCAM/AGCAM.py",
        notes="The published code patches the model to detach the input of attention; here the graph is cut for the "
        "one pass.",
    ),
    _entry(
        _WEIGHTED.replace(
            name="legrad",
            layers=(-2, -1),
            layer_rule="sum",
            gradient_path="block",
            queries="all",
            weighting="gradient",
            relu="gradient",
        ),
        citations.LEGRAD,
        "WalBouss/LeGrad a9edb03, legrad/wrapper.py; frgfm/torch-cam 0.5.0, LeGrad (mean over the layers given)",
        notes="Each block is read at its own output, averaged over all tokens. The last two blocks are the code's "
        "default; the paper's abstract speaks of all layers: layers='all'.",
    ),
    _entry(
        _WEIGHTED.replace(name="grad-sam", layers="all", layer_rule="mean", queries="all", relu="gradient"),
        citations.GRADSAM,
        "no official code; of the public re-implementations those that average over the queries",
        notes="The key side: attention that a token receives. The other reading is grad-sam-queries.",
    ),
    _entry(
        _WEIGHTED.replace(
            name="grad-sam-queries", layers="all", layer_rule="mean", queries="all", map_axis="queries", relu="gradient"
        ),
        citations.GRADSAM,
        "no official code; of the public re-implementations those that sum over the keys",
        notes="The query side: attention that a token gives. With a class-token head the last block's patches give "
        "nothing to the answer.",
    ),
)
_ASKING_ENTRIES = (
    _entry(
        _pgc("pgc-scorecam", "ScoreCAM", weighting="scorecam", departures="aligned_corners"),
        citations.SCORECAM,
        notes="One forward pass per channel. Masks are laid over the preprocessed image with corners aligned, though "
        "the final map is not. The paper's baseline cancels in the softmax, which large logits turn into a choice of "
        "one channel.",
    ),
    _entry(
        _FEATURES.replace(name="torchcam-scorecam", weighting="scorecam"),
        citations.SCORECAM,
        "frgfm/torch-cam 0.5.0, torchcam/methods/activation.py, ScoreCAM",
        notes="One forward pass per channel. Masks are scaled to 0..1 on the grid, then laid over with half-pixel "
        "centres.",
    ),
    _entry(
        _FEATURES.replace(name="ablationcam", weighting="ablationcam"),
        citations.ABLATIONCAM,
        "the paper's formula; jacobgil/pytorch-grad-cam 1.5.7 departs from it and cannot be reproduced: it sets a "
        "channel to its minimum less 1e7 times its place in the batch, so that weights depend on the batch size",
        notes="One forward pass per channel, which is set to zero at every token. Divided by the score, whose sign so "
        "turns the map: a class of negative logit is explained upside down.",
    ),
    _entry(
        _FEATURES.replace(name="vit-reciprocam", weighting="reciprocam", relu="none"),
        citations.RECIPROCAM,
        "openvinotoolkit/openvino_xai 88f29ee, methods/white_box/recipro_cam.py, ViTReciproCAM",
        notes="One forward pass per cell: the last block sees the class token and a Gaussian neighbourhood of the "
        "cell. The published code then scales each class' map to 0..255 and cuts off the fraction.",
    ),
)
_PATH_ENTRIES = (
    _entry(
        _WEIGHTED.replace(
            name="tam-transition",
            layers="all",
            layer_rule="transition",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.TRANSITION,
        "XianrenYty/Transition_Attention_Maps 8329327, generate_transition_attention_maps",
        notes="Twenty backward passes. The authors' scripts start at block 4 of 12: layers=(4, ..., 11).",
    ),
    _entry(
        _WEIGHTED.replace(
            name="beyond-intuition-headwise",
            layers="all",
            layer_rule="headwise",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_ours",
        notes="Twenty backward passes. The authors' scripts start at their block 4, counted from 1: layers=(3, ..., "
        "11). Heads are weighted by the gradient at the image itself.",
    ),
    _entry(
        _WEIGHTED.replace(
            name="beyond-intuition-tokenwise",
            layers="all",
            layer_rule="tokenwise",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_ours_c",
        notes="Twenty backward passes. The authors' scripts start at their block 7, counted from 1: layers=(6, ..., "
        "11). The values are read inside fused attention; a model with explicit attention does not show them.",
    ),
)
_ENTRIES = (*_CROSS_ENTRIES, *_FEATURE_ENTRIES, *_ATTENTION_ENTRIES, *_ASKING_ENTRIES, *_PATH_ENTRIES)


def recipes() -> Mapping[str, Entry]:
    """Every named recipe with its source, in catalogue order."""
    return MappingProxyType({entry.recipe.name: entry for entry in _ENTRIES})


def named(name: str) -> Entry:
    """Return the catalogue entry of that name.

    Raises:
        UnknownNameError: no such recipe; lists those that exist.
    """
    try:
        return recipes()[name]
    except KeyError:
        raise UnknownNameError(f"no recipe {name!r}; there are {listing(recipes())}") from None
