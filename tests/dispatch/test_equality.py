"""Ranks with disaggregated attention against one process with stock attention on the same global batch."""

import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import TASK, MicroBatchPlan, Plan
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    CHUNK_BYTES,
    SMALL_LLAMA4,
    Step,
    assert_same_step,
    changed,
    in_nodes,
    in_stages,
    planned_step,
    random_documents,
    reference_step,
    small_kinds,
    small_model,
    with_lora,
)

MODELS = {
    "llama": ({}, (None,), "sdpa"),
    "mistral": ({"sliding_window": 24}, (24,), "sdpa"),
    "gemma2": (
        {"sliding_window": 12, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.05},
        (12, None),
        "eager",
    ),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}, (12, None), "eager"),
    "llama4_text": (SMALL_LLAMA4, (None,), "sdpa"),
}
"""Settings, windows, and the stock attention to compare with."""
FILLER = (1,)
"""Models cannot run on no rows at all: a rank without documents holds one token without a target."""
NODES = {3: (1, 2), 4: (2, 2)}
"""How many ranks share each node. With fewer ranks there are none that could forward rows."""


@dataclass(frozen=True)
class Case:
    """A planned step, in stages of several sizes, and with forwarded rows where ranks share nodes.

    Attributes:
        lengths: of the documents; for the layouts "fixed" and "random" those of each rank.
        layout: "random" cuts each document into tasks for ranks drawn at random, as no good plan would: every rank
            gives queries away, computes others' and returns them.
        checkpointing: reentrant or not; None for none.
        local: windows of layers for which nothing moves; None: not looked at.
    """

    ranks: int = 2
    lengths: tuple = (120, 7, 1, 33, 64)
    layout: str = "joint"
    model: str = "llama"
    stage_rows: tuple[int | None, ...] = (None, 70, 20)
    keep_received: bool = False
    ping_pong: bool | None = None
    checkpointing: bool | None = None
    lora: bool = False
    local: tuple[int | None, ...] | None = None

    @property
    def flat(self) -> tuple[int, ...]:
        """Lengths of all documents."""
        if self.layout in ("fixed", "random"):
            return tuple(length for row in self.lengths for length in row or FILLER)
        return self.lengths


@cache
def step_of_one_process(model_type: str, lora: bool, lengths: tuple[int, ...]) -> Step:
    config, _, stock = MODELS[model_type]
    model = small_model(model_type, stock, **config)
    return reference_step(with_lora(model) if lora else model, random_documents(lengths))


def run_case(case: Case) -> list[Step]:
    """Planned steps on every rank, one for each of `steps_of`."""
    config, windows, _ = MODELS[case.model]
    kinds, nodes = small_kinds(*windows, chunk=config.get("attention_chunk_size")), NODES.get(case.ranks, 1)
    settings = PlanSettings(
        case.ranks, 4096, kinds, document_layout="joint", balance_block_size=8, ranks_per_node=nodes
    )
    if case.ping_pong is not None:
        settings = replace(settings, ping_pong=case.ping_pong)
    if case.local is not None:
        settings = replace(settings, balance_tolerance=0.3)
    dispatcher = Dispatcher(settings, torch.device("cpu"), keep_received=case.keep_received)
    if case.layout in ("fixed", "random"):
        plan = plan_placed([row or FILLER for row in case.lengths], settings)
    else:
        plan = plan_micro_batch(case.lengths, settings)
    model = small_model(case.model, **config).train()
    plan_head(model, CHUNK_BYTES)
    if case.ping_pong:
        plan_layers(model)
        assert len(plan.nano_batches) == 2
    model = with_lora(model) if case.lora else model
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing})
        if case.checkpointing and case.lora:
            model.enable_input_require_grads()
    steps = []
    for number, (stage_rows, in_hops) in enumerate(steps_of(case)):
        model.zero_grad()
        tasks = cut_at_random(plan, number) if case.layout == "random" else plan
        step_plan = in_nodes(in_stages(tasks, stage_rows), settings.nodes if in_hops else None)
        bound = dispatcher.bind(step_plan)
        if case.local is not None:
            assert {kind.window for kind in bound.local} == {*case.local}
        if case.layout == "random":
            assert any(routes.forwards for nano in bound.nano_batches for routes in nano.routes.values()) == in_hops
        steps.append(planned_step(model, bound, random_documents(case.flat)))
    return steps


def steps_of(case: Case) -> list[tuple[int | None, bool]]:
    """Rows of a stage, and whether rows are forwarded inside nodes, of each step."""
    return list(itertools.product(case.stage_rows, (False, True) if case.ranks in NODES else (False,)))


def cut_at_random(plan: MicroBatchPlan, seed: int) -> MicroBatchPlan:
    """The same layout, each document in up to five tasks for workers drawn at random."""
    random = np.random.default_rng(seed)

    def tasks(plan: Plan) -> Plan:
        cut = []
        for document, length in enumerate(plan.layout.lengths.tolist()):
            inner = random.choice(np.arange(1, length), min(4, length - 1), replace=False) if length > 1 else []
            ends = [0, *sorted(inner), length]
            cut += [(document, start, stop, random.integers(plan.workers)) for start, stop in itertools.pairwise(ends)]
        table = np.array(cut, TASK)
        return replace(plan, tasks=table[np.lexsort((table["start"], table["document"], table["worker"]))])

    return changed(plan, tasks)


MIXED = (30, 66, 1, 31)
EQUAL, EQUAL_IN_WINDOWS = ((60, 40), (60, 40)), ((70, 64), (32, 38, 31, 33))
ON_RANKS = ((40, 17, 9, 33), (25, 3, 50, 21), (30, 30, 1, 28), (44, 2, 31, 20))
ALONE = {"stage_rows": (None,)}


def at_random(model: str, *, ranks: int = 3, **options: bool) -> Case:
    """One stage, two or three, and seven or more."""
    return Case(ranks, ON_RANKS[:ranks], "random", model, stage_rows=(None, 40, 11), **{"ping_pong": False, **options})


CASES = {
    "joint-2": Case(),
    "joint-3-one": Case(3, (300,)),
    "joint-4-long": Case(4, (90, 200, 1, 2, 3)),
    "fixed-long-and-short": Case(2, ((128,), (16,) * 8), "fixed", keep_received=True),
    "fixed-no-rows": Case(2, ((96,), ()), "fixed"),
    "fixed-three": Case(3, ((100,), (50, 50), (25,) * 4), "fixed", keep_received=True),
    "fixed-odd": Case(4, ((256,), (1,), (), (31, 33)), "fixed"),
    "fixed-two-ranks-without-rows": Case(4, ((200,), (56,), (), ()), "fixed", keep_received=True),
    **{f"{model}-joint": Case(2, (128, *MIXED), model=model) for model in ("mistral", "gemma2", "llama4_text")},
    **{
        f"{model}-fixed": Case(4, ((128,), MIXED, MIXED, MIXED), "fixed", model)
        for model in ("mistral", "gemma2", "llama4_text")
    },
    # Each model with and without each of: received rows kept, checkpoints, two nano-batches in turns.
    "random-gemma2": at_random("gemma2"),
    "random-llama-turns": at_random("llama", ping_pong=True),
    "random-llama-checkpoint": at_random("llama", checkpointing=False),
    "random-gpt_oss-checkpoint-turns": at_random("gpt_oss", checkpointing=False, ping_pong=True),
    "random-gpt_oss-kept": at_random("gpt_oss", keep_received=True),  # with sinks less is kept
    "random-gemma2-kept-turns": at_random("gemma2", keep_received=True, ping_pong=True),
    "random-gemma2-kept-checkpoint": at_random("gemma2", keep_received=True, checkpointing=False),
    "random-llama-all": at_random("llama", keep_received=True, checkpointing=False, ping_pong=True),
    "random-two-nodes-of-two": at_random("gpt_oss", ranks=4, checkpointing=False, ping_pong=True),
    "checkpoint": Case(checkpointing=False, **ALONE),
    "reentrant": Case(checkpointing=True, **ALONE),
    "lora": Case(lora=True, **ALONE),
    "lora-checkpoint": Case(lora=True, checkpointing=False, **ALONE),
    "lora-reentrant": Case(lora=True, checkpointing=True, **ALONE),
    **{
        f"{windows}-stay-turns-{turns}": Case(2, rows, "fixed", "gemma2", ping_pong=turns, local=windows, **ALONE)
        for windows, rows in (((12, None), EQUAL), ((12,), EQUAL_IN_WINDOWS))
        for turns in (False, True)
    },
    "sinks-of-one-rank": Case(1, model="gpt_oss", **ALONE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_process(rank_pools, case, request):
    if case.stage_rows == (None,):
        request.getfixturevalue("backward_thread")
    expected = step_of_one_process(case.model, case.lora, case.flat)
    for steps in rank_pools[case.ranks].run(run_case, case):
        assert len(steps) == len(steps_of(case))
        for got in steps:
            assert_same_step(got, expected)
