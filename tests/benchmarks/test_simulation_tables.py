from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_figures_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    from simulation_tables import PAGE, page

    text = PAGE.read_text()
    assert text.count("<!-- ") == 4
    assert page(text) == text
    assert text.count("\n| ") > 40
