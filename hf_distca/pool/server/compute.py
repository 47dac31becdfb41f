"""Rows in, core attention, rows out: what a server does in one call.

Shape suffixes: Q received query rows, R received key/value rows, K key/value rows of the kernel call, H query heads,
G key/value heads, D head dim of queries and keys, E head dim of values; N rows of either kind.
"""

import torch
from torch import Tensor

from hf_distca.dispatch.rows import take
from hf_distca.kernels import AttentionParams, Kernel
from hf_distca.pool.messages.call import Call
from hf_distca.pool.server.plans import ServedTasks
from hf_distca.pool.transport.contract import Memory


def params_of(call: Call) -> AttentionParams:
    """What the kernel is told of a call."""
    return AttentionParams(scale=call.scale, window=call.window, softcap=call.softcap)


@torch.no_grad()
def compute(
    call: Call, tasks: ServedTasks, received: dict[str, Tensor], kernel: Kernel, memory: Memory, device: torch.device
) -> dict[str, Tensor]:
    """The results of a call.

    Args:
        call: what to compute.
        tasks: which tasks.
        received: the tensors of call.request() by name, rows of all ranks.
        kernel: what computes.
        memory: where results are sent from.
        device: where to compute.

    Returns:
        The tensors of call.reply() by name, ready to be sent.
    """
    on_device = {name: rows_N.to(device, non_blocking=True) for name, rows_N in received.items()}
    run = _forward if call.direction == "forward" else _backward
    results = run(on_device, tasks, kernel, params_of(call))
    staged, ready = memory.stage(results)
    ready()
    return dict(zip((spec.name for spec in call.reply()), staged, strict=True))


def _forward(
    rows: dict[str, Tensor], tasks: ServedTasks, kernel: Kernel, params: AttentionParams
) -> tuple[Tensor, ...]:
    """o_QHE and lse_QH."""
    group = tasks.group
    k_KGD, v_KGE = (take(rows[name], group.k_rows) for name in ("k", "v"))
    return kernel.forward(rows["q"], k_KGD, v_KGE, group.shapes, params)


def _backward(
    rows: dict[str, Tensor], tasks: ServedTasks, kernel: Kernel, params: AttentionParams
) -> tuple[Tensor, ...]:
    """dq_QHD, and dk_RGD and dv_RGE, in which the tasks that read a row are summed in a fixed order."""
    group = tasks.group
    k_KGD, v_KGE = (take(rows[name], group.k_rows) for name in ("k", "v"))
    do_QHE, q_QHD, o_QHE, lse_QH = (rows[name] for name in ("do", "q", "o", "lse"))
    dq_QHD, dk_KGD, dv_KGE = kernel.backward(do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, params)
    return dq_QHD, tasks.key_sums.add_up([dk_KGD]), tasks.key_sums.add_up([dv_KGE])
