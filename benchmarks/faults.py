"""A training whose attention servers are killed at random moments, against the same training
without servers.

Two ranks train a small LLaMA in float64 with up to three servers, each a process of its own. After
random times one of the servers that have joined is killed (SIGKILL) and another one is started,
which takes part from an optimizer step soon after. When enough were killed, training ends, and as
many steps are trained again without servers.

Over so many steps rounding must not hide what is lost: the model and its loss are in float64
(transformers' own loss rounds the logits to float32), and descent is without momentum. With a
momentum of 0.9 a difference of 1e-9 at step 20 grew to 0.5 by step 500; without, to 5e-8.

  transport     what carries rows
  kills         servers killed after they had joined
  in_a_call     losses that ranks noticed while a server owed them results, which they computed
                themselves
  lost          steps whose loss is not that of the training without servers, to 1e-9
  max_rel_diff  over the parameters at the end: largest difference over the largest magnitude

Run: python benchmarks/faults.py [--kills 100] [--transport tcp]
"""

import logging
import random
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import end_with_parent, free_port, options_parser, print_json, run_ranks, table
from harness.models import rows_of_rank
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.kernels import get_kernel
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.pool.directory import Directory
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.server import AttentionServer
from hf_distca.pool.transport import Choice, make_memory

CPU = torch.device("cpu")
TOKEN = bytes(range(32))
ALIVE = 3
"""Servers at once."""
MOST_SECONDS = 300
"""Training ends then, however many were killed."""
VOCABULARY = 64
PRELOADED = [
    "transformers.models.llama.modeling_llama",
    "hf_distca.dispatch.dispatcher",
    "hf_distca.pool.server",
    "harness",
]


class Losses(logging.Handler):
    """Counts servers that the pool reports as lost."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.in_a_call = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.all += "lost attention server" in message
        self.in_a_call += "computed by the ranks" in message


def serve(port: int, transport: Choice, joined: Connection) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    server = AttentionServer(TOKEN, CPU, get_kernel("cpu", CPU), transport=transport)

    def report(line: str) -> None:
        if line.startswith("joined"):
            joined.send(True)

    server.run("127.0.0.1", port, 60, report)
    server.close()


class Killer(threading.Thread):
    """Keeps servers running and kills one after another."""

    def __init__(self, port: int, transport: Choice, kills: int, seed: int, enough: Path) -> None:
        super().__init__(daemon=True)
        self.killed = 0
        self._port = port
        self._transport = transport
        self._kills = kills
        self._enough = enough
        self._random = random.Random(seed)
        self._context = get_context("forkserver")
        # What this file imports; else every server does it anew, which takes seconds.
        self._context.set_forkserver_preload(PRELOADED)
        self._servers: list[tuple[Any, Connection]] = []

    def run(self) -> None:
        end = time.monotonic() + MOST_SECONDS
        while self.killed < self._kills and time.monotonic() < end:
            while len(self._servers) < ALIVE:
                self._start()
            time.sleep(self._random.uniform(0.1, 0.9))
            joined = [server for server in self._servers if server[1].poll()]
            if joined:
                victim = self._random.choice(joined)
                self._servers.remove(victim)
                victim[0].kill()
                self.killed += 1
                print(".", end="", flush=True, file=sys.stderr)
        self._enough.touch()

    def close(self) -> None:
        self.join()
        for process, _ in self._servers:
            process.kill()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(self._port, self._transport, theirs), daemon=True
        )
        process.start()
        self._servers.append((process, ours))


def train(
    port: int | None, transport: Choice, steps: int | None, enough: str
) -> tuple[list[float], list[Tensor], tuple[int, int]]:
    """Train on every rank, without servers if `port` is None, until the file `enough` is there if
    `steps` is None.

    Returns:
        The loss of every step, the parameters at the end, and how many servers were lost, in a call
        or at all.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_implementation="distca",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).double()
    plan_layers(model)
    kinds = (AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=8, dim_v=8),)
    settings = PlanSettings(ranks, 4096, kinds, balance_block_size=8, ping_pong=True)
    dispatcher = Dispatcher(settings, CPU)
    seen = Losses()
    pool = None
    logging.getLogger("hf_distca.pool").addHandler(seen)
    if port is not None:
        directory = Directory("127.0.0.1", port, TOKEN) if rank == 0 else None
        memory = make_memory(transport, CPU, "127.0.0.1")
        pool = dispatcher.remote = Pool(dispatcher, TOKEN, directory, memory, timeout_s=30)
        pool.wait_for(1, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    while not dispatcher.groups.any_of(
        [Path(enough).exists() if steps is None else len(losses) == steps]
    )[0]:
        if pool is not None:
            pool.refresh()
        choose = random.Random(len(losses))
        lengths = [choose.randint(2, 120) for _ in range(8)]
        generator = torch.Generator().manual_seed(len(losses))
        documents = [
            torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths
        ]
        plan = plan_micro_batch(lengths, settings)
        rows = rows_of_rank(plan, rank, documents, CPU)
        inputs = {name: rows[name] for name in ("input_ids", "position_ids")}
        logits = model(**inputs, distca_plan=dispatcher.bind(plan)).logits
        loss = cross_entropy(logits[0], rows["shift_labels"][0], reduction="sum") / (
            sum(lengths) - len(lengths)
        )
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    if pool is not None:
        pool.close()
    return (
        losses,
        [parameter.detach() for parameter in model.parameters()],
        (seen.in_a_call, seen.all),
    )


def main() -> None:
    parser = options_parser(
        __doc__, kills=(100, "servers to kill"), seed=(0, "of victims and moments")
    )
    parser.add_argument(
        "--transport", type=Choice, choices=(Choice.TCP, Choice.NIXL), default=Choice.TCP
    )
    options = parser.parse_args()
    port = free_port()
    transport = options.transport
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        enough = Path(folder) / "enough"
        killer = Killer(port, transport, options.kills, options.seed, enough)
        killer.start()
        losses, parameters, (in_a_call, noticed) = run_ranks(
            2, train, port, transport, None, str(enough)
        )[0]
        killer.close()
        expected, reference, _ = run_ranks(2, train, None, transport, len(losses), str(enough))[0]
    seconds = time.monotonic() - begin
    lost = sum(
        abs(got - loss) > 1e-9 * abs(loss) for got, loss in zip(losses, expected, strict=True)
    )
    diff = max(
        ((got - other).abs().max() / other.abs().max()).item()
        for got, other in zip(parameters, reference, strict=True)
    )
    rows = [
        ["servers killed", f"{killer.killed}"],
        ["losses noticed", f"{noticed}, {in_a_call} of them in a call"],
        ["optimizer steps", f"{len(losses)}, {lost} lost"],
        ["parameters differ by", f"{diff:.2e}"],
        ["seconds", f"{seconds:.0f}"],
    ]
    table(["", "2 ranks, up to 3 servers"], rows)
    print_json(
        transport=transport,
        kills=killer.killed,
        lost=lost,
        max_rel_diff=diff,
        in_a_call=in_a_call,
        noticed=noticed,
        steps=len(losses),
    )


if __name__ == "__main__":
    main()
