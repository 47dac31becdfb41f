"""How much of the exchange is hidden, or spared: ranks as two hosts behind a link of limited rate.

The hosts are two network namespaces joined by a veth pair whose rate `tc … tbf` limits, so it needs
root and iproute2. Each round runs a step (forward and backward, no gradient reduction) in shuffled
order over the link free or limited, in several variants that exchange the same bytes. Several
documents, three variants on one plan:

  waiting        every exchange is waited for where it is started, and nothing is hidden
  own first      no ping-pong: whole layers; local tasks are computed while rows are on their way
  ping-pong      as users have it: halves in turns, local tasks first

The rate is chosen so that the exchange adds 35 to 40 % to a step that waits.

    hidden = 1 - (limited - free) / (limited waiting - free waiting)

of "own first" and of "ping-pong", by step time and by the time that a rank stood in waits. The
overhead of ping-pong is what it adds to a step over the free link, beside local tasks first without
it. A free link takes time as well, which "waiting" stands in: beside that, ping-pong takes less
than nothing.

With --one-document a single document lies on both hosts, which ping-pong cannot divide. "waiting"
and "own first" are then with all K and V rows in one exchange, "stages" is as users have it.
Derived names begin with one_document_.

With --nodes each host has two ranks, and plans that know of it (`PlanSettings(ranks_per_node=2)`)
are compared with flat ones, of documents whose lengths have a long tail. "flat" and "node-aware"
are as users have them, with ping-pong; in "flat waiting" and "node-aware waiting" every exchange is
waited for where it is started. The rate is chosen for "flat waiting".

    exposed = limited - free, by step time and by waits: what the link adds

of a node-aware plan over that of a flat one, paired as above. "over the link, MB" is what the
devices of the link sent in a step over the free link. Four ranks share this machine's cores, so
that one that waits leaves its core to others: what a link adds is less than it were with a machine
for each host, on either side. Derived names begin with nodes_.

Run: sudo python benchmarks/overlap.py [--rounds 12] [--tokens 4096] [--one-document | --nodes]
     sudo python benchmarks/overlap.py --rate-mbit 420 --against CHECKOUT  two checkouts in turns
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Ranks, Round, over, report, rounds_parser, take_rounds
from harness.models import documents_of, llama, rows_of_rank, settings_of
from hosts import Hosts

from hf_distca import Dispatcher
from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer
from hf_distca.dispatch.recorder import Recorder
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch

CPU = torch.device("cpu")
LINKS = ("free", "limited")
MEASURES = {"": ", s", ", by waits": ": in waits, s"}
"""Measures of what a link adds: ends of the ratios' names, and of their figures' names."""
TRANSFERS = ("send", "forward", "return_forwarded", "return_received")
"""Methods of a buffer that start a transfer."""


@dataclass(frozen=True)
class Variant:
    """Variant of a step.

    Attributes:
        turns: halves of layers take turns.
        waits: every exchange is waited for where it is started.
        whole: K and V rows come all at once; else in the plan's stages.
    """

    turns: bool = False
    waits: bool = False
    whole: bool = False
    ranks_per_node: int = 1


@dataclass(frozen=True)
class Case:
    """Documents and variants that are measured behind a link, whose rate is chosen for the first
    variant.
    """

    lengths: Sequence[int]
    variants: Mapping[str, Variant]
    ranks_per_host: int = 1


def several(tokens: int) -> Case:
    """Documents of which each nano-batch has one too long for a rank's share, which is
    divided over both.
    """
    total = 2 * tokens
    variants = {
        "waiting": Variant(waits=True),
        "own first": Variant(),
        "ping-pong": Variant(turns=True),
    }
    return Case([total * 3 // 8] * 2 + [total // 16] * 4, variants)


def one_document(tokens: int) -> Case:
    variants = {
        "waiting": Variant(waits=True, whole=True),
        "own first": Variant(whole=True),
        "stages": Variant(),
    }
    return Case([2 * tokens], variants)


def nodes(tokens: int) -> Case:
    """Lengths drawn from a log-normal distribution, the same every time; the last one is cut to
    fit.
    """
    total = 4 * tokens
    drawn = np.random.default_rng(0)
    lengths = []
    while left := total - sum(lengths):
        lengths.append(min(int(total / 64 * drawn.lognormal(0, 1.5)) + 1, left))
    variants = {
        "flat waiting": Variant(waits=True),
        "node-aware waiting": Variant(waits=True, ranks_per_node=2),
        "flat": Variant(turns=True),
        "node-aware": Variant(turns=True, ranks_per_node=2),
    }
    return Case(lengths, variants, ranks_per_host=2)


class WaitingExchange(Exchange):
    """Waits for every exchange of a dispatcher where it is started, and reports the waits to its
    recorder.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher.groups)
        self._recorder = dispatcher.recorder

    def buffer(self, *args: Any, **kwargs: Any) -> "WaitingBuffer":
        return WaitingBuffer(super().buffer(*args, **kwargs), self._recorder)


class WaitingBuffer:
    """A buffer of an Exchange whose rows have arrived when a transfer has been started."""

    def __init__(self, buffer: ExchangeBuffer, recorder: Recorder) -> None:
        self._buffer = buffer
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._buffer, name)
        return partial(self._waited_for, found) if name in TRANSFERS else found

    def _waited_for(self, start: Callable[..., ExchangeBuffer], *args: Any) -> ExchangeBuffer:
        started = start(*args)
        with self._recorder.span("wait", "at once"):
            started.wait()
        return started


def in_one_stage(plan: MicroBatchPlan) -> MicroBatchPlan:
    def whole(nano: Any) -> Any:
        return replace(
            nano, plans={kind: replace(each, stage_rows=None) for kind, each in nano.plans.items()}
        )

    return replace(plan, nano_batches=tuple(map(whole, plan.nano_batches)))


class Steps:
    """One rank's models and its plans, ready to step any variant of a case."""

    def __init__(self, case: Case) -> None:
        total = sum(case.lengths)
        ranks = dist.get_world_size()
        turns_of_variants = {variant.turns for variant in case.variants.values()}
        models = {turns: llama(total) for turns in turns_of_variants}
        if True in models:
            plan_layers(models[True])
        flat = settings_of(next(iter(models.values())), ranks, -(-total // ranks), CPU)
        documents = documents_of(case.lengths)
        self._models = {name: models[variant.turns] for name, variant in case.variants.items()}
        self._dispatchers: dict[str, Dispatcher] = {}
        self._plans: dict[str, MicroBatchPlan] = {}
        for name, variant in case.variants.items():
            settings = replace(flat, ranks_per_node=variant.ranks_per_node)
            dispatcher = Dispatcher(settings, CPU)
            plan = plan_micro_batch(case.lengths, settings)
            if variant.waits:
                dispatcher.exchange = WaitingExchange(dispatcher)
            self._dispatchers[name] = dispatcher
            self._plans[name] = in_one_stage(plan) if variant.whole else plan
        self._batches = {
            name: rows_of_rank(plan, dist.get_rank(), documents, CPU)
            for name, plan in self._plans.items()
        }

    def step(self, variant: str) -> tuple[float, float]:
        """Seconds of a step until all ranks are done, and seconds that the ranks stood in waits, on
        average.
        """
        dispatcher = self._dispatchers[variant]
        bound = dispatcher.bind(self._plans[variant])
        dist.barrier()
        waited = dispatcher.recorder.seconds("wait")
        begin = time.perf_counter()
        self._models[variant](**self._batches[variant], distca_plan=bound).loss.backward()
        waited = dispatcher.recorder.seconds("wait") - waited
        dist.barrier()
        total = time.perf_counter() - begin
        self._models[variant].zero_grad()
        figures = torch.tensor([total, waited], dtype=torch.float64)
        dist.all_reduce(figures)
        seconds, seconds_waited = (figures / dist.get_world_size()).tolist()
        return seconds, seconds_waited


def chosen_rate(steps: Steps, hosts: Hosts, waiting: str) -> float:
    """The rate in Mbit/s at which the exchange adds 36 to 39 % to a step that waits.

    By waits, because the time of a step varies by more than what is to be measured.
    """
    rate = 500.0
    for _ in range(8):  # the exchange takes time in inverse proportion to the rate
        found: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}
        for _ in range(5):
            for link, limit in zip(LINKS, (None, rate), strict=True):
                hosts.limit(dist.get_rank(), limit)
                found[link].append(steps.step(waiting))
        step, waited = map(statistics.median, zip(*found["free"], strict=True))
        share = (statistics.median(seconds for _, seconds in found["limited"]) - waited) / step
        if 0.36 <= share <= 0.39:
            break
        rate *= min(max(share / 0.375, 0.3), 3.0)
    return rate


def prepare(hosts: Hosts, case: Case, given_rate: float | None) -> Callable[[], Round]:
    """Make the models on this rank and choose the rate, and a round: every variant over every link,
    shuffled.
    """
    steps = Steps(case)
    order = random.Random(0)
    for variant in case.variants:
        steps.step(variant)  # warms up
    rate = (
        chosen_rate(steps, hosts, next(iter(case.variants))) if given_rate is None else given_rate
    )
    runs = [(link, variant) for link in LINKS for variant in case.variants]

    def take() -> Round:
        figures = {"rate, Mbit/s": rate}
        rank = dist.get_rank()
        for link, variant in order.sample(runs, len(runs)):
            hosts.limit(rank, rate if link == "limited" else None)
            before = hosts.sent(rank)
            figures[f"{link}, {variant}, s"], figures[f"{link}, {variant}: in waits, s"] = (
                steps.step(variant)
            )
            if link == "free" and case.ranks_per_host > 1:
                sent = torch.tensor(hosts.sent(rank) - before, dtype=torch.float64)
                dist.all_reduce(sent)  # every rank counts what its whole host sends
                figures[f"{variant}: over the link, MB"] = sent.item() / case.ranks_per_host / 1e6
        return {name: figures[name] for name in sorted(figures)}

    return take


def added(variant: str, beside: str, ending: str) -> Callable[[Round], float]:
    """Time that the limit adds to a step of one variant over the time for another, by figures with
    an ending.
    """

    def compute(taken: Round) -> float:
        one, other = (
            taken[f"limited, {name}{ending}"] - taken[f"free, {name}{ending}"]
            for name in (variant, beside)
        )
        return one / other

    return compute


def hidden(variant: str, ending: str) -> Callable[[Round], float]:
    """The share of the limit's addition to a step that waits which a step of the variant hides."""
    compute = added(variant, "waiting", ending)
    return lambda taken: 1 - compute(taken)


def derived(case: Case) -> dict[str, Callable[[Round], float]]:
    ratios: dict[str, Callable[[Round], float]] = {}
    if "flat" in case.variants:
        for kind in ("", " waiting"):
            flat = f"flat{kind}"
            aware = f"node-aware{kind}"
            for name, ending in MEASURES.items():
                ratios[f"exposed: {aware} / {flat}{name}"] = added(aware, flat, ending)
            for link in LINKS:
                ratios[f"{link}: {aware} / {flat}"] = over(
                    f"{link}, {aware}, s", f"{link}, {flat}, s"
                )
            ratios[f"what the limit adds to {flat}"] = over(
                f"limited, {flat}, s", f"free, {flat}, s"
            )
            sent = (f"{variant}: over the link, MB" for variant in (aware, flat))
            ratios[f"over the link: {aware} / {flat}"] = over(*sent)
        return {f"nodes_{name}": ratio for name, ratio in ratios.items()}
    hiding = list(case.variants)[-1]  # as users have it
    for variant in ("own first", hiding):
        for name, ending in MEASURES.items():
            ratios[f"hidden by {variant}{name}"] = hidden(variant, ending)
    ratios["what the limit adds to waiting"] = over("limited, waiting, s", "free, waiting, s")
    ratios[f"overhead: {hiding} / own first"] = over(f"free, {hiding}, s", "free, own first, s")
    ratios[f"limited: own first / {hiding}"] = over(
        "limited, own first, s", f"limited, {hiding}, s"
    )
    prefix = "one_document_" if hiding == "stages" else ""
    return {f"{prefix}{name}": ratio for name, ratio in ratios.items()}


def main() -> None:
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument(
        "--tokens", type=int, help="of a rank; default 4096, with --nodes or --one-document 2048"
    )
    parser.add_argument(
        "--rate-mbit", type=float, help="of the limited link; by default it is found by trying"
    )
    parser.add_argument(
        "--one-document",
        action="store_true",
        help="one document over both hosts instead of several",
    )
    parser.add_argument(
        "--nodes", action="store_true", help="hosts of two ranks: plans with nodes beside flat ones"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("benchmarks/overlap.py makes network namespaces and limits a link: run it as root")
    if options.against is not None and options.rate_mbit is None:
        parser.error(
            "--against needs --rate-mbit, so that both checkouts have the same link; a run alone "
            "finds one"
        )
    make, tokens = (
        (nodes, 2048)
        if options.nodes
        else (one_document, 2048)
        if options.one_document
        else (several, 4096)
    )
    case = make(options.tokens or tokens)
    with (
        Hosts(case.ranks_per_host) as hosts,
        Ranks(
            2 * case.ranks_per_host, prepare, hosts, case, options.rate_mbit, enter=hosts.move_in
        ) as ranks,
    ):
        measured = take_rounds(options, lambda: ranks.take()[0])
    report(measured, derived(case))


if __name__ == "__main__":
    main()
