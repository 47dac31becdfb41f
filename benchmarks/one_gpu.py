"""One GPU standing for many: the steps of 8, 16 and 64 ranks, each rank's work timed on the one device at hand.

Run: python benchmarks/one_gpu.py --batches FILE.json.gz [--ranks 8 16 64] [--tokens 32768] [--bandwidth 50 450]
     python benchmarks/one_gpu.py --batches FILE.json.gz --ranks-per-node 8 [--node-bandwidth 450] --bandwidth 50

--batches: {"batches": [{"id", "layout", "T", "rows": [[lengths]...]}...]}, gzipped JSON; those of layout "dp" are
taken, one row of documents a rank; R ranks take the first rows. With --seeds 1 (the default) one batch of each kind,
that whose id ends in -s0 or has no such end.

Of each batch the same documents, five ways, in one layer of Llama-3-8B (forward and backward, bfloat16):

  packed   documents where they are, each rank computes its own attention
  whole    whole documents balanced: longest first, each to the rank with the fewest pairs so far
  context  every document over all ranks, head and tail; K and V gathered from all of them, each row once to a node
  fixed    hf_distca: documents where they are, attention balanced
  joint    hf_distca: documents placed together with their attention

Measured on this device, forward and backward, the median of some calls:
- the layer without core attention, on the rows of each rank. More rows than --tokens in pieces of so many, whose times
  add up; the last piece is taken for one of whole blocks of 256 rows.
- the attention tasks of each rank, fused into one call a nano-batch, or several where a call would have more than
  --keys K/V rows. Calls with the same tasks are timed once.
Counted from the plan: the bytes that each rank sends and receives (docs/explanation/exchange.md).
Modelled:
- a rank's time is the sum of its parts. What surrounds the kernels (gathering, merging, adding up, launches that the
  GPU waits for) is left out; `make gpu` measures it.
- an exchange takes the larger of the bytes sent and received by the busiest rank over the bandwidth, a direction each;
  with --ranks-per-node, of which plans know, the longer of that inside nodes and that between them.
- without overlap a step takes the slowest rank's time and the exchanges; with overlap the longer of the two.
- gradients and weights that ranks exchange are left out, on all ways alike.

Times are of one layer. "of packed" is how many times as fast as packed; medians over the batches. The last line is one
JSON object.
"""

import argparse
import gzip
import heapq
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import median_seconds, provenance, table
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_distca import PlanSettings
from hf_distca.kernels import AttentionParams, Kernel, TaskShapes, get_kernel
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.build import plan_placed
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.metrics import BETWEEN, WITHIN, bytes_by_link, link_seconds
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import NODE_BANDWIDTH, node_sizes, nodes_of

WAYS = ("packed", "whole", "context", "fixed", "joint")
LAST_PIECE = 256
"""Rows: the last piece of a rank's rows is rounded up to a multiple."""
LSE_BYTES = 4
"""Of a number of the log-sum-exp."""

Task = tuple[int, int]
"""Query rows [start, stop) of a document, which need its K/V rows [0, stop)."""


@dataclass(frozen=True)
class Shape:
    """A decoder layer.

    Attributes:
        hidden: width of a token.
        mlp: width inside the MLP.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: of both.
    """

    hidden: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def kind(self) -> AttentionKind:
        """Its core attention."""
        return AttentionKind(None, self.heads, self.kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True)
class Links:
    """How fast ranks exchange rows.

    Attributes:
        bandwidths: 10⁹ bytes a second that a rank sends to other nodes, and receives at the same time; one or more,
            for each of which steps are modelled.
        ranks_per_node: the ranks of a node, or fewer where there are fewer; plans know of it.
        node_bandwidth: as the others, but inside a node.
    """

    bandwidths: Sequence[float]
    ranks_per_node: int = 1
    node_bandwidth: float = NODE_BANDWIDTH


@dataclass
class Work:
    """What one rank does in one layer, forward and backward.

    Attributes:
        tokens: rows that it holds.
        calls: the tasks of each nano-batch that it computes.
        moved: [2, 2, 2] bytes in the forward and in the backward, WITHIN its node and BETWEEN nodes, that it sends
            and that it receives.
    """

    tokens: int = 0
    calls: list[list[Task]] = field(default_factory=list)
    moved: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 2, 2), np.int64))


def work_packed(rows: Sequence[Sequence[int]]) -> list[Work]:
    """Every rank computes its own documents."""
    return [Work(sum(row), [[(0, length) for length in row]]) for row in rows]


def work_whole(rows: Sequence[Sequence[int]]) -> list[Work]:
    """Whole documents, longest first, each to the rank with the fewest pairs so far, then with the fewest tokens."""
    ranks = [(0, 0, rank) for rank in range(len(rows))]
    placed: list[list[int]] = [[] for _ in rows]
    for length in sorted((length for row in rows for length in row), reverse=True):
        load, tokens, rank = heapq.heappop(ranks)
        placed[rank].append(length)
        heapq.heappush(ranks, (load + pairs(0, length), tokens + length, rank))
    return work_packed(placed)


def work_context(rows: Sequence[Sequence[int]], row_bytes: RowBytes, ranks_per_node: int) -> list[Work]:
    """Every document in twice as many pieces as ranks; a rank has one from the front and one from the back."""
    ranks = len(rows)
    tasks: list[list[Task]] = [[] for _ in rows]
    for length in (length for row in rows for length in row):
        cuts = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        for piece in range(2 * ranks):
            if cuts[piece] < cuts[piece + 1]:
                tasks[min(piece, 2 * ranks - 1 - piece)].append((cuts[piece], cuts[piece + 1]))
    # K/V rows to the rank of the same place in every other node; then these and its own to all others of its node.
    held = np.array([sum(stop - start for start, stop in own) for own in tasks])
    of_place = np.tile(held.reshape(-1, ranks_per_node).sum(axis=0), ranks // ranks_per_node)
    forward = np.zeros((2, 2, ranks), np.int64)
    forward[BETWEEN] = (ranks // ranks_per_node - 1) * held, of_place - held
    forward[WITHIN] = (ranks_per_node - 1) * of_place, held.sum() - of_place
    backward = forward + forward[:, ::-1]  # again, and the gradients back
    moved = np.stack([forward, backward]) * row_bytes.kv
    return [Work(int(held[rank]), [tasks[rank]], moved[..., rank]) for rank in range(ranks)]


def work_planned(plan: MicroBatchPlan, kind: AttentionKind, row_bytes: RowBytes, nodes: Sequence[int]) -> list[Work]:
    """What a plan gives every rank.

    Args:
        plan: of a micro-batch.
        kind: of the layer.
        row_bytes: bytes of its rows.
        nodes: [ranks] the node of each rank.
    """
    works = [Work(int(tokens)) for tokens in plan.tokens]
    for nano in plan.nano_batches:
        tasks, moved = nano.plans[kind].tasks, _bytes(nano.plans[kind], kind, row_bytes, nodes)
        for rank, work in enumerate(works):
            own = tasks[tasks["worker"] == rank]
            work.calls.append(list(zip(own["start"].tolist(), own["stop"].tolist(), strict=True)))
            work.moved += moved[..., rank]
    return works


def _bytes(plan: Plan, kind: AttentionKind, row_bytes: RowBytes, nodes: Sequence[int]) -> NDArray[np.int64]:
    """[2, 2, 2, ranks] bytes of every rank, as in `Work.moved`."""
    # Bytes grow with those of each kind of row, so that differences count the rows of it.
    once = bytes_by_link(plan, RowBytes(q=1, kv=1, o=1), nodes)
    queries = bytes_by_link(plan, RowBytes(q=2, kv=1, o=1), nodes) - once
    keys = bytes_by_link(plan, RowBytes(q=1, kv=2, o=1), nodes) - once
    queries_back, keys_back = queries[:, ::-1], keys[:, ::-1]
    lse = kind.q_heads * LSE_BYTES
    forward = queries * row_bytes.q + keys * row_bytes.kv + queries_back * (row_bytes.o + lse)
    again = row_bytes.q + 2 * row_bytes.o + lse  # q, do, o and log-sum-exp
    # Keys go there again, and their gradients back.
    backward = queries * again + queries_back * row_bytes.q + (keys + keys_back) * row_bytes.kv
    return np.stack([forward, backward])


class Stopwatch:
    """Times a layer's parts on one device, each shape once.

    Args:
        shape: of the layer.
        device: what is timed.
        dtype: of weights and rows.
        kernel: computes core attention.
        piece: the most rows of a piece of the layer without core attention.
        keys: the most K/V rows of a call.
        repeats: timed calls, after one to warm up.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        kernel: Kernel,
        *,
        piece: int,
        keys: int,
        repeats: int,
    ) -> None:
        self._shape, self._device, self._dtype, self._kernel = shape, device, dtype, kernel
        self._piece, self._keys, self._repeats = piece, keys, repeats
        self._others: dict[int, float] = {}
        self._attention: dict[tuple[Task, ...], float] = {}
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=piece,
            attn_implementation="one_gpu_none",
        )
        with device:
            self._layer = LlamaDecoderLayer(config, 0).to(dtype)
            self._positions = LlamaRotaryEmbedding(config)

    @property
    def calls(self) -> int:
        """Shapes that have been timed."""
        return len(self._others) + len(self._attention)

    def others(self, tokens: int) -> float:
        """Seconds of the layer without core attention, forward and backward."""
        whole, rest = divmod(tokens, self._piece)
        rest = min(-(-rest // LAST_PIECE) * LAST_PIECE, self._piece)
        return (whole * self._others_of(self._piece) if whole else 0.0) + (self._others_of(rest) if rest else 0.0)

    def _others_of(self, rows: int) -> float:
        if rows not in self._others:
            hidden = torch.randn(1, rows, self._shape.hidden, device=self._device).to(self._dtype).requires_grad_()
            gradient = torch.randn_like(hidden)
            positions = self._positions(hidden, torch.arange(rows, device=self._device)[None])

            def step() -> None:
                output = self._layer(hidden, position_embeddings=positions, attention_mask=None)
                (output[0] if isinstance(output, tuple) else output).backward(gradient)
                self._layer.zero_grad()
                hidden.grad = None

            self._others[rows] = median_seconds(step, self._device, self._repeats)
        return self._others[rows]

    def attention(self, tasks: Sequence[Task]) -> float:
        """Seconds of tasks, forward and backward, in calls of no more K/V rows than is allowed."""
        seconds, call, keys = 0.0, [], 0
        for task in sorted(tasks):  # so that calls with the same tasks are known again
            if call and keys + task[1] > self._keys:
                seconds += self._attention_of(tuple(call))
                call, keys = [], 0
            call.append(task)
            keys += task[1]
        return seconds + (self._attention_of(tuple(call)) if call else 0.0)

    def _attention_of(self, tasks: tuple[Task, ...]) -> float:
        if tasks not in self._attention:
            q_lens, k_lens = [stop - start for start, stop in tasks], [stop for _, stop in tasks]
            shapes = TaskShapes.build(q_lens, k_lens, self._device)
            params = AttentionParams(self._shape.head_dim**-0.5)
            do, q, k, v = (
                torch.randn(rows, heads, self._shape.head_dim, device=self._device, dtype=self._dtype)
                for rows, heads in (
                    (sum(q_lens), self._shape.heads),
                    (sum(q_lens), self._shape.heads),
                    (sum(k_lens), self._shape.kv_heads),
                    (sum(k_lens), self._shape.kv_heads),
                )
            )

            def step() -> None:
                o, lse = self._kernel.forward(q, k, v, shapes, params)
                self._kernel.backward(do, q, k, v, o, lse, shapes, params)

            self._attention[tasks] = median_seconds(step, self._device, self._repeats)
        return self._attention[tasks]


class NoAttention(torch.autograd.Function):
    """Hands queries on as results: core attention is timed by itself."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, T, H, D] of [B, H, T, D]."""
        ctx.save_for_backward(key, value)
        return query.transpose(1, 2).clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the right shapes."""
        key, value = ctx.saved_tensors
        return gradient.transpose(1, 2), torch.zeros_like(key), torch.zeros_like(value)


def no_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
    """What the layer calls for core attention."""
    return NoAttention.apply(query, key, value), None


AttentionInterface.register("one_gpu_none", no_attention)


def step_seconds(works: Sequence[Work], stopwatch: Stopwatch, links: Links) -> dict[str, Any]:
    """What a step of all ranks takes.

    Args:
        works: by rank.
        stopwatch: times them.
        links: between them.

    Returns:
        attention_s, others_s: of the slowest rank in each, measured. slowest_s: of the slowest rank in both.
        max_over_mean: of the times of both. bytes, bytes_between_nodes: a step, of the rank with the most of them.
        By bandwidth: exchange_s, and step_s without and with overlap, modelled.
    """
    attention = [sum(stopwatch.attention(tasks) for tasks in work.calls) for work in works]
    others = [stopwatch.others(work.tokens) for work in works]
    both = [a + b for a, b in zip(attention, others, strict=True)]
    moved = np.stack([work.moved for work in works], axis=-1)
    exchange = {
        f"{bandwidth:g}": sum(link_seconds(of_direction, links.node_bandwidth, bandwidth) for of_direction in moved)
        for bandwidth in links.bandwidths
    }
    return {
        "attention_s": max(attention),
        "others_s": max(others),
        "slowest_s": max(both),
        "max_over_mean": max(both) / statistics.mean(both),
        "bytes": int(moved.sum(axis=1).max(axis=(1, 2)).sum()),
        "bytes_between_nodes": int(moved[:, BETWEEN].max(axis=(1, 2)).sum()),
        "exchange_s": exchange,
        "step_s": {name: max(both) + seconds for name, seconds in exchange.items()},
        "step_with_overlap_s": {name: max(max(both), seconds) for name, seconds in exchange.items()},
    }


def works_of(
    rows: Sequence[Sequence[int]], tokens: int, shape: Shape, kernel: Kernel, itemsize: int, ranks_per_node: int = 1
) -> dict[str, Any]:
    """The work of every rank, by way."""
    ranks_per_node = min(ranks_per_node, len(rows))
    nodes = nodes_of(node_sizes(len(rows), ranks_per_node))
    settings = PlanSettings(
        ranks=len(rows),
        tokens_per_rank=tokens,
        kinds=(shape.kind,),
        bytes_per_value=itemsize,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
        ping_pong=True,
        ranks_per_node=ranks_per_node,
    )
    row_bytes = settings.row_bytes(shape.kind)
    lengths = [length for row in rows for length in row]
    return {
        "packed": work_packed(rows),
        "whole": work_whole(rows),
        "context": work_context(rows, row_bytes, ranks_per_node),
        "fixed": work_planned(plan_placed(rows, settings), shape.kind, row_bytes, nodes),
        "joint": work_planned(plan_micro_batch(lengths, settings), shape.kind, row_bytes, nodes),
    }


def chosen(batches: Sequence[dict[str, Any]], tokens: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Batches of one row a rank with so many tokens, the first so many of each kind."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for batch in batches:
        if batch["layout"] == "dp" and batch["T"] in tokens:
            kept.setdefault(f"{batch['id'].rsplit('-s', 1)[0]} {batch['T']}", []).append(batch)
    return [batch for some in kept.values() for batch in some[:seeds]]


def measure(
    batches: Sequence[dict[str, Any]],
    ranks: Sequence[int],
    links: Links,
    shape: Shape,
    watch: Callable[[int], Stopwatch],
    kernel: Kernel,
    itemsize: int,
    leave: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """All batches on all numbers of ranks, all ways.

    Args:
        batches: documents, one row a rank.
        ranks: numbers of ranks, each at most the rows.
        links: between ranks.
        shape: of the layer.
        watch: a stopwatch for ranks of so many tokens.
        kernel: computes core attention.
        itemsize: bytes of a number.
        leave: is given all results after each of them, for the case that there is no time for the rest.
    """
    results: list[dict[str, Any]] = []
    watches: dict[int, Stopwatch] = {}
    for batch in batches:
        stopwatch = watches.get(batch["T"]) or watch(batch["T"])
        watches[batch["T"]] = stopwatch
        for count in ranks:
            ways = works_of(batch["rows"][:count], batch["T"], shape, kernel, itemsize, links.ranks_per_node)
            result = {name: step_seconds(works, stopwatch, links) for name, works in ways.items()}
            results.append({"batch": batch["id"], "tokens": batch["T"], "ranks": count, "ways": result})
            leave(results)
            print(f"{batch['id']}, {count} ranks: {stopwatch.calls} shapes timed", file=sys.stderr, flush=True)
    return results


def summary(results: Sequence[dict[str, Any]], bandwidths: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
    """By number of ranks and by way: medians over the batches."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        by_ranks.setdefault(result["ranks"], []).append(result["ways"])
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for ranks, ways in by_ranks.items():
        for way in WAYS:
            found = {"max_over_mean": [w[way]["max_over_mean"] for w in ways]}
            found["computation"] = [w["packed"]["slowest_s"] / w[way]["slowest_s"] for w in ways]
            for bandwidth in bandwidths:
                for name, key in (("", "step_s"), (", overlap", "step_with_overlap_s")):
                    name = f"at {bandwidth:g} GB/s{name}"
                    found[name] = [w["packed"][key][f"{bandwidth:g}"] / w[way][key][f"{bandwidth:g}"] for w in ways]
            medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
            figures.setdefault(str(ranks), {})[way] = medians
    return figures


def main() -> None:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=Path, required=True, help="documents, as said above")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64], help="how many (default: 8 16 64)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="batches of these T (default: 32768)")
    parser.add_argument("--seeds", type=int, default=1, help="batches of each kind (default: 1)")
    parser.add_argument(
        "--bandwidth", type=float, nargs="+", default=[50.0, 450.0], help="GB/s of a rank (default: 50 450)"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="of each node (default: 1, links all alike)")
    parser.add_argument(
        "--node-bandwidth",
        type=float,
        default=NODE_BANDWIDTH,
        help=f"GB/s of a rank inside its node (default: {NODE_BANDWIDTH:g})",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="auto", help="of core attention (default: auto)")
    parser.add_argument("--keys", type=int, default=2**20, help="the most K/V rows of a call (default: 1048576)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each shape (default: 3)")
    parser.add_argument("--output", type=Path, help="file for the JSON object, written after each batch")
    options = parser.parse_args()
    device, dtype, shape = torch.device(options.device), torch.bfloat16, Shape()
    kernel = get_kernel(options.kernel, device)
    with gzip.open(options.batches, "rt") as file:
        batches = chosen(json.load(file)["batches"], options.tokens, options.seeds)

    def watch(tokens: int) -> Stopwatch:
        return Stopwatch(shape, device, dtype, kernel, piece=tokens, keys=options.keys, repeats=options.repeats)

    told: dict[str, Any] = {
        **provenance(),
        "device": str(device),
        "kernel": kernel.name,
        "measured": ["attention_s", "others_s", "slowest_s", "max_over_mean", "computation"],
        "counted": ["bytes", "bytes_between_nodes"],
        "modelled": ["exchange_s", "step_s", "step_with_overlap_s", "at … GB/s"],
    }

    def leave(results: list[dict[str, Any]]) -> None:
        told["result"] = {"summary": summary(results, options.bandwidth), "batches": results}
        if options.output is not None:
            options.output.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")

    links = Links(options.bandwidth, options.ranks_per_node, options.node_bandwidth)
    measure(batches, options.ranks, links, shape, watch, kernel, dtype.itemsize, leave)
    figures = told["result"]["summary"]
    columns = list(figures[str(options.ranks[0])]["packed"])
    rows = [
        [ranks, way, *(f"{ways[way][name]:.3f}" for name in columns)]
        for ranks, ways in figures.items()
        for way in WAYS
    ]
    print("times as fast as packed: the slowest rank's computation (measured), whole steps (exchange modelled)")
    table(["ranks", "way", *columns], rows)
    print(json.dumps(told, ensure_ascii=False))


if __name__ == "__main__":
    main()
