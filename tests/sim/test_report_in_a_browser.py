"""Reports in a real browser: at desktop and phone width, light and dark, on paper, by keyboard."""

import json

import pytest

from hf_distca.cli.main import main
from tests.browser import needs_chromium

pytestmark = needs_chromium
TOLD = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
ASKED = "Network.requestWillBeSent"
OUTSIDE = """[...document.querySelectorAll('svg text')].filter((each) => {
  const own = each.getBoundingClientRect(), whole = each.closest('svg').getBoundingClientRect();
  return own.width && (own.left < whole.left - 2 || own.right > whole.right + 2);
}).map((each) => each.textContent)"""
"""Letters that stick out of their picture."""
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const least = (selector, property) => Math.min(...[...document.querySelectorAll(selector)].map((element) => {
    const own = light(getComputedStyle(element)[property]);
    return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
  }));
  return [least("p, dt, dd, th, td, summary, .legend li", "color"), least("svg text", "fill"),
          Math.min(least(".mark:not(.idle, .documents)", "fill"), least(".documents", "stroke"))];
})()"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    (folder / "lengths.json").write_text(json.dumps([[3000, 500], [900], [40, 2000], [700]]))
    simulate = ["simulate", "--lengths", "prolong", "--ranks", "64", "--tokens-per-rank", "8192", "--batches", "1"]
    assert main([*simulate, "--report", str(folder / "simulate.html")]) == 0
    plan = ["plan", "--lengths", str(folder / "lengths.json"), "--ranks", "4", "--tokens-per-rank", "4096"]
    assert main([*plan, "--report", str(folder / "plan.html")]) == 0
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_it_opens_and_fits(reports, chromium, tmp_path, name, width, dark):
    path = reports / f"{name}.html"
    chromium.open(path.as_uri(), width, dark)
    assert [event for event in chromium.events if event[0] in TOLD] == []
    assert [told["request"]["url"] for method, told in chromium.events if method == ASKED] == [path.as_uri()]
    assert chromium.value("innerWidth") == width
    assert chromium.value("document.documentElement.scrollWidth") <= width
    shown = chromium.value("[...document.querySelectorAll('svg')].filter((each) => each.clientWidth).length")
    assert shown * 2 == chromium.value("document.querySelectorAll('svg').length")
    assert chromium.value(OUTSIDE) == []
    text, letters, marks = chromium.value(CONTRAST)
    assert text >= 4.5
    assert letters >= 4.5
    assert marks >= 3
    chromium.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_marks_are_told_by_arrow_keys(reports, chromium):
    chromium.open((reports / "simulate.html").as_uri(), 1280, False)
    chromium.value("document.querySelector('.wide svg').focus()")
    chromium.key("ArrowRight")
    first = chromium.value("document.querySelector('.readout').textContent")
    assert "tokens: " in first
    chromium.key("ArrowRight")
    assert chromium.value("document.querySelector('.readout').textContent") not in ("", first)


def test_settings_are_copied(reports, chromium):
    chromium.open((reports / "simulate.html").as_uri(), 1280, False)
    chromium.value("document.querySelector('.code button').click()")
    told = "new Promise((done) => setTimeout(() => done(document.querySelector('.code button').textContent), 300))"
    assert chromium.value(told) in ("Copied", "Selected")


def test_it_prints(reports, chromium, tmp_path):
    chromium.open((reports / "simulate.html").as_uri(), 1280, True)
    chromium.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert chromium.value("[...document.querySelectorAll('details')].every((each) => each.open)")


def test_what_a_page_tells_is_heard(chromium, tmp_path):
    path = tmp_path / "loud.html"
    path.write_text("<script>console.error('no'); fetch('http://127.0.0.1:9/'); nothing()</script>")
    chromium.open(path.as_uri(), 390, False)
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= {method for method, _ in chromium.events}
    assert len([told for method, told in chromium.events if method == ASKED]) == 2
