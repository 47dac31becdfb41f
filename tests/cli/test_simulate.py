import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from transformers import LlamaConfig

import hf_distca
from hf_distca.cli.main import main

SETTING = ["--ranks", "8", "--tokens-per-rank", "4096", "--batches", "2"]


def status(*command: str) -> object:
    """What the command ends with."""
    try:
        return main(command)
    except SystemExit as ended:
        return ended.code


def figures(capsys, *options: str) -> dict:
    assert main(["simulate", *SETTING, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_way_trains_the_same_tokens(capsys):
    found = figures(capsys, "--lengths", "prolong", "--servers", "2")
    names = [way["name"] for way in found["ways"]]
    assert names == [
        "plain packing",
        "whole documents balanced",
        "context parallel, 4 × 2",
        "context parallel, 2 × 4",
        "context parallel, 1 × 8",
        "hf_distca, fixed",
        "hf_distca, joint",
        "hf_distca, chosen",
        "hf_distca, joint, 2 servers",
    ]
    assert 0 < found["tokens"] <= 2 * 8 * 4096
    for way in found["ways"]:
        assert way["tokens_per_second"] * way["step_seconds"] * 2 == pytest.approx(found["tokens"])
        assert 0 < way["mfu"] < 1
        assert 0 <= way["idle"] < 1
        assert way["tokens_most"] <= 4096 or not way["name"].startswith("hf_distca")


def test_long_documents_beside_short_ones_pay(capsys):
    found = figures(capsys, "--lengths", "wlbllm", "--ranks", "64", "--tokens-per-rank", "32768")
    assert found["speed_up"] > 1.1
    assert found["attention_speed_up"] > found["speed_up"]
    assert "× the speed of" in found["advice"][0]


def test_documents_of_one_length_do_not(tmp_path, capsys):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([512] * 10))
    found = figures(capsys, "--lengths", str(path))
    assert found["speed_up"] < 1.02
    assert found["advice"][0].startswith("No gain expected: ")


def test_lengths_of_a_data_set_and_a_model_of_ones_own(tmp_path, capsys):
    Dataset.from_list([{"input_ids": list(range(n))} for n in (300, 40, 5)]).save_to_disk(tmp_path / "data")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    options = ("--lengths", str(tmp_path / "data"), "--model", str(tmp_path / "model"), "--batches", "1")
    assert figures(capsys, *options)["documents"] > 100


def test_memory_is_that_of_a_step_that_is_counted(tmp_path, capsys):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    lengths = [512] * 64
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    options = ["--lengths", str(tmp_path / "lengths.json"), "--model", str(tmp_path)]
    ways = {way["name"]: way for way in figures(capsys, *options, "--batches", "1")["ways"]}
    whole = [*SETTING[:4], *options, "--json", "--document-layout", "joint"]
    assert main(["plan", *whole]) == 0
    counted = json.loads(capsys.readouterr().out)["memory"]["fsdp2"]
    joint = ways["hf_distca, joint"]
    assert joint["state_bytes"] + joint["rows_bytes"] == counted["with_checkpointing"]["total"]
    # Rows that are not exchanged need no buffers, but are computed all at once, not one nano-batch after another.
    assert 0.8 < ways["plain packing"]["rows_bytes"] / joint["rows_bytes"] < 1.2
    gathered = ways["context parallel, 2 × 4"]["rows_bytes"] - ways["plain packing"]["rows_bytes"]
    assert gathered == 2 * 3 * 4096 * 2 * 32 * 2


def test_the_chosen_plan_is_never_slower_than_what_keeps_context(capsys):
    options = ("--lengths", "lognormal:600,0.8", "--ranks-per-node", "1", "--batches", "2")
    slow = {way["name"]: way for way in figures(capsys, *options, "--network-bandwidth", "1")["ways"]}
    fast = {way["name"]: way for way in figures(capsys, *options)["ways"]}
    for ways in (slow, fast):
        # Ways that give a rank more rows than it takes are not compared.
        fair = [way for way in ways.values() if not way["documents_cut"] and way["tokens_most"] <= 4096]
        seconds = [way["step_seconds"] for way in fair]
        assert ways["hf_distca, chosen"]["step_seconds"] <= 1.01 * min(seconds)
    assert slow["hf_distca, joint"]["step_seconds"] > 2 * slow["hf_distca, chosen"]["step_seconds"]


def test_rows_take_memory_along_a_line(tmp_path):
    from hf_distca.cli.model_shape import config_of_shape
    from hf_distca.config import DistCAConfig
    from hf_distca.memory.simulated import CountedMemory
    from hf_distca.planner.micro_batch import plan_micro_batch
    from hf_distca.planner.settings import PlanSettings
    from hf_distca.sim.costs import DeviceProfile
    from hf_distca.sim.model import ModelShape
    from hf_distca.sim.ways import Setup, ways_to_train

    shape = ModelShape.llama(2, 64, 160, 4, 2, 100, head_dim=16)
    settings = PlanSettings(1, 1024, kinds=tuple(shape.layers))
    setup = Setup(shape, DeviceProfile.load("h100"), 1, 1024)
    (alone, *_) = ways_to_train(setup, settings, 0)
    plan = plan_micro_batch([1536], replace(settings, tokens_per_rank=1536))
    memory, whole = (
        CountedMemory(replace(setup, checkpointing=on), config_of_shape(shape), settings, DistCAConfig())
        for on in (True, False)
    )
    rows, state = memory(alone, 1536, None)
    assert (rows, state) == (pytest.approx(memory(alone, 1536, plan)[0], rel=0.01), memory(alone, 1536, plan)[1])
    assert whole(alone, 1536, None)[0] > 1.5 * rows


def test_the_shape_of_a_model(tmp_path):
    from hf_distca.cli.model_shape import shape_of
    from hf_distca.sim.model import ModelShape

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=1000).save_pretrained(tmp_path)
    found, expected = shape_of(str(tmp_path)), ModelShape.llama(3, 512, 1024, 4, 2, 1000)
    assert (found.layers, found.hidden, found.head) == (expected.layers, expected.hidden, expected.head)
    norms = 2 * 512
    assert found.before == expected.before
    assert found.after == pytest.approx(expected.after + norms, abs=512)
    assert found.parameters == expected.parameters + 3 * norms + 512


def test_it_is_shown_as_a_table(capsys):
    assert main(["simulate", *SETTING, "--lengths", "lognormal:2000,1.2"]) == 0
    shown = capsys.readouterr().out
    assert "hf_distca, joint" in shown
    assert "No gain expected: " in shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--lengths", "/no/where"],
            "no document lengths at '/no/where': expected a .json, .csv, .jsonl or .parquet file, one of agents",
        ),
        (["--lengths", "lognormal:0"], "is not a distribution: expected lognormal:MEDIAN,SIGMA"),
        (["--lengths", "lognormal:nan,1"], "the median must be from 1 to 1000000000 tokens, got nan"),
        (["--lengths", "lognormal:1e12,9"], "the median must be from 1 to 1000000000 tokens, got 1e+12"),
        (["--lengths", "lognormal:1000,9"], "sigma must be above 0 and at most 3, got 9"),
        (["--lengths", "lognormal:1000,nan"], "sigma must be above 0 and at most 3, got nan"),
        (["--lengths", "prolong", "--servers", "-1"], "--servers: must be 0 or a positive whole number, got '-1'"),
        (["--lengths", "prolong", "--servers", "4097"], "--servers: must be at most 4096, got 4097"),
        (["--lengths", "prolong", "--seed", "-1"], "--seed: must be 0 or a positive whole number, got '-1'"),
        (["--lengths", "prolong", "--batches", "9999999"], "--batches: must be at most 100000, got 9999999"),
        (["--lengths", "prolong", "--tokens-per-rank", "1"], "--tokens-per-rank must be at least 2"),
        (["--lengths", "prolong", "--exchange-buffer-bytes", "1"], "holds 0 rows of K and V"),
        (["--lengths", "prolong", "--tensor-parallel", "3"], "does not divide the model's 32 query heads"),
        (["--lengths", "prolong", "--report", "."], "cannot write .: it is a folder; name a file"),
        (["--lengths", "prolong", "--profile", "abacus"], "no device profile at 'abacus': expected one of"),
        (["--lengths", "prolong", "--model", "/no/where"], "no model config at '/no/where'"),
        (["--lengths", "prolong", "--ranks-per-node", "3"], "ranks_per_node=3 does not divide the 8 ranks"),
    ],
)
def test_what_cannot_be_used(capsys, options, told):
    assert status("simulate", *SETTING, *options) == 2
    assert told in capsys.readouterr().err


def test_lengths_of_a_table(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text("tokens\n300\n40\n5\n")
    options = ("--lengths", str(tmp_path / "lengths.csv"), "--column", "tokens", "--batches", "1")
    assert figures(capsys, *options)["documents"] > 100


def test_lengths_that_no_number_holds(tmp_path, capsys):
    (tmp_path / "lengths.json").write_text(json.dumps([10**30]))
    assert main(["simulate", *SETTING, "--lengths", str(tmp_path / "lengths.json")]) == 2
    assert "must be 64-bit integers" in capsys.readouterr().err


def test_a_column_that_is_not_there(tmp_path, capsys):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "data")
    assert main(["simulate", *SETTING, "--lengths", str(tmp_path / "data")]) == 2
    assert "has columns ['text'], but none of ['length', 'input_ids']; set --column" in capsys.readouterr().err


def test_gpus_that_share_layers(capsys):
    alone, shared = (figures(capsys, "--lengths", "prolong", "--tensor-parallel", gpus) for gpus in ("1", "8"))
    assert {way["gpus"] for way in shared["ways"]} == {64}
    assert shared["ways"][-1]["step_seconds"] < 0.3 * alone["ways"][-1]["step_seconds"]


def test_many_ranks(capsys):
    found = figures(capsys, "--lengths", "wlbllm", "--ranks", "512", "--batches", "1")
    assert np.isfinite([way["step_seconds"] for way in found["ways"]]).all()


def test_nodes_that_differ(capsys):
    options = ("--lengths", "prolong", "--ranks", "12", "--batches", "1")
    steps = [figures(capsys, *options, *nodes)["ways"] for nodes in ((), ("--ranks-per-node", "8,4"))]
    assert steps[0] == steps[1]


def test_settings_to_copy_warn_of_nothing(tmp_path, capsys, recwarn):
    report = tmp_path / "report.html"
    figures(capsys, "--lengths", "one-long", "--batches", "1", "--report", str(report))
    code = re.search(r"args = hf_distca\.DistCATrainingArguments\(.*?\n\)", html.unescape(report.read_text()), re.S)[0]
    names = {"hf_distca": hf_distca}
    exec(code.replace('output_dir="out"', f'output_dir="{tmp_path}", use_cpu=True').replace("bf16=True,", ""), names)
    assert names["args"].gradient_checkpointing
    assert not [str(warning.message) for warning in recwarn if "deprecated" in str(warning.message)]
