"""Words, tokens and phrases of a text."""

import pytest

from vlcam.errors import InputError
from vlcam.text import find_phrase, lay_out, phrase_spans


def laid(text, *chunks):
    """The layout of a text whose tokens are the given pieces of it, in order, between two special tokens."""
    spans, done = [], 0
    for chunk in chunks:
        start = text.index(chunk, done)
        done = start + len(chunk)
        spans.append((start, done))
    return lay_out(
        text,
        range(len(chunks) + 2),
        ["[ENC]", *chunks, "[SEP]"],
        [(0, 0), *spans, (0, 0)],
        [True, *[False] * len(chunks), True],
        truncated=chunks == () or done < len(text),
    )


def words_of(layout):
    return [(word.text, word.tokens) for word in layout.words]


@pytest.mark.parametrize(
    ("text", "chunks", "words"),
    [
        ("a red circle", ["a", "red", "circle"], [("a", (1,)), ("red", (2,)), ("circle", (3,))]),
        ("a zebrafish", ["a", "ze", "bra", "fish"], [("a", (1,)), ("zebrafish", (2, 3, 4))]),
        ("A  RED\t circle", ["A", "RED", "circle"], [("A", (1,)), ("RED", (2,)), ("circle", (3,))]),
        (" a dog ", ["a", "dog"], [("a", (1,)), ("dog", (2,))]),
        ("caf\u00e9 noir", ["caf", "\u00e9", "noir"], [("caf\u00e9", (1, 2)), ("noir", (3,))]),
        ("e\u0301clair noir", ["e\u0301clair", "noir"], [("e\u0301clair", (1,)), ("noir", (2,))]),
        ("the dog's bowl", ["the", "dog", "'", "s", "bowl"], [("the", (1,)), ("dog's", (2, 3, 4)), ("bowl", (5,))]),
        ("dog\u2019s", ["dog", "\u2019", "s"], [("dog\u2019s", (1, 2, 3))]),
        (
            "a red-haired man",
            ["a", "red", "-", "haired", "man"],
            [("a", (1,)), ("red-haired", (2, 3, 4)), ("man", (5,))],
        ),
        ("red, blue.", ["red", ",", "blue", "."], [("red", (1,)), ("blue", (3,))]),
        ("a - b", ["a", "-", "b"], [("a", (1,)), ("b", (3,))]),
        ("'red'", ["'", "red", "'"], [("red", (2,))]),
        ("route 66", ["route", "6", "6"], [("route", (1,)), ("66", (2, 3))]),
        ("\u732b dog", ["\u732b", "dog"], [("\u732b", (1,)), ("dog", (2,))]),
        ("... !", ["...", "!"], []),
        ("", [], []),
    ],
)
def test_pieces_are_grouped_into_words_as_typed(text, chunks, words):
    layout = laid(text, *chunks)
    assert words_of(layout) == words
    assert layout.cut == ()


def test_a_layout_keeps_text_tokens_and_spans():
    layout = laid("A dog", "A", "dog")
    assert layout.text == "A dog"
    assert layout.ids == (0, 1, 2, 3)
    assert layout.pieces == ("[ENC]", "A", "dog", "[SEP]")
    assert layout.spans == ((0, 0), (0, 1), (2, 5), (0, 0))
    assert layout.special == (True, False, False, True)
    assert [word.span for word in layout.words] == [(0, 1), (2, 5)]


def test_a_special_token_is_in_no_word_even_where_it_has_characters():
    layout = lay_out("a [SEP] dog", range(3), ["a", "[SEP]", "dog"], [(0, 1), (2, 7), (8, 11)], [False, True, False])
    assert layout.tokens_of((0, 11)) == (0, 2)
    assert layout.tokens_of((2, 7)) == ()
    assert words_of(layout) == [("a", (0,)), ("dog", (2,))]


@pytest.mark.parametrize(
    ("span", "tokens"),
    [
        ((0, 1), (1,)),
        ((2, 3), (2,)),
        ((2, 8), (2, 3)),
        ((4, 6), (2, 3)),
        ((1, 2), ()),
        ((0, 8), (1, 2, 3)),
        ((5, 5), ()),
    ],
)
def test_a_span_has_the_tokens_that_share_a_character_with_it(span, tokens):
    assert laid("a redder", "a", "red", "der").tokens_of(span) == tokens


@pytest.mark.parametrize(
    ("chunks", "words", "cut"),
    [
        (["a", "zebra", "fish", "swims"], ["a", "zebrafish", "swims"], ()),
        (["a", "zebra", "fish"], ["a", "zebrafish"], ("swims",)),
        (["a", "zebra"], ["a"], ("zebrafish", "swims")),
        ([], [], ("a", "zebrafish", "swims")),
    ],
)
def test_a_word_that_does_not_fit_wholly_is_cut(chunks, words, cut):
    layout = laid("a zebrafish swims", *chunks)
    assert [word.text for word in layout.words] == words
    assert layout.cut == cut
    assert layout.cut_text == " ".join(cut)


@pytest.mark.parametrize(
    ("text", "phrase", "spans"),
    [
        ("a red circle", "red circle", [(2, 12)]),
        ("a RED  \tcircle", "red Circle", [(2, 14)]),
        ("a red circle", "  red   circle ", [(2, 12)]),
        ("a redder rose", "red", []),
        ("the hundred", "red", []),
        ("a red_one", "red", []),
        ("a red-haired man", "red", [(2, 5)]),
        ("a red-haired man", "red-haired", [(2, 12)]),
        ("the dog's bowl", "dog", [(4, 7)]),
        ("the dog's bowl", "dog's bowl", [(4, 14)]),
        ("red, blue", "red", [(0, 3)]),
        ("'red' dot", "red", [(1, 4)]),
        ("a dog - a cat", "dog", [(2, 5)]),
        ("\u00c9clair noir", "\u00e9clair", [(0, 6)]),
        ("e\u0301clair", "e", []),
        ("1.5 dogs (two)", "(two)", [(9, 14)]),
        ("a.b", "a+b", []),
        ("red dot, red square", "red", [(0, 3), (9, 12)]),
    ],
)
def test_a_phrase_does_not_begin_or_end_inside_a_run_of_letters(text, phrase, spans):
    assert phrase_spans(text, phrase) == spans


SCENE = laid("A red dot and a RED  square", "A", "red", "dot", "and", "a", "RED", "squ", "are")


def test_a_phrase_is_found_whatever_its_case_and_blanks():
    span = find_phrase(SCENE, "red SQUARE")
    assert span == (16, 27)
    assert SCENE.tokens_of(span) == (6, 7, 8)


def test_a_missing_phrase_is_an_error_that_lists_the_words():
    message = "phrase 'blue' is not in the text 'A red dot and a RED  square'; its words are 'A', 'red', 'dot'"
    with pytest.raises(InputError, match=message):
        find_phrase(SCENE, "blue")


def test_part_of_a_word_is_not_found():
    with pytest.raises(InputError, match="phrase 'red' is not in the text"):
        find_phrase(laid("a redder rose", "a", "red", "der", "rose"), "red")


def test_words_out_of_order_are_not_a_phrase():
    with pytest.raises(InputError, match="is not in the text"):
        find_phrase(SCENE, "dot red")


def test_a_phrase_that_stands_twice_must_be_picked():
    with pytest.raises(InputError, match=r"stands 2 times in the text, at characters 2-5, 16-19; .*occurrence=1\.\.2"):
        find_phrase(SCENE, "red")
    assert find_phrase(SCENE, "red", 1) == (2, 5)
    assert find_phrase(SCENE, "red", 2) == (16, 19)


@pytest.mark.parametrize("occurrence", [0, -1, 3])
def test_an_occurrence_that_does_not_exist_is_refused(occurrence):
    with pytest.raises(InputError, match=f"occurrence={occurrence}: phrase 'red' stands 2 times"):
        find_phrase(SCENE, "red", occurrence)


def test_the_only_occurrence_may_be_named():
    assert find_phrase(SCENE, "dot", 1) == (6, 9)
    with pytest.raises(InputError, match=r"occurrence=2: phrase 'dot' stands 1 time"):
        find_phrase(SCENE, "dot", 2)


@pytest.mark.parametrize("phrase", ["", "  \t"])
def test_an_empty_phrase_is_refused(phrase):
    with pytest.raises(InputError, match="phrase is empty"):
        find_phrase(SCENE, phrase)


@pytest.mark.parametrize("phrase", ["swims", "zebrafish", "a zebrafish", "zebrafish swims"])
def test_a_phrase_behind_the_limit_is_refused_with_what_was_cut(phrase):
    layout = laid("a zebrafish swims", "a", "zebra")
    message = f"phrase '{phrase}' lies behind the model's limit: .*up to character 7, cut off were 'zebrafish', 'swims'"
    with pytest.raises(InputError, match=message):
        find_phrase(layout, phrase)


def test_of_two_occurrences_the_one_before_the_limit_can_be_read():
    layout = laid("a dog and a dog", "a", "dog", "and")
    assert find_phrase(layout, "dog", 1) == (2, 5)
    with pytest.raises(InputError, match="lies behind the model's limit"):
        find_phrase(layout, "dog", 2)
