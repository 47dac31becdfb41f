"""Which servers take part: the same on every rank, agreed where they join and where results are collected."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hf_distca.dispatch.groups import Groups
from hf_distca.pool.directory import Directory, ServerInfo
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.transport.contract import Memory
from hf_distca.pool.wire.errors import LinkLost, MismatchError

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For connecting to a server that has joined, at most."""


@dataclass(frozen=True)
class News:
    """What a rank knows of the servers that others may not know.

    Attributes:
        listed: the directory's members, by rank 0; of other ranks none.
        lost: ids of the servers whose link to this rank has failed.
    """

    listed: tuple[ServerInfo, ...]
    lost: tuple[int, ...]


class Members:
    """The servers that take part, with this rank's link to each.

    Args:
        groups: the ranks.
        memory: where rows are sent from and received.
        token: the run's token.
        directory: where servers join; on rank 0 only.
        timeout_s: a server that does not answer for so long is lost.
    """

    def __init__(
        self, groups: Groups, memory: Memory, token: bytes, directory: Directory | None, timeout_s: float
    ) -> None:
        self.memory = memory
        self.timeout_s = timeout_s
        self._groups = groups
        self._token = token
        self._directory = directory
        self._links: dict[int, ServerLink] = {}
        self._infos: dict[int, ServerInfo] = {}
        self._beside: dict[int, int | None] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the servers that take part."""
        return tuple(sorted(self._links))

    def link(self, server: int) -> ServerLink | None:
        """To a server; None where it takes no part any more."""
        return self._links.get(server)

    def rank_beside(self, server: int) -> int | None:
        """The first rank on the host of a server that takes part or did; None where there is no rank."""
        return self._beside[server]

    def name(self, server: int) -> str:
        """Of a server that takes part or did, for messages."""
        info = self._infos[server]
        return f"{server} ({info.host}:{info.port}, {info.device})"

    def carried_by(self, server: int) -> str:
        """Which transport carries this rank's rows to a server that takes part, and why, for messages."""
        return self._links[server].carried_by

    def tell(self, message: str, level: int = logging.INFO) -> None:
        """Log on rank 0."""
        if self._groups.rank == 0:
            logger.log(level, message)

    # Between steps

    def news(self) -> News:
        """What other ranks are to know before `update`."""
        listed = self._directory.members() if self._directory is not None else ()
        return News(listed, tuple(server for server, link in self._links.items() if link.lost))

    def update(self, news: Sequence[News]) -> list[ServerInfo]:
        """Go on without those that left, and take in those that have joined. A collective.

        Args:
            news: of every rank.

        Returns:
            Those that take part from now on.
        """
        gone = {server for rank in news for server in rank.lost}
        present = {info.id: info for info in news[0].listed if info.id not in gone}  # it may come back as a new member
        self._lose(gone, "between steps; nothing was under way")
        self._lose(set(self._links) - set(present), "it left the directory")
        joined = [info for server, info in sorted(present.items()) if server not in self._links]
        return self._connect(joined) if joined else []

    def _connect(self, joined: Sequence[ServerInfo]) -> list[ServerInfo]:
        """Those to which every rank has a link now."""
        links: dict[int, ServerLink] = {}
        failures: dict[int, str] = {}
        final: set[int] = set()
        connect_s = min(CONNECT_S, self.timeout_s)
        for info in joined:
            try:
                links[info.id] = ServerLink(
                    info.host,
                    info.port,
                    self._token,
                    self._groups.rank,
                    self._groups.ranks,
                    connect_s,
                    self.timeout_s,
                    self.memory,
                )
            except LinkLost as error:
                failures[info.id] = str(error)
                if isinstance(error, MismatchError):
                    final.add(info.id)
        here = {server for server, link in links.items() if link.within_host}
        told = self._groups.all_gather((failures, final, here))
        connected = []
        for info in joined:
            reasons = [failures[info.id] for failures, _, _ in told if info.id in failures]
            if not reasons:
                self._links[info.id] = links[info.id]
                self._infos[info.id] = info
                near = (rank for rank, (_, _, here) in enumerate(told) if info.id in here)
                self._beside[info.id] = next(near, None)
                connected.append(info)
                continue
            if info.id in links:
                links[info.id].close()
            self.tell(f"attention server {info.host}:{info.port} cannot take part: {reasons[0]}", logging.WARNING)
            if self._directory is not None:
                again = all(info.id not in final for _, final, _ in told)
                self._directory.drop(info.id, "" if again else reasons[0])
        return connected

    # In a step

    def without_lost(self, servers: Sequence[int]) -> frozenset[int]:
        """Agree on the servers that some rank has lost, and go on without them. A collective where any takes part.

        Args:
            servers: ids of those that had something to do; the same on every rank.

        Returns:
            Those of them that take no part any more.
        """
        here = [server for server in servers if server in self._links]
        if here:  # the same on every rank
            failed = self._groups.any_of([bool(self._links[server].lost) for server in here])
            self._lose(
                {server for server, lost in zip(here, failed, strict=True) if lost},
                "its tasks of this micro-batch are computed by the ranks",
            )
        return frozenset(server for server in servers if server not in self._links)

    def _lose(self, servers: set[int], what: str) -> None:
        """Go on without some servers. Every rank does it with the same ones.

        Args:
            servers: their ids; those that are gone already do not count.
            what: what becomes of their tasks, for the warning.
        """
        for server in sorted(servers & set(self._links)):
            link = self._links.pop(server)
            reason = link.lost or "another rank lost it"
            link.close()
            if self._directory is not None:
                self._directory.drop(server)
            left = f"{len(self._links)} servers left" if self._links else "no server left, ranks go on in place"
            self.tell(f"lost attention server {self.name(server)} ({reason}): {what}; {left}", logging.WARNING)

    def close(self) -> None:
        """Let go of all servers, and tell them that training is over."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._directory is not None:
            self._directory.end()
            self._directory.close()
