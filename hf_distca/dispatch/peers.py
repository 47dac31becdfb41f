"""Exchanges between pairs of ranks, for measuring links with the exchange that training uses."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer, Route
from hf_distca.dispatch.process_groups import Groups

ROW_BYTES = 1024
"""Bytes of an exchanged row."""


class PeerExchanges:
    """Exchanges in which every rank sends rows to one other rank.

    `profiling/links.py` measures them.
    """

    row_bytes = ROW_BYTES

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups = groups
        self.device = device
        self._exchange = Exchange(groups)

    def buffer(self, peers: Sequence[int], rows: int) -> ExchangeBuffer:
        """Return a buffer of the exchange that training uses, for rows from each rank to its peer.

        Args:
            peers: [ranks] receiver of each rank's rows.
        """
        column = torch.empty((0, ROW_BYTES), dtype=torch.uint8, device=self.device)
        sent, received = self._row_counts(peers, rows)
        return self._exchange.buffer("links", Route(sent, received, crossing=True), [column])

    def collective(self, peers: Sequence[int], rows: int) -> Callable[[], object]:
        """Return the same exchange by torch's own collective, over the default group."""
        sent, received = self._row_counts(peers, rows)
        rows_to_send, rows_received = (
            torch.empty(rows, ROW_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return lambda: dist.all_to_all_single(rows_received, rows_to_send, received, sent)

    def _row_counts(self, peers: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
        """Return [ranks] numbers of rows that this rank sends to each rank and receives."""
        ranks = range(self.groups.ranks)
        receiver = peers[self.groups.rank]
        sender = peers.index(self.groups.rank)
        sent = [rows if rank == receiver else 0 for rank in ranks]
        received = [rows if rank == sender else 0 for rank in ranks]
        return sent, received
