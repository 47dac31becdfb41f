"""Calls between a rank and a server, two processes, over each transport in turn: how fast, and what
they cost.

A call carries so many bytes to the server, which sends as many back and computes nothing: payloads
as in a layer. A round has calls of every size over every transport, in shuffled order; figures are
named transport_figure_size.

  gbs         GB/s, counted both ways, from the call to the complete reply
  cpu_s_gb    CPU seconds of both processes, for a GB
  blocked_ms  how long the caller's own thread was held: putting rows where they are sent from, and
              queueing the call

    python benchmarks/transport.py --rounds 9 | tail -1 > benchmarks/results/transport.json
"""

import multiprocessing
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
from harness import end_with_parent
from harness.rounds import Round, over, report, rounds_parser, take_rounds

from hf_distca.plan import AttentionKind
from hf_distca.pool.messages import Call, Message, RankHello, Reply, TensorSpec
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import Choice, choose, make_memory, rank_hello
from hf_distca.pool.wire import SERVER, Channel, Listener

TRANSPORTS = (Choice.TCP, Choice.NIXL)
ROWS = TensorSpec("q", "queries", (512,), "bfloat16")
"""1 KiB a row."""
ROUND_MB = 64
"""A figure is the median of so many calls that they carry this much, of three at least."""

# A call names the number of its rows instead of a nano-batch.
CALL = Call(0, 0, 0, AttentionKind(None, 1, 1, 1, 1), "forward", 1.0, None, "bfloat16")
CPU = torch.device("cpu")


def serve(token: bytes, own: Connection) -> None:
    """The server's process: sends every call's rows back, and reports its CPU time when asked."""
    end_with_parent()
    torch.set_num_threads(1)
    memory = {choice: make_memory(choice, CPU, "127.0.0.1") for choice in TRANSPORTS}

    def echo(choice: Choice, channel: Channel, hello: Message) -> None:
        assert isinstance(hello, RankHello)
        transport, welcome = choose(channel, memory[choice], hello)
        channel.send(welcome)
        while True:
            message, size = channel.receive()
            assert isinstance(message, Call)
            rows = memory[choice].empty(ROWS, message.nano_batch)
            transport.receive(message, size, [rows], 60)
            transport.send(Reply(message.call_id, 0.0, 0), [rows], 60)

    listeners = [
        Listener("127.0.0.1", 0, token, SERVER, partial(echo, choice)) for choice in TRANSPORTS
    ]
    own.send([listener.port for listener in listeners])
    while own.recv():
        own.send(time.process_time())


class Calls:
    """Calls to a server's process, over every transport."""

    def __init__(self, sizes: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        token = make_token()
        self._server, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(token, theirs), daemon=True)
        self._process.start()
        self._memory = {choice: make_memory(choice, CPU, "127.0.0.1") for choice in TRANSPORTS}
        self._links = {
            choice: ServerLink("127.0.0.1", port, token, rank_hello(0, memory), 30, 60, memory)
            for (choice, memory), port in zip(
                self._memory.items(), self._server.recv(), strict=True
            )
        }
        self._given = {
            mb: torch.randint(0, 100, (mb * 1024, *ROWS.shape)).to(torch.bfloat16) for mb in sizes
        }
        self._order = random.Random(0)
        self.round()  # which touches memory for the first time

    def round(self) -> Round:
        figures = {}
        cases = [(choice, mb) for choice in TRANSPORTS for mb in self._given]
        for choice, mb in self._order.sample(cases, len(cases)):
            calls = [self._call(choice, self._given[mb]) for _ in range(max(3, ROUND_MB // mb))]
            for name in calls[0]:
                figures[f"{choice}_{name}_{mb}"] = statistics.median(call[name] for call in calls)
        return figures

    def _call(self, choice: Choice, given: torch.Tensor) -> dict[str, float]:
        rows, memory, link = (
            given.clone(),
            self._memory[choice],
            self._links[choice],
        )  # as taken from the rank's rows
        before = self._cpu_s()
        begin = time.perf_counter()
        staged, ready = memory.stage([rows])
        results = memory.empty(ROWS, len(rows))
        answer = link.call(replace(CALL, nano_batch=len(rows)), staged, {"q": results}, ready)
        blocked = time.perf_counter() - begin
        del rows, staged
        link.wait(answer, 60)
        seconds = time.perf_counter() - begin
        cost = self._cpu_s() - before
        if not torch.equal(results, given):
            raise RuntimeError(f"{choice}: other rows came back")
        both_ways = 2 * given.nbytes / 1e9
        return {
            "gbs": both_ways / seconds,
            "cpu_s_gb": cost / both_ways,
            "blocked_ms": 1e3 * blocked,
        }

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._server.send(False)
        self._process.join()

    def _cpu_s(self) -> float:
        self._server.send(True)
        return time.process_time() + float(self._server.recv())


def main() -> None:
    parser = rounds_parser(__doc__, rounds=9)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = Calls(options.mb)
    try:
        measured = take_rounds(options, calls.round)
    finally:
        calls.close()
    report(
        measured,
        {f"nixl_over_tcp_{mb}": over(f"nixl_gbs_{mb}", f"tcp_gbs_{mb}") for mb in options.mb},
    )


if __name__ == "__main__":
    main()
