"""What a rank takes for its part of a micro-batch, by number of ranks, and the sampler for each
document.

An 8B model on H100, nodes of 8, 32768 tokens on each rank; lengths are drawn at random, and nothing
is launched. Seconds are CPU time, the least of several rounds. With pods, ranks of the same pod
plan together, as in training. "Together" is one plan of all ranks, up to 512 ranks.

  padded     eight sequences on each rank, whose prefixes are hashed: the rank plans them, and finds
             where their rows travel. Bytes are those of the lengths and hashes that reach the rank
  stream     documents that lie on the rank
  routes     row numbers of one kind of layers, and the most memory meanwhile, in the largest pod:
             of chats, and of ProLong's documents
  sampler    chats, of which a micro-batch fills all ranks: the start, an epoch, and the most memory

Run: PYTHONPATH=. python benchmarks/growth.py [--rounds 3] [--documents 1000000]
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from harness import most_megabytes, options_parser, print_json, print_rows
from harness.simulated import simulated_run

from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.dispatch.padded_rows import RowTravel, Sequences
from hf_distca.plan.routes import make_routes
from hf_distca.planner.micro_batch import plan_placed, plan_pods
from hf_distca.planner.padding import ALL_RANKS, PodShare, plan_padded, pod_needs
from hf_distca.planner.pods import pods_around
from hf_distca.planner.prefixes import BLOCK, HASH_BYTES
from hf_distca.planner.settings import POD_RANKS, POD_RANKS_OF_PADDED, PlanSettings
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.lengths import Draw, corpora, lognormal, micro_batches

RANKS, TOGETHER = (64, 512, 4096), 512
TOKENS, NODE, SEQUENCES = 32768, 8, 8
CHATS = lognormal(800, 1.0)
ROUTED = {"chats": CHATS, "ProLong": corpora()["prolong"]}


class OneRank:
    """What `RowTravel` asks of the groups of ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def settings_of(ranks: int, *, pods: bool) -> PlanSettings:
    """Return settings of plans, with the pods of a training or with one pod of all ranks."""
    settings = simulated_run(LLAMA_8B, ranks, TOKENS, NODE).plans
    return settings if pods else replace(settings, pod_ranks=ranks)


def rows_on_ranks(ranks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[ranks, SEQUENCES] lengths that fit into a rank."""
    return np.random.default_rng(ranks).integers(1, TOKENS // SEQUENCES, (ranks, SEQUENCES))


def hashes_of_ranks(lengths: np.ndarray[Any, Any]) -> list[tuple[tuple[bytes, ...], ...]]:
    """Hashes of sequences that share nothing, as many as training has."""
    random = np.random.default_rng(0)
    blocks = -(-lengths // BLOCK)
    return [
        tuple(tuple(random.bytes(HASH_BYTES) for _ in range(count)) for count in row)
        for row in blocks.tolist()
    ]


def padded(ranks: int, *, pods: bool) -> tuple[Callable[[], object], int]:
    """Return what plans the padded batch of the first rank, and the bytes that reach it."""
    settings = replace(
        settings_of(ranks, pods=pods), pod_ranks=POD_RANKS_OF_PADDED if pods else ranks
    )
    pod = pods_around(settings, 0)[0]
    lengths = rows_on_ranks(ranks)[: len(pod)]
    of_pod = replace(settings, ranks=len(pod), pod_ranks=len(pod))
    hashes, rows = hashes_of_ranks(lengths), lengths.tolist()
    needs = pod_needs(rows, of_pod, hashes)
    of_pods = [needs] * (ranks // len(pod))
    own = Sequences(np.zeros(SEQUENCES, np.int64), lengths[0])
    groups: Any = OneRank(0)
    gathered = [(tuple(row), of_row, None) for row, of_row in zip(rows, hashes, strict=True)]
    size = len(pickle.dumps(gathered)) + (len(pickle.dumps(of_pods)) if len(of_pods) > 1 else 0)

    def plan() -> object:
        share = ALL_RANKS
        if len(of_pods) > 1:
            share = PodShare.of(0, pod_needs(rows, of_pod, hashes), of_pods)
        planned = plan_padded(rows, of_pod, hashes, share=share)
        shape = torch.Size((SEQUENCES, TOKENS // SEQUENCES))
        return RowTravel(planned, own, shape, groups, torch.device("cpu"))

    return plan, size


def stream(ranks: int, *, pods: bool) -> Callable[[], object]:
    """Return what plans the documents of the first rank."""
    settings = settings_of(ranks, pods=pods)
    pod = pods_around(settings, 0)[0]
    rows = rows_on_ranks(ranks)[: len(pod)].tolist()
    of_pod = replace(settings, ranks=len(pod), pod_ranks=len(pod))
    return lambda: plan_placed(rows, of_pod)


def routes(ranks: int, draw: Draw, rounds: int) -> tuple[float, float]:
    """Milliseconds and megabytes of the routes of the largest pod's first rank."""
    settings = settings_of(ranks, pods=True)
    (lengths,) = islice(micro_batches(draw, settings.micro_batch_tokens, seed=1), 1)
    plan = max(plan_pods(lengths.tolist(), settings), key=lambda plan: len(plan.ranks))
    plans = [nano.plans[settings.dominant_kind] for nano in plan.nano_batches]

    def make() -> None:
        for each in plans:
            make_routes(each, 0)

    return least_seconds(make, rounds) * 1e3, most_megabytes([make])


def least_seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def sampled(ranks: int, documents: int, rounds: int) -> dict[str, Any]:
    """Microseconds and bytes of a document: at the start, and in an epoch."""
    lengths = CHATS(np.random.default_rng(0), documents)
    capacity = settings_of(ranks, pods=True).micro_batch_tokens

    def start() -> GlobalBatchSampler:
        return GlobalBatchSampler(fit_documents(lengths, capacity, "truncate", "ranks"), capacity)

    most = most_megabytes([lambda: sum(len(spans) for spans in start().spans_in_order())])
    sampler = start()
    return {
        "ranks": ranks,
        "start, us a document": least_seconds(start, rounds) / documents * 1e6,
        "epoch, us a document": least_seconds(
            lambda: sum(map(len, sampler.spans_in_order())), rounds
        )
        / documents
        * 1e6,
        "memory, bytes a document": most / documents * 1e6,
    }


def of_ranks(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds and bytes of a rank, in pods and together."""
    found = []
    for pods in (True, False) if ranks <= TOGETHER else (True,):
        if not pods and ranks < 2 * POD_RANKS:
            continue  # one pod
        plan, size = padded(ranks, pods=pods)
        found.append(
            {
                "ranks": ranks,
                "plans": "pods" if pods else "together",
                "padded, ms": least_seconds(plan, rounds) * 1e3,
                "padded, KB": size / 1e3,
                "stream, ms": least_seconds(stream(ranks, pods=pods), rounds) * 1e3,
            }
        )
        for kind, draw in ROUTED.items():
            milliseconds, megabytes = routes(ranks, draw, rounds) if pods else (None, None)
            found[-1] |= {f"routes of {kind}, ms": milliseconds, f"{kind}, MB": megabytes}
    return found


def slopes(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Exponents of growth with ranks in pods, from the fewest to the most: 1 is proportional."""
    first, *_, last = (row for row in found if row["plans"] == "pods")
    grown = np.log(last["ranks"] / first["ranks"])
    names = [name for name in first if name not in ("ranks", "plans")]
    return {name: float(np.log(last[name] / first[name]) / grown) for name in names}


def main() -> None:
    parser = options_parser(
        __doc__,
        rounds=(3, "of which the fastest counts"),
        documents=(1_000_000, "documents that are sampled"),
    )
    options = parser.parse_args()
    found = [row for ranks in RANKS for row in of_ranks(ranks, options.rounds)]
    print_rows(found)
    sampling = [sampled(ranks, options.documents, options.rounds) for ranks in RANKS]
    print_rows(sampling)
    print_json(ranks=found, exponents=slopes(found), sampler=sampling)


if __name__ == "__main__":
    main()
