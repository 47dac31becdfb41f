import gzip
import json
import sys
from dataclasses import replace
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from transformers import MistralConfig, PreTrainedConfig

import hf_distca
from hf_distca.cli.model import CASES, memory_rows, memory_table
from hf_distca.cli.offload_report import offload_lines
from hf_distca.collator import texts
from hf_distca.memory.counter import MemoryCounter
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import LinkCost, Links
from tests.models_and_batches import SMALL as SMALL_MODEL
from tests.models_and_batches import small_model
from tests.survey.tiny import tiny_config
from tests.trainer.chats import tokenizer

BYTES = [
    f"bytes_{where}_nodes{figure_suffix}"
    for where in ("within", "between")
    for figure_suffix in ("", "_bottleneck", "_busiest_node")
]
KEYS = [
    *(
        "max_over_mean",
        "tokens_max_over_mean",
        "bytes_total",
        "bytes_bottleneck",
        *BYTES,
        "link_seconds",
    ),
    *(
        "tasks",
        "min_rows",
        "tasks_below_block",
        "pods",
        "nano_batches",
        "stages",
        "plan_ms",
        "advice",
        "exchange_buffers",
        "plan",
    ),
]
FIXED = {"document_layout": "fixed"}
UNBALANCED = {**FIXED, "planning": {"balance_tolerance": 100, "ping_pong": True}}
FLOAT32 = ("--profile", "cpu")
"""Costs of float32."""


@pytest.fixture
def command(tmp_path):
    """Return the command that plans these lengths: text, or anything that JSON can hold.

    An option that is a dictionary is written to the file of --config.
    """

    def in_file(arguments) -> list[str]:
        (tmp_path / "arguments.json").write_text(json.dumps(arguments))
        return ["--config", str(tmp_path / "arguments.json")]

    def command(lengths, ranks, tokens, *options) -> list[str]:
        file = tmp_path / "lengths.json"
        file.write_text(lengths if isinstance(lengths, str) else json.dumps(lengths))
        return [
            "plan",
            "--lengths",
            str(file),
            "--ranks",
            str(ranks),
            "--tokens-per-rank",
            str(tokens),
            *chain.from_iterable(
                in_file(option) if isinstance(option, dict) else [option] for option in options
            ),
        ]

    return command


@pytest.fixture
def planned_model(tmp_path, monkeypatch):
    """Save a config; returns the options that plan its model, whose memory is not counted."""
    monkeypatch.setattr("hf_distca.cli.model.memory_of", lambda *_: {})
    monkeypatch.setattr("hf_distca.cli.model.exchange_buffers_of", lambda _: 0)

    def planned_model(config: PreTrainedConfig) -> list[str]:
        config.save_pretrained(tmp_path / "model")
        return ["--model", str(tmp_path / "model")]

    return planned_model


@pytest.fixture
def planned(figures):
    """Run a command that plans and return the tables of its nano-batches."""
    return lambda *command: figures(*command)["plan"]


def test_figures(command, figures):
    planned = figures(*command([[4, 4], [2, 6]], 2, 8, UNBALANCED))
    assert list(planned) == KEYS
    assert planned["max_over_mean"] == pytest.approx(24 / 22)
    assert planned["tokens_max_over_mean"] == 1.0
    nothing_moves = ("bytes_total", "bytes_bottleneck", *BYTES, "link_seconds")
    assert {name: planned[name] for name in nothing_moves} == dict.fromkeys(nothing_moves, 0)
    assert planned["tasks"] == 4
    assert planned["min_rows"] == 2
    assert planned["tasks_below_block"] == 4
    assert planned["nano_batches"] == 2
    assert planned["plan_ms"] > 0
    # The planner places the documents of rows itself.
    assert figures(*command([[4, 4, 4, 4], []], 2, 8))["tokens_max_over_mean"] == 1.0
    # Nodes have eight ranks by default.
    batch = ["plan", "--lengths", "one-long", "--ranks", "12", "--tokens-per-rank", "512"]
    default = figures(*batch)
    given = figures(*batch, "--ranks-per-node", "8,4")
    assert default["bytes_within_nodes"] > 0
    assert [default[key] for key in BYTES] == [given[key] for key in BYTES]


def test_json_holds_documents_segments_and_tasks(command, planned):
    (nano_batch,) = planned(*command([[4, 4], [8]], 2, 8, UNBALANCED))
    documents = {
        "first_rank": 0,
        "documents": [0, 1, 2],
        "lengths": [4, 4, 8],
        "tasks": [[0, 0, 4, 0], [1, 0, 4, 0], [2, 0, 8, 1]],
    }
    assert nano_batch == documents | {
        "segments": [[0, 0, 4, 0, 0], [1, 0, 4, 0, 4], [2, 0, 8, 1, 0]]
    }
    first, second = planned(*command([[4, 3], [2, 6]], 2, 8, UNBALANCED))
    assert first["documents"] == [0, 2]
    assert first["segments"] == [[0, 0, 4, 0, 0], [1, 0, 2, 1, 0]]
    assert second["documents"] == [1, 3]
    assert second["segments"] == [[0, 0, 3, 0, 0], [1, 0, 6, 1, 0]]
    # A plain list is cut into equal shares.
    (nano_batch,) = planned(*command([3, 7, 2], 4, 4, {**FIXED, "planning": {"ping_pong": False}}))
    cut = [[1, 0, 3, 1, 0], [1, 3, 6, 2, 0], [1, 6, 7, 3, 0]]
    assert nano_batch["segments"] == [[0, 0, 3, 0, 0], *cut, [2, 0, 2, 3, 1]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ("[" * 100_000, (), "is not JSON"),
        ({"a": 1}, (), "found {'a': 1}, not a list of lengths; expected a JSON list"),
        ([[], []], (), "holds no documents"),
        ([[1], 2], (), "row 1: found 2, not a list"),
        ([1, 2.0], (), "item 1 is 2.0"),
        ([True], (), "item 0 is True"),
        ([[1], [0]], (), "row 1: item 0 is 0"),
        ([17], (), "1 document of 17 tokens, but 2 ranks of 8 rows hold 16"),
        ([[9], [1]], (FIXED,), "row 0 holds 9 tokens"),
        ([[1], [1], [1]], (), "holds 3 rows, but --ranks is 2"),
        ([[1], [1]], (FIXED, "--ranks", "3"), "holds 2 rows, but --ranks is 3"),
        ([10**30], (), "must be 64-bit integers"),
        ([2**40], (), "hold more than"),
        ([1], ("--ranks", "16385"), "--ranks: must be at most 16384, got 16385"),
        (
            [1],
            ({"planning": {"balance_tolerance": "nan"}},),
            "member balance_tolerance must be 0 or more (0.05 is 5 %), or 'auto', got 'nan'",
        ),
        (
            [1],
            ({"planning": {"balance_block_size": 0}},),
            "planning member balance_block_size must be positive, got 0",
        ),
        ([1], ({"attention_servers": 2},), "sets attention_servers, but ranks alone are planned"),
        ([1], ({"gradient_checkpointing": "on"},), "must be true or false, got 'on'"),
        ([1], ({"attention_kernel": "fast"},), "attention_kernel must be one of"),
        ([1], ("--config", "/nowhere"), "cannot read /nowhere: No such file or directory"),
        ([1], ("--profile", "/nowhere"), "no device profile at '/nowhere'"),
        (
            [1],
            ("--ranks-per-node", "2,1"),
            "ranks_per_node=2,1 adds up to 3 ranks, but 2 ranks train",
        ),
        ([1], ("--report", "/nowhere/x"), "cannot write /nowhere/x: there is no such folder"),
        (
            [1],
            ({"planning": {"exchange_buffer_bytes": 1}},),
            "exchange_buffer_bytes=1 holds 0 rows of K and V",
        ),
        ([1], ("--model", "/nowhere"), "no model config at '/nowhere'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, run, lengths, options, message):
    status, output, error = run(*command(lengths, 2, 8, *options))
    assert status == 2
    assert output == ""
    assert message in error
    assert error.count("\n") == 1
    assert "expected" in error or len(error) < 300


@pytest.mark.parametrize("layout", ["auto", "fixed"])
def test_the_plan_is_the_trainers(command, planned, planned_model, tmp_path, layout):
    """With the costs of the profile that both read, and without checkpoints of layers."""
    model = small_model()
    corpus = [9000, 300, 4000, 1200, 70, 2500, 640, 3300, 128, 5000]
    settings = {"tokens_per_rank": 8192, "document_layout": layout, "device_profile": "cpu"}
    training = {**settings, "gradient_checkpointing": False, "learning_rate": 1e-4}
    shown = planned(*command(corpus, 4, 8192, training, *planned_model(model.config)))
    arguments = hf_distca.DistCATrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings
    )
    dataset = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in corpus]})
    trainer = hf_distca.DistCATrainer(model=model, args=arguments, train_dataset=dataset)
    of_one, of_four = (
        hf_distca.describe_run(
            model,
            hf_distca.DistCAConfig(**settings, ranks_per_node=ranks),
            ranks=ranks,
            device=torch.device("cpu"),
        )
        for ranks in (1, 4)
    )
    assert of_one.plans == trainer.dispatcher.settings
    in_training = of_four.with_profile(DeviceProfile.load("cpu")).plans
    expected = plan_micro_batch(corpus, in_training)
    assert expected.choice is not None
    assert len(shown) == len(expected.nano_batches)
    for printed, nano in zip(shown, expected.nano_batches, strict=True):
        assert printed["documents"] == nano.documents.tolist()
        assert printed["segments"] == [list(segment) for segment in nano.layout.segments.tolist()]
        assert printed["tasks"] == [
            list(task) for task in nano.plans[in_training.dominant_kind].tasks.tolist()
        ]


def test_pods_are_planned_each_by_itself(command, figures, run):
    in_pods = command([2000] * 14, 4, 8192, {"ranks_per_node": 2, "planning": {"pod_ranks": 2}})
    found = figures(*in_pods)
    assert found["pods"] == 2
    assert {table["first_rank"] for table in found["plan"]} == {0, 2}
    assert sorted(chain(*(table["documents"] for table in found["plan"]))) == list(range(14))
    assert {segment[3] for table in found["plan"] for segment in table["segments"]} == {0, 1}
    assert found["tokens_max_over_mean"] < 1.2
    output = run(*in_pods)[1]
    assert "\npods                           2 of 2 ranks\n" in output
    assert "14 of 28,000 tokens" in output


def test_the_file_of_arguments_is_read_as_yaml_and_options_come_first(
    command, run, figures, tmp_path
):
    file = tmp_path / "train.yaml"
    file.write_text(
        "output_dir: runs\ntokens_per_rank: 1k\nranks_per_node: [1, 3]\nlearning_rate: 1e-4\n"
        "planning: {balance_block_size: 64}\n"
    )
    of_file = ["plan", "--lengths", "one-long", "--ranks", "4", "--config", str(file)]
    status, output, _ = run(*of_file)
    assert status == 0
    assert "\nsettings of --config           tokens_per_rank, ranks_per_node, planning\n" in output
    assert "4 ranks of at most 1,024 tokens" in output
    assert "tasks below 64 rows" in output
    assert "bytes between nodes" in output
    output = run(*of_file, "--ranks-per-node", "4", "--tokens-per-rank", "2k")[1]
    assert "4 ranks of at most 2,048 tokens" in output
    assert "bytes between nodes" not in output
    for content, message in (
        ("a: [", "train.yaml is neither YAML nor JSON"),
        ("just text", "train.yaml holds no arguments"),
        ("tokens_per_rank: 200M", "tokens_per_rank must be at most 134217728"),
        ("learning_rate: 1", "--tokens-per-rank is missing"),
    ):
        file.write_text(content)
        status, _, error = run(*of_file)
        assert status == 2
        assert message in error
        assert error.count("\n") == 1


def test_costs_decide_the_plan_and_links_its_seconds(command, figures, tmp_path):
    """A slow network keeps documents on their ranks."""
    profile = DeviceProfile.load("h100")
    slow = LinkCost(1e-3, 1e6)
    replace(profile, exchange=Links(slow, slow)).save(tmp_path / "slow.json")
    corpus = command([4000, 3000, 2000, 1000, 500, 400], 4, 8192)
    fast_plan, slow_plan = (
        figures(*corpus, "--profile", name) for name in ("h100", str(tmp_path / "slow.json"))
    )
    assert slow_plan["bytes_total"] == 0
    fixed = command([8192], 4, 2048, FIXED)
    seconds = [
        figures(*fixed, "--profile", name)["link_seconds"]
        for name in ("h100", str(tmp_path / "slow.json"))
    ]
    assert seconds[1] > 1000 * seconds[0] > 0
    assert fast_plan["tokens_max_over_mean"] >= 1


def test_bytes_follow_shapes_and_windows(command, figures, planned_model, tmp_path):
    as_set = {**FIXED, "planning": {"balance_tolerance": 0.01, "ping_pong": True}}
    fixed = command([[8192], [128] * 64], 2, 8192, as_set)

    def bytes_total(*options):
        return figures(*fixed, *options)["bytes_total"]

    total = bytes_total()  # of 32 query heads and 8 key-value heads of 128 numbers
    h100 = DeviceProfile.load("h100")
    replace(h100, dtype="float32").save(tmp_path / "float32.json")
    assert bytes_total("--profile", str(tmp_path / "float32.json")) == 2 * total
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    assert bytes_total(*planned_model(small_model(**heads).config)) == total // 4
    windows = MistralConfig(**SMALL_MODEL, sliding_window=1)
    assert bytes_total(*planned_model(windows)) == 0


@pytest.mark.parametrize(
    ("ranks_per_node", "expected_rows", "busiest_rows", "bandwidth"),
    [
        # Ranks receive 0, 2, 4 and 6 rows.
        ("1", [0, 0, 0, 12, 6, 6], 6, 0.25e9),
        ("auto", [12, 6, 12, 0, 0, 0], 6, 1e9),
        # The first 4 rows cross to ranks 2 and 3, two to each, and are forwarded there.
        ("2", [8, 4, 6, 4, 2, 4], 2, 0.25e9),
        # The first 4 rows cross from the first node to rank 2, and to rank 3 as well, which gets 6.
        ("2,1,1", [2, 2, 2, 10, 6, 8], 6, 0.25e9),
    ],
    ids=["nodes of one rank", "one node", "nodes of two ranks", "uneven nodes"],
)
def test_bytes_within_and_between_nodes(
    command, figures, tmp_path, ranks_per_node, expected_rows, busiest_rows, bandwidth
):
    # A document of 8 rows on 4 ranks, each of which reads all rows before its own; a row of K and V
    # is 8 heads of 128 numbers.
    h100 = DeviceProfile.load("h100")
    links = Links(LinkCost(0.0, 1e9), LinkCost(0.0, 0.25e9))
    replace(h100, exchange=links).save(tmp_path / "costs.json")
    options = ["--ranks-per-node", ranks_per_node, "--profile", str(tmp_path / "costs.json")]
    figures_of_plan = figures(*command([8], 4, 2, UNBALANCED, *options))
    row = 2 * 8 * 128 * 2
    assert figures_of_plan["bytes_total"] == 12 * row
    assert figures_of_plan["bytes_bottleneck"] == 6 * row
    assert [figures_of_plan[key] / row for key in BYTES] == expected_rows
    assert figures_of_plan["link_seconds"] == pytest.approx(busiest_rows * row / bandwidth)


def test_the_table(command, run):
    # The same of a document of 1024 rows: what was 2 rows is 256.
    _, output, _ = run(*command([1024], 4, 256, UNBALANCED, "--ranks-per-node", "2"))
    expected_lines = [
        "documents                      1 of 1,024 tokens, 3 cuts, 1 nano-batch",
        "bytes within nodes             4.19 MB, busiest rank 2.10 MB, busiest node 3.15 MB",
        "bytes between nodes            2.10 MB, busiest rank 1.05 MB, busiest node 2.10 MB",
        "busiest link, per layer        0.02 ms at 100 GB/s within and 50 GB/s between nodes",
    ]
    assert [line for line in expected_lines if f"{line}\n" not in output] == []


def test_figures_of_ranks_add_up(command, figures, tmp_path):
    rows = [[3000, 500], [900], [40, 2000], [700]]
    planned = figures(*command(rows, 4, 4096, "--report", str(tmp_path / "a.html")))
    ranks = planned["by_rank"]
    assert max(ranks["pairs"]) / (sum(ranks["pairs"]) / 4) == pytest.approx(
        planned["max_over_mean"]
    )
    assert sum(ranks["pairs"]) == sum(ranks["pairs_packed"])
    assert (
        sum(ranks["tokens"])
        == sum(bin_of_lengths["tokens"] for bin_of_lengths in planned["histogram"])
        == 7140
    )
    assert sum(ranks["tasks"]) == planned["tasks"]
    assert sum(ranks["bytes_sent"]) == sum(ranks["bytes_received"]) == planned["bytes_total"]


def test_memory_of_a_model(command, figures, tmp_path):
    small_model().config.save_pretrained(tmp_path)
    options = ["--model", f"{tmp_path}/config.json", *FLOAT32, "--device-memory", "0.04"]
    planned = figures(*command([4096], 2, 2048, *options))
    memory = planned["memory"]
    parameters = sum(p.numel() for p in small_model().parameters())
    assert list(memory) == ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
    ddp = memory["ddp"]
    assert [ddp[part] / parameters for part in ("weights", "gradients", "optimizer")] == [4, 8, 8]
    plain = ddp["without_checkpointing"]
    checkpointed = ddp["with_checkpointing"]
    assert checkpointed["parts"]["kept O"] == 2 * 2048 * (32 + 4) * 4
    assert planned["exchange_buffers"] == checkpointed["parts"]["exchange buffers"] > 0
    assert plain["total"] == sum(plain["parts"].values()) + 20 * parameters
    assert checkpointed["total"] < plain["total"] < 10**8
    assert 2048 < plain["longest_rows"] < checkpointed["longest_rows"]
    shown = memory_table(memory_rows(memory, 0.04))
    expected = [
        "memory of a rank, GB",
        "kept O and log-sum-exp",
        "together",
        "longest rows in 0.04 GB",
    ]
    assert [name for name in expected if f"\n{name} " not in f"\n{shown}"] == []
    assert max(map(len, shown.splitlines())) <= 100  # columns of a terminal
    first, second = shown.split("\n\n")
    assert first.splitlines()[0].split()[-3:] == ["ddp", "fsdp2", "zero1"]
    assert second.splitlines()[0].split()[-2:] == ["zero2", "zero3"]


def test_offloaded_checkpoints_and_their_copies(command, run, tmp_path, monkeypatch):
    """A model of 5 layers; 3 are offloaded: a bfloat16 row of 32 numbers, O of 32, and 4 sums."""
    small_model(num_hidden_layers=5).config.save_pretrained(tmp_path)
    monkeypatch.setattr("hf_distca.cli.model.STRATEGIES", ("ddp", "fsdp2"))
    options = ["--model", f"{tmp_path}/config.json", {"offload_activations": True}]
    options += ["--device-memory", "0.04", "--profile", "h200"]
    status, output, _ = run(*command([4096], 2, 2048, *options, "--json"))
    assert status == 0
    planned = json.loads(output)
    fsdp2 = planned["memory"]["fsdp2"]
    kept, offloaded = fsdp2["with_checkpointing"], fsdp2["with_offload"]
    layer = 2048 * (2 * 32 + 2 * 32 + 4 * 4)
    assert offloaded["host"] == 3 * layer
    # The same tensors on the device beside them: where the peak is depends on what is kept.
    assert kept["parts"]["kept O"] - offloaded["parts"]["kept O"] == 3 * 2048 * (2 * 32 + 4 * 4)
    assert kept["total"] - offloaded["total"] <= 3 * layer
    figures = planned["offload"]
    expected = {
        "strategy": "fsdp2",
        "profile": "NVIDIA H200, bfloat16",
        "layers": 3,
        "host_bytes": 3 * layer,
        "host_bytes_of_node": 6 * layer,
        "layer_bytes": layer,
        "layer_copy_seconds": pytest.approx(layer / 55e9),
        "copy_seconds": pytest.approx(3 * layer / 55e9),
    }
    assert {name: figures[name] for name in expected} == expected
    assert 0 < figures["layer_forward_seconds"] < figures["layer_backward_seconds"]
    assert figures["attention_seconds"] < figures["step_seconds"]
    shown = "\n".join(offload_lines(figures | {"step_seconds": 12.34, "wait_seconds": 0.5}))
    assert "offloaded under fsdp2" in shown
    assert "3 layers, 0.0 GB of host memory a rank" in shown
    assert "12.3 s on NVIDIA H200, bfloat16: core attention 0.0 s, waits for copies 0.5 s" in shown
    monkeypatch.delattr(MemoryCounter, "count")  # refused before anything is counted
    status, _, error = run(*command([4096], 2, 2048, *options[:-1], "/nowhere"))
    assert status == 2
    assert "/nowhere" in error


def test_memory_follows_the_settings_that_are_given(command, figures, tmp_path, monkeypatch):
    small_model().config.save_pretrained(tmp_path)
    others = {name: case for name, case in CASES.items() if name != "without_checkpointing"}
    monkeypatch.setattr("hf_distca.cli.model.CASES", others)
    options = ["--model", str(tmp_path), *FLOAT32, "--strategy", "ddp"]
    backward = []
    for chunk_rows in (0, 32):
        command_line = command([256], 2, 128, *options, {"mlp_chunk_rows": chunk_rows})
        memory = figures(*command_line)["memory"]
        assert list(memory) == ["ddp"]
        backward.append(memory["ddp"]["with_checkpointing"]["parts"]["backward"])
    assert backward[1] < backward[0]


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_next"])
def test_memory_of_hybrids_and_experts_is_counted(command, figures, tmp_path, model_type):
    tiny_config(model_type).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), *FLOAT32, "--device-memory", "0.01"]
    planned = figures(*command([150, 30], 2, 96, *options))
    assert planned["tokens_max_over_mean"] == 1.0
    assert planned["memory"]


def test_mixing_of_a_hybrid_that_is_cut(command, run, figures, planned_model):
    one_nano_batch = {**FIXED, "planning": {"ping_pong": False}}
    cut = command([150, 30], 2, 96, *planned_model(tiny_config("qwen3_next")), one_nano_batch)
    mixing = figures(*cut)["mixing"]
    # One layer: 3 rows of 96 channels in bfloat16; A and B of 4 heads, 8 rows and 16 columns in
    # float32.
    halo = 3 * 96 * 2
    state = 4 * 8 * 16 * 4
    assert mixing["layers"] == 1
    assert mixing["segments"] == 2
    assert mixing["state_bytes"] == state
    assert mixing["runs"] == 2
    assert mixing["bytes_bottleneck"] == halo + state
    assert "kernel runs, busiest rank      2 a layer" in run(*cut)[1]


def test_a_model_whose_documents_stay_whole(command, run, tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    model = ["--model", str(tmp_path)]
    status, _, error = run(*command([60, 30], 2, 96, *model, FIXED))
    assert status == 2
    assert "set document_layout='whole'" in error
    assert "document 0 has 97 tokens" in run(*command([97, 30], 2, 96, *model))[2]


def test_one_document_travels_in_stages_through_small_buffers(command, figures):
    buffer, row = 1 << 25, 2 * 8 * 128 * 2
    small = {"planning": {"exchange_buffer_bytes": buffer}}
    planned = figures(*command([262144], 4, 65536, small))
    assert planned["stages"] >= 8
    # Six buffers for K and V, there and back; queries stay.
    assert planned["exchange_buffers"] <= 6 * buffer + 256 * row


SMALL = ["--ranks", "2", "--tokens-per-rank", "8"]


@pytest.mark.parametrize(
    ("ending", "write"), [("csv", "to_csv"), ("jsonl", "to_json"), ("parquet", "to_parquet")]
)
def test_tables_hold_lengths_or_tokens(run, tmp_path, ending, write):
    file = tmp_path / f"documents.{ending}"
    columns = (
        {"length": [4, 4, 2, 6]}
        if ending == "csv"
        else {"input_ids": [[1] * n for n in (4, 4, 2, 6)]}
    )
    getattr(datasets.Dataset.from_dict(columns), write)(file)
    assert (
        "documents                      4 of 16 tokens"
        in run("plan", "--lengths", str(file), *SMALL)[1]
    )


def test_compressed_files_tables_with_tabs_and_patterns_hold_lengths(run, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"length": 4}\n{"length": 6}\n'))
    (tmp_path / "b.tsv").write_text("length\ttext\n4\tx\n6\ty, z\n")
    for name in ("a.jsonl.gz", "b.tsv"):
        printed = run("plan", "--lengths", str(tmp_path / name), *SMALL)[1]
        assert "documents                      2 of 10 tokens" in printed
    (tmp_path / "d.csv").write_text("length\n4\n")
    assert "16 tokens" in run("plan", "--lengths", str(tmp_path / "[ad].*"), *SMALL)[1]  # drawn
    (tmp_path / "c.bin").write_bytes(b"\0")
    status, _, error = run("plan", "--lengths", str(tmp_path / "c.bin"), *SMALL)
    assert status == 2
    assert "c.bin' has no suffix that `datasets` knows, but" in error


def test_lengths_of_texts_and_chats_are_counted_by_a_tokenizer(planned, tmp_path, subtests):
    def lengths_of(name: str, *more: str) -> list[int]:
        nano_batches = planned("plan", "--lengths", str(tmp_path / name), *options, *more)
        return sorted(length for nano in nano_batches for length in nano["lengths"])

    tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = [
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--ranks",
        "2",
        "--tokens-per-rank",
        "12",
    ]
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    # Lengths count the end of each document.
    for name, content, more_options, lengths in (
        (
            "rows.jsonl",
            '{"text": "w1 w2 w3"}\n{"text": "w4"}\n',
            [],
            [2, 4],
        ),
        ("rows.json", '[{"body": "w1 w2 w3"}, {"body": "w4"}]', ["--column", "body"], [2, 4]),
        ("chats.jsonl", json.dumps({"messages": chat}), [], [6]),
    ):
        (tmp_path / name).write_text(content)
        with subtests.test(name):
            assert lengths_of(name, *more_options) == lengths
    (tmp_path / "pieces.txt").write_text("w1 w2 w3\n\nw4 w5 w6\n")
    # Documents are drawn until the next one does not fit.
    assert lengths_of("pieces.txt") == [7] * 3
    assert lengths_of("pieces.txt", "--sample-by", "paragraph") == [4] * 6


def test_tokens_are_counted_once_and_a_bar_moves_while_they_are(run, tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        texts,
        "tokenize",
        lambda documents, *_: counted.append(len(documents)) or [[1]] * len(documents),
    )
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"w{number}"}) + "\n" for number in range(250)))
    options = [
        "--lengths",
        str(file),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--ranks",
        "2",
        "--tokens-per-rank",
        "256",
    ]
    status, _, errors = run("plan", *options)  # its errors go into a file
    assert (status, errors) == (0, "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    file.write_text(file.read_text() + json.dumps({"text": "w"}) + "\n")
    assert "Counting tokens: 100%" in run("plan", *options)[2]
    assert run("plan", *options)[0] == 0
    assert counted == [100, 100, 50, 100, 100, 51]


@pytest.mark.parametrize(
    ("options", "drawn"),
    [((), "4 of 16 tokens"), (("--split", "test"), "3 of 15 tokens")],
    ids=["train by default", "test"],
)
def test_the_split_of_a_data_set(run, tmp_path, options, drawn):
    parts = {
        name: datasets.Dataset.from_dict({"length": [length] * 2})
        for name, length in (("train", 4), ("test", 5))
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "data")
    assert drawn in run("plan", "--lengths", str(tmp_path / "data"), *SMALL, *options)[1]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", None, [], "no such file"),
        ("a.json", None, [], "cannot read"),
        ("a.csv", "", [], "a.csv' is empty, but a document needs a text or a row"),
        (
            "a.csv",
            "text\nab",
            [],
            "has columns ['text'], but none of ['length', 'input_ids']; set --column",
        ),
        (
            "a.csv",
            "text\nab",
            ["--column", "text"],
            "string; expected whole numbers of tokens, lists of tokens, or text with --token",
        ),
        (
            "a.txt",
            "a b",
            [],
            "has columns ['text'], but none of ['length', 'input_ids']; set --column to a column "
            "of",
        ),
        (
            "a.txt",
            "a b",
            ["--tokenizer", "/no/where"],
            "no tokenizer at '/no/where': there is no such folder",
        ),
        ("a.csv", "length\n2.5", [], "column length holds double; expected whole numbers"),
        (
            "a.csv",
            "length\n3\n0",
            [],
            "column length: row 1 is 0, but a document has at least 1 token",
        ),
        (
            "a.jsonl",
            '{"input_ids": [1]}\n{"input_ids": null}\n',
            [],
            "column input_ids is empty in row 1; leave such",
        ),
        (
            "no/where",
            None,
            [],
            "/no/where', but documents are read from it; give the path of a file or a folder",
        ),
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
    assert status == 2, error
    assert message in error, error


def test_micro_batches_are_drawn(figures, tmp_path, without_memory):
    datasets.Dataset.from_dict({"tokens": [300, 40, 5] * 100}).save_to_disk(tmp_path / "data")
    np.savetxt(tmp_path / "lengths.csv", [300, 40, 5], "%d", header="tokens", comments="")
    setting = ["--ranks", "2", "--tokens-per-rank", "1k", "--column", "tokens"]
    assert figures("plan", "--lengths", str(tmp_path / "data"), *setting)["tasks"] > 10
    of_file = ["--lengths", str(tmp_path / "lengths.csv"), *setting, "--batches", "1"]
    assert figures("simulate", *of_file)["documents"] > 10  # more than the file has


def test_drawn_documents_that_are_cut_are_named(run, tmp_path):
    report = tmp_path / "report.html"
    options = ("plan", "--ranks", "2", "--tokens-per-rank", "512", "--report", str(report))
    options += ("--lengths",)
    status, printed, _ = run(*options, "lognormal:5000,0.01")
    assert status == 0
    sentence = (
        "1 of 1 documents is longer than the 1,024 tokens that all ranks hold; the longest has "
    )
    assert sentence in printed
    assert "Here they are cut to 1,024." in printed
    assert sentence in report.read_text(encoding="utf-8")
    assert "are cut to" not in run(*options, "lognormal:100,0.1")[1]
    assert "are cut to" not in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("source", ["prolong", "one-long", "lognormal:300,1"])
def test_the_same_lengths_are_drawn_every_time(planned, source):
    setting = ["--lengths", source, "--ranks", "4", "--tokens-per-rank", "2k"]
    first, again = ([nano["lengths"] for nano in planned("plan", *setting)] for _ in range(2))
    assert 4096 < sum(map(sum, first)) <= 8192
    assert first == again
