"""Memory that a planned micro-batch takes on a rank.

The real step runs on fake tensors, and its memory is counted.

The count includes the effects of model, adapters, autocast and checkpointing, since the real code
runs.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E
head dim of values.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from hf_distca.dispatch.bound import BoundPlan, Runtime
from hf_distca.dispatch.core_attention import disaggregated_attention
from hf_distca.dispatch.kept_results import is_recomputation
from hf_distca.dispatch.recorder import Recorder
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.kernels import KERNELS, AttentionParams
from hf_distca.memory.launches import with_liger, without_launches
from hf_distca.memory.live import LiveMemory, Part
from hf_distca.memory.stand_ins import (
    COUNTED_FUNCTIONS,
    CountedExchange,
    CountedResults,
    FlashMemory,
    unequal_chunks,
    unequal_results,
)
from hf_distca.models.checkpointing import (
    disable_checkpointing,
    enable_checkpointing,
    offloaded_layers,
)
from hf_distca.models.decoder import base_model, decoder_layers, text_decoder
from hf_distca.models.fake import fake_tensors
from hf_distca.models.mixing_modules import halo_widths
from hf_distca.patches.chunked_mlp import Chunked
from hf_distca.patches.head import PlannedHead
from hf_distca.plan import PLAN_KEY, AttentionKind, MicroBatchPlan
from hf_distca.plan.figures import bytes_moved
from hf_distca.planner.settings import PlanSettings
from hf_distca.run import RunSpec

HOST = torch.device("cpu")
"""Device of fake tensors; sizes are the same on every device."""


class Peaks(NamedTuple):
    """Bytes by part at the peak of a micro-batch."""

    on_device: dict[Part, int]
    # Where all layers are checkpointed, and the checkpoints are offloaded: see `offloaded_layers`.
    offloaded: dict[Part, int]


def busiest_rank(plan: MicroBatchPlan, settings: PlanSettings) -> int:
    """Return the rank that exchanges the most bytes in a layer."""
    kind = settings.dominant_kind
    moved = np.sum(
        [bytes_moved(nano.plans[kind], settings.row_bytes(kind)) for nano in plan.nano_batches],
        axis=0,
    )
    return int(moved.sum(0)[: settings.ranks].argmax())


def count_peaks(
    model: nn.Module, plan: MicroBatchPlan, rank: int, run: RunSpec, *, depth: int | None = None
) -> Peaks:
    """Return peak bytes by part during the forward and backward of a micro-batch.

    Exchange buffers exist throughout, as after an earlier micro-batch. So do gradients where they
    accumulate. No kernel is launched.

    Args:
        model: a model of fake tensors, with prepared layers if the plan needs them; `run` sets its
            checkpointing.
        depth: decoder layers of the model that is meant, which has the first half of the layers
            again and again; None if these are all. The peak is that of the meant model.
    """
    # 1. Weights, and the plan's index tensors and exchange buffers, which are there throughout.
    layers = decoder_layers(model)
    live = _live_memory(len(layers), depth or len(layers))
    live.belong([*model.parameters(), *model.buffers()], "weights")
    base = base_model(model)
    set_checkpointing(base, run.checkpointing)
    bound = bound_plan(plan, rank, run, live)
    for nano in bound.nano_batches:  # made now, since tables cannot be made of fake tensors
        nano.cuts.bind(halo_widths(base))

    # 2. Hooks that tell the parts of the step from each other.
    def decoder_ended(_module: nn.Module, _args: Any, output: Any) -> None:
        live.part = "loss"
        live.repeats = False
        live.layers_ended = True
        output[0].register_hook(loss_ended)

    def loss_ended(_gradient: Tensor) -> None:
        live.part = "backward"

    def gradient_made(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.belong([parameter.grad], "gradients")

    # 3. Nothing is launched while the step runs. Of equal chunks few are computed.
    first: Any = next(model.parameters())
    mode: FakeTensorMode = first.fake_mode
    for module in model.modules():
        if isinstance(module, Chunked):
            module.run_chunks = unequal_results
        if isinstance(module, PlannedHead):
            module.chunk_starts = unequal_chunks
    with without_launches(), with_liger(model, run.liger), mode, live:
        # 4. Gradients of an earlier micro-batch.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [
            parameter.register_post_accumulate_grad_hook(gradient_made) for parameter in trained
        ]
        with live.making("gradients"):
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter) if run.accumulates else None
        # 5. The step, whose peak is the result.
        live.begin()
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        batch = {name: torch.zeros((1, bound.rows), dtype=torch.long) for name in names}
        targets = torch.ones((), dtype=torch.long)
        hooks.append(text_decoder(base).register_forward_hook(decoder_ended))
        hooks += _tell_halves(layers, live)
        with torch.autocast(HOST.type, dtype=torch.bfloat16, enabled=run.autocasts):
            loss = model(
                **batch, use_cache=False, num_items_in_batch=targets, **{PLAN_KEY: bound}
            ).loss
        loss.backward()
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None
    return Peaks(parts_of_a_step(live.peak, bound), parts_of_a_step(live.offloaded_peak, bound))


def count_core_attention(
    plan: MicroBatchPlan, kind: AttentionKind, dtype: torch.dtype, rank: int, run: RunSpec
) -> dict[Part, int]:
    """Return peak bytes by part of one layer's core attention on its own.

    Exchange buffers count even if unused.
    """
    live = LiveMemory()
    bound = bound_plan(plan, rank, run, live)
    with without_launches(), fake_tensors(), live:
        run_core_attention(bound, kind, dtype)
    return parts_of_a_step(live.peak, bound)


def _live_memory(layers: int, depth: int) -> LiveMemory:
    """Return a count of `depth` layers by a model of fewer, whose first half is repeated."""
    half = max((layers + 1) // 2, 1)  # what has no layers is refused when it is run
    return LiveMemory((depth - layers) / half, offloaded_layers(depth) / half)


def _tell_halves(layers: Sequence[nn.Module], live: LiveMemory) -> list[RemovableHandle]:
    """Let `live` know which half of the decoder layers runs; return the hooks that do.

    What is made between two layers, such as an offloaded input, belongs to the earlier one.
    """

    def begin(repeats: bool, _layer: nn.Module, _args: Any) -> None:
        live.repeats = repeats and not is_recomputation()

    return [
        layer.register_forward_pre_hook(partial(begin, 2 * index < len(layers)))
        for index, layer in enumerate(layers)
    ]


def parts_of_a_step(peak: Mapping[Part, int], bound: BoundPlan) -> dict[Part, int]:
    """Return the bytes by part at the peak; exchange buffers count as after the step."""
    parts = dict(peak)
    if buffers := bound.runtime.exchange.size():
        parts["exchange buffers"] = buffers
    return parts


def bound_plan(plan: MicroBatchPlan, rank: int, run: RunSpec, live: LiveMemory) -> BoundPlan:
    """Return a plan bound to a rank, whose row numbers, exchanges and kept results are counted."""
    on_cpu = run.plans.kernel in ("cpu", "reference")
    runtime = Runtime(
        HOST,
        CountedExchange(live),
        KERNELS[run.plans.kernel]() if on_cpu else FlashMemory(),
        Recorder(HOST),
        functions={} if on_cpu else COUNTED_FUNCTIONS,
    )
    buffer = IndexBuffer(HOST, in_one_go=not on_cpu)
    bound = BoundPlan(plan, rank, runtime, kept_results=CountedResults(live), buffer=buffer)
    live.belong(buffer.memory, "plan")
    return bound


def run_core_attention(bound: BoundPlan, kind: AttentionKind, dtype: torch.dtype) -> None:
    """Run forward and backward of one layer's core attention."""
    heads = ((kind.q_heads, kind.dim_qk), (kind.kv_heads, kind.dim_qk), (kind.kv_heads, kind.dim_v))
    q_THD, k_TGD, v_TGE = (
        torch.empty((bound.rows, *shape), dtype=dtype, requires_grad=True) for shape in heads
    )
    params = AttentionParams(scale=1.0, window=kind.window)
    o_THE = disaggregated_attention(q_THD, k_TGD, v_TGE, None, bound, params, chunk=kind.chunk)
    o_THE.backward(torch.empty_like(o_THE))


def set_checkpointing(model: Any, checkpointing: Mapping[str, Any] | None) -> None:
    """Set a model's checkpointing as transformers' trainer does, or turn it off."""
    if checkpointing is None:
        disable_checkpointing(model)
        return
    options = dict(checkpointing)
    layer_options = (
        {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
    )
    enable_checkpointing(model, options or {"use_reentrant": False}, **layer_options)
