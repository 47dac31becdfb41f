import html
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3NextConfig

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.cli import InputError
from hf_distca.cli.model import config_of_shape
from hf_distca.cli.options import wrapped
from hf_distca.cli.simulate import _aligned
from hf_distca.kernels.versions import TorchVarlenKernel
from hf_distca.models.fake import model_of_config
from hf_distca.models.shape import model_shape
from hf_distca.plan import AttentionKind
from hf_distca.predict.device_profile import Accuracy, DeviceProfile
from hf_distca.predict.seconds import KernelCost
from hf_distca.predict.shapes import ModelShape
from hf_distca.profiling import device
from tests.survey.tiny import tiny_config

SETTING = ["simulate", "--ranks", "8", "--tokens-per-rank", "4096", "--batches", "2"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Folder of a model of three layers."""
    folder = tmp_path_factory.mktemp("model")
    config_of_shape(ModelShape.llama(3, 64, 160, 4, 2, 100)).save_pretrained(folder)
    return str(folder)


def by_name(simulation: dict) -> dict[str, dict]:
    return {strategy["name"]: strategy for strategy in simulation["strategies"]}


def test_every_strategy_trains_the_same_tokens(figures, small, subtests):
    simulation = figures(*SETTING, "--lengths", "prolong", "--servers", "2", "--model", small)
    cp = [f"context parallel, {shape}" for shape in ("4 × 2", "2 × 4", "1 × 8")]
    ulysses = [f"Ulysses, {shape}" for shape in ("4 × 2", "2 × 4")]  # of four heads
    planned = [f"hf_distca, {layout}" for layout in ("fixed", "chosen", "2 servers")]
    assert list(by_name(simulation)) == [
        *("plain packing", "whole documents balanced"),
        *(*ulysses, *cp, *planned),
    ]
    assert 0 < simulation["tokens"] <= 2 * 8 * 4096
    for strategy in simulation["strategies"]:
        with subtests.test(strategy["name"]):
            tokens = strategy["tokens_per_second"] * strategy["step_seconds"] * 2
            assert tokens == pytest.approx(simulation["tokens"])
            assert 0 < strategy["mfu"] < 1
            assert 0 <= strategy["idle"] < 1
            if strategy["name"].startswith("hf_distca"):
                assert strategy["tokens_most"] <= 4096


def test_plans_are_chosen_by_the_settings_of_hf_distca_plan(run, small, monkeypatch, tmp_path):
    chosen = []

    def keep(settings):
        chosen.append(settings)
        raise InputError("enough")

    monkeypatch.setattr("hf_distca.cli.simulate.simulate", lambda _, run, **__: keep(run.plans))
    monkeypatch.setattr("hf_distca.cli.plan._plan", lambda _, settings: keep(settings))
    (tmp_path / "lengths.json").write_text("[4000, 100]")
    options = ("--tokens-per-rank", "4096", "--lengths", str(tmp_path / "lengths.json"))
    for command in ("simulate", "plan"):
        assert "enough" in run(command, "--ranks", "2", *options, "--model", small)[2]
    assert chosen[0] == chosen[1]
    assert chosen[0].row_overhead == TorchVarlenKernel.row_overhead > 0


def test_long_documents_beside_short_ones_pay_and_equal_ones_do_not(
    figures, run, tmp_path, without_memory
):
    simulation = figures(
        *SETTING, "--lengths", "wlbllm", "--ranks", "64", "--tokens-per-rank", "32768"
    )
    assert simulation["over_transformers"]["speed_up"] >= simulation["over_best"]["speed_up"] > 1.1
    assert simulation["over_packing"]["speed_up"] > 1.1
    assert "× the speed of" in simulation["advice"][0]
    lengths = tmp_path / "lengths.json"
    report = tmp_path / "report.html"
    lengths.write_text(json.dumps([512] * 10))
    (tmp_path / "train.yaml").write_text("gradient_checkpointing: false\n")
    config = ["--config", str(tmp_path / "train.yaml")]
    printed = run(*SETTING, "--lengths", str(lengths), *config, "--report", str(report))[1]
    assert "hf_distca, chosen" in printed
    assert "No gain expected: " in printed
    assert "\nplain packing * " in printed
    assert "\n* transformers, accelerate or TRL run it on packed documents.\n" in printed
    assert "\ncontext parallel, 1 × 8 * " not in printed
    assert "<h1>No gain expected: " in report.read_text()


def test_without_checkpointing_no_layer_runs_again(figures, tmp_path, without_memory):
    (tmp_path / "lengths.json").write_text(json.dumps([512] * 8))
    options = [*SETTING[:5], "--lengths", str(tmp_path / "lengths.json"), "--batches", "1"]
    (tmp_path / "train.json").write_text('{"activation_checkpointing": false}')
    without = ("--config", str(tmp_path / "train.json"))
    again, once = (by_name(figures(*options, *more))["plain packing"] for more in ((), without))
    # Forward, backward and the forward again take 4, against 3; the output head, whose chunks run
    # once, is a part.
    assert 1.25 < again["other_seconds"] / once["other_seconds"] < 4 / 3
    assert again["attention_seconds"] == once["attention_seconds"]


def test_memory_is_that_of_a_counted_plan(figures, tmp_path, small):
    (tmp_path / "lengths.json").write_text(json.dumps([512] * 64))
    options = [*SETTING[1:5], "--lengths", str(tmp_path / "lengths.json"), "--model", small]
    strategies = by_name(figures("simulate", *options, "--batches", "1"))
    (tmp_path / "train.yaml").write_text("document_layout: fixed\n")
    options += ["--config", str(tmp_path / "train.yaml"), "--strategy", "fsdp2"]
    counted = figures("plan", *options)["memory"]["fsdp2"]
    fixed = strategies["hf_distca, fixed"]
    assert fixed["state_bytes"] + fixed["rows_bytes"] == counted["with_checkpointing"]["total"]
    # Rows that are not exchanged need no buffers, but are computed all at once, not one nano-batch
    # after another.
    assert 0.8 < strategies["plain packing"]["rows_bytes"] / fixed["rows_bytes"] < 1.2


def test_the_chosen_plan_is_never_slower_than_other_strategies(figures, without_memory, subtests):
    options = ("--lengths", "lognormal:600,0.8", "--ranks-per-node", "1")
    slow = by_name(figures(*SETTING, *options, "--network-bandwidth", "1"))
    fast = by_name(figures(*SETTING, *options))
    for network, strategies in (("slow", slow), ("fast", fast)):
        # Strategies that cut documents or give a rank more rows than it takes are not compared.
        seconds = [
            strategy["step_seconds"]
            for strategy in strategies.values()
            if not strategy["documents_cut"] and strategy["tokens_most"] <= 4096
        ]
        with subtests.test(network):
            assert strategies["hf_distca, chosen"]["step_seconds"] <= 1.01 * min(seconds)
    assert slow["hf_distca, fixed"]["step_seconds"] > 2 * slow["hf_distca, chosen"]["step_seconds"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--servers", "-1", "--servers: must be 0 or a positive whole number, got '-1'"),
        ("--batches", "9999999", "--batches: must be at most 100000, got 9999999"),
        ("--tokens-per-rank", "1", "--tokens-per-rank must be at least 2"),
        ("--config", "/nowhere", "cannot read /nowhere: No such file"),
        ("--tensor-parallel", "3", "does not divide the model's 32 query heads"),
        ("--report", ".", "cannot write .: it is a folder; name a file"),
        ("--profile", "abacus", "no device profile at 'abacus' (FileNotFoundError"),
        ("--model", "/no/where", "no model config at '/no/where'"),
        ("--ranks-per-node", "3", "ranks_per_node=3 is set, but it does not divide the 8 ranks"),
    ],
    ids=[
        "servers",
        "batches",
        "tokens",
        "config",
        "tensor parallel",
        "report",
        "profile",
        "model",
        "nodes",
    ],
)
def test_bad_options(run, option, value, message):
    status, _, error = run(*SETTING, "--lengths", "prolong", option, value)
    assert status == 2, error
    assert message in error, error


def test_gpus_that_share_layers(figures, without_memory):
    command = (*SETTING, "--lengths", "prolong", "--batches", "1", "--tensor-parallel")
    alone, shared = (figures(*command, gpus)["strategies"][-1] for gpus in ("1", "8"))
    assert alone["gpus"] == 8
    assert shared["gpus"] == 64
    assert shared["step_seconds"] < 0.3 * alone["step_seconds"]


def test_shapes_of_models():
    expected = ModelShape.llama(3, 512, 1024, 4, 2, 1000)
    shape = model_shape(model_of_config(config_of_shape(expected), torch.float32))
    norms = 3 * 2 * 512 + 512  # of the layers, and the last one
    assert shape == replace(
        expected,
        after_attention=expected.after_attention + norms // 3,
        parameters=expected.parameters + norms,
    )
    config = Qwen3NextConfig()  # Qwen3-Next 80B-A3B
    shape = model_shape(model_of_config(config, torch.bfloat16))
    mixing = shape.mixing
    assert shape.depth == 12
    assert mixing.layers == 36
    assert mixing.width == 3
    assert mixing.channels == 2 * 2048 + 4096
    assert mixing.heads == 32
    assert mixing.state == (128, 128)
    assert mixing.state_bytes == 4 << 20
    # Projections of queries, keys, values, gates and decays; the output's, the router, 11 experts
    # and norms.
    assert mixing.before_mixing == pytest.approx(2048 * (2 * 2048 + 2 * 4096 + 64), rel=0.01)
    assert mixing.after_mixing == pytest.approx(
        4096 * 2048 + 2048 * 512 + 11 * 3 * 2048 * 512, rel=0.01
    )
    assert shape.operations == pytest.approx(3.67e9, rel=0.01)
    # Of an 80B model some 6 % of a mixing layer's operations are its recurrence's; r and A take
    # half as much again.
    recurrence, more = mixing.operations
    assert recurrence / (mixing.before_mixing + mixing.after_mixing) == pytest.approx(
        0.044, rel=0.1
    )
    assert 0.6 < more / recurrence < 0.8


def test_a_hybrid(figures, run, tmp_path, without_memory):
    tiny_config("qwen3_next").save_pretrained(tmp_path)
    options = (*SETTING, "--lengths", "prolong", "--model", str(tmp_path), "--batches", "1")
    strategies = by_name(figures(*options))
    whole = strategies["whole documents balanced"]
    fixed = strategies["hf_distca, fixed"]
    assert 0 < whole["mixing_seconds"] < whole["other_seconds"]
    assert whole["mixing_runs"] == 1
    assert whole["mixing_bytes"] == 0
    assert fixed["mixing_seconds"] > 0
    assert fixed["mixing_runs"] > 1
    assert fixed["mixing_bytes"] >= 3 * 48 * 2 + 2 * 8 * 16 * 4
    printed = run(*options)[1].splitlines()
    (head,) = (line for line in printed if "imbalance" in line)
    assert head.split()[:7] == ["step,", "s", "attention", "other", "waits", "idle", "mixing"]
    # The last columns do not fit into 100, and stand in a second block of lines.
    cells, _ = (line.split() for line in printed if line.startswith("hf_distca, fixed "))
    assert cells[7] == f"{fixed['mixing_mean_seconds']:.3f}"
    assert 0 < fixed["mixing_mean_seconds"] < fixed["mixing_seconds"]
    tiny_config("jamba").save_pretrained(tmp_path)
    assert "hf_distca, whole" in by_name(figures(*options, "--lengths", "lognormal:400,0.5"))


def test_a_table_fits_a_terminal_of_100_columns():
    titles = [f"title {number}" for number in range(13)]
    row = {"": "context parallel, 16 × 2", **dict.fromkeys(titles, "1.0")}
    lines = _aligned([row])
    # Names take 24 columns, a title of one digit 8 with its gap, and one of two digits 9.
    upper, lower = 24 + 9 * 8, 24 + 8 + 3 * 9
    assert list(map(len, lines)) == [upper, upper, 0, lower, lower]
    assert [line.split()[-1] for line in lines if line] == ["8", "1.0", "12", "1.0"]
    assert lines[4].startswith("context parallel, 16 × 2 ")


def test_long_sentences_are_wrapped_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    sentence = "Ranks wait 30% of a step for exchanges."
    assert wrapped(sentence) == sentence
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert wrapped(sentence) == "Ranks wait 30% of a\nstep for exchanges."


def test_padded_batches_are_compared_in_table_and_report(run, figures, tmp_path, without_memory):
    report = tmp_path / "report.html"
    options = (
        "--lengths",
        "lognormal:300,1",
        "--ranks",
        "2",
        "--padded",
        "8",
        "--report",
        str(report),
    )
    padded = figures(*SETTING, *options)["padded"]
    by_strategy = {strategy["name"]: strategy for strategy in padded["strategies"]}
    assert list(by_strategy) == [
        "padded to the longest",
        "packed on each rank",
        "whole sequences balanced",
        "hf_distca",
    ]
    for name, strategy in by_strategy.items():
        assert strategy["forward_seconds"] < strategy["step_seconds"], name
    assert by_strategy["padded to the longest"]["rows"] > by_strategy["hf_distca"]["rows"]
    printed = run(*SETTING, *options)[1]
    text = html.unescape(report.read_text())
    expected = [padded["advice"], *(row["rows"] for row in padded["columns"])]
    assert [sentence for sentence in expected if sentence not in printed] == []
    assert [sentence for sentence in expected if sentence not in text] == []
    assert "Padded batches of 8 sequences a rank." in printed
    assert "padded" not in figures(*SETTING, *options[:4])
    status, _, error = run(*SETTING, *options[:4], "--padded", "0")
    assert status == 2
    assert "--padded: must be a positive whole number" in error


def test_trees_of_agents_share_in_padded_batches(figures, without_memory):
    options = (*SETTING, "--lengths", "agents-tree", "--tokens-per-rank", "32k", "--batches", "1")
    alone = figures(*options)
    assert alone["advice"][-1].endswith("--padded 8 compares them.")
    simulation = figures(*options, "--padded", "2")
    assert simulation["advice"] == alone["advice"][:-1]
    strategies = {strategy["name"]: strategy for strategy in simulation["padded"]["strategies"]}
    nothing_shared, shared = (
        strategies[name] for name in ("hf_distca, no prefix sharing", "hf_distca")
    )
    assert shared["rows"] < 0.5 * nothing_shared["rows"]
    assert shared["step_seconds"] < 0.6 * nothing_shared["step_seconds"]


def test_settings_to_copy_are_not_deprecated(figures, tmp_path, recwarn, without_memory):
    report = tmp_path / "report.html"
    file = tmp_path / "train.yaml"
    file.write_text("planning: {balance_tolerance: 0.02}\nlearning_rate: 0.1\n")
    options = (
        "--config",
        str(file),
        "--ranks-per-node",
        "4",
        "--batches",
        "1",
        "--report",
        str(report),
    )
    figures(*SETTING, "--lengths", "one-long", *options)
    code = re.search(
        r"args = hf_distca\.DistCATrainingArguments\(.*?\n\)",
        html.unescape(report.read_text()),
        re.S,
    )[0]
    names = {"hf_distca": hf_distca}
    exec(
        code.replace('output_dir="out"', f'output_dir="{tmp_path}", use_cpu=True').replace(
            "bf16=True,", ""
        ),
        names,
    )
    args = names["args"]
    assert args.tokens_per_rank == 4096
    assert args.planning.plain() == {"balance_tolerance": 0.02}
    assert getattr(args, CHECKPOINTING) is True
    assert args.ranks_per_node == "auto"  # the launch gives the nodes
    assert not [str(warning.message) for warning in recwarn if "deprecated" in str(warning.message)]


SIZES = ["--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--hidden", "64"]


def test_a_device_is_measured_and_simulated(tmp_path, run, figures, monkeypatch):
    monkeypatch.setattr(device, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(device, "REPEATS", 1)
    path = str(tmp_path / "mine.json")
    assert "held-out calls" in run("profile", "--output", path, *SIZES)[1]
    profile = DeviceProfile.load(path)
    assert profile.measured == AttentionKind(None, 2, 1, 16, 16)
    assert profile.dtype == "float32"
    assert "links not measured" in profile.source
    assert profile.accuracy.count == 4  # of nine calls of one task and three of several short ones
    assert profile.links.within.bandwidth == 450e9
    assert profile.exchange.within.bandwidth == 100e9
    assert min(profile.flops_per_second, profile.bytes_per_second) > 1e6
    setting = [
        "--lengths",
        "prolong",
        "--ranks",
        "2",
        "--tokens-per-rank",
        "2048",
        "--batches",
        "1",
    ]
    assert figures("simulate", *setting, "--profile", path)["profile"] == "CPU, float32"


def test_the_printed_speed_is_that_of_a_long_document(tmp_path, run, monkeypatch):
    cost = KernelCost(0.0, 1e-3, 0.0, 2e-8)
    seconds = 16.384 + 16384 * 16385 * 1e-8
    monkeypatch.setattr(
        device, "measured_kernel", lambda *_, **__: (cost, cost, Accuracy(1.0, 1.0, 1))
    )
    flops = 2 * 2 * (16 + 16) * (16384 * 16385 / 2)
    printed = run("profile", "--output", str(tmp_path / "mine.json"), *SIZES)[1]
    assert f"16384 tokens' attention    {flops / seconds / 1e12:.3g} TFLOP/s" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--output", "/nonexistent/x.json"],
            "cannot write /nonexistent/x.json: there is no such folder; make the",
        ),
        (["--q-heads", "3", "--kv-heads", "2"], "kv_heads must divide q_heads"),
        (["--attention-kernel", "torch_varlen"], "torch_varlen"),
        (
            ["--hidden", "1000000000"],
            "cpu has too little memory for rows of this size; make --q-heads",
        ),
    ],
    ids=["output", "heads", "kernel", "memory"],
)
def test_errors_come_before_measuring(tmp_path, run, monkeypatch, options, message):
    monkeypatch.setattr(device, "median_seconds", lambda *_: pytest.fail("measured"))
    status, _, error = run("profile", "--output", str(tmp_path / "mine.json"), *SIZES, *options)
    assert status == 2, error
    assert message in error, error
