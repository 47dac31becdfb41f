"""How much of the exchange ping-pong hides: two ranks as two hosts behind a link of limited rate.

The hosts are two network namespaces joined by a veth pair whose rate `tc … tbf` limits, so it needs root and
iproute2. Each round runs a step (forward and backward, no gradient reduction) four ways in shuffled order:
link free or limited, ping-pong or blocking. Blocking waits for every exchange as soon as it is started, and
computes own tasks while nothing is on its way. The rate is chosen so that the blocking exchange adds 35 to
40 % to the step.

    hidden = 1 - (limited ping-pong - free ping-pong) / (limited blocking - free blocking)

by step time, and by the time that a rank stood in waits.

Run: sudo python benchmarks/overlap.py [--rounds 12] [--tokens 4096] [--trace FOLDER]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import print_json, table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.dispatch.exchange import Exchange, PendingRows
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch

HOSTS = ("distca-a", "distca-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29511
WAYS = [(link, way) for link in ("free", "limited") for way in ("blocking", "ping-pong")]


class BlockingExchange(Exchange):
    """Waits for every exchange where it is started."""

    def start(self, *args: Any, **kwargs: Any) -> PendingRows:
        """Start an exchange and wait for it."""
        pending = super().start(*args, **kwargs)
        pending.complete()
        return pending


class Ranks:
    """One rank's models and its plan, ready to step either way."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=1024,
            max_position_embeddings=tokens,
            attn_implementation="distca",
            use_cache=False,
        )
        kinds = (AttentionKind(None, q_heads=4, kv_heads=4, dim_qk=64, dim_v=64),)
        settings = PlanSettings(ranks=2, tokens_per_rank=tokens, kinds=kinds, bytes_per_value=4, ping_pong=True)
        self.dispatchers = {way: Dispatcher(settings, torch.device("cpu")) for way in ("blocking", "ping-pong")}
        blocking = self.dispatchers["blocking"]
        blocking.exchange = BlockingExchange(blocking.groups)
        self.models = {way: LlamaForCausalLM(config) for way in self.dispatchers}
        plan_layers(self.models["ping-pong"])
        # One plan for both, so that they exchange the same bytes. Each nano-batch has a document too long for one
        # rank's share of it, which the joint layout cuts.
        self.plan = plan_micro_batch([tokens * 3 // 4] * 2 + [tokens // 8] * 4, settings)
        segments = [segment for nano in self.plan.nano_batches for segment in nano.layout.of_rank(dist.get_rank())]
        positions = torch.cat([torch.arange(s["start"], s["stop"]) for s in segments])[None]
        inputs = torch.randint(0, 1024, positions.shape)
        targets = {"labels": inputs, "shift_labels": inputs}
        self.batch = {"input_ids": inputs, "position_ids": positions, **targets}

    def step(self, way: str) -> tuple[float, float]:
        """Seconds of a step until both ranks are done, and seconds that the ranks stood in waits, on average."""
        dispatcher = self.dispatchers[way]
        bound = dispatcher.bind(self.plan)
        dist.barrier()
        waited = dispatcher.exchange.clock.seconds()
        begin = time.perf_counter()
        self.models[way](**self.batch, distca_plan=bound).loss.backward()
        waited = dispatcher.exchange.clock.seconds() - waited
        dist.barrier()
        total = time.perf_counter() - begin
        self.models[way].zero_grad()
        figures = torch.tensor([total, waited], dtype=torch.float64)
        dist.all_reduce(figures)
        return tuple((figures / 2).tolist())


def limit(rank: int, rate_mbit: float | None) -> None:
    """Limit what this host sends; None: no limit."""
    device = f"veth-{HOSTS[rank]}"
    subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
    if rate_mbit is not None:
        shape = ["tbf", "rate", f"{rate_mbit:.0f}mbit", "burst", "256kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", device, "root", *shape], check=True)
    dist.barrier()


def exchange_share(ranks: Ranks, rank: int, rate_mbit: float) -> float:
    """What the limit adds to the waits of a blocking step, over a step on the free link.

    By waits, because the time of a step varies by more than what is to be measured.
    """
    free, limited = [], []
    for _ in range(5):
        limit(rank, None)
        free.append(ranks.step("blocking"))
        limit(rank, rate_mbit)
        limited.append(ranks.step("blocking"))
    step, waited = map(statistics.median, zip(*free, strict=True))
    _, limited_waited = map(statistics.median, zip(*limited, strict=True))
    return (limited_waited - waited) / step


def run_rank(rank: int, options: argparse.Namespace) -> None:
    """Everything that happens on one host; rank 0 writes what was measured."""
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=f"veth-{HOSTS[rank]}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = Ranks(options.tokens)
    if options.trace:
        with torch.profiler.profile() as profile:
            ranks.step("ping-pong")
        profile.export_chrome_trace(str(Path(options.trace) / f"ping_pong_rank{rank}.json"))
    rate = 500.0
    for _ in range(8):  # the exchange takes time in inverse proportion to the rate
        share = exchange_share(ranks, rank, rate)
        if 0.36 <= share <= 0.39:
            break
        rate *= min(max(share / 0.375, 0.3), 3.0)
    measured: dict[str, list[tuple[float, float]]] = {f"{link} {way}": [] for link, way in WAYS}
    order = random.Random(0)
    for _ in range(options.rounds):
        for link, way in order.sample(WAYS, len(WAYS)):
            limit(rank, rate if link == "limited" else None)
            measured[f"{link} {way}"].append(ranks.step(way))
        if rank == 0:
            print(".", end="", flush=True, file=sys.stderr)
    if rank == 0:
        Path(options.results).write_text(json.dumps({"rate_mbit": rate, "measured": measured}))
    dist.barrier()


def set_up() -> None:
    """Two network namespaces and the pair of devices that joins them."""
    tear_down()
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", f"veth-{HOSTS[0]}", "type", "veth", "peer", "name", f"veth-{HOSTS[1]}")
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("link", "set", f"veth-{host}", "netns", host)
        ip("-n", host, "addr", "add", f"{address}/24", "dev", f"veth-{host}")
        ip("-n", host, "link", "set", f"veth-{host}", "up")
        ip("-n", host, "link", "set", "lo", "up")


def tear_down() -> None:
    """Remove what `set_up` made."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    """Run the ip command."""
    subprocess.run(["ip", *words], check=True)


def report(results: dict[str, Any]) -> None:
    """Print the table and the JSON object."""
    median = {
        name: [statistics.median(values) for values in zip(*steps, strict=True)]
        for name, steps in results["measured"].items()
    }
    table(
        ["", "step (median)", "in waits"],
        [[name, f"{step:.3f} s", f"{wait:.3f} s"] for name, (step, wait) in median.items()],
    )

    def hidden(figure: int) -> float:
        added = {
            way: median[f"limited {way}"][figure] - median[f"free {way}"][figure] for way in ("ping-pong", "blocking")
        }
        return 1 - added["ping-pong"] / added["blocking"]

    print_json(
        hidden=hidden(0),
        hidden_by_wait=hidden(1),
        overhead=median["free ping-pong"][0] / median["free blocking"][0] - 1,
        exchange_share=median["limited blocking"][0] / median["free blocking"][0] - 1,
        rate_mbit=results["rate_mbit"],
    )


def main() -> None:
    """Make the hosts, run a rank on each, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind; at least 12 for a stable median")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--trace", help="folder for a profiler trace of one ping-pong step of each rank")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", default="/tmp/distca-overlap.json", help="where rank 0 writes what it measured")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options)
        return
    if os.geteuid() != 0:
        sys.exit("benchmarks/overlap.py makes network namespaces and limits a link: run it as root")
    set_up()
    try:
        command = [sys.executable, *sys.argv]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", host, *command, "--rank", str(rank)])
            for rank, host in enumerate(HOSTS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")
    finally:
        tear_down()
    report(json.loads(Path(options.results).read_text()))


if __name__ == "__main__":
    main()
