import json

import pytest

from hf_distca.cli.main import main

KEYS = [
    "max_over_mean",
    "tokens_max_over_mean",
    "bytes_total",
    "bytes_bottleneck",
    "tasks",
    "min_rows",
    "tasks_below_block",
    "plan_ms",
]


@pytest.fixture
def plan(tmp_path):
    """Run `hf-distca plan` on some lengths (text, or anything that JSON can hold); returns the exit status."""

    def run(lengths, ranks, tokens, *options):
        file = tmp_path / "lengths.json"
        file.write_text(lengths if isinstance(lengths, str) else json.dumps(lengths))
        command = ["plan", "--lengths", str(file), "--ranks", str(ranks), "--tokens-per-rank", str(tokens)]
        try:
            return main([*command, *options])
        except SystemExit as exit_:
            return exit_.code

    return run


def test_json_is_one_object_with_the_figures(plan, capsys):
    assert plan([[4, 4], [2, 6]], 2, 8, "--layout", "fixed", "--tolerance", "1", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == KEYS
    assert figures["max_over_mean"] == pytest.approx(24 / 22)
    assert figures["tokens_max_over_mean"] == 1.0
    assert figures["plan_ms"] > 0
    assert [figures[key] for key in KEYS[2:7]] == [0, 0, 4, 2, 4]


def test_table_is_for_people(plan, capsys):
    assert plan([4, 4, 2, 6], 2, 8) == 0
    output = capsys.readouterr().out
    assert "documents                      4, 16 tokens" in output
    assert "attention, max / mean" in output


def test_dump_holds_documents_segments_and_tasks(plan, tmp_path):
    file = tmp_path / "dump.json"
    assert plan([[4, 4], [8]], 2, 8, "--layout", "fixed", "--tolerance", "1", "--dump", str(file)) == 0
    assert json.loads(file.read_text()) == {
        "documents": [4, 4, 8],
        "segments": [[0, 0, 4, 0, 0], [1, 0, 4, 0, 4], [2, 0, 8, 1, 0]],
        "tasks": [[0, 0, 4, 0], [1, 0, 4, 0], [2, 0, 8, 1]],
    }


@pytest.mark.parametrize(
    ("lengths", "segments"),
    [
        ([3, 6, 2], [[0, 0, 3, 0, 0], [1, 0, 1, 0, 3], [1, 1, 5, 1, 0], [1, 5, 6, 2, 0], [2, 0, 2, 2, 1]]),
        ([[6], [1, 2]], [[0, 0, 4, 0, 0], [0, 4, 6, 1, 0], [1, 0, 1, 2, 0], [2, 0, 2, 2, 1]]),
    ],
)
def test_fixed_cuts_a_list_and_a_row_over_several_ranks_where_a_rank_is_full(plan, tmp_path, lengths, segments):
    file = tmp_path / "dump.json"
    assert plan(lengths, 4, 4, "--layout", "fixed", "--dump", str(file)) == 0
    assert json.loads(file.read_text())["segments"] == segments


def test_joint_places_the_documents_of_rows_itself(plan, capsys):
    assert plan([[4, 4, 4, 4], []], 2, 8, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_max_over_mean"] == 1.0


def test_shapes_scale_the_bytes(plan, capsys):
    lengths = [[8192], [128] * 64]
    totals = []
    for options in ((), ("--dtype", "float32"), ("--q-heads", "8", "--kv-heads", "2")):
        assert plan(lengths, 2, 8192, "--layout", "fixed", "--json", *options) == 0
        totals.append(json.loads(capsys.readouterr().out)["bytes_total"])
    assert totals[1:] == [2 * totals[0], totals[0] // 4]


def test_a_window_evens_out_long_documents(plan, capsys):
    assert plan([[8192], [128] * 64], 2, 8192, "--layout", "fixed", "--json", "--window", "1") == 0
    assert json.loads(capsys.readouterr().out)["bytes_total"] == 0


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ("[1, 2", (), "is not JSON"),
        ("[" * 100_000, (), "is not JSON"),
        ({"a": 1}, (), "holds an object; expected a JSON list"),
        (3, (), "holds 3; expected"),
        ([], (), "holds no documents"),
        ([[], []], (), "holds no documents"),
        ([[1], 2], (), "mixes rows and lengths: item 0 is a list, item 1 is 2"),
        ([[[1]]], (), "row 0, item 0 is a list"),
        ([1, 2.0], (), "item 1 is 2.0, not a number of tokens"),
        ([1, "2"], (), 'item 1 is "2"'),
        ([True], (), "item 0 is true"),
        ([None], (), "item 0 is null"),
        ([1, 0], (), "item 1 is 0; a document has at least 1 token"),
        ([[1], [-4]], (), "row 1, item 0 is -4"),
        ([17], (), "1 documents hold 17 tokens, but 2 ranks of 8 take 16"),
        ([[9], [1]], ("--layout", "fixed"), "row 0 holds 9 tokens"),
        ([[1], [1], [1]], (), "holds 3 rows, but --ranks is 2"),
        ([10**30], (), "must be 64-bit integers"),
        ([2**40], (), "hold more than"),
        ([1], ("--kv-heads", "5"), "kv_heads must divide q_heads"),
        ([1], ("--window", "0"), "--window: must be a positive whole number, got '0'"),
        ([1], ("--head-dim", "x"), "--head-dim: must be a positive whole number, got 'x'"),
        ([1], ("--tolerance", "-1"), "--tolerance: must be a number from 0 on"),
        ([1], ("--tolerance", "nan"), "--tolerance: must be a number from 0 on"),
        ([1], ("--dtype", "int3"), "--dtype: invalid choice"),
        ([1], ("--dump", "/nonexistent/x"), "cannot write /nonexistent/x"),
    ],
)
def test_bad_input_is_one_line_and_status_2(plan, capsys, lengths, options, message):
    assert plan(lengths, 2, 8, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "expected" in captured.err or len(captured.err) < 300


@pytest.mark.parametrize("option", ["--ranks", "--tokens-per-rank"])
def test_sizes_must_be_positive(plan, capsys, option):
    assert plan([1], 2, 8, option, "0") == 2
    assert f"{option}: must be a positive whole number" in capsys.readouterr().err


def test_rows_that_do_not_divide_the_ranks(plan, capsys):
    assert plan([[1], [1]], 3, 8, "--layout", "fixed") == 2
    assert "got 2 rows of documents for 3 ranks" in capsys.readouterr().err


def test_an_unreadable_file(capsys, tmp_path):
    assert main(["plan", "--lengths", str(tmp_path), "--ranks", "1", "--tokens-per-rank", "1"]) == 2
    assert "cannot read" in capsys.readouterr().err
