"""Control messages of thousands of ranks: within blocks of ranks, and between their first ranks."""

from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


class ControlLevels(NamedTuple):
    """Two levels of control groups: a message takes as many steps as a block has ranks, not as all.

    Attributes:
        block: of the ranks of a block.
        firsts: of the first ranks of all blocks; None on other ranks.
    """

    block: dist.ProcessGroup
    firsts: dist.ProcessGroup | None

    def of_blocks(self, value: Value) -> list[Value]:
        """Return the value of the first rank of each block. A collective of all ranks."""
        sent = [None if self.firsts is None else objects_of_ranks(value, self.firsts)]
        dist.broadcast_object_list(sent, group=self.block, group_src=0, device=torch.device("cpu"))
        (values,) = sent
        assert values is not None
        return values

    def maximum(self, values: Tensor) -> None:
        """Replace values by their maxima over all ranks. A collective of all ranks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.block)
        if self.firsts is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.firsts)
        dist.broadcast(values, group=self.block, group_src=0)


def objects_of_ranks(value: Value, group: dist.ProcessGroup) -> list[Value]:
    """Return the value of every rank of a group. A collective of the group."""
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
