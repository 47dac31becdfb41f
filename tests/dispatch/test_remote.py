"""What a dispatcher asks of workers that hold no rows, and what it makes of their answers: they are made up here."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.recorder import Work
from hf_distca.dispatch.remote import ServerRows
from hf_distca.dispatch.rows import take
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.cost import Workers
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.routes import make_routes
from hf_distca.planner.servers import local_tasks, plan_lost, plan_with_servers
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    Step,
    assert_same_step,
    dispatcher_of_all_ranks,
    planned_step,
    random_documents,
    reference_step,
    small_kinds,
    small_model,
)

LENGTHS = [120, 7, 64, 1, 33, 70]
OF_QUERIES = ("q", "do", "o", "lse")
Rows = Mapping[str, Tensor]


class Servers:
    """Two servers of the next micro-batch, which compute at once what they are sent.

    Args:
        lost: a server, and at which collection it is found lost; None: none is.
    """

    def __init__(self, dispatcher: Dispatcher, lost: tuple[int, int] | None) -> None:
        self.groups, self.lost, self.collections = dispatcher.groups, lost, 0
        self.events: list[tuple[Any, ...]] = []  # what is asked of them, in order

    def bind(self, plan: MicroBatchPlan, settings: PlanSettings) -> tuple[MicroBatchPlan, "Servers"]:
        self.settings = settings
        self.plan = plan_with_servers(plan, Workers.uniform(settings.ranks + 2), settings, ranks_serve=True)
        self.events.append(("bind", len(plan.nano_batches)))
        return self.plan, self

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        workers = [plan.layout.ranks + server for server in lost]
        repaired = plan_lost(plan, workers, kind, self.settings, pairs_per_second=1e6)
        self.events.append(("repair", loads_of(local_tasks(plan, workers)).max(), loads_of(repaired).max()))
        return repaired

    def start(
        self, work: Work, servers: Sequence[ServerRows], kind: AttentionKind, params: AttentionParams, rows: Rows
    ) -> SimpleNamespace:
        rank, ranks, nano = self.groups.rank, self.groups.ranks, self.plan.nano_batches[work.nano_batch]
        plan = nano.plans[kind]
        assert {ranks + asked.server for asked in servers} == {*plan.tasks["worker"].tolist()} - {*range(ranks)}
        assert all(len(column_T) == nano.layout.tokens[rank] for column_T in rows.values())
        self.events.append(("start", *work, tuple(rows)))
        answers = {}
        for asked in servers:
            sent = {name: take(x, asked.q_rows if name in OF_QUERIES else asked.k_rows) for name, x in rows.items()}
            assert (len(sent["q"]), len(sent["k"])) == (asked.q_count, asked.k_count)
            answer = computed(plan, ranks + asked.server, self.groups.all_gather(sent), params)[rank]
            if asked.q_count + asked.k_count:
                answers[asked.server] = answer
        return SimpleNamespace(collect=partial(self._collect, work, answers))

    def _collect(self, work: Work, answers: dict[int, Rows]) -> tuple[dict[int, Rows], frozenset[int]]:
        self.events.append(("collect", *work))
        is_lost = self.lost is not None and self.collections >= self.lost[1]
        self.collections += 1
        lost = frozenset({self.lost[0]} if is_lost else ())
        return {server: answer for server, answer in answers.items() if server not in lost}, lost


def computed(plan: Plan, worker: int, received: Sequence[Rows], params: AttentionParams) -> list[Rows]:
    """A worker's results of what the ranks sent, rank by rank."""
    routes, kernel = make_routes(plan, worker), CpuKernel()
    group, messages = routes.stages[0].remote_query, {"q": routes.queries, "k": routes.stages[0].keys}
    counts = {kind: each.recv_counts[: len(received)].tolist() for kind, each in messages.items()}
    assert all([len(rank[kind]) for rank in received] == counts[kind] for kind in counts)
    shapes = TaskShapes.build(group.q_lens.tolist(), group.k_lens.tolist(), torch.device("cpu"))
    q_rows, k_rows = torch.from_numpy(group.q_rows), torch.from_numpy(group.k_rows)
    inputs = {
        name: torch.cat([rank[name] for rank in received])[q_rows if name in OF_QUERIES else k_rows]
        for name in received[0]
    }
    if "do" not in inputs:
        parts = zip(("o", "lse"), kernel.forward(*inputs.values(), shapes, params), strict=True)
    else:
        ordered = [inputs[name] for name in ("do", "q", "k", "v", "o", "lse")]
        parts = zip(("dq", "dk", "dv"), kernel.backward(*ordered, shapes, params), strict=True)
    answers: list[dict[str, Tensor]] = [{} for _ in received]
    for name, part in parts:
        kind, index = ("k", k_rows) if name in ("dk", "dv") else ("q", q_rows)
        total = torch.zeros(sum(counts[kind]), *part.shape[1:]).index_add(0, index, part)
        for answer, of_rank in zip(answers, total.split(counts[kind]), strict=True):
            answer[name] = of_rank
    return answers


def model_of(window: int | None, implementation: str = "distca") -> PreTrainedModel:
    return small_model("llama" if window is None else "mistral", implementation, sliding_window=window)


def _step_with_servers(
    ping_pong: bool, lost: tuple[int, int] | None, window: int | None, others: dict[str, Any]
) -> tuple[Step, list[tuple[Any, ...]]]:
    """A planned step with two servers, and what was asked of these."""
    dispatcher = dispatcher_of_all_ranks(kinds=small_kinds(window), ping_pong=ping_pong, **others)
    model = model_of(window)
    dispatcher.remote = remote = Servers(dispatcher, lost)
    if ping_pong:
        plan_layers(model)
    bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
    return planned_step(model, bound, random_documents(LENGTHS)), remote.events


def events_of(pool, ping_pong=False, lost=None, window=None, **others):
    """What every rank asks of servers in a step; the step is that of one process without servers."""
    expected = reference_step(model_of(window, "sdpa"), random_documents(LENGTHS))
    results = pool.run(_step_with_servers, ping_pong, lost, window, others)
    for got, events in results:
        assert_same_step(got, expected)
        assert events == results[0][1]
    return results[0][1]


def test_rows_go_to_servers_and_come_back_attention_by_attention(rank_pools):
    there, again = ("q", "k", "v"), ("q", "do", "o", "lse", "k", "v")
    assert events_of(rank_pools[1]) == [
        ("bind", 1),
        *[("start", 0, 0, "forward", there), ("collect", 0, 0, "forward")],
        *[("start", 1, 0, "forward", there), ("collect", 1, 0, "forward")],
        *[("start", 1, 0, "backward", again), ("collect", 1, 0, "backward")],
        *[("start", 0, 0, "backward", again), ("collect", 0, 0, "backward")],
    ]
    # Nano-batches take turns while servers compute.
    assert [event[:4] for event in events_of(rank_pools[1], ping_pong=True)] == [
        ("bind", 2),
        *[(what, layer, nano, "forward") for layer in (0, 1) for what in ("start", "collect") for nano in (0, 1)],
        *[(what, layer, nano, "backward") for layer in (1, 0) for what in ("start", "collect") for nano in (1, 0)],
    ]


def test_what_a_lost_server_did_not_give_is_computed_by_the_ranks(rank_pools):
    for collection in range(4):
        for ping_pong in (False, True):
            events_of(rank_pools[1], ping_pong, lost=(1, collection))
    for lost in (None, (0, 2)):
        events_of(rank_pools[2], ping_pong=True, lost=lost)


@pytest.mark.parametrize("window", [None, 24])
def test_ranks_on_nodes_share_what_a_lost_server_was_to_compute(rank_pools, window):
    # Packed in order, rank 0 holds most of the attention, and of what is lost. A buffer has 8 rows: there are stages.
    layout = {"document_layout": "fixed", "ranks_per_node": 2, "exchange_buffer_bytes": 512}
    events = events_of(rank_pools[4], lost=(0, 1), window=window, **layout)
    ((_, at_home, shared),) = [event for event in events if event[0] == "repair"]
    assert shared < at_home
