"""Process groups of their own for exchanges and for words between ranks.

No group of the training framework is touched: its collectives and ours never wait in one queue.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_distca.dispatch.backends import (
    check_devices,
    device_uuid,
    exchange_backend,
    exchange_options,
    indexed,
    unreachable,
)
from hf_distca.dispatch.failures import Failures


class Groups:
    """The ranks that train together, with a group for tensors and one for small Python objects.

    Creating it is a collective: every rank does it at the same point. It connects every rank with every other, so
    that no layer waits for that, and ranks that cannot reach each other fail here.

    Args:
        device: where the exchanged tensors live; the exchange takes the default group's backend for it.
        timeout_s: seconds after which an exchange with a silent peer fails.

    Attributes:
        exchange: the group of the exchanges; None where there is one rank.
        failures: tells each rank why another failed.

    Raises:
        RuntimeError: this rank cannot reach the others, or not in time.
        ValueError: on every rank, where ranks share a GPU that they cannot share.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.ranks = dist.get_world_size() if self.distributed else 1
        self.exchange = self._words = None
        store = None
        if self.distributed:
            timeout = timedelta(seconds=timeout_s)
            device = indexed(device)
            try:
                self._words = dist.new_group(backend="gloo", timeout=timeout, group_desc="distca words")
                uuids = self.all_gather(device_uuid(device))
            except RuntimeError as error:
                raise unreachable(self.rank, error) from error
            store = self._words.get_group_store()
            backend = exchange_backend(device)
            check_devices(backend, uuids)
            self.exchange = self._connected(backend, timeout, device)
        self.failures = Failures(store, self.rank, self.ranks)

    def _connected(self, backend: str, timeout: timedelta, device: torch.device) -> dist.ProcessGroup:
        """A group for the exchanges, once a row has gone from every rank to every other.

        NCCL connects a pair of ranks when it first has something to send, and asks for memory then.
        """
        sent, received = (torch.zeros(self.ranks, dtype=torch.uint8, device=device) for _ in range(2))
        one_each = [1] * self.ranks
        try:
            group: dist.ProcessGroup = dist.new_group(
                backend=backend,
                timeout=timeout,
                pg_options=exchange_options(backend),
                group_desc="distca exchange",
                device_id=device if backend == dist.Backend.NCCL else None,
            )
            dist.all_to_all_single(received, sent, one_each, one_each, group=group)
            received.cpu()  # not before it is here
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} cannot exchange rows over {backend}: {error}") from error
        return group

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks. A collective on the CPU."""
        if not self.distributed:
            return [value]
        gathered: list[Any] = [None] * self.ranks
        dist.all_gather_object(gathered, value, group=self._words)
        return gathered

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has it set. A collective on the CPU; every rank has as many flags."""
        agreed = torch.tensor(flags, dtype=torch.uint8)
        if self.distributed:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._words)
        return [bool(flag) for flag in agreed.tolist()]

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error, so that none is left waiting for the others.

        Raises:
            ValueError: some rank came with an error; says which ranks and what each said.
        """
        errors = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = {rank: message for rank, message in enumerate(errors) if message is not None}
        if not failed:
            return
        if len(set(failed.values())) == 1 and len(failed) == self.ranks and error is not None:
            raise error
        raise ValueError("; ".join(f"rank {rank}: {message}" for rank, message in failed.items())) from error
