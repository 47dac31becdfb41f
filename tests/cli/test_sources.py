"""Document lengths from files, data sets and distributions."""

import json

import datasets
import numpy as np
import pytest

SMALL = ["--ranks", "2", "--tokens-per-rank", "8"]


def test_tables_hold_lengths_or_tokens(run, tmp_path):
    for ending, write in (("csv", "to_csv"), ("jsonl", "to_json"), ("parquet", "to_parquet")):
        file = tmp_path / f"documents.{ending}"
        columns = {"length": [4, 4, 2, 6]} if ending == "csv" else {"input_ids": [[1] * n for n in (4, 4, 2, 6)]}
        getattr(datasets.Dataset.from_dict(columns), write)(file)
        assert "documents                      4, 16 tokens" in run("plan", "--lengths", str(file), *SMALL)[1]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", None, [], "no such file"),
        ("a.json", None, [], "cannot read"),
        ("a.csv", "", [], "expected a csv file (No columns to parse from file)"),
        ("a.csv", "text\nab", [], "has columns ['text'], but none of ['length', 'input_ids']; set --column"),
        ("a.csv", "text\nab", ["--column", "text"], "string; expected whole numbers of tokens, or lists of tokens"),
        ("a.csv", "length\n2.5", [], "column length holds double; expected whole numbers"),
        ("a.csv", "length\n3\n0", [], "column length: row 1 is 0, but a document has at least 1 token"),
        ("a.jsonl", '{"input_ids": [1]}\n{"input_ids": null}\n', [], "column input_ids is empty in row 1; leave such"),
        ("no/where", None, [], "/no/where': expected a .json, .csv, .jsonl or .parquet file, one of"),
        ("lognormal:0", None, [], "is not a distribution: expected lognormal:MEDIAN,SIGMA"),
        ("lognormal:nan,1", None, [], "the median must be from 1 to 1000000000 tokens, got nan"),
        ("lognormal:1000,9", None, [], "sigma must be above 0 and at most 3, got 9"),
        ("lognormal:1000,nan", None, [], "sigma must be above 0 and at most 3, got nan"),
        ("lognormal:1e12,9", None, [], "the median must be from 1 to 1000000000 tokens, got 1e+12"),
    ],
)
def test_sources_without_lengths(run, tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    source = name if name.startswith("lognormal") else str(tmp_path / name)
    status, _, error = run("plan", "--lengths", source, *SMALL, *options)
    assert (status, message in error) == (2, True), error


def test_micro_batches_are_drawn(figures, tmp_path):
    for source in ("prolong", "one-long", "lognormal:300,1"):
        drawn = []
        for seed in ("0", "0", "1"):
            setting = ["--lengths", source, "--ranks", "4", "--tokens-per-rank", "2k", "--seed", seed]
            figures("plan", *setting, "--dump", str(tmp_path / "dump"))
            nano_batches = json.loads((tmp_path / "dump").read_text())["nano_batches"]
            drawn.append([nano["lengths"] for nano in nano_batches])
        assert 4096 < sum(map(sum, drawn[0])) <= 8192
        assert drawn[0] == drawn[1] != drawn[2]
    datasets.Dataset.from_dict({"tokens": [300, 40, 5] * 100}).save_to_disk(tmp_path / "data")
    np.savetxt(tmp_path / "lengths.csv", [300, 40, 5], "%d", header="tokens", comments="")
    setting = ["--ranks", "2", "--tokens-per-rank", "1k", "--column", "tokens"]
    assert figures("plan", "--lengths", str(tmp_path / "data"), *setting)["tasks"] > 10
    of_file = ["--lengths", str(tmp_path / "lengths.csv"), *setting, "--batches", "1"]
    assert figures("simulate", *of_file)["documents"] > 10  # more than the file has
