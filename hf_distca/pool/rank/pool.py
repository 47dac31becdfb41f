"""The pool of dedicated attention servers, as ranks see it.

A server is a worker of the plan that holds no rows. Ranks send it query and K/V rows over one link per pair of rank
and server, and collect the results after their own tasks. After every collection they tell one another which servers
they lost: all of them go on without these, and compute what was lost.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.recorder import Recorder
from hf_distca.kernels.speed import measure_speed
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.cost import Workers
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.with_servers import plan_with_servers
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.messages.plan import encode_plan
from hf_distca.pool.rank.call import PlanAtServers
from hf_distca.pool.rank.members import Members
from hf_distca.pool.rank.speeds import OBSERVED, Speeds, observe
from hf_distca.pool.transport.contract import Memory
from hf_distca.pool.wire.errors import LinkLost

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
        self._groups = groups
        self._plan_ids, self._call_ids = itertools.count(), itertools.count()
        self._speeds = Speeds(float(np.mean(groups.all_gather(own_speed))))
        self._recorder = recorder
        self._recording = recorder.listen(*OBSERVED, most=SPANS)

    @property
    def servers(self) -> tuple[int, ...]:
        """Ids of the servers that take part."""
        return self.members.ids

    def refresh(self) -> None:
        """Let servers that have joined take part from now on, without those that left. A collective."""
        told = self._groups.all_gather((self.members.news(), observe(self._recording.take())))
        self._speeds.learn([observed for _, observed in told])
        for info in self.members.update([news for news, _ in told]):
            speed = self._speeds.joined(info.id, info.pairs_per_second)
            name, carried_by = self.members.name(info.id), self.members.carried_by(info.id)
            self.members.tell(f"attention server {name} takes part: speed {speed:.2f}, rows travel over {carried_by}")

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
        """Speeds and base loads of the ranks and, after them, of `servers`, for so many nano-batches."""
        return self._speeds.workers(self._groups.ranks, self.servers, takes_turns=nano_batches > 1)

    def bind(self, plan: MicroBatchPlan, settings: PlanSettings) -> tuple[MicroBatchPlan, PlanAtServers | None]:
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
                header, tables = encode_plan(plan_id, self._groups.ranks + index, plan.nano_batches)
                link = self.members.link(server)
                assert link is not None  # nobody is lost between two collectives
                with suppress(LinkLost):  # noticed by all ranks when its results are collected
                    link.send(Kind.PLAN, header, [table.data for table in tables])
        return plan, PlanAtServers(
            plan_id,
            servers,
            self.members,
            self._call_ids,
            self._recorder,
            settings,
            self._speeds.pairs_per_second,
        )

    def _nodes(self, servers: Sequence[int], nodes: Sequence[int] | None) -> list[int | None] | None:
        """[servers] the node of the ranks that share a server's host; None for a server on a host of its own.

        Args:
            servers: their ids.
            nodes: [ranks] the node of each rank; None where all links are alike.
        """
        if nodes is None:
            return None
        beside = (self.members.rank_beside(server) for server in servers)
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
