"""Explanation: a map that carries the recipe and the provenance which reproduce it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vlcam import archive, colours, textpicture
from vlcam.errors import EvidenceError, FileError, InputError, RecipeError, UnknownNameError, listing
from vlcam.evidence import Status
from vlcam.geometry import Placement, to_original
from vlcam.images import ImageSource, SourceImage, open_image, pixels_sha256
from vlcam.likeness import TOP
from vlcam.maps import normalised
from vlcam.provenance import SCHEMA
from vlcam.recipe import Recipe
from vlcam.recordform import check_form
from vlcam.regions import Region
from vlcam.scores import Score
from vlcam.text import lay_out, phrase_spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vlcam.comparison import Comparison
    from vlcam.explainer import Explainer
    from vlcam.reporting import Report
    from vlcam.verification import Verification

__all__ = ["Explanation", "WordMap", "WordScore", "Words", "same_image", "same_pixels"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WordMap:
    """One word's map: the word, its span in the text, its token indices, and the raw map [h, w]."""

    word: str
    span: tuple[int, int]
    rows: tuple[int, ...]
    tokens: Floats
    status: Status


@dataclass(frozen=True)
class WordScore:
    """One word's share of a map over the text: the word, its span, its token indices, the raw sum over those."""

    word: str
    span: tuple[int, int]
    rows: tuple[int, ...]
    score: float


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What the model looked at, how the map was made, and what is needed to make it again.

    Attributes:
        tokens: float32 [h, w], the map on the token grid, raw: signed if the recipe is, before normalisation. For a map
            over the text (`recipe.of_text`) [1, n]: the tokens that stand for words or signs, in order.
        recipe: every choice.
        provenance: image, text, model, run and versions as JSON values; see `docs/provenance.md`.
        scores: every score that the model offers for this image and text, by name; those of heads that the map did
            not need are computed when first read.
        status: `ok`, or why there is nothing to draw: `constant`, `no positive evidence` (a ReLU removed all),
            `rounding noise` (the terms of gradient times activation cancel),
            `zero gradient` (words only; for the main map this is an error).
        image: the image as the user sees it, RGB; None where it came from a file that does not carry it.
        placement: which part of the image the model saw.
        word_maps: the map of every word, empty where the site has no text rows.
        attachments: the image's own bytes, or the image, and preprocessed pixels, for the file.
    """

    tokens: Floats
    recipe: Recipe
    provenance: Mapping[str, Any]
    scores: Mapping[str, Score]
    status: Status
    image: Image.Image | None
    placement: Placement
    word_maps: tuple[WordMap, ...]
    attachments: archive.Attachments

    def __repr__(self) -> str:
        """One line: what was explained, how, and whether there is something to see."""
        rows, columns = self.tokens.shape
        if self.recipe.of_text:
            return f"<Explanation of {self.subject!r} by {self.recipe.name}, {columns} text tokens, {self.status}>"
        return f"<Explanation of {self.subject!r} by {self.recipe.name}, {rows} x {columns} tokens, {self.status}>"

    def _repr_png_(self) -> bytes | None:
        """The overlay, which notebooks show for an explanation; nothing where there is nothing to draw."""
        if self.status != "ok" or self.image is None:
            return None
        buffer = io.BytesIO()
        self.overlay().save(buffer, "PNG")
        return buffer.getvalue()

    @property
    def heatmap(self) -> Floats:
        """float32 [H, W] on the original image, normalised and interpolated by the recipe; NaN where unseen.

        The token map is normalised first and interpolated then.

        Raises:
            RecipeError: the map is over the text; see `word_scores`.
        """
        if self.recipe.of_text:
            raise RecipeError(
                f"recipe {self.recipe.name!r} makes a map over the words of the text, which has no place on the image: "
                "read word_scores, or draw overlay()"
            )
        scaled = normalised(self.recipe, torch.from_numpy(self.tokens)).numpy()
        return to_original(scaled, self.placement, self.recipe.upsample)

    @property
    def word_scores(self) -> tuple[WordScore, ...]:
        """For a map over the text: every word's raw score, the sum over its tokens, in text order.

        What start, end and padding got is reported apart, in `provenance["run"]["apart"]`.

        Raises:
            RecipeError: the map is over the image.
        """
        if not self.recipe.of_text:
            raise RecipeError(
                f"recipe {self.recipe.name!r} makes a map over the image; scores of words come from a recipe with "
                "stream='text', for example 'chefer-clip-text'"
            )
        record = self.provenance["text"]
        place = [index for index, flag in enumerate(record["special"]) if not flag]
        spans = [(span[0], span[1]) for span in record["spans"]]
        cut = bool(record["cut_text"])
        layout = lay_out(record["given"], record["ids"], record["pieces"], spans, record["special"], truncated=cut)
        sums = {index: float(value) for index, value in zip(place, self.tokens[0], strict=True)}
        return tuple(WordScore(w.text, w.span, w.tokens, sum(sums[i] for i in w.tokens)) for w in layout.words)

    @property
    def words(self) -> Words:
        """The map of every word of the text, as an explanation of its own: `exp.words["red"].heatmap`."""
        return Words(self)

    @property
    def text(self) -> str | None:
        """The text as typed; None for a model that takes no text."""
        text = self.provenance["text"]
        return None if text is None else str(text["given"])

    @property
    def subject(self) -> str:
        """What was explained, for people: the text, or the class with its label."""
        if self.text is not None:
            return self.text
        run = self.provenance["run"]
        explained = run["class"]
        if explained is None or self.recipe.target == "custom":
            return f"target {run['target']}"
        label = "" if explained["label"] is None else f": {explained['label']}"
        return f"class {explained['index']}{label}{_where(explained)}"

    def peak(self) -> tuple[int, int]:
        """(x, y) of the heatmap's highest pixel in the original image; of equal ones, the first in raster order.

        Raises:
            EvidenceError: the map is constant.
        """
        self._check_drawable()
        heatmap = self.heatmap
        y, x = divmod(int(np.nanargmax(heatmap)), heatmap.shape[1])
        return x, y

    def overlay(self, *, alpha: float = 0.6, colormap: str | None = None) -> Image.Image:
        """Lay the heatmap over the original image, at its original size; for a map over the text, colour its words.

        Args:
            alpha: opacity of the map, 0 to 1. What the model never saw is greyed and hatched instead.
            colormap: `inferno`, `viridis`, `gray` or `coolwarm`; by default `inferno`, and `coolwarm` with zero in
                its middle for a map that has negative values after normalisation.

        Returns:
            An RGB image.

        Raises:
            EvidenceError: there is nothing to draw; the message says why.
        """
        self._check_drawable()
        if self.recipe.of_text:
            return self._coloured_text(colormap)
        heatmap = self.heatmap
        if self.recipe.normalize == "none":  # colours need a scale, raw values have none
            heatmap = heatmap / np.nanmax(np.abs(heatmap))
        return colours.overlay(self.picture(), heatmap, alpha=alpha, colormap=colormap)

    def _coloured_text(self, colormap: str | None) -> Image.Image:
        """The text, every word in the colour of its score, scaled as the recipe says."""
        words = self.word_scores
        scores = torch.tensor([word.score for word in words], dtype=torch.float32, device="cpu")
        values = normalised(self.recipe, scores).tolist()
        text, spans = self.provenance["text"]["given"], [word.span for word in words]
        apart = self.provenance["run"]["apart"]
        return textpicture.draw(text, spans, values, apart=apart, colormap=colormap)

    def picture(self) -> Image.Image:
        """The image that was explained.

        Raises:
            InputError: it came from a file that does not carry it.
        """
        if self.image is None:
            raise InputError("the file does not carry its image; give it: vlcam.open(path, image=...)")
        return self.image

    def figure(self) -> Figure:
        """The image, the map, every word's map on one colour scale, and the scores. Needs the extra `plot`."""
        from vlcam.plot import figure  # matplotlib is an extra

        return figure(self)

    def save(self, path: str | os.PathLike[str], *, embed_image: bool = True, overwrite: bool = False) -> Path:
        """Write a PNG that shows the overlay and carries map, recipe and provenance; `vlcam.open` is its inverse.

        Args:
            path: ends in `.png`.
            embed_image: whether the original image's bytes travel along, so that the file alone can be verified.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            FileError: another ending, or the file exists.
        """
        picture = self.overlay() if self.status == "ok" else self.picture()
        return archive.write(Path(path), picture, self._payload(embed_image=embed_image), overwrite=overwrite)

    def record(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON values: recipe, provenance, scores, status, and where each word stands."""
        return {
            "recipe": self.recipe.to_dict() | {"fingerprint": self.recipe.fingerprint},
            "status": self.status,
            "scores": {name: {"kind": s.kind, "value": s.value} for name, s in self.scores.items()},
            "placement": {
                "original": list(self.placement.original),
                "model": list(self.placement.model),
                "box": list(self.placement.box),
            },
            "words": [
                {"word": w.word, "span": list(w.span), "rows": list(w.rows), "status": w.status} for w in self.word_maps
            ],
            "provenance": dict(self.provenance),
        }

    def verify(self, model: Explainer, *, image: Any = None, alone: bool = False) -> Verification:
        """Compute the map again and compare.

        Args:
            model: the model that the map was made with.
            image: the image or preprocessed tensor, where the file does not carry it; its hash is compared.
            alone: whether the pair is computed by itself, where it was one of several of a call. That costs less, and
                the last bits differ; by default it runs among copies of itself in a batch of the same shape.

        Returns:
            Whether the map came out again, the largest difference, and everything that differs.
        """
        from vlcam.verification import verify  # it needs the explainer, which needs this module

        return verify(self, model, image=image, alone=alone)

    def compare(self, other: Explanation, *, top: float = TOP) -> Comparison:
        """Compare with another explanation of the same image: which fields differ, and how far apart the maps are.

        Args:
            other: the other one.
            top: share of the cells that counts as the strongest.

        Raises:
            InputError: of another image, or one of the maps is over the text and the other is not, or is over another.
        """
        from vlcam.comparison import contrast  # it needs this module

        return contrast(self, other, top=top)

    def of_same_image(self, other: Explanation) -> bool:
        """Whether another explanation is of the same image: the same file, or the same pixels in any file."""
        records = [each.provenance["image"]["sha256"] for each in (self, other)]
        if records[0] == records[1] or self.image is None or other.image is None:
            return bool(records[0] == records[1])
        return pixels_sha256(self.image) == pixels_sha256(other.image)

    def report(self) -> Report:
        """The reporting checklist filled in, a methods paragraph, the formula, the sources, and a page of HTML."""
        from vlcam.reporting import Report  # the catalogue and a page's libraries are only needed here

        return Report(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, image: ImageSource | Tensor | None = None) -> Self:
        """Read what `save` wrote.

        Args:
            path: the file.
            image: the image, or the preprocessed tensor, where the file does not carry it; its hash is compared.

        Raises:
            FileError: not an explanation, or damaged, or edited, or of a later release.
            InputError: another image than the one that was explained.
        """
        payload = archive.read(Path(path))
        stated = _stated(payload, str(path))
        attachments, wanted = payload.attachments, stated["provenance"]["image"]
        inside = _inside(attachments, wanted, str(path))
        source = inside if image is None or isinstance(image, Tensor) else same_image(image, wanted)
        if isinstance(image, Tensor):
            attachments = replace(attachments, pixel_values=same_pixels(image, wanted))
        if source:
            attachments = replace(attachments, image=source.encoded or source.rgb)
        return cls(image=source.rgb if source else None, attachments=attachments, **stated)

    def _payload(self, *, embed_image: bool) -> archive.Payload:
        maps = [word.tokens for word in self.word_maps]
        empty = np.zeros((0, *self.tokens.shape), np.float32)
        return archive.Payload(
            record=self.record(),
            tokens=self.tokens,
            words=np.stack(maps) if maps else empty,
            attachments=self.attachments if embed_image else archive.Attachments(),
        )

    def _check_drawable(self) -> None:
        if self.status == "ok":
            return
        advice = {
            "no positive evidence": "every value is zero after the ReLU; relu='none' shows the signed map",
            "constant": "every cell has the same value, so no place stands out",
            "rounding noise": "gradient times activation cancels at this site, and what is left is rounding; "
            "choose another site or weighting",
            "not finite": "the model's activations or gradients overflow; load it in another precision",
            "zero gradient": "the score does not depend on these tokens at this layer; choose an earlier layer, or "
            "explain with this recipe alone, which says where it does",
        }
        raise EvidenceError(f"nothing to draw ({self.status}): {advice[self.status]}")


class Words(Mapping[str, Explanation]):
    """Word -> explanation, in text order. A word that occurs again is `word#2`, `word#3`, ..."""

    def __init__(self, whole: Explanation) -> None:
        """Look at the words of an explanation."""
        self._whole = whole
        seen: dict[str, int] = {}
        self._index: dict[str, WordMap] = {}
        for word in whole.word_maps:
            seen[word.word] = seen.get(word.word, 0) + 1
            number = seen[word.word]
            self._index[word.word if number == 1 else f"{word.word}#{number}"] = word

    def __getitem__(self, key: str) -> Explanation:
        """The explanation of one word.

        Raises:
            UnknownNameError: no such word; lists those there are, or says why there are none.
        """
        if key not in self._index:
            if not self._index:
                site = self._whole.recipe.site
                instead = "; scores of words are in word_scores" if self._whole.recipe.of_text else ""
                raise UnknownNameError(
                    f"no map per word: {site} has no text rows, only CROSS has; it gives one map{instead}"
                )
            raise UnknownNameError(f"no word {key!r}; there are {listing(self._index)}")
        word = self._index[key]
        whole = self._whole
        run = whole.provenance["run"]
        own: dict[str, Any] = {
            "dropped": [part for part in run["dropped"] if part["what"] != "text rows"],
            "phrase": word.word,
            "occurrence": _occurrence(whole.text or "", word),
            "span": list(word.span),
            "rows": list(word.rows),
        }
        if whole.recipe.target == "caption" and whole.recipe.prompt == "phrase":
            phrase = {key: run[key] for key in ("phrase", "occurrence", "span")}
            own["target_phrase"] = run.get("target_phrase", phrase)
        return replace(
            whole,
            tokens=word.tokens,
            recipe=whole.recipe.replace(queries="phrase"),
            provenance=dict(whole.provenance) | {"run": run | own},
            status=word.status,
        )

    def __iter__(self) -> Iterator[str]:
        """The words in text order."""
        return iter(self._index)

    def __len__(self) -> int:
        """How many words have a map."""
        return len(self._index)


def _stated(payload: archive.Payload, path: str) -> dict[str, Any]:
    """What a saved record states, as the fields of an explanation; a record that contradicts itself is refused."""
    record = payload.record
    try:
        schema = record["provenance"]["schema"]
        if schema != SCHEMA:
            raise FileError(
                f"{path!r}: its record is of schema {schema!r}, and this release of vlcam reads {SCHEMA}; update vlcam"
            )
        recipe = Recipe.from_dict({k: v for k, v in record["recipe"].items() if k != "fingerprint"})
        if recipe.fingerprint != record["recipe"]["fingerprint"]:
            raise FileError(
                f"{path!r}: the recipe's fields have the fingerprint {recipe.fingerprint}, and the file states "
                f"{record['recipe']['fingerprint']}: one of them was edited"
            )
        check_form(record, payload.tokens.shape, payload.words.shape)
        place = record["placement"]
        words = zip(record["words"], payload.words, strict=True)
        return {
            "tokens": payload.tokens,
            "recipe": recipe,
            "provenance": record["provenance"],
            "scores": {name: Score(name, s["kind"], s["value"]) for name, s in record["scores"].items()},
            "status": record["status"],
            "placement": Placement(tuple(place["original"]), tuple(place["model"]), tuple(place["box"])),
            "word_maps": tuple(
                WordMap(w["word"], tuple(w["span"]), tuple(w["rows"]), tokens, w["status"]) for w, tokens in words
            ),
        }
    except RecipeError as error:
        raise FileError(f"{path!r}: its recipe cannot be read ({error})") from None
    except (AttributeError, InputError, KeyError, RecursionError, TypeError, ValueError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise FileError(f"{path!r}: the record inside is damaged ({told})") from None


def _inside(attachments: archive.Attachments, wanted: Mapping[str, Any], path: str) -> SourceImage | None:
    """The image that travelled in a file, if it is the one on record, and so the tensor."""
    try:
        if attachments.pixel_values is not None:
            same_pixels(torch.from_numpy(attachments.pixel_values), wanted)
        return None if attachments.image is None else same_image(attachments.image, wanted)
    except InputError as error:
        raise FileError(f"{path!r}: the image inside is not that of its record ({error})") from None


def _where(explained: Mapping[str, Any]) -> str:
    """The region of a class of pixels, in words."""
    if "region" not in explained:
        return ""
    region = explained["region"]
    if region is None:
        return ", its predicted pixels"
    return f" in {Region.from_dict(region)!r}".replace("Region", "region")


def _occurrence(text: str, word: WordMap) -> int | None:
    """Which of several equal words it is; None for the only one, and for one that a search does not find."""
    places = phrase_spans(text, word.word)
    return places.index(word.span) + 1 if len(places) > 1 and word.span in places else None


def same_image(image: ImageSource, record: Mapping[str, Any]) -> SourceImage:
    """Read an image, and make sure that it is the one on record: the same file, or the same pixels in any file.

    Raises:
        InputError: another image.
    """
    source = open_image(image, name=record["name"])
    if record["sha256"] not in (source.sha256, pixels_sha256(source.rgb)):
        raise InputError(
            f"another image: its SHA-256 is {source.sha256}, the explanation was made of {record['sha256']}"
        )
    return source


def same_pixels(pixels: Tensor, record: Mapping[str, Any]) -> Floats:
    """The values of a preprocessed tensor [3, H, W], if it is the one on record.

    Raises:
        InputError: another tensor, or the record is that of an image.
    """
    wanted = record.get("pixels_sha256")
    if wanted is None:
        raise InputError("the explanation was made of an image, not of a preprocessed tensor; give that image")
    array = np.ascontiguousarray(pixels.detach().float().cpu().numpy(), np.float32)
    found = hashlib.sha256(array.tobytes()).hexdigest()
    if array.ndim != 3 or found != wanted:
        raise InputError(
            f"another tensor: its shape is {array.shape}, its SHA-256 {found}; the explanation was made of {wanted}"
        )
    return array
