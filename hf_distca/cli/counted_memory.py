"""What a GPU has in memory in each way to train, counted as hf-distca plan --model does."""

from dataclasses import replace
from functools import cached_property

from transformers import LlamaConfig, PreTrainedConfig

from hf_distca.config import DistCAConfig
from hf_distca.memory.estimate import Computation, ConfigMemory
from hf_distca.memory.model_state import Strategy
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.model import ModelShape

KERNEL = "torch_varlen"
"""Whose memory core attention takes: FlashAttention's."""
STRATEGY: Strategy = "fsdp2"


class CountedMemory:
    """Runs a layer's step on tensors without numbers and counts, see `hf_distca.memory`.

    Args:
        config: of the model.
        settings: of plans, on GPUs that share no layers.
        options: of training.
        checkpointing: whether layers are checkpointed.
    """

    counted = True

    def __init__(
        self,
        config: PreTrainedConfig,
        settings: PlanSettings,
        options: DistCAConfig,
        *,
        checkpointing: bool,
    ) -> None:
        self._config, self._options, self._checkpointing = config, options, checkpointing
        self._settings = replace(settings, kernel=KERNEL)
        self._mixed = settings.bytes_per_value == 2
        self._memory = ConfigMemory(config, self._settings, options)

    @cached_property
    def state(self) -> int:
        """Of FSDP2."""
        return int(self._memory.state(STRATEGY, mixed=self._mixed).total)

    def of_rows(self, rows: int) -> int:
        """Along the line through full rows and half ones, of documents that stay on their rank."""
        half, full = self._line
        most = self._settings.tokens_per_rank
        return round(full + (full - half) * (rows - most) / (most - most // 2))

    def of_plan(self, plan: MicroBatchPlan, rows: int) -> int:
        """Counted on the plan."""
        return self._count(self._memory, plan)

    @cached_property
    def _line(self) -> tuple[int, int]:
        """Bytes of half as many rows as a rank takes, and of as many."""
        most = self._settings.tokens_per_rank
        alone = replace(self._settings, ranks=1, ranks_per_node=1, ping_pong=False)
        memory = ConfigMemory(self._config, alone, self._options)
        half, full = (self._count(memory, plan_micro_batch([rows], alone)) for rows in (most // 2, most))
        return half, full

    def _count(self, memory: ConfigMemory, plan: MicroBatchPlan) -> int:
        computation = Computation.of(STRATEGY, mixed=self._mixed)
        return sum(memory.micro_batch(plan, computation, checkpointing=self._checkpointing).values())


def config_of_shape(shape: ModelShape) -> LlamaConfig:
    """The config of a LLaMA-like model of this shape, see `ModelShape.llama`."""
    (kind,) = shape.layers
    output = shape.hidden * kind.q_heads * kind.dim_v
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=(shape.after - output) // (3 * shape.hidden),
        num_hidden_layers=shape.depth,
        num_attention_heads=kind.q_heads,
        num_key_value_heads=kind.kv_heads,
        head_dim=kind.dim_qk,
        vocab_size=shape.head // shape.hidden,
    )
