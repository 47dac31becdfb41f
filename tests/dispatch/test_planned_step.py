"""Planned steps with accumulation and on a rank without rows; what is recorded, and which plans are refused."""

import re
import threading

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from tests.models_and_batches import (
    SMALL_KIND,
    Step,
    assert_same_step,
    cut_rows,
    dispatcher_of_all_ranks,
    in_nodes,
    in_stages,
    random_documents,
    reference_step,
    small_model,
    summed_step,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS, FURTHER = [120, 7, 1, 33, 64], [90, 31, 2]


def _seen_by_a_backward() -> tuple[bool, float]:
    """Whether a backward ran in this thread, and the gradient."""
    threads = []
    x = torch.ones((), requires_grad=True)
    y = 3 * x
    y.register_hook(lambda _grad: threads.append(threading.get_ident()))
    y.backward()
    return threads == [threading.get_ident()], x.grad.item()


def test_another_thread_runs_backwards_here_and_on_ranks(rank_pools):
    assert [_seen_by_a_backward(), *rank_pools[2].run(_seen_by_a_backward)] == [(False, 3.0)] * 3
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()


def _accumulated() -> Step:
    """Two micro-batches whose plans are both alive; the second runs forward before the first runs backward."""
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    targets = sum(length - 1 for length in LENGTHS + FURTHER)
    losses = []
    for lengths in (LENGTHS, FURTHER):
        bound = dispatcher.bind(plan_micro_batch(lengths, dispatcher.settings))
        batch = cut_rows(bound.plan, dist.get_rank(), random_documents(lengths))
        losses.append(model(**batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound).loss)
    for loss in losses:
        loss.backward()
    return summed_step(model, sum(losses))


def test_two_micro_batches_at_once(rank_pools):
    documents = [*random_documents(LENGTHS), *random_documents(FURTHER)]
    expected = reference_step(small_model(implementation="sdpa"), documents)
    for got in rank_pools[2].run(_accumulated):
        assert_same_step(got, expected)


def _attend(
    dispatcher: Dispatcher, plan: MicroBatchPlan, autocast: bool = False, softcap: float | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple]]:
    """Of this rank's rows: Q, K, V and dO; O, dQ, dK and dV; and the spans, without their times."""
    bound, dtype = dispatcher.bind(plan), torch.bfloat16 if autocast else torch.float32
    recording = dispatcher.recorder.listen("phase", "kernel", "send", "wait")
    torch.manual_seed(0)
    *qkv, do = (torch.randn(bound.rows, heads, 8).to(dtype) for heads in (4, 2, 2, 4))
    for x in qkv:
        x.requires_grad_()
    module = torch.nn.Identity()
    module.layer_idx = 3
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = disaggregated_attention(*qkv, None, bound, AttentionParams(0.3, softcap=softcap), module)
        output.backward(do)
    spans = [(span.kind, span.part, *span.work, span.pairs) for span in recording.take()]
    return [*(x.detach() for x in qkv), do], [output.detach(), *(x.grad for x in qkv)], spans


def _beside_the_kernel(on_ranks: list[list[int]], autocast: bool, softcap: float | None) -> tuple:
    """O and gradients of this rank's rows, those of the kernel alone, and spans; and which workers have tasks."""
    dispatcher = dispatcher_of_all_ranks()
    plan = plan_placed(on_ranks, dispatcher.settings)
    (*qkv, do), got, spans = _attend(dispatcher, plan, autocast, softcap)
    lengths, params = on_ranks[dist.get_rank()], AttentionParams(0.3, softcap=softcap)
    shapes = TaskShapes.build(lengths, lengths, torch.device("cpu"))
    o, lse = dispatcher.kernel.forward(*qkv, shapes, params)
    expected = [o, *dispatcher.kernel.backward(do, *qkv, o, lse, shapes, params)]
    return got, expected, spans, set(plan.nano_batches[0].plans[SMALL_KIND].tasks["worker"].tolist())


@pytest.mark.parametrize(("autocast", "softcap"), [(False, None), (True, 2.0)])
def test_where_nothing_moves_results_are_those_of_the_kernel_to_the_bit(rank_pools, autocast, softcap):
    ((got, expected, spans, _),) = rank_pools[1].run(_beside_the_kernel, [[20, 11]], autocast, softcap)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert spans == [
        (kind, part, 3, 0, direction, pairs)
        for direction in ("forward", "backward")
        for kind, part, pairs in (("kernel", "local", 20 * 21 // 2 + 11 * 12 // 2), ("phase", "run local", 0))
    ]


def test_a_rank_without_rows_still_serves(rank_pools):
    """Attention alone: models cannot run on no rows."""
    for got, expected, _, workers in rank_pools[2].run(_beside_the_kernel, [[40], []], False, None):
        assert workers == {0, 1}
        torch.testing.assert_close(got, expected)


def _recorded(nodes: tuple[int, ...] | None, stage_rows: int | None) -> tuple[list, list]:
    """Spans of one core attention, and those that its schedules ask for."""
    dispatcher = dispatcher_of_all_ranks(ranks_per_node=1 if nodes is None else nodes.count(0))
    plan = plan_placed([[90, 40], *[[30, 9]] * (dist.get_world_size() - 1)], dispatcher.settings)
    plan = in_nodes(in_stages(plan, stage_rows), nodes)
    *_, spans = _attend(dispatcher, plan)
    (routes,) = dispatcher.bind(plan).nano_batches[0].routes.values()
    expected = []
    for direction, schedule in (("forward", routes.forward), ("backward", routes.backward["nothing"])):
        for phase in schedule:
            calls = [(call.name, routes.groups[call.group].pairs) for call in phase.run]
            waits = [transfer for transfer in phase.wait if _crosses(routes, transfer)]
            expected += [("wait", transfer.name, 3, 0, direction, 0) for transfer in waits]
            expected += [("kernel", name, 3, 0, direction, pairs) for name, pairs in calls]
            expected += [("send", transfer.name, 3, 0, direction, 0) for transfer in phase.send]
            expected.append(("phase", phase.name, 3, 0, direction, 0))
    return spans, expected


def _crosses(routes, transfer) -> bool:
    route = routes.queries if transfer.rows == "queries" else routes.keys[transfer.stage]
    return (route.forwarded if transfer.rows == "forwarded" else route).crossing


@pytest.mark.parametrize(("nodes", "stage_rows"), [(None, None), (None, 20), ((0, 0, 1, 1), 20)])
def test_schedules_are_carried_out_phase_by_phase(rank_pools, nodes, stage_rows):
    for spans, expected in rank_pools[2 if nodes is None else 4].run(_recorded, nodes, stage_rows):
        assert spans == expected


def _refused() -> None:
    dispatcher, batch = dispatcher_of_all_ranks(), {"input_ids": torch.arange(3, 15)[None]}
    bound = dispatcher.bind(dispatcher.plan_lengths([[12]])[0])
    with pytest.raises(ValueError, match="gives this rank 12 rows, but the model runs on 7"):
        small_model()(input_ids=batch["input_ids"][:, :7], distca_plan=bound)
    of_nodes = r"on the nodes \(0,\), but the dispatcher's settings have the nodes None; use the same"
    with pytest.raises(ValueError, match=of_nodes):
        dispatcher.bind(in_nodes(bound.plan, (0,)))
    for model_type, config, kind in (
        ("mistral", {"sliding_window": 4}, "a window of 4 with 4 query and 2 key-value heads of 8 (values of 8)"),
        ("llama", {"head_dim": 16}, "full attention with 4 query and 2 key-value heads of 16 (values of 16)"),
    ):
        planned = "full attention with 4 query and 2 key-value heads of 8 (values of 8)"
        message = f"a layer has {kind}, but the plan was made for {planned}; list the kinds of all layers in "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}PlanSettings.kinds$"):
            small_model(model_type, **config)(**batch, distca_plan=bound)


def test_plans_of_another_batch_for_other_nodes_or_other_layers(rank_pools):
    rank_pools[1].run(_refused)
