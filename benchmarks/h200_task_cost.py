"""Writes the cost of a task into the profile of an H200 that comes with the package, from its
replayed plans.

    PYTHONPATH=. python benchmarks/h200_task_cost.py hf_distca/predict/profiles/h200.json

The profile was measured without calls of several tasks. So its cost of a task is a prior: the
seconds by which the plan of 64 ranks was predicted too low (`short_tasks` in
benchmarks/results/gpu_replays.json), divided by the tasks of such a plan, all but the first of each
call. The cost of a call included its first task; now it does not. The replayed plan had other
documents of the same corpus and the kernel torch_varlen. A profile that `hf-distca profile`
measures on an H200 replaces the prior.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.replay import lengths_of, settings_of
from benchmarks.gpu.setting import REPLAYS, Setting
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost
from hf_distca.predict.walk import predict_plan

TRIAL_PAIRS = 1e5
"""Pairs of a task with which the tasks are counted; the prediction is linear in them."""
RESULT = Path(__file__).parent / "results" / "gpu_replays.json"
SOURCE = (
    "Kernel, matrices and memory measured with the kernel flash_attn_3 and torch 2.11.0+cu130; "
    "links not measured, but taken as those of an H100. The cost of a task is a prior until it is "
    "measured: without it the seconds of a plan of 64 ranks, replayed on an H200 with the kernel "
    "torch_varlen, were predicted 5.7 % too low."
)


def with_task(profile: DeviceProfile, pairs_of_task: float) -> DeviceProfile:
    """Return the profile with a task's cost taken out of the cost of a call, which has one task
    where measured.
    """

    def changed(cost: KernelCost) -> KernelCost:
        task = cost.pair * pairs_of_task
        return replace(cost, call=cost.call + cost.task - task, task=task)

    return replace(profile, forward=changed(profile.forward), backward=changed(profile.backward))


def attention_s(plan: MicroBatchPlan, settings: PlanSettings, profile: DeviceProfile) -> float:
    """Return the predicted seconds of all ranks in the kernel."""
    costs = settings.costs
    assert costs is not None
    kinds = tuple(
        replace(each, forward=profile.forward, backward=profile.backward) for each in costs.kinds
    )
    costs = replace(costs, kinds=kinds)
    predicted = predict_plan(plan, costs, settings.node_of_ranks, settings.bytes_per_value)
    return float(predicted.attention.sum())


def main() -> None:
    path = Path(sys.argv[1])
    profile = with_task(DeviceProfile.load(str(path)), 0.0)
    short = json.loads(RESULT.read_text(encoding="utf-8"))["parts"]["replays"]["figures"][
        "short_tasks"
    ]
    missing = short["predicted_too_low"] / (
        1 - short["predicted_too_low"]
    )  # share of the predicted seconds
    (replay,) = (each for each in REPLAYS if each.ranks == short["ranks"])
    setting = Setting()
    settings = settings_of(setting, replay, profile)
    plan = plan_micro_batch(lengths_of(replay, setting), settings)
    before, trial = (
        attention_s(plan, settings, costs) for costs in (profile, with_task(profile, TRIAL_PAIRS))
    )
    pairs_of_task = float(f"{missing * before / (trial - before) * TRIAL_PAIRS:.2g}")
    profile = replace(with_task(profile, pairs_of_task), source=SOURCE)
    profile.save(path)
    print(
        f"a task takes as long as {pairs_of_task:.0f} pairs: {profile.forward.task:.2g}, "
        f"{profile.backward.task:.2g} s"
    )


if __name__ == "__main__":
    main()
