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
    with pytest.raises(ValueError, match=r"ranks_per_node must be a number of ranks, one number for each node.*got "):
        DistCAConfig(ranks_per_node=given)


@pytest.mark.parametrize(
    ("given", "told"), [("3", "3 does not divide the 8 ranks"), ("4,3", "4,3 is 7 ranks together")]
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


def test_a_transport_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="must be one of auto, tcp, nixl, got 'rdma'"):
        DistCAConfig(attention_server_transport="rdma")


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


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("ping_pong", "sometimes", "ping_pong must be true, false or 'auto', got 'sometimes'"),
        ("ping_pong", 2, "ping_pong must be true, false or 'auto', got 2"),
        ("balance_tolerance", -0.1, r"balance_tolerance must be 0 or more .*, or 'auto', got -0.1"),
        ("balance_tolerance", "inf", r"balance_tolerance must be 0 or more .*, or 'auto', got 'inf'"),
        ("balance_tolerance", None, r"balance_tolerance must be 0 or more .*, or 'auto', got None"),
    ],
)
def test_what_is_neither_a_value_nor_auto(name, given, told):
    with pytest.raises(ValueError, match=told):
        DistCAConfig(**{name: given})


def test_auto_on_the_command_line():
    parser = HfArgumentParser(DistCAConfig)
    (config,) = parser.parse_args_into_dataclasses(["--ping_pong", "false", "--balance_tolerance", "0.1"])
    assert (config.ping_pong, config.balance_tolerance, config.chooses) == (False, 0.1, True)
    (config,) = parser.parse_args_into_dataclasses([])
    assert (config.ping_pong, config.balance_tolerance, config.document_layout) == ("auto",) * 3


def test_nothing_is_chosen_where_all_is_set():
    assert not DistCAConfig(ping_pong=True, balance_tolerance=0.01, document_layout="joint").chooses
