# %% [markdown]
"""# Is the picture evidence? What a description leaves open, and a map that can be checked.

"We visualise the last layer with Grad-CAM." This notebook asks what such a sentence leaves open, shows how far the maps
are apart that all fit it, states what is missing, and hands over a file that another person can check without trusting
whoever made it. It runs on a CPU in under a minute with models that come with the package, and downloads nothing.

It needs the extra `plot`: `pip install 'vlcam[plot]'`.
"""

# %%
import io
import struct
import tempfile
import zlib
from pathlib import Path

import PIL.Image
from IPython.display import Image, Markdown
from matplotlib.figure import Figure

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

print("  ".join(f"{name} {number}" for name, number in versions().items()))


# %%
def show(picture: PIL.Image.Image | Figure, width: int | None = None) -> Image:
    """A picture or a figure in 128 colours, which keeps this file small."""
    if isinstance(picture, Figure):
        drawn = io.BytesIO()
        picture.savefig(drawn, dpi=75, bbox_inches="tight")
        picture = PIL.Image.open(drawn)
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(128, kmeans=1).save(buffer, "PNG", optimize=True)
    return Image(buffer.getvalue(), width=width)


scene = next(scenes.generate(1, seed=4, start=207, objects=(3, 3)))
model = vlcam.load("tiny-vit")
folder = Path(tempfile.mkdtemp())
show(scene.image, width=256)

# %% [markdown]
"""
## What does the sentence leave open?

A `Description` states some fields of a recipe and leaves the others open. `vlcam.descriptions()` has those that papers
typically write. This one is "Grad-CAM on the last layer of a ViT".
"""

# %%
description = vlcam.descriptions()["gradcam-vit-last-layer"].description
print(description)

# %% [markdown]
"""
Every recipe that is valid for this model and fits the sentence is a map that its author may have meant.
`model.ambiguity` makes all of them, from one forward pass and one backward pass per scalar.
"""

# %%
ambiguity = model.ambiguity(scene.image, description=description, target="red circle")
print(ambiguity)

# %%
show(ambiguity.figure())

# %% [markdown]
"""
All of these maps are "Grad-CAM at the last layer, for the red circle". Some find it; the two that are least alike show
the opposite of each other. None of them is wrong: the sentence does not say which was meant.

## What should be stated?

The share of the variance says how much of the difference among the maps goes with the values of one field; the rank
correlation beside it is of maps that differ in this field alone. Fields overlap, so that shares need not add up to one.
The sentence is the one that says most in the fewest words. Stating more leaves fewer recipes:
"""

# %%
stated = {"relu": "map", "site": "F1", "gradient_tokens": "patches", "scale": "logit"}
narrower = description
for field, value in stated.items():
    narrower = narrower.stating(**{field: value})
    left = model.ambiguity(scene.image, description=narrower, target="red circle")
    lowest = f"lowest correlation {left.correlations.minimum:.2f}" if len(left.shown) > 1 else "one map"
    print(f"{f'{field} = {value}':<26}{len(left):>4} left   {lowest}")

# %% [markdown]
"""
## A map that states everything

A recipe has no field without a value, so an explanation leaves nothing open. The report fills in the reporting
checklist from the record of the map, and writes the paragraph for the methods section.
"""

# %%
exp = model.explain(scene.image, target="red circle", recipe="pgc-gradcam")
report = exp.report()
Markdown(report.paragraph)

# %%
for row in report.checklist[:12]:
    print(f"{row.group:<24} {row.item:<40} {row.stated}")

# %% [markdown]
"""
The same as LaTeX, JSON, or one HTML file that can be opened anywhere: opacity slider, the value of every cell, a map
for every word, and the whole record. It loads nothing from anywhere.
"""

# %%
text = "a picture of a red circle, a blue square and a green star"
matched = vlcam.load("tiny-blip-itm").explain(scene.image, text, layer=0)
page = matched.report().save(folder / "report.html")
print(f"{page.name}: {page.stat().st_size / 1000:.0f} kB")
print(vlcam.bibtex("pgc-gradcam"))

# %% [markdown]
"""
## A file that can be checked

`save` writes a picture that carries the raw map, the recipe, the record and the image. Whoever has the weights can make
the map again and compare.
"""

# %%
file = exp.save(folder / "red-circle.png")
print(vlcam.open(file).verify(model))

# %% [markdown]
"""
With another model of the same class it does not come out. Here one bias is a little larger than it was:
"""

# %%
other = vlcam.load("tiny-vit")
other.adapter.module.classifier.bias.data[0] += 0.01
print(vlcam.open(file).verify(other))

# %% [markdown]
"""
The map is the same, because the gradient of a logit does not depend on its bias; the weights and the score are not, and
both are named.

A file that was edited is not opened at all. Here the record says another class than the one that was explained:
"""


# %%
def checksummed(png: bytes) -> bytes:
    """A PNG whose chunks have the checksums of what they hold now, as any editor would write them."""
    made, place = png[:8], 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        body = png[place + 4 : place + 8 + length]
        made += png[place : place + 4] + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + length
    return made


edited = folder / "edited.png"
edited.write_bytes(checksummed(file.read_bytes().replace(b"red circle", b"red square")))
try:
    vlcam.open(edited)
except vlcam.FileError as error:
    print(str(error).replace(str(folder), "..."))

# %% [markdown]
"""
The digest tells of an edit, and no more: whoever computes it anew can forge it. What proves a map is that it comes out
of the model again.

## How far apart are two explanations?
"""

# %%
elsewhere = model.explain(scene.image, target="red circle", recipe="pgc-gradcam", site="F6", layer=-2)
print(exp.compare(elsewhere))
show(vlcam.gallery([exp, elsewhere]))

# %% [markdown]
"""
## What do papers state?

`vlcam.audit` reads a table with a row per paper, coded by what the paper reports, and counts for each how many recipes
fit. The rows of this example are made up; no such paper exists.
"""

# %%
audit = vlcam.audit("audit_made_up.csv")
print(audit)

# %%
show(audit.figure())

# %% [markdown]
"""
The columns and what a cell may hold are described in `docs/audit.md`; every number of an ambiguity in
`docs/ambiguity.md`; the checklist and the page in `docs/report.md`.
"""
