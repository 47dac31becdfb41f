"""How much of the exchange is hidden, or spared: ranks as two hosts behind a link of limited rate.

The hosts are two network namespaces joined by a veth pair whose rate `tc … tbf` limits, so it needs root and
iproute2. Each round runs a step (forward and backward, no gradient reduction) in shuffled order over the link free or
limited, in several ways that exchange the same bytes. Several documents, four ways on one plan of two nano-batches:

  waiting        every exchange is waited for where it is started, and nothing is hidden
  own first      no ping-pong: whole layers; own tasks are computed while rows are on their way
  turns waiting  halves of layers in turns as with ping-pong, but every exchange is waited for where it is started
  ping-pong      as users have it: halves in turns, own tasks first

The rate is chosen so that the exchange adds 35 to 40 % to a step that waits.

    hidden = 1 - (limited - free) / (limited waiting - free waiting)

of "own first" and of "ping-pong", by step time and by the time that a rank stood in waits. The overhead of ping-pong
is what it adds to a step over the free link, beside own tasks first without it. A free link takes time as well, which
"waiting" stands in: beside that, ping-pong takes less than nothing. "turns waiting" beside "waiting" is what working
on halves costs or, where less data is in the caches, saves.

With --one-document a single document lies on both hosts, which ping-pong cannot divide. "waiting" and "own first" are
then with all K and V rows in one exchange, "stages" is as users have it, and --stages 2 8 adds "2 stages" and "8
stages". What is hidden is told beside "waiting", as above, and beside "own first"; the overhead of stages is what they
add to a step over the free link beside own tasks first in one stage. Derived names begin with one_document_.

With --nodes each host has two ranks, and plans that know of it (`PlanSettings(ranks_per_node=2)`) are compared with
flat ones: of documents whose lengths have a long tail, or with --one-document of one document over all ranks. "flat"
and "node-aware" are as users have them, with ping-pong where the documents allow it; in "flat waiting" and "node-aware
waiting" every exchange is waited for where it is started. The rate is chosen for "flat waiting".

    exposed = limited - free, by step time and by waits: what the link adds

of a node-aware plan over that of a flat one, paired as above. "over the link, MB" is what the devices of the link sent
in a step over the free link, "between nodes, MB" what is counted from the plan for one layer's forward. Four ranks
share this machine's cores, so that one that waits leaves its core to others: what a link adds is less than it were
with a machine for each host, on either side. Derived names begin with nodes_, or nodes_one_document_.

With --trace it limits nothing and needs no root: it traces one ping-pong step and says how much of the exchange lies
under computation, in the forward and in the backward. On GPUs, 8 layers as wide as those of Llama-3-8B, a rank each:

    torchrun --nproc-per-node 8 benchmarks/overlap.py --trace trace.json

Run: sudo python benchmarks/overlap.py [--rounds 12] [--tokens 4096]
     sudo python benchmarks/overlap.py --one-document [--stages 2 8] [--rounds 12] [--tokens 2048]
     sudo python benchmarks/overlap.py --nodes [--one-document] [--rounds 12] [--tokens 2048]
     sudo python benchmarks/overlap.py --rate-mbit 420 --against OTHER_CHECKOUT      two checkouts in turns
     python benchmarks/overlap.py --trace trace.json [--tokens 4096]      two ranks on the CPU
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from covered import DIRECTIONS, Covered, covered_exchange
from harness import Ranks, Round, over, print_json, report, rounds_parser, run_ranks, table, take_rounds
from hosts import Hosts
from torch.profiler import ProfilerActivity, profile, record_function
from ways import Steps, Way, few_documents, long_tail

LINKS = ("free", "limited")
MEASURES = {"": ", s", ", by waits": ": in waits, s"}
"""Of what a link adds: how each is told, and how the names of its figures end."""

PING_PONG = {"ping-pong": Way(turns=True)}
SEVERAL_DOCUMENTS = {
    "waiting": Way(waits=True),
    "own first": Way(),
    "turns waiting": Way(turns=True, waits=True),
    **PING_PONG,
}
ONE_DOCUMENT = {"waiting": Way(waits=True, stages=1), "own first": Way(stages=1), "stages": Way()}

RANKS_PER_HOST = 2
"""With --nodes."""
NODES = {
    "flat waiting": Way(waits=True),
    "node-aware waiting": Way(waits=True, ranks_per_node=RANKS_PER_HOST),
    "flat": Way(turns=True),
    "node-aware": Way(turns=True, ranks_per_node=RANKS_PER_HOST),
}


@dataclass(frozen=True)
class Case:
    """What is measured behind a link.

    Attributes:
        lengths: of the documents.
        ways: by name; the rate of the link is chosen for the first one, which waits.
        ranks_per_host: on each of the two hosts.
    """

    lengths: Sequence[int]
    ways: Mapping[str, Way]
    ranks_per_host: int = 1


def case_of(options: argparse.Namespace) -> Case:
    """What the options ask for."""
    tokens = options.tokens or (2048 if options.nodes or options.one_document else 4096)
    if options.nodes:
        total = tokens * 2 * RANKS_PER_HOST
        if not options.one_document:
            return Case(long_tail(total), NODES, RANKS_PER_HOST)
        in_one = {name: replace(way, stages=1) if way.waits else way for name, way in NODES.items()}
        return Case([total], in_one, RANKS_PER_HOST)
    if options.one_document:
        return Case([tokens * 2], ONE_DOCUMENT | {f"{stages} stages": Way(stages=stages) for stages in options.stages})
    return Case(few_documents(tokens * 2), SEVERAL_DOCUMENTS)


def trace_rank(tokens: int, file: str) -> dict[str, Covered]:
    """Trace a ping-pong step of this rank; rank 0 leaves its trace in the file."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    steps = Steps(few_documents(tokens * dist.get_world_size()), device, PING_PONG)
    model, dispatcher = steps.models["ping-pong"], steps.dispatchers["ping-pong"]

    def step() -> None:
        bound = dispatcher.bind(steps.plans["ping-pong"])
        dist.barrier()
        with record_function("forward"):
            loss = model(**steps.batches["ping-pong"], distca_plan=bound).loss
            finish(device)
        with record_function("backward"):
            loss.backward()
            finish(device)
        model.zero_grad()

    step()  # warms up
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(file) if dist.get_rank() == 0 else Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(kept))
        return covered_exchange(json.loads(kept.read_text())["traceEvents"])


def finish(device: torch.device) -> None:
    """Wait until all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trace(options: argparse.Namespace) -> None:
    """Trace a step on the ranks of torchrun, or else on two of the CPU; print a table and one JSON object."""
    if "RANK" in os.environ:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, trace_rank(options.tokens or (32768 if on_gpu else 4096), options.trace))
        printing = dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        ranks, printing = run_ranks(2, trace_rank, options.tokens or 4096, options.trace), True
    if printing:
        table(
            ["rank", "", "exchanges", "time", "under attention", "under computation"],
            [
                [
                    str(rank),
                    direction,
                    str(covered[direction].exchanges),
                    f"{covered[direction].exchange_ms:.2f} ms",
                    f"{covered[direction].under_attention:.2f}",
                    f"{covered[direction].under_computation:.2f}",
                ]
                for rank, covered in enumerate(ranks)
                for direction in DIRECTIONS
            ],
        )
        means = {
            f"{direction}_{name}": statistics.mean(asdict(covered[direction])[name] for covered in ranks)
            for direction in DIRECTIONS
            for name in ("exchange_ms", "under_attention", "under_computation")
        }
        print_json(ranks=len(ranks), device="cuda" if torch.cuda.is_available() else "cpu", **means)


def exchange_share(steps: Steps, hosts: Hosts, waiting: str, rate_mbit: float) -> float:
    """What the limit adds to the waits of a step that waits, over the step on the free link.

    By waits, because the time of a step varies by more than what is to be measured.
    """
    free, limited = [], []
    for _ in range(5):
        hosts.limit(dist.get_rank(), None)
        free.append(steps.step(waiting))
        hosts.limit(dist.get_rank(), rate_mbit)
        limited.append(steps.step(waiting))
    step, waited = map(statistics.median, zip(*free, strict=True))
    _, limited_waited = map(statistics.median, zip(*limited, strict=True))
    return (limited_waited - waited) / step


def chosen_rate(steps: Steps, hosts: Hosts, waiting: str) -> float:
    """The rate in Mbit/s at which the exchange adds 36 to 39 % to a step that waits."""
    rate = 500.0
    for _ in range(8):  # the exchange takes time in inverse proportion to the rate
        share = exchange_share(steps, hosts, waiting, rate)
        if 0.36 <= share <= 0.39:
            break
        rate *= min(max(share / 0.375, 0.3), 3.0)
    return rate


def prepare(hosts: Hosts, case: Case, given_rate: float | None) -> Callable[[], Round]:
    """Make the models on this rank and choose the rate, and a round: every way over every link, in shuffled order."""
    steps, order = Steps(case.lengths, torch.device("cpu"), case.ways), random.Random(0)
    for way in case.ways:
        steps.step(way)  # warms up
    rate = chosen_rate(steps, hosts, next(iter(case.ways))) if given_rate is None else given_rate

    def take() -> Round:
        figures, rank = {"rate, Mbit/s": rate}, dist.get_rank()
        for link, way in order.sample(
            [(link, way) for link in LINKS for way in case.ways], len(LINKS) * len(case.ways)
        ):
            hosts.limit(rank, rate if link == "limited" else None)
            before = hosts.sent(rank)
            figures[f"{link}, {way}, s"], figures[f"{link}, {way}: in waits, s"] = steps.step(way)
            if link == "free" and case.ranks_per_host > 1:
                sent = torch.tensor(hosts.sent(rank) - before, dtype=torch.float64)
                dist.all_reduce(sent)  # every rank counts what its whole host sends
                figures[f"{way}: over the link, MB"] = sent.item() / case.ranks_per_host / 1e6
                between = steps.bytes_between(way, case.ranks_per_host)
                figures[f"{way}: between nodes, MB"] = between / 1e6
        return {name: figures[name] for name in sorted(figures)}

    return take


def added(way: str, beside: str, ending: str) -> Callable[[Round], float]:
    """What the limit adds to a step one way, over what it adds to a step another way.

    Args:
        way: the one.
        beside: the other one.
        ending: of the names of the figures.
    """

    def compute(taken: Round) -> float:
        one, other = (taken[f"limited, {name}{ending}"] - taken[f"free, {name}{ending}"] for name in (way, beside))
        return one / other

    return compute


def hidden(way: str, ending: str, beside: str = "waiting") -> Callable[[Round], float]:
    """The share of what the limit adds to a step one way which it does not add to one another way, as in `added`."""
    compute = added(way, beside, ending)
    return lambda taken: 1 - compute(taken)


def hidden_of(*ways: str) -> dict[str, Callable[[Round], float]]:
    """What ways hide, by step time and by waits; and what the limit adds to a step that waits."""
    return {f"hidden by {way}{name}": hidden(way, ending) for way in ways for name, ending in MEASURES.items()} | {
        "what the limit adds to waiting": over("limited, waiting, s", "free, waiting, s")
    }


def derived_of_one_document(ways: Mapping[str, Way]) -> dict[str, Callable[[Round], float]]:
    """What ways with one document hide, and what they cost beside own tasks first in one stage."""
    staged = [name for name in ways if name not in ("waiting", "own first")]
    derived = hidden_of("own first", *staged)
    for way in staged:
        for name, ending in MEASURES.items():
            derived[f"hidden by {way} beside own first{name}"] = hidden(way, ending, "own first")
        derived[f"overhead: {way} / own first"] = over(f"free, {way}, s", "free, own first, s")
        derived[f"limited: own first / {way}"] = over("limited, own first, s", f"limited, {way}, s")
    return {f"one_document_{name}": compute for name, compute in derived.items()}


def derived_of_nodes(one_document: bool) -> dict[str, Callable[[Round], float]]:
    """What the link adds to steps of node-aware plans, over what it adds to those of flat ones."""
    derived = {}
    for kind in ("", " waiting"):
        flat, aware = f"flat{kind}", f"node-aware{kind}"
        for name, ending in MEASURES.items():
            derived[f"exposed: {aware} / {flat}{name}"] = added(aware, flat, ending)
        for link in LINKS:
            derived[f"{link}: {aware} / {flat}"] = over(f"{link}, {aware}, s", f"{link}, {flat}, s")
        derived[f"what the limit adds to {flat}"] = over(f"limited, {flat}, s", f"free, {flat}, s")
        for what in ("over the link", "between nodes"):
            derived[f"{what}: {aware} / {flat}"] = over(f"{aware}: {what}, MB", f"{flat}: {what}, MB")
    prefix = "nodes_one_document_" if one_document else "nodes_"
    return {f"{prefix}{name}": compute for name, compute in derived.items()}


def main() -> None:
    """Make the hosts, run a rank on each, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument(
        "--tokens",
        type=int,
        help="of a rank; default 4096, with --nodes or of one document 2048, of a trace on GPUs 32768",
    )
    parser.add_argument("--rate-mbit", type=float, help="of the limited link; by default it is found by trying")
    parser.add_argument("--one-document", action="store_true", help="one document over both hosts instead of several")
    parser.add_argument(
        "--nodes", action="store_true", help="hosts of two ranks: plans that know of them beside flat ones"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[], help="with --one-document: so many stages too")
    parser.add_argument("--trace", help="file for a profiler trace of one ping-pong step of rank 0")
    options = parser.parse_args()
    if options.trace:
        trace(options)
        return
    if os.geteuid() != 0:
        sys.exit("benchmarks/overlap.py makes network namespaces and limits a link: run it as root")
    if options.against is not None and options.rate_mbit is None:
        parser.error("--against needs --rate-mbit, so that both checkouts have the same link; a run alone finds one")
    case = case_of(options)
    count = 2 * case.ranks_per_host
    with (
        Hosts(case.ranks_per_host) as hosts,
        Ranks(count, prepare, hosts, case, options.rate_mbit, enter=hosts.move_in) as ranks,
    ):
        measured = take_rounds(options, lambda: ranks.take()[0])
    if options.nodes:
        report(measured, derived_of_nodes(options.one_document))
        return
    if options.one_document:
        report(measured, derived_of_one_document(case.ways))
        return
    derived = hidden_of("own first", "ping-pong") | {
        "overhead: ping-pong / own first": over("free, ping-pong, s", "free, own first, s"),
        "ping-pong / waiting": over("free, ping-pong, s", "free, waiting, s"),
        "turns waiting / waiting": over("free, turns waiting, s", "free, waiting, s"),
        "limited: own first / ping-pong": over("limited, own first, s", "limited, ping-pong, s"),
    }
    report(measured, derived)


if __name__ == "__main__":
    main()
