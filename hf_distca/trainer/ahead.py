"""The micro-batches of training, each bound while the device still works on the one before.

Trainer waits for the device after every micro-batch, to look at its loss. What is done between having queued a
micro-batch's work and that wait costs no time: fetching the next one, making its index tensors, sending them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import PLAN_KEY, MicroBatchPlan


class UpcomingBatches:
    """Fetches and binds one micro-batch ahead.

    Where dedicated servers may take part nothing is bound ahead: a plan is made for the servers that are there when it
    is bound.

    Args:
        dispatcher: binds plans.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._plans: deque[MicroBatchPlan] = deque()  # of this step, not begun
        self._loader: Iterator[dict[str, Any]] | None = None
        self._fetched: list[dict[str, Any]] = []  # from the loader, for the next step
        self._bound: tuple[MicroBatchPlan, BoundPlan] | None = None

    def fetch(self, loader: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        """The next batches of a loader whose batches carry their plan, fewer at its end.

        From now on its next batch is fetched ahead.
        """
        if loader is not self._loader:
            self._loader, self._fetched = loader, []
        batches = [*self._fetched, *islice(loader, count - len(self._fetched))]
        self._fetched = []
        return batches

    def end(self) -> None:
        """Forget everything that is upcoming; the processes of a loader that has not come to its end stop."""
        self._plans.clear()
        self._loader, self._fetched, self._bound = None, [], None

    def begin_step(self, batches: Sequence[dict[str, Any]]) -> None:
        """Take note of the micro-batches of an optimizer step, which run in this order."""
        self._plans = deque(batch[PLAN_KEY] for batch in batches)

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """The plan bound to this rank; what has been bound ahead is given away."""
        if self._plans and self._plans[0] is plan:
            self._plans.popleft()
        if self._bound is not None and self._bound[0] is plan:
            bound, self._bound = self._bound[1], None
            return bound
        return self._dispatcher.bind(plan)

    def bind_next(self) -> None:
        """Bind the plan of the micro-batch that comes next, if it is known or can be fetched."""
        if self._dispatcher.remote is not None:
            return
        if not self._plans and self._loader is not None and not self._fetched:
            self._fetched = list(islice(self._loader, 1))
        upcoming = [*self._plans, *(batch[PLAN_KEY] for batch in self._fetched)]
        if upcoming:
            self._bound = upcoming[0], self._dispatcher.bind(upcoming[0])
