"""The report's page in a real browser, from disk, with the network off."""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageChops

import vlcam
from vlcam import scenes

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `test` has playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path: apt-get install chromium"
)
HOSTILE = 'a מילה אחת "red" <script>alert(1)</script> \' circle </script> <img src=x onerror=alert(2)>'


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def scene():
    return next(scenes.generate(1, seed=7, start=1, objects=(2, 3), size=(192, 256)))


@pytest.fixture(scope="module")
def exps(scene, tmp_path_factory):
    blip, clip, vit = (vlcam.load(name) for name in ("tiny-blip-itm", "tiny-clip", "tiny-vit"))
    words = blip.explain(scene.image, scene.caption, layer=0)
    lean = words.save(tmp_path_factory.mktemp("lean") / "lean.png", embed_image=False)
    one = vit.explain(scene.image, target="red star")
    return {
        "words": words,
        "lean": vlcam.open(lean),
        "class": one,
        "crop": dataclasses.replace(one, placement=dataclasses.replace(one.placement, box=(32.0, 0.0, 224.0, 192.0))),
        "empty": dataclasses.replace(one, status="constant", tokens=np.ones((8, 8), np.float32)),
        "text": clip.explain(scene.image, scene.caption, "chefer-clip-text"),
        "tall": vit.explain(scene.image.resize((100, 300)), target="red star"),
        "hostile": blip.explain(scene.image, HOSTILE),
    }


@pytest.fixture
def opened(browser, exps, tmp_path):
    """Open a report; at the end nothing but the file was asked for, and the console is clean."""
    seen = SimpleNamespace(requests=[], complaints=[], context=None)

    def call(name, **how):
        file = exps[name].report().save(tmp_path / "report.html")
        seen.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
        seen.context.set_offline(True)
        page = seen.context.new_page()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.complaints.append(message.text))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (seen.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(file.as_uri())
        seen.file = file.as_uri()
        return page

    yield call
    seen.context.close()
    assert [url for url in seen.requests if not url.startswith("data:")] == [seen.file]
    assert seen.complaints == []


def shot(page):
    return Image.open(io.BytesIO(page.locator("#stage").screenshot())).convert("RGB")


def difference(one, other):
    return np.asarray(ImageChops.difference(one, other)).max()


def cell_centre(page, exp, row, column):
    area = page.locator("#stage").bounding_box()
    height, width = exp.placement.original
    x0, y0, x1, y1 = exp.placement.box
    rows, columns = exp.tokens.shape
    x = (x0 + (column + 0.5) / columns * (x1 - x0)) / width
    y = (y0 + (row + 0.5) / rows * (y1 - y0)) / height
    return area["x"] + x * area["width"], area["y"] + y * area["height"]


def told(page):
    return page.locator("#readout").inner_text()


def test_a_word_shows_its_map_under_pointer_focus_and_press(opened, exps):
    page = opened("words")
    whole = shot(page)
    words = list(exps["words"].words)
    star, square = (page.locator(f'.word[data-map="{words.index(word) + 1}"]') for word in ("star", "square"))
    assert star.inner_text() == "star"
    star.hover()
    assert page.locator(".layer:visible").get_attribute("data-map") == str(words.index("star") + 1)
    of_star = shot(page)
    assert difference(whole, of_star) > 20
    page.mouse.move(1270, 5)
    assert difference(whole, shot(page)) == 0

    square.focus()
    of_square = shot(page)
    assert difference(of_star, of_square) > 20
    page.keyboard.press("Enter")
    page.mouse.move(1270, 5)
    page.locator("#opacity").focus()
    assert difference(of_square, shot(page)) == 0
    assert square.get_attribute("aria-pressed") == "true"
    assert page.locator("#now").inner_text() == "square"
    page.locator("#whole").click()
    page.mouse.move(1270, 5)
    assert difference(whole, shot(page)) == 0
    assert square.get_attribute("aria-pressed") == "false"


def test_a_touch_shows_the_map_of_a_word_and_the_value_of_a_cell(opened, exps):
    exp = exps["words"]
    page = opened("words", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    number = list(exp.words).index("star") + 1
    page.locator(f'.word[data-map="{number}"]').tap()
    assert page.locator(".layer:visible").get_attribute("data-map") == str(number)
    page.locator("#stage").scroll_into_view_if_needed()
    page.touchscreen.tap(*cell_centre(page, exp, 2, 5))
    assert told(page).startswith("row 2, column 5 of star: ")
    assert np.float32(told(page).rpartition(": ")[2]) == exp.words["star"].tokens[2, 5]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("name", ["words", "class", "crop", "lean"])
def test_a_cell_shows_its_value_row_and_column(opened, exps, name):
    exp, page = exps[name], opened(name)
    for row, column in ((0, 0), (3, 6), (7, 7)):
        page.mouse.move(*cell_centre(page, exp, row, column))
        assert re.match(rf"row {row}, column {column}: ", told(page))
        assert np.float32(told(page).rpartition(": ")[2]) == exp.tokens[row, column]
    box, area = page.locator("#cell").bounding_box(), page.locator("#stage").bounding_box()
    x0, _, x1, _ = exp.placement.box
    width = exp.placement.original[1]
    assert box["width"] == pytest.approx(area["width"] * (x1 - x0) / width / 8, abs=1)
    page.mouse.move(1270, 5)
    assert told(page) == "Point at a cell of the map to see its value."
    page.locator("#stage").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert told(page).startswith("row 1, column 1: ")
    assert np.float32(told(page).rpartition(": ")[2]) == exp.tokens[1, 1]


def test_where_the_model_saw_nothing_there_is_no_value(opened):
    page = opened("crop")
    area = page.locator("#stage").bounding_box()
    page.mouse.move(area["x"] + 5, area["y"] + 20)
    assert told(page) == "The model saw nothing here."
    assert page.locator("#cell").is_hidden()


def test_the_slider_changes_how_opaque_the_map_is(opened, exps):
    page = opened("class")
    layers, slider = page.locator("#layers"), page.locator("#opacity")
    assert layers.evaluate("element => getComputedStyle(element).opacity") == "0.6"
    before = shot(page)
    slider.fill("0")
    assert page.locator("#percent").inner_text() == "0 %"
    bare = exps["class"].image.resize(before.size, Image.Resampling.BILINEAR)
    assert np.abs(np.asarray(shot(page), float) - np.asarray(bare, float)).mean() < 4
    slider.fill("100")
    assert difference(before, shot(page)) > 20


def test_a_class_has_no_words(opened):
    page = opened("class")
    assert page.locator(".word").count() == 0
    assert page.locator(".layer:visible").count() == 1
    assert page.locator("h1").inner_text() == "class 3: red star"


def test_a_file_without_its_image_shows_the_map_alone(opened):
    page = opened("lean")
    assert page.locator("#photograph").count() == 0
    assert page.locator("#opacity").count() == 0
    assert np.asarray(shot(page)).std() > 20
    page.locator(".word").first.hover()
    assert page.locator(".layer:visible").get_attribute("data-map") == "1"


def test_nothing_to_draw_is_said(opened):
    page = opened("empty")
    assert "every cell has the same value" in page.locator("#reason").inner_text()
    assert page.locator("img").count() == 0


def test_words_of_a_map_over_text_show_their_scores(opened, exps):
    page, words = opened("text"), exps["text"].word_scores
    spans = page.locator("#coloured span")
    assert spans.count() == len(words)
    for number in (5, 0):
        spans.nth(number).hover()
        word, _, score = page.locator("#score").inner_text().partition(": ")
        assert (word, np.float32(score)) == (words[number].word, np.float32(words[number].score))
    page.keyboard.press("Tab")
    spans.nth(1).focus()
    assert page.locator("#score").inner_text().startswith(f"{words[1].word}: ")
    assert page.locator(".layer").count() == 0


def test_a_hostile_caption_stays_text(opened, exps):
    page = opened("hostile")
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("script").count() == 3
    assert page.locator("img[src='x']").count() == 0
    assert page.locator("#words").inner_text() == HOSTILE
    assert (
        page.evaluate("JSON.parse(document.querySelector('script#record').textContent).provenance.text.given")
        == HOSTILE
    )
    assert page.locator("#paragraph").inner_text() == exps["hostile"].report().paragraph


def test_words_stand_in_the_order_of_their_script(opened):
    """Among words from left to right, those of a line in Hebrew go from right to left."""
    page = opened("hostile")
    first, second = (page.get_by_role("button", name=word, exact=True).bounding_box() for word in ("מילה", "אחת"))
    assert first["y"] == second["y"]
    assert first["x"] > second["x"]


def test_the_page_forbids_to_fetch_and_to_run_other_scripts(browser, exps, tmp_path):
    """The policy itself: what a page asks for, and a script that is put into it, are both refused."""
    page = browser.new_context().new_page()
    page.goto(exps["class"].report().save(tmp_path / "report.html").as_uri())
    assert page.evaluate("fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')") == "refused"
    page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
    }""")
    assert page.evaluate("window.ran === undefined")
    page.context.close()


def test_the_paragraph_is_copied(opened, exps):
    page = opened("class", permissions=["clipboard-read", "clipboard-write"])
    page.locator('[data-copy="paragraph"]').click()
    page.wait_for_function("document.getElementById('said').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == exps["class"].report().paragraph


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened, scheme):
    """4.5 to 1 for every piece of text, WCAG 2's ratio for normal sizes."""
    page = opened("words", color_scheme=scheme)
    poor = page.evaluate("""() => {
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = (element) => {
            for (let e = element; e; e = e.parentElement) {
                const found = numbers(getComputedStyle(e).backgroundColor);
                if (found.length < 4 || found[3] > 0) return found;
            }
            return [255, 255, 255];
        };
        return [...document.querySelectorAll('body *')]
            .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
            .map((e) => {
                const [a, b] = [luminance(numbers(getComputedStyle(e).color)), luminance(ground(e))];
                return [e.outerHTML.slice(0, 80), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
            })
            .filter(([, ratio]) => ratio < 4.5);
    }""")
    assert poor == []


def test_controls_and_pictures_have_names(opened):
    page = opened("words")
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, img, [role=group]')]
        .filter((e) => !(e.textContent.trim() || e.alt || e.ariaLabel || e.labels?.length
            || document.getElementById(e.getAttribute('aria-labelledby'))))
        .map((e) => e.outerHTML.slice(0, 80))""")
    assert nameless == []
    identifiers = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("width", [1280, 400])
def test_an_image_keeps_its_proportions(opened, width):
    area = opened("tall", viewport={"width": width, "height": 500}).locator("#stage").bounding_box()
    assert area["height"] / area["width"] == pytest.approx(3, rel=0.01)
