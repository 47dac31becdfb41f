"""What core attention of a plan takes of a rank's memory: run on tensors without numbers, and counted.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.recorder import Recorder
from hf_distca.kernels import AttentionParams, Kernel
from hf_distca.memory.live import LiveMemory, Part
from hf_distca.memory.stand_ins import CountedExchange, CountedResults, FlashMemory
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.metrics import bytes_moved
from hf_distca.planner.settings import PlanSettings

HOST = torch.device("cpu")
"""Where tensors without numbers say that they are: sizes are the same on every device."""


@dataclass(frozen=True)
class Use:
    """How a step uses memory, besides its model and its plan.

    Attributes:
        kernel: that computes core attention.
        autocast: dtype that the model computes in where its weights have another; None without autocast.
        checkpointing: transformers' `activation_checkpointing_kwargs`; None without checkpointing.
        keep_received: see `DistCAConfig`.
        keep_core_attention: see `DistCAConfig`.
    """

    kernel: Kernel
    autocast: torch.dtype | None = None
    checkpointing: Mapping[str, Any] | None = None
    keep_received: bool = False
    keep_core_attention: bool = True


def busiest_rank(plan: MicroBatchPlan, settings: PlanSettings) -> int:
    """The rank through which the most bytes of a layer's exchanges go."""
    kind = settings.dominant_kind
    moved = np.sum([bytes_moved(nano.plans[kind], settings.row_bytes(kind)) for nano in plan.nano_batches], axis=0)
    return int(moved.sum(0)[: settings.ranks].argmax())


def count_core_attention(
    plan: MicroBatchPlan, kind: AttentionKind, dtype: torch.dtype, rank: int, use: Use, mode: FakeTensorMode
) -> dict[Part, int]:
    """Bytes by part when they are the most together, while one layer's core attention of a plan runs on its own.

    "exchange buffers" are all that this kind of layer needs, whenever it is.

    Args:
        plan: of the micro-batch.
        kind: of the layer.
        dtype: of Q, K and V.
        rank: whose memory it is.
        use: of memory.
        mode: for tensors without numbers.
    """
    live = LiveMemory()
    bound = bound_plan(plan, rank, use, live)
    with mode, live:
        run_core_attention(bound, kind, dtype)  # makes the buffers
        live.begin()
        run_core_attention(bound, kind, dtype)
    return dict(live.peak)


def bound_plan(plan: MicroBatchPlan, rank: int, use: Use, live: LiveMemory) -> BoundPlan:
    """A plan bound to a rank, whose row numbers, exchanges and kept results are counted."""
    with live, live.making("plan"):
        bound = BoundPlan(
            plan,
            rank,
            HOST,
            CountedExchange(live),
            use.kernel,
            Recorder(HOST),
            keep_received=use.keep_received,
            keep_core_attention=use.keep_core_attention,
            in_one_go=isinstance(use.kernel, FlashMemory),
        )
    bound.kept_results = CountedResults(live)
    return bound


def run_core_attention(bound: BoundPlan, kind: AttentionKind, dtype: torch.dtype) -> None:
    """Forward and backward of the core attention of one layer."""
    heads = ((kind.q_heads, kind.dim_qk), (kind.kv_heads, kind.dim_qk), (kind.kv_heads, kind.dim_v))
    q_THD, k_TGD, v_TGE = (torch.empty((bound.rows, *shape), dtype=dtype, requires_grad=True) for shape in heads)
    params = AttentionParams(scale=1.0, window=kind.window)
    o_THE = disaggregated_attention(q_THD, k_TGD, v_TGE, None, bound, params, chunk=kind.chunk)
    o_THE.backward(torch.empty_like(o_THE))
