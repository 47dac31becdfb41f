"""Count of a rank's training memory, and the longest rows that fit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_distca.memory.counted_encoder import Encoded, EncoderPeaks, count_encoder
from hf_distca.memory.counted_step import Peaks, busiest_rank, count_peaks
from hf_distca.memory.live import Part
from hf_distca.memory.model_state import ModelState, model_state, parameter_bytes
from hf_distca.models.decoder import base_model
from hf_distca.models.fake import model_after, model_of_config, repeated_layers, with_layers
from hf_distca.models.tensor_parallel import config_on_a_rank, is_divided_at_load
from hf_distca.patches.prepare import prepare_model
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.run import RunSpec, Strategy

STEP, FIRST, MOST = 1024, 8192, 1 << 24
"""Numbers of rows to try: multiples of STEP tokens, FIRST before others, up to MOST."""

MEMORY = 80 * 10**9
"""Bytes of the GPU for which a model is prepared where no other is named: an H100."""


@dataclass(frozen=True)
class RankMemory:
    """Memory that a training step takes on a rank, in bytes."""

    state: ModelState  # kept from step to step
    parts: dict[Part, int]  # further bytes of a micro-batch, at the peak
    host: int = 0  # bytes of host memory

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(self.state) + sum(self.parts.values())


class MemoryCounter:
    """Counter of one model's memory, before it is wrapped for several ranks.

    Runs of the model with the same plans share results where they take the same.

    For a model without adapters and other changes, `by_config` counts shallow models of the model's
    config.
    """

    def __init__(self, model: nn.Module, *, by_config: bool = False) -> None:
        self._model: Any = model
        self._by_config = by_config
        self._longest: dict[int, MicroBatchPlan] = {}  # by tokens of a rank
        self._counted: dict[Any, tuple[MicroBatchPlan, Peaks]] = {}
        self._encoders: dict[Any, EncoderPeaks] = {}
        self._states: dict[
            tuple[Strategy, int, bool], ModelState
        ] = {}  # by strategy, shards, mixed

    def count(
        self,
        plan: MicroBatchPlan,
        run: RunSpec,
        rank: int | None = None,
        encoded: Encoded | None = None,
    ) -> RankMemory:
        """Count the memory of a micro-batch on a rank.

        Args:
            rank: None for the rank that exchanges the most.
            encoded: images that the rank encodes; None without images.
        """
        state = self._state_of(run)
        tokens = run.plans.rows_per_rank
        if tokens not in self._longest and _has_longest_documents(plan, run.plans):
            self._longest[tokens] = plan
        rank = busiest_rank(plan, run.plans) if rank is None else rank
        # Under the other strategies a rank holds a share of the gradients, or a buffer for all of
        # them.
        accumulates = run.accumulates or run.strategy != "ddp"
        # Strategies other than DDP, and numbers of shards, change the state alone.
        strategy: Strategy = "ddp" if run.strategy == "ddp" else "fsdp2"
        counted_run = replace(
            run, accumulates=accumulates, strategy=strategy, shards=None, offload=False
        )
        key = id(plan), rank, repr(counted_run)
        if key not in self._counted:
            counted = self._count(plan, counted_run, rank)
            self._counted[key] = plan, counted  # keeping the plan keeps its id unique
        peaks = self._counted[key][1]
        parts = dict(peaks.offloaded if run.offload else peaks.on_device)
        parts.pop("weights", None)  # the state has them
        at_peak = parts.pop("gradients", 0)
        host = parts.pop("host", 0)
        if not accumulates:  # some gradients are not made yet at the peak, or all of them
            missing = parameter_bytes(self._model, trained=True) - at_peak
            state = state._replace(gradients=state.gradients - missing)
        if encoded is not None:
            parts["encoder"] = self.encoder_bytes(counted_run, encoded, parts)
        return RankMemory(state, parts, host)

    def encoder_bytes(
        self, run: RunSpec, encoded: Encoded, parts: Mapping[Part, int] | None = None
    ) -> int:
        """Return the bytes of images that a rank encodes, beside those of the text model.

        Args:
            parts: bytes of the text model's step at its peak, which are free when the encoder's
                backward runs; None leaves out that backward.
        """
        run = replace(run, strategy="ddp" if run.strategy == "ddp" else "fsdp2", shards=None)
        key = encoded, repr(run.checkpointing), run.strategy, run.mixed
        if key not in self._encoders:
            self._encoders[key] = count_encoder(self._encoding_model(run), run, encoded)
        kept, peak = self._encoders[key]
        always = ("exchange buffers", "plan")
        free = peak if parts is None else sum(parts[part] for part in parts if part not in always)
        return max(kept, peak - free)

    def _encoding_model(self, run: RunSpec) -> nn.Module:
        """Return a model of fake tensors whose encoder is that of the model."""
        computed = torch.bfloat16 if run.mixed else torch.float32
        dtype = None if run.strategy == "ddp" else computed
        if not self._by_config:
            return model_after(self._model, dtype)
        config = with_layers(self._model.config, 1)
        return model_of_config(config, dtype or torch.float32)

    def longest(self, available: int, run: RunSpec, counted: RankMemory | None = None) -> int:
        """Return the most tokens per rank that fit into the available bytes; 0 if none do.

        The number is a multiple of STEP.

        Memory of `longest_documents` is counted at STEP times powers of two and interpolated
        linearly between the largest that fits and the next one.

        Args:
            counted: memory of some full micro-batch of the run, which tells what to count first.
        """
        state = sum(self._state_of(run))
        if state > available:
            return 0

        def needed(tokens: int) -> int:
            if tokens not in self._longest:
                settings = replace(run.plans, rows_per_rank=tokens)
                self._longest[tokens] = plan_micro_batch(longest_documents(settings), settings)
            return self.count(self._longest[tokens], run).total

        def predicted(tokens: int, total: int) -> int:
            """Return a number worth a count, on a line through the state and a count."""
            fitting = max(tokens * (available - state) // (total - state), STEP)
            return STEP << int(fitting // STEP).bit_length() - 1

        low, high = 0, 2 * MOST  # the first fits and the second does not
        tokens = FIRST
        if counted is not None:
            tokens = min(predicted(run.plans.rows_per_rank, counted.total), MOST)
        while 2 * max(low, STEP // 2) < high:
            total = needed(tokens)
            if total <= available:
                low = tokens
            else:
                high = tokens
            tokens = min(max(predicted(tokens, total), 2 * low), high // 2)
        if low == 0 or high > MOST:
            return low
        slope = (needed(high) - needed(low)) / (high - low)
        return low + int((available - needed(low)) / slope) // STEP * STEP

    def _state_of(self, run: RunSpec) -> ModelState:
        """Return the memory of the model's state in a run."""
        return self._state(run.strategy, run.shards or run.plans.ranks, run.mixed)

    def _state(self, strategy: Strategy, shards: int, mixed: bool) -> ModelState:
        """Return the memory of the model's state, which no plan changes."""
        key = strategy, shards, mixed
        if key not in self._states:
            self._states[key] = model_state(self._model, strategy, shards, mixed=mixed)
        return self._states[key]

    def _count(self, plan: MicroBatchPlan, run: RunSpec, rank: int) -> Peaks:
        """Return peak bytes by part of a micro-batch."""
        model = self._model
        computed = torch.bfloat16 if run.mixed else torch.float32
        is_ddp = run.strategy == "ddp"

        def of_config(
            config: PreTrainedConfig, dtype: torch.dtype, depth: int | None = None
        ) -> Peaks:
            prepared = model_of_config(config, dtype)
            prepare_model(prepared, run)
            return count_peaks(prepared, plan, rank, run, depth=depth)

        if not self._by_config:
            dtype = None if is_ddp else computed  # None for the model's own
            # A copy would be divided too, and ask other ranks for their shares.
            if is_divided_at_load(model):
                base = base_model(model)
                return of_config(config_on_a_rank(base), dtype or base.dtype)
            return count_peaks(model_after(model, dtype), plan, rank, run)
        config, period, weights = (
            model.config,
            repeated_layers(model),
            torch.float32 if is_ddp else computed,
        )
        if period is None:
            return of_config(config, weights)
        # The peak is between the end of the decoder's forward and the end of the last layer's
        # backward. All other layers keep what they need for their backward then.
        depth: int = config.get_text_config(decoder=True).num_hidden_layers
        return of_config(with_layers(config, 2 * period), weights, depth)


def longest_documents(settings: PlanSettings) -> list[int]:
    """Return document lengths that fill all ranks.

    This is one shared document, or one per rank if documents stay whole.
    """
    each, ranks = settings.rows_per_rank, settings.ranks
    return [each] * ranks if settings.document_layout == "whole" else [each * ranks]


def _has_longest_documents(plan: MicroBatchPlan, settings: PlanSettings) -> bool:
    """Return whether a plan by these settings is of `longest_documents`.

    Documents fill all ranks, and there are no more of them.
    """
    longest = longest_documents(settings)
    documents = np.concatenate([nano.documents for nano in plan.nano_batches])
    return plan.document_tokens == sum(longest) and len(np.unique(documents)) == len(longest)
