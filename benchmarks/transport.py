"""Calls between a rank and a server, two processes, over each transport in turn: how fast, and what they cost.

A call carries so many bytes to the server, which sends as many back and computes nothing: payloads as in a layer.
GB/s count both ways, from the call to the complete reply. CPU seconds are those of both processes. `blocked_ms` is
how long the caller's own thread was held: putting rows where they are sent from, and queueing the call.

    python benchmarks/transport.py --rounds 7 > benchmarks/results/transport.json
"""

import argparse
import multiprocessing
import statistics
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
from harness import end_with_parent, print_json

from hf_distca.pool.listener import Listener
from hf_distca.pool.memory import Choice, make_memory
from hf_distca.pool.messages import Call, Message, RankHello, Reply, TensorSpec
from hf_distca.pool.rank.members import SERVICE, ServerLink
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import choose, offer
from hf_distca.pool.wire import Channel

TRANSPORTS = (Choice.TCP, Choice.NIXL)
ROWS = TensorSpec("q", "queries", (512,), "bfloat16")
"""1 KiB a row."""

# A call names the number of its rows instead of a nano-batch.
CALL = Call(0, 0, 0, None, "forward", 1.0, None, 1, 1, 1, 1, "bfloat16")
CPU = torch.device("cpu")


def serve(token: bytes, own: Connection) -> None:
    """The server's process: sends every call's rows back, and says what CPU time it took when asked."""
    end_with_parent()
    torch.set_num_threads(1)
    memory = {choice: make_memory(choice, CPU, "127.0.0.1") for choice in TRANSPORTS}

    def echo(choice: Choice, channel: Channel, hello: Message) -> None:
        assert isinstance(hello, RankHello)
        transport, welcome = choose(channel, memory[choice], hello.nixl)
        channel.send(welcome)
        while True:
            frame = channel.receive()
            assert isinstance(frame.message, Call)
            rows = memory[choice].empty(ROWS, frame.message.nano_batch)
            transport.receive(frame, [rows], 60)
            transport.send(Reply(frame.message.call_id, 0.0, 0), [rows], 60)

    listeners = [Listener("127.0.0.1", 0, token, SERVICE, partial(echo, choice)) for choice in TRANSPORTS]
    own.send([listener.port for listener in listeners])
    while own.recv():
        own.send(time.process_time())


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    context, token = multiprocessing.get_context("spawn"), make_token()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(token, theirs), daemon=True)
    process.start()
    ports = ours.recv()
    memory = {choice: make_memory(choice, CPU, "127.0.0.1") for choice in TRANSPORTS}
    links = {
        choice: ServerLink("127.0.0.1", port, token, RankHello(0, 1, offer(memory[choice])), 30, 60, memory[choice])
        for choice, port in zip(TRANSPORTS, ports, strict=True)
    }

    def cpu_s() -> float:
        ours.send(True)
        return time.process_time() + float(ours.recv())

    def call(choice: Choice, given: torch.Tensor) -> dict[str, float]:
        rows = given.clone()  # as taken from the rank's rows
        before, begin = cpu_s(), time.perf_counter()
        staged, ready = memory[choice].stage([rows])
        results = memory[choice].empty(ROWS, len(rows))
        reply = links[choice].call(replace(CALL, nano_batch=len(rows)), staged, [results], ready)
        blocked = time.perf_counter() - begin
        del rows, staged
        reply.wait(60)
        seconds = time.perf_counter() - begin
        cost = cpu_s() - before
        if not torch.equal(results, given):
            raise RuntimeError(f"{choice}: other rows came back")
        both_ways = 2 * given.nbytes / 1e9
        return {"gbs": both_ways / seconds, "cpu_s_per_gb": cost / both_ways, "blocked_ms": 1e3 * blocked}

    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for mb in options.mb:
        given = torch.randint(0, 100, (mb * 1024, *ROWS.shape)).to(torch.bfloat16)
        seen: dict[Choice, list[dict[str, float]]] = {choice: [] for choice in TRANSPORTS}
        for turn in range(options.rounds + 1):
            for choice in TRANSPORTS if turn % 2 else reversed(TRANSPORTS):
                figures = call(choice, given)
                if turn:  # the first one touches memory for the first time
                    seen[choice].append(figures)
        sizes[f"{mb}"] = {
            choice.value: {name: statistics.median(each[name] for each in all_of) for name in all_of[0]}
            for choice, all_of in seen.items()
        }
    for link in links.values():
        link.close()
    ours.send(False)
    process.join()
    ratios = [each["nixl"]["gbs"] / each["tcp"]["gbs"] for each in sizes.values()]
    print_json(
        nixl_over_tcp=statistics.median(ratios),
        tcp_gbs=statistics.median(each["tcp"]["gbs"] for each in sizes.values()),
        nixl_gbs=statistics.median(each["nixl"]["gbs"] for each in sizes.values()),
        blocked_ms_nixl=max(each["nixl"]["blocked_ms"] for each in sizes.values()),
        megabytes=sizes,
    )


if __name__ == "__main__":
    main()
