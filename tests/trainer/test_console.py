"""What a training prints: a few figures in each line, and the planner's choice where `log_level`
asks for it.
"""

import logging
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_distca import DistCAConfig
from hf_distca.plan import ExchangeFigures, PlanChoice, PlanSummary
from hf_distca.planner.settings import UNBALANCED
from hf_distca.planning_settings import Planning
from hf_distca.trainer.metrics import for_console
from hf_distca.trainer.planned import log_choice
from tests.trainer.small_trainers import make_trainer

FIGURES = {
    "distca/tokens_per_second": 12345.6,
    "distca/imbalance_degree": 1.004,
    "distca/imbalance_degree_packed": 1.448,
    "distca/exposed_exchange_share": 0.0202,
    "distca/exchange_bytes": 2.078e6,
}


def test_few_figures_that_can_be_read():
    few = {"tokens/s": "12,346", "imbalance": "1.45 -> 1.00", "exposed wait": "2.0%"}
    assert for_console({"loss": 7.5, **FIGURES, "epoch": 1.0}) == {"loss": 7.5, "epoch": 1.0, **few}
    chosen = {"distca/gain_predicted": 1.332, "distca/mfu": 0.4567}
    assert for_console({**FIGURES, **chosen}) == {**few, "gain": "1.33", "mfu": "45.7%"}
    assert for_console({"eval_loss": 2.0}) == {"eval_loss": 2.0}
    # Where nothing moves, documents were placed by all that they take, not by core attention alone.
    none_moves = for_console({**FIGURES, **chosen, "distca/exchange_bytes": 0})
    assert none_moves.keys() == {"tokens/s", "exposed wait", "gain", "mfu"}


class Tracker(TrainerCallback):
    """Keeps the names of logged figures, as a tracker gets them."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.names.append(set(logs))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_the_console_shows_few_figures_and_trackers_get_all(tmp_path, capsys, disable_tqdm):
    trainer = make_trainer(
        str(tmp_path), max_steps=1, save_strategy="no", disable_tqdm=disable_tqdm
    )
    tracker = Tracker()
    trainer.add_callback(tracker)
    trainer.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert "distca/" not in line
    assert "'tokens/s': '" in line
    assert "'imbalance'" not in line  # of one rank
    assert "'exposed wait': '0.0%'" in line
    assert {
        "distca/tokens_per_second",
        "distca/exchange_bytes",
        "distca/ping_pong_share",
    } <= tracker.names[0]
    assert tracker.names[0] <= set(trainer.state.log_history[0])


def _printed_by_training(folder: str, log_level: str) -> str:
    """What this rank writes to stderr during two steps."""
    library = logging.getLogger("hf_distca")
    settings = {
        "document_layout": "auto",
        "balance_tolerance": "auto",
        "ping_pong": "auto",
        "device_profile": "cpu",
    }
    try:
        with redirect_stderr(StringIO()) as printed:
            make_trainer(
                folder, max_steps=2, save_strategy="no", log_level=log_level, **settings
            ).train()
    finally:
        library.handlers.clear()
        library.setLevel(logging.NOTSET)
    return printed.getvalue()


def test_the_planners_choice_is_logged_once_on_rank_0(rank_pools, tmp_path):
    first, other = rank_pools[2].run(_printed_by_training, str(tmp_path), "info")
    assert first.count("[hf_distca] the planner chose for the first micro-batch: documents ") == 1
    assert "by the costs in cpu: " in first
    assert "the planner chose" not in other
    for printed in rank_pools[2].run(_printed_by_training, str(tmp_path), "passive"):
        assert "[hf_distca]" not in printed


def test_words_of_choices(caplog):
    caplog.set_level(logging.INFO, "hf_distca")

    def logged(choice: PlanChoice | None, **settings: Any) -> str:
        given: dict[str, Any] = {
            "device_profile": None,
            "output_dir": "out",
            "why_nothing_is_compared": DistCAConfig().why_nothing_is_compared,
        }
        given |= {
            "document_layout": "fixed",
            "planning": Planning(balance_tolerance=0.1, ping_pong=True),
            **settings,
        }
        exchange = ExchangeFigures(*[0, 2_500_000], *[0] * 7)
        plan: Any = SimpleNamespace(summary=PlanSummary(1.448, 1.004, exchange), choice=choice)
        log_choice(plan, SimpleNamespace(**given), ranks=8)
        return caplog.records[-1].message

    outcome = (
        "imbalance of core attention 1.45 -> 1.00, 2.5 MB through the busiest rank in a layer's "
        "forward"
    )
    assert (
        logged(PlanChoice(2, 1, 0.01, 0.25, (), packed_seconds=0.3))
        == "the planner chose for the first micro-batch: documents each on a group of at most 2 of "
        "the 8 ranks, core attention balanced within 1%, nano-batches: 1. It is the fastest of "
        "the plans "
        "that were compared, by the costs in out/device_profile.json: 250.0 ms for forward "
        f"and backward, and 300.0 ms if documents were packed in order; {outcome}. Other "
        "micro-batches may get other choices"
    )
    alone = logged(PlanChoice(1, 2, UNBALANCED, 0.25, ()), device_profile="h100")
    assert (
        "documents each on one rank, core attention not balanced further, nano-batches: 2." in alone
    )
    assert "by the costs in h100: " in alone
    as_set = (
        "plans follow document_layout='fixed', planning={'balance_tolerance': 0.1, 'ping_pong': "
        "True}: the planner does not compare "
    )
    assert (
        logged(None)
        == f"{as_set}plans, because none of them is 'auto'. First micro-batch: {outcome}"
    )
    reason = DistCAConfig(attention_servers="external").why_nothing_is_compared
    assert "because attention servers may come and go" in logged(
        None, why_nothing_is_compared=reason
    )
