"""GPU memory under each strategy that a simulation compares."""

from dataclasses import replace
from functools import cached_property

from transformers import PreTrainedConfig

from hf_distca.config import DistCAConfig
from hf_distca.memory.counter import MemoryCounter, Training
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.ways import Setup, Way

KERNEL = "torch_varlen"
"""Kernel whose memory core attention takes: FlashAttention."""
STATE_BYTES = 16
"""Bytes of a parameter: weight, gradient and the optimizer's two moments, in float32."""
LOG_SUM_EXP_BYTES = 4
"""Bytes per query head and row, in float32."""


class LeastMemory:
    """Lower bound of memory, from shapes: model state, and rows kept for the backward."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __call__(self, way: Way, rows: int, plan: MicroBatchPlan | None) -> tuple[int | None, int]:
        """Return bytes of rows and of model state, see `hf_distca.sim.simulate.Memory`."""
        if way.servers:  # the memory of a server is unknown
            return None, self._state
        alone = self._of_plan(plan, rows) if plan is not None else self._of_rows(rows)
        return None if alone is None else alone + self._gathered(rows, way.context), self._state

    @property
    def _state(self) -> int:
        """Bytes of model state, divided over all GPUs as by FSDP2."""
        return STATE_BYTES * self._setup.model.parameters // (self._setup.ranks * self._setup.tensor_parallel)

    def _of_rows(self, rows: int) -> int | None:
        """Return bytes of rows without an exchange; None without checkpointing, where rows take far more.

        Checkpointing keeps the input of each layer, and O and its log-sum-exp.
        """
        setup = self._setup
        if not setup.checkpointing:
            return None
        value = setup.profile.bytes_per_value
        attention = sum(
            count * kind.q_heads * (kind.dim_v * value + LOG_SUM_EXP_BYTES)
            for kind, count in ((setup.on_a_gpu(kind), count) for kind, count in setup.model.layers.items())
        )
        return rows * (setup.model.depth * setup.model.hidden * value + attention)

    def _of_plan(self, plan: MicroBatchPlan, rows: int) -> int | None:
        """Return bytes of the rows of a planned micro-batch."""
        return self._of_rows(rows)

    def _gathered(self, rows: int, context: int) -> int:
        """Return bytes of other ranks' K and V in a context-parallel layer's backward, and of their gradients."""
        kinds = map(self._setup.on_a_gpu, self._setup.model.layers)
        widest = max(kind.kv_heads * (kind.dim_qk + kind.dim_v) for kind in kinds)
        return 2 * rows * (context - 1) * widest * self._setup.profile.bytes_per_value


class CountedMemory(LeastMemory):
    """Memory counted on the model itself, for GPUs that share no layers."""

    def __init__(self, setup: Setup, config: PreTrainedConfig, settings: PlanSettings, options: DistCAConfig) -> None:
        super().__init__(setup)
        self._config, self._options, self._settings = config, options, replace(settings, kernel=KERNEL)
        mixed = settings.bytes_per_value == 2
        self._training = Training("fsdp2", mixed, checkpointing={} if setup.checkpointing else None)
        self._counter = MemoryCounter(config, self._settings, options)

    @property
    def _state(self) -> int:
        return self._counter.state(self._training).total

    def _of_rows(self, rows: int) -> int:
        """Return bytes of rows on the line through half and full rows."""
        half, full = self._line
        most = self._settings.tokens_per_rank
        return round(full + (full - half) * (rows - most) / (most - most // 2))

    def _of_plan(self, plan: MicroBatchPlan, rows: int) -> int:
        return sum(self._counter.count(plan, self._training).parts.values())

    @cached_property
    def _line(self) -> tuple[int, int]:
        """Bytes of half the rows that a rank takes, and of all."""
        most = self._settings.tokens_per_rank
        alone = replace(self._settings, ranks=1, ranks_per_node=1, ping_pong=False)
        counter = MemoryCounter(self._config, alone, self._options)
        plans = [plan_micro_batch([rows], alone) for rows in (most // 2, most)]
        half, full = (sum(counter.count(plan, self._training).parts.values()) for plan in plans)
        return half, full
