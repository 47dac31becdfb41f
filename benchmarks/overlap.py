"""How much of the exchange ping-pong hides: two ranks as two hosts behind a link of limited rate.

The hosts are two network namespaces joined by a veth pair whose rate `tc … tbf` limits, so it needs root and
iproute2. Each round runs a step (forward and backward, no gradient reduction) four ways in shuffled order:
link free or limited, ping-pong or blocking. Blocking waits for every exchange as soon as it is started, and
computes own tasks while nothing is on its way. The rate is chosen so that the blocking exchange adds 35 to
40 % to the step.

    hidden = 1 - (limited ping-pong - free ping-pong) / (limited blocking - free blocking)

by step time, and by the time that a rank stood in waits.

With --trace it limits nothing and needs no root: it traces one ping-pong step and says how much of the exchange lies
under computation, in the forward and in the backward. On GPUs, 8 layers as wide as those of Llama-3-8B, a rank each:

    torchrun --nproc-per-node 8 benchmarks/overlap.py --trace trace.json

Run: sudo python benchmarks/overlap.py [--rounds 12] [--tokens 4096]
     python benchmarks/overlap.py --trace trace.json [--tokens 4096]      two ranks on the CPU
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from covered import DIRECTIONS, Covered, covered_exchange
from harness import print_json, run_ranks, table
from torch.profiler import ProfilerActivity, profile, record_function
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


SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Sizes of the model on the CPU, and on GPUs (Llama-3-8B)."""


class Ranks:
    """One rank's models and its plan, ready to step either way.

    Args:
        tokens: of a rank.
        device: of this rank.
        ways: of WAYS.
    """

    def __init__(self, tokens: int, device: torch.device, ways: Sequence[str] = ("blocking", "ping-pong")) -> None:
        torch.manual_seed(0)
        on_gpu = device.type == "cuda"
        config = LlamaConfig(
            **(WIDE if on_gpu else SMALL),
            vocab_size=1024,
            max_position_embeddings=tokens * dist.get_world_size(),
            attn_implementation="distca",
            use_cache=False,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
        heads = config.num_attention_heads, config.num_key_value_heads
        kinds = (AttentionKind(None, *heads, dim_qk=config.head_dim, dim_v=config.head_dim),)
        settings = PlanSettings(
            ranks=dist.get_world_size(),
            tokens_per_rank=tokens,
            kinds=kinds,
            bytes_per_value=config.dtype.itemsize,
            ping_pong=True,
        )
        self.dispatchers = {way: Dispatcher(settings, device) for way in ways}
        if "blocking" in ways:
            blocking = self.dispatchers["blocking"]
            blocking.exchange = BlockingExchange(blocking.groups)
        self.models = {way: LlamaForCausalLM(config).to(device, config.dtype) for way in ways}
        plan_layers(self.models["ping-pong"])
        # One plan for both, so that they exchange the same bytes. Each nano-batch has a document too long for one
        # rank's share of it, which the joint layout cuts.
        total = tokens * dist.get_world_size()
        self.plan = plan_micro_batch([total * 3 // 8] * 2 + [total // 16] * 4, settings)
        segments = [segment for nano in self.plan.nano_batches for segment in nano.layout.of_rank(dist.get_rank())]
        positions = torch.cat([torch.arange(s["start"], s["stop"]) for s in segments])[None].to(device)
        inputs = torch.randint(0, 1024, positions.shape).to(device)
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


def trace_rank(tokens: int, file: str) -> dict[str, Covered]:
    """Trace a ping-pong step of this rank; rank 0 leaves its trace in the file."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ranks = Ranks(tokens, device, ["ping-pong"])
    model, dispatcher = ranks.models["ping-pong"], ranks.dispatchers["ping-pong"]

    def step() -> None:
        bound = dispatcher.bind(ranks.plan)
        dist.barrier()
        with record_function("forward"):
            loss = model(**ranks.batch, distca_plan=bound).loss
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
    ranks = Ranks(options.tokens, torch.device("cpu"))
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
    parser.add_argument("--tokens", type=int, help="tokens per rank; default 4096, with --trace on GPUs 32768")
    parser.add_argument("--trace", help="file for a profiler trace of one ping-pong step of rank 0")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", default="/tmp/distca-overlap.json", help="where rank 0 writes what it measured")
    options = parser.parse_args()
    if options.trace:
        trace(options)
        return
    options.tokens = options.tokens or 4096
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
