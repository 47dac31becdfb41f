"""What a device takes, measured: calls of the kernel, matrices, memory, and exchanges between ranks."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.cli.findings.links import ROW_BYTES, message_of_rows
from hf_distca.dispatch.exchange import Exchange, Message
from hf_distca.dispatch.groups import Groups
from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import pairs
from hf_distca.planner.seconds import FloatArray, KernelCost, LinkCost, Tasks
from hf_distca.sim.costs import Accuracy, held_out

QUERIES = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (64, 128, 512, 2048, 8192, 16384)}
"""Query rows of the tasks that are measured, by the type of the device: plans hardly make shorter ones."""
KEYS = (1, 2, 5)
"""K/V rows of them, for each query row."""
REPEATS = 5
"""Of each measurement; the median is taken."""
EXCHANGED_ROWS = (64, 512, 4096, 16384, 65536)
"""Rows that are exchanged: 64 KiB to 64 MiB."""
TOKENS = {"cpu": 1024, "cuda": 8192}
"""With which matrices and memory are measured."""


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, after one to warm up."""
    times = []
    for _ in range(1 + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def measured_kernel(
    kernel: Kernel, kind: AttentionKind, dtype: torch.dtype, device: torch.device
) -> tuple[KernelCost, KernelCost, Accuracy]:
    """The costs of a kernel's forward and backward, and how well the forward's predict calls that are held out.

    Shape suffixes: Q query rows, K key/value rows, H query heads, G key/value heads, D head dim.
    """
    calls, times = [], []
    params = AttentionParams(scale=kind.dim_qk**-0.5)
    for rows in QUERIES[device.type]:
        for factor in KEYS:
            keys = rows * factor
            shapes = TaskShapes.build([rows], [keys], device)
            q_QHD, do_QHD = (
                torch.randn(rows, kind.q_heads, kind.dim_qk, dtype=dtype, device=device) for _ in range(2)
            )
            k_KGD, v_KGD = (
                torch.randn(keys, kind.kv_heads, kind.dim_qk, dtype=dtype, device=device) for _ in range(2)
            )
            o_QHD, lse_QH = kernel.forward(q_QHD, k_KGD, v_KGD, shapes, params)
            forward = partial(kernel.forward, q_QHD, k_KGD, v_KGD, shapes, params)
            backward = partial(kernel.backward, do_QHD, q_QHD, k_KGD, v_KGD, o_QHD, lse_QH, shapes, params)
            calls.append((rows, keys, pairs(keys - rows, keys)))
            times.append((seconds_of(forward, device), seconds_of(backward, device)))
    forward_s, backward_s = np.array(times).T
    fitted, others = map(list, held_out(len(calls)))
    first = _fitted(_tasks(calls, fitted), forward_s[fitted])
    accuracy = Accuracy.of(first.seconds(_tasks(calls, others)), forward_s[others])
    every = _tasks(calls, range(len(calls)))
    return _fitted(every, forward_s), _fitted(every, backward_s), accuracy


def _fitted(tasks: Tasks, seconds: FloatArray) -> KernelCost:
    """Costs to which each call counts by what a query row takes in it: as much as of a step with equally many rows in
    calls of each kind.

    With all calls alike, short ones, of which the kernel makes less than four numbers can tell, would bend what long
    ones cost; and these are what a step spends its time on.
    """
    return KernelCost.fitted(tasks, seconds, seconds / tasks.rows)


def _tasks(calls: Sequence[tuple[int, int, int]], chosen: Sequence[int]) -> Tasks:
    rows, keys, amount = np.array([calls[index] for index in chosen], np.float64).T
    return Tasks(rows, keys, amount, np.ones_like(rows))


def measured_matrices(hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Floating point operations per second of a matrix of the model, [hidden, 4 · hidden]."""
    tokens = TOKENS[device.type]
    x, weight = (torch.randn(count, hidden, dtype=dtype, device=device) for count in (tokens, 4 * hidden))
    return 2.0 * tokens * weight.numel() / seconds_of(lambda: torch.nn.functional.linear(x, weight), device)


def measured_memory(hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes per second that a norm reads and writes."""
    x = torch.randn(TOKENS[device.type], hidden, dtype=dtype, device=device)
    return 2.0 * x.nbytes / seconds_of(lambda: torch.nn.functional.rms_norm(x, (hidden,)), device)


def measured_link(groups: Groups, device: torch.device, peers: Sequence[int], *, alone: bool = False) -> LinkCost:
    """The cost of an exchange in which every rank sends to another one. A collective.

    Args:
        groups: more than one rank, all of the world.
        device: where rows are.
        peers: [ranks] whom each sends to.
        alone: over the default group, which leaves no room to attention and may use all of a link; else over the
            exchange's.
    """
    exchange, ranks = Exchange(groups), groups.ranks
    to, of = peers[groups.rank], peers.index(groups.rank)
    sizes, times = [], []
    for rows in EXCHANGED_ROWS:
        if alone:
            call = _collective(to, of, ranks, rows, device)
        else:
            call = partial(_exchanged, message_of_rows(exchange, to, of, ranks, rows, device))
        taken = seconds_of(call, device)
        sizes.append(float(rows * ROW_BYTES))
        times.append(max(groups.all_gather(taken)))
    found: FloatArray = np.array(times)
    return LinkCost.fitted(np.array(sizes), found)


def _exchanged(message: Message) -> None:
    message.send().wait()


def _collective(to: int, of: int, ranks: int, rows: int, device: torch.device) -> Callable[[], object]:
    """The same rows by torch's own collective over the default group."""
    sent, received = ([rows if rank == other else 0 for rank in range(ranks)] for other in (to, of))
    rows_in, rows_out = (torch.empty(rows, ROW_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return partial(dist.all_to_all_single, rows_out, rows_in, received, sent)
