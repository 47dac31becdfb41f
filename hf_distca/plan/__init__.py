"""The data of a plan, and what follows from it: moves, routes, stages, schedules and figures."""

from .data import (
    ATTENTION_NAME,
    FEATURES,
    PLAN_KEY,
    SEGMENT,
    TASK,
    AttentionKind,
    Branches,
    Direction,
    ExchangeFigures,
    Layout,
    MicroBatchPlan,
    NanoBatch,
    Plan,
    PlanChoice,
    PlannedImages,
    PlanSummary,
)

__all__ = [
    "ATTENTION_NAME",
    "FEATURES",
    "PLAN_KEY",
    "SEGMENT",
    "TASK",
    "AttentionKind",
    "Branches",
    "Direction",
    "ExchangeFigures",
    "Layout",
    "MicroBatchPlan",
    "NanoBatch",
    "Plan",
    "PlanChoice",
    "PlanSummary",
    "PlannedImages",
]
