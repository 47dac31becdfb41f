"""Schedules: the phases in which a rank carries out one core attention of a nano-batch.

A schedule is pure data, made when a plan is bound. The executor (`hf_distca.dispatch.executor`)
runs it; the simulator and the timeline read the same list. Two pauses divide a core attention into
three parts. During a pause the other nano-batch of the layer runs up to its own pause:

              forward                                  backward
    part 1    send Q, K and V                          send dO, Q, K, V, O and LSE
    part 2    receive them, compute remote-query       receive them, gradients of remote-query and
              and remote-KV tasks, send O and LSE      remote-KV tasks, send dQ, dK and dV
    part 3    receive O and LSE                        receive dQ, dK and dV

Local tasks need nothing from other ranks. They are computed where they hide an exchange, see
`LOCAL_TASKS`.

K and V may come in several stages, two of which travel or are in use at once. The first two are
sent in part 1, and a further one after each computed stage. dK and dV of a stage go back while the
next stage is computed.

A stage arrives once all ranks have sent it. If a rank with many local tasks computed them at once,
it would send its stages late, and all other ranks would wait. So with many stages, what a rank has
beyond the local tasks of other ranks is divided into parts, one before each stage. All ranks then
come to a stage at about the same time.

If ranks forward K and V inside their nodes, a stage travels in two hops, each during another
stage's computation. Five stages then travel or are in use at once, in either direction:

    before a stage     receive its forwarded rows; receive the next stage and forward it; send the
                       stage after the next one
    after a stage,     return dK and dV of the stage to its gateways; receive such returns of the
    in the backward    stage before and send them on to the ranks that hold its rows; receive the
                       returns that gateways send on, of the stage before that one
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np

from hf_distca.plan import Direction
from hf_distca.plan.arrays import FloatArray

Turn = Literal["alone", "first", "second"]
"""Position of a nano-batch in a layer: it is alone, begins the forward, or follows."""
Location = Literal["local", "received"]
"""Location of rows: among the rank's own rows of the nano-batch, or among received rows.

Results and gradients of queries go to the location of the queries, gradients of K and V to that of
the keys.
"""
TaskName = Literal["local", "local part", "remote-KV", "remote-query", "remote-query prefix"]
"""Tasks of one kernel call, see `hf_distca.plan.routes`; for parts, see `local_shares`."""
CallKey = tuple[TaskName, int]
"""Key of a kernel call: its tasks, and the stage of their K/V rows; 0 for all local tasks, and the
number of a part of them."""
AHEAD = 2
"""Number of stages sent before the first is computed, so that one travels while one is computed.
Then one more is sent with each computed stage."""
MANY_STAGES = 5
"""Number of stages from which on parts of the local tasks come between stages. With fewer stages
local tasks hide the first exchange better if they are computed at once."""
LEAST_SPREAD = 1 / 32
"""Least share of a rank's local tasks that is worth further kernel calls between stages."""
TO_REMOTE = " to remote workers"
FROM_REMOTE = " from remote workers"
"""Suffixes in names of transfers, and of phases that begin and end a call to remote workers, which
hold no rows."""
Place = Literal["before pause", "after pause", "after remote-KV"] | int
"""Place of local tasks in a schedule; a number for the place before this stage."""
LOCAL_TASKS: dict[tuple[Direction, Turn], tuple[Place, ...]] = {
    ("forward", "alone"): ("before pause",),
    ("forward", "first"): ("after pause",),
    ("forward", "second"): ("before pause",),
    ("backward", "alone"): ("before pause", "after remote-KV"),
    ("backward", "second"): ("after pause",),
    ("backward", "first"): ("after remote-KV",),
}
"""Where local tasks are computed: before or after the first pause, or after the remote-KV tasks;
a part at each of two places.

The nano-batch that starts computes its local tasks after the other one's exchange has started too.
In the backward the second nano-batch starts. Nothing follows the first one's backward, so its local
tasks hide the return of its dK and dV. A lone nano-batch hides the way there behind one part and
the way back behind the other.

If local tasks come between stages, there is a further part before each stage but the first. The
forward then has the parts of the backward.
"""


def has_local_tasks_between_stages(stages: int, *, windowed: bool) -> bool:
    """Return whether parts of the local tasks are computed between stages.

    With a window all ranks have about equal local tasks.
    """
    return stages >= MANY_STAGES and not windowed


def local_places(
    direction: Direction, turn: Turn, stages: int, *, windowed: bool
) -> dict[Place, int]:
    """Return the number of the part of the local tasks at each place.

    A part between stages has the number of the stage that follows.
    """
    if not has_local_tasks_between_stages(stages, windowed=windowed):
        return {place: part for part, place in enumerate(LOCAL_TASKS[direction, turn])}
    between: dict[Place, int] = {stage: stage for stage in range(1, stages)}
    if turn == "alone":
        return {"before pause": 0, **between, "after remote-KV": stages}
    (place,) = LOCAL_TASKS[direction, turn]
    return {place: 0, **between}


def local_shares(
    turn: Turn, stages: int, pairs: FloatArray, least_pairs: float, *, windowed: bool
) -> dict[int, FloatArray]:
    """Return each part's share of the pairs of a rank's local tasks, by the part's number.

    Args:
        pairs: [ranks] query-key pairs of the local tasks of each rank; any shape will do.
        least_pairs: the fewest pairs of a rank.
    """
    if not has_local_tasks_between_stages(stages, windowed=windowed):
        parts = len(LOCAL_TASKS["backward", turn])
        return {part: np.full(pairs.shape, 1 / parts) for part in range(parts)}
    common = least_pairs / np.maximum(pairs, 1.0)  # share of a rank's pairs that all ranks have
    common = np.where(1 - common < LEAST_SPREAD, 1.0, common)
    # Parts before and after all stages hide exchanges, and are as large on all ranks.
    ends, parts = ((0, stages), stages + 1) if turn == "alone" else ((0,), stages)
    spread = (1 - common) / parts
    return {part: spread + common / len(ends) if part in ends else spread for part in range(parts)}


@dataclass(frozen=True)
class Transfer:
    """Rows that travel together, with the named columns."""

    # Rows between ranks, in the order of the routes; K/V rows forwarded inside nodes; rows of both
    # kinds to remote workers.
    rows: Literal["queries", "keys", "forwarded", "remote"]
    # Names of tensors in the kernel contract: q, k, v, o, lse, do, dq, dk, dv.
    columns: tuple[str, ...]
    back: bool = False  # whether the columns return to the ranks that sent the rows
    stage: int = 0

    @cached_property
    def name(self) -> str:
        """Name for display: columns, stage, and the direction of calls and second hops."""
        suffixes = {
            "remote": (TO_REMOTE, FROM_REMOTE),
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
    # results, or with the result of no keys.
    first: bool = True
    stage: int = 0

    @property
    def key(self) -> CallKey:
        """Key under which a rank has the tasks of this kernel call."""
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
        steps: dict[str, Sequence[Transfer | KernelCall]] = {
            "wait": self.wait,
            "run": self.run,
            "send": self.send,
        }
        parts = []
        for verb, step in steps.items():
            if step:
                names = ", ".join(work.name for work in step)
                parts.append(f"{verb} {names}")
        return "; ".join(parts)


Schedule = tuple[Phase, ...]


@cache
def make_schedule(
    direction: Direction,
    turn: Turn,
    *,
    calls: frozenset[CallKey],
    windowed: bool,
    stages: int = 1,
    forwards: bool = False,
    remote_workers: bool = False,
) -> Schedule:
    """Return the phases of one core attention on one rank.

    Every rank sends and receives in the same order, whatever tasks it has itself.

    Args:
        calls: kernel calls for which the rank has tasks; it makes no others.
        windowed: whether the layer uses a sliding window. Remote-KV tasks then have all keys of
            their rows, otherwise only keys before the rows' own segment.
        stages: number of stages of K/V rows.
        forwards: whether any rank forwards K/V rows.
        remote_workers: whether any worker besides the ranks computes tasks.
    """
    transfers = _transfers(direction, stages, forwards=forwards, remote_workers=remote_workers)
    local = _local_calls(direction, turn, calls, stages, windowed=windowed)
    opening = [
        Phase(send=(transfers.queries, *transfers.keys[:AHEAD], *transfers.to_remote)),
        Phase(run=local.get("before pause", ()), pause=True),
        Phase(wait=transfers.keys[:1] if forwards else (), send=transfers.forwarded[:1]),
        Phase(run=local.get("after pause", ())),
    ]
    remote = []
    for stage in range(stages):
        remote.append(Phase(run=local.get(stage, ())))
        remote_query, remote_kv = _remote_calls(stage, calls, stages, windowed=windowed)
        phases_of_stage = _forwarded_stage if forwards else _direct_stage
        remote += phases_of_stage(transfers, stage, remote_query, remote_kv)
    returning = transfers.keys_back[-2 if forwards else -1 :]  # stages still on their way
    closing = [
        Phase(
            wait=transfers.to_gateways[-1:],
            send=transfers.keys_back[-1:] if forwards else (),
        ),
        Phase(run=local.get("after remote-KV", ()), pause=True),
        Phase(wait=(transfers.queries_back, *returning, *transfers.from_remote)),
    ]
    return _joined([*opening, *remote, *closing])


@dataclass(frozen=True)
class _Transfers:
    """Transfers of one core attention.

    A tuple has one transfer for each stage. It is empty if no rows travel that way.
    """

    queries: Transfer
    queries_back: Transfer
    keys: tuple[Transfer, ...]
    forwarded: tuple[Transfer, ...]  # the second hop of `keys`
    to_gateways: tuple[Transfer, ...]  # the first hop of `keys_back`
    keys_back: tuple[Transfer, ...]
    to_remote: tuple[Transfer, ...]  # one transfer, or none without remote workers
    from_remote: tuple[Transfer, ...]

    def at_stage(self, name: str, stage: int) -> tuple[Transfer, ...]:
        """Return the transfer of a stage, or no transfer if the stage has none."""
        transfers: tuple[Transfer, ...] = getattr(self, name)
        return transfers[stage : stage + 1] if stage >= 0 else ()


def _transfers(
    direction: Direction, stages: int, *, forwards: bool, remote_workers: bool
) -> _Transfers:
    # 1. Columns that travel. Gradients of K and V return in the stages in which K and V go.
    keys = tuple(Transfer("keys", ("k", "v"), stage=stage) for stage in range(stages))
    if direction == "forward":
        query_columns: tuple[str, ...] = ("q",)
        remote_columns: tuple[str, ...] = ("q", "k", "v")
        results: tuple[str, ...] = ("o", "lse")
        remote_results = results
        keys_back: tuple[Transfer, ...] = ()
    else:
        query_columns = ("do", "o", "lse", "q")
        remote_columns = ("q", "do", "o", "lse", "k", "v")
        results = ("dq",)
        remote_results = ("dq", "dk", "dv")
        keys_back = tuple(replace(transfer, columns=("dk", "dv"), back=True) for transfer in keys)
    # 2. The transfers. Second hops exist only where rows are forwarded.
    to_remote = Transfer("remote", remote_columns)
    from_remote = Transfer("remote", remote_results, back=True)
    return _Transfers(
        queries=Transfer("queries", query_columns),
        queries_back=Transfer("queries", results, back=True),
        keys=keys,
        forwarded=_inside_nodes(keys) if forwards else (),
        to_gateways=_inside_nodes(keys_back) if forwards else (),
        keys_back=keys_back,
        to_remote=(to_remote,) if remote_workers else (),
        from_remote=(from_remote,) if remote_workers else (),
    )


def _inside_nodes(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Return the hops inside nodes that belong to hops between ranks."""
    return tuple(replace(transfer, rows="forwarded") for transfer in transfers)


def _local_calls(
    direction: Direction, turn: Turn, calls: frozenset[CallKey], stages: int, *, windowed: bool
) -> dict[Place, tuple[KernelCall, ...]]:
    places = local_places(direction, turn, stages, windowed=windowed)
    if len(places) == 1 or all(tasks != "local part" for tasks, _ in calls):
        return {next(iter(places)): _chosen(calls, KernelCall("local", "local", "local"))}
    # A stage that comes before a part has results for rows of the part.
    first = not has_local_tasks_between_stages(stages, windowed=windowed)
    return {
        place: _chosen(calls, KernelCall("local part", "local", "local", first=first, stage=part))
        for place, part in places.items()
    }


def _remote_calls(
    stage: int, calls: frozenset[CallKey], stages: int, *, windowed: bool
) -> tuple[tuple[KernelCall, ...], tuple[KernelCall, ...]]:
    """Return the kernel calls of a stage on remote-query tasks, and those on remote-KV tasks."""
    # A received query reads K/V rows in several calls, and its results merge: of several stages, or
    # of the documents that its own continues.
    has_prefix = any(tasks == "remote-query prefix" for tasks, _ in calls)
    merges = not windowed and (stages > 1 or has_prefix)
    remote_query = KernelCall("remote-query", "received", "received", first=not merges, stage=stage)
    prefix = replace(remote_query, tasks="remote-query prefix", causal=False)
    remote_kv = KernelCall(
        "remote-KV", "local", "received", causal=windowed, first=windowed, stage=stage
    )
    return _chosen(calls, remote_query, prefix), _chosen(calls, remote_kv)


def _chosen(calls: frozenset[CallKey], *candidates: KernelCall) -> tuple[KernelCall, ...]:
    """Return the kernel calls for which the rank has tasks."""
    return tuple(call for call in candidates if call.key in calls)


def _direct_stage(
    transfers: _Transfers,
    stage: int,
    remote_query: tuple[KernelCall, ...],
    remote_kv: tuple[KernelCall, ...],
) -> list[Phase]:
    """Return the phases of a stage whose rows go from the ranks that hold them to all readers."""
    at_stage = transfers.at_stage
    # Remote-query tasks come first: their results have to travel.
    return [
        Phase(
            wait=(*_queries_for(transfers, stage), *at_stage("keys", stage)),
            run=remote_query,
            send=_results_after(transfers, stage),
        ),
        Phase(run=remote_kv),
        # The next stage's rows overwrite the memory of the stage whose gradients have returned.
        Phase(
            wait=at_stage("keys_back", stage - 1),
            send=(*at_stage("keys_back", stage), *at_stage("keys", stage + AHEAD)),
        ),
    ]


def _forwarded_stage(
    transfers: _Transfers,
    stage: int,
    remote_query: tuple[KernelCall, ...],
    remote_kv: tuple[KernelCall, ...],
) -> list[Phase]:
    """Return the phases of a stage whose rows are forwarded inside nodes."""
    at_stage = transfers.at_stage
    wait = (
        *_queries_for(transfers, stage),
        *at_stage("forwarded", stage),
        *at_stage("keys", stage + 1),
    )
    send = (*at_stage("forwarded", stage + 1), *at_stage("keys", stage + AHEAD))
    # What is sent here leaves before the kernel calls of the stage, which hide it.
    arrival = [Phase(wait=wait, send=send)] if send else []
    return [
        *arrival,
        Phase(
            wait=() if send else wait,
            run=remote_query,
            send=_results_after(transfers, stage),
        ),
        Phase(run=remote_kv, send=at_stage("to_gateways", stage)),
        Phase(
            wait=(*at_stage("to_gateways", stage - 1), *at_stage("keys_back", stage - 2)),
            send=at_stage("keys_back", stage - 1),
        ),
    ]


def _queries_for(transfers: _Transfers, stage: int) -> tuple[Transfer, ...]:
    """Return the transfer of queries before the first stage."""
    return (transfers.queries,) if stage == 0 else ()


def _results_after(transfers: _Transfers, stage: int) -> tuple[Transfer, ...]:
    """Return the transfer of results, or of dQ, after the last stage."""
    return (transfers.queries_back,) if stage == len(transfers.keys) - 1 else ()


def _joined(phases: list[Phase]) -> Schedule:
    """Join phases where possible and drop empty ones.

    The pause of an empty phase moves to the phase before.
    """
    schedule: list[Phase] = []
    for phase in phases:
        previous = schedule[-1] if schedule else None
        only_sends = not phase.wait and not phase.run
        # What is sent alone may leave with the phase before, if that has not paused by then.
        if previous and only_sends and not previous.pause and not previous.send:
            schedule[-1] = replace(previous, send=phase.send, pause=phase.pause)
        elif phase.wait or phase.run or phase.send:
            schedule.append(phase)
        elif phase.pause:
            schedule[-1] = replace(schedule[-1], pause=True)
    return tuple(schedule)
