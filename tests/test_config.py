"""Settings as users write them: in Python, on the command line, in YAML."""

import json
import pickle
from argparse import SUPPRESS
from dataclasses import asdict, fields

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from hf_distca import DistCAConfig, DistCATrainingArguments
from hf_distca.planner.settings import PlanSettings
from hf_distca.planning_settings import Planning
from hf_distca.server_settings import AttentionServers

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
    "loss_chunk_bytes": {**BYTES, "auto": "auto", 0: 0},
    "ranks_per_node": NODES,
    "attention_servers": {
        0: AttentionServers(),
        "2": AttentionServers(2),
        "external": AttentionServers("external"),
        ' {"count": "3", "timeout": 5}': AttentionServers(3, timeout=5),
        (("count", 1), ("ranks_serve", False)): AttentionServers(1, ranks_serve=False),
        AttentionServers(2): AttentionServers(2),
    },
    "planning": {
        None: Planning(),
        "{}": Planning(),
        '{"ping_pong": false}': Planning(ping_pong=False),
        (("balance_block_size", 8), ("ping_pong", "true")): Planning(
            balance_block_size=8, ping_pong=True
        ),
        Planning(ping_pong=True): Planning(ping_pong=True),
    },
}
MEMBERS = {
    "exchange_buffer_bytes": BYTES,
    "ping_pong": {"auto": "auto", True: True, "true": True, "False": False, "0": False},
    "balance_tolerance": {"auto": "auto", 0.05: 0.05, "0.05": 0.05, 0: 0.0},
}


@pytest.mark.parametrize(
    ("name", "value", "member"),
    [(name, value, read) for name, values in MEMBERS.items() for value, read in values.items()],
)
def test_values_of_planning_that_are_read(name, value, member):
    read = getattr(DistCAConfig(planning={name: value}).planning, name)
    assert read == member
    assert type(read) is type(member)


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [(name, value, setting) for name, values in READ.items() for value, setting in values.items()],
)
def test_values_that_are_read(name, value, setting):
    if name in ("attention_servers", "planning") and isinstance(value, tuple):
        value = dict(value)
    read = getattr(DistCAConfig(**{name: value}), name)
    assert read == setting
    assert type(read) is type(setting)


def test_planned_nodes():
    assert (
        DistCAConfig().plan_settings(8)["ranks_per_node"] == 1
    )  # without a launch all links are alike


@pytest.mark.parametrize(
    ("setting", "planned"),
    [("auto", 4), ([8, 8, 4], (8, 8, 4)), ([10], 10), ("1", 1), (8, 8)],
    ids=["auto", "list", "too few in a list", "text", "all"],
)
def test_nodes_as_users_write_them(setting, planned):
    assert DistCAConfig(ranks_per_node=setting).plan_settings(20, 4)["ranks_per_node"] == planned


def test_settings_on_the_command_line_and_in_yaml(tmp_path, capsys):
    parser = HfArgumentParser(DistCAConfig)
    file = tmp_path / "settings.yaml"
    written = {
        "tokens_per_rank": "32k",
        "loss_chunk_bytes": "64MiB",
        "attention_servers": "external",
        "ranks_per_node": "8,8,4",
    }
    expected = DistCAConfig(
        32768, loss_chunk_bytes=2**26, attention_servers="external", ranks_per_node="8,8,4"
    )
    file.write_text("".join(f"{name}: {value}\n" for name, value in written.items()))
    assert parser.parse_yaml_file(str(file)) == (expected,)
    file.write_text("ranks_per_node: [8, 8, 4]\n")
    assert parser.parse_yaml_file(str(file))[0].ranks_per_node == "8,8,4"
    options = [word for name, value in written.items() for word in (f"--{name}", value)]
    assert parser.parse_args_into_dataclasses(options) == (expected,)
    for text, servers in (
        ("2", AttentionServers(2)),
        ('{"count": 2, "ranks_serve": false}', AttentionServers(2, ranks_serve=False)),
    ):
        (config,) = parser.parse_args_into_dataclasses(["--attention_servers", text])
        assert config.attention_servers == servers
    file.write_text("attention_servers: {count: external, address: '10.0.0.1:7000'}\n")
    (config,) = parser.parse_yaml_file(str(file))
    assert config.attention_servers == AttentionServers("external", address="10.0.0.1:7000")
    (config,) = TrlParser((DistCAConfig,)).parse_args_and_config(["--config", str(file)])
    assert config.attention_servers == AttentionServers("external", address="10.0.0.1:7000")
    planned = DistCAConfig(planning={"exchange_buffer_bytes": 2**26, "ping_pong": False})
    file.write_text("planning: {exchange_buffer_bytes: 64MiB, ping_pong: false}\n")
    assert parser.parse_yaml_file(str(file)) == (planned,)
    text = '{"exchange_buffer_bytes": "64MiB", "ping_pong": false}'
    assert parser.parse_args_into_dataclasses(["--planning", text]) == (planned,)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--tokens_per_rank", "32q"])
    assert (
        "argument --tokens_per_rank/--tokens-per-rank: must be a number of tokens"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "plain", [0, 2, "external", {"count": 2, "timeout": 5.0, "transport": "tcp"}]
)
def test_settings_of_servers_travel_with_arguments(plain, tmp_path):
    config = DistCAConfig(attention_servers=plain)
    assert DistCAConfig(**asdict(config)) == pickle.loads(pickle.dumps(config)) == config
    # A server only serves with its arguments, and a rank divides its launch: this is neither.
    arguments = DistCATrainingArguments(str(tmp_path), use_cpu=True)
    arguments.attention_servers = config.attention_servers
    assert json.loads(arguments.to_json_string())["attention_servers"] == plain
    assert DistCAConfig(attention_servers=arguments.to_dict()["attention_servers"]) == config
    assert pickle.loads(pickle.dumps(arguments)).attention_servers == config.attention_servers
    sanitized = arguments.to_sanitized_dict()["attention_servers"]
    assert sanitized == (str(plain) if isinstance(plain, dict) else plain)


def test_ranks_need_the_settings_of_servers_alike_but_for_what_rank_0_alone_uses():
    servers = {"count": "external", "address": "10.0.0.1:7000", "token_file": "token"}
    here = DistCAConfig(attention_servers=servers)
    assert here.of_all_ranks() == DistCAConfig(attention_servers="external").of_all_ranks()
    for changes in ({"timeout": 5}, {"ranks_serve": False}, {"transport": "tcp"}, {"count": 0}):
        other = DistCAConfig(attention_servers={**servers, **changes})
        assert here.of_all_ranks() != other.of_all_ranks()


def test_expert_settings_of_plans_are_hidden_and_travel_with_arguments(tmp_path):
    """A user sees twelve settings, and the servers."""
    parser = HfArgumentParser(DistCAConfig)
    shown = {action.dest for action in parser._actions if action.help != SUPPRESS} - {"help"}
    assert shown == {setting.name for setting in fields(DistCAConfig)} - {"planning"}
    assert len(shown - {"attention_servers"}) == 12
    assert "planning" not in parser.format_help()
    for plain in (None, {"ping_pong": False}):
        config = DistCAConfig(planning=plain)
        assert DistCAConfig(**asdict(config)) == pickle.loads(pickle.dumps(config)) == config
        arguments = DistCATrainingArguments(str(tmp_path), use_cpu=True, planning=plain)
        assert json.loads(arguments.to_json_string())["planning"] == plain
        assert arguments.of_all_ranks()["planning"] == plain
    assert {name.name for name in fields(Planning)} <= {name.name for name in fields(PlanSettings)}


def test_what_the_planner_chooses():
    names = ("ping_pong", "balance_tolerance", "document_layout")
    as_set = (True, 0.01, "fixed")
    all_set = {
        "planning": {"ping_pong": True, "balance_tolerance": 0.01},
        "document_layout": "fixed",
    }
    for settings, expected in (({}, ("auto",) * 3), (all_set, as_set)):
        planning = DistCAConfig(**settings).plan_settings(8)
        assert tuple(planning[name] for name in names) == expected


@pytest.mark.parametrize(("servers", "expected"), [(0, False), (1, "auto"), ("external", "auto")])
def test_one_rank_exchanges_with_servers_alone(servers, expected):
    # One rank alone has nobody to exchange with; with attention servers it has.
    assert DistCAConfig(attention_servers=servers).plan_settings(1)["ping_pong"] == expected
