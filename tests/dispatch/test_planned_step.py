"""A planned step under autocast, with accumulation and on a rank without rows; what it records and what it refuses."""

import contextlib
import copy
import re
import threading

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.patches.head import plan_head
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    CHUNK_BYTES,
    SMALL_KIND,
    Step,
    assert_same_step,
    cut_rows,
    dispatcher_of_all_ranks,
    in_nodes,
    in_stages,
    planned_step,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
    summed_step,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

CPU = torch.device("cpu")
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


def _step_in_bfloat16() -> Step:
    """A step whose weights are in float32; kernels are given bfloat16, without autocast."""
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    plan_head(model, CHUNK_BYTES)
    kernel, seen = dispatcher.kernel, []
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        for name in ("forward", "backward"):
            run = getattr(kernel, name)
            patch.setattr(
                kernel,
                name,
                lambda *args, run=run: seen.append((args[2].dtype, torch.is_autocast_enabled("cpu"))) or run(*args),
            )
        bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
        step = planned_step(model, bound, random_documents(LENGTHS))
    assert set(seen) == {(torch.bfloat16, False)}
    return step


def test_autocast(rank_pools):
    exact_loss, exact = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    for got_loss, got in rank_pools[2].run(_step_in_bfloat16):
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        for name in exact:
            assert relative_error(got[name], exact[name]) < 2 * relative_error(stock[name], exact[name]) + 1e-2, name


def _accumulated() -> Step:
    """Two micro-batches whose plans are both alive; the second runs forward before the first runs backward."""
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    targets = sum(length - 1 for lengths in (LENGTHS, FURTHER) for length in lengths)
    losses = []
    for lengths in (LENGTHS, FURTHER):
        plan = plan_micro_batch(lengths, dispatcher.settings)
        batch = cut_rows(plan, dist.get_rank(), random_documents(lengths))
        bound = dispatcher.bind(plan)
        losses.append(model(**batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound).loss)
    for loss in losses:
        loss.backward()
    return summed_step(model, sum(losses))


def test_two_micro_batches_at_once(rank_pools):
    documents = [*random_documents(LENGTHS), *random_documents(FURTHER)]
    expected = reference_step(small_model(implementation="sdpa"), documents)
    for got in rank_pools[2].run(_accumulated):
        assert_same_step(got, expected)


def _attend(plan: MicroBatchPlan, dispatcher: Dispatcher, *, autocast: bool = False, softcap: float | None = None):
    """Inputs with gradients, the gradient of O, and O of this rank's rows; and the spans, without their times."""
    bound, params = dispatcher.bind(plan), AttentionParams(0.3, softcap=softcap)
    recording = dispatcher.recorder.listen("phase", "kernel", "send", "wait")
    torch.manual_seed(0)
    rows, dtype = bound.rows, torch.bfloat16 if autocast else torch.float32
    inputs = [torch.randn(rows, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    do = torch.randn(rows, 4, 8).to(dtype)
    module = torch.nn.Identity()
    module.layer_idx = 3
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        output = disaggregated_attention(*inputs, None, bound, params, module)
        output.backward(do)
    spans = [(span.kind, span.part, *span.work, span.pairs) for span in recording.take()]
    return bound, params, inputs, do, output.detach(), spans


def _alone(autocast: bool, softcap: float | None) -> tuple:
    """O and gradients where nothing moves, and those of the kernel itself; and what was measured."""
    dispatcher = dispatcher_of_all_ranks()
    plan = plan_placed([[20, 11]], dispatcher.settings)
    _, params, inputs, do, output, spans = _attend(plan, dispatcher, autocast=autocast, softcap=softcap)
    shapes, qkv = TaskShapes.build([20, 11], [20, 11], CPU), [x.detach() for x in inputs]
    o, lse = dispatcher.kernel.forward(*qkv, shapes, params)
    expected = [o, *dispatcher.kernel.backward(do, *qkv, o, lse, shapes, params)]
    return [output, *(x.grad for x in inputs)], expected, spans


@pytest.mark.parametrize(("autocast", "softcap"), [(False, None), (True, 2.0)])
def test_where_nothing_moves_results_are_those_of_the_kernel_to_the_bit(rank_pools, autocast, softcap):
    ((got, expected, spans),) = rank_pools[1].run(_alone, autocast, softcap)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert spans == [
        (kind, part, 3, 0, direction, pairs)
        for direction in ("forward", "backward")
        for kind, part, pairs in (("kernel", "local", 20 * 21 // 2 + 11 * 12 // 2), ("phase", "run local", 0))
    ]


def _recorded(nodes: tuple[int, ...] | None, stage_rows: int | None) -> tuple[list, list]:
    """Spans of one core attention, and those that its schedules ask for."""
    dispatcher = dispatcher_of_all_ranks(ranks_per_node=1 if nodes is None else nodes.count(0))
    plan = plan_placed([[90, 40], *[[30, 9]] * (dist.get_world_size() - 1)], dispatcher.settings)
    bound, *_, spans = _attend(in_nodes(in_stages(plan, stage_rows), nodes), dispatcher)
    (routes,) = bound.nano_batches[0].routes.values()
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


def _attend_without_rows() -> list[list[int]]:
    """Attention alone, where a rank may hold no row at all."""
    dispatcher = dispatcher_of_all_ranks()
    plan = plan_placed([[40], []], dispatcher.settings)
    _, _, mine, do, output, _ = _attend(plan, dispatcher)
    if dist.get_rank() == 0:
        q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in mine)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True
        )[0].transpose(0, 1)
        expected.backward(do)
        torch.testing.assert_close(output, expected)
        for got, other in zip(mine, (q, k, v), strict=True):
            torch.testing.assert_close(got.grad, other.grad.transpose(0, 1))
    moved = plan.nano_batches[0].plans[SMALL_KIND].tasks["worker"]
    return [list(output.shape), moved.tolist()]


def test_rank_without_rows_still_serves(rank_pools):
    (first_shape, workers), (second_shape, _) = rank_pools[2].run(_attend_without_rows)
    assert (first_shape, second_shape) == ([40, 4, 8], [0, 4, 8])
    assert set(workers) == {0, 1}


@pytest.fixture
def bound_step():
    model = small_model()
    dispatcher = Dispatcher(PlanSettings(ranks=1, tokens_per_rank=64, kinds=(SMALL_KIND,)), CPU)
    batch = {"input_ids": torch.arange(3, 15)[None], "position_ids": torch.arange(12)[None]}
    return model, batch, dispatcher.bind(dispatcher.plan_lengths([[12]])[0])


def test_plan_of_another_batch_or_for_other_nodes(bound_step):
    model, batch, plan = bound_step
    shorter = {name: value[:, :7] for name, value in batch.items()}
    with pytest.raises(ValueError, match="gives this rank 12 rows, but the model runs on 7"):
        model(**shorter, distca_plan=plan)
    dispatcher = Dispatcher(PlanSettings(1, 64, small_kinds()), CPU)
    with pytest.raises(
        ValueError, match=r"on the nodes \(0,\), but the dispatcher's settings have the nodes None; use the same"
    ):
        dispatcher.bind(in_nodes(plan.plan, (0,)))


@pytest.mark.parametrize(
    ("model_type", "config", "kind"),
    [
        ("mistral", {"sliding_window": 4}, "a window of 4 with 4 query and 2 key-value heads of 8 (values of 8)"),
        ("llama", {"head_dim": 16}, "full attention with 4 query and 2 key-value heads of 16 (values of 16)"),
    ],
    ids=["window", "head-dim"],
)
def test_kind_that_was_not_planned(bound_step, model_type, config, kind):
    _, batch, plan = bound_step
    planned = "full attention with 4 query and 2 key-value heads of 8 (values of 8)"
    message = (
        f"a layer has {kind}, but the plan was made for {planned}; list the kinds of all layers in PlanSettings.kinds"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        small_model(model_type, **config)(**batch, distca_plan=plan)


def test_model_is_left_as_it_was(bound_step):
    model, batch, plan = bound_step
    before = copy.deepcopy(model.state_dict())
    model(**batch, distca_plan=plan)
    assert plan.ran.attentions == model.config.num_hidden_layers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
