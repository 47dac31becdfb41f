"""The pool of dedicated attention servers, as ranks see it.

A server is a worker of the plan that holds no rows. Ranks send it query and K/V rows over one link per pair of rank
and server, and collect the results after their own tasks. After every collection they tell one another which servers
they lost: all of them go on without these, and compute what was lost.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values, N
rows; what follows a row's N is free.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.recorder import Recorder, Span, Work
from hf_distca.dispatch.remote import ServerRows
from hf_distca.dispatch.rows import take
from hf_distca.kernels import AttentionParams
from hf_distca.kernels.speed import measure_speed
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.cost import Workers
from hf_distca.planner.servers import plan_lost, plan_with_servers
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.memory import Memory
from hf_distca.pool.messages import Call, plan_tables
from hf_distca.pool.rank.members import Members, PendingReply
from hf_distca.pool.rank.speeds import OBSERVED, Speeds, observe
from hf_distca.pool.wire import LinkLost

POLL_S = 0.2
SPANS = 1 << 16
"""Kept until speeds are corrected, at most: a long evaluation goes by without that."""


class Pool:
    """The servers that are there, and how fast they are: what a `Dispatcher` has as `remote`.

    Every rank makes one at the same point and calls `refresh` and `close` when every other does.

    Args:
        groups: the ranks.
        members: who takes part.
        recorder: of this rank's time.
        own_speed: of this rank's kernel as `measure_speed` gives it, in pairs per second.
        ranks_serve: whether ranks compute core attention too while there are servers.
    """

    def __init__(
        self, groups: Groups, members: Members, recorder: Recorder, own_speed: float, *, ranks_serve: bool = True
    ) -> None:
        self.members = members
        self.ranks_serve = ranks_serve
        self.recorder = recorder
        self.speeds = Speeds(float(np.mean(groups.all_gather(own_speed))))
        self.call_ids = itertools.count()  # the same on every rank
        self._plan_ids = itertools.count()
        self._groups = groups
        self._recording = recorder.listen(*OBSERVED, most=SPANS)

    @property
    def servers(self) -> tuple[int, ...]:
        """Ids of the servers that take part."""
        return self.members.ids

    def refresh(self) -> None:
        """Let servers that have joined take part from now on, without those that left. A collective."""
        told = self._groups.all_gather((self.members.news(), observe(self._recording.take())))
        self.speeds.learn([observed for _, observed in told])
        for info in self.members.update([news for news, _ in told]):
            speed, link = self.speeds.joined(info.id, info.pairs_per_second), self.members.link(info.id)
            assert link is not None
            name = self.members.name(info.id)
            self.members.tell(
                f"attention server {name} takes part: speed {speed:.2f}, rows travel over {link.carried_by}"
            )

    def wait_for(self, servers: int, timeout_s: float) -> None:
        """Refresh until so many servers take part, or go on without the rest. A collective."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.refresh()
            late = self._groups.any_of([time.monotonic() > deadline])[0]
            if len(self.servers) >= servers or late:
                break
            time.sleep(POLL_S)
        if len(self.servers) < servers:
            self.members.tell(
                f"{len(self.servers)} of {servers} attention servers joined within {timeout_s:g} s; training begins "
                "without the rest, which may join later",
                logging.WARNING,
            )

    def workers(self, nano_batches: int) -> Workers:
        """Return speeds and base loads of the ranks and, after them, of `servers`, for so many nano-batches."""
        return self.speeds.workers(self._groups.ranks, self.servers, takes_turns=nano_batches > 1)

    def bind(self, plan: MicroBatchPlan, settings: PlanSettings) -> tuple[MicroBatchPlan, "PlanAtServers | None"]:
        """Plan tasks again for the workers that are there now, and send the plan to the servers; see `RemoteWorkers`.

        Servers are the plan's workers behind the ranks, in the order of `servers`.
        """
        servers = self.servers
        if not servers:
            return plan, None
        plan = plan_with_servers(
            plan,
            self.workers(len(plan.nano_batches)),
            settings,
            ranks_serve=self.ranks_serve,
            server_nodes=self._nodes(servers, settings.nodes),
        )
        plan_id = next(self._plan_ids)
        if self._groups.rank == 0:
            for index, server in enumerate(servers):
                message, tables = plan_tables(plan_id, self._groups.ranks + index, plan.nano_batches)
                link = self.members.link(server)
                assert link is not None  # nobody is lost between two collectives
                with suppress(LinkLost):  # noticed by all ranks when its results are collected
                    link.send(message, [table.data for table in tables])
        return plan, PlanAtServers(self, plan_id, servers, settings)

    def _nodes(self, servers: Sequence[int], nodes: Sequence[int] | None) -> list[int | None] | None:
        """[servers] the node of the ranks that share a server's host; None for a server on a host of its own.

        Args:
            servers: their ids.
            nodes: [ranks] the node of each rank; None where all links are alike.
        """
        if nodes is None:
            return None
        beside = [self.members.rank_beside(server) for server in servers]
        return [None if rank is None else nodes[rank] for rank in beside]

    def close(self) -> None:
        """Let go of all servers, and tell them that training is over."""
        self._recording.stop()
        self.members.close()


def use_servers(
    dispatcher: Dispatcher,
    token: bytes,
    directory: Directory | None,
    memory: Memory,
    *,
    ranks_serve: bool = True,
    timeout_s: float = 60.0,
) -> Pool:
    """Let dedicated servers take part in what a dispatcher binds from now on, whenever there are any. A collective.

    Args:
        dispatcher: whose micro-batches they are to work on.
        token: the run's token.
        directory: where servers join; on rank 0 only.
        memory: where rows are sent from and received.
        ranks_serve: whether ranks compute core attention too while there are servers.
        timeout_s: a server that does not answer for so long is lost.
    """
    members = Members(dispatcher.groups, memory, token, directory, timeout_s)
    own_speed = measure_speed(dispatcher.kernel, dispatcher.device)
    pool = Pool(dispatcher.groups, members, dispatcher.recorder, own_speed, ranks_serve=ranks_serve)
    dispatcher.remote = pool
    return pool


class PlanAtServers:
    """The plan of one micro-batch at its servers, whose ids stand in the order of the plan's workers."""

    def __init__(self, pool: Pool, plan_id: int, servers: tuple[int, ...], settings: PlanSettings) -> None:
        self._pool = pool
        self._plan_id = plan_id
        self._servers = servers
        self._settings = settings

    def start(
        self,
        work: Work,
        servers: Sequence[ServerRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> "CallAtServers":
        """See `hf_distca.dispatch.remote.RemotePlan.start`."""
        q_THD, k_TGD, v_TGE = rows["q"], rows["k"], rows["v"]
        dtype = str(q_THD.dtype).removeprefix("torch.")
        call = Call(
            plan_id=self._plan_id,
            call_id=next(self._pool.call_ids),
            nano_batch=work.nano_batch,
            window=params.window,
            direction=work.direction,
            scale=params.scale,
            softcap=params.softcap,
            q_heads=q_THD.shape[1],
            kv_heads=k_TGD.shape[1],
            dim_qk=q_THD.shape[2],
            dim_v=v_TGE.shape[2],
            dtype=dtype,  # type: ignore[arg-type]  # the server refuses others
            chunk=kind.chunk,
        )
        under_way = CallAtServers(self._pool, self._servers, servers, work, q_THD.device)
        for asked in servers:
            under_way.ask(asked, call, rows)
        return under_way

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        """See `hf_distca.dispatch.remote.RemotePlan.repair`."""
        workers = [plan.layout.ranks + server for server in lost]
        return plan_lost(plan, workers, kind, self._settings, self._pool.speeds.pairs_per_second)


class CallAtServers:
    """One core attention's tasks at the servers, from the sending of rows to the collection of results.

    Args:
        pool: the rank's.
        ids: of the plan's servers.
        servers: those that have tasks of it.
        work: which core attention.
        device: the rank's.
    """

    def __init__(
        self, pool: Pool, ids: Sequence[int], servers: Sequence[ServerRows], work: Work, device: torch.device
    ) -> None:
        self._members, self._recorder = pool.members, pool.recorder
        self._ids = {asked.server: ids[asked.server] for asked in servers}
        self._work = work
        self._device = device
        self._replies: dict[int, tuple[PendingReply, dict[str, Tensor]]] = {}  # by server index

    def ask(self, asked: ServerRows, call: Call, rows: Mapping[str, Tensor]) -> None:
        """Send a server its part of all local rows, if it takes part and this rank has any for it."""
        link = self._members.link(self._ids[asked.server])
        if link is None or not asked.q_count + asked.k_count:
            return
        memory = self._members.memory
        index = {"queries": asked.q_rows, "keys": asked.k_rows}
        counts = {"queries": asked.q_count, "keys": asked.k_count}
        staged, ready = memory.stage([take(rows[spec.name], index[spec.rows]) for spec in call.request()])
        results = {spec.name: memory.empty(spec, counts[spec.rows]) for spec in call.reply()}
        with suppress(LinkLost):  # the collection will find the link lost
            self._replies[asked.server] = link.call(call, staged, list(results.values()), ready), results

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        """See `hf_distca.dispatch.remote.RemoteCall.collect`."""
        for server, (reply, _) in self._replies.items():
            with suppress(LinkLost):
                said = reply.wait(self._members.timeout_s)
                name = str(self._ids[server])
                self._recorder.add(Span("call", name, self._work, reply.departed, reply.arrived))
                begin = reply.arrived - said.seconds
                self._recorder.add(Span("server", name, self._work, begin, reply.arrived, said.pairs))
        lost_ids = self._members.without_lost(list(self._ids.values()))
        lost = frozenset(server for server, id in self._ids.items() if id in lost_ids)
        results = {
            server: {name: rows_N.to(self._device, non_blocking=True) for name, rows_N in columns.items()}
            for server, (_, columns) in self._replies.items()
            if server not in lost
        }
        return results, lost
