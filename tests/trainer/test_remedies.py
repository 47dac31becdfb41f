"""Warnings with remedies, from figures that the test makes."""

import logging

import pytest

from hf_distca import DistCAConfig
from hf_distca.trainer.metrics import Remedies

FINE = {"imbalance_degree": 1.01, "exposed_exchange_share": 0.02, "ping_pong_share": 1.0}
WRONG = {"imbalance_degree": 1.3, "exposed_exchange_share": 0.25, "ping_pong_share": 0.01}


@pytest.mark.parametrize("name", WRONG)
def test_each_is_told_once_with_the_remedy(caplog, name):
    remedies = Remedies(DistCAConfig(balance_tolerance=0.3, ping_pong=True), ping_pong=True)
    for _ in range(30):
        remedies.see({**FINE, name: WRONG[name]}, 10)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"distca/{name} is {WRONG[name]:.2f}" in record.message
    remedy = {"imbalance_degree": "(it is 0.3)", "exposed_exchange_share": "hf-distca doctor"}
    assert remedy.get(name, "raise tokens_per_rank") in record.message


def test_nothing_is_told_of_few_steps_or_where_all_is_well(caplog):
    remedies = Remedies(DistCAConfig(), ping_pong=True)
    remedies.see(WRONG, 49)
    remedies.see({}, 1)
    assert not caplog.records
    remedies.see(FINE, 1000)  # means over all steps since: most were fine
    remedies.see(FINE, 50)
    assert not caplog.records


def test_ping_pong_that_is_off_is_not_missed(caplog):
    Remedies(DistCAConfig(ping_pong=False), ping_pong=False).see({**FINE, "ping_pong_share": 0.0}, 50)
    assert not caplog.records


@pytest.mark.parametrize("name", ["imbalance_degree", "ping_pong_share"])
def test_what_the_planner_has_chosen_needs_no_remedy(caplog, name):
    Remedies(DistCAConfig(), ping_pong=True).see({**FINE, name: WRONG[name]}, 50)
    assert not caplog.records
