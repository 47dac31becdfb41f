"""Hybrids whose documents are cut, trained as users do on four ranks of two nodes, beside one
process with "sdpa".
"""

from functools import cache
from typing import Any

import pytest

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from tests.trainer.comparison import (
    HYBRID,
    TOKENS_PER_RANK,
    Result,
    Run,
    assert_equal,
    train_alone,
    train_planned,
)
from tests.trainer.features import Generates, lora, model_of

PLANS: list[BoundPlan] = []


def _keep_plans(patch: pytest.MonkeyPatch) -> None:
    bind = Dispatcher.bind
    PLANS.clear()
    patch.setattr(Dispatcher, "bind", lambda *args: PLANS.append(bind(*args)) or PLANS[-1])


def _counted(_trainer: Any) -> tuple[int, int, int]:
    """How many plans cut documents and forward rows inside nodes.

    The third number says how often layers took turns.
    """
    forwards = [
        any(r.forwards for nano in plan.nano_batches for r in nano.routes.values())
        for plan in PLANS
    ]
    return (
        sum(p.cuts_paths for p in PLANS),
        sum(forwards),
        sum(p.ran.layers_in_turns for p in PLANS),
    )


SHARED: dict[str, Any] = {
    # Without experts, whose weights transformers' trainer does not read from a checkpoint under
    # DDP.
    "model": model_of(**HYBRID, mlp_only_layers=[0, 1]),
    "planned": {
        "tokens_per_rank": TOKENS_PER_RANK // 2,  # as many tokens together as two ranks have
        "exchange_buffer_bytes": 1024,  # K and V travel in stages
        **{
            "document_layout": "fixed",
            "ranks_per_node": 2,
            "save_strategy": "steps",
            "save_steps": 2,
        },
    },
    "given": lambda model: {"callbacks": [Generates()]},
    "patched": _keep_plans,
    "after": _counted,
}
EVALUATED = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
RUNS = {
    "whole": Run(EVALUATED, **SHARED),
    "resumed": Run(EVALUATED, **SHARED, resumes="whole/checkpoint-2"),
    "autocast, LoRA": Run(
        {**EVALUATED, "bf16": True},
        adapter=lora("q_proj", "in_proj_qkvz", "out_proj"),
        rounds=True,
        **SHARED,
    ),
}


def _train(folder: str) -> dict[str, Result]:
    return {name: train_planned(folder, run, "ddp", name) for name, run in RUNS.items()}


def test_trainings_are_those_of_one_process(rank_pools, tmp_path, subtests):
    @cache
    def alone(name: str, exact: bool) -> Result:
        return train_alone(
            str(tmp_path / "alone"), RUNS["whole" if name == "resumed" else name], exact
        )

    for rank, results in enumerate(rank_pools[4].run(_train, str(tmp_path))):
        for name, run in RUNS.items():

            def expected(exact: bool = False, name=name, noted=results[name]["noted"]) -> Result:
                result = alone(name, exact)
                # A resumed training generates after its last step alone.
                return {**result, "noted": {step: result["noted"][step] for step in noted}}

            with subtests.test(name, rank=rank):
                assert_equal(run, results[name], expected, "ddp")
                assert min(results[name]["after"]) > 0
        assert list(results["resumed"]["noted"]) == ["3"]
