"""Settings as users write them: in Python, on the command line, in YAML."""

import pytest
from transformers import HfArgumentParser

from hf_distca import DistCAConfig

TOKENS = {
    8192: 8192,
    "8192": 8192,
    "8_192": 8192,
    "32k": 32768,
    "32K": 32768,
    " 1.5 k ": 1536,
    "1M": 2**20,
}
BYTES = {
    1000: 1000,
    "1000": 1000,
    "64KiB": 2**16,
    "128MiB": 2**27,
    "0.5 gib": 2**29,
    "64kB": 64000,
    "1GB": 10**9,
}
NODES = {"auto": "auto", 8: "8", "8": "8", (8, 12): "8,12", " 8, 8 ,4": "8,8,4"}
READ = {
    "tokens_per_rank": TOKENS,
    "exchange_buffer_bytes": BYTES,
    "loss_chunk_bytes": {**BYTES, "auto": "auto", 0: 0},
    "ranks_per_node": NODES,
    "attention_servers": {0: 0, "2": 2, "external": "external"},
    "ping_pong": {"auto": "auto", True: True, "true": True, "False": False, "0": False},
    "balance_tolerance": {"auto": "auto", 0.05: 0.05, "0.05": 0.05, 0: 0.0},
}


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [(name, value, setting) for name, values in READ.items() for value, setting in values.items()],
)
def test_values_that_are_read(name, value, setting):
    read = getattr(DistCAConfig(**{name: value}), name)
    assert read == setting
    assert type(read) is type(setting)


def test_planned_nodes():
    assert DistCAConfig().planning(8)["ranks_per_node"] == 1  # without a launch all links are alike


@pytest.mark.parametrize(
    ("setting", "planned"),
    [("auto", 4), ([8, 8, 4], (8, 8, 4)), ([10], 10), ("1", 1), (8, 8)],
    ids=["auto", "list", "too few in a list", "text", "all"],
)
def test_nodes_as_users_write_them(setting, planned):
    assert DistCAConfig(ranks_per_node=setting).planning(20, 4)["ranks_per_node"] == planned


def test_settings_on_the_command_line_and_in_yaml(tmp_path, capsys):
    parser = HfArgumentParser(DistCAConfig)
    file = tmp_path / "settings.yaml"
    written = {
        "tokens_per_rank": "32k",
        "exchange_buffer_bytes": "64MiB",
        "attention_servers": "external",
    }
    written |= {"ranks_per_node": "8,8,4", "ping_pong": "false", "balance_tolerance": "0.1"}
    expected = DistCAConfig(
        32768, exchange_buffer_bytes=2**26, attention_servers="external", ranks_per_node="8,8,4"
    )
    expected.ping_pong, expected.balance_tolerance = False, 0.1
    file.write_text("".join(f"{name}: {value}\n" for name, value in written.items()))
    assert parser.parse_yaml_file(str(file)) == (expected,)
    file.write_text("ranks_per_node: [8, 8, 4]\n")
    assert parser.parse_yaml_file(str(file))[0].ranks_per_node == "8,8,4"
    options = [word for name, value in written.items() for word in (f"--{name}", value)]
    assert parser.parse_args_into_dataclasses(options) == (expected,)
    assert (
        parser.parse_args_into_dataclasses(["--attention_servers", "2"])[0].attention_servers == 2
    )
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--tokens_per_rank", "32q"])
    assert (
        "argument --tokens_per_rank/--tokens-per-rank: must be a number of tokens"
        in capsys.readouterr().err
    )


def test_what_the_planner_chooses():
    default = DistCAConfig()
    set_all = DistCAConfig(ping_pong=True, balance_tolerance=0.01, document_layout="fixed")
    assert (default.ping_pong, default.balance_tolerance, default.document_layout) == ("auto",) * 3
    assert default.chooses is True
    assert DistCAConfig(ping_pong=False).chooses is True
    assert set_all.chooses is False
    assert default.planning(8)["ping_pong"]
    assert not DistCAConfig(ping_pong=False).planning(8)["ping_pong"]
    assert default.planning(8).get("balance_tolerance") is None
    assert set_all.planning(8)["balance_tolerance"] == 0.01


@pytest.mark.parametrize(("servers", "expected"), [(0, False), (1, True), ("external", True)])
def test_one_rank_exchanges_with_servers_alone(servers, expected):
    # One rank alone has nobody to exchange with; with attention servers it has.
    assert DistCAConfig(attention_servers=servers).planning(1)["ping_pong"] is expected
