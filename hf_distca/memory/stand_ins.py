"""Stand-ins in a step that is only counted: for kernels, other ranks, and chunks like others.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim of queries and keys, E head dim of values, R rows of a token for each of its experts, X
experts, I inputs, O outputs.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer, Route
from hf_distca.dispatch.kept_results import KeptResults
from hf_distca.dispatch.waits import Waits
from hf_distca.kernels.versions import TorchVarlenKernel
from hf_distca.memory.live import LiveMemory
from hf_distca.models.mixing_modules import CONVOLUTION_AND_SCAN, DELTA_RULE, KIMI_DELTA_RULE, SCAN
from hf_distca.predict.shapes import CHUNK


class FlashMemory(TorchVarlenKernel):
    """Kernel that takes the memory of FlashAttention-2's varlen kernel and computes nothing.

    Its backward accumulates dQ in float32. With fewer key/value heads than query heads it makes dK
    and dV for every query head before it adds them up (flash_api.cpp, `mha_varlen_bwd`).
    FlashAttention-3 and 4 take no more.
    """

    def check(self, *_: Any) -> None:
        """Accept every need."""

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return empty results."""
        rows_QH = q_QHD.shape[:2]
        return q_QHD.new_empty((*rows_QH, v_KGE.shape[2])), q_QHD.new_empty(
            rows_QH, dtype=torch.float32
        )

    def backward(
        self,
        do_QHE: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        o_QHE: Tensor,
        lse_QH: Tensor,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return empty gradients."""
        dq_QHD, dk_KGD, dv_KGE = map(torch.empty_like, (q_QHD, k_KGD, v_KGE))
        buffers = 4 * (q_QHD.numel() + lse_QH.numel())
        if q_QHD.shape[1] != k_KGD.shape[1]:
            per_head = q_QHD.shape[1] // k_KGD.shape[1]
            buffers += per_head * (k_KGD.nbytes + v_KGE.nbytes)
        q_QHD.new_empty(buffers, dtype=torch.uint8)
        return dq_QHD, dk_KGD, dv_KGE


class RecurrenceMemory:
    """Recurrence that takes the memory of its kernel and computes nothing.

    The kernels keep what they are called with and, for a delta rule, the inverse of a chunk's
    products of keys (fla: `chunk_gated_delta_rule`, `chunk_kda`; mamba-ssm:
    `mamba_chunk_scan_combined`). Forward and backward make a state for each chunk, and the backward
    float32 gradients of the decays.
    """

    def __init__(self, values: int, packed_by: str) -> None:
        self._values = values  # index of the tensor with the result's shape
        self.packed_by = packed_by  # keyword of packed documents

    def __call__(self, *args: Tensor, **options: Any) -> Any:
        """Return an empty result, and an empty state where the function returns one."""
        tensors = [*args, *(options[name] for name in ("g", "beta") if name in options)]
        is_rule = "g" in options
        apply: Any = _RecurrenceMemory.apply
        out, final = apply(self._values, is_rule, *tensors)
        return (out, final) if is_rule or options.get("return_final_states") else out


class _RecurrenceMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: int, is_rule: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        values_tensor = tensors[values]
        keys_tensor = tensors[1] if is_rule else tensors[3]
        (_, rows, heads, columns) = values_tensor.shape
        state_rows = keys_tensor.shape[3]
        chunks = -(-rows // CHUNK)
        kept = [values_tensor.new_empty((1, rows, heads, CHUNK))] if is_rule else []
        states = values_tensor.new_empty((chunks, heads, state_rows, columns))
        shape = (1, heads, state_rows, columns) if is_rule else (1, heads, columns, state_rows)
        ctx.states = states.shape
        ctx.save_for_backward(*tensors, *kept)
        return torch.empty_like(values_tensor), values_tensor.new_empty(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _d_final: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        states = [d_out.new_empty(ctx.states) for _ in range(2)]
        gradients = [torch.empty_like(x) for x in tensors[: len(ctx.needs_input_grad) - 2]]
        del states
        return None, None, *gradients


COUNTED_FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys((DELTA_RULE, KIMI_DELTA_RULE), RecurrenceMemory(2, "cu_seqlens")),
    SCAN: RecurrenceMemory(0, "seq_idx"),
    # Not the kernel for a whole module, which would be launched: its convolution and its scan are
    # counted.
    CONVOLUTION_AND_SCAN: SimpleNamespace(packed_by=None),
}


def grouped_products(rows_RI: Tensor, weights_XIO: Tensor, offs: Tensor) -> Tensor:
    """Stand in for transformers' `_grouped_mm`: return an empty product of rows and experts.

    Of fake tensors torch's grouped_mm takes only bfloat16, and transformers' own function reads
    `offs` on some versions.
    """
    product: Any = _GroupedProducts.apply
    made: Tensor = product(rows_RI.to(weights_XIO.dtype), weights_XIO)
    return made


class _GroupedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weights_XIO: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, weights_XIO)
        return rows_RI.new_empty((rows_RI.shape[0], weights_XIO.shape[2]))

    @staticmethod
    def backward(ctx: Any, d_out_RO: Tensor) -> tuple[Tensor, Tensor]:
        rows_RI, weights_XIO = ctx.saved_tensors
        return torch.empty_like(rows_RI), torch.empty_like(weights_XIO)


def unequal_chunks(count: int, rows: int) -> Sequence[int]:
    """Return the first rows of the loss's chunks, without chunks that take the memory of others.

    The first chunk follows none, the second follows one, and the last may be shorter. All chunks
    between take what the second takes. `hf_distca.patches.loss.chunk_starts` returns all of them.
    """
    starts = range(0, count, rows)
    return [*starts[:2], *starts[2:][-1:]]


def unequal_results(chunks: Sequence[Tensor], compute: Callable[[int], Tensor]) -> list[Tensor]:
    """Stand in for `hf_distca.patches.chunked_mlp.results_of_chunks`.

    Chunks that take the memory of others have empty results.

    Results of chunks add up in the forward, which ends with the last two chunks, the last of which
    may be shorter. The backward begins with these. Gradients of chunks add up in it, and it ends
    with the first two: the first frees gradients of weights that all others hold.
    """
    between = range(2, len(chunks) - 2)
    if not between:
        return [compute(index) for index in range(len(chunks))]
    results = [compute(0), compute(1)]
    empty: Any = _EmptyResults.apply
    results += empty(results[1].detach(), *[chunks[index] for index in between])
    return results + [compute(index) for index in range(len(chunks))[-2:]]


class _EmptyResults(torch.autograd.Function):
    """Chunks with empty results, which are like a given one, and with empty gradients."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *chunks: Tensor) -> tuple[Tensor, ...]:
        ctx.like = chunks[0].shape, chunks[0].dtype
        return tuple(torch.empty_like(like) for _ in chunks)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.like
        return None, *[d_result.new_empty(shape, dtype=dtype) for d_result in d_results]


class _NoGroup:
    """Group of ranks whose operations, and the work that they return, are done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class CountedExchange(Exchange):
    """Exchange whose buffers are counted and whose rows stay in place."""

    def __init__(self, live: LiveMemory) -> None:
        groups: Any = SimpleNamespace(
            pods=defaultdict(_NoGroup), node=_NoGroup(), closed=False, waits=Waits()
        )
        super().__init__(groups)
        self._live = live

    def buffer(self, slot: Hashable, route: Route, like: Sequence[Tensor]) -> ExchangeBuffer:
        """Return a buffer whose memory is counted."""
        with self._live.making("exchange buffers"):
            return super().buffer(slot, route, like)


class CountedResults(KeptResults):
    """Kept results that are counted as such."""

    def __init__(self, live: LiveMemory) -> None:
        super().__init__()
        self._live = live

    def keep(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Keep tensors and count them."""
        self._live.belong(tensors, "kept O")
        super().keep(key, tensors)
