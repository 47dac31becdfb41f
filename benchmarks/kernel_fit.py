"""How well costs fitted to short calls of the CPU kernel predict the long ones of training, by how calls are weighted.

The calls that hf-distca profile measures, and calls as a training step makes them: one document, many short ones, a
long tail. Each is timed by the CPU time of the process, which what other processes do hardly changes. Costs are fitted
to the former twice, with all calls alike and as hf-distca profile does it, and compared with the latter.

Run: python benchmarks/kernel_fit.py
"""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from harness import print_json, table

from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel
from hf_distca.measure.device import KEYS, QUERIES, REPEATS
from hf_distca.planner.cost import pairs
from hf_distca.planner.seconds import KernelCost, Tasks

HEADS, DIM = 4, 64
DEVICE = torch.device("cpu")
OF_TRAINING = {
    "one document of 8192": [8192],
    "one document of 4096": [4096],
    "a long tail": [5248, 1792, 768, 384],
    "four documents of 2048": [2048] * 4,
    "sixteen documents of 512": [512] * 16,
}
"""Tokens of the documents of a call."""


def measured(queries: Sequence[int], keys: Sequence[int]) -> tuple[float, float, float, float, float]:
    """Query rows, K/V rows, pairs, and CPU seconds of forward and backward of a call on tasks of these lengths."""
    kernel, params = get_kernel("auto", DEVICE), AttentionParams(scale=DIM**-0.5)
    shapes = TaskShapes.build(list(queries), list(keys), DEVICE)
    q, do = (torch.randn(sum(queries), HEADS, DIM) for _ in range(2))
    k, v = (torch.randn(sum(keys), HEADS, DIM) for _ in range(2))
    o, lse = kernel.forward(q, k, v, shapes, params)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        began = time.process_time()
        kernel.forward(q, k, v, shapes, params)
        between = time.process_time()
        kernel.backward(do, q, k, v, o, lse, shapes, params)
        times[0].append(between - began)
        times[1].append(time.process_time() - between)
    amount = float(sum(pairs(last - rows, last) for rows, last in zip(queries, keys, strict=True)))
    return sum(queries), sum(keys), amount, median(times[0]), median(times[1])


def main() -> None:
    """Measure, fit, compare, print a table and one JSON object."""
    calls = [measured([rows], [rows * factor]) for rows in QUERIES["cpu"] for factor in KEYS]
    training = {name: measured(lengths, lengths) for name, lengths in OF_TRAINING.items()}

    def tasks(counted: Sequence[tuple[float, ...]]) -> Tasks:
        rows, keys, amount, *_ = np.array(counted).T
        return Tasks(rows, keys, amount, np.ones(len(counted)))

    found: dict[str, dict[str, float]] = {name: {"seconds": sum(call[3:])} for name, call in training.items()}
    for way, weighted in (("all calls alike", False), ("by seconds of a row", True)):
        guess = np.zeros(len(training))
        for side in (3, 4):
            seconds, rows = np.array(calls).T[[side, 0]]
            cost = KernelCost.fitted(tasks(calls), seconds, seconds / rows if weighted else None)
            guess += cost.seconds(tasks(list(training.values())))
        for name, one in zip(training, guess.tolist(), strict=True):
            found[name][way] = one / found[name]["seconds"]
    columns = ("seconds", "all calls alike", "by seconds of a row")
    table(("call", *columns), [(name, *(f"{each[c]:.3f}" for c in columns)) for name, each in found.items()])
    print_json(calls=found)


if __name__ == "__main__":
    main()
