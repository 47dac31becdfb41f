"""The pool of dedicated attention servers, as ranks see it.

A server is a worker of the plan that holds no rows. Ranks send it query and K/V rows over one link
per pair of rank and server, and collect the results after their local tasks. After every collection
ranks agree on the servers that some rank has lost: all of them go on without these, and compute
what was lost.

Shape suffixes: T local rows, N rows; what follows a row's letter is free.
"""

import itertools
import logging
import time
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.recorder import Span, Work
from hf_distca.dispatch.remote import RemoteRows
from hf_distca.dispatch.rows import take
from hf_distca.kernels import AttentionParams
from hf_distca.kernels.speed import measure_speed
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Call, ServerHello, plan_tables
from hf_distca.pool.planning import plan_lost, plan_with_servers
from hf_distca.pool.rank.link import Answer, ServerLink
from hf_distca.pool.rank.speeds import OBSERVED, Speeds, observe
from hf_distca.pool.transport import Memory, rank_hello
from hf_distca.pool.wire import LinkLost, MismatchError
from hf_distca.units import counted

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For connecting to a server that has joined, at most."""

FIGURES = {
    "attention_servers": (
        "servers",
        "Dedicated attention servers that take part",
        "Dedicated attention servers",
    )
}
"""Unit, meaning and condition of each figure in the log of a training."""
POLL_S = 0.2
"""Seconds between two looks into the directory while ranks wait for servers."""
SPANS = 1 << 16
"""Most spans that are kept until speeds are corrected: a long evaluation goes by without that."""


class Pool:
    """The servers that take part, and how fast they are; the `remote` of a `Dispatcher`.

    Every rank makes one at the same point and calls `refresh` and `close` when every other does.

    Args:
        directory: where servers join; on rank 0 only.
        ranks_serve: whether ranks compute core attention too while there are servers.
        timeout_s: a server that does not answer for so long is lost.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        token: bytes,
        directory: Directory | None,
        memory: Memory,
        *,
        ranks_serve: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.ranks_serve = ranks_serve
        self.timeout_s = timeout_s
        self.memory = memory
        self.recorder = dispatcher.recorder
        self._groups = dispatcher.groups
        own_speed = measure_speed(dispatcher.kernel, dispatcher.device)
        self.speeds = Speeds(float(np.mean(self._groups.all_gather(own_speed))))
        self.call_ids = itertools.count()  # the same on every rank
        self._plan_ids = itertools.count()
        self._token = token
        self._directory = directory
        self.links: dict[int, ServerLink] = {}  # to the servers that take part, by id
        # By id of the server: the first rank on the server's host.
        self._rank_of_host: dict[int, int | None] = {}
        self._recording = self.recorder.listen(*OBSERVED, most=SPANS)

    @property
    def servers(self) -> tuple[int, ...]:
        """Ids of the servers that take part."""
        return tuple(sorted(self.links))

    @property
    def present(self) -> int:
        """Number of servers that take part."""
        return len(self.links)

    def figures(self) -> dict[str, float]:
        """Return the figures that `FIGURES` describes."""
        return {"attention_servers": self.present}

    # Between steps

    def refresh(self) -> None:
        """Let servers that have joined take part, and go on without servers that left.

        A collective.
        """
        listed = self._directory.members() if self._directory is not None else {}
        failed = {server for server, link in self.links.items() if link.lost}
        states = self._groups.all_gather((listed, failed, observe(self._recording.take())))
        self.speeds.learn([observed for _, _, observed in states])
        listed = states[0][0]  # by the directory, on rank 0
        lost = set().union(*(failed for _, failed, _ in states))
        present = listed.keys() - lost  # a lost server may come back as a new member
        self._lose(lost, "between steps; no call was running")
        self._lose(self.links.keys() - present, "it left the directory")
        new_servers = sorted(present - self.links.keys())
        if new_servers:
            self._connect({server: listed[server] for server in new_servers})

    def _connect(self, new_servers: Mapping[int, ServerHello]) -> None:
        """Connect to servers. Servers to which every rank has a link take part. A collective."""
        # 1. This rank tries to connect. A failure is final if another try would end alike.
        links: dict[int, ServerLink] = {}
        failures: dict[int, tuple[str, bool]] = {}
        hello = rank_hello(self._groups.rank, self.memory)
        connect_s = min(CONNECT_S, self.timeout_s)
        for server, info in new_servers.items():
            try:
                links[server] = ServerLink(
                    info.host, info.port, self._token, hello, connect_s, self.timeout_s, self.memory
                )
            except LinkLost as error:
                failures[server] = str(error), isinstance(error, MismatchError)

        # 2. Ranks learn of each other's failures, and of the servers on each other's hosts.
        servers_of_host = {server for server, link in links.items() if link.within_host}
        states = self._groups.all_gather((failures, servers_of_host))

        # 3. Servers without a failure take part.
        for server, info in new_servers.items():
            reasons = [failures[server] for failures, _ in states if server in failures]
            name = f"{server} ({info.host}:{info.port}, {info.device})"
            if not reasons:
                link = links[server]
                self.links[server] = link
                ranks_of_host = [
                    rank for rank, (_, servers) in enumerate(states) if server in servers
                ]
                self._rank_of_host[server] = min(ranks_of_host, default=None)
                speed = self.speeds.joined(server, info.pairs_per_second)
                self._log(
                    f"attention server {name} takes part: speed {speed:.2f}, rows travel over "
                    f"{link.carried_by}"
                )
                continue
            if server in links:
                links[server].close()
            first_reason, _ = reasons[0]
            self._log(f"attention server {name} cannot take part: {first_reason}", logging.WARNING)
            if self._directory is not None:
                is_final = any(final for _, final in reasons)
                self._directory.drop(server, first_reason if is_final else "")

    def wait_for(self, servers: int, timeout_s: float) -> None:
        """Refresh until so many servers take part, or go on without the rest. A collective."""
        deadline = time.monotonic() + timeout_s
        self.refresh()
        while len(self.links) < servers:
            if self._groups.any_of([time.monotonic() > deadline])[0]:
                self._log(
                    f"{len(self.links)} of {servers} attention servers joined within {timeout_s:g} "
                    "s; training begins without the rest, which may join later",
                    logging.WARNING,
                )
                return
            time.sleep(POLL_S)
            self.refresh()

    def bind(
        self, plan: MicroBatchPlan, settings: PlanSettings
    ) -> tuple[MicroBatchPlan, "_PlanAtServers | None"]:
        """Plan tasks again for ranks and servers, and send the plan to the servers.

        The workers of the plan are the ranks and, behind them, `servers`.
        """
        servers = self.servers
        nodes = settings.nodes
        if not servers:
            return plan, None
        server_nodes = None
        if nodes is not None:
            ranks_of_hosts = [self._rank_of_host[server] for server in servers]
            server_nodes = [None if rank is None else nodes[rank] for rank in ranks_of_hosts]
        workers = self.speeds.workers(
            self._groups.ranks, servers, takes_turns=len(plan.nano_batches) > 1
        )
        plan = plan_with_servers(
            plan, workers, settings, ranks_serve=self.ranks_serve, server_nodes=server_nodes
        )
        plan_id = next(self._plan_ids)
        if self._groups.rank == 0:
            for index, server in enumerate(servers):
                message, tables = plan_tables(
                    plan_id, self._groups.ranks + index, plan.nano_batches
                )
                with suppress(LinkLost):  # noticed by all ranks when its results are collected
                    self.links[server].send(message, [table.data for table in tables])
        return plan, _PlanAtServers(self, plan_id, servers, settings)

    # In a step

    def without_lost(self, servers: Collection[int]) -> frozenset[int]:
        """Go on without servers that any rank has lost; return those of `servers` that are gone.

        A collective.
        """
        linked = [server for server in servers if server in self.links]  # the same on every rank
        if linked:
            flags = self._groups.any_of([bool(self.links[server].lost) for server in linked])
            lost = {server for server, is_lost in zip(linked, flags, strict=True) if is_lost}
            self._lose(lost, "its tasks of this micro-batch are computed by the ranks")
        return frozenset(servers).difference(self.links)

    def close(self) -> None:
        """Close all links, and end training at the directory."""
        self._recording.stop()
        for link in self.links.values():
            link.close()
        self.links.clear()
        if self._directory is not None:
            self._directory.end()
            self._directory.close()

    def _lose(self, servers: Set[int], consequence: str) -> None:
        """Go on without servers, the same on every rank.

        Args:
            consequence: what becomes of their tasks, as the warning says.
        """
        for server in sorted(servers & self.links.keys()):
            link = self.links.pop(server)
            reason = link.lost or "another rank lost it"
            link.close()
            if self._directory is not None:
                self._directory.drop(server)
            remaining = "no server left, so ranks compute all tasks"
            if self.links:
                remaining = f"{counted(len(self.links), 'server')} left"
            self._log(
                f"lost attention server {server} at {link.name} ({reason}): {consequence}; "
                f"{remaining}",
                logging.WARNING,
            )

    def _log(self, message: str, level: int = logging.INFO) -> None:
        if self._groups.rank == 0:
            logger.log(level, message)


@dataclass
class _PlanAtServers:
    """The plan of one micro-batch at its servers: a `RemotePlan`.

    Ids of servers are in the order of its workers.
    """

    pool: Pool
    plan_id: int
    servers: tuple[int, ...]
    settings: PlanSettings

    def start(
        self,
        work: Work,
        workers: Sequence[RemoteRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> "_CallAtServers":
        memory = self.pool.memory
        ids = {worker.index: self.servers[worker.index] for worker in workers}
        # The server refuses a dtype that it does not know.
        dtype: Any = str(rows["q"].dtype).removeprefix("torch.")
        call_id = next(self.pool.call_ids)
        call = Call(
            self.plan_id,
            call_id,
            work.nano_batch,
            kind,
            work.direction,
            params.scale,
            params.softcap,
            dtype,
        )
        under_way = _CallAtServers(self.pool, work, rows["q"].device, ids)
        for worker in workers:
            link = self.pool.links.get(ids[worker.index])
            if link is None or not worker.q_count + worker.k_count:
                continue  # the server is lost, or needs no rows of this rank
            index = {"queries": worker.q_rows, "keys": worker.k_rows}
            counts = {"queries": worker.q_count, "keys": worker.k_count}
            staged_rows, ready = memory.stage(
                [take(rows[spec.name], index[spec.rows]) for spec in call.request()]
            )
            results = {spec.name: memory.empty(spec, counts[spec.rows]) for spec in call.reply()}
            with suppress(LinkLost):  # the collection will find the link lost
                under_way.requests[worker.index] = (
                    link,
                    link.call(call, staged_rows, results, ready),
                )
        return under_way

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        workers = [plan.layout.ranks + server for server in lost]
        return plan_lost(plan, workers, kind, self.settings, self.pool.speeds.pairs_per_second)


@dataclass
class _CallAtServers:
    """One core attention at servers: a `RemoteCall`.

    Ids, links and answers are by a server's index in the plan.
    """

    pool: Pool
    work: Work
    device: torch.device
    ids: Mapping[int, int]
    requests: dict[int, tuple[ServerLink, Answer]] = field(default_factory=dict)

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        # 1. Wait for every server. One that fails is noted by its link.
        recorder = self.pool.recorder
        for server, (link, answer) in self.requests.items():
            with suppress(LinkLost):
                reply = link.wait(answer, self.pool.timeout_s)
                arrived = answer.arrived
                name = str(self.ids[server])
                recorder.add(Span("call", name, self.work, answer.departed, arrived))
                recorder.add(
                    Span("remote", name, self.work, arrived - reply.seconds, arrived, reply.pairs)
                )
        # 2. Agree with the other ranks on the servers that are lost.
        lost_ids = self.pool.without_lost(self.ids.values())
        lost = frozenset(server for server, id in self.ids.items() if id in lost_ids)
        results = {
            server: self._on_device(answer.results)
            for server, (_, answer) in self.requests.items()
            if server not in lost
        }
        return results, lost

    def _on_device(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x_N.to(self.device, non_blocking=True) for name, x_N in rows.items()}
