"""What a GPU has in memory in each way to train.

`LeastMemory` reckons the least from shapes. `hf-distca simulate` counts the model's own step instead where it can, see
`hf_distca.cli.counted_memory`.
"""

from dataclasses import dataclass
from typing import Protocol

from hf_distca.plan import MicroBatchPlan
from hf_distca.sim.ways import Setup, Way

STATE_BYTES = 16
"""Of a parameter: weight, gradient and two moments of the optimizer, in float32."""
LOG_SUM_EXP_BYTES = 4
"""Of a query head and row, in float32."""


class Memory(Protocol):
    """Tells bytes of a GPU."""

    @property
    def counted(self) -> bool:
        """Whether a step was counted; else these are the least bytes, reckoned from shapes."""

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer, divided over all that train as by FSDP2 or ZeRO-3."""

    def of_rows(self, rows: int) -> int | None:
        """What so many rows take beside the state if core attention needs no others; None where nothing is known."""

    def of_plan(self, plan: MicroBatchPlan, rows: int) -> int | None:
        """What a planned micro-batch takes beside the state, on the rank that exchanges the most.

        Args:
            plan: of the micro-batch.
            rows: the most of any rank.
        """


@dataclass(frozen=True)
class LeastMemory:
    """The least that there is: model state, and what is kept of rows for the backward.

    Args:
        setup: who trains what.
    """

    setup: Setup
    counted: bool = False

    @property
    def state(self) -> int:
        """Bytes of the model's state."""
        return STATE_BYTES * self.setup.model.parameters // (self.setup.ranks * self.setup.tensor_parallel)

    def of_rows(self, rows: int) -> int | None:
        """Under checkpointing the input of each layer and the result of core attention, O and its log-sum-exp; None
        without, where it is many times as much."""
        setup = self.setup
        if not setup.checkpointing:
            return None
        value = setup.profile.bytes_per_value
        attention = sum(
            count * kind.q_heads * (kind.dim_v * value + LOG_SUM_EXP_BYTES)
            for kind, count in ((setup.on_a_gpu(kind), count) for kind, count in setup.model.layers.items())
        )
        return rows * (setup.model.depth * setup.model.hidden * value + attention)

    def of_plan(self, plan: MicroBatchPlan, rows: int) -> int | None:
        """As of rows that stay where they are."""
        return self.of_rows(rows)


def rows_bytes(way: Way, rows: int, plan: MicroBatchPlan | None, setup: Setup, memory: Memory) -> int | None:
    """What a way's rows take of a GPU beside the model's state; None where nothing is known of it.

    Args:
        way: to train.
        rows: the most of a rank.
        plan: of a micro-batch, where the way is planned.
        setup: who trains what.
        memory: tells bytes.
    """
    if way.servers:
        return None
    if plan is not None:
        return memory.of_plan(plan, rows)
    alone = memory.of_rows(rows)
    return None if alone is None else alone + _gathered_bytes(setup, rows, way.context)


def _gathered_bytes(setup: Setup, rows: int, context: int) -> int:
    """K and V of the other ranks of a context-parallel group while a layer's backward runs, and their gradients.

    Args:
        setup: who trains what.
        rows: of a rank.
        context: ranks of the group.
    """
    widest = max(kind.kv_heads * (kind.dim_qk + kind.dim_v) for kind in map(setup.on_a_gpu, setup.model.layers))
    return 2 * rows * (context - 1) * widest * setup.profile.bytes_per_value
