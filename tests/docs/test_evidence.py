"""Pages of docs/explanation and docs/evidence: figures are those of committed results, formulas and commands hold."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from hf_distca.cli.main import main
from hf_distca.planner.cost import RowBytes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.name: path.read_text() for folder in ("explanation", "evidence") for path in (DOCS / folder).glob("*.md")
}
RESULTS = ROOT / "benchmarks" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script in it
    import result_tables

    yield result_tables
    sys.path.remove(str(ROOT / "benchmarks"))


def test_all_pages_have_the_figures_of_the_results(tables):
    texts = {page: page.read_text() for page in tables.PAGES}
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if tables.written(text) != text]
    assert not stale, "python benchmarks/result_tables.py writes their tables anew"
    assert {mark[1] for text in texts.values() for mark in tables.MARK.finditer(text)} == set(tables.TABLES)


def test_a_page_without_its_table_gets_it(tables):
    page = "before\n\n<!-- checkpointing -->\n\n<!-- checkpointing commands -->\nafter\n"
    written = tables.written(page)
    assert tables.table("checkpointing") in written
    assert "python benchmarks/checkpointing.py" in written
    assert tables.written(written) == written
    assert tables.written(written.replace("0.", "9.")) == written
    assert (written.startswith("before\n"), written.endswith("after\n")) == (True, True)


def test_every_table_of_the_benchmarks_page_has_its_commands():
    shown = re.findall(r"<!-- (\w+)( commands)? -->", PAGES["benchmarks.md"])
    made_by = {"chosen_networks": "chosen_data_sets", "planner_nodes": "planner"}
    for name in (name for name, commands in shown if not commands):
        if name != "planner":
            assert (made_by.get(name, name), " commands") in shown
    assert ("planner", " commands") in shown


def test_the_formula_gives_the_simulated_gains(tables):
    settings = result("typical_data")["settings"]
    assert {row["ranks"] for row in settings} == {8, 64}
    for row in settings:
        assert abs(tables.gain_by_formula(row) - row["over_plain"]) <= 0.02, row["documents"]
        ideal = (row["t"] * row["r"] + row["m"]) / (row["r"] + 1)
        assert ideal >= tables.gain_by_formula(row) - 1e-3


def test_gains_are_as_the_page_summarises_them():
    gains = {8: [], 64: []}
    for row in result("typical_data")["settings"]:
        gains[row["ranks"]].append(row["over_best_other_of_batches"]["median"])
    assert max(gains[8]) < 1.05  # "hardly anything to gain"
    assert max(gains[64]) > 1.2  # "large where a few documents are much longer"
    agents = [row for row in result("typical_data")["settings"] if row["documents"] == "agent traces"]
    assert all(row["over_best_other_of_batches"]["median"] < 1.02 for row in agents)


def test_rows_of_the_paper_that_are_equal_share_one(tables):
    _, *rows = tables.paper_tables()
    assert len({(row[0], row[1], row[3:]) for row in rows}) == len(rows)
    settings = result("paper_tables")["settings"]
    assert sum(len(row[2].split(", ")) for row in rows) * len({s["gpus"] for s in settings}) == len(settings)


def test_figures_in_sentences_are_those_of_the_results():
    page = PAGES["comparison.md"]
    killed = [result(name) for name in ("faults", "faults_nixl")]
    assert f"{sum(found['kills'] for found in killed)} attention servers were killed" in page
    assert sum(found["lost"] for found in killed) == 0
    assert f"{result('memory_loss')['loss_memory_ratio']:.2f} of the memory of all logits" in page
    equal, refused, unmade = map(
        int,
        re.search(
            r"(\d+) give the loss and gradients.*? (\d+) are refused.*? (\d+) cannot be built",
            (DOCS / "reference" / "compatibility.md").read_text(),
            re.S,
        ).groups(),
    )
    assert f"{equal} of transformers' {equal + refused + unmade} causal architectures" in page
    bytes_ratio = result("planner")["joint, at 0.001"]["bytes_total_ratio"]["median"]
    assert 0.4 < bytes_ratio < 0.55  # "about half of the bytes"


def cells(table):
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in table.strip().splitlines()]


def number(cell):
    return int(cell.replace(",", "") or 0)


def test_bytes_of_rows_add_up():
    page = PAGES["exchange.md"]
    sizes = {row[0]: number(row[2]) for row in cells(re.search(r"\| Q, O.*?(?=\n\n)", page, re.S)[0])}
    q, kv, lse = sizes.values()
    assert (q, kv, q) == (RowBytes().q, RowBytes().kv, RowBytes().o)
    size_of = {"Q": q, "O": q, "dO": q, "dQ": q, "K": kv // 2, "V": kv // 2, "dK": kv // 2, "dV": kv // 2}
    size_of["log-sum-exp"] = lse
    tables = re.findall(r"\| when \|.*?(?=\n\n)", page, re.S)
    assert len(tables) == 2
    for table in tables:
        _, _, *rows = cells(table)
        counted = {0: 0, 1: 0}
        for when, *pair_of_cells in rows:
            for side in (0, 1):
                names, size = pair_of_cells[2 * side : 2 * side + 2] if len(pair_of_cells) > 2 * side + 1 else ("", "")
                if when == "a step":
                    forward = (2 * q + lse, kv)[side] if table is tables[1] else 0
                    assert number(size) == counted[side] + forward
                elif names:
                    assert sum(size_of[name] for name in names.split(", ")) == number(size), when
                    counted[side] += number(size)


def shown_commands():
    for name, page in PAGES.items():
        for code in re.findall(r"^```\n(.*?)^```", page, re.S | re.M):
            for line in code.splitlines():
                if "hf-distca " in line:
                    yield pytest.param(shlex.split(line.split("hf-distca ")[1]), id=f"{name}: {line}")


@pytest.mark.parametrize("words", list(shown_commands()))
def test_options_of_commands_exist(words, capsys):
    with pytest.raises(SystemExit):
        main([words[0], "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("name", PAGES)
def test_scripts_that_are_named_exist(name):
    for path in re.findall(r"(?:benchmarks|examples|hf_distca|tests)/[\w/]+\.(?:py|json(?:\.gz)?)", PAGES[name]):
        if path not in ("benchmarks/results/gpu.json", "hf_distca/sim/profiles/h200.json"):  # are written on GPUs
            assert (ROOT / path).is_file(), path
