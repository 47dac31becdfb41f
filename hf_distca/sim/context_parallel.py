"""Groups of ranks that share each of their documents: what a rank computes, and what it receives.

Context parallelism cuts documents: each rank has a part of the rows, and gathers K and V of the
others. Ulysses divides the heads: for core attention each rank gets all rows of some heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hf_distca.plan import AttentionKind
from hf_distca.plan.arrays import FloatArray
from hf_distca.plan.cost import pairs
from hf_distca.plan.nodes import node_sizes
from hf_distca.predict.seconds import DIAGONAL_ROWS, KindCosts, Tasks
from hf_distca.run import RunSpec

Documents = Sequence[Sequence[int]]
"""[groups] lengths of the documents that the ranks of each group share."""


@dataclass(frozen=True)
class Group:
    """Ranks that share each of their documents.

    Attributes:
        ranks: number of ranks in a group; 1 if documents are not shared.
        divides: what core attention is divided by. The rows of a document are cut into 2 · ranks
            equal parts; the first rank gets the first and the last part, and so on.
    """

    ranks: int = 1
    divides: Literal["rows", "heads"] = "rows"

    def can_share(self, kind: AttentionKind) -> bool:
        """Return whether the ranks can share a kind of attention.

        Heads are divided evenly, as DeepSpeed does; a key-value head may be on several ranks.
        """
        kv_fit = kind.kv_heads % self.ranks == 0 or self.ranks % kind.kv_heads == 0
        return self.divides == "rows" or (kind.q_heads % self.ranks == 0 and kv_fit)

    def attention_seconds(self, documents: Documents, costs: KindCosts) -> FloatArray:
        """Return [groups] seconds of core attention of a rank, forward and backward."""
        kind = costs.kind
        tasks = _tasks(documents, self.ranks if self.divides == "rows" else 1, kind.window)
        share = kind
        if self.divides == "heads":
            share = replace(
                kind,
                q_heads=kind.q_heads // self.ranks,
                kv_heads=max(kind.kv_heads // self.ranks, 1),
            )
        kernel = costs.forward.plus(costs.backward).for_kind(kind, share)
        return costs.layers * kernel.seconds(tasks)

    def received_values(self, kind: AttentionKind) -> float:
        """Return the values that a rank receives in a layer's forward, for each row that it holds.

        They are K and V of the group's other ranks; or, of the rank's share of heads, Q, K and V of
        the others' rows, and the output of its own rows for the others' heads.
        """
        dims = kind.dim_qk + kind.dim_v
        if self.divides == "rows":
            return float((self.ranks - 1) * kind.kv_heads * dims)
        heads = kind.q_heads + max(kind.kv_heads, self.ranks)
        return heads * dims * (self.ranks - 1) / self.ranks

    def exchange_seconds(
        self, received: FloatArray, kind: AttentionKind, run: RunSpec
    ) -> FloatArray:
        """Return [groups] seconds of a layer's exchanges in forward and backward.

        Args:
            received: [groups] bytes that a rank receives in a forward.
        """
        # 1. The share of these bytes that comes over the rank's link to other nodes. A row of K and
        # V crosses to a node once: its ranks receive equal parts, and send them on inside.
        in_node = min(self.ranks, max(node_sizes(run.plans.ranks, run.plans.ranks_per_node)))
        between = (self.ranks - in_node) / (self.ranks - 1)
        if self.divides == "rows":
            between /= in_node
        links = run.device.links
        seconds = np.maximum(
            links.within.seconds(received * (1 - between)),
            links.between.seconds(received * between),
        )
        # 2. K and V are gathered in the forward and in the backward, and dK and dV are reduced.
        # Heads are exchanged in both; where layers run again, Q, K and V are exchanged again.
        exchanges = 3.0
        if self.divides == "heads":
            output = kind.q_heads * kind.dim_v * (self.ranks - 1) / self.ranks
            again = 1 - output / self.received_values(kind)
            exchanges = 2 + again * (run.checkpointing is not None)
        return exchanges * seconds


ONE_RANK = Group()
"""A rank that shares no documents."""


def _tasks(documents: Documents, sharing: int, window: int | None) -> Tasks:
    """Return [groups] the tasks of a rank of each group.

    Args:
        sharing: ranks that share the rows of each document evenly.
    """
    parts = 2 * sharing if sharing > 1 else 1

    def share(amount: Callable[[int], float]) -> FloatArray:
        """Return [groups] a rank's share of an amount, which is given for a document's length."""
        return np.array([sum(map(amount, lengths)) for lengths in documents]) / sharing

    return Tasks(
        share(float),
        # Each of a document's equal parts reads the K/V rows up to its own end.
        share(lambda length: length * (min(parts, length) + 1) / 2),
        share(lambda length: float(pairs(0, length, window))),
        np.ones(len(documents)),
        share(lambda length: length * min(length / parts, DIAGONAL_ROWS)),
        share(lambda length: min(parts, length)),
    )
