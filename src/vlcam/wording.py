"""A recipe in words: one line, a paragraph per checklist group, and the formula it stands for."""

from __future__ import annotations

from vlcam.recipe import ATTENTION_SITES, Recipe

__all__ = ["describe", "formula", "summary"]

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
_TARGETS = {
    ("itm", "logit"): "the image-text matching logit of 'match'",
    ("itm", "probability"): "the image-text matching probability of 'match'",
    ("itm", "log-probability"): "the log-probability of 'match'",
    ("itm", "margin"): "the margin between the 'match' and the 'no match' logit",
    ("contrastive", "cosine"): "the cosine of the image and text projections",
    ("custom", "raw"): "a scalar given as a callable",
    ("none", "none"): "no score",
}
_SCALARS = {
    ("itm", "logit"): "y = itm_logit[match]",
    ("itm", "probability"): "y = softmax(itm_logit)[match]",
    ("itm", "log-probability"): "y = log softmax(itm_logit)[match]",
    ("itm", "margin"): "y = itm_logit[match] - itm_logit[no match]",
    ("contrastive", "cosine"): "y = cos(image projection, text projection)",
    ("custom", "raw"): "y = given callable",
}
_FIELDS = {
    "site": "which tensor",
    "stream": "of which stack of blocks",
    "layers": "of which blocks",
    "target": "whose gradient",
    "scale": "on which scale",
    "gradient_tokens": "tokens whose gradient is averaged",
    "queries": "query rows that are averaged",
    "exclude": "what never reaches the map",
    "weighting": "how activation and gradient are combined",
    "relu": "where negatives are removed",
    "heads": "how heads are merged",
    "layer_rule": "how layers are merged",
    "reshape": "how tokens become a grid",
    "upsample": "interpolation to pixels",
    "normalize": "scaling of the map",
}


def summary(recipe: Recipe) -> str:
    """One line that names every choice that shapes the token map."""
    where = f"{recipe.site} of {recipe.stream} {_layers(recipe)}"
    how = {"attention*gradient": "attention x gradient", "gradcam": "channels weighted by the mean gradient"}
    parts = [where, how.get(recipe.weighting, recipe.weighting)]
    if recipe.needs_gradient:
        parts.append(f"gradient of {_TARGETS[recipe.target, recipe.scale]}")
        parts.append(f"ReLU {recipe.relu.replace('_', ' ')}" if recipe.relu != "none" else "signed")
    if recipe.site in ATTENTION_SITES:
        parts.append(f"heads {recipe.heads}")
        parts.append(f"query rows {recipe.queries}")
    else:
        parts.append(f"gradient tokens {recipe.gradient_tokens}")
    if recipe.layer_rule != "single":
        parts.append(f"layers {recipe.layer_rule}")
    parts.append(f"without {', '.join(recipe.exclude)}")
    return "; ".join(parts)


def describe(recipe: Recipe) -> str:
    """Every field under its checklist heading with what it decides, then the formula."""
    lines = [f"{recipe.name} ({recipe.fingerprint})"]
    for group, fields in recipe.groups():
        lines += ["", group]
        for field, value in fields.items():
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            meaning = _SITES[value] if field == "site" else _FIELDS[field]
            lines.append(f"  {field:<16} {shown:<27} {meaning}")
    return "\n".join([*lines, "", "formula", *(f"  {line}" for line in formula(recipe).splitlines())])


def formula(recipe: Recipe) -> str:
    """What the engine computes, line by line, in plain text.

    A is the tensor read at the site, G the gradient of y with respect to it, h a head, t a query row, j an image
    token, c a channel, l a block.
    """
    lines = []
    if recipe.needs_gradient:
        shared = recipe.layer_rule == "shared"
        lines += [_SCALARS[recipe.target, recipe.scale], "G = sum over l of dy/dA_l" if shared else "G = dy/dA"]
    lines += _attention_lines(recipe) if recipe.site in ATTENTION_SITES else _feature_lines(recipe)
    if recipe.layer_rule in ("mean", "sum", "max"):
        lines.append(f"M[j] = {recipe.layer_rule} over l of M_l[j]")
    lines.append("tokens[row, column] = M[j] in raster order, class token left out")
    return "\n".join(lines)


def _attention_lines(recipe: Recipe) -> list[str]:
    gradient = "ReLU(G[h,t,j])" if recipe.relu == "gradient" else "G[h,t,j]"
    product = {"attention": "A[h,t,j]", "gradient": gradient, "attention*gradient": f"A[h,t,j] * {gradient}"}
    inner = product[recipe.weighting]
    if recipe.relu == "before_heads":
        inner = f"ReLU({inner})"
    merged = f"{recipe.heads} over h of {inner}"
    if recipe.relu == "after_heads":
        merged = f"ReLU({merged})"
    rows = {"cls": "t = 0", "patches": "t in patches", "all": "t in all", "phrase": "t in phrase"}
    chosen = rows[recipe.queries] if isinstance(recipe.queries, str) else f"t in {list(recipe.queries)}"
    left_out = [name for name in recipe.exclude if name != "cls"]
    if recipe.queries == "all" and left_out:
        chosen += f" but {' and '.join(left_out)}"
    mean = f"mean over {chosen} of E[t,j]"
    return [f"E[t,j] = {merged}", f"M[j] = {f'ReLU({mean})' if recipe.relu == 'map' else mean}"]


def _feature_lines(recipe: Recipe) -> list[str]:
    gradient = "ReLU(G[i,c])" if recipe.relu == "gradient" else "G[i,c]"
    tokens = {"cls": "i = 0", "patches": "i in patches", "all": "i in all tokens"}[recipe.gradient_tokens]
    product = "sum over c of w[c] * A[j,c]"
    return [
        f"w[c] = mean over {tokens} of {gradient}",
        f"M[j] = {f'ReLU({product})' if recipe.relu == 'map' else product}",
    ]


def _layers(recipe: Recipe) -> str:
    if isinstance(recipe.layers, str):
        return {"last": "last block", "all": "all blocks"}[recipe.layers]
    return ("block " if len(recipe.layers) == 1 else "blocks ") + ", ".join(map(str, recipe.layers))
