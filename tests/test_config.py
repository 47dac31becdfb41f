"""Settings as users write them: in Python, on the command line, in YAML."""

import pytest
from transformers import HfArgumentParser

from hf_distca import DistCAConfig
from hf_distca.planner.settings import PlanSettings


@pytest.mark.parametrize(
    ("given", "setting", "planned"),
    [
        ("auto", "auto", 4),
        (8, "8", 8),
        ("8", "8", 8),
        ([8, 8, 4], "8,8,4", (8, 8, 4)),
        ((8, 12), "8,12", (8, 12)),
        ([10], "10", 10),
        (" 8, 8 ,4", "8,8,4", (8, 8, 4)),
        ("1", "1", 1),
    ],
)
def test_ranks_per_node(given, setting, planned):
    config = DistCAConfig(ranks_per_node=given)
    assert config.ranks_per_node == setting
    assert config.planning(20, 4)["ranks_per_node"] == planned


def test_without_a_launch_all_links_are_alike():
    assert DistCAConfig().planning(8)["ranks_per_node"] == 1


@pytest.mark.parametrize(
    "given", ["", "0", "8,0", "8,", "-8", "8;8", "8.0", 8.0, 0, -1, True, None, [], [8, "x"], "all"]
)
def test_what_ranks_per_node_cannot_be(given):
    with pytest.raises(ValueError, match=r"ranks_per_node must be one number of ranks, a number for each node.*got "):
        DistCAConfig(ranks_per_node=given)


@pytest.mark.parametrize(
    ("given", "told"), [("3", "3 does not divide the 8 ranks"), ("4,3", "4,3 adds up to 7 ranks")]
)
def test_nodes_of_other_ranks(given, told):
    with pytest.raises(ValueError, match=f"ranks_per_node={told}.*the number of ranks of every node"):
        PlanSettings(**DistCAConfig(ranks_per_node=given).planning(8))


@pytest.mark.parametrize(
    ("written", "setting"), [("8", "8"), ("[8, 8, 4]", "8,8,4"), ("8,8,4", "8,8,4"), ("auto", "auto")]
)
def test_ranks_per_node_on_the_command_line_and_in_yaml(tmp_path, written, setting):
    parser = HfArgumentParser(DistCAConfig)
    file = tmp_path / "settings.yaml"
    file.write_text(f"ranks_per_node: {written}\n")
    assert parser.parse_yaml_file(str(file))[0].ranks_per_node == setting
    if "[" not in written:
        assert parser.parse_args_into_dataclasses(["--ranks_per_node", written])[0].ranks_per_node == setting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_rank": "-1k"}, "tokens_per_rank must be positive, got -1024"),
        ({"balance_block_size": 0}, "balance_block_size must be positive, got 0"),
        ({"loss_chunk_bytes": -1}, r"loss_chunk_bytes must be 0 \(all logits at once\) or more, got -1"),
        ({"long_documents": "cut"}, r"one of \['error', 'truncate', 'split'\], got 'cut'"),
        ({"document_layout": "best"}, r"one of \['auto', 'joint', 'fixed', 'whole'\], got 'best'"),
        ({"attention_kernel": "fast"}, "attention_kernel must be one of"),
        ({"attention_server_transport": "rdma"}, r"must be one of \['auto', 'tcp', 'nixl'\], got 'rdma'"),
        ({"ping_pong": "sometimes"}, "ping_pong must be true, false or 'auto', got 'sometimes'"),
        ({"ping_pong": 2}, "ping_pong must be true, false or 'auto', got 2"),
        ({"balance_tolerance": -0.1}, r"balance_tolerance must be 0 or more .*, or 'auto', got -0.1"),
        ({"balance_tolerance": "inf"}, r"balance_tolerance must be 0 or more .*, or 'auto', got 'inf'"),
        ({"balance_tolerance": None}, r"balance_tolerance must be 0 or more .*, or 'auto', got None"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        DistCAConfig(**options)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (8192, 8192),
        ("8192", 8192),
        ("8_192", 8192),
        ("32k", 32768),
        ("32K", 32768),
        (" 1.5 k ", 1536),
        ("1M", 1048576),
        ("128k", 131072),
    ],
)
def test_tokens_with_suffixes(given, tokens):
    assert DistCAConfig(tokens_per_rank=given).tokens_per_rank == tokens


@pytest.mark.parametrize("given", ["", "k", "32q", "32kB", "0.3k", "1e4", 8192.0, True, None, [8192]])
def test_what_is_no_number_of_tokens(given):
    with pytest.raises(ValueError, match=r"tokens_per_rank must be a number of tokens, such as 32768 or '32k', got "):
        DistCAConfig(tokens_per_rank=given)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("64KiB", 65536),
        ("128MiB", 134217728),
        ("0.5 gib", 536870912),
        ("64kB", 64000),
        ("128MB", 128000000),
        ("1GB", 1000000000),
    ],
)
def test_bytes_with_suffixes(given, size):
    config = DistCAConfig(exchange_buffer_bytes=given, loss_chunk_bytes=given)
    assert (config.exchange_buffer_bytes, config.loss_chunk_bytes) == (size, size)


@pytest.mark.parametrize("name", ["exchange_buffer_bytes", "loss_chunk_bytes"])
@pytest.mark.parametrize("given", ["", "128M", "128k", "MiB", "0.1KiB", 1.5, None])
def test_what_is_no_number_of_bytes(name, given):
    with pytest.raises(ValueError, match=rf"{name} must be a number of bytes, such as 134217728 or '128MiB', got "):
        DistCAConfig(**{name: given})


@pytest.mark.parametrize(("given", "setting"), [(0, 0), ("0", 0), (2, 2), ("2", 2), ("external", "external")])
def test_attention_servers(given, setting):
    config = DistCAConfig(attention_servers=given)
    assert config.attention_servers == setting
    assert type(config.attention_servers) is type(setting)


@pytest.mark.parametrize("given", ["many", -1, "-1", 1.0, True, None, "1k"])
def test_what_attention_servers_cannot_be(given):
    with pytest.raises(ValueError, match="attention_servers must be a number of processes or 'external', got "):
        DistCAConfig(attention_servers=given)


def test_suffixes_on_the_command_line_and_in_yaml(tmp_path, capsys):
    parser = HfArgumentParser(DistCAConfig)
    written = {"tokens_per_rank": "32k", "exchange_buffer_bytes": "64MiB", "attention_servers": "external"}
    expected = DistCAConfig(tokens_per_rank=32768, exchange_buffer_bytes=2**26, attention_servers="external")
    file = tmp_path / "settings.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in written.items()))
    assert parser.parse_yaml_file(str(file)) == (expected,)
    options = [word for name, value in written.items() for word in (f"--{name}", value)]
    assert parser.parse_args_into_dataclasses(options) == (expected,)
    assert parser.parse_args_into_dataclasses(["--attention_servers", "2"])[0].attention_servers == 2
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--tokens_per_rank", "32q"])
    assert "argument --tokens_per_rank/--tokens-per-rank: must be a number of tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "setting"), [("auto", "auto"), (True, True), ("true", True), ("False", False), ("0", False)]
)
def test_ping_pong_is_on_off_or_auto(given, setting):
    assert DistCAConfig(ping_pong=given).ping_pong == setting
    assert DistCAConfig(ping_pong=given).planning(8)["ping_pong"] is (setting is not False)


@pytest.mark.parametrize(("given", "setting"), [("auto", "auto"), (0.05, 0.05), ("0.05", 0.05), (0, 0.0)])
def test_a_tolerance_is_a_number_or_auto(given, setting):
    config = DistCAConfig(balance_tolerance=given)
    assert config.balance_tolerance == setting
    assert config.planning(8).get("balance_tolerance", "auto") == setting


def test_auto_on_the_command_line():
    parser = HfArgumentParser(DistCAConfig)
    (config,) = parser.parse_args_into_dataclasses(["--ping_pong", "false", "--balance_tolerance", "0.1"])
    assert (config.ping_pong, config.balance_tolerance, config.chooses) == (False, 0.1, True)
    (config,) = parser.parse_args_into_dataclasses([])
    assert (config.ping_pong, config.balance_tolerance, config.document_layout) == ("auto",) * 3
    assert not DistCAConfig(ping_pong=True, balance_tolerance=0.01, document_layout="joint").chooses
