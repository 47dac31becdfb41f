import json

import datasets
import pytest
import torch

import hf_distca
from hf_distca.cli.main import main
from hf_distca.planner.micro_batch import plan_micro_batch
from tests.models_and_batches import small_model
from tests.survey.tiny import tiny_config

KEYS = [
    "max_over_mean",
    "tokens_max_over_mean",
    "bytes_total",
    "bytes_bottleneck",
    "bytes_within_nodes",
    "bytes_within_nodes_bottleneck",
    "bytes_within_nodes_busiest_node",
    "bytes_between_nodes",
    "bytes_between_nodes_bottleneck",
    "bytes_between_nodes_busiest_node",
    "link_seconds",
    "tasks",
    "min_rows",
    "tasks_below_block",
    "nano_batches",
    "stages",
    "exchange_buffers",
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
    assert plan([[4, 4], [2, 6]], 2, 8, "--document-layout", "fixed", "--balance-tolerance", "100", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == KEYS
    assert figures["max_over_mean"] == pytest.approx(24 / 22)
    assert figures["tokens_max_over_mean"] == 1.0
    assert figures["plan_ms"] > 0
    assert [figures[key] for key in KEYS[2:11]] == [0] * 9
    assert [figures[key] for key in KEYS[11:15]] == [4, 2, 4, 2]


def test_table_is_for_people(plan, capsys):
    assert plan([4, 4, 2, 6], 2, 8) == 0
    output = capsys.readouterr().out
    assert "documents                      4, 16 tokens" in output
    assert "attention, max / mean" in output


def test_dump_holds_documents_segments_and_tasks(plan, tmp_path):
    file = tmp_path / "dump.json"
    assert (
        plan([[4, 4], [8]], 2, 8, "--document-layout", "fixed", "--balance-tolerance", "100", "--dump", str(file)) == 0
    )
    assert json.loads(file.read_text()) == {
        "nano_batches": [
            {
                "documents": [0, 1, 2],
                "lengths": [4, 4, 8],
                "segments": [[0, 0, 4, 0, 0], [1, 0, 4, 0, 4], [2, 0, 8, 1, 0]],
                "tasks": [[0, 0, 4, 0], [1, 0, 4, 0], [2, 0, 8, 1]],
            }
        ]
    }


def test_dump_holds_both_nano_batches(plan, tmp_path):
    file = tmp_path / "dump.json"
    assert (
        plan([[4, 3], [2, 6]], 2, 8, "--document-layout", "fixed", "--balance-tolerance", "100", "--dump", str(file))
        == 0
    )
    first, second = json.loads(file.read_text())["nano_batches"]
    assert (first["documents"], first["segments"]) == ([0, 2], [[0, 0, 4, 0, 0], [1, 0, 2, 1, 0]])
    assert (second["documents"], second["segments"]) == ([1, 3], [[0, 0, 3, 0, 0], [1, 0, 6, 1, 0]])


def test_fixed_cuts_a_list_into_equal_shares(plan, tmp_path):
    file = tmp_path / "dump.json"
    assert plan([3, 7, 2], 4, 4, "--document-layout", "fixed", "--no-ping-pong", "--dump", str(file)) == 0
    (nano_batch,) = json.loads(file.read_text())["nano_batches"]
    segments = [[0, 0, 3, 0, 0], [1, 0, 3, 1, 0], [1, 3, 6, 2, 0], [1, 6, 7, 3, 0], [2, 0, 2, 3, 1]]
    assert nano_batch["segments"] == segments


def test_joint_places_the_documents_of_rows_itself(plan, capsys):
    assert plan([[4, 4, 4, 4], []], 2, 8, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_max_over_mean"] == 1.0


def test_shapes_scale_the_bytes(plan, capsys):
    lengths = [[8192], [128] * 64]
    totals = []
    for options in ((), ("--dtype", "float32"), ("--q-heads", "8", "--kv-heads", "2")):
        assert plan(lengths, 2, 8192, "--document-layout", "fixed", "--json", *options) == 0
        totals.append(json.loads(capsys.readouterr().out)["bytes_total"])
    assert totals[1:] == [2 * totals[0], totals[0] // 4]


def test_a_window_evens_out_long_documents(plan, capsys):
    assert plan([[8192], [128] * 64], 2, 8192, "--document-layout", "fixed", "--json", "--window", "1") == 0
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
        ([1, 0], (), "item 1 is 0, but a document has at least 1 token"),
        ([[1], [-4]], (), "row 1, item 0 is -4"),
        ([17], (), "1 documents hold 17 tokens, but 2 ranks of 8 take 16"),
        ([[9], [1]], ("--document-layout", "fixed"), "row 0 holds 9 tokens"),
        ([[1], [1], [1]], (), "holds 3 rows, but --ranks is 2"),
        ([10**30], (), "must be 64-bit integers"),
        ([2**40], (), "hold more than"),
        ([1], ("--kv-heads", "5"), "kv_heads must divide q_heads"),
        ([1], ("--window", "0"), "--window: must be a positive whole number, got '0'"),
        ([1], ("--head-dim", "x"), "--head-dim: must be a positive whole number, got 'x'"),
        (
            [1],
            ("--balance-tolerance", "-1"),
            "must be 0 or more (0.05 is 5 %), or 'auto', got '-1'",
        ),
        (
            [1],
            ("--balance-tolerance", "nan"),
            "or 'auto', got 'nan'",
        ),
        (
            [1],
            ("--balance-tolerance", "x"),
            "must be 0 or more (0.05 is 5 %), or 'auto', got 'x'",
        ),
        ([1], ("--balance-block-size", "0"), "balance_block_size must be positive, got 0"),
        ([1], ("--document-layout", "best"), "--document-layout: invalid choice: 'best'"),
        ([1], ("--ranks", "4", "--ranks-per-node", "3"), "ranks_per_node=3 does not divide the 4 ranks"),
        ([1], ("--ranks-per-node", "2,1"), "ranks_per_node=2,1 adds up to 3 ranks, but 2 ranks train"),
        ([1], ("--ranks-per-node", "x"), "ranks_per_node must be one number of ranks"),
        ([1], ("--network-bandwidth", "0"), "--network-bandwidth: must be a positive number of gigabytes, got '0'"),
        ([1], ("--attention-kernel", "auto"), "--attention-kernel: invalid choice: 'auto'"),
        ([1], ("--dtype", "int3"), "--dtype: invalid choice"),
        ([1], ("--dump", "/nonexistent/x"), "cannot write /nonexistent/x: there is no such folder"),
        ([1], ("--dump", "."), "cannot write .: it is a folder; name a file"),
        ([1], ("--tokens-per-rank", str(10**20)), "--tokens-per-rank: must be at most 134217728"),
        ([1], ("--window", str(10**20)), "--window: must be at most 2147483647"),
        ([1], ("--exchange-buffer-bytes", "1"), "--exchange-buffer-bytes 1 holds 0 rows of K and V"),
    ],
)
def test_bad_input_is_one_line_and_status_2(plan, capsys, lengths, options, message):
    assert plan(lengths, 2, 8, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "expected" in captured.err or len(captured.err) < 300


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ranks", "--ranks: must be a positive whole number"),
        ("--tokens-per-rank", "--tokens-per-rank: must be a positive whole number"),
    ],
)
def test_sizes_must_be_positive(plan, capsys, option, message):
    assert plan([1], 2, 8, option, "0") == 2
    assert message in capsys.readouterr().err


def test_rows_that_do_not_divide_the_ranks(plan, capsys):
    assert plan([[1], [1]], 3, 8, "--document-layout", "fixed") == 2
    assert "got 2 rows of documents for 3 ranks" in capsys.readouterr().err


def test_as_many_ranks_as_can_be_planned(plan, capsys):
    assert plan([1], 4097, 8) == 2
    assert "--ranks: must be at most 4096, got 4097" in capsys.readouterr().err


def test_many_ranks_need_many_tokens(plan, capsys):
    assert plan([262000], 1024, 32768) == 2
    assert "262000 tokens on 1024 ranks leave fewer than 8 blocks of 128 rows to each" in capsys.readouterr().err


CORPUS = [9000, 300, 4000, 1200, 70, 2500, 640, 3300, 128, 5000]


@pytest.mark.parametrize("layout", ["joint", "fixed"])
def test_the_plan_is_the_trainers(plan, tmp_path, layout):
    model = small_model()
    settings = {"tokens_per_rank": 8192, "document_layout": layout}
    arguments = hf_distca.DistCATrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    dataset = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in CORPUS]})
    trainer = hf_distca.DistCATrainer(model=model, args=arguments, train_dataset=dataset)
    config = hf_distca.DistCAConfig(**settings)
    own = {ranks: hf_distca.plan_settings(model, config, ranks=ranks, device=torch.device("cpu")) for ranks in (1, 4)}
    assert own[1] == trainer.dispatcher.settings

    file = tmp_path / "dump.json"
    sizes = "--q-heads 4 --kv-heads 2 --head-dim 8 --dtype float32 --attention-kernel cpu"
    assert plan(CORPUS, 4, 8192, "--document-layout", layout, "--dump", str(file), *sizes.split()) == 0
    shown = json.loads(file.read_text())["nano_batches"]
    planned = plan_micro_batch(CORPUS, own[4]).nano_batches
    assert len(shown) == len(planned) == 2
    for printed, nano in zip(shown, planned, strict=True):
        assert printed["documents"] == nano.documents.tolist()
        assert printed["segments"] == [list(segment) for segment in nano.layout.segments.tolist()]
        assert printed["tasks"] == [list(task) for task in nano.plans[own[4].dominant_kind].tasks.tolist()]


# A document of 8 rows on 4 ranks, each of which reads all rows before its own; a row of K and V is 8 bytes.
ONE_DOCUMENT = ["--document-layout", "fixed", "--balance-tolerance", "100", "--dtype", "float32"]
ONE_DOCUMENT += ["--q-heads", "1", "--kv-heads", "1", "--head-dim", "1"]


@pytest.mark.parametrize(
    ("ranks_per_node", "within", "between", "link_seconds"),
    [
        # Ranks receive 0, 2, 4 and 6 rows.
        ("1", (0, 0, 0), (96, 48, 48), 48 / 0.25e9),
        ("auto", (96, 48, 96), (0, 0, 0), 48e-9),
        ("4", (96, 48, 96), (0, 0, 0), 48e-9),
        # The first 4 rows cross to ranks 2 and 3, two to each, and are passed on there.
        ("2", (64, 32, 48), (32, 16, 32), 16 / 0.25e9),
        # The first 4 rows cross from the first node to rank 2, and to rank 3 as well, which gets 6.
        ("2,1,1", (16, 16, 16), (80, 48, 64), 48 / 0.25e9),
    ],
)
def test_bytes_within_nodes_and_between(plan, capsys, ranks_per_node, within, between, link_seconds):
    options = ["--ranks-per-node", ranks_per_node, "--node-bandwidth", "1", "--network-bandwidth", "0.25", "--json"]
    assert plan([8], 4, 2, *ONE_DOCUMENT, *options) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["bytes_total"], figures["bytes_bottleneck"]) == (96, 48)
    assert tuple(figures[key] for key in KEYS[4:7]) == within
    assert tuple(figures[key] for key in KEYS[7:10]) == between
    assert figures["link_seconds"] == pytest.approx(link_seconds)


def test_nodes_in_the_table(plan, capsys):
    # The same of a document of 1024 rows: what was 2 rows of 8 bytes is 256 of 4096.
    options = ["--document-layout", "fixed", "--balance-tolerance", "100", "--ranks-per-node", "2"]
    assert plan([1024], 4, 256, *options) == 0
    output = capsys.readouterr().out
    assert "bytes within nodes             4.19 MB, busiest rank 2.10 MB, busiest node 3.15 MB\n" in output
    assert "bytes between nodes            2.10 MB, busiest rank 1.05 MB, busiest node 2.10 MB\n" in output
    assert "busiest link, per layer        0.02 ms at 450 GB/s within and 50 GB/s between nodes\n" in output


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_tables_hold_lengths_or_tokens(capsys, tmp_path, ending):
    file = tmp_path / f"documents.{ending}"
    columns = {"length": [4, 4, 2, 6]} if ending == "csv" else {"input_ids": [[1] * n for n in (4, 4, 2, 6)]}
    getattr(datasets.Dataset.from_dict(columns), {"jsonl": "to_json"}.get(ending, f"to_{ending}"))(file)
    assert main(["plan", "--lengths", str(file), "--ranks", "2", "--tokens-per-rank", "8"]) == 0
    assert "documents                      4, 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (None, None, "no such file"),
        ("", None, "expected a csv file (No columns to parse from file)"),
        ("text\nab", None, "has columns ['text'], but none of ['length', 'input_ids']"),
        ("text\nab", "text", "string; expected whole numbers of tokens, or lists of tokens"),
        ("length\n2.5", None, "column length holds double; expected whole numbers"),
        ("length\n3\n0", None, "column length: row 1 is 0, but a document has at least 1 token"),
    ],
)
def test_tables_that_hold_none(capsys, tmp_path, content, column, message):
    file = tmp_path / "documents.csv"
    if content is not None:
        file.write_text(content)
    options = ["--ranks", "2", "--tokens-per-rank", "8", *(["--column", column] if column else [])]
    assert main(["plan", "--lengths", str(file), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_row_of_a_table(capsys, tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n{"input_ids": null}\n')
    assert main(["plan", "--lengths", str(file), "--ranks", "2", "--tokens-per-rank", "8"]) == 2
    assert "column input_ids is empty in row 1; leave such rows out" in capsys.readouterr().err


def test_an_unreadable_file(capsys, tmp_path):
    assert main(["plan", "--lengths", str(tmp_path / "no.json"), "--ranks", "1", "--tokens-per-rank", "1"]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_model().config.save_pretrained(folder)
    return str(folder)


def test_memory_of_a_model(plan, capsys, config):
    assert plan([4096], 2, 2048, "--model", config, "--dtype", "float32", "--device-memory", "0.1", "--json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    parameters = sum(p.numel() for p in small_model().parameters())
    assert list(memory) == ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
    ddp = memory["ddp"]
    assert (ddp["weights"], ddp["gradients"], ddp["optimizer"]) == (4 * parameters, 8 * parameters, 8 * parameters)
    plain, checkpointed = ddp["without_checkpointing"], ddp["with_checkpointing"]
    assert checkpointed["parts"]["kept O"] == 2 * 2048 * (32 + 4) * 4
    assert plain["total"] == sum(plain["parts"].values()) + 20 * parameters
    assert checkpointed["total"] < plain["total"] < 10**8
    assert 2048 < plain["longest_tokens_per_rank"] < checkpointed["longest_tokens_per_rank"]


def test_memory_as_a_table(plan, capsys, config):
    assert plan([4096], 2, 2048, "--model", f"{config}/config.json") == 0
    output = capsys.readouterr().out
    for line in ("memory of a rank, GB", "kept O and log-sum-exp", "together"):
        assert f"\n{line} " in output


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "llama4_text"])
def test_hybrids_and_experts(plan, capsys, tmp_path, model_type):
    tiny_config(model_type).save_pretrained(tmp_path)
    assert plan([60, 30, 20, 50], 2, 96, "--model", str(tmp_path), "--dtype", "float32", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["memory"]["ddp"]["without_checkpointing"]["total"] > 0
    if model_type != "llama4_text":
        assert figures["tokens_max_over_mean"] == 1.0
        cut = ["--model", str(tmp_path), "--document-layout", "joint", "--json"]
        assert plan([150, 30], 2, 96, *cut) == 0
        assert json.loads(capsys.readouterr().out)["memory"]["ddp"]["without_checkpointing"]["total"] > 0


def test_a_model_whose_documents_stay_whole(plan, capsys, tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    assert plan([60, 30], 2, 96, "--model", str(tmp_path), "--document-layout", "joint") == 2
    error = capsys.readouterr().err
    assert "would be wrong for a document that is cut" in error
    assert "set document_layout='whole'" in error
    assert plan([97, 30], 2, 96, "--model", str(tmp_path)) == 2
    assert "document 0 has 97 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "no model config at '/nowhere'"),
        (["--device-memory", "80"], "no model is given; add --model"),
        (["--device-memory", "none"], "must be a positive number of gigabytes"),
        (["--model", "/nowhere", "--q-heads", "4"], "--q-heads and --model both describe the model"),
        (["--model", "/nowhere", "--dtype", "float16"], "counted in bfloat16 or float32 only"),
    ],
)
def test_what_cannot_be_told_of_memory(plan, capsys, options, message):
    assert plan([64], 1, 64, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_one_document_travels_in_stages_through_small_buffers(plan, capsys):
    shapes = ["--q-heads", "1", "--kv-heads", "1", "--head-dim", "16", "--dtype", "float32"]
    assert plan([262144], 4, 65536, *shapes, "--exchange-buffer-bytes", str(1 << 20), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["stages"] >= 8
    # Six buffers for K and V, there and back; queries stay.
    assert figures["exchange_buffers"] <= 6 * (1 << 20) + 8 * 4096


def planned(capsys, *options) -> dict:
    assert main(["plan", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("source", ["prolong", "one-long", "lognormal:300,1"])
def test_a_micro_batch_is_drawn_of_a_distribution(source, tmp_path, capsys):
    def drawn(seed):
        dump = tmp_path / f"{seed}.json"
        planned(
            capsys, "--lengths", source, "--ranks", "4", "--tokens-per-rank", "2k", "--seed", seed, "--dump", str(dump)
        )
        return [nano["lengths"] for nano in json.loads(dump.read_text())["nano_batches"]]

    first = drawn("0")
    assert 4096 < sum(map(sum, first)) <= 8192
    assert drawn("0") == first != drawn("1")


def test_a_micro_batch_is_drawn_of_a_data_set(tmp_path, capsys):
    datasets.Dataset.from_dict({"tokens": [300, 40, 5] * 100}).save_to_disk(tmp_path / "data")
    options = ["--lengths", str(tmp_path / "data"), "--ranks", "2", "--tokens-per-rank", "1k"]
    assert planned(capsys, *options, "--column", "tokens")["tasks"] > 10
    assert main(["plan", *options, "--split", "train", "--column", "text"]) == 2
    assert "has columns ['tokens'], but none of ['text']" in capsys.readouterr().err


def test_nodes_have_eight_ranks_by_default(capsys):
    batch = ["--lengths", "one-long", "--ranks", "12", "--tokens-per-rank", "512"]
    default = planned(capsys, *batch)
    assert default["bytes_within_nodes"] > 0
    for key in ("bytes_within_nodes", "bytes_between_nodes"):
        assert default[key] == planned(capsys, *batch, "--ranks-per-node", "8,4")[key]
    assert planned(capsys, *batch, "--ranks-per-node", "1")["bytes_within_nodes"] == 0


def test_a_model_that_comes_along(capsys):
    options = ["--lengths", "prolong", "--ranks", "8", "--tokens-per-rank", "1k", "--model", "llama-8b"]
    weights = planned(capsys, *options)["memory"]["ddp"]["weights"]
    assert weights == pytest.approx(8.03e9 * 4, rel=0.01)


@pytest.mark.parametrize(
    ("tool", "defaults"),
    [
        ("plan", {"ping-pong": "auto", "keep-received": "off"}),
        ("simulate", {"ping-pong": "auto", "checkpointing": "on"}),
    ],
)
def test_on_and_off_options_show_their_defaults(tool, defaults, capsys):
    with pytest.raises(SystemExit):
        main([tool, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option, default in defaults.items():
        assert f"(default: {default})" in shown.split(f"--no-{option} ")[-1].split(" --")[0]
