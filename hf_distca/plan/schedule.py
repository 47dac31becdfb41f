"""Schedules: the phases in which a rank carries out one core attention of a nano-batch.

A schedule is pure data, made when a plan is bound. The executor (`hf_distca.dispatch.executor`)
runs it; the simulator and the timeline read the same list. Two pauses divide a core attention into
three parts. During a pause the other nano-batch of the layer runs up to its own pause:

              forward                                      backward
    part 1    send Q, K and V                              send dO, Q, K, V, O and LSE
    part 2    receive them, compute remote-query           receive them, gradients of remote-query and
              and remote-KV tasks, send O and LSE          remote-KV tasks, send dQ, dK and dV
    part 3    receive O and LSE                            receive dQ, dK and dV

Local tasks need nothing from other ranks. They are computed where they hide an exchange, see
`LOCAL_TASKS`.

K and V may come in several stages, two of which travel or are in use at once. The first two are
sent in part 1, and a further one after each computed stage. dK and dV of a stage go back while the
next stage is computed.

If ranks forward K and V inside their nodes, a stage travels in two hops, each during another
stage's computation. Five stages then travel or are in use at once, in either direction:

    before a stage       receive its forwarded rows; receive the next stage and forward it; send the one after it
    after it, backward   return its dK and dV to the gateways; receive such returns for the stage before and send them
                         on to the ranks that hold its rows; receive what others send on for the one
                         before that
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from hf_distca.plan import Direction

Turn = Literal["alone", "first", "second"]
"""Position of a nano-batch in a layer: it is alone, begins the forward, or follows."""
Location = Literal["local", "received"]
"""Location of rows: among the rank's own rows of the nano-batch, or among received rows.

Results and gradients of queries go to the location of the queries, gradients of K and V to that of
the keys.
"""
TaskName = Literal[
    "local", "local 1/2", "local 2/2", "remote-KV", "remote-query", "remote-query prefix"
]
"""Tasks of one kernel call, see `hf_distca.plan.routes`; halves of the local tasks have about
equal pairs."""
Group = tuple[TaskName, int]
"""Tasks of one kernel call and the stage of their K/V rows; 0 for local tasks."""
AHEAD = 2
"""Number of stages sent before the first is computed; then one more is sent with each computed
stage."""
TO_SERVERS, FROM_SERVERS = " to servers", " from servers"
"""Suffixes in names of transfers, and of phases that begin and end a call to servers."""
Kept = Literal["nothing", "received", "results"]
"""Received rows that the forward keeps: nothing (rows are sent again), Q, K and V, or O and LSE
too."""
Place = Literal["before pause", "after pause", "after remote-KV"]
LOCAL_TASKS: dict[tuple[Direction, Turn], tuple[Place, ...]] = {
    ("forward", "alone"): ("before pause",),
    ("forward", "first"): ("after pause",),
    ("forward", "second"): ("before pause",),
    ("backward", "alone"): ("before pause", "after remote-KV"),
    ("backward", "second"): ("after pause",),
    ("backward", "first"): ("after remote-KV",),
}
"""Where local tasks are computed: before or after the first pause, or after the remote-KV tasks;
half at each of two places.

The nano-batch that starts computes its local tasks after the other one's exchange has started too.
In the backward the second nano-batch starts. Nothing follows the first one's backward, so its local
tasks hide the return of its dK and dV. A lone nano-batch hides the way there behind one half and
the way back behind the other.
"""


@dataclass(frozen=True)
class Transfer:
    """Rows that travel together, with the named columns."""

    # Rows between ranks, in the order of the routes; K/V rows forwarded inside nodes; rows of both
    # kinds to servers.
    rows: Literal["queries", "keys", "forwarded", "servers"]
    columns: tuple[
        str, ...
    ]  # names of tensors in the kernel contract (q, k, v, o, lse, do, dq, dk, dv)
    back: bool = False  # whether the columns return to the ranks that sent the rows
    stage: int = 0

    @cached_property
    def name(self) -> str:
        """Name for display: columns, stage, and the direction for servers and second hops."""
        suffixes = {
            "servers": (TO_SERVERS, FROM_SERVERS),
            "forwarded": (" forwarded", " to gateways"),
        }
        suffix = suffixes.get(self.rows, ("", ""))[self.back]
        return " ".join(self.columns) + suffix + (f" [{self.stage}]" if self.stage else "")


@dataclass(frozen=True)
class KernelCall:
    """Tasks that are computed in one kernel call."""

    tasks: TaskName
    queries: Location
    keys: Location
    # Whether rows are aligned with keys at the end of each task; else every row sees all its keys.
    causal: bool = True
    # Whether the results are the first for their query rows; else they are merged with earlier
    # results. Received query rows have no results after the first.
    first: bool = True
    stage: int = 0

    @property
    def group(self) -> Group:
        """Group of the rank's tasks that the call computes."""
        return self.tasks, self.stage

    @cached_property
    def name(self) -> str:
        """Name for display."""
        return self.tasks + (f" [{self.stage}]" if self.stage else "")


@dataclass(frozen=True)
class Phase:
    """Work without a pause: wait for transfers, run kernel calls, then start transfers."""

    wait: tuple[Transfer, ...] = ()
    run: tuple[KernelCall, ...] = ()
    send: tuple[Transfer, ...] = ()
    pause: bool = False  # whether the other nano-batch runs before the next phase begins

    @cached_property
    def name(self) -> str:
        """Name for display: "wait q, k v; run remote-query; send o lse"."""
        parts: dict[str, Sequence[Transfer | KernelCall]] = {
            "wait": self.wait,
            "run": self.run,
            "send": self.send,
        }
        return "; ".join(
            f"{verb} {', '.join(each.name for each in part)}"
            for verb, part in parts.items()
            if part
        )


Schedule = tuple[Phase, ...]


@cache
def make_schedule(
    direction: Direction,
    turn: Turn,
    *,
    groups: frozenset[Group],
    windowed: bool,
    stages: int = 1,
    forwards: bool = False,
    servers: bool = False,
    kept: Kept = "nothing",
) -> Schedule:
    """Return the phases of one core attention on one rank.

    Every rank sends and receives in the same order, whatever tasks it has itself.

    Args:
        groups: groups of tasks that the rank has; other groups get no kernel call.
        windowed: whether the layer uses a sliding window. Remote-KV tasks then have all keys of
            their rows, otherwise only keys before the rows' own segment.
        stages: number of stages of K/V rows.
        forwards: whether any rank forwards K/V rows.
        kept: rows that the backward has already; the forward sends everything.
    """

    def present(*calls: KernelCall) -> tuple[KernelCall, ...]:
        return tuple(call for call in calls if call.group in groups)

    # 1. Everything that travels.
    forward, divided = direction == "forward", stages > 1 and not windowed
    with_queries = {
        "nothing": ("do", "o", "lse", "q"),
        "received": ("do", "o", "lse"),
        "results": ("do",),
    }
    queries = Transfer("queries", ("q",) if forward else with_queries[kept])
    sent_keys = stages if forward or kept == "nothing" else 0
    keys_there = tuple(Transfer("keys", ("k", "v"), stage=stage) for stage in range(sent_keys))
    keys_back = tuple(
        Transfer("keys", ("dk", "dv"), True, stage) for stage in range(0 if forward else stages)
    )
    to_servers = Transfer(
        "servers", ("q", "k", "v") if forward else ("q", "do", "o", "lse", "k", "v")
    )
    results = ("o", "lse") if forward else ("dq",)
    queries_back = Transfer("queries", results, back=True)
    from_servers = Transfer("servers", results if forward else ("dq", "dk", "dv"), back=True)

    # 2. Kernel calls on local tasks, by place; then the calls of each stage.
    places = LOCAL_TASKS[direction, turn]
    halves: tuple[TaskName, ...] = ("local 1/2", "local 2/2")
    if len(places) == 1 or ("local 1/2", 0) not in groups:
        places, halves = places[:1], ("local",)
    local = {
        place: present(KernelCall(half, "local", "local"))
        for place, half in zip(places, halves, strict=True)
    }
    calls = []
    for stage in range(stages):
        remote_query = KernelCall(
            "remote-query", "received", "received", first=not divided, stage=stage
        )
        prefix = replace(remote_query, tasks="remote-query prefix", causal=False)
        remote_kv = KernelCall("remote-KV", "local", "received", windowed, windowed, stage)
        calls.append((present(remote_query, prefix), present(remote_kv)))

    # 3. Phases. Steps of stages that do not exist are empty.
    def of(hop: tuple[Transfer, ...], stage: int) -> tuple[Transfer, ...]:
        return hop[stage : stage + 1] if stage >= 0 else ()

    forwarded, to_gateways = (
        tuple(replace(transfer, rows="forwarded") for transfer in hop if forwards)
        for hop in (keys_there, keys_back)
    )
    phases = [
        Phase(send=(queries, *keys_there[:AHEAD], *((to_servers,) if servers else ()))),
        Phase(run=local.get("before pause", ()), pause=True),
        Phase(wait=keys_there[:1] if forwards else (), send=forwarded[:1]),
        Phase(run=local.get("after pause", ())),
    ]
    for stage, (remote_query_calls, remote_kv_calls) in enumerate(calls):
        asked = (queries,) if stage == 0 else ()
        answered = (queries_back,) if stage == stages - 1 else ()
        # Remote-query tasks come first: their results have to travel.
        if forwards:
            wait = (*asked, *of(forwarded, stage), *of(keys_there, stage + 1))
            send = (*of(forwarded, stage + 1), *of(keys_there, stage + AHEAD))
            phases += [
                *([Phase(wait=wait, send=send)] if send else []),
                Phase(wait=() if send else wait, run=remote_query_calls, send=answered),
                Phase(run=remote_kv_calls, send=of(to_gateways, stage)),
                Phase(
                    wait=(*of(to_gateways, stage - 1), *of(keys_back, stage - 2)),
                    send=of(keys_back, stage - 1),
                ),
            ]
        else:
            phases += [
                Phase(wait=(*asked, *of(keys_there, stage)), run=remote_query_calls, send=answered),
                Phase(run=remote_kv_calls),
                # The next stage's rows overwrite the memory of the stage whose gradients have
                # returned.
                Phase(
                    wait=of(keys_back, stage - 1),
                    send=(*of(keys_back, stage), *of(keys_there, stage + AHEAD)),
                ),
            ]
    phases += [
        Phase(wait=to_gateways[-1:], send=keys_back[-1:] if forwards else ()),
        Phase(run=local.get("after remote-KV", ()), pause=True),
        Phase(
            wait=(
                queries_back,
                *keys_back[-2 if forwards else -1 :],
                *((from_servers,) if servers else ()),
            )
        ),
    ]

    # 4. Join phases where possible and drop empty ones; the pause of an empty phase moves to the
    # phase before.
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
