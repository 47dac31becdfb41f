"""Bind each micro-batch of training while the device still works on the one before.

Trainer waits for the device after every micro-batch to read its loss. Work done before this wait costs no time:
fetching the next micro-batch, making its index tensors and sending them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import PLAN_KEY, MicroBatchPlan


class UpcomingBatches:
    """Fetch and bind one micro-batch ahead.

    With dedicated servers nothing is bound ahead: a plan is made for the servers that are present when it is bound.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._plans: deque[MicroBatchPlan] = deque()  # plans of this step that have not begun
        self._loader: Iterator[dict[str, Any]] | None = None
        self._fetched: list[dict[str, Any]] = []  # batches for the next step
        self._bound: tuple[MicroBatchPlan, BoundPlan] | None = None

    def fetch(self, loader: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        """Return the next `count` batches of a loader, fewer at its end.

        Batches carry their plans. From now on the loader's next batch is fetched ahead.
        """
        if loader is not self._loader:
            self._loader, self._fetched = loader, []
        batches = [*self._fetched, *islice(loader, count - len(self._fetched))]
        self._fetched = []
        return batches

    def end(self) -> None:
        """Forget all upcoming batches, so that the processes of an unfinished loader stop."""
        self._plans.clear()
        self._loader, self._fetched, self._bound = None, [], None

    def begin_step(self, batches: Sequence[dict[str, Any]]) -> None:
        """Note the micro-batches of an optimizer step, in the order in which they run."""
        self._plans = deque(batch[PLAN_KEY] for batch in batches)

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Return a plan bound to this rank; a plan bound ahead is handed out once."""
        if self._plans and self._plans[0] is plan:
            self._plans.popleft()
        if self._bound is not None and self._bound[0] is plan:
            bound, self._bound = self._bound[1], None
            return bound
        return self._dispatcher.bind(plan)

    def bind_next(self) -> None:
        """Bind the plan of the next micro-batch if it is known or can be fetched."""
        if self._dispatcher.remote is not None:
            return
        if not self._plans and self._loader is not None and not self._fetched:
            self._fetched = list(islice(self._loader, 1))
        upcoming = [*self._plans, *(batch[PLAN_KEY] for batch in self._fetched)]
        if upcoming:
            self._bound = upcoming[0], self._dispatcher.bind(upcoming[0])
