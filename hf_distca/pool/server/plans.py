"""The plans that a server knows: what each rank will send in a call, and which tasks to compute on it."""

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from hf_distca.dispatch.bound import BoundGroup
from hf_distca.dispatch.index_buffer import IndexBuffer
from hf_distca.dispatch.sums import RowSum
from hf_distca.plan import NanoBatch, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.routes import make_routes
from hf_distca.pool.messages.plan import PlanHeader
from hf_distca.pool.wire import ProtocolError

KEPT = 8
"""So many of the latest plans are kept: more than ranks have in use at once."""


class ServedTasks:
    """This server's tasks of one plan: one nano-batch, one kind of attention.

    Attributes:
        group: the tasks, as index tensors.
        key_sums: how dK and dV of received rows are added up.
        rows: for each kind of rows ("queries", "keys") and each rank, which of the received rows are its own.
        totals: for each kind, how many rows come from all ranks.
        ranks: those that have rows here.
        pairs: query-key pairs of all tasks.
    """

    def __init__(self, plan: Plan, worker: int, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, worker)
        stage = routes.stages[0]
        self.group = BoundGroup(stage.visiting, buffer)
        self.rows: dict[str, list[slice]] = {}
        self.totals: dict[str, int] = {}
        for kind, messages in (("queries", routes.queries), ("keys", stage.keys)):
            counts = messages.recv_counts[: plan.layout.ranks]
            stops = np.cumsum(counts)
            self.rows[kind] = [slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
            self.totals[kind] = int(counts.sum())
        self.key_sums = RowSum([stage.visiting.k_rows], self.totals["keys"], buffer)
        self.ranks = frozenset(
            rank
            for rank, parts in enumerate(zip(self.rows["queries"], self.rows["keys"], strict=True))
            if any(part.stop > part.start for part in parts)
        )
        # Counted from a task's first key on; with a window that is where the first row's window begins.
        q_lens, k_lens = stage.visiting.q_lens, stage.visiting.k_lens
        self.pairs = int(np.sum(pairs(k_lens - q_lens, k_lens, plan.window)))


class ServedPlan:
    """A plan as one server uses it.

    Attributes:
        ranks: number of ranks.
        tasks: by nano-batch and kind of attention.
    """

    def __init__(self, header: PlanHeader, nano_batches: tuple[NanoBatch, ...], device: torch.device) -> None:
        self.ranks = header.ranks
        buffer = IndexBuffer(device)
        self.tasks = {
            (nano_batch, kind): ServedTasks(plan, header.worker, buffer)
            for nano_batch, nano in enumerate(nano_batches)
            for kind, plan in nano.plans.items()
        }
        buffer.send()


class PlanStore:
    """The latest plans by id.

    A rank's call may overtake the plan, which another rank sends: whoever asks for it waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._plans: dict[int, ServedPlan] = {}
        self._newest = -1

    def add(self, plan_id: int, plan: ServedPlan) -> None:
        """Add a plan and forget the oldest.

        Raises:
            ProtocolError: the id is not larger than those before.
        """
        with self._changed:
            if plan_id <= self._newest:
                raise ProtocolError(f"plan {plan_id} came after plan {self._newest}; ids must rise")
            self._newest = plan_id
            self._plans[plan_id] = plan
            while len(self._plans) > KEPT:
                del self._plans[min(self._plans)]
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all; the next plan may have any id."""
        with self._changed:
            self._plans.clear()
            self._newest = -1

    def get(self, plan_id: int, timeout_s: float, give_up: Callable[[], bool]) -> ServedPlan:
        """The plan of this id, which may still be on its way.

        Args:
            plan_id: of the plan.
            timeout_s: how long to wait for it.
            give_up: asked twice a second.

        Raises:
            ProtocolError: it is not kept any more, or does not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while plan_id not in self._plans:
                if plan_id <= self._newest:
                    raise ProtocolError(f"plan {plan_id} is not kept any more, the latest is {self._newest}")
                if time.monotonic() > deadline or give_up():
                    raise ProtocolError(f"plan {plan_id} did not come within {timeout_s:g} s")
                self._changed.wait(0.5)
            return self._plans[plan_id]
