"""Ranks with disaggregated attention against one process with "sdpa" on the same global batch."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.head import plan_head
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.build import plan_placed
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.planner.settings import Choices, PlanSettings
from tests.models_and_batches import (
    SMALL_LLAMA4,
    in_nodes,
    in_stages,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
)

# Models cannot run on no rows at all: a rank without documents holds one token without a target.
FILLER = [1]
STAGE_ROWS = (None, 70, 20)
"""One stage, two, and seven or so."""
NODES = {3: (1, 2), 4: (2, 2)}
"""How many ranks share each node. With fewer ranks there are none that could forward rows."""
CHOSEN = {"groups of 1": (1e3, 1e3), "groups of 2": (1e12, 1e3), "groups of 4": (1e12, 1e12)}
"""Bytes a second inside nodes and between them, by the groups that are best then for the documents below."""
CHUNK_BYTES = 4 * 64 * 20
"""The loss is computed over chunks of 20 rows."""


def cut_rows(plan: MicroBatchPlan, rank: int, documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of one rank of a plan."""
    rows, positions, targets = [], [], []
    for nano in plan.nano_batches:
        for number, start, stop, _, _ in nano.layout.of_rank(rank).tolist():
            document = documents[nano.documents[number]]
            shifted = torch.cat([document[1:], torch.tensor([-100])])
            rows.append(document[start:stop])
            positions.append(torch.arange(start, stop))
            targets.append(shifted[start:stop])
    batch = {"input_ids": rows, "position_ids": positions, "shift_labels": targets}
    return {name: torch.cat(parts)[None] for name, parts in batch.items()}


def planned_step(
    model: PreTrainedModel, plan: MicroBatchPlan, dispatcher: Dispatcher, documents: list[torch.Tensor]
) -> float:
    """Forward and backward of this rank's rows; gradients summed over the ranks. Returns the global loss."""
    rank = dispatcher.groups.rank
    batch = cut_rows(plan, rank, documents)
    targets = sum(max(len(document) - 1, 0) for document in documents)
    loss = model(
        **batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=dispatcher.bind(plan)
    ).loss
    loss.backward()
    total = loss.detach().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
    return total.item()


def run_case(
    model_type: str,
    config: dict,
    lengths: list[int] | list[list[int]],
    layout: str,
    windows: tuple[int | None, ...],
    options: dict,
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Planned steps on every rank, one for each of `steps_of`."""
    ranks = dist.get_world_size()
    kinds = small_kinds(*windows, chunk=config.get("attention_chunk_size"))
    settings = PlanSettings(
        ranks=ranks,
        tokens_per_rank=4096,
        kinds=kinds,
        document_layout="joint",
        balance_block_size=8,
        ranks_per_node=NODES.get(ranks, 1),
    )
    if layout in CHOSEN:
        settings = replace(settings, tokens_per_rank=150, choices=choices(kinds, CHOSEN[layout]))
    dispatcher = Dispatcher(settings, torch.device("cpu"), **options)
    if layout in CHOSEN:
        plan = plan_micro_batch(lengths, settings)
        assert plan.choice.group == int(layout.split()[-1])
        flat = lengths
    elif layout == "joint":
        plan = plan_micro_batch(lengths, settings)
        flat = lengths
    else:
        rows = [row or FILLER for row in lengths]
        plan = plan_placed(rows, settings)
        flat = [length for row in rows for length in row]
    model = small_model(model_type, **config)
    plan_head(model, CHUNK_BYTES)
    steps = []
    for stage_rows, forwards in steps_of(ranks):
        model.zero_grad()
        step_plan = in_nodes(in_stages(plan, stage_rows), settings.nodes if forwards else None)
        loss = planned_step(model, step_plan, dispatcher, random_documents(flat))
        steps.append((loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    return steps


def choices(kinds: tuple[AttentionKind, ...], bandwidths: tuple[float, float]) -> Choices:
    """All choices, with costs of attention alone."""
    kernel = KernelCost(0.0, 0.0, 0.0, 1e-6)
    links = Links(*(LinkCost(0.0, bandwidth) for bandwidth in bandwidths))
    return Choices(StepCosts(tuple(KindCosts(kind, 1, kernel, kernel) for kind in kinds), 0.0, 0.0, 2.0, 0.0, links))


def steps_of(ranks: int, stage_rows: tuple[int | None, ...] = STAGE_ROWS) -> list[tuple[int | None, bool]]:
    """Rows of a stage, and whether rows are forwarded inside nodes, of each step."""
    return list(itertools.product(stage_rows, (False, True) if ranks in NODES else (False,)))


def forwards(dispatcher: Dispatcher, plan: MicroBatchPlan) -> bool:
    """Whether some layer has rows that are forwarded."""
    bound = dispatcher.bind(plan)
    return any(routes.forwards for nano in bound.nano_batches for routes in nano.routes.values())


def assert_equal_to_single_process(
    rank_pools, ranks, lengths, layout="joint", model_type="llama", config=None, windows=(None,), **options
):
    config = config or {}
    flat = (
        lengths if layout == "joint" or layout in CHOSEN else [length for row in lengths for length in row or FILLER]
    )
    loss, grads = reference_step(
        small_model(model_type, "sdpa" if model_type != "gemma2" else "eager", **config),
        random_documents(flat),
    )
    for steps in rank_pools[ranks].run(run_case, model_type, config, lengths, layout, windows, options):
        assert len(steps) == len(steps_of(ranks))
        for got_loss, got in steps:
            assert got_loss == pytest.approx(loss, rel=1e-6)
            assert got.keys() == grads.keys()
            for name in grads:
                assert relative_error(got[name], grads[name]) < 1e-5, name


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[120, 7, 1, 33, 64], [300], [90, 200, 1, 2, 3]], ids=["mixed", "one", "long"])
def test_joint_layout(rank_pools, ranks, lengths):
    assert_equal_to_single_process(rank_pools, ranks, lengths)


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (2, [[128], [16] * 8]),
        (2, [[96], []]),
        (3, [[100], [50, 50], [25] * 4]),
        (4, [[256], [1], [], [31, 33]]),
        (4, [[200], [56], [], []]),
    ],
    ids=["long-and-short", "no-rows", "three", "odd", "two-ranks-without-rows"],
)
@pytest.mark.parametrize("keep", [False, True])
def test_fixed_layout(rank_pools, ranks, rows, keep):
    assert_equal_to_single_process(rank_pools, ranks, rows, "fixed", keep_received=keep)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        ("groups of 1", [150, 40, 40, 40, 90, 90]),
        ("groups of 2", [150, 40, 40, 40, 90, 90]),
        ("groups of 2", [300, 64, 64]),
        ("groups of 4", [310, 64, 64]),
        ("groups of 1", [140, 140, 90, 90, 60, 60, 15]),  # the last one fits nowhere
    ],
)
def test_chosen_plans(rank_pools, layout, lengths):
    assert_equal_to_single_process(rank_pools, 4, lengths, layout)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["joint", "fixed"])
@pytest.mark.parametrize(
    ("model_type", "config", "windows"),
    [
        ("qwen3", {}, (None,)),
        ("mistral", {"sliding_window": 24}, (24,)),
        ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.05}, (24, None)),
        ("mixtral", {"num_local_experts": 4}, (None,)),
        ("llama4_text", SMALL_LLAMA4, (None,)),
    ],
    ids=["qwen3", "mistral", "gemma2", "mixtral", "llama4"],
)
def test_architectures(rank_pools, ranks, layout, model_type, config, windows):
    lengths = [128, 30, 66, 1, 31] if layout == "joint" else [[128], *([[30, 66, 1, 31]] * (ranks - 1))]
    assert_equal_to_single_process(rank_pools, ranks, lengths, layout, model_type, config, windows)
