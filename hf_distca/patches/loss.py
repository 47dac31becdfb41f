"""Cross entropy of a planned step over chunks of rows, without a tensor of rows × vocabulary.

The result is exact for any head and for element-wise changes of logits (soft caps, scalings,
casts). `torch.nn.functional.linear_cross_entropy` supports only plain linear heads. In bfloat16 it
also sums the loss and the head's gradient in bfloat16, unlike the model's own loss (torch 2.13:
10.19 for 10.43).

Shape suffixes: T rows, C rows of a chunk, N chunks, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_distca.checks.step_rules import PlannedStep

LEAST_CHUNK_BYTES = 256 * 2**20
"""Bytes of a chunk's logits that are chosen on CPUs, and at least on GPUs."""
ENOUGH_ROWS = 4096
"""Rows of a chunk that are chosen on a GPU.

A chunk reads and writes the head's gradient once: 12 bytes a weight in bfloat16. Its matrix
products take 6 operations a weight and row. A GPU that does some 180 operations while it moves a
byte, such as an H200, needs as long for both at some 360 rows. With 4096 rows the gradient adds
less than a tenth to the products.
"""
MEMORY_SHARE = 64
"""Part of a GPU's memory, one in so many, that a chunk's logits may take; a chunk takes some 2.5
times its logits."""

Forward = Callable[[Tensor], Tensor]
"""Forward of a head: [C, D] to [C, V]."""
Step = Callable[[Tensor], Tensor]
"""Element-wise change of logits: [C, V] to [C, V]."""
Watch = Callable[[Tensor, Tensor, Tensor], None]
"""Function that sees the changed logits [C, V], their log-probabilities [C, V] and the targets [C]
of each chunk."""


ChunkStarts = Callable[[int, int], Sequence[int]]
"""Function of the number of rows, and of the most rows of a chunk: the first row of each chunk."""


def chosen_chunk_bytes(memory: int | None, vocabulary: int) -> int:
    """Return the bytes of a chunk's float32 logits for a GPU with so many bytes of memory.

    None for a CPU.
    """
    if memory is None:
        return LEAST_CHUNK_BYTES
    return max(LEAST_CHUNK_BYTES, min(4 * vocabulary * ENOUGH_ROWS, memory // MEMORY_SHARE))


def chunk_starts(count: int, rows: int) -> Sequence[int]:
    """Return the first row of each chunk of at most `rows` of `count` rows."""
    return range(0, count, rows)


def apply_steps(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    """Apply steps to logits, one after another."""
    for step in steps:
        logits = step(logits)
    return logits


def as_autocast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives a linear layer."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def loss_of_head(
    forward: Forward,
    hidden_TD: Tensor,
    target_T: Tensor,
    ignore_index: int,
    steps: Sequence[Step],
    rows: int,
    watch: Watch | None = None,
) -> Tensor:
    """Return the sum of the cross entropies of rows for any head.

    The backward recomputes each chunk's logits.

    Args:
        target_T: int64; rows whose target is `ignore_index` do not count.
        steps: changes of the head's logits before the cross entropy.
        rows: most rows of a chunk.
        watch: called once for each chunk, in the order of the rows; only without gradients, because
            a backward computes chunks again.
    """

    def of_chunk(hidden_CD: Tensor, target_C: Tensor) -> Tensor:
        logits_CV = apply_steps(forward(hidden_CD), steps)
        log_probs_CV = functional.log_softmax(logits_CV, dim=-1)
        if watch is not None:
            watch(logits_CV, log_probs_CV, target_C)
        return functional.nll_loss(
            log_probs_CV, target_C, ignore_index=ignore_index, reduction="sum"
        )

    compute = (
        partial(checkpoint, of_chunk, use_reentrant=False) if torch.is_grad_enabled() else of_chunk
    )
    chunks = zip(hidden_TD.split(rows), target_T.split(rows), strict=True)
    return torch.stack([compute(*chunk) for chunk in chunks]).sum()


def loss_of_linear(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    ignore_index: int,
    steps: Sequence[Step],
    rows: int,
    watch: Watch | None = None,
    starts: ChunkStarts = chunk_starts,
) -> Tensor:
    """Return the sum of the cross entropies of rows for a linear head; the backward can run once.

    The other arguments are those of `loss_of_head`.

    Args:
        starts: returns the first rows of the chunks that are computed.
    """
    others = target_T, ignore_index, steps, rows, watch, starts(len(hidden_TD), rows)
    loss: Tensor = _OfLinear.apply(hidden_TD, weight_VD, bias_V, torch.is_grad_enabled(), *others)
    return loss


class _OfLinear(torch.autograd.Function):
    """Cross entropies whose forward computes the gradients too; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        trains: bool,
        *others: Any,
    ) -> Tensor:
        target_T, ignore_index, steps, rows, watch, starts = others
        needs = [trains and needed for needed in ctx.needs_input_grad[:3]]
        # The head's gradients are added up in at least float32.
        summed = torch.promote_types(weight_VD.dtype, torch.float32)
        hidden_grad_TD = torch.empty_like(hidden_TD) if needs[0] else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=summed) if needs[1] else None
        bias_grad_V = (
            torch.zeros_like(bias_V, dtype=summed) if bias_V is not None and needs[2] else None
        )
        # Cast once, not with each chunk.
        hidden_TD = as_autocast(hidden_TD)
        weight_VD = as_autocast(weight_VD)
        bias_V = None if bias_V is None else as_autocast(bias_V)
        count = len(hidden_TD)
        losses_N = hidden_TD.new_empty(-(-count // rows), dtype=summed)
        for start in starts:
            chunk = slice(start, start + rows)
            target_C = target_T[chunk]
            logits_CV = functional.linear(hidden_TD[chunk], weight_VD, bias_V)
            with torch.set_grad_enabled(any(needs)):
                changed_CV = apply_steps(logits_CV.requires_grad_(any(needs)), steps)
            grad_CV = functional.log_softmax(changed_CV.detach(), dim=-1)
            if watch is not None:
                watch(changed_CV, grad_CV, target_C)
            loss = functional.nll_loss(
                grad_CV, target_C, ignore_index=ignore_index, reduction="sum"
            )
            losses_N[start // rows] = loss
            if any(needs):
                # Overwrite log_softmax by softmax minus one at the target: the gradient of the
                # changed logits.
                counts_C1 = (target_C != ignore_index)[:, None]
                targets_C1 = torch.where(counts_C1, target_C[:, None], 0)
                grad_CV.exp_().scatter_add_(1, targets_C1, -counts_C1.to(grad_CV.dtype)).mul_(
                    counts_C1
                )
                if changed_CV is not logits_CV:
                    (grad_CV,) = torch.autograd.grad(
                        changed_CV, logits_CV, grad_CV.to(changed_CV.dtype)
                    )
                grad_CV = grad_CV.to(logits_CV.dtype)
            del changed_CV  # free before the head's gradients
            if hidden_grad_TD is not None:
                hidden_grad_TD[chunk] = grad_CV @ weight_VD
            if weight_grad_VD is not None and grad_CV.dtype == summed:
                weight_grad_VD.addmm_(grad_CV.T, hidden_TD[chunk])
            elif weight_grad_VD is not None:
                weight_grad_VD += grad_CV.T @ hidden_TD[chunk]
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(0, dtype=summed)
            del logits_CV, grad_CV  # free before the next chunk
        ctx.gradients = hidden_grad_TD, weight_grad_VD, bias_grad_V
        return losses_N.sum().to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise PlannedStep.SECOND_BACKWARD.error_here()
        gradients = ctx.gradients
        ctx.gradients = None
        return *(None if gradient is None else gradient.mul_(grad) for gradient in gradients), *[
            None
        ] * 7
