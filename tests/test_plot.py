"""The figure of an explanation with its words."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("matplotlib")

TEXT = "a red circle and a blue dog"


@pytest.fixture
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8))


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def maps(figure):
    """What is drawn over the grey picture, tile by tile."""
    return [ax.images[1] for ax in figure.axes if len(ax.images) == 2]


def largest(explanation):
    return max(
        float(np.abs(tokens).max()) for tokens in (explanation.tokens, *(w.tokens for w in explanation.word_maps))
    )


def test_image_map_and_every_word_have_a_titled_tile(model, photo):
    explanation = model.explain(photo, TEXT)
    figure = explanation.figure()
    assert len(explanation.word_maps) == 7
    assert len(titles(figure)) == len(explanation.word_maps) + 2
    assert titles(figure)[:2] == ["image", "whole text"]
    assert [title.split("\n")[0] for title in titles(figure)[2:]] == [word.word for word in explanation.word_maps]


def test_all_maps_share_one_scale_up_to_the_largest_magnitude(model, photo):
    explanation = model.explain(photo, TEXT)
    shown = maps(explanation.figure())
    assert len(shown) == len(explanation.word_maps) + 1
    assert {image.get_clim() for image in shown} == {(0, largest(explanation))}
    assert {image.get_cmap().name for image in shown} == {"vlcam"}


def test_a_signed_map_has_zero_in_the_middle_of_its_scale(model, photo):
    explanation = model.explain(photo, TEXT, relu="none")
    assert min(tokens.min() for tokens in (explanation.tokens, *(w.tokens for w in explanation.word_maps))) < 0
    shown = maps(explanation.figure())
    assert {image.get_clim() for image in shown} == {(-largest(explanation), largest(explanation))}


def test_the_colour_bar_has_the_scale_of_the_maps(model, photo):
    explanation = model.explain(photo, TEXT, relu="none")
    figure = explanation.figure()
    (bar,) = [ax for ax in figure.axes if ax.get_ylabel()]
    assert bar.get_ylim() == maps(figure)[0].get_clim()


def test_dollars_and_backslashes_are_shown_as_typed(model, photo):
    text = r"a \$ $\frac and $ red"
    figure = model.explain(photo, text).figure()
    figure.savefig(io.BytesIO(), format="png")
    assert text in figure.get_suptitle()


def test_a_large_picture_is_drawn_at_the_size_of_its_tile(model):
    picture = Image.new("RGB", (1500, 1000))
    picture.paste((255, 255, 255), (750, 0, 1500, 1000))
    figure = model.explain(picture, "a dog").figure()
    shapes = {image.get_array().shape[:2] for ax in figure.axes[:4] for image in ax.images}
    assert shapes == {(341, 512)}
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert (shown[:, :250].max(), shown[:, 262:].min()) == (0, 255)


def test_the_figure_opens_no_window(model, photo, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it is an error now
    model.explain(photo, "a dog").figure().savefig(io.BytesIO(), format="png")
