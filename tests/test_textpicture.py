"""Texts whose words are coloured."""

import html
import re

import numpy as np
import pytest

from vlcam import textpicture
from vlcam.colours import COLORMAPS, colourise
from vlcam.errors import InputError, UnknownNameError
from vlcam.textpicture import draw, words_html

TEXT = "a dog, asleep on the sofa"
SPANS = [match.span() for match in re.finditer(r"\w+", TEXT)]
VALUES = [0.0, 1.0, 0.3, 0.1, 0.05, 0.6]
PLAIN, LIGHT, DARK = textpicture._PLAIN, textpicture._LIGHT.ground, textpicture._DARK.ground


def expected(level, colormap="inferno"):
    return tuple(colourise(np.array([[level]]), colormap)[0, 0].tolist())


def box(picture, colour):
    """Where a colour stands, (left, top, right, bottom); None if nowhere."""
    rows, columns = np.nonzero((np.asarray(picture) == colour).all(-1))
    return (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else None


def boxes(picture, colours):
    found = [box(picture, colour) for colour in colours]
    assert None not in found
    return found


def blank(picture, ground=LIGHT):
    return (np.asarray(picture) == ground).all()


def test_every_word_stands_in_a_box_of_its_colour_in_the_order_of_the_text():
    picture = draw(TEXT, SPANS, VALUES)
    lefts = [left for left, *_ in boxes(picture, [expected(value) for value in VALUES])]
    assert lefts == sorted(lefts)
    assert (picture.mode, picture.width) == ("RGB", 900)


def test_the_hottest_word_is_the_brightest():
    picture = draw(TEXT, SPANS, VALUES)
    pixels = np.asarray(picture, np.float64)
    means = []
    for left, top, right, bottom in boxes(picture, [expected(value) for value in VALUES]):
        means.append(pixels[top:bottom, left:right].mean((0, 1)))
    reds = [mean[0] for mean in means]
    assert int(np.argmax(reds)) == VALUES.index(1.0)
    assert reds[5] > reds[2]


def test_colours_run_to_the_largest_score_whatever_its_size():
    small, large = (draw("a b", [(0, 1), (2, 3)], [scale, scale / 4]) for scale in (1e-300, 1e300))
    for picture in (small, large):
        boxes(picture, [expected(1.0), expected(0.25)])


def test_negative_scores_put_zero_in_the_middle():
    picture = draw("one two three", [(0, 3), (4, 7), (8, 13)], [-2.0, 0.0, 1.0])
    anchors = COLORMAPS["coolwarm"]
    boxes(picture, [anchors[0], anchors[2], anchors[3]])
    assert box(picture, anchors[-1]) is None


def test_the_page_is_like_the_colour_of_zero():
    assert draw(TEXT, SPANS, VALUES).getpixel((0, 0)) == DARK
    assert draw(TEXT, SPANS, [-1.0, *VALUES[1:]]).getpixel((0, 0)) == LIGHT


def test_a_colormap_may_be_named():
    picture = draw(TEXT, SPANS, VALUES, colormap="viridis")
    boxes(picture, [expected(value, "viridis") for value in VALUES])
    with pytest.raises(UnknownNameError, match="no colormap 'jet'"):
        draw(TEXT, SPANS, VALUES, colormap="jet")
    with pytest.raises(UnknownNameError, match="no colormap 'jet'"):
        words_html("", [], [], colormap="jet")


@pytest.mark.parametrize("value", [0.0, 3.5, -1.0])
def test_scores_that_are_all_the_same_give_plain_boxes(value):
    picture = draw(TEXT, SPANS, [value] * len(SPANS))
    assert picture.getpixel((0, 0)) == LIGHT
    assert box(picture, PLAIN)
    assert not any(box(picture, COLORMAPS[name][-1]) for name in ("inferno", "coolwarm"))


@pytest.mark.parametrize(
    ("colour", "text"),
    [((0, 0, 4), "white"), ((252, 255, 164), "black"), ((221, 221, 221), "black"), ((180, 4, 38), "white")],
)
def test_text_is_black_or_white_whichever_stands_out(colour, text):
    assert textpicture._readable(colour) == {"white": (255, 255, 255), "black": (0, 0, 0)}[text]


def test_outside_of_words_the_text_is_grey():
    assert np.array_equal(draw(TEXT, [], []), draw(TEXT, (), ()))
    pixels = np.asarray(draw(TEXT, [], []))
    assert not blank(pixels)
    assert pixels.min() >= min(textpicture._LIGHT.grey)


def test_scores_have_two_decimals_and_no_negative_zero():
    assert [textpicture._written(value) for value in (0.125, -1.5, -0.001, 1234.5, 1e300)] == [
        "0.12",
        "-1.50",
        "0.00",
        "1234.50",
        "1.00e+300",
    ]


def test_a_score_is_written_below_its_word():
    one, other = (np.asarray(draw("cat dog", [(0, 3), (4, 7)], [1.0, value])) for value in (0.5001, 0.5081))
    _, _, right, _ = box(one, expected(1.0))
    assert np.array_equal(one[:, :right], other[:, :right])
    assert not np.array_equal(one[64:], other[64:])


def test_lines_wrap_at_words():
    heights = [draw(TEXT, SPANS, VALUES, width=width).height for width in (900, 400, 250)]
    assert heights[0] < heights[1] < heights[2]
    picture = draw(TEXT, SPANS, VALUES, width=250)
    assert picture.width == 250
    tops = [top for _, top, *_ in boxes(picture, [expected(value) for value in VALUES])]
    assert tops == sorted(tops)
    assert tops[-1] > tops[0]


def test_a_comma_stays_with_its_word():
    words, _ = textpicture._words("dog, cat", [(0, 3), (5, 8)], [1, 0], None)
    wide = textpicture._body("dog,", words[:1], 28, 1000, 0).width
    for room, lines in ((wide, [["dog", ","], ["cat"]]), (wide - 1, [["dog"], [",", "cat"]])):
        found = textpicture._body("dog, cat", words, 28, room, 0).lines
        assert [[piece.text for _, piece in line] for line in found] == lines


def test_a_word_longer_than_the_line_has_a_line_of_its_own_and_is_not_cut():
    text = "a Donaudampfschifffahrtsgesellschaft b"
    picture = draw(text, [(0, 1), (2, 36), (37, 38)], [0.2, 1.0, 0.5], width=200)
    assert picture.width > 200
    (_, _, _, first), (_, top, right, bottom), (_, last, _, _) = boxes(
        picture, [expected(0.2), expected(1.0), expected(0.5)]
    )
    assert first <= top < bottom <= last
    assert right < picture.width - 20


def test_a_long_phrase_breaks_at_its_blanks():
    picture = draw("x " + "word " * 20, [(0, 1), (2, 101)], [0.5, 1.0], width=300)
    assert picture.width == 300
    _, top, _, bottom = box(picture, expected(1.0))
    assert bottom - top > 200


def test_words_without_blanks_between_break_where_the_line_ends():
    picture = draw("猫" * 40, [(index, index + 1) for index in range(40)], range(40), width=300)
    assert picture.width == 300


def test_blanks_and_newlines_are_kept():
    def left(text):
        start = text.index("b")
        return box(draw("c" + text, [(0, 1), (start + 1, start + 2)], [0.5, 1.0]), expected(1.0))[0]

    step = left("  b") - left(" b")
    assert step > 0
    assert left("   b") - left("  b") == step
    assert left("\n  b") - left("\n b") == step
    assert draw("a\nb", [], []).height > draw("a b", [], []).height
    assert draw("a\n\nb", [], []).height > draw("a\nb", [], []).height
    assert np.array_equal(draw("a\r\nb", [], []), draw("a\nb", [], []))


def test_a_box_does_not_take_the_blanks_at_the_ends_of_a_span():
    assert np.array_equal(draw("a cat b", [(0, 1), (1, 6)], [0, 1]), draw("a cat b", [(0, 1), (2, 5)], [0, 1]))


def test_a_newline_in_a_span_parts_its_box():
    picture = draw("hot\ndog x", [(0, 7), (8, 9)], [1.0, 0.0])
    _, top, _, bottom = box(picture, expected(1.0))
    assert bottom - top > 2 * 28
    assert draw("a\n\nb c", [(0, 4), (5, 6)], [1.0, 0.0]).height > picture.height


@pytest.mark.parametrize(
    "text",
    [
        "é",
        "e\u0301",
        "猫",
        "🐈",
        "🐈\u200d⬛",
        "Ǖ",
        "ﬁn — “x” … €",
        "\ud800",
        "\x00",
        "\u200b",
        "\u0301",
        "שלום",
        "\xa0",
        " ",
    ],
)
def test_any_character_can_be_drawn(text):
    picture = draw(f"a {text} b", [(0, 1), (2, 2 + len(text))], [0.5, 1.0], apart={text: 1.0}, title=text)
    assert box(picture, expected(1.0))
    assert draw(text, [], [])


def test_characters_that_the_font_lacks_are_told_apart():
    pictures = [
        np.asarray(draw(text, [], [])).tobytes() for text in ("e", "é", "è", "ê", "猫", "犬", "🐈", "🐕", "ç", "c")
    ]
    assert len(set(pictures)) == len(pictures)
    assert np.array_equal(draw("é", [], []), draw("e\u0301", [], []))


def test_what_stands_apart_is_listed_below():
    without = draw(TEXT, SPANS, VALUES)
    listed = draw(TEXT, SPANS, VALUES, apart={"start": 0.12, "end": 0.55, "padding": 0})
    assert textpicture._listed({"start": 0.12, "end": 0.55, "padding": 0}) == (
        "apart: start 0.12, end 0.55, padding 0.00"
    )
    assert listed.height > without.height
    kept = without.height - 26
    assert np.array_equal(np.asarray(listed)[:kept], np.asarray(without)[:kept])
    assert not blank(np.asarray(listed)[kept:], DARK)


def test_a_title_stands_above():
    without, titled = np.asarray(draw(TEXT, SPANS, VALUES)), np.asarray(draw(TEXT, SPANS, VALUES, title="Attention"))
    added = len(titled) - len(without)
    assert added > 28
    assert np.array_equal(titled[added + 26 :], without[26:])
    assert draw(TEXT, SPANS, VALUES, title="long " * 80).width == 900


@pytest.mark.parametrize("size", [1, 5, 12, 28, 80])
@pytest.mark.parametrize("width", [1, 900])
def test_any_size(size, width):
    picture = draw(TEXT, SPANS, VALUES, size=size, width=width, title="t", apart={"end": 1.0})
    assert picture.width >= width
    assert picture.height > size


def test_a_larger_size_makes_larger_boxes():
    (_, a, _, b), (_, c, _, d) = (box(draw(TEXT, SPANS, VALUES, size=size), expected(1.0)) for size in (20, 40))
    assert 1.9 < (d - c) / (b - a) < 2.1


def test_nothing_is_an_empty_page():
    assert blank(draw("", [], []))


def test_pictures_repeat_and_the_order_of_spans_does_not_matter():
    options = {"apart": {"end": 0.5}, "title": "again"}
    first = draw(TEXT, SPANS, VALUES, **options).tobytes()
    assert draw(TEXT, SPANS, VALUES, **options).tobytes() == first
    assert draw(TEXT, SPANS[::-1], VALUES[::-1], **options).tobytes() == first
    assert draw(TEXT, SPANS, np.array(VALUES), **options).tobytes() == first


@pytest.mark.parametrize("make", [draw, words_html])
@pytest.mark.parametrize(
    ("spans", "values", "message"),
    [
        ([(0, 1)], [], "1 spans, but 0 values"),
        ([(0, 26)], [1.0], r"span \(0, 26\) is no range of characters of a text of 25"),
        ([(-1, 1)], [1.0], r"span \(-1, 1\)"),
        ([(3, 3)], [1.0], r"span \(3, 3\)"),
        ([(3, 2)], [1.0], r"span \(3, 2\)"),
        ([(2, 5), (0, 3)], [1.0, 2.0], r"spans \(0, 3\) and \(2, 5\) overlap"),
        ([(0, 1), (0, 1)], [1.0, 2.0], "overlap"),
        ([(0, 1), (2, 5)], [1.0, float("nan")], "value 1 is nan"),
        ([(0, 1)], [float("-inf")], "value 0 is -inf"),
    ],
)
def test_wrong_spans_and_values_are_refused(make, spans, values, message):
    with pytest.raises(InputError, match=message):
        make(TEXT, spans, values)


@pytest.mark.parametrize("make", [draw, words_html])
def test_what_stands_apart_is_finite(make):
    with pytest.raises(InputError, match="value 'end' is nan"):
        make(TEXT, SPANS, VALUES, apart={"end": float("nan")})


@pytest.mark.parametrize("lengths", [{"size": 0}, {"width": 0}, {"size": -3}])
def test_lengths_are_positive(lengths):
    with pytest.raises(InputError, match="at least 1"):
        draw(TEXT, SPANS, VALUES, **lengths)


def test_html_has_the_text_and_the_scores():
    text = "a  dog,\nasleep & well"
    made = words_html(text, [(3, 6), (8, 14)], [0.25, 1.0], apart={"end": 0.5})
    assert re.findall(r'title="([^"]*)">([^<]*)</span>', made) == [("0.25", "dog"), ("1", "asleep")]
    assert html.unescape(re.sub(r"<[^>]*>", "", made)) == f"{text}apart: end 0.50"
    assert "white-space:pre-wrap" in made
    assert "background:#fcffa4;color:#000000" in made
    assert (made.count("<div"), made.count("<span")) == (made.count("</div>"), made.count("</span>"))


def test_html_is_escaped():
    text = "<script>alert('x')</script> <b>"
    made = words_html(text, [(0, 8), (28, 31)], [1.0, 2.0], apart={"<i>": 1.0})
    assert "<script" not in made
    assert "&lt;script&gt;" in made
    assert "<b>" not in made
    assert "<i>" not in made
    assert "&lt;i&gt;" in made


def test_html_of_negative_scores_is_on_a_light_page():
    made = words_html("a b c", [(0, 1), (2, 3), (4, 5)], [-1.0, 0.0, 1.0])
    assert re.findall(r"background:(#\w{6})", made) == ["#ffffff", "#3b4cc0", "#dddddd", "#b40426"]
    assert words_html("", [], []).endswith("></div>")
