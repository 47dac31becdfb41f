"""Planned steps against one process with stock attention on the same global batch; what is
recorded, and refused.
"""

import itertools
import re
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_distca.dispatch.bound import BoundNanoBatch
from hf_distca.dispatch.core_attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.recorder import NO_ROWS
from hf_distca.dispatch.rows import IndexBuffer, take
from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import TASK, MicroBatchPlan, NanoBatch, Plan
from hf_distca.plan.cost import Workers
from hf_distca.plan.figures import loads_of
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.planning import plan_lost, plan_with_servers, tasks_of_ranks
from hf_distca.pool.server import ServedTasks
from tests.models_and_batches import (
    CHUNK_BYTES,
    SMALL_KIND,
    SMALL_LLAMA4,
    Step,
    assert_same_step,
    changed,
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
    with_lora,
)

CPU = torch.device("cpu")

# Loss and gradients

GEMMA2 = {"sliding_window": 12, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.05}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}
MODELS = {
    "llama": ({}, (None,), "sdpa"),
    "mistral": ({"sliding_window": 24}, (24,), "sdpa"),
    "gemma2": (GEMMA2, (12, None), "eager"),
    "gpt_oss": (GPT_OSS, (12, None), "eager"),
    "llama4_text": (SMALL_LLAMA4, (None,), "sdpa"),
}
"""Settings, windows, and the stock attention to compare with."""
FILLER = (1,)
"""Models cannot run on no rows at all: a rank without documents holds one token without a target.
"""
NODES = {3: (1, 2), 4: (2, 2)}
"""How many ranks share each node. With fewer ranks there are none that could forward rows."""


@dataclass(frozen=True)
class Case:
    """A planned step, in stages of several sizes, and with forwarded rows where ranks share nodes.

    Attributes:
        lengths: of the documents, which the planner lays out; or of those that each rank holds.
        at_random: cut each document into tasks for ranks drawn at random, as no good plan would:
            every rank gives queries away, computes others' and returns them.
        checkpointing: reentrant or not; None for none.
        local: windows of layers for which nothing moves; None: not looked at.
    """

    ranks: int = 2
    lengths: tuple = (120, 7, 1, 33, 64)
    model: str = "llama"
    at_random: bool = False
    stage_rows: tuple[int | None, ...] = (None, 70, 20)
    ping_pong: bool = False
    checkpointing: bool | None = None
    lora: bool = False
    local: tuple[int | None, ...] | None = None

    @property
    def on_ranks(self) -> list[tuple[int, ...]]:
        """Lengths of the documents on each rank; none where the planner lays them out."""
        return [row or FILLER for row in self.lengths] if isinstance(self.lengths[0], tuple) else []

    @property
    def documents(self) -> tuple[int, ...]:
        return tuple(itertools.chain(*self.on_ranks)) or self.lengths

    @property
    def steps(self) -> list[tuple[int | None, bool]]:
        """Rows of a stage, and whether rows are forwarded inside nodes, of each step: the first
        and the last rows with and without, those between with.
        """
        between = [(rows, True) for rows in self.stage_rows[1:-1]]
        ends = dict.fromkeys((self.stage_rows[0], self.stage_rows[-1]))
        if self.ranks not in NODES:
            return [(rows, False) for rows in self.stage_rows]
        return [(rows, in_hops) for rows in ends for in_hops in (False, True)] + between


@cache
def step_of_one_process(model_type: str, lora: bool, lengths: tuple[int, ...]) -> Step:
    config, _, stock = MODELS[model_type]
    model = small_model(model_type, stock, **config)
    return reference_step(with_lora(model) if lora else model, random_documents(lengths))


def run_case(case: Case) -> list[Step]:
    """The case's steps on every rank."""
    config, windows, _ = MODELS[case.model]
    kinds = small_kinds(*windows, chunk=config.get("attention_chunk_size"))
    options = {"ranks_per_node": NODES.get(case.ranks, 1), "ping_pong": case.ping_pong}
    tolerance = {} if case.local is None else {"balance_tolerance": 0.3}
    settings = PlanSettings(case.ranks, 4096, kinds, balance_block_size=8, **options, **tolerance)
    dispatcher = Dispatcher(settings, CPU)
    plan = (
        plan_placed(case.on_ranks, settings)
        if case.on_ranks
        else plan_micro_batch(case.lengths, settings)
    )
    model = small_model(case.model, **config).train()
    plan_head(model, CHUNK_BYTES)
    if case.ping_pong:
        plan_layers(model)
        assert len(plan.nano_batches) == 2
    model = with_lora(model) if case.lora else model
    if case.checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": case.checkpointing})
        if case.checkpointing and case.lora:
            model.enable_input_require_grads()
    steps = []
    for number, (stage_rows, in_hops) in enumerate(case.steps):
        model.zero_grad()
        tasks = cut_at_random(plan, number) if case.at_random else plan
        bound = dispatcher.bind(
            in_nodes(in_stages(tasks, stage_rows), settings.nodes if in_hops else None)
        )
        if case.local is not None:
            assert {kind.window for kind in bound.local} == {*case.local}
        if case.at_random:
            assert (
                any(
                    routes.forwards
                    for nano in bound.nano_batches
                    for routes in nano.routes.values()
                )
                == in_hops
            )
        steps.append(planned_step(model, bound, random_documents(case.documents)))
    return steps


def cut_at_random(plan: MicroBatchPlan, seed: int) -> MicroBatchPlan:
    """The same layout, each document in up to five tasks for workers drawn at random."""
    random = np.random.default_rng(seed)

    def tasks(plan: Plan) -> Plan:
        cut = []
        for document, length in enumerate(plan.layout.lengths.tolist()):
            inner = (
                random.choice(np.arange(1, length), min(4, length - 1), replace=False)
                if length > 1
                else []
            )
            ends = [0, *sorted(inner), length]
            cut += [
                (document, start, stop, random.integers(plan.workers))
                for start, stop in itertools.pairwise(ends)
            ]
        table = np.array(cut, TASK)
        return replace(
            plan, tasks=table[np.lexsort((table["start"], table["document"], table["worker"]))]
        )

    return changed(plan, tasks)


MIXED = (30, 66, 1, 31)
EQUAL, EQUAL_IN_WINDOWS = ((60, 40), (60, 40)), ((70, 64), (32, 38, 31, 33))
ON_RANKS = ((40, 17, 9, 33), (25, 3, 50, 21), (30, 30, 1, 28), (44, 2, 31, 20))
ALONE = {"stage_rows": (None,)}


def at_random(model: str, *, ranks: int = 3, **options: bool) -> Case:
    """One stage, two or three, and seven or more."""
    return Case(ranks, ON_RANKS[:ranks], model, True, (None, 40, 11), **options)


CASES = {
    "auto-2": Case(),
    "auto-3-one": Case(3, (300,)),
    "auto-4-long": Case(4, (90, 200, 1, 2, 3)),
    "fixed-long-and-short": Case(2, ((128,), (16,) * 8)),
    "fixed-no-rows": Case(2, ((96,), ())),
    "fixed-three": Case(3, ((100,), (50, 50), (25,) * 4)),
    "fixed-odd": Case(4, ((256,), (1,), (), (31, 33))),
    "fixed-two-ranks-without-rows": Case(4, ((200,), (56,), (), ())),
    **{
        f"{model}-auto": Case(2, (128, *MIXED), model)
        for model in ("mistral", "gemma2", "llama4_text")
    },
    **{
        f"{model}-fixed": Case(4, ((128,), *[MIXED] * 3), model)
        for model in ("mistral", "gemma2", "llama4_text")
    },
    # Each model with and without each of: checkpoints, two nano-batches in turns.
    "random-gemma2": at_random("gemma2"),
    "random-gemma2-checkpoint-turns": at_random("gemma2", checkpointing=False, ping_pong=True),
    "random-llama-turns": at_random("llama", ping_pong=True),
    "random-llama-checkpoint": at_random("llama", checkpointing=False),
    "random-gpt_oss": at_random("gpt_oss"),
    "random-gpt_oss-checkpoint-turns": at_random("gpt_oss", checkpointing=False, ping_pong=True),
    "random-two-nodes-of-two": at_random("gpt_oss", ranks=4, checkpointing=False, ping_pong=True),
    "checkpoint": Case(checkpointing=False, **ALONE),
    "reentrant": Case(checkpointing=True, **ALONE),
    "lora": Case(lora=True, **ALONE),
    "lora-checkpoint": Case(lora=True, checkpointing=False, **ALONE),
    "lora-reentrant": Case(lora=True, checkpointing=True, **ALONE),
    **{
        f"{windows}-stay-turns-{turns}": Case(
            2, rows, "gemma2", ping_pong=turns, local=windows, **ALONE
        )
        for windows, rows in (((12, None), EQUAL), ((12,), EQUAL_IN_WINDOWS))
        for turns in (False, True)
    },
    "sinks-of-one-rank": Case(1, model="gpt_oss", **ALONE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_process(rank_pools, case, request):
    if case.stage_rows == (None,):
        request.getfixturevalue("backward_thread")
    expected = step_of_one_process(case.model, case.lora, case.documents)
    for steps in rank_pools[case.ranks].run(run_case, case):
        assert len(steps) == len(case.steps)
        for got in steps:
            assert_same_step(got, expected)


# Parts of a step

LENGTHS, FURTHER = [120, 7, 1, 33, 64], [90, 31, 2]


def _seen_by_a_backward() -> tuple[bool, float]:
    """Whether a backward ran in this thread, and the gradient."""
    threads = []
    x = torch.ones((), requires_grad=True)
    y = 3 * x
    y.register_hook(lambda _grad: threads.append(threading.get_ident()))
    y.backward()
    return threads == [threading.get_ident()], x.grad.item()


def test_another_thread_runs_backwards_here_and_on_ranks(rank_pools, backward_thread):
    assert [_seen_by_a_backward(), *rank_pools[2].run(_seen_by_a_backward)] == [(False, 3.0)] * 3
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()


def _accumulated() -> Step:
    """Two micro-batches whose plans are both alive; the second runs forward before the first runs
    backward.
    """
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    targets = sum(length - 1 for length in LENGTHS + FURTHER)
    losses = []
    for lengths in (LENGTHS, FURTHER):
        bound = dispatcher.bind(plan_micro_batch(lengths, dispatcher.settings))
        batch = cut_rows(bound.plan, dist.get_rank(), random_documents(lengths))
        losses.append(
            model(
                **batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound
            ).loss
        )
    for loss in losses:
        loss.backward()
    return summed_step(model, sum(losses))


def test_two_micro_batches_at_once(rank_pools, backward_thread):
    documents = [*random_documents(LENGTHS), *random_documents(FURTHER)]
    expected = reference_step(small_model(implementation="sdpa"), documents)
    for got in rank_pools[2].run(_accumulated):
        assert_same_step(got, expected)


def _step_in_bfloat16(ping_pong: bool) -> Step:
    """A step whose weights are in float32; kernels are given bfloat16, without autocast."""
    dispatcher, model, seen = dispatcher_of_all_ranks(ping_pong=ping_pong), small_model(), set()
    if ping_pong:
        plan_layers(model)

    def looked_at(run, *args):
        seen.add((args[2].dtype, torch.is_autocast_enabled("cpu")))
        return run(*args)

    for name in ("forward", "backward"):
        setattr(dispatcher.kernel, name, partial(looked_at, getattr(dispatcher.kernel, name)))
    with torch.autocast("cpu", torch.bfloat16):
        bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
        step = planned_step(model, bound, random_documents(LENGTHS))
    assert seen == {(torch.bfloat16, False)}
    return step


def test_autocast(rank_pools, backward_thread):
    exact_loss, exact = reference_step(
        small_model(implementation="sdpa"), random_documents(LENGTHS)
    )
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(
            small_model(implementation="sdpa"), random_documents(LENGTHS)
        )
    for got_loss, got in (
        step for turns in (False, True) for step in rank_pools[2].run(_step_in_bfloat16, turns)
    ):
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        for name in exact:
            assert (
                relative_error(got[name], exact[name])
                < 2 * relative_error(stock[name], exact[name]) + 1e-2
            ), name


def _attend(
    dispatcher, plan, autocast=False, softcap=None
) -> tuple[list[Tensor], list[Tensor], list[tuple]]:
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
        output = disaggregated_attention(
            *qkv, None, bound, AttentionParams(0.3, softcap=softcap), module
        )
        output.backward(do)
    spans = [(span.kind, span.part, *span.work, span.pairs) for span in recording.take()]
    return [*(x.detach() for x in qkv), do], [output.detach(), *(x.grad for x in qkv)], spans


def _beside_the_kernel(
    on_ranks: list[list[int]], autocast: bool = False, softcap: float | None = None
) -> None:
    """Results of core attention on this rank's rows are those of the kernel alone, where nothing
    moves to the bit.
    """
    dispatcher = dispatcher_of_all_ranks()
    plan = plan_placed(on_ranks, dispatcher.settings)
    (*qkv, do), got, spans = _attend(dispatcher, plan, autocast, softcap)
    lengths, params = on_ranks[dist.get_rank()], AttentionParams(0.3, softcap=softcap)
    shapes = TaskShapes.build(lengths, lengths, CPU)
    o, lse = dispatcher.kernel.forward(*qkv, shapes, params)
    expected = [o, *dispatcher.kernel.backward(do, *qkv, o, lse, shapes, params)]
    if len(on_ranks) > 1:
        assert {*plan.nano_batches[0].plans[SMALL_KIND].tasks["worker"]} == {*range(len(on_ranks))}
        torch.testing.assert_close(got, expected)
        return
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert spans == [
        (kind, part, 3, 0, direction, pairs)
        for direction in ("forward", "backward")
        for kind, part, pairs in (
            ("kernel", "local", 20 * 21 // 2 + 11 * 12 // 2),
            ("phase", "run local", 0),
        )
    ]


def test_attention_alone_gives_what_the_kernel_gives_even_on_a_rank_without_rows(
    rank_pools, backward_thread
):
    rank_pools[1].run(_beside_the_kernel, [[20, 11]])
    rank_pools[1].run(_beside_the_kernel, [[20, 11]], True, 2.0)
    rank_pools[2].run(_beside_the_kernel, [[40], []])


def _recorded(nodes: tuple[int, ...] | None, stage_rows: int | None) -> None:
    """The spans of one core attention are those that its schedules ask for."""
    dispatcher = dispatcher_of_all_ranks(ranks_per_node=1 if nodes is None else nodes.count(0))
    plan = plan_placed([[90, 40], *[[30, 9]] * (dist.get_world_size() - 1)], dispatcher.settings)
    plan = in_nodes(in_stages(plan, stage_rows), nodes)
    *_, spans = _attend(dispatcher, plan)
    (routes,) = dispatcher.bind(plan).nano_batches[0].routes.values()
    expected = []
    for direction, schedule in routes.schedules.items():
        for phase in schedule:
            calls = [(call.name, routes.tasks[call.key].pairs) for call in phase.run]
            waits = [transfer for transfer in phase.wait if routes.rows_of(transfer) != NO_ROWS]
            expected += [("wait", transfer.name, 3, 0, direction, 0) for transfer in waits]
            expected += [("kernel", name, 3, 0, direction, pairs) for name, pairs in calls]
            expected += [("send", transfer.name, 3, 0, direction, 0) for transfer in phase.send]
            expected.append(("phase", phase.name, 3, 0, direction, 0))
    assert spans == expected


def test_schedules_are_carried_out_phase_by_phase(rank_pools, backward_thread):
    for stage_rows in (None, 20):
        rank_pools[2].run(_recorded, None, stage_rows)
    rank_pools[4].run(_recorded, (0, 0, 1, 1), 20)


@pytest.fixture
def bound_plan():
    """Bound plan of a document of 12 tokens, and the dispatcher."""
    dispatcher = Dispatcher(PlanSettings(1, 64, small_kinds()), CPU)
    return dispatcher.bind(dispatcher.plan_lengths([[12]])[0]), dispatcher


def test_a_plan_of_another_batch(bound_plan):
    bound, _ = bound_plan
    with pytest.raises(ValueError, match="runs on 7 rows, but the plan gives this rank 12 rows"):
        small_model()(input_ids=torch.arange(3, 10)[None], distca_plan=bound)


def test_a_plan_for_other_nodes(bound_plan):
    bound, dispatcher = bound_plan
    message = (
        r"on the nodes \(0,\), but the dispatcher's settings have the nodes None; use the same"
    )
    with pytest.raises(ValueError, match=message):
        dispatcher.bind(in_nodes(bound.plan, (0,)))


@pytest.mark.parametrize(
    ("model_type", "config", "kind"),
    [
        (
            "mistral",
            {"sliding_window": 4},
            "a window of 4 with 4 query and 2 key-value heads of 8 (values of 8)",
        ),
        (
            "llama",
            {"head_dim": 16},
            "full attention with 4 query and 2 key-value heads of 16 (values of 16)",
        ),
    ],
)
def test_a_plan_for_other_layers(bound_plan, model_type, config, kind):
    bound, _ = bound_plan
    planned = "full attention with 4 query and 2 key-value heads of 8 (values of 8)"
    message = (
        f"a layer has {kind}, but the plan was made for {planned}; list the kinds of all layers in "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}PlanSettings.kinds$"):
        small_model(model_type, **config)(input_ids=torch.arange(3, 15)[None], distca_plan=bound)


# Workers that hold no rows: what is asked of them, and what is made of their answers, which are
# made up here

SERVED = [120, 7, 64, 1, 33, 70]
OF_QUERIES = ("q", "do", "o", "lse")


class Servers:
    """Two servers of the next micro-batch, which compute at once what they are sent.

    Args:
        lost: a server, and at which collection it is found lost; None: none is.
        kernel: computes what they are sent.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        lost: tuple[int, int] | None,
        kernel: Kernel | None = None,
    ) -> None:
        self.groups, self.lost, self.collections = dispatcher.groups, lost, 0
        self.kernel = kernel or CpuKernel()
        self.events: list[tuple] = []  # what is asked of them, in order

    def bind(self, plan, settings):
        self.settings = settings
        self.plan = plan_with_servers(
            plan, Workers.uniform(settings.ranks + 2), settings, ranks_serve=True
        )
        self.events.append(("bind", len(plan.nano_batches)))
        return self.plan, self

    def repair(self, plan, kind, lost):
        workers = [plan.layout.ranks + server for server in lost]
        repaired = plan_lost(plan, workers, kind, self.settings, pairs_per_second=1e6)
        self.events.append(
            ("repair", loads_of(tasks_of_ranks(plan, workers)).max(), loads_of(repaired).max())
        )
        return repaired

    def start(self, work, workers, kind, params, rows):
        rank, ranks, nano = (
            self.groups.rank,
            self.groups.ranks,
            self.plan.nano_batches[work.nano_batch],
        )
        plan = nano.plans[kind]
        computing = {*plan.tasks["worker"].tolist()}
        assert {ranks + worker.index for worker in workers} == computing - {*range(ranks)}
        assert all(len(column_T) == nano.layout.tokens[rank] for column_T in rows.values())
        self.events.append(("start", *work, tuple(rows)))
        answers = {}
        for worker in workers:
            sent = {
                name: take(x, worker.q_rows if name in OF_QUERIES else worker.k_rows)
                for name, x in rows.items()
            }
            assert (len(sent["q"]), len(sent["k"])) == (worker.q_count, worker.k_count)
            received = self.groups.all_gather(sent)
            answer = computed(self.kernel, plan, ranks + worker.index, received, params)[rank]
            if worker.q_count + worker.k_count:
                answers[worker.index] = answer
        return SimpleNamespace(collect=partial(self._collect, work, answers))

    def _collect(self, work, answers):
        self.events.append(("collect", *work))
        is_lost = self.lost is not None and self.collections >= self.lost[1]
        self.collections += 1
        lost = frozenset({self.lost[0]} if is_lost else ())
        return {server: answer for server, answer in answers.items() if server not in lost}, lost


def computed(
    kernel: Kernel, plan: Plan, worker: int, received: list[dict[str, Tensor]], params
) -> list[dict[str, Tensor]]:
    """A worker's results of what the ranks sent, rank by rank."""
    buffer = IndexBuffer(CPU)
    tasks = ServedTasks(plan, worker, buffer)
    buffer.send()
    for kind, name in (("queries", "q"), ("keys", "k")):
        assert [len(rank[name]) for rank in received] == [
            own.stop - own.start for own in tasks.rows[kind]
        ]
    rows = {name: torch.cat([rank[name] for rank in received]) for name in received[0]}
    qkv = rows["q"], *(take(rows[name], tasks.call_tasks.k_rows) for name in ("k", "v"))
    if "do" not in rows:
        o, lse = kernel.forward(*qkv, tasks.call_tasks.shapes, params)
        results = {"queries": {"o": o, "lse": lse}}
    else:
        dq, *dkv = kernel.backward(
            rows["do"], *qkv, rows["o"], rows["lse"], tasks.call_tasks.shapes, params
        )
        dk, dv = (tasks.key_sums.add_up([part]) for part in dkv)
        results = {"queries": {"dq": dq}, "keys": {"dk": dk, "dv": dv}}
    return [
        {
            name: x[tasks.rows[kind][rank]]
            for kind, columns in results.items()
            for name, x in columns.items()
        }
        for rank in range(len(received))
    ]


def model_of(window: int | None, implementation: str = "distca") -> PreTrainedModel:
    return small_model(
        "llama" if window is None else "mistral", implementation, sliding_window=window
    )


def _step_with_servers(ping_pong, lost, window, others) -> tuple[Step, list[tuple]]:
    """A planned step with two servers, and what was asked of these."""
    dispatcher = dispatcher_of_all_ranks(kinds=small_kinds(window), ping_pong=ping_pong, **others)
    model = model_of(window)
    dispatcher.remote = remote = Servers(dispatcher, lost)
    if ping_pong:
        plan_layers(model)
    bound = dispatcher.bind(plan_micro_batch(SERVED, dispatcher.settings))
    return planned_step(model, bound, random_documents(SERVED)), remote.events


def events_of(pool, ping_pong=False, lost=None, window=None, **others):
    """What every rank asks of servers in a step.

    The step is that of one process without servers.
    """
    expected = reference_step(model_of(window, "sdpa"), random_documents(SERVED))
    results = pool.run(_step_with_servers, ping_pong, lost, window, others)
    for got, events in results:
        assert_same_step(got, expected)
        assert events == results[0][1]
    return results[0][1]


def test_rows_go_to_servers_and_come_back_attention_by_attention(rank_pools):
    forward_columns, backward_columns = ("q", "k", "v"), ("q", "do", "o", "lse", "k", "v")
    assert events_of(rank_pools[1]) == [
        ("bind", 1),
        *[("start", 0, 0, "forward", forward_columns), ("collect", 0, 0, "forward")],
        *[("start", 1, 0, "forward", forward_columns), ("collect", 1, 0, "forward")],
        *[("start", 1, 0, "backward", backward_columns), ("collect", 1, 0, "backward")],
        *[("start", 0, 0, "backward", backward_columns), ("collect", 0, 0, "backward")],
    ]
    # Nano-batches take turns while servers compute.
    assert [event[:4] for event in events_of(rank_pools[1], ping_pong=True)] == [
        ("bind", 2),
        *[
            (what, layer, nano, "forward")
            for layer in (0, 1)
            for what in ("start", "collect")
            for nano in (0, 1)
        ],
        *[
            (what, layer, nano, "backward")
            for layer in (1, 0)
            for what in ("start", "collect")
            for nano in (1, 0)
        ],
    ]


def test_what_a_lost_server_did_not_give_is_computed_by_the_ranks(rank_pools):
    for collection in range(4):
        for ping_pong in (False, True):
            events_of(rank_pools[1], ping_pong, lost=(1, collection))
    for lost in (None, (0, 2)):
        events_of(rank_pools[2], ping_pong=True, lost=lost)


@pytest.mark.parametrize("window", [None, 24])
def test_ranks_on_nodes_share_what_a_lost_server_was_to_compute(rank_pools, window):
    # Packed in order, rank 0 holds most of the attention, and of what is lost. A buffer has 8 rows:
    # there are stages.
    layout = {"document_layout": "fixed", "ranks_per_node": 2, "exchange_buffer_bytes": 512}
    events = events_of(rank_pools[4], lost=(0, 1), window=window, **layout)
    ((_, at_home, shared),) = [event for event in events if event[0] == "repair"]
    assert shared < at_home


def test_each_kind_of_attention_has_a_repair_of_its_own_which_is_made_once():
    kinds = small_kinds(None, 4)
    settings = PlanSettings(1, 64, kinds)
    # A rank holds a document of 8 rows, of which the server computes the last two: 7 + 8 pairs, or
    # 4 in each window.
    tasks = np.array([(0, 0, 6, 0), (0, 6, 8, 1)], TASK)
    layout = fixed_layout([[8]])
    nano = NanoBatch(
        np.arange(1), layout, {kind: Plan(layout, tasks, 2, kind.window) for kind in kinds}
    )
    bound, asked, lost = (
        BoundNanoBatch(0, nano, 0, "alone", set(), IndexBuffer(CPU)),
        [],
        frozenset({0}),
    )

    def repaired(plan, kind, servers):
        asked.append((kind.window, servers))
        return plan_lost(plan, [1], kind, settings, pairs_per_second=1e6)

    repairs = [
        bound.repair(kind, lost, SimpleNamespace(repair=repaired)) for kind in (*kinds, *kinds)
    ]
    assert [sum(group.pairs for group in routes.tasks.values()) for routes in repairs] == [
        15,
        8,
        15,
        8,
    ]
    assert asked == [(None, lost), (4, lost)]
