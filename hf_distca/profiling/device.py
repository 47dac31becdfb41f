"""Measure the profile of a device: attention kernel calls, matrix products and memory."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm
from tqdm import tqdm

from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.kernels.speed import peak_flops
from hf_distca.plan import AttentionKind
from hf_distca.plan.arrays import FloatArray
from hf_distca.plan.cost import pairs
from hf_distca.plan.nodes import EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.predict.device_profile import Accuracy, DeviceProfile, held_out
from hf_distca.predict.seconds import DIAGONAL_ROWS, KernelCost, LinkCost, Links, Tasks

QUERIES = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (64, 128, 512, 2048, 8192, 16384)}
"""Query rows of measured tasks, by type of device; plans hardly make shorter tasks."""
FEWEST = 3
"""Minimum number of measured query row counts, whatever their time: the fit needs them."""
KEYS = (1, 2, 5)
"""K/V rows of measured tasks for each query row."""
SHORT_ROWS = {"cpu": (64,), "cuda": (64, 128, 256)}
"""Query rows of each short task, by type of device."""
SHORT_KEYS = {"cpu": (256, 512, 1024), "cuda": (2048, 8192)}
"""K/V rows of each short task, many beside its query rows, as a task has that is cut off a long
document."""
SHORT_TASKS = {"cpu": 4, "cuda": 8}
"""Short tasks of a call: several, so that the cost of a task is found apart from that of a call."""
REPEATS = 5
"""Repeats of each measurement; the median counts."""
LAYER_OPERATORS = 120
"""Number of small operators that take the host time of a LLaMA layer's forward, measured with 4
tokens."""
TOKENS = {"cpu": 1024, "cuda": 8192}
"""Rows of the measured matrices."""


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, after one warm-up call."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(1 + REPEATS):
        wait()
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def measured_profile(
    kernel: Kernel,
    kind: AttentionKind,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    most_rows: float = inf,
    limit_s: float = inf,
    progress: bool = False,
) -> DeviceProfile:
    """Measure one device; its links are taken from an H100.

    On a terminal `progress` shows a bar.
    """
    tokens = TOKENS[device.type]
    x, weight = (
        torch.randn(rows, hidden, dtype=dtype, device=device) for rows in (tokens, 4 * hidden)
    )
    flops = 2.0 * tokens * weight.numel() / median_seconds(lambda: linear(x, weight), device)
    forward, backward, accuracy = measured_kernel(
        kernel, kind, dtype, device, most_rows=most_rows, limit_s=limit_s, progress=progress
    )
    launches = 0.0  # the host of a GPU runs ahead
    if device.type == "cpu":
        row = torch.randn(1, 8, dtype=dtype)
        small_weight = torch.randn(8, 8, dtype=dtype)
        launches = median_seconds(
            lambda: [linear(row, small_weight) for _ in range(LAYER_OPERATORS)], device
        )
    dtype_name = str(dtype).removeprefix("torch.")
    device_name = name_of(device)
    network = LinkCost(3e-5, NETWORK_BANDWIDTH * 1e9)
    return DeviceProfile(
        name=f"{device_name}, {dtype_name}",
        source=f"Measured with the kernel {kernel.name} and torch {torch.__version__}",
        dtype=dtype_name,
        measured=kind,
        forward=forward,
        backward=backward,
        flops_per_second=flops,
        bytes_per_second=2.0 * x.nbytes / median_seconds(lambda: rms_norm(x, (hidden,)), device),
        peak_flops=peak_flops(device_name) or flops,
        links=Links(LinkCost(3e-5, NODE_BANDWIDTH * 1e9), network),
        exchange=Links(LinkCost(3e-5, EXCHANGE_BANDWIDTH * 1e9), network),
        launches=launches,
        accuracy=accuracy,
    )


def measured_kernel(
    kernel: Kernel,
    kind: AttentionKind,
    dtype: torch.dtype,
    device: torch.device,
    *,
    most_rows: float = inf,
    limit_s: float = inf,
    progress: bool = False,
) -> tuple[KernelCost, KernelCost, Accuracy]:
    """Measure the costs of a kernel's forward and backward.

    Measure also how well the forward's costs predict held-out calls.

    Calls with one task come after calls with several short tasks, which the fit always needs.
    Window and chunks of the kind are left out. After `limit_s` seconds no larger number of rows is
    begun. Shape suffixes: Q query rows, K key/value rows, H query heads, G key/value heads, D and E
    head dims of keys and values.
    """
    queries = [rows for rows in QUERIES[device.type] if rows <= most_rows]
    if len(queries) < FEWEST:
        queries = [max(int(most_rows) >> halved, 1) for halved in reversed(range(FEWEST))]
    counts = []  # of each call, as `counted_call` returns
    times = []  # of each call, seconds of forward and backward
    params = AttentionParams(scale=kind.dim_qk**-0.5)

    def random(rows: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, dtype=dtype, device=device)

    def measure(q_lens: list[int], k_lens: list[int]) -> None:
        shapes = TaskShapes.build(q_lens, k_lens, device)
        q_QHD = random(sum(q_lens), kind.q_heads, kind.dim_qk)
        do_QHE = random(sum(q_lens), kind.q_heads, kind.dim_v)
        k_KGD = random(sum(k_lens), kind.kv_heads, kind.dim_qk)
        v_KGE = random(sum(k_lens), kind.kv_heads, kind.dim_v)
        forward = partial(kernel.forward, q_QHD, k_KGD, v_KGE, shapes, params)
        o_QHE, lse_QH = forward()
        backward = partial(
            kernel.backward, do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, shapes, params
        )
        counts.append(counted_call(q_lens, k_lens))
        times.append((median_seconds(forward, device), median_seconds(backward, device)))

    # 1. Calls with several short tasks, then calls with one task of more and more rows.
    began = time.perf_counter()
    short = short_calls(device.type, most_rows)
    hidden = None if progress else True  # None: shown on a terminal only
    with tqdm(
        total=len(short) + len(queries) * len(KEYS),
        desc="Measuring calls",
        disable=hidden,
        leave=False,
    ) as bar:
        for q_lens, k_lens in short:
            measure(q_lens, k_lens)
            bar.update()
        for number, rows in enumerate(queries):
            if number >= FEWEST and time.perf_counter() - began > limit_s:
                break
            for factor in KEYS:
                measure([rows], [rows * factor])
                bar.update()
    forward_s, backward_s = np.array(times).T
    count_table = np.array(counts)  # [calls, counts of a call]
    tasks = Tasks(*count_table.T)
    # 2. How well costs that are fitted to some calls predict the others.
    fitted, unseen = map(list, held_out(len(counts)))
    partial_cost = fitted_cost(Tasks(*count_table[fitted].T), forward_s[fitted])
    predicted_s = partial_cost.seconds(Tasks(*count_table[unseen].T))
    accuracy = Accuracy.of(predicted_s, forward_s[unseen])
    # 3. The costs themselves are fitted to all calls.
    return fitted_cost(tasks, forward_s), fitted_cost(tasks, backward_s), accuracy


def short_calls(device_type: str, most_rows: float) -> list[tuple[list[int], list[int]]]:
    """Return query rows and K/V rows of the tasks of each call with several short tasks.

    Tasks have no more K/V rows than a document of `most_rows`. The K/V rows of a call's tasks
    differ, because the CPU kernel computes equal tasks at once.
    """
    calls = []
    for rows in SHORT_ROWS[device_type]:
        for keys in SHORT_KEYS[device_type]:
            q_len, k_len = (max(int(min(length, most_rows)), 1) for length in (rows, keys))
            tasks = range(SHORT_TASKS[device_type])
            calls.append(([q_len for _ in tasks], [k_len + task for task in tasks]))
    return calls


def counted_call(q_lens: Sequence[int], k_lens: Sequence[int]) -> tuple[float, ...]:
    """Return the counts of one kernel call on tasks without a window, in the order of `Tasks`."""
    return (
        float(sum(q_lens)),
        float(sum(k_lens)),
        float(sum(pairs(keys - rows, keys) for rows, keys in zip(q_lens, k_lens, strict=True))),
        1.0,
        float(sum(rows * min(rows, DIAGONAL_ROWS) for rows in q_lens)),
        float(len(q_lens)),
    )


def fitted_cost(tasks: Tasks, seconds: FloatArray) -> KernelCost:
    """Fit costs to measured calls, each weighted as in a step.

    The step has equally many query rows in calls of each kind.

    With equal weights, short calls would distort the costs of long calls, on which a step spends
    its time.
    """
    return KernelCost.fitted(tasks, seconds, seconds / tasks.rows)


def name_of(device: torch.device) -> str:
    """Return the name of a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
