import contextlib
import io
import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

import hf_distca
from hf_distca.cli.main import main
from hf_distca.sim.report.drawing import COLOURS, MARKS, ticks
from hf_distca.sim.report.pictures import Series, lines, longest_shown
from hf_distca.sim.report.units import GIGABYTES, SHARE, TIMES, short
from tests.launch import cpu_environment

MOST_BYTES = 500_000
VOID = {"meta", "link", "input", "br", "hr", "img"}
TABLES_OF_A_SIMULATION = [
    "Documents and tokens by document length",
    "Core attention of the first micro-batch",
    "Core attention of each rank, seconds",
    "Seconds of the mean rank",
    "Speed-up by number of ranks",
    "Bytes of the busiest rank",
    "Rows and memory",
]


class Page(HTMLParser):
    """A report, read: every tag is closed where it must be, and every cell is known."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[dict[str, str], str]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "data":
            self.cells.append((dict(attributes), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "data":
            attributes, before = self.cells[-1]
            self.cells[-1] = attributes, before + text


def at(figures, path):
    for part in path.split("/"):
        figures = figures[int(part) if isinstance(figures, list) else part]
    return figures


def scale_of(path: str, text: str) -> float:
    """What 1 of the number that is shown is."""
    if re.search("rows_bytes|state_bytes", path):
        return 1e9
    if re.search("bytes|exchange_buffers|pairs", path):
        return 1e6
    return 0.01 if text.endswith("%") else 1.0


def check_cells(page: Page, figures: dict) -> None:
    """Every number that is shown is that of the JSON, rounded to its last digit."""
    for attributes, text in page.cells:
        value = at(figures, attributes["data-path"])
        assert str(value) == attributes["value"]
        if "data-scale" in attributes:
            assert float(attributes["data-scale"]) == scale_of(attributes["data-path"], text), attributes
            shown = re.fullmatch(r"(-?[\d,]+(?:\.(\d+))?)[%×]?", text)
            expected = value / float(attributes["data-scale"])
            digits = len(shown[2] or "")
            assert abs(float(shown[1].replace(",", "")) - expected) <= 0.500001 * 10.0**-digits, attributes
        else:
            assert text == value


def check_alone(text: str) -> None:
    """It needs nothing else, and is no larger than it may be."""
    assert len(text.encode()) <= MOST_BYTES
    assert "://" not in text.replace("http://www.w3.org/", "")
    assert not re.search(r"@import|url\(|<(script|img|iframe|link)[^>]* src=", text)


@pytest.fixture(scope="module")
def of_many_documents(tmp_path_factory):
    """(text, figures) of a report on ten thousand documents, and the seconds of a core that it took."""
    folder = tmp_path_factory.mktemp("report")
    lengths = np.random.default_rng(0).lognormal(8, 1.2, 10_000).astype(int).clip(1, 200_000)
    (folder / "lengths.json").write_text(json.dumps(lengths.tolist()))
    command = [sys.executable, "-m", "hf_distca.cli.main"]
    command += ["simulate", "--lengths", str(folder / "lengths.json"), "--ranks", "64", "--tokens-per-rank", "32768"]
    command += ["--batches", "32", "--balance-tolerance", "0.02", "--report", str(folder / "report.html"), "--json"]
    began = os.times()
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, check=True, timeout=280)
    ended = os.times()  # what other processes do does not count
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    return (folder / "report.html").read_text(encoding="utf-8"), json.loads(done.stdout), seconds


@pytest.fixture(scope="module")
def simulated(of_many_documents):
    """(text, figures) of a report."""
    return of_many_documents[:2]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "lengths.json").write_text(json.dumps([[3000, 500], [900], [40, 2000], [700]]))
    printed = run(
        "plan", "--lengths", str(folder / "lengths.json"), "--ranks", "4", "--tokens-per-rank", "4096",
        "--report", str(folder / "report.html"),
    )  # fmt: skip
    return (folder / "report.html").read_text(encoding="utf-8"), printed


def run(*options: str) -> dict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*options, "--json"]) == 0
    return json.loads(printed.getvalue())


@pytest.mark.parametrize("report", ["simulated", "planned"])
def test_numbers_are_those_of_the_json(report, request):
    text, figures = request.getfixturevalue(report)
    page = Page(text)
    assert len(page.cells) > 50
    check_cells(page, figures)
    carried = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1]
    assert json.loads(carried) == figures


@pytest.mark.parametrize("report", ["simulated", "planned"])
def test_a_report_is_one_file_that_needs_nothing_else(report, request):
    check_alone(request.getfixturevalue(report)[0])


@pytest.mark.parametrize("report", ["simulated", "planned"])
def test_pictures_are_told_to_those_who_do_not_see_them(report, request):
    tags = Page(request.getfixturevalue(report)[0]).tags
    pictures = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(pictures) >= 6
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    marks = sum(tag in ("rect", "circle") for tag, _ in tags)
    assert sum(tag == "title" for tag, _ in tags) == marks + 1
    tables = [attributes for tag, attributes in tags if tag == "table" and attributes.get("class") != "facts"]
    assert all(table["aria-label"] for table in tables)


def test_a_table_is_beside_every_picture(simulated):
    text, figures = simulated
    tables = [attributes.get("aria-label", "") for tag, attributes in Page(text).tags if tag == "table"]
    assert all(any(table.startswith(name) for table in tables) for name in TABLES_OF_A_SIMULATION)
    for section in re.findall(r"<section>.*?</section>", text, re.S):
        assert "<svg" not in section or "<table" in section
    paths = {attributes["data-path"] for attributes, _ in Page(text).cells}
    for index in range(len(figures["ways"])):
        assert {f"ways/{index}/{field}" for field in ("step_seconds", "attention_seconds", "rows_bytes")} <= paths
    ends = ("speed_up", "least", "most")
    gains = {f"{over}/{end}" for over in ("over_packing", "over_best") for end in ends}
    assert gains | {"attention_speed_up", "imbalance"} <= paths


def test_figures_of_a_simulation_add_up(simulated):
    _, figures = simulated
    for way in figures["ways"]:
        parts = ("attention_mean_seconds", "other_mean_seconds", "exchange_mean_seconds", "idle_seconds")
        assert sum(way[part] for part in parts) == pytest.approx(way["step_seconds"], rel=1e-6)
    assert sum(each["documents"] for each in figures["histogram"]) == figures["documents"]
    assert sum(each["tokens"] for each in figures["histogram"]) == figures["tokens"]
    names = [load["name"] for load in figures["load"]]
    assert (names[0], names[-1]) == ("plain packing", figures["best_planned"])
    for load in figures["load"]:
        assert len(load["attention_seconds"]) == 64
        assert max(load["attention_seconds"]) == pytest.approx(load["attention_most"], abs=1e-6)
    assert [point["ranks"] for point in figures["scaling"]] == [8, 16, 32, 64]
    assert figures["scaling"][-1]["speed_up"] == figures["speed_up"]


def test_settings_are_there_to_copy(simulated):
    text, figures = simulated
    (code,) = re.findall(r"<pre[^>]*>(args = .*?)</pre>", text, re.S)
    built = {}
    exec(unescape(code).replace("hf_distca.DistCATrainingArguments", "dict"), {}, built)
    assert built["args"]["tokens_per_rank"] == 32768
    assert built["args"]["balance_tolerance"] == 0.02
    assert built["args"].get("document_layout", "chosen") in figures["best_planned"]
    assert set(built["args"]) <= set(hf_distca.DistCATrainingArguments.__dataclass_fields__)


def test_figures_of_a_plan_are_those_of_its_ranks(planned):
    _, figures = planned
    ranks = figures["by_rank"]
    assert max(ranks["pairs"]) / (sum(ranks["pairs"]) / 4) == pytest.approx(figures["max_over_mean"])
    assert sum(ranks["pairs"]) == sum(ranks["pairs_packed"])
    assert sum(ranks["tokens"]) == sum(each["rows"] for each in figures["task_rows"]) == 7140
    assert sum(ranks["tasks"]) == sum(each["tasks"] for each in figures["task_rows"]) == figures["tasks"]
    assert sum(ranks["bytes_sent"]) == sum(ranks["bytes_received"]) == figures["bytes_total"]


def test_memory_is_counted_where_it_can_be(simulated):
    text, figures = simulated
    assert figures["memory_counted"]
    assert "run on fake tensors and counted" in text
    gathered = {way["name"]: way["rows_bytes"] for way in figures["ways"]}["context parallel, 1 × 64"]
    assert gathered > min(way["rows_bytes"] for way in figures["ways"])


def test_a_report_that_does_not_pay_says_so(tmp_path, capsys):
    (tmp_path / "lengths.json").write_text(json.dumps([512] * 10))
    options = ["--ranks", "2", "--tokens-per-rank", "4096", "--batches", "1", "--no-checkpointing"]
    options += ["--tensor-parallel", "2"]  # which is not counted
    report = str(tmp_path / "report.html")
    assert main(["simulate", "--lengths", str(tmp_path / "lengths.json"), *options, "--report", report]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>No gain expected: " in text
    assert "not known without checkpointing" in text


def test_ten_thousand_documents_on_64_ranks_in_less_than_a_minute(of_many_documents):
    _, figures, seconds = of_many_documents
    assert seconds < 60
    assert figures["documents"] > 10_000


def test_many_ranks_fit_in_a_file(tmp_path):
    path = tmp_path / "report.html"
    figures = run(
        "simulate", "--lengths", "wlbllm", "--ranks", "1024", "--tokens-per-rank", "16384", "--batches", "1",
        "--report", str(path),
    )  # fmt: skip
    text = path.read_text(encoding="utf-8")
    check_alone(text)
    check_cells(Page(text), figures)


def test_what_cannot_be_written(capsys):
    options = ["--ranks", "2", "--tokens-per-rank", "64", "--report", "/no/where/report.html"]
    assert main(["simulate", "--lengths", "prolong", *options]) == 2
    assert (
        "cannot write /no/where/report.html: there is no such folder; make the folder first" in capsys.readouterr().err
    )


def test_bars_that_are_far_too_long_are_broken_off():
    totals = {"a": 1.0, "b": 2.0, "c": 100.0, "none": 0.0}
    assert longest_shown(totals, ["a", "b"]) == 4
    assert longest_shown(totals, []) == longest_shown(totals, ["none"]) == np.inf


def test_how_numbers_are_written():
    assert (TIMES.text(1.275), SHARE.text(0.417), GIGABYTES.text(19.32e9)) == ("1.27×", "41.7%", "19.32")
    assert [short(count) for count in (512, 1024, 1536, 2**20)] == ["512", "1K", "1.5K", "1M"]
    assert ticks(38.4) == [0, 10, 20, 30, 40]
    assert ticks(2.966) == [0, 1, 2, 3]
    assert ticks(0) == [0, 1]
    assert ticks(1.3, least=0.9) == pytest.approx([0.9, 1.0, 1.1, 1.2, 1.3])


def test_the_axis_of_speed_ups_begins_at_nine_tenths():
    def first_tick(*speed_ups):
        drawing = lines([8, 16], [Series("the step", speed_ups, "planned")], TIMES, "ranks", 860)
        return re.search(r"<text[^>]*>([\d.]+)×", drawing.markup(""))[1]

    assert (first_tick(1.02, 1.31), first_tick(0.84, 1.0)) == ("0.9", "0.8")


def test_a_report_says_what_it_is_and_what_is_gained(simulated, planned):
    text, figures = simulated
    gains = [f"{figures[over]['speed_up']:.2f}×" for over in ("over_packing", "over_best")]
    title, under = re.search(r"<h1>(.*?)</h1>\s*<p class=\"predicted\">(.*?)</p>", text).groups()
    assert re.findall(r"[\d.]+×", title) == gains
    assert "Predictions, not measurements" in under
    assert "Predictions, not measurements" in planned[0]


def test_no_two_marks_have_the_same_colour():
    colours = [colour for name in MARKS for colour in COLOURS[name]]
    assert len(set(colours)) == len(colours)


def test_one_colour_has_one_meaning(simulated, planned):
    for text, _ in (simulated, planned):
        classes = {name for style in re.findall(r'class="mark ([^"]*)"', text) for name in style.split()}
        assert classes <= {*MARKS, "documents", "tokens"}
        assert "#" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", text, flags=re.S).replace("&#", "")
