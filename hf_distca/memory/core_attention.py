"""Memory that a plan's core attention takes on a rank, counted with fake tensors.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.bound import BoundPlan, Runtime
from hf_distca.dispatch.recorder import Recorder
from hf_distca.kernels import AttentionParams, Kernel
from hf_distca.memory.live import LiveMemory, Part
from hf_distca.memory.stand_ins import CountedExchange, CountedResults, FlashMemory
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.metrics import bytes_moved
from hf_distca.planner.settings import PlanSettings

HOST = torch.device("cpu")
"""Device of fake tensors; sizes are the same on every device."""


@dataclass(frozen=True)
class Use:
    """Settings of a step that affect memory, besides its model and its plan.

    Attributes:
        autocast: dtype of computation if the weights have another; None without autocast.
        checkpointing: transformers' `activation_checkpointing_kwargs`; None without checkpointing.
    """

    kernel: Kernel
    autocast: torch.dtype | None = None
    checkpointing: Mapping[str, Any] | None = None
    keep_received: bool = False
    keep_core_attention: bool = True


def busiest_rank(plan: MicroBatchPlan, settings: PlanSettings) -> int:
    """Return the rank that exchanges the most bytes in a layer."""
    kind = settings.dominant_kind
    moved = np.sum([bytes_moved(nano.plans[kind], settings.row_bytes(kind)) for nano in plan.nano_batches], axis=0)
    return int(moved.sum(0)[: settings.ranks].argmax())


def count_core_attention(
    plan: MicroBatchPlan, kind: AttentionKind, dtype: torch.dtype, rank: int, use: Use, mode: FakeTensorMode
) -> dict[Part, int]:
    """Return peak bytes by part while one layer's core attention of a plan runs on its own.

    "exchange buffers" holds all buffers of this kind of layer, also those unused at the peak.
    """
    live = LiveMemory()
    bound = bound_plan(plan, rank, use, live)
    with mode, live:
        run_core_attention(bound, kind, dtype)  # creates the buffers
        live.begin()
        run_core_attention(bound, kind, dtype)
    return dict(live.peak)


def bound_plan(plan: MicroBatchPlan, rank: int, use: Use, live: LiveMemory) -> BoundPlan:
    """Return a plan bound to a rank, whose row numbers, exchanges and kept results are counted."""
    runtime = Runtime(
        HOST,
        CountedExchange(live),
        use.kernel,
        Recorder(HOST),
        keep_received=use.keep_received,
        keep_core_attention=use.keep_core_attention,
    )
    with live, live.making("plan"):
        in_one_go = isinstance(use.kernel, FlashMemory)
        return BoundPlan.bind(plan, rank, runtime, kept_results=CountedResults(live), in_one_go=in_one_go)


def run_core_attention(bound: BoundPlan, kind: AttentionKind, dtype: torch.dtype) -> None:
    """Run forward and backward of one layer's core attention."""
    heads = ((kind.q_heads, kind.dim_qk), (kind.kv_heads, kind.dim_qk), (kind.kv_heads, kind.dim_v))
    q_THD, k_TGD, v_TGE = (torch.empty((bound.rows, *shape), dtype=dtype, requires_grad=True) for shape in heads)
    params = AttentionParams(scale=1.0, window=kind.window)
    o_THE = disaggregated_attention(q_THD, k_TGD, v_TGE, None, bound, params, chunk=kind.chunk)
    o_THE.backward(torch.empty_like(o_THE))
