"""Fused shards of documents beside one document: how fast a kernel is on what dispatching gives it.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim, L rows of
the document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kernel_accuracy import BOUNDS, deviation, kernel_or_why_none
from benchmarks.gpu.setting import Setting
from benchmarks.harness import median_seconds
from hf_distca.kernels import AttentionParams, Kernel, Need, TaskShapes
from hf_distca.planner.cost import pairs

BLOCK = 128
"""Rows of a kernel block: shards of as many rows or more say what a row costs besides its pairs."""
LONG = 1024
"""Rows of shards that are expected to be about as fast as a document. FlashAttention-2's backward writes dK and dV for
every query head: with 128 rows that takes as long as its arithmetic. Shorter shards are figures alone."""
SHORT = 500
"""Short documents beside a long one."""


@dataclass(frozen=True)
class Timed:
    """One call, forward and backward.

    Attributes:
        rows: query rows.
        pairs: query-key pairs.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
    """

    rows: int
    pairs: int
    forward_s: float
    backward_s: float

    def tflops(self, flops_of_a_pair: int) -> tuple[float, float]:
        """10¹² operations a second, forward and backward; the backward has two and a half times as many."""
        forward = self.pairs * flops_of_a_pair / 1e12
        return forward / self.forward_s, 2.5 * forward / self.backward_s


class Bench:
    """Times one kernel on tasks of one document.

    Args:
        setting: sizes and device.
        kernel: what computes.
    """

    def __init__(self, setting: Setting, kernel: Kernel) -> None:
        self._setting, self._kernel = setting, kernel
        wide, device = setting.wide, setting.device
        heads, kv_heads, dim = wide["num_attention_heads"], wide["num_key_value_heads"], wide["head_dim"]
        torch.manual_seed(0)
        self.do_LHD, self.q_LHD, self.k_LGD, self.v_LGD = (
            torch.randn(setting.context, count, dim, device=device).to(setting.dtype)
            for count in (heads, heads, kv_heads, kv_heads)
        )
        self.params = AttentionParams(dim**-0.5)
        self.flops_of_a_pair = 4 * heads * dim

    def rows(self, x: Tensor, tasks: Sequence[tuple[int, int]]) -> Tensor:
        """Rows [start, stop) of every task, packed."""
        return torch.cat([x[start:stop] for start, stop in tasks])

    def time(self, tasks: Sequence[tuple[int, int]], *, whole: bool = False) -> tuple[Timed, Tensor]:
        """Time one call of tasks.

        Args:
            tasks: query rows [start, stop) of each.
            whole: each is a document of its own and not the end of one.

        Returns:
            The times, and O.
        """
        first = [start if whole else 0 for start, _ in tasks]
        keys = [(start, stop) for start, (_, stop) in zip(first, tasks, strict=True)]
        do_QHD, q_QHD = self.rows(self.do_LHD, tasks), self.rows(self.q_LHD, tasks)
        k_KGD, v_KGD = self.rows(self.k_LGD, keys), self.rows(self.v_LGD, keys)
        q_lens, k_lens = [stop - start for start, stop in tasks], [stop - start for start, stop in keys]
        shapes = TaskShapes.build(q_lens, k_lens, self._setting.device)
        o_QHD, lse_QH = self._kernel.forward(q_QHD, k_KGD, v_KGD, shapes, self.params)
        forward_s = self._seconds(lambda: self._kernel.forward(q_QHD, k_KGD, v_KGD, shapes, self.params))
        backward_s = self._seconds(
            lambda: self._kernel.backward(do_QHD, q_QHD, k_KGD, v_KGD, o_QHD, lse_QH, shapes, self.params)
        )
        amount = sum(pairs(k - q, k) for q, k in zip(q_lens, k_lens, strict=True))
        return Timed(sum(q_lens), amount, forward_s, backward_s), o_QHD

    def _seconds(self, call: Callable[[], object]) -> float:
        return median_seconds(call, self._setting.device, self._setting.repeats)


def shards_of(setting: Setting, rows: int) -> list[tuple[int, int]]:
    """Shards of so many rows, spread evenly over the document, as many as there is memory for."""
    most = setting.context // rows
    count = max(1, min(most, setting.keys_at_once // (setting.context // 2 + rows)))
    last = np.unique(np.linspace(1, most, count).round().astype(int)).tolist()
    return [((index - 1) * rows, index * rows) for index in last]


def documents_in(setting: Setting, rows: int) -> list[tuple[int, int]]:
    """The document's rows as documents of so many rows."""
    return [(start, start + rows) for start in range(0, setting.context - rows + 1, rows)]


def row_overhead(timed: Sequence[Timed], seconds: Callable[[Timed], float]) -> float:
    """What a query row costs besides its pairs, in pairs: b/a in time = a · pairs + b · rows.

    The fit is least squares of what the times are off by, each over the time itself.
    """
    times = np.array([seconds(t) for t in timed])
    system = np.array([[t.pairs, t.rows] for t in timed], np.float64) / times[:, None]
    scale = system.max(axis=0)
    (a, b), *_ = np.linalg.lstsq(system / scale, np.ones(len(times)), rcond=None)
    return float((b / scale[1]) / (a / scale[0]))


def check_shards(setting: Setting, name: str = "auto") -> Findings:
    """Times of shards and of documents of many sizes, fused into one call each, and of one document.

    Args:
        setting: sizes and device.
        name: of the kernel.
    """
    findings = Findings()
    kernel = kernel_or_why_none(name, setting.device, findings)
    if kernel is None:
        return findings
    dim = setting.wide["head_dim"]
    try:
        kernel.check(Need(setting.dtype, dim, dim, AttentionParams(dim**-0.5)), setting.device)
    except ValueError as error:
        findings.skipped = str(error)
        return findings
    bench = Bench(setting, kernel)
    whole, o_LHD = bench.time([(0, setting.context)])
    one = whole.tflops(bench.flops_of_a_pair)
    figures = findings.figures
    figures |= {"kernel": kernel.name, "context": setting.context, "one_document_tflops": one}
    figures["shards_tflops"], figures["shards_share_of_one_document"], figures["documents_tflops"] = {}, {}, {}
    fitted = [whole]
    for rows in setting.shard_rows:
        tasks = shards_of(setting, rows)
        timed, o_QHD = bench.time(tasks)
        error = deviation(o_QHD, bench.rows(o_LHD, tasks).double())
        findings.at_most(error, BOUNDS[setting.dtype], f"O of shards of {rows} rows beside the document's")
        tflops = figures["shards_tflops"][rows] = timed.tflops(bench.flops_of_a_pair)
        figures["shards_share_of_one_document"][rows] = [a / b for a, b in zip(tflops, one, strict=True)]
        if rows >= BLOCK:
            fitted.append(timed)
        if rows >= LONG:
            for way, mine, document in zip(("forward", "backward"), tflops, one, strict=True):
                findings.check(
                    mine >= setting.least_share * document,
                    f"{way} of shards of {rows} rows runs at {mine:.3g} TFLOP/s, one document at {document:.3g}: less "
                    f"than {setting.least_share} of it",
                )
        timed, _ = bench.time(documents_in(setting, rows), whole=True)
        figures["documents_tflops"][rows] = timed.tflops(bench.flops_of_a_pair)
        if rows >= BLOCK:
            fitted.append(timed)
    figures["row_overhead_of_the_kernel"] = kernel.row_overhead
    figures["row_overhead_forward"] = row_overhead(fitted, lambda timed: timed.forward_s)
    figures["row_overhead_backward"] = row_overhead(fitted, lambda timed: timed.backward_s)
    figures["row_overhead_both"] = row_overhead(fitted, lambda timed: timed.forward_s + timed.backward_s)

    # One long document with many short ones in one call, and apart.
    short = [(start, start + BLOCK // 2) for start in range(0, SHORT * BLOCK // 2, BLOCK // 2)]
    short = [task for task in short if task[1] <= setting.context]
    together, _ = bench.time([(0, setting.context), *short], whole=True)
    apart, _ = bench.time(short, whole=True)
    for way in ("forward_s", "backward_s"):
        figures[f"long_and_short_together_over_apart_{way[:-2]}"] = getattr(together, way) / (
            getattr(whole, way) + getattr(apart, way)
        )
    return findings
