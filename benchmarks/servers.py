"""Time of a training step of one rank alone, and with one dedicated attention server on the other core.

Forward and backward of a 2-layer LLaMA on 16384 tokens, one thread per process, float32. Its layers have the
proportions of Qwen3-0.6B at an eighth of the width: hidden size 128, 4 query heads and 2 key-value heads of 64, an MLP
of 384. The tokens are one document, so that core attention is most of the work, as in long-context training. A plan
for one rank is not divided into nano-batches. With --documents 8192 8192 the tokens are two documents and, by a plan
made here, two nano-batches that take turns: less attention, but the server works while the rank runs the other
half's projections and MLP. Two variants, interleaved in shuffled order in one run:

  alone   the rank computes everything itself, with the same kernel and no pool
  server  core attention is shared with the server, balanced by finishing time

The first steps, in which the rank learns speeds and its base load, do not count. A virtual core shares its
processor with strangers, so both processes time a small kernel at once before and after each step; the medians are
over the half of the steps in which the slower of these readings was smallest. Those of all steps stand beside them.

  finish_ratio  when the rank is done over when the server is: the rank's own attention and what it does between
                the phases of an attention that the server has rows of, over the server's time in its kernel and,
                where nothing else is computed meanwhile (one document), the time in which rows travel. 1.0: both
                are done at once; the median over the counted steps
  of_rounds     of every round, in which each variant has one step: its speed-up and finish_ratio, median and quartiles

Run: python benchmarks/servers.py [--rounds 6] [--documents 16384] [--transport tcp]
"""

import argparse
import random
import statistics
import sys
import threading
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from harness import Probe, end_with_parent, print_json, spread, table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.kernels import get_kernel
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.pool.directory import Directory
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.rank.speeds import OBSERVED, observe
from hf_distca.pool.server import AttentionServer
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import Choice, make_memory

LEARNING = 4
"""Steps with the server that are left out."""


def serve(port: int, token: bytes, transport: Choice, readings: Connection) -> None:
    """The server's process: serves on threads, and takes a reading when it is asked to."""
    end_with_parent()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    server = AttentionServer(token, device, get_kernel("cpu", device), transport=transport)
    threading.Thread(target=server.run, args=("127.0.0.1", port, 60, lambda line: None), daemon=True).start()
    calm = Probe()
    while readings.recv():
        readings.send(calm.take())
    server.stop()


def plan_of(lengths: list[int], settings: PlanSettings) -> MicroBatchPlan:
    """A plan whose nano-batches are the documents, one each."""
    plans = [plan_placed([[length]], settings) for length in lengths]
    nano_batches = [
        NanoBatch(np.array([number]), plan.nano_batches[0].layout, plan.nano_batches[0].plans)
        for number, plan in enumerate(plans)
    ]
    return MicroBatchPlan(tuple(nano_batches), plans[0].summary)


def measure(lengths: list[int], rounds: int, transport: Choice) -> dict[str, Any]:
    """Steps of both variants on the rank."""
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=serve, args=(directory.port, token, transport, theirs))
    process.start()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=sum(lengths),
        attn_implementation="distca",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    plan_layers(model)
    kernel = get_kernel("cpu", torch.device("cpu"))
    settings = PlanSettings(
        ranks=1,
        tokens_per_rank=sum(lengths),
        kinds=(AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=64, dim_v=64),),
        bytes_per_value=4,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
    )
    dispatchers = {variant: Dispatcher(settings, torch.device("cpu")) for variant in ("alone", "server")}
    memory = make_memory(transport, torch.device("cpu"), "127.0.0.1")
    pool = dispatchers["server"].remote = Pool(dispatchers["server"], token, directory, memory)
    pool.wait_for(1, 60)
    if len(pool.servers) != 1:
        raise RuntimeError("the server did not join")
    plans = {"alone": plan_placed([lengths], settings), "server": plan_of(lengths, settings)}
    tokens = torch.randint(0, 1024, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": tokens, "position_ids": positions, "labels": tokens, "shift_labels": tokens}
    calm = Probe()
    recorder = dispatchers["server"].recorder
    recording = recorder.listen(*OBSERVED)

    def reading() -> float:
        ours.send(True)
        own = calm.take()
        return max(own, ours.recv())

    def step(variant: str) -> dict[str, float]:
        pool.refresh()
        recording.take()
        before, waited = reading(), recorder.seconds("wait")
        kernel = recorder.seconds("kernel")
        begin = time.perf_counter()
        bound = dispatchers[variant].bind(plans[variant])
        model(**batch, distca_plan=bound).loss.backward()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        seen = observe(recording.take())
        return {
            "reading": max(before, reading()),
            "seconds": seconds,
            "waited": recorder.seconds("wait") - waited,
            "own": recorder.seconds("kernel") - kernel,
            "between": seen.between_s,
            "served": sum(served.seconds for served in seen.servers.values()),
            "travel": sum(served.travel_s for served in seen.servers.values()) if len(lengths) == 1 else 0.0,
            "share": seen.pairs / (2 * config.num_hidden_layers * sum(n * (n + 1) // 2 for n in lengths)),
        }

    step("alone")
    for _ in range(LEARNING):
        step("server")
    order = random.Random(0)
    steps: dict[str, list[dict[str, float]]] = {"alone": [], "server": []}
    for _ in range(rounds):
        for variant in order.sample(list(steps), 2):
            steps[variant].append(step(variant))
            print(".", end="", flush=True, file=sys.stderr)
    pool.close()
    ours.send(False)
    process.join(10)
    return steps


def main() -> None:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="steps of each kind")
    parser.add_argument("--documents", type=int, nargs="+", default=[16384], help="1 or 2 lengths, in tokens")
    parser.add_argument("--transport", type=Choice, choices=(Choice.TCP, Choice.NIXL), default=Choice.TCP)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = measure(options.documents, options.rounds, options.transport)
    figures = {variant: summary(calmest(taken)) for variant, taken in steps.items()}
    everything = {variant: statistics.median(step["seconds"] for step in taken) for variant, taken in steps.items()}
    table(
        [
            "",
            "step (median)",
            "of all steps",
            "waited",
            "own attention",
            "between",
            "server busy",
            "rows travel",
            "own share",
        ],
        [
            [
                variant,
                *(f"{f:.3f} s" for f in (figure["seconds"], everything[variant], *(figure[name] for name in PARTS))),
                f"{figure['share']:.3f}",
            ]
            for variant, figure in figures.items()
        ],
    )
    served = calmest(steps["server"])
    print_json(
        transport=options.transport,
        speedup=figures["alone"]["seconds"] / figures["server"]["seconds"],
        speedup_all=everything["alone"] / everything["server"],
        finish_ratio=statistics.median(map(finish_ratio, served)),
        of_rounds={
            "speedup": spread(
                [
                    alone["seconds"] / server["seconds"]
                    for alone, server in zip(steps["alone"], steps["server"], strict=True)
                ]
            ),
            "finish_ratio": spread([finish_ratio(step) for step in steps["server"]]),
        },
        alone_s=figures["alone"]["seconds"],
        server_s=figures["server"]["seconds"],
        **{f"{name}_s": figures["server"][name] for name in PARTS},
        own_share=figures["server"]["share"],
        rounds=options.rounds,
        documents=options.documents,
    )


PARTS = ("waited", "own", "between", "served", "travel")


def calmest(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """The half of the steps around which the small kernel was fastest."""
    return sorted(steps, key=lambda step: step["reading"])[: (len(steps) + 1) // 2]


def finish_ratio(step: dict[str, float]) -> float:
    """When the rank is done over when the server is."""
    return (step["own"] + step["between"]) / (step["served"] + step["travel"])


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


if __name__ == "__main__":
    main()
