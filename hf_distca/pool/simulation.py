"""Dedicated attention servers as a strategy that the simulator compares."""

from dataclasses import replace

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import Workers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.planning import plan_with_servers
from hf_distca.predict.setup import Setup
from hf_distca.sim.lengths import IntArray
from hf_distca.sim.strategies import StepTime, Strategy, step_of_plan
from hf_distca.units import counted


def with_servers(servers: int, setup: Setup, settings: PlanSettings) -> Strategy:
    """Return the strategy whose ranks share core attention with so many servers.

    A server has as many GPUs as a rank. Documents are whole or in the joint layout, as settings
    have it.
    """
    layout = "whole" if settings.document_layout == "whole" else "joint"
    plan_settings = replace(settings, document_layout=layout)
    workers = Workers.uniform(settings.ranks + servers)

    def step(lengths: IntArray) -> tuple[StepTime, MicroBatchPlan]:
        plan = plan_with_servers(
            plan_micro_batch(lengths.tolist(), plan_settings),
            workers,
            plan_settings,
            ranks_serve=True,
        )
        return step_of_plan(plan, setup, plan_settings), plan

    return Strategy(
        f"hf_distca, {layout}, {counted(servers, 'server')}",
        step,
        document_layout=layout,
        extra_gpus=servers * setup.tensor_parallel,
    )
