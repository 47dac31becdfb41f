"""GPU memory under each strategy that a simulation compares.

It is counted on a step of the model itself.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from transformers import PreTrainedConfig

from hf_distca.memory.counted_encoder import Encoded
from hf_distca.memory.counter import MEMORY, MemoryCounter, RankMemory
from hf_distca.models.fake import model_of_config
from hf_distca.models.tensor_parallel import divided_config
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import Strategy

PATCHES = 4096
"""Patches of an image that is encoded for a count."""
KERNEL = "torch_varlen"
"""Kernel whose memory core attention takes: FlashAttention."""


def gpu_memory(
    run: RunSpec, config: PreTrainedConfig
) -> Callable[[Strategy, int, MicroBatchPlan | None, int], tuple[int | None, int]]:
    """Return a `hf_distca.sim.compare.Memory`.

    The model's state is divided over all ranks as by FSDP2.

    A step with the plan is counted for planned strategies. The others are counted without an
    exchange, for half and for full rows, and extended along a line; groups of ranks that share
    documents add what a rank receives from the others, and the gradients.
    """
    settings = replace(run.plans, kernel=KERNEL)
    run = replace(run, plans=settings, shards=settings.ranks, device_memory=MEMORY)
    alone = replace(settings, ranks=1, ranks_per_node=1, ping_pong=False, costs=None)
    run_alone = replace(run, plans=alone)
    full_rows = settings.rows_per_rank
    model = model_of_config(divided_config(config, run.tensor_parallel), torch.float32)
    counter = MemoryCounter(model, by_config=True)
    counter_alone = MemoryCounter(model, by_config=True)

    @cache
    def without_exchange(rows: int) -> RankMemory:
        return counter_alone.count(plan_micro_batch([rows], alone), run_alone)

    def memory(
        strategy: Strategy, rows: int, plan: MicroBatchPlan | None, patches: int
    ) -> tuple[int | None, int]:
        state = sum(without_exchange(full_rows).state)
        if strategy.extra_gpus:  # what they hold is unknown
            return None, state
        encoder = 0
        if patches:
            images = -(-patches // PATCHES)
            encoder = counter.encoder_bytes(run, Encoded(images, patches))
        if plan is not None:
            return sum(counter.count(plan, run).parts.values()) + encoder, state
        # A line through half and full rows.
        half_rows = full_rows // 2
        half = sum(without_exchange(half_rows).parts.values())
        full = sum(without_exchange(full_rows).parts.values())
        extended = round(full + (full - half) * (rows - full_rows) / (full_rows - half_rows))
        # What a rank receives from its group, and the gradients.
        most_values = max(map(strategy.group.received_values, settings.kinds))
        received = 2 * rows * most_values * run.device.bytes_per_value
        return extended + round(received) + encoder, state

    return memory
