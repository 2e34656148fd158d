"""The audit: what a table may hold, what is said of one that holds something else, and what is counted."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import vlcam
from vlcam.ambiguity import fitting_recipes
from vlcam.auditing import reading, schema
from vlcam.auditing.counting import adaptations
from vlcam.choices import GROUPS
from vlcam.errors import FileError, InputError
from vlcam.recipe import Recipe

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "audit_made_up.csv"
PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


def table(tmp_path, text, name="coded.csv", **encoding):
    path = tmp_path / name
    path.write_bytes(text.encode(**encoding))
    return path


def refused(tmp_path, text):
    with pytest.raises(InputError) as found:
        reading.read_file(table(tmp_path, text))
    return str(found.value)


def test_the_columns_are_those_of_the_checklist():
    assert set(schema.FIELDS) == set(Recipe.__dataclass_fields__) - {"name"}
    assert list(schema.FIELDS) == [field for fields in GROUPS.values() for field in fields]
    assert schema.COLUMNS[: len(schema.ABOUT)] == tuple(schema.ABOUT)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["no mark", "mark"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("separator", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_a_table_is_read_however_a_spreadsheet_wrote_it(tmp_path, mark, ends, separator):
    rows = [
        ["key", "Title", "basis", "site", "layers", "exclude", "weighting", "heads", "my notes"],
        ["a", 'Maps, they say; "and"\nmore', "cnn_paper", "f1|F6", "-1+-2", "CLS + registers", "gradcam++", "N/A", "x"],
        ["", "", "", "", "", "", "", "", ""],
        ["b", "Ünïcode", "other", "stated", "last|8+9", "none", "", "", ""],
    ]
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator=ends).writerows(rows)
    found = reading.read_file(table(tmp_path, mark + text.getvalue()))
    one, two = found.papers
    assert one.about["title"].replace("\r", "") == rows[1][1]
    assert two.about["title"] == "Ünïcode"
    assert (one.line, two.line) == (2, 5)
    assert one.cells["site"].values == ("F1", "F6")
    assert one.cells["layers"].values == ((-1, -2),)
    assert one.cells["exclude"].values == (("cls", "registers"),)
    assert one.cells["weighting"].values == ("gradcam++",)
    assert (one.cells["heads"].state, two.cells["heads"].state, one.cells["relu"].state) == (
        "n/a",
        "not stated",
        "not coded",
    )
    assert (two.cells["site"].state, two.cells["site"].values) == ("stated", ())
    assert two.cells["layers"].values == ("last", (8, 9))
    assert two.cells["exclude"].values == ((),)
    assert found.unknown == ("my notes",)
    assert one.extra == {"my notes": "x"}
    assert "relu" in found.missing
    assert "site" not in found.missing


def test_every_value_of_the_vocabulary_can_be_coded(tmp_path):
    for field in schema.FIELDS:
        words = schema.words_of(field) or ("0", "0.5")
        text = f'key,basis,{field}\na,other,"{"|".join(words)}"\n'
        (paper,) = reading.read_file(table(tmp_path, text)).papers
        assert len(paper.cells[field].values) == len(words), field


def test_all_problems_of_a_file_are_in_one_message(tmp_path):
    text = "\n".join(
        [
            "key,basis,year,site,layers,exclude,discard,relu",
            "a,cnn,2020,F7,last,cls,,",
            "a,other,20,F1,first,cls+patch,1.5,stated|none",
            ",other,2020,F1,1+1,cls,,",
            "d,other,2020",
        ]
    )
    message = refused(tmp_path, text)
    assert message.startswith("coded.csv: 11 problems\n")
    for part in (
        "line 2, column 'basis': 'cnn'; give one of 'cnn_paper', 'justified', 'code_only', 'other'",
        "line 2, column 'site': 'F7'",
        "give any of 'F1', 'F2'",
        "line 3, column 'key': 'a' is that of line 2, too",
        "line 3, column 'year': '20'; give four digits",
        "line 3, column 'layers': 'first'; give any of 'last', 'all', or whole numbers joined by '+'",
        "line 3, column 'exclude': 'cls+patch'",
        "line 3, column 'discard': '1.5'; give a share",
        "line 3, column 'relu': 'stated'",
        "line 4, column 'key': empty",
        "line 5: 3 cells, and the header has 8",
    ):
        assert part in message, part
    assert "line 4, column 'layers': '1+1'" in message


def test_of_many_problems_twenty_are_shown(tmp_path):
    message = refused(tmp_path, "key,basis,site\n" + "".join(f"p{n},other,F9\n" for n in range(25)))
    assert message.startswith("coded.csv: 25 problems\n")
    assert message.count("'F9'") == 20
    assert message.endswith("and 5 more")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no header"),
        ("\n\n", "no header"),
        ("key,basis\n", "no paper"),
        ("key,bases\na,other\n", "line 1, column 'basis': missing; the table needs 'key', 'basis'; is it 'bases'?"),
        ("key,basis,site,Site\na,other,F1,F2\n", "line 1, column 'site': stands 2 times"),
        ('key,basis\n"a,other\n', "line 2: no CSV"),
        ("key,basis,\na,other,left over\n", "line 2: 'left over' stands in a column without a name"),
        ("key,basis,weighting\na,other,gradcamm\n", "did you mean 'gradcam'?"),
    ],
)
def test_a_table_that_is_none_says_what_to_do(tmp_path, text, said):
    assert said in refused(tmp_path, text)


def test_other_encodings_and_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match="line 2: byte 0xfc is not UTF-8; save the table as CSV UTF-8"):
        reading.read_file(table(tmp_path, "key,basis\nü,other\n", encoding="latin-1"))
    with pytest.raises(FileError, match=r"none\.csv.*cannot be read"):
        reading.read_file(tmp_path / "none.csv")


def test_rows_in_memory_are_read_as_a_file_is():
    rows = [
        {"key": "a", "basis": "other", "year": 2024, "site": None, "layers": "last", "discard": 0.5, "mine": 1},
        {"key": "b", "basis": "justified", "year": math.nan},
    ]
    one, two = reading.read_rows(rows).papers
    assert one.about["year"] == "2024"
    assert one.cells["discard"].values == (0.5,)
    assert (one.cells["site"].state, two.cells["layers"].state) == ("not stated", "not stated")
    assert two.about["year"] == ""
    assert one.extra == {"mine": "1"}
    with pytest.raises(InputError, match="row 2, column 'basis'"):
        reading.read_rows([rows[0], {"key": "b"}])
    with pytest.raises(InputError, match="row 1: str; give mappings"):
        reading.read_rows(["a"])


@pytest.mark.parametrize(
    ("written", "architecture"),
    [
        ("ViT-B/16", "vit"),
        ("vit", "vit"),
        ("DeiT-S", "deit"),
        ("BEiT-L", "beit"),
        ("Swin-T", "swin"),
        ("Swin V2-T", None),
        ("swinv2", None),
        ("CLIP ViT-B/32", "clip"),
        ("CLIPSeg", None),
        ("BLIP", "blip"),
        ("BLIP caption, base", "blip caption"),
        ("BLIP-2", None),
        ("ResNet-50", None),
        ("", None),
    ],
)
def test_an_architecture_is_known_by_how_its_cell_begins(written, architecture):
    assert schema.architecture_of(written) == architecture


def test_every_architecture_has_an_embedded_model():
    assert {*schema.ARCHITECTURES.values(), schema.REFERENCE} <= set(vlcam.models())


LAST_F1 = {"site": "F1", "layers": "last", "weighting": "gradcam"}
"""Leaves open whose gradients are pooled, where negatives are removed, and on which scale the class is scored."""


def coded(count, start=0, **cells):
    return [{"key": f"p{start + n}", "basis": "other", "architecture": "ViT"} | LAST_F1 | cells for n in range(count)]


def test_the_published_totals_come_out_of_coded_rows(tmp_path):
    """Wall, Wang, Rizk and Santosh: of 175 papers 101, 26 and 17; 13 adaptations. What the rest does is not said."""
    names = [f"Adaptation {n}" for n in range(13)]
    rows = coded(101, basis="cnn_paper")
    rows += [row | {"adaptation": names[n % 13]} for n, row in enumerate(coded(26, 101, basis="justified"))]
    rows += coded(17, 127, basis="code_only") + coded(31, 144)
    rows[104]["adaptation"] = f"  {rows[104]['adaptation'].upper()} "
    path = tmp_path / "coded.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    found = vlcam.audit(path)
    assert len(found) == 175
    assert found.whole.basis == {"cnn_paper": 101, "justified": 26, "code_only": 17, "other": 31}
    assert len(found.adaptations) == 13
    printed = " ".join(str(found).split())
    for figure in ("175 papers", "cnn_paper 101 (58 %)", "justified 26 (15 %)", "code_only 17 (10 %)", "13 distinct"):
        assert figure in printed, figure
    record = found.to_dict()
    assert record["papers"] == 175
    assert record["basis"]["cnn_paper"] == {"papers": 101, "share": 101 / 175}
    assert record["adaptations"]["distinct"] == 13


def test_fields_groups_and_parts_are_counted_of_what_applies():
    rows = [
        {"key": "a", "basis": "other", "year": 2024, "venue": "X", **LAST_F1, "heads": "n/a", "relu": "map"},
        {
            "key": "b",
            "basis": "justified",
            "year": 2023,
            "venue": "X",
            **LAST_F1,
            "heads": "stated",
            "reshape": "raster",
        },
        {"key": "c", "basis": "justified", **LAST_F1, "layers": "", "upsample": "bilinear|bicubic", "normalize": "max"},
    ]
    rows[2] |= {"reshape": "raster"}
    found = vlcam.audit(rows)
    fields = {each.name: each for each in found.fields}
    heads, layers = fields["heads"], fields["layers"]
    assert (heads.stated, heads.not_stated, heads.not_applicable, heads.share) == (1, 1, 1, 1 / 2)
    assert (layers.stated, layers.not_stated, layers.share) == (2, 1, 2 / 3)
    assert (fields["exclude"].not_coded, fields["exclude"].share) == (3, None)
    groups = {each.name: each for each in found.groups}
    spatial = groups["spatial reconstruction"]
    assert (spatial.stated, spatial.not_stated, spatial.whole) == (4, 5, 1)
    for each in found.groups:
        own = [fields[name] for name in GROUPS[each.name]]
        assert each.stated == sum(field.stated for field in own)
        assert each.not_applicable == sum(field.not_applicable for field in own)
    assert [(part.name, part.papers) for part in found.years] == [("2023", 1), ("2024", 1), ("not given", 1)]
    assert [(part.name, part.papers, part.basis["justified"]) for part in found.venues] == [
        ("X", 2, 1),
        ("not given", 1, 1),
    ]
    assert found.venues[0].recipes == sum(row.recipes for row in found.rows[:2]) / 2
    assert "no column for 'stream'" in " ".join(found.notes)


def test_adaptations_are_told_apart_by_their_names_alone():
    rows = [{"key": str(n), "basis": "other", "adaptation": name} for n, name in enumerate(("A b", "a  B", "", "c"))]
    assert adaptations(reading.read_rows(rows).papers) == ("A b", "c")


def test_the_number_of_recipes_is_that_of_the_open_choices():
    """F1 and Grad-CAM on the last block of tiny-vit: 3 choices of tokens, 3 of the ReLU, 5 of the scale."""
    states = [{}, {"relu": "map"}, {"relu": "map|none"}, {"relu": "map", "scale": "logit", "gradient_tokens": "cls"}]
    rows = [row | more for row, more in zip(coded(4), states, strict=True)]
    for row, number in zip(vlcam.audit(rows).rows, (45, 15, 30, 1), strict=True):
        assert (row.model, row.recipes, row.assumed) == ("tiny-vit", number, False)
    first = vlcam.audit(rows).rows[0]
    assert dict(first.left_if_stated) == pytest.approx({"scale": 1 / 5, "gradient_tokens": 1 / 3, "relu": 1 / 3})
    assert first.best == "scale"
    assert "scale" in first.open
    assert "site" not in first.open


def test_the_share_that_is_left_is_that_of_a_recipe_drawn_at_random():
    """Every recipe in turn is the one that was meant: how many have its value?"""
    model = vlcam.load("tiny-vit")
    row = {"key": "a", "basis": "other", "site": "F1|F2", "layers": "last", "target": "class", "scale": "logit"}
    (found,) = vlcam.audit([row], model).rows
    description = vlcam.Description(site=["F1", "F2"], layers="last", target="class", scale="logit")
    recipes = fitting_recipes(model, description)
    assert found.recipes == len(recipes)
    assert "weighting" in found.left_if_stated
    assert "site" not in found.left_if_stated
    for field, left in found.left_if_stated.items():
        counts = Counter(getattr(recipe, field) for recipe in recipes)
        alike = [counts[getattr(recipe, field)] for recipe in recipes]
        assert left == pytest.approx(sum(alike) / len(alike) / len(recipes)), field


def test_a_field_stated_in_other_words_or_that_does_not_apply_has_one_value():
    rows = [
        row | more for row, more in zip(coded(3), ({"scale": "stated"}, {"gradient_tokens": "n/a"}, {}), strict=True)
    ]
    rows[2] |= {"scale": "stated", "gradient_tokens": "n/a", "relu": "stated"}
    found = vlcam.audit(rows).rows
    assert [row.recipes for row in found] == [9, 15, 1]
    assert [row.as_one for row in found] == [("scale",), ("gradient_tokens",), ("scale", "gradient_tokens", "relu")]
    assert "scale" not in found[0].left_if_stated


@pytest.mark.parametrize(
    ("layers", "same", "moved"),
    [("5", "last", False), ("11", "last", True), ("-1", "last", False), ("8+9+10+11", "-4+-3+-2+-1", True)],
)
def test_blocks_that_the_model_does_not_have_are_counted_as_its_last(layers, same, moved):
    one, other = vlcam.audit([row | {"layers": text} for row, text in zip(coded(2), (layers, same), strict=True)]).rows
    assert one.recipes == other.recipes > 0
    assert bool(one.note) == moved
    if moved:
        assert one.note == f"layers {layers}: the model has 6 blocks; counted as its last ones"


def test_more_blocks_than_the_model_has_are_all_of_them():
    rows = coded(2)
    rows[0]["layers"], rows[1]["layers"] = "+".join(map(str, range(12))), "all"
    one, other = vlcam.audit(rows).rows
    assert one.recipes == other.recipes > 0


def test_a_paper_that_no_recipe_fits_says_what_stands_in_the_way():
    rows = coded(3)
    rows[1] |= {"heads": "mean"}
    found = vlcam.audit(rows)
    assert found.rows[1].recipes == 0
    assert found.rows[1].note == (
        "no recipe has all of site, layers, weighting, heads as stated, and some would without heads=mean"
    )
    assert found.spread.papers == 2
    assert any("1 paper that no recipe fits" in note and "'p1'" in note for note in found.notes)
    alone = vlcam.audit(rows[1:2])
    assert alone.spread is None
    assert alone.to_dict()["recipes"] is None
    assert "recipes left open" not in str(alone)


def test_the_map_of_a_phrase_is_counted_where_a_paper_speaks_of_one():
    cross = {"stream": "fusion", "site": "CROSS", "layers": "last", "target": "itm", "weighting": "attention*gradient"}
    rows = [{"key": q, "basis": "other", "architecture": "BLIP", **cross, "queries": q} for q in ("phrase", "all")]
    rows.append(rows[0] | {"key": "both", "queries": "phrase|all"})
    phrase, whole, both = (row.recipes for row in vlcam.audit(rows).rows)
    assert phrase > 0
    assert both == phrase + whole


def test_models_stand_for_architectures_and_one_can_be_named_for_all():
    rows = [row | {"architecture": a} for row, a in zip(coded(3), ("Swin-T", "ResNet-50", ""), strict=True)]
    found = vlcam.audit(rows)
    assert [(row.model, row.assumed) for row in found.rows] == [
        ("tiny-swin", False),
        ("tiny-vit", True),
        ("tiny-vit", True),
    ]
    assert any(note.startswith("2 papers counted on tiny-vit") and "'ResNet-50'" in note for note in found.notes)
    for model in ("tiny-beit", vlcam.load("tiny-beit")):
        named = vlcam.audit(rows, model)
        assert [(row.model, row.assumed) for row in named.rows] == [("tiny-beit", False)] * 3
        assert not any("counted on" in note for note in named.notes)


def test_the_spread_is_that_of_the_numbers():
    states = ({}, {"relu": "map"}, {"relu": "map", "scale": "logit"}, {"relu": "none", "scale": "logit|margin"})
    spread = vlcam.audit([row | more for row, more in zip(coded(4), states, strict=True)]).spread
    # 45, 15, 3 and 6 in order are 3, 6, 15, 45: places 0.75, 1.5 and 2.25 of 0 to 3.
    assert (spread.least, spread.most, spread.papers) == (3, 45, 4)
    assert spread.quartiles == pytest.approx((3 + 0.75 * 3, (6 + 15) / 2, 15 + 0.25 * 30))
    assert spread.left_if_stated["relu"] == pytest.approx((1 / 3 + 1 + 1 + 1) / 4)
    assert spread.left_if_stated["scale"] == pytest.approx((1 / 5 + 1 / 5 + 1 + 1) / 4)


def test_a_column_that_is_not_known_is_kept_and_named():
    found = vlcam.audit([row | {"head": "mean of all", "who coded": "AB"} for row in coded(1)])
    assert any("'head'" in note and "did you mean 'heads'?" in note for note in found.notes)
    assert found.to_dict()["rows"][0]["extra"] == {"head": "mean of all", "who coded": "AB"}
    (line,) = csv.DictReader(io.StringIO(found.to_csv()))
    assert (line["who coded"], line["recipes"], line["key"]) == ("AB", "45", "p0")


def test_what_an_audit_writes_can_be_read_again(tmp_path):
    rows = coded(2, venue="A | B", task="<script>", year="2024")
    found = vlcam.audit(rows)
    path = found.save(tmp_path / "audit.json")
    assert json.loads(path.read_text()) == found.to_dict()
    with pytest.raises(FileError, match="exists already"):
        found.save(path)
    assert found.save(path, overwrite=True) == path
    with pytest.raises(FileError, match=r"ends in \.json"):
        found.save(tmp_path / "audit.txt")
    page = found.to_markdown()
    assert "| A \\| B | 2 |" in page
    assert "<script>" not in page.replace("\\<", "")
    for block in page.split("\n\n"):
        if block.startswith("|"):
            widths = {len(line.replace("\\|", "").split("|")) for line in block.splitlines()}
            assert len(widths) == 1, block


def test_the_figure_shows_what_was_counted():
    pytest.importorskip("matplotlib")
    rows = coded(3, basis="cnn_paper") + [row | {"heads": "n/a"} for row in coded(2, 3)]
    found = vlcam.audit(rows)
    made = found.figure("Made-up $rows$")
    assert made.get_suptitle() == "Made-up $rows$"
    fields, basis, recipes = made.axes
    labels = [label.get_text() for label in fields.get_yticklabels()]
    assert labels == [name for group, names in GROUPS.items() for name in (group, *names)]
    widths = Counter()
    for bar in fields.patches:
        widths[labels[round(bar.get_y() + bar.get_height() / 2)]] += bar.get_width()
    assert widths == dict.fromkeys(schema.FIELDS, 5)
    assert [bar.get_width() for bar in basis.patches] == [3, 0, 0, 2]
    assert sum(bar.get_height() for bar in recipes.patches) == 5
    assert recipes.get_xscale() == "log"
    assert found.figure().get_suptitle() == "rows: 5 papers"
    none = [row | {"heads": "mean"} for row in coded(1)]
    assert "no recipe fits any paper" in next(text.get_text() for text in vlcam.audit(none).figure().axes[2].texts)


def test_the_template_is_a_table_with_one_row(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("audit", "--template")[0] == 0
    path = tmp_path / "audit_template.csv"
    table = reading.read_file(path)
    assert (table.unknown, table.missing, len(table.papers)) == ((), (), 1)
    assert "#" not in path.read_text()
    code, _, err = run("audit", "--template")
    assert (code, "exists already" in err) == (1, True)
    assert run("audit", "--template", "--overwrite")[0] == 0
    assert run("audit", "mine.csv", "--template", "--out", tmp_path / "new")[0] == 0
    assert (tmp_path / "new" / "mine.csv").read_text() == path.read_text()
    code, _, err = run("audit", path)
    assert code == 0
    assert "1 paper in audit_template.csv" in err


def test_the_command_writes_tables_and_figure(run, tmp_path):
    pytest.importorskip("matplotlib")
    path = table(tmp_path, "key,basis,site,layers,weighting,relu\na,other,F1,last,gradcam,map\n")
    out = tmp_path / "out"
    code, printed, err = run("audit", path, "--out", out, "--json", "--model", "tiny-beit")
    assert code == 0
    found = json.loads(printed)
    assert sorted(file.name for file in out.iterdir()) == [
        "coded-audit-rows.csv",
        "coded-audit.json",
        "coded-audit.md",
        "coded-audit.png",
    ]
    assert json.loads((out / "coded-audit.json").read_text()) | {"files": found["files"]} == found
    assert found["rows"][0]["model"] == "tiny-beit"
    assert "recipes left open" in err
    code, printed, err = run("audit", path, "--out", out)
    assert (code, printed) == (1, "")
    assert "exists already" in err
    assert run("audit", path, "--out", out, "--overwrite")[0] == 0


def test_the_command_without_a_file_or_with_a_wrong_one_says_so(run, tmp_path):
    code, _, err = run("audit")
    assert (code, "vlcam audit --template makes one" in err) == (1, True)
    code, _, err = run("audit", table(tmp_path, "key,basis\na,cnn\n"))
    assert code == 1
    assert "line 2, column 'basis': 'cnn'" in err
    assert run("audit", tmp_path / "none.csv")[0] == 1
    code, _, err = run("audit", table(tmp_path, "key,basis\na,other\n"), "--model", "no-model")
    assert code == 2


def test_without_matplotlib_the_figure_is_left_out(run, tmp_path, monkeypatch):
    path = table(tmp_path, "key,basis,site,layers,weighting,relu\na,other,F1,last,gradcam,map\n")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, printed, err = run("audit", path, "--out", tmp_path / "out", "--json")
    assert code == 0
    assert "left out the figure" in err
    assert "figure" not in json.loads(printed)["files"]
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_the_example_says_that_it_is_made_up():
    found = reading.read_file(EXAMPLE)
    assert "made_up" in EXAMPLE.name
    assert (found.unknown, found.missing, len(found.papers)) == ((), (), 24)
    for number, paper in enumerate(found.papers, start=1):
        assert paper.key == f"made-up-{number:02d}"
        assert paper.about["title"] == f"Made-up paper {number}"
        assert paper.about["venue"].startswith("Made-up ")
        assert "made-up" in paper.about["adaptation"].lower() or not paper.about["adaptation"]
    assert "made up" in PAGE


def test_the_code_on_the_page_prints_what_it_says(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(code, "audit.md", "exec"), {})
    assert f"```text\n{re.sub(' +$', '', capsys.readouterr().out, flags=re.MULTILINE)}```" in PAGE


@pytest.mark.slow
def test_the_figures_of_the_example_on_the_page_are_true():
    assert " ".join(str(vlcam.audit(EXAMPLE)).split()) in " ".join(PAGE.split())


def test_the_page_has_every_column_and_every_basis():
    for column in schema.COLUMNS:
        assert f"`{column}`" in PAGE, column
    for name, meaning in schema.BASES.items():
        assert f"| `{name}` | {meaning} |" in PAGE, name
    for architecture, model in schema.ARCHITECTURES.items():
        assert f"`{model}`" in PAGE
        assert f"`{architecture}`" in PAGE.lower()


def test_a_venue_that_is_called_not_given_loses_no_paper():
    rows = [{"key": "a", "basis": "other", "venue": "not given"}, {"key": "b", "basis": "other"}]
    found = vlcam.audit([row | {"site": "F1", "layers": "last", "weighting": "gradcam"} for row in rows])
    assert found.to_dict()["venues"]["not given"]["papers"] == 2


def test_markdown_shows_names_as_they_are():
    model = vlcam.load("tiny-vit")
    model = vlcam.wrap(model.adapter.module, processor=model.adapter.processor, name="ViT-B | $16$")
    row = {"key": "~a~ $b$ & c", "basis": "other", "site": "F1", "layers": "last", "weighting": "gradcam"}
    text = vlcam.audit([row], model).to_markdown()
    assert r"(ViT-B \| \$16\$ 1)" in text
    assert r"| \~a\~ \$b\$ &amp; c | ViT-B \| \$16\$ |" in text


def test_a_folder_that_cannot_be_made_costs_no_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(vlcam, "audit", lambda *_: pytest.fail("counted before the folder was made"))
    (tmp_path / "file").write_text("")
    code, _, err = run("audit", EXAMPLE, "--out", tmp_path / "file")
    assert code == 1
    assert "cannot be made a folder" in err
