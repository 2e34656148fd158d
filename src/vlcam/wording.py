"""A recipe in words: one line, a paragraph per checklist group, and the formula it stands for."""

from __future__ import annotations

from vlcam.choices import ATTENTION_SITES, CARRIED, CONTRASTIVE, FLOWS, takes_target
from vlcam.recipe import Recipe

__all__ = ["describe", "formula", "question", "scored", "summary", "tensor"]

_SITES = {
    "F1": "output of the LayerNorm before attention",
    "F2": "self-attention probabilities",
    "F3": "attention output after the output projection",
    "F3_HEADS": "attention output before the output projection",
    "F4": "output of the LayerNorm before the FFN",
    "F5": "FFN output before the residual sum",
    "F6": "block output",
    "CROSS": "cross-attention probabilities, text on image",
    "CONTEXT": "image tokens that feed the keys and values of cross-attention",
}


def _contrastive(target: str, image: str, embedding: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The scales of a similarity with texts; s and b are the model's scale and bias, t its text embeddings."""
    logit = "z[t] = s cos(v, t) + b"
    words = {
        "cosine": (f"the cosine of {image} and text", "y = cos(v, own text)"),
        "logit": (f"the scaled similarity of {image} and text", f"{logit}, y = z[own]"),
        "probability": (
            f"the probability of the text for the {image}",
            f"{logit}, y = softmax over texts of z at own; sigmoid(z[own]) where the model was trained so",
        ),
        "log-probability": (
            f"the log-probability of the text for the {image}",
            f"{logit}, y = log softmax over texts of z at own; log sigmoid(z[own]) where the model was trained so",
        ),
        "margin": ("the margin to the runner-up text", f"{logit}, y = z[own] - max over other t of z[t]"),
        "difference": ("the cosine less that of the other texts", "y = cos(v, own) - mean over other t of cos(v, t)"),
        "finer": (
            "the contrast with the three nearest texts",
            f"{logit}, y = sum over r of p[r] (z[own] - z[r]) / (sum over r of p[r] + 1e-9), p = softmax(z), r the 3 "
            "texts with the nearest logits",
        ),
    }
    return {(target, scale): (what, f"{embedding}; {how}") for scale, (what, how) in words.items()}


_TARGETS = {
    ("class", "logit"): ("the class logit", "y = z[class]"),
    ("class", "probability"): ("the class probability", "y = softmax(z)[class]"),
    ("class", "log-probability"): ("the class log-probability", "y = log softmax(z)[class]"),
    ("class", "margin"): ("the margin to the runner-up class", "y = z[class] - max over other k of z[k]"),
    ("class", "finer"): (
        "the contrast with the three nearest classes",
        "y = sum over r of p[r] (z[class] - z[r]) / (sum over r of p[r] + 1e-9), p = softmax(z), r the 3 classes with "
        "the nearest logits",
    ),
    ("segmentation", "logit"): (
        "the class logit summed over a region",
        "y = sum over pixels p of the region of z[class,p]",
    ),
    ("segmentation", "probability"): (
        "the class probability summed over a region",
        "y = sum over pixels p of the region of softmax(z[.,p])[class]",
    ),
    ("segmentation", "log-probability"): (
        "the class log-probability summed over a region",
        "y = sum over pixels p of the region of log softmax(z[.,p])[class]",
    ),
    ("itm", "logit"): ("the image-text matching logit of 'match'", "y = itm_logit[match]"),
    ("itm", "probability"): ("the image-text matching probability of 'match'", "y = softmax(itm_logit)[match]"),
    ("itm", "log-probability"): ("the log-probability of 'match'", "y = log softmax(itm_logit)[match]"),
    ("itm", "margin"): (
        "the margin between the 'match' and the 'no match' logit",
        "y = itm_logit[match] - itm_logit[no match]",
    ),
    **_contrastive("contrastive", "image", "v = image embedding"),
    **_contrastive(
        "contrastive_patches",
        "mean of the patches",
        "v = projection(mean over patches of norm(F6 of the last block))",
    ),
    ("caption", "log-probability"): (
        "the log-likelihood of the caption",
        "y = sum over tokens k of log p(token k | tokens before k, image)",
    ),
    ("answer", "log-probability"): (
        "the log-likelihood of the answer",
        "y = sum over tokens k of the answer of log p(token k | tokens before k, question, image)",
    ),
    ("custom", "raw"): ("a scalar given as a callable", "y = given callable"),
    ("none", "none"): ("no score", ""),
}
_FORMS = {
    "one_head": ", from there on with one head",
    "identity": ", which hands every token its own value",
    "values": ", of a second path of values with values",
}
_PATHS = {
    "full": "G = dy/dA",
    "direct": "G = dy/dA through residual connections and FFNs only (the input of attention is detached)",
    "integrated": "G = mean over a in 0, 1/19, ..., 1 of dy/dA at the image times a",
    "block": "G_l = dy_l/dA_l, y_l read from block l: z_l = head(norm(mean over all tokens of F6_l)), or "
    "head(pooler(norm(F6_l))) in a model that pools by attention",
}
_FIELDS = {
    "site": "which tensor",
    "stream": "of which stack of blocks",
    "layers": "of which blocks",
    "attention": "how attention is computed",
    "target": "whose gradient",
    "scale": "on which scale",
    "prompt": "which text is encoded",
    "gradient_path": "along which paths of the model",
    "gradient_tokens": "tokens whose gradient is pooled",
    "queries": "query rows that are averaged",
    "map_axis": "which axis of attention becomes the map",
    "compose": "what columns are carried on through",
    "exclude": "what takes no part",
    "weighting": "how activation and gradient are combined",
    "relu": "where negatives are removed",
    "heads": "how heads are merged",
    "layer_rule": "how layers are merged",
    "discard": "share of smallest entries set to zero",
    "departures": "where code departs from the formula",
    "reshape": "how tokens become a grid",
    "upsample": "interpolation to pixels",
    "normalize": "scaling of the map",
}
_HOW = {
    "gradcam": "channels weighted by the mean gradient",
    "gradcam++": "channels weighted as in Grad-CAM++",
    "xgradcam": "channels weighted as in XGrad-CAM",
    "layercam": "activation x ReLU of the gradient, summed over channels",
    "hirescam": "activation x gradient, summed over channels",
    "elementwise": "ReLU of activation x gradient, summed over channels",
    "eigencam": "first principal component of the activation",
    "eigengradcam": "first principal component of activation x gradient",
    "scorecam": "channels weighted by the softmax of the scores of masked images",
    "ablationcam": "channels weighted by the relative drop of the score without them",
    "reciprocam": "score when only a neighbourhood of each token is left",
    "value*gradient": "values weighted by the gradient of what the heads make of them",
    "value*gradient*similarity": "values weighted by the gradient of what the heads make of them and by key similarity",
    "similarity": "cosine of each token's embedding with the text",
    "surgery": "cosine of each token's embedding with the text, less what all texts have in common",
    "none": "mean over channels",
    "attention*gradient": "attention x gradient",
    "sigmoid*gradient": "sigmoid of the scores x gradient",
    "head_weights": "heads weighted by the mean gradient",
}


def tensor(recipe: Recipe) -> str:
    """The tensor that is read, in words."""
    rows = "learned queries on image" if recipe.stream == "pooler" else "text on image"
    return _SITES[recipe.site].replace("text on image", rows)


def scored(recipe: Recipe) -> str:
    """The scalar that is explained, in words."""
    return _TARGETS[recipe.target, recipe.scale][0]


def question(field: str) -> str:
    """What a field of a recipe decides, in a few words."""
    return _FIELDS[field]


def summary(recipe: Recipe) -> str:
    """One line that names every choice that shapes the token map."""
    where = f"{recipe.site} of {recipe.stream} {_layers(recipe)}"
    where += {"own": "", **_FORMS}[recipe.attention]
    return "; ".join([where, *_target_parts(recipe), *_merge_parts(recipe), f"without {', '.join(recipe.exclude)}"])


def _target_parts(recipe: Recipe) -> list[str]:
    parts = [_HOW.get(recipe.weighting, recipe.weighting)]
    if takes_target(recipe.weighting):
        what = "gradient of" if recipe.needs_gradient else "asked for" if recipe.asks else "for"
        parts.append(f"{what} {_TARGETS[recipe.target, recipe.scale][0]}")
        if recipe.prompt != "whole":
            parts.append({"phrase": "of the phrase alone", "in_place": "of the phrase in its place"}[recipe.prompt])
        if recipe.gradient_path not in ("full", "none"):
            parts.append(f"gradient path {recipe.gradient_path}")
        parts.append(f"ReLU {recipe.relu.replace('_', ' ')}" if recipe.relu != "none" else _unrectified(recipe))
    return parts


def _merge_parts(recipe: Recipe) -> list[str]:
    parts = []
    if recipe.site in ATTENTION_SITES:
        parts.append(f"heads {recipe.heads}")
        parts.append(f"{'query rows' if recipe.map_axis == 'keys' else 'key columns'} {recipe.queries}")
    if recipe.gradient_tokens != "none":
        parts.append(f"gradient tokens {recipe.gradient_tokens}")
    if recipe.compose != "none":
        parts.append(f"carried on by the {_COMPOSED[recipe.compose]}")
    if recipe.bimodal:
        parts.append("with self-attention of the text")
    if recipe.layer_rule != "single":
        parts.append(f"layers {recipe.layer_rule}")
    if recipe.discard:
        parts.append(f"smallest {recipe.discard:g} set to zero")
    if recipe.departures:
        parts.append(f"as coded: {', '.join(recipe.departures)}")
    return parts


_COMPOSED = {"pooler": "pooler's attention", "vision": "relevance of the image's self-attention"}


def _unrectified(recipe: Recipe) -> str:
    return "nothing negative" if recipe.weighting == "elementwise" else "signed"


def describe(recipe: Recipe) -> str:
    """Every field under its checklist heading with what it decides, then the formula."""
    lines = [f"{recipe.name} ({recipe.fingerprint})"]
    for group, fields in recipe.groups():
        lines += ["", group]
        for field, value in fields.items():
            shown = (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
            meaning = tensor(recipe) if field == "site" else _FIELDS[field]
            lines.append(f"  {field:<16} {shown:<27} {meaning}")
    return "\n".join([*lines, "", "formula", *(f"  {line}" for line in formula(recipe).splitlines())])


def formula(recipe: Recipe) -> str:
    """What the engine computes, line by line, in plain text.

    A is the tensor read at the site, G the gradient of y with respect to it, S what the softmax of A takes, h a head, t
    a query row, j an image token, i a pooled token, c a channel, l a block, z the class logits. Where texts are scored,
    v is the image embedding, t a text embedding, cos their cosine, s and b the model's scale and bias.
    """
    lines = _form_lines(recipe)
    if recipe.prompt != "whole":
        lines.append("k in the phrase alone" if recipe.target == "caption" else _PROMPT_LINES[recipe.prompt])
    if recipe.needs_gradient:
        path = "G = sum over l of dy/dA_l" if recipe.layer_rule == "shared" else _path(recipe)
        if "scores_gradient" in recipe.departures:
            path = "G = dy/dS"
        if "mirrored_layers" in recipe.departures:
            path += ", of block L - 1 - l in the place of block l"
        lines += [_TARGETS[recipe.target, recipe.scale][1], path]
    elif recipe.asks:
        lines.append(_TARGETS[recipe.target, recipe.scale][1])
    lines += _attention_lines(recipe) if recipe.site in ATTENTION_SITES else _feature_lines(recipe)
    if recipe.layer_rule in ("mean", "sum", "max") and recipe.attention != "values":
        lines.append(f"M[j] = {recipe.layer_rule} over l of M_l[j]")
    if recipe.of_text:
        lines.append("tokens[0, k] = M[j] of the k-th token that is not special; special tokens and padding apart")
    else:
        lines.append("tokens[row, column] = M[j] in raster order, tokens before the patches left out")
    return "\n".join(lines)


def _form_lines(recipe: Recipe) -> list[str]:
    """How attention is computed, where it is not as in the model."""
    where = "behind the first of these blocks," if recipe.site == "F6" else "from the first of these blocks on,"
    root = "sqrt(d), d the width of the model's own heads" if "head_scale" in recipe.departures else "sqrt(D)"
    return {
        "own": [],
        "one_head": [f"{where} attention has one head of full width D, its scores divided by {root}"],
        "identity": ["in the last block A[h,t,j] = 1 for t = j, else 0"],
        "values": [
            "F6 = input of the first of these blocks + sum over l of projection(softmax(u u^T / sqrt(d)) u), u the "
            "values of block l by head, d their width"
        ],
    }[recipe.attention]


_PROMPT_LINES = {
    "phrase": "own text = the phrase alone",
    "in_place": "own text = the whole text, with the keys of all words but the phrase hidden in every block",
}


def _path(recipe: Recipe) -> str:
    path = _PATHS[recipe.gradient_path]
    if recipe.gradient_path != "block":
        return path
    if recipe.stream != "pooler":
        return path.replace("z_l =", "v_l =").replace("head(", "projection(") if recipe.target in CONTRASTIVE else path
    read = "final norm and pooler of F6_l"
    if "bare_pooler" in recipe.departures:
        read = "pooler of F6_l, without the final norm, and in CoCa v_l . t for the cosine"
    return f"G_l = dy_l/dA_l, A_l the pooler's attention, y_l read from block l: v_l = {read}"


def _attention_lines(recipe: Recipe) -> list[str]:
    if recipe.heads == "channels":
        mean = f"A[j,c] = mean over {_rows(recipe)} of A[h=c,t,j]"
        return [f"{mean}; G likewise" if recipe.needs_gradient else mean, *_feature_lines(recipe)]
    if recipe.layer_rule in CARRIED:
        return _flow_lines(recipe)
    lines = [f"w[h] = mean over {_pooled_rows(recipe)} of {_gradient(recipe)}"] if "head" in recipe.weighting else []
    inner = {
        "attention": "A[h,t,j]",
        "gradient": _gradient(recipe),
        "attention*gradient": f"A[h,t,j] * {_gradient(recipe)}",
        "sigmoid*gradient": f"sigmoid(S[h,t,j]) * {_gradient(recipe)}",
        "head_weights": "w[h] * A[h,t,j]",
    }[recipe.weighting]
    if recipe.relu == "before_heads":
        inner = f"ReLU({inner})"
    merged = f"{recipe.heads} over h of {inner}"
    if recipe.relu == "after_heads":
        merged = f"ReLU({merged})"
    lines.append(f"E[t,j] = {merged}")
    if recipe.layer_rule in FLOWS:
        return [*lines, *_flow_lines(recipe)]
    if recipe.compose == "pooler":
        lines.append("E[t,j] <- sum over slots k of E[t,k] C[k,j], C the mean over heads of the pooler's attention")
    source = "E[j,t]" if recipe.map_axis == "queries" else "E[t,j]"
    mean = f"mean over {_rows(recipe)} of {source}"
    return [*lines, f"M[j] = {f'ReLU({mean})' if recipe.relu == 'map' else mean}"]


def _gradient(recipe: Recipe) -> str:
    return {"gradient": "ReLU(G[h,t,j])", "negative_gradient": "min(0, G[h,t,j])"}.get(recipe.relu, "G[h,t,j]")


def _rows(recipe: Recipe) -> str:
    rows = {
        "cls": "t = 0",
        "pooled": "t = the pooled token",
        "registers": "t in registers",
        "patches": "t in patches",
        "phrase": "t in phrase",
    }
    if recipe.queries == "all":
        return f"t in all{_left_out(recipe)}"
    return rows[recipe.queries] if isinstance(recipe.queries, str) else f"t in {list(recipe.queries)}"


def _left_out(recipe: Recipe) -> str:
    if recipe.of_text:
        return " tokens of the text (with start and end)"
    names = [name for name in recipe.exclude if name != "cls"]
    return f" but {' and '.join(names)}" if names else ""


def _pooled_rows(recipe: Recipe) -> str:
    return "all t and j" if recipe.gradient_tokens == "all" else f"{_rows(recipe)}, j in patches,"


def _flow_lines(recipe: Recipe) -> list[str]:
    mean = f"mean over {_rows(recipe)} of R[t,j]"
    last = f"M[j] = {f'ReLU({mean})' if recipe.relu == 'map' else mean}"
    if recipe.layer_rule in CARRIED:
        return [*_CARRIED_LINES[recipe.layer_rule], last.replace("R[t,j]", "R[t,j] W[t,j]")]
    if recipe.bimodal:
        return [*_bimodal_lines(recipe), last.replace("R[t,j]", "X[t,j]")]
    if recipe.layer_rule == "relevance":
        return ["R = identity; R <- R + E_l R for every block l, first to last", last]
    lines = []
    if recipe.discard:
        kept = "" if "unprotected" in recipe.departures else ", but E[0,0]"
        lines.append(f"E[t,j] = 0 for the smallest {recipe.discard:g} of all entries{kept}")
    share = "sum over k of (E + I)[j,k]" if "column_scaling" in recipe.departures else "sum over k of (E + I)[t,k]"
    return [*lines, f"B[t,j] = (E + I)[t,j] / {share}", "R = B_L ... B_2 B_1, the first block last", last]


def _bimodal_lines(recipe: Recipe) -> list[str]:
    """The rule for text that looks at an image, which never looks back."""
    image = recipe.compose == "vision"
    sides = "T_l for self-attention of text block l" + (", V_l for that of image block l" if image else "")
    behind = ["Q = identity; Q <- Q + V_l Q for every block l of the image, first to last"] if image else []
    return [
        f"likewise {sides}, each with its own A and G",
        *behind,
        "R = identity, X = 0; for every block l of text, first to last, X <- X + T_l X and R <- R + T_l R, ...",
        f"... then, where it looks at the image, X <- X + N(R)^T E_l{' N(Q)' if image else ''}",
        "N(R)[t,k] = (R - I)[t,k] / (sum over k of (R - I)[t,k]) + I[t,k], 0 / 0 = 0",
    ]


_CARRIED_LINES = {
    "transition": [
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "R = mean over h of A of the last block; R <- R (mean over h of A_l) + R for every block l below it",
    ],
    "headwise": [
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "s_l[h] = mean over i, j of |(A_l[h]^T dy/dA_l[h])[i,j]| at the image itself, scaled to a sum of 1 over h",
        "R = identity; R <- R + (sum over h of s_l[h] A_l[h]) R for every block l, first to last",
    ],
    "tokenwise": [
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "m_l[j] = |values of j, projected, without bias| / |input of block l at j|",
        "R = identity; R <- R + (mean over h of A_l[h,.,j] m_l[j]) R for every block l, first to last",
    ],
}


def _feature_lines(recipe: Recipe) -> list[str]:
    weights, terms = _CHANNEL_LINES[recipe.weighting]
    gradient = "ReLU(G[{0},c])" if recipe.relu == "gradient" else "G[{0},c]"
    own = {"i": gradient.format("i"), "j": gradient.format("j")}
    pooled = {
        "cls": "i = 0",
        "pooled": "i = the pooled token",
        "patches": "i in patches",
        "all": f"i in all tokens{_left_out(recipe)}",
        "none": "",
    }
    tokens = pooled[recipe.gradient_tokens]
    if "summed_cubes" in recipe.departures:
        weights = weights.replace(
            "(sum over {tokens} of A[i,c]) {i}^3 + 1e-6", "(sum over {tokens} of {i}^3 A[i,c]) + 1e-8"
        )
    if "no_denominator" in recipe.departures:
        weights = "w[c] = sum over {tokens} of ReLU({i}) {i}^2"
    aligned = "aligned_corners" in recipe.departures
    own["masks"] = (
        "U[c] = A[j,c] laid over the image with corners aligned, then scaled to 0..1"
        if aligned
        else "U[c] = A[j,c] scaled to 0..1, then laid over the image"
    )
    own["kernel"] = "one cell" if "one_token" in recipe.departures else "a 3 x 3 Gaussian"
    if recipe.weighting == "similarity" and recipe.scale == "difference":
        terms += " - mean over other t of cos(e[j], t)"
    lines = [weights.format(tokens=tokens, **own)] if weights else []
    found = terms.format(**own)
    if recipe.weighting == "value*gradient*similarity":
        over = "tokens of the text" if recipe.of_text else "patches"
        over = "the whole context" if "padded_similarity" in recipe.departures else over
        lines.append(f"l[j] = cos(query of i, key of j), all heads side by side, scaled to 0..1 over {over}")
    found = f"ReLU({found})" if recipe.relu == "map" else found
    return [*lines, f"M[j] = {found}{_REMARKS.get(recipe.weighting, '')}"]


_REMARKS = {
    "eigencam": ", the component's value of largest magnitude positive",
    "eigengradcam": ", the component's value of largest magnitude positive",
    "value*gradient": ", u the values of all heads",
    "value*gradient*similarity": ", u the values of all heads",
}
_WEIGHTED_SUM = "sum over c of w[c] A[j,c]"
_COMPONENT = "first principal component over patches of {}"
_CHANNEL_LINES = {
    "gradcam": ("w[c] = mean over {tokens} of {i}", _WEIGHTED_SUM),
    "gradcam++": (
        "w[c] = sum over {tokens} of ReLU({i}) {i}^2 / (2 {i}^2 + (sum over {tokens} of A[i,c]) {i}^3 + 1e-6)",
        _WEIGHTED_SUM,
    ),
    "xgradcam": (
        "w[c] = sum over {tokens} of {i} A[i,c] / (sum over {tokens} of A[i,c] + 1e-7)",
        _WEIGHTED_SUM,
    ),
    "layercam": ("", "sum over c of ReLU({j}) A[j,c]"),
    "hirescam": ("", "sum over c of {j} A[j,c]"),
    "elementwise": ("", "sum over c of ReLU({j} A[j,c])"),
    "eigencam": ("", _COMPONENT.format("A[j,c]")),
    "eigengradcam": ("", _COMPONENT.format("{j} A[j,c]")),
    "scorecam": ("w = softmax over c of y(image * U[c]), {masks}", _WEIGHTED_SUM),
    "ablationcam": ("w[c] = (y - y(A[.,c] = 0)) / y", _WEIGHTED_SUM),
    "reciprocam": (
        "y[j] = y when A and the block's input are multiplied by {kernel} around j; the class token stays",
        "y[j]",
    ),
    "value*gradient": ("w[c] = {i}, {tokens}", "sum over c of w[c] u[j,c]"),
    "value*gradient*similarity": ("w[c] = {i}, {tokens}", "l[j] sum over c of w[c] u[j,c]"),
    "similarity": ("e[j] = projection(norm(F6[j]))", "cos(e[j], own text)"),
    "surgery": (
        "e[j] = projection(norm(F6[j])), w[t] = softmax over texts of 2 cos(v, t), over its mean",
        "w[own] cos(e[j], own) - mean over t of w[t] cos(e[j], t)",
    ),
    "none": ("", "mean over c of A[j,c]"),
}


def _layers(recipe: Recipe) -> str:
    if isinstance(recipe.layers, str):
        return {"last": "last block", "all": "all blocks"}[recipe.layers]
    return ("block " if len(recipe.layers) == 1 else "blocks ") + ", ".join(map(str, recipe.layers))
