"""Nodes: ranks whose links to each other are faster than their links to other ranks."""

from collections.abc import Sequence

import numpy as np

from hf_distca.checks.plan_rules import Plans

NODE_BANDWIDTH = 450.0
"""GB/s that a GPU sends, and receives, inside its node: NVLink of an H100 or H200."""
EXCHANGE_BANDWIDTH = 100.0
"""GB/s of an exchange inside a node, with the 8 thread blocks that it may use (`EXCHANGE_CTAS`):
some 12 GB/s each."""
NETWORK_BANDWIDTH = 50.0
"""GB/s that a GPU sends, and receives, between nodes: a network port of 400 Gbit/s for each GPU."""


def node_sizes(ranks: int, ranks_per_node: int | Sequence[int]) -> tuple[int, ...]:
    """Return [nodes] the number of consecutive ranks on each node.

    Raises:
        ValueError: a number is not positive, or the numbers do not add up to the ranks.
    """
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1 or ranks % ranks_per_node:
            raise Plans.OTHER_NODE_SIZE.error(given=ranks_per_node, ranks=ranks)
        return (ranks_per_node,) * (ranks // ranks_per_node)
    sizes = tuple(ranks_per_node)
    if min(sizes, default=0) < 1 or sum(sizes) != ranks:
        named = ",".join(map(str, sizes))
        raise Plans.OTHER_NODE_SIZES.error(given=named, total=sum(sizes), ranks=ranks)
    return sizes


def nodes_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return [ranks] the node of each rank, from [nodes] ranks of each node."""
    return tuple(np.repeat(np.arange(len(sizes)), sizes).tolist())
