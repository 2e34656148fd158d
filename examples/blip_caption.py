# %% [markdown]
"""# Which pixels made the model say this word?

BLIP can also write: a caption, or the answer to a question. What is explained then is the likelihood of the text, token
by token. This notebook makes a map for every word of a caption, and for an answer. It runs on a CPU in a minute and
downloads nothing. It needs the extra `plot`: `pip install 'vlcam[plot]'`.
"""

# %%
# %matplotlib inline

import io

import PIL.Image
from IPython.display import Image, display_png

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

print("  ".join(f"{name} {number}" for name, number in versions().items()))


def show(picture: PIL.Image.Image) -> Image:
    """A PIL image at twice its size."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return Image(buffer.getvalue(), width=2 * picture.width)


scene = next(scenes.generate(1, seed=11, start=18, objects=(2, 3)))
print(scene.caption)
show(scene.image)

# %% [markdown]
"""
## A caption of the model's own

Without a text, the model writes one and explains it; the record says that it did.
"""

# %%
captioner = vlcam.load("tiny-blip-caption")
exp = captioner.explain(scene.image)
print(repr(exp.text), "written by the model:", exp.provenance["text"]["written"])
print(exp.scores["caption_log_probability"])
print(vlcam.formula(exp.recipe))

# %% [markdown]
"""
## A map for every word

A decoder tells each token from the row of the token before it, so the map of a word is read one row earlier than the
word stands. In the last block of cross-attention such a row has a gradient from its own word alone.
"""

# %%
figure = exp.figure()
figure.set_dpi(60)
display_png(figure)

# %% [markdown]
"""
## Any caption, and a phrase of it

Given a text, the model is asked how likely it is. With `phrase=` the target is the likelihood of the phrase's tokens
alone, given all before them.
"""

# %%
phrase = scene.objects[1].phrase
part = captioner.explain(scene.image, scene.caption, phrase=phrase)
print(part.provenance["run"]["target"], round(part.provenance["run"]["target_value"], 3))
x, y = part.peak()
print("peak on the object:", bool(scene.objects[1].mask[y, x]))
show(part.overlay())

# %% [markdown]
"""
A false word is less likely. Its map shows where the model looked when it found it so.
"""

# %%
false, wrong = scenes.mismatch(scene, "object")
for text in (scene.caption, false.text):
    print(f"{captioner.scores(scene.image, text)['caption_log_probability'].value:8.2f}  {text}")

# %% [markdown]
"""
## An answer to a question

`tiny-blip-vqa` answers questions about colours and shapes. The words of the question look at the image, and the decoder
that writes the answer looks at the question; so the map is over the question's words. The target is the likelihood of
the answer: the model's own, or any other with `answer=`.
"""

# %%
answerer = vlcam.load("tiny-blip-vqa")
shape = scene.objects[0].phrase.split()[-1]
question = f"what colour is the {shape}?"
exp = answerer.explain(scene.image, question)
print(question, "->", exp.provenance["answer"]["given"], exp.scores["answer_log_probability"])
other = answerer.explain(scene.image, question, answer="red")
print(question, "->", other.provenance["answer"]["given"], other.scores["answer_log_probability"])
show(exp.words[shape].overlay())

# %% [markdown]
"""
## Limits, in plain words

- A map says what the likelihood of these tokens depends on, given the words before them: often a word is likely because
  of the words before it, and the image adds little.
- A caption that the model wrote is its likeliest one by a greedy rule, not the only one.
- Both models are toys, trained on drawings; their cards say how: `vlcam.models()["tiny-blip-caption"].card`.
"""
