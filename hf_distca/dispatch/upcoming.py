"""Micro-batches of optimizer steps, read, planned and bound while the device computes."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import PLAN_KEY, MicroBatchPlan


class UpcomingBatches:
    """Fetch the micro-batches of optimizer steps, and prepare the next ones.

    While the device computes a micro-batch, the next one is read, planned and bound.

    - A loader may plan its batches. Each rank then reads its rows without the other ranks.
    - Otherwise all ranks plan together, one micro-batch at a time. Documents lie on the rank that
      reads them. Micro-batches follow until the data of every rank has ended.

    With remote workers nothing is bound ahead. A plan is made for the workers that are present when
    it is bound.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loader: Iterator[dict[str, Any]] | None = None
        self._loader_plans = False
        self._count = 0  # micro-batches of a step
        self._plans: deque[MicroBatchPlan] = deque()  # plans of this step that have not begun
        self._read_ahead: list[dict[str, Any]] = []  # planned micro-batches of the next step
        # The plan that was bound ahead, and what it was bound to.
        self._bound: tuple[MicroBatchPlan, BoundPlan] | None = None
        self._ended = False  # the data of all ranks has ended, or a rank could not read
        self._failed = False  # a rank could not read; if the loader plans: this rank could not
        self._error: Exception | None = None  # why this rank could not read

    def fetch(
        self, loader: Iterator[dict[str, Any]], count: int, *, planned: bool
    ) -> list[dict[str, Any]]:
        """Return the planned micro-batches of a step, fewer than `count` at the end of the data.

        A collective if the loader's batches are not `planned`.

        Raises:
            Exception: This rank could not read a micro-batch of this step. Unless the loader plans,
                every rank raises.
        """
        if loader is not self._loader:
            self._begin_pass(loader, planned=planned)
        self._count = count
        # 1. Take what has been read ahead, and read the rest.
        batches = self._read_ahead[:count]
        self._read_ahead = self._read_ahead[count:]
        while len(batches) < count:
            next_batch = self._read()
            if not next_batch:
                break
            batches += next_batch
        # 2. Fill up the last step, or say why a batch is missing.
        missing = count - len(batches)
        if missing and self._failed:
            self._raise()
        if missing and batches and not planned:  # a step of a stream has all its micro-batches
            batches += self._dispatcher.plan_batches([], at_least=missing)
        self._plans = deque(batch[PLAN_KEY] for batch in batches)
        return batches

    def _begin_pass(self, loader: Iterator[dict[str, Any]], *, planned: bool) -> None:
        """Begin to read another loader."""
        self._loader = loader
        self._loader_plans = planned
        self._read_ahead = []
        self._ended = False
        self._failed = False
        self._error = None

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Return a plan bound to this rank; a plan bound ahead is handed out once."""
        if self._plans and self._plans[0] is plan:
            self._plans.popleft()
        if self._bound is not None and self._bound[0] is plan:
            _, bound = self._bound
            self._bound = None
            return bound
        return self._dispatcher.bind(plan)

    def prepare_next(self) -> None:
        """Read and plan one micro-batch of the next step.

        Bind the plan of the next micro-batch.

        To be called once a micro-batch, after its work is launched. A collective if the loader does
        not plan.
        """
        if self._loader is not None and len(self._read_ahead) < self._count:
            self._read_ahead += self._read()
        next_plan = self._next_plan()
        if next_plan is not None and self._dispatcher.remote is None:
            self._bound = next_plan, self._dispatcher.bind(next_plan)

    def _next_plan(self) -> MicroBatchPlan | None:
        """Return the plan of the next micro-batch, of this step or of the next one."""
        if self._plans:
            return self._plans[0]
        if self._read_ahead:
            plan: MicroBatchPlan = self._read_ahead[0][PLAN_KEY]
            return plan
        return None

    def _read(self) -> list[dict[str, Any]]:
        """Return one more planned micro-batch in a list.

        The list is empty if the data has ended or a rank could not read.
        """
        if self._ended or self._loader is None:
            return []
        batches: list[dict[str, Any]] = []
        try:
            batches = list(islice(self._loader, 1))
        except Exception as error:  # raised by `fetch`: the steps before need no batch of this one
            self._error = error
        self._failed = self._error is not None
        if not self._loader_plans:
            (self._failed,) = self._dispatcher.groups.any_of([self._failed])
            batches = [] if self._failed else self._dispatcher.plan_batches(batches)
        self._ended = not batches
        return batches

    def close(self) -> None:
        """Let an unfinished loader end, whose processes then stop."""
        self._loader = None

    def _raise(self) -> None:
        """Raise why a micro-batch could not be read. A collective if the loader does not plan."""
        if self._loader_plans and self._error is not None:
            raise self._error
        self._dispatcher.groups.raise_together(self._error)
