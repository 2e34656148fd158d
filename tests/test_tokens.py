"""The layout of a stream's image tokens."""

import pytest

from vlcam.errors import RecipeError
from vlcam.tokens import ImageTokens

PLAIN = ImageTokens(("cls",), (2, 3))
DEIT = ImageTokens(("cls", "distillation"), (2, 3))
DINO = ImageTokens(("cls", "register", "register", "register"), (2, 3))
BOTH = ImageTokens(("cls", "distillation", "register"), (1, 2))
POOLED = ImageTokens((), (3, 2))
LAYOUTS = {"plain": PLAIN, "deit": DEIT, "dino": DINO, "both": BOTH, "pooled": POOLED}


@pytest.mark.parametrize(
    ("tokens", "count", "patches"),
    [
        (PLAIN, 7, range(1, 7)),
        (DEIT, 8, range(2, 8)),
        (DINO, 10, range(4, 10)),
        (BOTH, 5, range(3, 5)),
        (POOLED, 6, range(6)),
    ],
)
def test_patches_come_last_and_fill_the_grid(tokens, count, patches):
    assert tokens.count == count
    assert tokens.patches == patches
    assert tokens.chosen("patches") == patches


@pytest.mark.parametrize(
    ("tokens", "name", "wanted"),
    [
        (PLAIN, "cls", (0,)),
        (DEIT, "cls", (0,)),
        (DEIT, "distillation", (1,)),
        (DINO, "cls", (0,)),
        (DINO, "registers", (1, 2, 3)),
        (BOTH, "registers", (2,)),
        (ImageTokens(("register", "cls"), (1, 1)), "cls", (1,)),
    ],
)
def test_tokens_before_the_patches_are_found_by_name(tokens, name, wanted):
    assert tuple(tokens.chosen(name)) == wanted


@pytest.mark.parametrize(
    ("tokens", "exclude", "wanted"),
    [
        (PLAIN, (), range(7)),
        (PLAIN, ("cls",), range(7)),
        (PLAIN, ("cls", "registers"), range(7)),
        (DEIT, ("cls",), range(8)),
        (DEIT, ("cls", "registers"), range(8)),
        (DEIT, ("cls", "distillation"), (0, *range(2, 8))),
        (DINO, ("cls",), range(10)),
        (DINO, ("cls", "registers"), (0, *range(4, 10))),
        (DINO, ("cls", "distillation"), range(10)),
        (BOTH, ("cls", "registers"), (0, 1, 3, 4)),
        (BOTH, ("cls", "registers", "distillation"), (0, 3, 4)),
        (POOLED, ("cls", "registers", "distillation"), range(6)),
    ],
)
def test_all_is_shortened_by_registers_and_distillation_only(tokens, exclude, wanted):
    """The class token has no place on the grid, and yet belongs to `all`."""
    assert list(tokens.chosen("all", exclude)) == list(wanted)


@pytest.mark.parametrize("name", ["cls", "registers", "distillation", "patches"])
def test_exclusions_shorten_nothing_else(name):
    assert tuple(BOTH.chosen(name, ("cls", "registers", "distillation"))) == tuple(BOTH.chosen(name))


@pytest.mark.parametrize(
    ("tokens", "name", "there"),
    [
        (POOLED, "cls", "nothing"),
        (POOLED, "registers", "nothing"),
        (PLAIN, "registers", "'cls'"),
        (DEIT, "registers", "'cls', 'distillation'"),
        (DINO, "distillation", "'cls', 'register', 'register', 'register'"),
        (DINO, "register", "'cls', 'register', 'register', 'register'"),
        (PLAIN, "phrase", "'cls'"),
    ],
)
def test_a_token_that_is_not_there_is_refused_with_those_that_are(tokens, name, there):
    message = (
        rf"^'{name}': there is no such image token; before the patches there is {there}. Choose 'patches' or 'all'$"
    )
    with pytest.raises(RecipeError, match=message):
        tokens.chosen(name)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_is_found_once(layout):
    names = {"registers" if each == "register" else each for each in layout.prefix}
    parts = [index for name in (*names, "patches") for index in layout.chosen(name)]
    assert sorted(parts) == list(range(layout.count)) == list(layout.chosen("all"))
