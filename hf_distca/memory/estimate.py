"""What training takes of a rank's memory: the model's state and a micro-batch together, and how long rows may be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.memory.core_attention import Use, busiest_rank
from hf_distca.memory.depth import count_by_layers, repeated_layers
from hf_distca.memory.live import Part, without_numbers
from hf_distca.memory.micro_batch import count_micro_batch
from hf_distca.memory.model_state import Strategy, model_state
from hf_distca.memory.models import model_of_config
from hf_distca.memory.stand_ins import counted_kernel
from hf_distca.patches.prepare import prepare_model
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

OF_STATE: tuple[Part, ...] = ("weights", "gradients")
"""Parts of a counted step that belong to what a strategy keeps, see `ModelState`."""


def of_micro_batch(counted: Mapping[Part, int]) -> dict[Part, int]:
    """The parts of a counted step that are there during a micro-batch only, on the device."""
    return {part: size for part, size in counted.items() if part not in (*OF_STATE, "host")}


@dataclass(frozen=True)
class Computation:
    """What a model computes in.

    Attributes:
        weights: dtype of the weights that it computes with.
        autocast: dtype of autocast; None without.
    """

    weights: torch.dtype
    autocast: torch.dtype | None = None

    @staticmethod
    def of(strategy: Strategy, *, mixed: bool) -> "Computation":
        """ddp autocasts float32 weights; the others have bfloat16 ones where they compute in bfloat16."""
        if strategy == "ddp":
            return Computation(torch.float32, torch.bfloat16 if mixed else None)
        return Computation(torch.bfloat16 if mixed else torch.float32)


class ConfigMemory:
    """Estimates for models of a config, each counted once.

    Args:
        config: of the model.
        settings: of plans; `kinds` are the model's.
        options: how the model is trained.
    """

    def __init__(self, config: PreTrainedConfig, settings: PlanSettings, options: DistCAConfig) -> None:
        self._config, self._settings, self._options = config, settings, options
        self._use = Use(
            counted_kernel(settings.kernel),
            keep_received=options.keep_received,
            keep_core_attention=options.keep_core_attention,
        )
        self._counted: dict[Any, dict[Part, int]] = {}

    @cached_property
    def _model(self) -> PreTrainedModel:
        return model_of_config(self._config, torch.float32, without_numbers())

    def state(self, strategy: Strategy, *, mixed: bool) -> Any:
        """See `model_state`."""
        return model_state(self._model, strategy, self._settings.ranks, mixed=mixed)

    def micro_batch(self, plan: MicroBatchPlan, computation: Computation, *, checkpointing: bool) -> dict[Part, int]:
        """Bytes by part that a micro-batch takes on the rank that exchanges the most, besides the model's state.

        Args:
            plan: of the micro-batch.
            computation: what the model computes in.
            checkpointing: whether every decoder layer is checkpointed.
        """
        rank = busiest_rank(plan, self._settings)
        use = replace(self._use, autocast=computation.autocast, checkpointing={} if checkpointing else None)

        def count(config: PreTrainedConfig) -> dict[Part, int]:
            mode = without_numbers()
            model = model_of_config(config, computation.weights, mode)
            prepare_model(model, self._options, ping_pong=self._settings.ping_pong)
            return count_micro_batch(model, plan, rank, use, mode)

        return of_micro_batch(count_by_layers(count, self._config, repeated_layers(self._model)))

    def of_tokens(self, tokens_per_rank: int, computation: Computation, *, checkpointing: bool) -> int:
        """Bytes that a micro-batch of full ranks takes at most, see `longest_documents`.

        Args:
            tokens_per_rank: on each rank.
            computation: what the model computes in.
            checkpointing: whether every decoder layer is checkpointed.
        """
        key = tokens_per_rank, computation, checkpointing
        if key not in self._counted:
            settings = replace(self._settings, tokens_per_rank=tokens_per_rank)
            plan = plan_micro_batch(longest_documents(settings), settings)
            self._counted[key] = self.micro_batch(plan, computation, checkpointing=checkpointing)
        return sum(self._counted[key].values())

    def longest(self, available: int, strategy: Strategy, *, mixed: bool, checkpointing: bool) -> int:
        """The most tokens per rank that fit.

        Args:
            available: bytes of a rank's memory.
            strategy: how ranks share the model's state.
            mixed: compute in bfloat16, else in float32.
            checkpointing: whether every decoder layer is checkpointed.
        """
        computation = Computation.of(strategy, mixed=mixed)
        left = available - self.state(strategy, mixed=mixed).total
        return longest_tokens(lambda tokens: self.of_tokens(tokens, computation, checkpointing=checkpointing), left)


def longest_documents(settings: PlanSettings) -> list[int]:
    """Lengths of documents that fill all ranks: one that they share, or one on each where documents stay whole."""
    if settings.document_layout == "whole":
        return [settings.tokens_per_rank] * settings.ranks
    return [settings.tokens_per_rank * settings.ranks]


STEP, MOST = 1024, 1 << 24
"""Tokens. Rows of a multiple of STEP are asked about, up to MOST."""


def longest_tokens(needed: Callable[[int], int], available: int) -> int:
    """The most tokens, a multiple of STEP, that need no more bytes than there are; 0 where not even STEP fit.

    Memory is counted at STEP times powers of two, and taken to grow along a line between two of them.

    Args:
        needed: bytes of so many tokens.
        available: bytes.
    """
    low = 0
    high = STEP
    while high <= MOST and needed(high) <= available:
        low, high = high, 2 * high
    if low == 0 or high > MOST:
        return low
    slope = (needed(high) - needed(low)) / (high - low)
    return low + int((available - needed(low)) / slope) // STEP * STEP
