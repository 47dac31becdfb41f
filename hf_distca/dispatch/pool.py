"""The pool of dedicated attention servers, as trainers see it.

A server is a worker of the plan that holds no rows. Trainers send it query and K/V rows over one link per pair of
trainer and server, and collect the results after their own tasks. After every collection they tell one another which
servers they lost: all of them go on without these, and compute at home what was lost.

Shape suffixes: N rows; what follows a row's N is free.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_distca.call_codec import Call, Column, Direction
from hf_distca.dispatch.clock import Clock
from hf_distca.dispatch.columns import as_bytes, empty_rows, to_host
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.rows import RowIndex, take
from hf_distca.dispatch.speeds import Speeds, Stopwatch, TimedKernel
from hf_distca.kernels.contract import AttentionParams
from hf_distca.kernels.speed import measure_speed
from hf_distca.plan import NanoBatch
from hf_distca.plan_codec import encode_plan
from hf_distca.planner.cost import Workers
from hf_distca.wire.directory import Directory, ServerInfo
from hf_distca.wire.errors import LinkLost
from hf_distca.wire.framing import Kind
from hf_distca.wire.link import PendingReply, ServerLink

if TYPE_CHECKING:
    from hf_distca.dispatch.bound import BoundRoutes, ServerRows

logger = logging.getLogger(__name__)

POLL_S = 0.2
CONNECT_S = 10.0
"""For connecting to a server that has joined, at most."""


class Pool:
    """The servers that are there, and how fast they are.

    Every rank makes one at the same point and calls `refresh` and `close` when every other does.

    Args:
        groups: the trainers.
        kernel: the trainer's own kernel.
        token: the run's token.
        directory: where servers join; on rank 0 only.
        ranks_serve: whether trainers compute core attention too while there are servers.
        timeout_s: a server that does not answer for so long is lost.

    Attributes:
        stopwatch: what speeds are corrected by.
        wait_clock: time that this rank stood waiting for servers.
    """

    def __init__(
        self,
        groups: Groups,
        kernel: TimedKernel,
        token: bytes,
        directory: Directory | None,
        *,
        ranks_serve: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.groups = groups
        self.ranks_serve = ranks_serve
        self.timeout_s = timeout_s
        self.wait_clock = Clock()
        self._token = token
        self._directory = directory
        self._links: dict[int, ServerLink] = {}
        self._infos: dict[int, ServerInfo] = {}
        self._plan_numbers, self._call_numbers = itertools.count(), itertools.count()
        self._speeds = Speeds(float(np.mean(groups.all_gather(measure_speed(kernel, kernel.device)))))
        self.stopwatch = Stopwatch(kernel)

    # Members

    @property
    def servers(self) -> tuple[int, ...]:
        """Ids of the servers that take part."""
        return tuple(sorted(self._links))

    def refresh(self) -> None:
        """Let servers that have joined take part from now on, without those that left. A collective."""
        members = self._directory.members() if self._directory is not None else ()
        lost = [server for server, link in self._links.items() if link.lost]
        told = self.groups.all_gather((members, lost, self.stopwatch.read()))
        self._speeds.learn([observed for _, _, observed in told])
        self.stopwatch.begin()
        gone = {server for _, lost, _ in told for server in lost}
        present = {info.id: info for info in told[0][0] if info.id not in gone}  # it may come back as a new member
        self.lose(gone, "between steps; nothing was under way")
        self.lose(set(self._links) - set(present), "it left the directory")
        joined = [info for server, info in sorted(present.items()) if server not in self._links]
        if joined:
            self._connect(joined)

    def wait_for(self, servers: int, timeout_s: float) -> None:
        """Refresh until so many servers take part, or go on without the rest. A collective."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.refresh()
            late = self.groups.any_of([time.monotonic() > deadline])[0]
            if len(self._links) >= servers or late:
                break
            time.sleep(POLL_S)
        if len(self._links) < servers:
            self._tell(
                f"{len(self._links)} of {servers} attention servers joined within {timeout_s:g} s; training begins "
                "without the rest, which may join later",
                logging.WARNING,
            )

    def _connect(self, joined: Sequence[ServerInfo]) -> None:
        links: dict[int, ServerLink | str] = {}
        timeout_s = min(CONNECT_S, self.timeout_s)
        for info in joined:
            try:
                links[info.id] = ServerLink(
                    info.host, info.port, self._token, self.groups.rank, self.groups.ranks, timeout_s
                )
            except LinkLost as error:
                links[info.id] = str(error)
        failures = self.groups.all_gather({id: link for id, link in links.items() if isinstance(link, str)})
        for info in joined:
            link = links[info.id]
            reasons = [failure[info.id] for failure in failures if info.id in failure]
            if not reasons and isinstance(link, ServerLink):
                self._links[info.id] = link
                self._infos[info.id] = info
                speed = self._speeds.joined(info.id, info.pairs_per_second)
                self._tell(f"attention server {self._name(info.id)} takes part: speed {speed:.2f}")
                continue
            if isinstance(link, ServerLink):
                link.close()
            self._tell(f"attention server {info.host}:{info.port} cannot take part: {reasons[0]}", logging.WARNING)
            if self._directory is not None:
                self._directory.drop(info.id)

    def lose(self, servers: set[int], what: str) -> None:
        """Go on without some servers. Every rank does it with the same ones.

        Args:
            servers: their ids; those that are gone already do not count.
            what: what becomes of their tasks, for the warning.
        """
        for server in sorted(servers & set(self._links)):
            link = self._links.pop(server)
            reason = link.lost or "another trainer lost it"
            link.close()
            if self._directory is not None:
                self._directory.drop(server)
            left = f"{len(self._links)} servers left" if self._links else "no server left, trainers go on in place"
            self._tell(f"lost attention server {self._name(server)} ({reason}): {what}; {left}", logging.WARNING)

    def _name(self, server: int) -> str:
        info = self._infos[server]
        return f"{server} ({info.host}:{info.port}, {info.device})"

    def _tell(self, message: str, level: int = logging.INFO) -> None:
        if self.groups.rank == 0:
            logger.log(level, message)

    def close(self) -> None:
        """Let go of all servers, and tell them that training is over."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._directory is not None:
            self._directory.end()
            self._directory.close()

    # Plans

    def workers(self, nano_batches: int) -> Workers:
        """Speeds and base loads of the ranks and, after them, of `servers`."""
        return self._speeds.workers(self.groups.ranks, self.servers, takes_turns=nano_batches > 1)

    def bind(self, nano_batches: Sequence[NanoBatch]) -> "PooledPlan":
        """Send a plan to the servers that it has as workers behind the ranks, in the order of `servers`."""
        number = next(self._plan_numbers)
        for index, server in enumerate(self.servers):
            if self.groups.rank == 0:
                header, tables = encode_plan(number, self.groups.ranks + index, nano_batches)
                with suppress(LinkLost):  # noticed by all ranks when its results are collected
                    self._links[server].send(Kind.PLAN, header, [table.data for table in tables])
        return PooledPlan(self, number, self.servers)


class PooledPlan:
    """A plan of one micro-batch as the servers know it.

    Args:
        pool: the servers.
        number: of the plan.
        servers: ids of the plan's servers.
    """

    def __init__(self, pool: Pool, number: int, servers: tuple[int, ...]) -> None:
        self.pool = pool
        self._number = number
        self._servers = servers

    def start(
        self,
        direction: Direction,
        nano: int,
        routes: "BoundRoutes",
        params: AttentionParams,
        tensors: dict[str, Tensor],
    ) -> "ServerCall":
        """Send the servers their rows of one attention.

        Args:
            direction: of the attention.
            nano: number of the nano-batch.
            routes: of this rank.
            params: scale, window and softcap of the layer.
            tensors: the rank's rows by column name, see `hf_distca.call_codec`.
        """
        pool = self.pool
        q_THD, k_TGD, v_TGE = tensors["q"], tensors["k"], tensors["v"]
        call = Call(
            plan=self._number,
            number=next(pool._call_numbers),
            nano=nano,
            window=params.window,
            direction=direction,
            scale=params.scale,
            softcap=params.softcap,
            q_heads=q_THD.shape[1],
            kv_heads=k_TGD.shape[1],
            dim_qk=q_THD.shape[2],
            dim_v=v_TGE.shape[2],
            dtype=str(q_THD.dtype).removeprefix("torch."),
        )
        alone = pool.stopwatch.under_way == 0
        pool.stopwatch.under_way += 1
        parts = []
        for rows in routes.servers:
            link = pool._links.get(self._servers[rows.server])
            if link is None or not rows.q_count + rows.k_count:
                continue
            sent = [to_host(take(tensors[column.name], _index(rows, column))) for column in call.request()]
            copied = torch.cuda.current_stream(q_THD.device).record_event() if q_THD.is_cuda else None
            results = [empty_rows(column, _count(rows, column), q_THD.is_cuda) for column in call.reply()]
            try:
                pending = link.call(
                    call.header(), _buffers(sent), _buffers(results), None if copied is None else copied.synchronize
                )
            except LinkLost:
                continue  # the collection will find the link lost
            parts.append((rows, pending, results))
        return ServerCall(self, routes, parts, q_THD.device, alone)


class ServerCall:
    """One attention's tasks at the servers.

    Args:
        plan: as the servers know it.
        routes: of this rank.
        parts: for each server its rows, the reply to come, and the columns into which it comes.
        device: the trainer's.
        alone: no other call was under way when it began.
    """

    def __init__(
        self,
        plan: PooledPlan,
        routes: "BoundRoutes",
        parts: list[tuple["ServerRows", PendingReply, list[Tensor]]],
        device: torch.device,
        alone: bool,
    ) -> None:
        self._plan, self._routes, self._parts, self._device, self._alone = plan, routes, parts, device, alone

    def collect(self) -> tuple[list[tuple["ServerRows", list[Tensor]]], frozenset[int]]:
        """Wait for the results, and agree with the other trainers on the servers that were lost. A collective.

        Returns:
            results: the rows that a server computed and its reply's columns, on the trainer's device.
            lost: numbers of the plan's servers from which some trainer did not get its results.
        """
        pool, ids = self._plan.pool, self._plan._servers
        watch = pool.stopwatch
        watch.observed.calls += 1
        watch.observed.pairs += self._routes.pairs
        with pool.wait_clock.running(torch.device("cpu")):
            for rows, pending, _ in self._parts:
                try:
                    header = pending.wait(pool.timeout_s)
                except LinkLost:
                    continue
                seconds = float(header["seconds"])
                way_s = pending.arrived - pending.departed - seconds if self._alone else None
                watch.served(ids[rows.server], int(header["pairs"]), seconds, way_s)
            watch.under_way -= 1
            lost = self._agree([rows.server for rows in self._routes.servers])
        results = [
            (rows, [column.to(self._device, non_blocking=True) for column in results])
            for rows, _, results in self._parts
            if rows.server not in lost
        ]
        return results, lost

    def _agree(self, servers: list[int]) -> frozenset[int]:
        """Those of the plan's servers that some trainer has lost."""
        pool, ids = self._plan.pool, self._plan._servers
        here = [server for server in servers if ids[server] in pool._links]
        if here:  # the same on every rank
            failed = pool.groups.any_of([bool(pool._links[ids[server]].lost) for server in here])
            pool.lose(
                {ids[server] for server, gone in zip(here, failed, strict=True) if gone},
                "its tasks of this micro-batch are computed by the trainers that hold their rows",
            )
        return frozenset(server for server in servers if ids[server] not in pool._links)


def _index(rows: "ServerRows", column: Column) -> RowIndex:
    return rows.q_rows if column.rows == "queries" else rows.k_rows


def _count(rows: "ServerRows", column: Column) -> int:
    return rows.q_count if column.rows == "queries" else rows.k_count


def _buffers(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The memory of dense tensors on the host, those without rows left out."""
    return [as_bytes(x_N).data for x_N in tensors if x_N.numel()]
