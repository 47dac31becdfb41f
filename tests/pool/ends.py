"""Ends of connections, ranks without a model that know what must come back, and servers that fail
as tests say.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hf_distca.kernels import TaskShapes
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.reference import ReferenceKernel
from hf_distca.plan import TASK, AttentionKind, NanoBatch, Plan
from hf_distca.planner.layout import fixed_layout, layout_of_kind
from hf_distca.pool.messages import Call, encode, plan_tables
from hf_distca.pool.nixl import is_installed
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.server import AttentionServer, params_of
from hf_distca.pool.transport import Choice, choose, make_memory, rank_end, rank_hello
from hf_distca.pool.wire import Channel

CPU = torch.device("cpu")
TOKEN = bytes(range(32))
FULL = AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
KINDS = (FULL, replace(FULL, window=40), replace(FULL, chunk=32))
SLIM = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
needs_nixl = pytest.mark.skipif(not is_installed(), reason="needs nixl-cu12 or nixl-cu13")


def framed(text):
    """A message's bytes as they travel."""
    return len(text).to_bytes(4, "big") + text


def message(message, payload=b"", payload_bytes=None):
    """The bytes of a message, which may name another size of its payload."""
    return (
        framed(encode(message, len(payload) if payload_bytes is None else payload_bytes)) + payload
    )


@cache
def memory_of(choice, _end="rank"):
    """One for each end of all tests: an agent takes a second to start."""
    return make_memory(choice, CPU, "127.0.0.1")


@contextmanager
def channels():
    """Two channels, connected, whose peers are not asked for a token."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with closing(Channel(left)) as near, closing(Channel(right)) as far:
        yield near, far


@contextmanager
def ends(choice, left=None):
    """A rank's and a server's end of a transport: memory, channel and transport."""
    left = left or memory_of(choice, "rank")
    right = memory_of(choice, "server")
    with channels() as (near, far):
        server, welcome = choose(far, right, rank_hello(0, left))
        assert welcome.transport == choice.upper()
        rank = rank_end(near, left, welcome)
        yield tuple(
            SimpleNamespace(memory=memory, channel=channel, transport=transport)
            for memory, channel, transport in ((left, near, rank), (right, far, server))
        )
        near.shut_down()
        far.shut_down()
        rank.close()
        server.close()


def make_nano_batch(lengths, ranks, seed, kinds=KINDS):
    """Documents packed onto ranks, and tasks of the server behind the ranks: all rows, cut at
    random.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    layout = fixed_layout([lengths.tolist()], ranks)
    plans = {}
    for kind in kinds:
        seen = layout_of_kind(layout, kind)
        tasks = []
        for document, length in enumerate(seen.lengths):
            cuts = np.unique(np.concatenate([[0], rng.integers(0, length, 5), [length]]))
            tasks += [(document, start, stop, ranks) for start, stop in itertools.pairwise(cuts)]
        plans[kind] = Plan(seen, np.array(tasks, TASK), ranks + 1, kind.window)
    return NanoBatch(np.arange(len(lengths)), layout, plans)


def make_call(
    call_id=0,
    plan_id=0,
    nano_batch=0,
    kind=FULL,
    direction="forward",
    dtype="float32",
    softcap=None,
):
    return Call(plan_id, call_id, nano_batch, kind, direction, 0.3, softcap, dtype)


def data_of(plan, call, seed=0):
    """Random rows of each rank for one call, and their results in float64, by name."""
    generator = torch.Generator().manual_seed(seed)
    kind = call.kind
    layout = plan.layout
    heads = ((kind.q_heads, kind.dim_qk), (kind.kv_heads, kind.dim_qk), (kind.kv_heads, kind.dim_v))
    q, k, v, do = (
        torch.randn((layout.lengths.sum(), *shape), generator=generator)
        .to(getattr(torch, call.dtype))
        .double()
        for shape in (*heads, (kind.q_heads, kind.dim_v))
    )
    shapes = TaskShapes.build(layout.lengths.tolist(), layout.lengths.tolist(), "cpu")
    kernel = ReferenceKernel()
    o, lse = kernel.forward(q, k, v, shapes, params_of(call))
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, shapes, params_of(call))
    columns = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    segments = [layout.of_rank(rank) for rank in range(layout.ranks)]
    counts = [int((segment["stop"] - segment["start"]).sum()) for segment in segments]
    of_ranks = zip(*(x.split(counts) for x in columns.values()), strict=True)
    return [dict(zip(columns, segment, strict=True)) for segment in of_ranks]


class FakeRank:
    """One rank and its link to a server; `replies` so far."""

    def __init__(self, port, rank, worker, token=TOKEN, choice=Choice.TCP):
        self.rank = rank
        self.worker = worker
        self.replies = []
        self._memory = memory_of(choice)
        self.link = ServerLink(
            "127.0.0.1", port, token, rank_hello(rank, self._memory), 10, 60, self._memory
        )

    def send_plan(self, plan_id, nano_batches):
        self.link.send(*plan_tables(plan_id, self.worker, nano_batches))

    def start(self, call, data):
        """Send this rank's rows."""
        rows = data[self.rank]
        results = {
            spec.name: self._memory.empty(spec, len(rows[spec.name])).fill_(np.nan)
            for spec in call.reply()
        }
        sent, ready = self._memory.stage(
            [rows[spec.name].to(getattr(torch, spec.dtype)) for spec in call.request()]
        )
        return self.link.call(call, sent, results, ready), rows

    def finish(self, started, tolerance=2e-4):
        """Wait for the reply and compare it."""
        answer, expected = started
        self.replies.append(self.link.wait(answer, 30))
        for name, got in answer.results.items():
            torch.testing.assert_close(got.double(), expected[name], rtol=tolerance, atol=tolerance)


def run_calls(ranks, plan_id, nano_batches, call_id=0, tolerance=2e-4, **options):
    """Every nano-batch and kind of attention, both directions, on all ranks; the id after the last
    call.
    """
    for index, nano_batch in enumerate(nano_batches):
        for kind, plan in nano_batch.plans.items():
            for direction in ("forward", "backward"):
                call = make_call(call_id, plan_id, index, kind, direction, **options)
                data = data_of(plan, call, call_id)
                started = [rank.start(call, data) for rank in ranks]
                for rank, started_call in zip(ranks, started, strict=True):
                    rank.finish(started_call, tolerance)
                    assert rank.replies[-1].call_id == call_id
                call_id += 1
    return call_id


SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "cut off": signal.SIGUSR1}
"""By which a server fails. One that is cut off loses all its connections and lives on."""


def state_of(pid):
    """The letter that ps shows of a process, or a task of one; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def cut_off(*_):
    """End every TCP connection of this process; what it listens on stays."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.family == socket.AF_INET:
                connection.getpeername()  # fails for a socket that listens
                connection.shutdown(socket.SHUT_RDWR)


class FaultyKernel(CpuKernel):
    """The CPU kernel, in the first of whose calls in a direction a fault comes once the file
    `trigger` is there.
    """

    def __init__(self, fault, direction, trigger):
        self._fault = fault
        self._trigger = trigger
        setattr(self, direction, partial(self._strike, getattr(self, direction)))

    def _strike(self, compute, *args):
        if self._fault and self._trigger.exists():
            fault, self._fault = self._fault, None  # a server that is only cut off comes back
            if fault == "cut off":
                cut_off()
            else:
                os.kill(os.getpid(), SIGNALS[fault])
        return compute(*args)


def serve(port, transport, fault=None, join_when=None):
    """Be a server that joins the directory at a port of this machine, once the file `join_when` is
    there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, cut_off)
    if join_when is not None:
        wait_until(join_when.exists, 60)
    server = AttentionServer(
        TOKEN, CPU, FaultyKernel(*fault) if fault else CpuKernel(), transport=transport
    )
    with patch("hf_distca.pool.server.measure_speed", alike):
        server.run("127.0.0.1", port, 60, lambda line: None)
    server.close()


class ServeCommand:
    """`hf-distca serve` for a directory at a port of this machine; its output and errors go to the
    file `output`.
    """

    def __init__(self, port, token_file, output, *options):
        self.output = output
        command = [
            sys.executable,
            "-m",
            "hf_distca.cli.main",
            "serve",
            "--join",
            f"127.0.0.1:{port}",
        ]
        command += ["--token-file", str(token_file), "--threads", "1", *options]
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def wait_for(self, words):
        """Wait until it has said something."""
        wait_until(lambda: words in self.output.read_text() or self.process.poll() is not None, 100)
        assert words in self.output.read_text(), self.output.read_text()

    def close(self):
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def wait_until(condition, timeout_s=30):
    """Wait until a function returns something true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alike(*_):
    """In place of `measure_speed`, which takes most of a second: all workers compute a million
    pairs a second.
    """
    return 1e6
