"""Reports of simulate and plan: what they show."""

import html
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from hf_distca.cli.main import main
from hf_distca.cli.model import NAMES as OF_MEMORY
from hf_distca.cli.model import config_of_shape
from hf_distca.predict.shapes import ModelShape
from hf_distca.sim import report
from hf_distca.sim.drawing import COLOURS, MARKS, short, stacks_picture, ticks
from hf_distca.sim.report import POLICY, table_of_ranks
from tests.launch import ROOT

MOST_BYTES = 500_000


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Folder with simulate.html and plan.html."""
    folder = tmp_path_factory.mktemp("reports")
    lengths = np.random.default_rng(0).lognormal(8, 1.2, 2000).astype(int).clip(1, 60_000)
    for tool, documents, options in (
        (
            "simulate",
            lengths.tolist(),
            ["--ranks", "16", "--tokens-per-rank", "8192", "--batches", "2"],
        ),
        (
            "plan",
            [[3000, 500], [900], [40, 2000], [700]],
            ["--ranks", "4", "--tokens-per-rank", "4096"],
        ),
    ):
        (folder / "lengths.json").write_text(json.dumps(documents))
        config_of_shape(ModelShape.llama(3, 64, 160, 4, 2, 100)).save_pretrained(folder)
        options += ["--model", str(folder), "--device-memory", "0.04"] if tool == "plan" else []
        command = [tool, "--lengths", str(folder / "lengths.json"), *options]
        assert main([*command, "--report", str(folder / f"{tool}.html")]) == 0
    return folder


@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_a_report_is_one_file_with_labels_in_which_a_colour_has_one_meaning(reports, name):
    text = (reports / f"{name}.html").read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert "://" not in text
    assert POLICY in text
    assert not re.search(r"@import|url\(|<script|<(img|iframe|link)[^>]* src=", text)
    assert "Predictions, not measurements" in text

    # Every tag is closed: written as XML, the page can be read.
    page = ElementTree.fromstring(
        re.sub(r"<(meta|link)([^>]*)>", r"<\1\2/>", text.removeprefix("<!doctype html>"))
    )
    pictures = page.findall(".//svg")
    assert len(pictures) >= 3
    assert all(picture.get("role") == "img" and picture.get("aria-label") for picture in pictures)
    assert len(page.findall(".//title")) == len(page.findall(".//rect")) + 1
    assert all(
        table.get("aria-label") or table.get("class") == "facts" for table in page.iter("table")
    )

    # What is wider than a phone scrolls in a box of its own, so that the page does not.
    boxes = {child: box for box in page.iter("div") for child in box}
    wide = [*pictures, *(table for table in page.iter("table") if table.get("class") != "facts")]
    assert {boxes[element].get("class") for element in wide} == {"picture", "table"}
    for box in (".picture, .table", "pre"):
        assert re.search(rf"^{re.escape(box)} \{{[^}}]*overflow-x: auto;", text, re.M)

    classes = {
        name for style in re.findall(r'class="mark ([^"]*)"', text) for name in style.split()
    }
    assert classes <= {*MARKS, "documents", "tokens"}
    assert "#" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).replace("&#", "")


def test_bars_and_table_of_strategies_have_the_seconds_of_the_same_rank_and_names_come_first(
    reports,
):
    simulation = html.unescape((reports / "simulate.html").read_text())
    section = re.search("<h2>Strategies</h2>.*?</section>", simulation, re.S)[0]
    titles = re.findall(r'<th scope="col">([^<]+)</th>', section)  # the first column has none
    rows = re.findall(r'<th scope="row">([^<]+)</th>((?:<td>[^<]*</td>)+)', section)
    table = {
        name: dict(zip(titles, re.findall("<td>([^<]*)</td>", cells), strict=True))
        for name, cells in rows
    }
    assert {"plain packing", "hf_distca, chosen"} <= set(table)
    drawn = dict.fromkeys(table, 0.0)
    parts = {
        "core attention": "attention",
        "other layers": "other",
        "waits for rows of other ranks": "waits",
    }
    parts["idle until the slowest rank is done"] = "idle"
    for label in re.findall("<title>([^<]+)</title>", section):
        name, part, seconds = re.fullmatch("(.+), ([^,]+): (.+) s", label).groups()
        assert table[name][parts[part]] == seconds
        drawn[name] += float(seconds)
    for name, figures in table.items():
        # A bar that is far too long is broken off.
        whole = sum(float(figures[part]) for part in parts.values())
        assert float(figures["step, s"]) == pytest.approx(whole, abs=2.1e-3)
        assert drawn[name] == pytest.approx(whole) or section.count('class="break"')

    for term in ("Ulysses, 8 × 2: ", "Context parallel, 8 × 2: ", "Fixed: ", "Chosen: "):
        assert section.count(term) == 1
        assert section.index(term) < section.index("<svg")
    for term in ("MFU, model FLOPs utilization: ", "imbalance: core attention of the busiest rank"):
        assert section.count(term) == 1
    runs = {name: figures["runs today"] for name, figures in table.items()}
    assert runs["plain packing"] == runs["Ulysses, 1 × 16"] == "yes"
    assert runs["context parallel, 1 × 16"] == "no"
    assert runs["hf_distca, chosen"] == ""

    # Sizes that the text explains are those of strategies that are shown.
    explained = re.findall(r"(\w[\w ]+, \d+ × \d+): .*? ranks share their documents", simulation)
    assert len(explained) >= 2
    assert {name.lower() for name in explained} <= {name.lower() for name in table}
    # The title names a strategy of groups, and the sentence below explains its sizes.
    assert (
        report.meaning_of_sizes("context parallel, 2 × 8")
        == "Context parallel, 2 × 8: 2 groups of 8 ranks share their documents."
    )
    assert report.meaning_of_sizes("Ulysses, 1 × 4").endswith(
        ": one group of 4 ranks share their documents."
    )
    header = re.search("<header>.*?</header>", simulation, re.S)[0]
    assert header.count(" × ") in (0, 2)


@pytest.mark.parametrize(
    ("best", "over_packing", "pays", "title"),
    [
        (
            "Ulysses, 1 × 8", 1.354, True,
            "1.35× the speed of TRL's packing, 1.01× that of Ulysses, 1 × 8, the best alternative",
        ),
        (
            "Ulysses, 1 × 8", 1.0, False,
            "No gain expected: 1.00× the speed of TRL's packing, 1.01× that of Ulysses, 1 × 8, the "
            "best alternative",
        ),
        ("plain packing", 1.1, True, "1.10× the speed of TRL's packing, the best alternative"),
    ],
)  # fmt: skip
def test_the_title_has_the_speed_over_packing_and_over_the_best_other_strategy(
    best, over_packing, pays, title
):
    gains = {"over_packing": {"speed_up": over_packing}, "over_best": {"speed_up": 1.006}}
    assert report.headline({"best_plain": best, "pays": pays, **gains}) == title


def test_what_was_counted_is_what_the_report_says(reports):
    plan, simulation = (
        html.unescape((reports / f"{name}.html").read_text()) for name in ("plan", "simulate")
    )
    headings = re.search(r'<th scope="col">memory of a rank, GB</th>(.*?)</tr>', plan)[1]
    assert re.findall(r">([^<]+)<", headings) == ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
    assert re.search(r'<th scope="row">together</th>(<td>[\d.]+</td>){10}</tr>', plan)
    (memory,) = re.findall("<h2>Memory</h2>.*?</section>", plan, re.S)
    for part in OF_MEMORY.values():
        assert memory.count(f"{part}: ") == 1  # explained below the table
    launch = re.search(
        r"accelerate launch --config_file (\S+) --num_processes 16 train.py", simulation
    )
    assert "FSDP" in (ROOT / launch[1]).read_text()  # as memory was counted


@pytest.mark.parametrize("dark", [0, 1])
def test_colours_differ_and_stand_out_from_the_page(dark, subtests):
    def light(name):  # relative luminance, as WCAG defines it
        parts = [int(COLOURS[name][dark][place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len({COLOURS[name][dark] for name in MARKS}) == len(MARKS)
    least_contrasts = {name: 3.0 for name in MARKS if name != "idle"}
    least_contrasts |= {"ink": 4.5, "muted": 4.5}
    for name, least_contrast in least_contrasts.items():
        darker, lighter = sorted(map(light, (name, "page")))
        with subtests.test(name):
            assert (lighter + 0.05) / (darker + 0.05) >= least_contrast


@pytest.mark.parametrize(
    ("strong", "broken_bars"), [(["a", "b"], 1), ([], 0), (["none"], 0)], ids=str
)
def test_bars_that_are_far_longer_than_the_strong_ones_are_broken(strong, broken_bars):
    rows = {
        name: [(size, "other", "other")]
        for name, size in {"a": 1.0, "b": 2.0, "c": 5.0, "none": 0.0}.items()
    }
    picture = stacks_picture(rows, " s", strong).markup("bars")
    assert picture.count('class="break"') == 2 * broken_bars


def test_numbers_on_axes_and_of_ranks():
    assert [short(count) for count in (512, 1024, 1536, 2**20)] == ["512", "1K", "1.5K", "1M"]
    assert [ticks(most) for most in (38.4, 2.966, 0)] == [[0, 10, 20, 30, 40], [0, 1, 2, 3], [0, 1]]
    assert "<td>1.0</td>" in table_of_ranks("a", {"b": [1.0] * 256}, ".1f")
    assert table_of_ranks("a", {"b": [1.0] * 257}, ".1f") == ""  # they cannot be read


def test_a_range_of_one_value_is_that_value():
    assert report._least_to_most({"least": 1.352, "most": 1.349}) == "1.35×"
    assert report._least_to_most({"least": 1.2, "most": 1.35}) == "1.20× to 1.35×"
