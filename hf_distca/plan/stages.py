"""Sizes of the stages in which K/V rows travel."""

from dataclasses import replace

from hf_distca.plan import Plan, moves
from hf_distca.plan.arrays import IntArray

EXCHANGE_BUFFER_BYTES = 1 << 28
"""Bytes of K/V rows in an exchange buffer; 65536 rows of Llama-3-8B in bfloat16."""
BUFFERS = 3
BUFFERS_IN_HOPS = 5
"""Numbers of buffers for sending, and for receiving: the stages that are in memory at once."""
STAGES_ALONE = 4
"""Number of stages of a lone nano-batch, if the stages are worth it: the first one travels while
local tasks are computed, each later one while an earlier stage is computed."""
SMALLEST_STAGE = 1024
"""Least rows of a stage; fewer rows are not worth an exchange and kernel calls only to hide
computation."""


def usual_stages(nano_batches: int) -> int:
    """Return the default number of stages; small exchanges get fewer."""
    return STAGES_ALONE if nano_batches == 1 else 1


def stage_slots(stages: int, *, forwards: bool) -> tuple[int, ...]:
    """Return [stages] the memory slot that each stage has.

    A stage has its slot from the departure of K and V until dK and dV are back.
    """
    return tuple(stage % (BUFFERS_IN_HOPS if forwards else BUFFERS) for stage in range(stages))


def with_stages(
    plan: Plan, buffer_rows: int, *, busiest_rows: int, stages: int, together: bool = False
) -> Plan:
    """Divide a plan without stages into stages, if its exchanges need them.

    Args:
        busiest_rows: as `count_plan` counts them.
        buffer_rows, stages, together: as in `stage_rows`.
    """
    in_hops = plan.nodes is not None
    rows = stage_rows(busiest_rows, buffer_rows, stages=stages, in_hops=in_hops, together=together)
    return replace(plan, stage_rows=rows)


def stage_rows(
    busiest_rows: int, buffer_rows: int, *, stages: int, in_hops: bool, together: bool = False
) -> int | None:
    """Return how many K/V rows a stage has; None if all rows travel at once.

    Args:
        busiest_rows: K/V rows that the busiest rank sends, or receives, in a layer.
        buffer_rows: K/V rows of an exchange buffer.
        stages: approximate number of stages, if they are worth it; the buffers may require more.
        together: whether a stage may take several buffers if all rows fit into all buffers. No
            number of stages takes more memory then.
    """
    rows = -(-busiest_rows // stages)
    if in_hops and stages > 1:
        # Rows on the same path are spread in blocks, so stages cannot be quite even.
        rows += rows // moves.PARTS
    rows = max(rows, SMALLEST_STAGE)
    buffers = 1
    if together:
        buffers = BUFFERS_IN_HOPS if in_hops else BUFFERS
    if busiest_rows > buffers * buffer_rows:
        rows = min(rows, buffer_rows)
    return rows if busiest_rows > rows else None


def rows_by_stage(plan: Plan) -> IntArray:
    """Return [stages, 2, ranks] K/V rows that each rank sends and receives in a plan's stages.

    `moves.rows_by_stage` counts them.
    """
    _, first_hop, forwards = moves.rows_to_move(plan)
    return moves.rows_by_stage(first_hop, forwards, plan.layout.ranks)
