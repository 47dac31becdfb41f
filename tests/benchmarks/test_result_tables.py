from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_have_the_figures_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    from result_tables import MARK, PAGES, TABLES, written

    texts = [page.read_text() for page in PAGES]
    assert [written(text) for text in texts] == texts
    assert {mark[1] for text in texts for mark in MARK.finditer(text)} == set(TABLES)
