"""GPU memory under each strategy that a simulation compares, counted on a step of the model itself."""

from dataclasses import replace
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from hf_distca.config import DistCAConfig
from hf_distca.memory.counter import MemoryCounter, Training
from hf_distca.memory.micro_batch import Use, busiest_rank, count_core_attention
from hf_distca.models.fake import model_of_config
from hf_distca.models.tensor_parallel import divided_config
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.strategies import Setup, Strategy

KERNEL = "torch_varlen"
"""Kernel whose memory core attention takes: FlashAttention."""
COUNTED_RANKS = 128
"""Maximum number of ranks for counting whole steps: beyond it, counting takes longer than everything else."""


class GpuMemory:
    """Memory of a GPU, with the model's state divided over all ranks as by FSDP2.

    A step with the plan is counted for planned strategies. The others are counted without an exchange, for half and
    for full rows, and extended along a line; context parallelism adds K and V of its group and their gradients. Above
    COUNTED_RANKS ranks planned strategies are counted in the same way, and exchange buffers on one layer.
    """

    def __init__(self, setup: Setup, config: PreTrainedConfig, settings: PlanSettings, options: DistCAConfig) -> None:
        self._setup, self._settings = setup, replace(settings, kernel=KERNEL)
        self._alone = replace(self._settings, ranks=1, ranks_per_node=1, ping_pong=False)
        model = model_of_config(divided_config(config, setup.tensor_parallel), torch.float32)
        self._counter = MemoryCounter(model, self._settings, options, by_config=True)
        self._counter_alone = MemoryCounter(model, self._alone, options, by_config=True)
        mixed, checkpointing = settings.bytes_per_value == 2, {} if setup.checkpointing else None
        self._training = Training("fsdp2", mixed, checkpointing, shards=settings.ranks)

    def __call__(self, strategy: Strategy, rows: int, plan: MicroBatchPlan | None) -> tuple[int | None, int]:
        """Return bytes of rows and of model state, see `hf_distca.sim.simulate.Memory`."""
        (half, state), (full, _) = self._line
        if strategy.servers:  # the memory of a server is unknown
            return None, state
        if plan is not None and self._setup.ranks <= COUNTED_RANKS:
            return sum(self._counter.count(plan, self._training).parts.values()), state
        most = self._settings.tokens_per_rank
        alone = round(full + (full - half) * (rows - most) / (most - most // 2))
        if plan is None:
            widest = max(kind.kv_heads * (kind.dim_qk + kind.dim_v) for kind in self._settings.kinds)
            exchanged = 2 * rows * (strategy.context - 1) * widest * self._setup.profile.bytes_per_value
        else:
            rank, kind = busiest_rank(plan, self._settings), self._settings.dominant_kind
            parts = count_core_attention(plan, kind, self._training.weights, rank, Use(KERNEL))
            exchanged = parts.get("exchange buffers", 0)
        return alone + exchanged, state

    @cached_property
    def _line(self) -> list[tuple[int, int]]:
        """Bytes of rows and of model state without an exchange, for half of the rows that a rank takes and for all."""
        most = self._settings.tokens_per_rank
        plans = [plan_micro_batch([rows], self._alone) for rows in (most // 2, most)]
        counted = [self._counter_alone.count(plan, self._training) for plan in plans]
        return [(sum(each.parts.values()), each.state.total) for each in counted]
