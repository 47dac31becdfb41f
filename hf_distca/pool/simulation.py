"""Dedicated attention servers as a strategy that the simulator compares."""

from collections.abc import Sequence
from dataclasses import replace

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import Workers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.pool.planning import plan_with_servers
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import StepTime, Strategy, step_of_plan
from hf_distca.units import counted


def with_servers(servers: int, run: RunSpec) -> Strategy:
    """Return the strategy whose ranks share core attention with so many servers.

    A server has as many GPUs as a rank. Plans are not chosen by their time.
    """
    settings = replace(run.plans, costs=None)
    workers = Workers.uniform(settings.ranks + servers)

    def step(lengths: IntArray) -> tuple[StepTime, Sequence[MicroBatchPlan]]:
        plan = plan_micro_batch(lengths.tolist(), settings)
        plan = plan_with_servers(plan, workers, settings, ranks_serve=True)
        return step_of_plan(plan, run), [plan]

    return Strategy(
        f"hf_distca, {counted(servers, 'server')}",
        step,
        document_layout=settings.document_layout,
        extra_gpus=servers * run.tensor_parallel,
    )
