"""Tasks of one kind of attention on a layout, and their stages."""

from collections.abc import Sequence

from hf_distca.plan import AttentionKind, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.chunks import layout_of_kind
from hf_distca.planner.cost import Workers
from hf_distca.planner.seconds import FloatArray
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import tasks_at_home
from hf_distca.planner.stages import with_stages


def at_home(layout: Layout, window: int | None) -> Plan:
    """Return the plan in which every rank computes the rows that it holds."""
    return Plan(layout, tasks_at_home(layout.segments), layout.ranks, window)


def plan_tasks(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    tolerance: FloatArray | None = None,
) -> Plan:
    """Balance the core attention of one kind of layer on a layout, in one stage.

    Args:
        workers: as in `balance`; None for the ranks alone, at the speeds of the settings.
        nodes: as in `balance`; None for the nodes of the ranks alone.
        tolerance: as in `balance`; None for the tolerance of the settings.
    """
    return balance(
        layout_of_kind(layout, kind),
        workers=workers or settings.workers(layout.tokens),
        nodes=settings.nodes if nodes is None else nodes,
        groups=groups,
        window=kind.window,
        balance_tolerance=settings.balance_tolerance if tolerance is None else tolerance,
        balance_block_size=settings.balance_block_size,
        row_bytes=settings.row_bytes(kind),
        row_overhead=settings.row_overhead,
        gather_cost=settings.gather_cost,
    )


def plan_stages(plan: Plan, kind: AttentionKind, settings: PlanSettings, *, stages: int) -> Plan:
    """Divide the K/V rows of a plan into stages."""
    return with_stages(plan, settings.buffer_rows(kind), stages=stages)
