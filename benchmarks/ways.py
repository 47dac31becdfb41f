"""Steps of one model on the same documents, carried out in several ways."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from harness.models import documents_of, llama, rows_of_rank, settings_of
from waiting import WaitingExchange

from hf_distca import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import MicroBatchPlan, Plan
from hf_distca.planner.metrics import BETWEEN, bytes_by_link
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.stages import rows_by_stage


@dataclass(frozen=True)
class Way:
    """How a step is carried out.

    Attributes:
        turns: halves of layers take turns.
        waits: every exchange is waited for where it is started.
        stages: how many K and V rows come in; None for those of the plan.
        ranks_per_node: that the plan knows of; 1 for a flat plan.
    """

    turns: bool = False
    waits: bool = False
    stages: int | None = None
    ranks_per_node: int = 1


WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Sizes of the model on GPUs (Llama-3-8B)."""


def few_documents(total: int) -> list[int]:
    """Lengths for two ranks: each nano-batch has a document too long for one's share, which the joint layout cuts."""
    return [total * 3 // 8] * 2 + [total // 16] * 4


def long_tail(total: int) -> list[int]:
    """Lengths drawn from a log-normal distribution, the same every time; the last one is cut to fit."""
    drawn, lengths, left = np.random.default_rng(0), [], total
    while left:
        lengths.append(min(int(total / 64 * drawn.lognormal(0, 1.5)) + 1, left))
        left -= lengths[-1]
    return lengths


def in_stages(plan: MicroBatchPlan, count: int) -> MicroBatchPlan:
    """The plan with its K and V rows in as few stages as rows of the same size allow, `count` of them or some more."""

    def divided(of_kind: Plan) -> Plan:
        whole = replace(of_kind, stage_rows=None)
        return whole if count == 1 else replace(whole, stage_rows=-(-int(rows_by_stage(whole).max()) // count))

    nano_batches = (
        replace(nano, plans={kind: divided(of_kind) for kind, of_kind in nano.plans.items()})
        for nano in plan.nano_batches
    )
    return replace(plan, nano_batches=tuple(nano_batches))


class Steps:
    """One rank's models and its plans, ready to step any way.

    Args:
        lengths: of the documents, whose tokens the ranks share evenly.
        device: of this rank.
        ways: by name.

    Attributes:
        models, dispatchers, plans: by way.
        batches: by way, what this rank runs its model on.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, ways: Mapping[str, Way]) -> None:
        total, ranks = sum(lengths), dist.get_world_size()
        on_gpu = device.type == "cuda"
        dtype, sizes = (torch.bfloat16, WIDE) if on_gpu else (torch.float32, {})
        models = {
            turns: llama(total, dtype=dtype, **sizes).to(device) for turns in {way.turns for way in ways.values()}
        }
        if True in models:
            plan_layers(models[True])
        flat = replace(settings_of(next(iter(models.values())), ranks, -(-total // ranks), device), ranks_per_node=1)
        documents = documents_of(lengths)
        self.models = {name: models[way.turns] for name, way in ways.items()}
        self.dispatchers: dict[str, Dispatcher] = {}
        self.plans: dict[str, MicroBatchPlan] = {}
        for name, way in ways.items():
            settings = replace(flat, ranks_per_node=way.ranks_per_node)
            dispatcher, plan = Dispatcher(settings, device), plan_micro_batch(lengths, settings)
            if way.waits:
                dispatcher.exchange = WaitingExchange(dispatcher)
            self.dispatchers[name] = dispatcher
            self.plans[name] = plan if way.stages is None else in_stages(plan, way.stages)
        self.batches = {
            name: rows_of_rank(plan, dist.get_rank(), documents, device) for name, plan in self.plans.items()
        }

    def step(self, way: str) -> tuple[float, float]:
        """Seconds of a step until all ranks are done, and seconds that the ranks stood in waits, on average."""
        dispatcher = self.dispatchers[way]
        bound = dispatcher.bind(self.plans[way])
        dist.barrier()
        waited = dispatcher.recorder.seconds("wait")
        begin = time.perf_counter()
        self.models[way](**self.batches[way], distca_plan=bound).loss.backward()
        waited = dispatcher.recorder.seconds("wait") - waited
        dist.barrier()
        total = time.perf_counter() - begin
        self.models[way].zero_grad()
        figures = torch.tensor([total, waited], dtype=torch.float64)
        dist.all_reduce(figures)
        seconds, seconds_waited = (figures / dist.get_world_size()).tolist()
        return seconds, seconds_waited

    def bytes_between(self, way: str, ranks_per_node: int) -> int:
        """Bytes that cross between nodes of so many ranks in one layer's forward, counted from the plan."""
        settings = self.dispatchers[way].settings
        nodes = [rank // ranks_per_node for rank in range(settings.ranks)]
        return sum(
            int(bytes_by_link(plan, settings.row_bytes(kind), nodes)[BETWEEN, 0].sum())
            for nano in self.plans[way].nano_batches
            for kind, plan in nano.plans.items()
        )
