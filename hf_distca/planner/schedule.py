"""The order in which a rank carries out one core attention of a nano-batch: a list of phases, forward and backward.

Pure data, made when a plan is bound. The executor (`hf_distca.dispatch.executor`) runs it; whatever tells the order
of things elsewhere, a simulator or a timeline, reads the same list.

A core attention is cut in three by two pauses, at which the other nano-batch of the layer runs up to its own pause:

              forward                              backward
    part 1    send Q, K and V                      send dO, Q, K, V, O and LSE
    part 2    receive them, compute visiting       receive them, gradients of visiting and prefix tasks,
              and prefix tasks, send O and LSE     send dQ, dK and dV
    part 3    receive O and LSE                    receive dQ, dK and dV

K and V may come in several stages. Two of them are on their way or in use at once: the first two are sent in part 1, a
further one whenever one has been computed with. dK and dV of a stage go back while the next one is computed with.

Where ranks pass K and V on inside their nodes, a stage travels in two hops, each of them while another stage is
computed with, so that five are on their way or in use at once, there or back:

    before a stage       receive what others pass on of it; receive the next one, pass that on; send the one after it
    after it, backward   pass its dK and dV back; receive what others pass back of the one before, send that back to
                         the ranks that hold its rows; receive from others that of the one before that

Own tasks need nothing from others. They are computed where they hide an exchange, see `OWN_TASKS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from hf_distca.plan import Direction

Turn = Literal["alone", "first", "second"]
"""Of a nano-batch in a layer: there is no other, or it is the one that begins the forward, or the other one."""

Place = Literal["local", "received"]
"""Where rows are: among those that the rank holds of the nano-batch, or those that others sent to it. The results of a
kernel call go to where its queries are; the gradients of queries to where these are, and those of keys and values to
where those are."""

Tasks = Literal["own", "own 1/2", "own 2/2", "prefix", "visiting", "visiting prefix"]
"""Tasks of one kernel call, see `hf_distca.planner.routes`. Where own tasks alone have to hide the exchanges before
and after, the backward computes them in two halves of about equal pairs."""

Group = tuple[Tasks, int]
"""Tasks of one kernel call and the stage of their K/V rows; 0 for own tasks."""

AHEAD = 2
"""So many stages are sent before the first is computed; then a further one with each that has been."""
IN_USE = AHEAD + 1
"""Stages that have memory at once: two on their way or in use, and the one whose dK and dV, which lie where K and V
were, are on their way back."""
IN_USE_IN_HOPS = IN_USE + 2
"""The same where each way takes two hops."""

TO_SERVERS, FROM_SERVERS = " to servers", " from servers"
"""In the names of transfers, and of phases that begin and end a call to servers."""

Kept = Literal["nothing", "received", "results"]
"""What the forward leaves to the backward of the rows that it received: nothing, so that they are sent again; Q, K and
V; or O and LSE too."""

OWN_TASKS: dict[tuple[Direction, Turn], tuple[Literal["before pause", "after pause", "after prefix"], ...]] = {
    ("forward", "alone"): ("before pause",),
    ("forward", "first"): ("after pause",),
    ("forward", "second"): ("before pause",),
    ("backward", "alone"): ("before pause", "after prefix"),
    ("backward", "second"): ("after pause",),
    ("backward", "first"): ("after prefix",),
}
"""Where own tasks are computed: before or after the first pause, or after the prefix tasks; at two places: half each.

Of two nano-batches the one that starts leaves its own tasks until the other one's exchange has started too; in the
backward that is the second. After the first one's backward nothing comes that would hide the return of its dK and dV:
own tasks do. A nano-batch that is alone hides the way there behind one half, and the way back behind the other.
"""


@dataclass(frozen=True)
class Transfer:
    """Rows that travel together, of as many columns as are named.

    Attributes:
        rows: "queries" or "keys": between ranks, rows of that kind in the order of the routes; "passed on": rows of
            keys inside nodes, from ranks that have received them; "servers": rows of both kinds, to dedicated servers.
        columns: tensors that travel, by the names of the kernel contract (q, k, v, o, lse, do, dq, dk, dv).
        back: whether they go back to the ranks that sent the rows.
        stage: of K/V rows, the number of this one.
    """

    rows: Literal["queries", "keys", "passed on", "servers"]
    columns: tuple[str, ...]
    back: bool = False
    stage: int = 0

    @cached_property
    def name(self) -> str:
        """For people: what travels, and where servers or a second hop are meant, which way."""
        way = ""
        if self.rows == "servers":
            way = FROM_SERVERS if self.back else TO_SERVERS
        elif self.rows == "passed on":
            way = " passed back" if self.back else " passed on"
        return " ".join(self.columns) + way + (f" [{self.stage}]" if self.stage else "")


@dataclass(frozen=True)
class KernelCall:
    """Tasks that are computed in one kernel call.

    Attributes:
        tasks: which.
        queries: where their query rows are.
        keys: where their K/V rows are.
        causal: whether rows are aligned with keys at the end of each task; else every row sees all keys of its task.
        first: whether the results are the first for their query rows, and the last too if these are received; else
            they are merged with those before.
        stage: of the K/V rows that are read.
    """

    tasks: Tasks
    queries: Place
    keys: Place
    causal: bool = True
    first: bool = True
    stage: int = 0

    @property
    def group(self) -> Group:
        """Which of the rank's groups of tasks it computes."""
        return self.tasks, self.stage

    @cached_property
    def name(self) -> str:
        """For people."""
        return self.tasks + (f" [{self.stage}]" if self.stage else "")


@dataclass(frozen=True)
class Phase:
    """What is done without a pause in between, in this order.

    Attributes:
        wait: what has to have arrived.
        run: kernel calls.
        send: what starts to travel then.
        pause: whether the other nano-batch runs before the next phase begins.
    """

    wait: tuple[Transfer, ...] = ()
    run: tuple[KernelCall, ...] = ()
    send: tuple[Transfer, ...] = ()
    pause: bool = False

    @cached_property
    def name(self) -> str:
        """For people: "wait q, k v; run visiting; send o lse"."""
        parts: dict[str, Sequence[str]] = {
            "wait": [transfer.name for transfer in self.wait],
            "run": [call.name for call in self.run],
            "send": [transfer.name for transfer in self.send],
        }
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts.items() if names)


Schedule = tuple[Phase, ...]


@cache
def make_schedule(
    direction: Direction,
    turn: Turn,
    *,
    groups: frozenset[Group],
    windowed: bool,
    stages: int = 1,
    passes_on: bool = False,
    servers: bool = False,
    kept: Kept = "nothing",
) -> Schedule:
    """The phases of one core attention on one rank.

    Every rank sends and receives in the same order, whatever tasks it has itself.

    Args:
        direction: forward or backward.
        turn: of the nano-batch.
        groups: the groups of tasks that the rank has; it makes no kernel call for others.
        windowed: whether the layer attends by a sliding window: prefix tasks then have all keys of their rows, else
            those before the rows' own segment.
        stages: in how many K/V rows come.
        passes_on: whether any rank passes K/V rows on.
        servers: whether the plan has tasks for dedicated servers.
        kept: what the backward has already; the forward sends everything.
    """
    forward = direction == "forward"
    queries = Transfer("queries", _columns_of_queries(direction, kept))
    sent_keys = stages if forward or kept == "nothing" else 0
    keys_there = tuple(Transfer("keys", ("k", "v"), stage=stage) for stage in range(sent_keys))
    keys_back = () if forward else tuple(replace(_KEYS_BACK, stage=stage) for stage in range(stages))
    to_servers = Transfer("servers", ("q", "k", "v") if forward else ("q", "do", "o", "lse", "k", "v"))
    results = ("o", "lse") if forward else ("dq",)
    queries_back = Transfer("queries", results, back=True)
    from_servers = Transfer("servers", results if forward else ("dq", "dk", "dv"), back=True)

    own = _own_calls(direction, turn, groups)
    calls = [
        (
            _visiting_calls(groups, stage, divided=stages > 1 and not windowed),
            _calls(groups, KernelCall("prefix", "local", "received", windowed, windowed, stage)),
        )
        for stage in range(stages)
    ]
    stage_phases = _stages_in_hops if passes_on else _stages
    phases = [
        Phase(send=(queries, *keys_there[:AHEAD], *((to_servers,) if servers else ()))),
        Phase(run=own.get("before pause", ()), pause=True),
        *stage_phases((queries, queries_back), keys_there, keys_back, calls, own.get("after pause", ())),
        Phase(run=own.get("after prefix", ()), pause=True),
        Phase(wait=(queries_back, *keys_back[-2 if passes_on else -1 :], *((from_servers,) if servers else ()))),
    ]
    return _joined(phases)


Calls = tuple[KernelCall, ...]


def _stages(
    queries: tuple[Transfer, Transfer],
    keys_there: tuple[Transfer, ...],
    keys_back: tuple[Transfer, ...],
    calls: Sequence[tuple[Calls, Calls]],
    own: Calls,
) -> list[Phase]:
    """The phases of all stages.

    Args:
        queries: there and back.
        keys_there: [stages] K/V rows, or none.
        keys_back: [stages] their gradients, or none.
        calls: [stages] visiting and prefix tasks.
        own: tasks that are computed before.
    """
    phases = [Phase(run=own)]
    for stage, (visiting, prefix) in enumerate(calls):
        last = stage == len(calls) - 1
        phases += [
            # Visitors first: their results have a way to go.
            Phase(
                wait=(*(queries[:1] if stage == 0 else ()), *keys_there[stage : stage + 1]),
                run=visiting,
                send=queries[1:] if last else (),
            ),
            Phase(run=prefix),
            # What is sent next will lie where what went back before does.
            Phase(
                wait=keys_back[stage - 1 : stage] if stage else (),
                send=(*keys_back[stage : stage + 1], *keys_there[stage + AHEAD : stage + AHEAD + 1]),
            ),
        ]
    return phases


def _stages_in_hops(
    queries: tuple[Transfer, Transfer],
    keys_there: tuple[Transfer, ...],
    keys_back: tuple[Transfer, ...],
    calls: Sequence[tuple[Calls, Calls]],
    own: Calls,
) -> list[Phase]:
    """The phases of all stages where K/V rows are passed on, see `_stages`."""
    passed_on, passed_back = (
        tuple(replace(transfer, rows="passed on") for transfer in hop) for hop in (keys_there, keys_back)
    )
    phases = [Phase(wait=keys_there[:1], send=passed_on[:1]), Phase(run=own)]
    for stage, (visiting, prefix) in enumerate(calls):
        last = stage == len(calls) - 1
        wait = (
            *(queries[:1] if stage == 0 else ()),
            *passed_on[stage : stage + 1],
            *keys_there[stage + 1 : stage + 2],
        )
        send = (*passed_on[stage + 1 : stage + 2], *keys_there[stage + AHEAD : stage + AHEAD + 1])
        phases += [
            *([Phase(wait=wait, send=send)] if send else []),
            Phase(wait=() if send else wait, run=visiting, send=queries[1:] if last else ()),
            Phase(run=prefix, send=passed_back[stage : stage + 1]),
            Phase(
                wait=(*passed_back[:stage][-1:], *keys_back[: max(stage - 1, 0)][-1:]),
                send=keys_back[:stage][-1:],
            ),
        ]
    return [*phases, Phase(wait=passed_back[-1:], send=keys_back[-1:])]


_KEYS_BACK = Transfer("keys", ("dk", "dv"), back=True)


def _columns_of_queries(direction: Direction, kept: Kept) -> tuple[str, ...]:
    """What goes with queries to those who compute them."""
    if direction == "forward":
        return ("q",)
    return {"nothing": ("do", "o", "lse", "q"), "received": ("do", "o", "lse"), "results": ("do",)}[kept]


def _calls(groups: frozenset[Group], *calls: KernelCall) -> tuple[KernelCall, ...]:
    """Those of some kernel calls whose tasks the rank has."""
    return tuple(call for call in calls if call.group in groups)


def _visiting_calls(groups: frozenset[Group], stage: int, *, divided: bool) -> tuple[KernelCall, ...]:
    """The kernel calls of received queries on a stage.

    Args:
        groups: that the rank has.
        stage: of the keys.
        divided: whether the keys of a query are in several stages.
    """
    call = KernelCall("visiting", "received", "received", first=not divided, stage=stage)
    return _calls(groups, call, replace(call, tasks="visiting prefix", causal=False))


def _own_calls(direction: Direction, turn: Turn, groups: frozenset[Group]) -> dict[str, tuple[KernelCall, ...]]:
    """The kernel calls of own tasks, by the place in the schedule."""
    places = OWN_TASKS[direction, turn]
    halves: tuple[Tasks, ...] = ("own 1/2", "own 2/2")
    if ("own 1/2", 0) not in groups or len(places) == 1:
        return {places[0]: _calls(groups, KernelCall("own", "local", "local"))}
    return {
        place: _calls(groups, KernelCall(half, "local", "local")) for place, half in zip(places, halves, strict=True)
    }


def _joined(phases: list[Phase]) -> Schedule:
    """Phases with what can be done in one phase joined, and without empty ones: a pause of one is that of the phase
    before."""
    joined: list[Phase] = []
    for phase in phases:
        before = joined[-1] if joined else None
        if before and not before.pause and not before.send and not phase.wait and not phase.run:
            joined[-1] = replace(before, send=phase.send, pause=phase.pause)
        elif phase.wait or phase.run or phase.send:
            joined.append(phase)
        elif phase.pause:
            joined[-1] = replace(joined[-1], pause=True)
    return tuple(joined)
