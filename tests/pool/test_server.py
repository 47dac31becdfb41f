"""An attention server and ranks that know what must come back, or strangers and what it must not be
impressed by.
"""

import json
import signal
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from random import Random
from socket import create_connection
from unittest.mock import Mock, patch

import numpy as np
import psutil
import pytest
import torch

from hf_distca.kernels.cpu import CpuKernel
from hf_distca.pool import server as servers
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Alive, End, Places, Reply, plan_tables
from hf_distca.pool.server import KEPT, AttentionServer
from hf_distca.pool.token import make_token, write_token
from hf_distca.pool.transport import Choice, rank_hello
from hf_distca.pool.wire import SERVER, VERSION, Channel, LinkLost, MismatchError
from tests.planner.plan_checks import loads_by_row
from tests.pool.ends import (
    CPU,
    FULL,
    SLIM,
    TOKEN,
    FakeRank,
    ServeCommand,
    alike,
    data_of,
    framed,
    make_call,
    make_nano_batch,
    memory_of,
    message,
    needs_nixl,
    run_calls,
    wait_until,
)

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed

CALL = make_call(3)
NANO_BATCHES = [make_nano_batch([300, 37, 1, 255], 2, seed) for seed in (1, 2)]
DATA = data_of(NANO_BATCHES[0].plans[FULL], CALL)


@pytest.fixture
def make_server(request):
    def make(kernel=None, **options):
        server = AttentionServer(TOKEN, CPU, kernel or CpuKernel(), **options)
        request.addfinalizer(server.close)
        return server

    return make


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def connect(request, server):
    """Connects ranks, by default two to the server that is worker 2 of 3."""

    def connect(*ranks, to=server, worker=2):
        made = [FakeRank(to.port, rank, worker) for rank in ranks or (0, 1)]
        for rank in made:
            request.addfinalizer(rank.link.close)
        return made

    return connect


def refused(rank, error, call=None):
    """A rank's call, by default one that no plan knows, comes back with an error."""
    with pytest.raises(LinkLost, match=error):
        rank.link.wait(rank.link.call(call or make_call(), [torch.zeros(10)], {}, lambda: None), 30)


class WithoutSoftcap(CpuKernel):
    def check(self, need, device):
        if need.params.softcap is not None:
            raise ValueError("no softcap")


@pytest.fixture
def ranks(connect):
    """Two ranks of a server with the CPU kernel."""
    return connect()


def test_pairs_are_those_of_the_plan(server, ranks):
    ranks[0].send_plan(5, NANO_BATCHES)
    run_calls(ranks, 5, NANO_BATCHES)
    assert 0 < ranks[0].replies[-1].seconds < server.busy_s
    plan_pairs = sum(
        sum(loads_by_row(plan)) for nano in NANO_BATCHES for plan in nano.plans.values()
    )
    assert sum(reply.pairs for reply in ranks[0].replies) == 2 * plan_pairs


def test_another_kernel_computes_what_the_servers_own_cannot(make_server, connect):
    choose = Mock(return_value=CpuKernel())
    ranks = connect(to=make_server(WithoutSoftcap(), choose=choose))
    ranks[0].send_plan(5, NANO_BATCHES[:1])
    number = run_calls(ranks, 5, NANO_BATCHES[:1])
    choose.assert_not_called()
    run_calls(ranks, 5, NANO_BATCHES[:1], number, softcap=2.0)
    needs = [call.args[0] for call in choose.call_args_list]
    assert {(need.dtype, need.params.softcap) for need in needs} == {(torch.float32, 2.0)}


@pytest.mark.parametrize(
    ("dtype", "tolerance", "dtype_of_lse"),
    [
        ("float64", 1e-9, "float64"),
        ("bfloat16", 5e-2, "float32"),  # never a half precision
        ("float16", 1e-2, "float32"),
    ],
)
def test_results_in_every_dtype(ranks, dtype, tolerance, dtype_of_lse):
    ranks[0].send_plan(5, NANO_BATCHES[:1])
    run_calls(ranks, 5, NANO_BATCHES[:1], dtype=dtype, tolerance=tolerance)
    dtypes = {spec.name: spec.dtype for spec in make_call(dtype=dtype).reply()}
    assert dtypes["lse"] == dtype_of_lse


@pytest.mark.parametrize("seed", range(8))
def test_results_are_those_of_the_reference(ranks, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 90, rng.integers(1, 6))
    kinds = (SLIM, replace(SLIM, window=40))
    nano_batches = [make_nano_batch(lengths, 2, seed, kinds)]
    ranks[0].send_plan(5, nano_batches)
    run_calls(ranks, 5, nano_batches)


def test_a_server_whose_kernel_cannot_compute_a_planned_call_leaves_the_run(
    request, make_server, connect, monkeypatch
):
    monkeypatch.setattr(servers, "measure_speed", alike)
    directory = Directory("127.0.0.1", 0, TOKEN)
    server = make_server(WithoutSoftcap())
    request.addfinalizer(directory.close)
    with ThreadPoolExecutor(1) as beside, ExitStack() as at_end:
        at_end.callback(server.stop)  # so that a server that stays does not hold up the test
        serving = beside.submit(server.run, "127.0.0.1", directory.port, 60, lambda line: None)
        wait_until(directory.members)
        stranger, *_ = connect(to=server)
        stranger.send_plan(0, NANO_BATCHES)
        unplanned = replace(CALL, nano_batch=2, softcap=2.0)
        refused(stranger, "no tasks of nano-batch 2", unplanned)
        assert not serving.done()
        ranks = connect(to=server)
        ranks[0].send_plan(0, NANO_BATCHES)
        refused(ranks[0], "cannot use this Call: no softcap", replace(CALL, softcap=2.0))
        with pytest.raises(
            MismatchError, match=r"no softcap\. Ranks need .* start it with --attention-kernel auto"
        ):
            serving.result(30)
        wait_until(lambda: not directory.members())


def test_a_call_may_overtake_its_plan_which_is_forgotten_or_waited_for_in_vain(
    make_server, server, connect, monkeypatch
):
    asked = threading.Event()
    begin = server._begin
    ranks = connect()
    monkeypatch.setattr(server, "_begin", lambda *args: asked.set() or begin(*args))
    second = ranks[1].start(CALL, DATA)
    assert asked.wait(30)
    ranks[0].send_plan(0, NANO_BATCHES)
    first = ranks[0].start(CALL, DATA)
    ranks[1].finish(second)
    ranks[0].finish(first)
    for number in range(1, KEPT + 1):
        ranks[0].send_plan(number, NANO_BATCHES)
    run_calls(ranks, KEPT, NANO_BATCHES[:1], 10)
    run_calls(ranks, 1, NANO_BATCHES[:1], 100)
    refused(ranks[1], f"plan 0 is no longer kept; the latest is {KEPT}")
    monkeypatch.setattr(servers, "PLAN_WAIT_S", 0.1)
    refused(*connect(1, to=make_server()), r"plan 0 did not arrive within 0\.1 s")


@pytest.mark.parametrize("fields", [{"scale": 0.5}, {"nano_batch": 1}, None, "leaves"])
def test_a_rank_that_leaves_in_a_call_or_makes_another_is_told_to_the_others(
    server, connect, fields
):
    ranks = connect()
    ranks[0].send_plan(0, [NANO_BATCHES[0]] * 2)
    started = ranks[0].start(CALL, DATA)
    wait_until(lambda: server._open)
    if fields == "leaves":
        ranks[1].link.close()
    else:  # under the same id, or the same call twice
        sender = ranks[bool(fields)]
        with pytest.raises(
            LinkLost, match="call 3 differs from the call of other ranks, or was made twice"
        ):
            sender.finish(sender.start(replace(CALL, **(fields or {})), DATA))
    if fields:
        with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
            ranks[0].finish(started)


def test_ranks_may_connect_again(server, connect):
    ranks = connect()
    ranks[0].send_plan(7, NANO_BATCHES)
    ranks[1].link.close()
    wait_until(lambda: server._plans and 1 not in server._links)
    (again,) = connect(0)
    assert not server._plans  # rank 0 may have begun anew
    again.send_plan(0, NANO_BATCHES)
    refused(again, "rank 1, which is not connected")
    again = connect(1, 0)[::-1]
    again[0].send_plan(0, NANO_BATCHES)
    number = run_calls(again, 0, NANO_BATCHES[:1], 4)
    run_calls([again[0], *connect(1)], 0, NANO_BATCHES[:1], number)
    with pytest.raises(LinkLost, match="connected again"):
        run_calls(again[1:], 0, NANO_BATCHES, 50)


def test_a_call_that_does_not_fit_is_refused_and_others_are_served(connect):
    # Everything is on one rank, so that the other may leave.
    nano_batches = [make_nano_batch([64], 1, 0)]
    data = data_of(nano_batches[0].plans[FULL], CALL)
    for fields, error in (
        ({"nano_batch": 2}, "no tasks of nano-batch 2"),
        ({"kind": replace(FULL, window=41)}, "no tasks of nano-batch 0, a window of 41"),
        ({"direction": "backward"}, "bytes, expected"),
        ({"dtype": "int8"}, "'int8' is no"),
        ({"softcap": -1.0}, "cannot use this Call: softcap must be positive"),
    ):
        good, bad = connect(worker=1)
        good.send_plan(0, nano_batches)
        started = good.start(CALL, data)
        wrong = replace(CALL, call_id=11, **fields)
        refused(
            bad, f"{error}|no tasks of nano-batch 0, .*, for rank 1", wrong
        )  # a rank without rows makes no call
        good.finish(started)
        refused(good, error, wrong)


def test_a_plan_that_does_not_fit_ends_the_connection_alone(connect):
    (second,) = connect(1)
    (message, tables) = plan_tables(0, 2, NANO_BATCHES)
    for sent, error in (
        ((replace(message, worker=1), tables), "worker 1 is no server"),
        ((replace(message, tables=((1,) * 7,)), tables), "sent an unexpected PlanTables with"),
        ((message, [np.full_like(table, 255) for table in tables]), "cannot use this PlanTables: "),
        ((End(),), "rank 0 sent an unexpected End"),
    ):
        (rank,) = connect(0)
        rank.link.send(*sent)
        refused(rank, error)
    (again,) = connect(0)
    again.send_plan(0, NANO_BATCHES)
    run_calls([again, second], 0, NANO_BATCHES)
    second.send_plan(1, NANO_BATCHES)
    refused(second, "rank 1 sent an unexpected PlanTables")


def test_a_server_outlives_a_kernel_that_fails_says_what_it_does_and_ends_with_training(
    request, make_server, connect, monkeypatch
):
    for name, value in (("STATUS_S", 0.1), ("ALIVE_S", 0.1), ("measure_speed", lambda *_: 5e6)):
        monkeypatch.setattr(servers, name, value)
    alive = []
    lines = []
    kernel = CpuKernel()
    monkeypatch.setattr(servers, "Alive", lambda: alive.append(1) or Alive())
    server = make_server(kernel)
    directory = Directory("127.0.0.1", 0, TOKEN)
    request.addfinalizer(directory.close)
    running = threading.Thread(
        target=server.run, args=("127.0.0.1", directory.port, 30, lines.append), daemon=True
    )
    running.start()
    wait_until(directory.members)
    member = directory.members()[0]
    assert member.host == "127.0.0.1"
    assert member.port == server.port
    assert member.device == "cpu"
    assert member.pairs_per_second == 5e6
    failing = patch.object(kernel, "forward", side_effect=RuntimeError("out of memory"))
    ranks = connect(to=server)
    ranks[0].send_plan(0, NANO_BATCHES)
    with failing, pytest.raises(LinkLost, match="call 0 failed: out of memory"):
        run_calls(ranks, 0, NANO_BATCHES)
    ranks = connect(to=server)
    ranks[0].send_plan(0, NANO_BATCHES)
    run_calls(ranks, 0, NANO_BATCHES, 1)
    wait_until(lambda: any("2 ranks" in line and "tasks/s; busy" in line for line in lines))
    wait_until(lambda: len(alive) > 1)
    directory.drop(0)  # it comes back under another number
    wait_until(directory.members)
    assert list(directory.members()) == [1]
    directory.end()
    running.join(30)
    assert not running.is_alive()
    assert lines[-1] == "training has ended"


class Stranger:
    """Random inputs to a server: without the token, or with the token nonsense.

    A stranger that knows the token claims to be rank 7, which the plan does not know.
    """

    def __init__(self, random, port, token, nano_batches, memory):
        self.random = random
        self.port = port
        self.token = token
        self.hello = replace(rank_hello(7, memory), required=False)
        (plan, tables) = plan_tables(0, 2, nano_batches)
        call = make_call(5, kind=SLIM)
        self.valid = [
            message(plan, b"".join(table.tobytes() for table in tables)),
            message(call, bytes(1000)),
            message(call, payload_bytes=2**50),
            message(replace(call, places=Places(((4096, 1000),), (), ""))),
            message(self.hello),
            message(Alive()),
            message(Reply(5, 0.0, 0), bytes(8)),
            message(End()),
        ]

    def connect(self):
        """Send one random input, and return the connection."""
        # A first message is sane, or none: a changed one might become that of a true peer.
        start = self.random.choice([b"", message(self.hello)])
        valid = self.random.choice(self.valid)
        noise = self.random.randbytes(self.random.choice([0, 1, 10, 28, 100, 3000]))
        match self.random.randrange(8 if self.hello.nixl else 7):
            case 0:
                return self.send(noise)
            case 1:
                return self.send(self.part_of_a_handshake())
            case 2:
                return self.prove_and_send(b"", make_token())
            case 3:
                return self.prove_and_send(start + noise)
            case 4:
                return self.prove_and_send(start + self.large_message())
            case 5:
                return self.prove_and_send(message(self.hello) + self.with_other_bytes(valid))
            case 6:
                return self.prove_and_send(message(self.hello) + self.with_another_field(valid))
            case 7:
                return self.prove_and_send(self.hello_of_another_agent(noise))

    def send(self, data):
        sock = create_connection(("127.0.0.1", self.port), 5)
        sock.sendall(data)
        return sock

    def prove_and_send(self, data, token=None):
        channel = Channel(self.send(b""))
        channel.prove(token or self.token, SERVER, 5, connects=True)
        channel._sock.sendall(data)
        return channel

    def part_of_a_handshake(self):
        greeting = framed(b"hf_distca %d " % VERSION + self.random.randbytes(32))
        handshake = greeting + framed(self.random.randbytes(32))
        return handshake[: self.random.randint(0, len(handshake))]

    def large_message(self):
        """A message that says that it is large."""
        size = 2 ** self.random.randint(17, 32) - 1
        return size.to_bytes(4, "big") + bytes(1000)

    def with_other_bytes(self, valid):
        """A part of a message, or a message with up to four other bytes."""
        changed = bytearray(valid)
        for _ in range(self.random.randint(0, 4)):
            changed[self.random.randrange(len(valid))] = self.random.randrange(256)
        return changed[: self.random.choice([None, self.random.randrange(len(valid))])]

    def with_another_field(self, valid):
        """A message with another value of a field, or with one field more."""
        end = 4 + int.from_bytes(valid[:4], "big")
        name, fields, payload = json.loads(valid[4:end])
        value = self.random.choice(
            [None, True, 0, -1, 2**62, 10**400, 0.5, "x" * 3000, [], [[1]], {"x": 1}]
        )
        fields[self.random.choice([*fields, "x"])] = value
        size = self.random.choice([payload, value])
        return framed(json.dumps([name, fields, size]).encode()) + valid[end:]

    def hello_of_another_agent(self, noise):
        """A greeting that says something untrue of the agent."""
        field = self.random.choice(["name", "metadata", "probe", "device"])
        number = self.random.choice([0, -1, 2**62])
        value = number if field in ("probe", "device") else noise.hex()
        return message(replace(self.hello, nixl=replace(self.hello.nixl, **{field: value})))


class FakeTraining:
    """Two ranks that let a server compute one plan again and again, until `end`."""

    def __init__(self, port, token, transport):
        self.nano_batches = [make_nano_batch([120, 37, 1, 90], 2, 1, (SLIM,))]
        self.ranks = [FakeRank(port, rank, 2, token, transport) for rank in range(2)]
        self.ranks[0].send_plan(0, self.nano_batches)
        self.calls = 0
        self._over = threading.Event()
        self._future = ThreadPoolExecutor(1).submit(self._train)

    def _train(self):
        while not self._over.is_set():
            self.call()
            time.sleep(0.05)

    def call(self):
        self.calls = run_calls(self.ranks, 0, self.nano_batches, self.calls)

    def has_failed(self):
        return self._future.done()

    def end(self):
        self._over.set()
        self._future.result()


@pytest.fixture
def serving(request, tmp_path):
    """A `hf-distca serve`, its port and the token."""

    def serving(transport):
        token = make_token()
        write_token(tmp_path / "token", token)
        directory = Directory("127.0.0.1", 0, token)
        request.addfinalizer(directory.close)
        files = tmp_path / "token", tmp_path / "output"
        server = ServeCommand(directory.port, *files, "--transport", transport)
        request.addfinalizer(server.close)
        server.wait_for("joined")
        return server, directory.members()[0].port, token

    return serving


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "warm_up", "inputs_after"),
    [(Choice.TCP, 1000, 4000), pytest.param(Choice.NIXL, 400, 1200, marks=needs_nixl)],
)
def test_random_inputs(serving, transport, warm_up, inputs_after):
    server, port, token = serving(transport)
    training = FakeTraining(port, token, transport)
    random = Random(0)
    memory = memory_of(transport, "stranger")
    stranger = Stranger(random, port, token, training.nano_batches, memory)
    resident = psutil.Process(server.process.pid).memory_info
    opened = deque()
    inputs = 0
    calls_before = 0
    bytes_before = 0
    # Until all inputs were sent, and twenty calls answered after the warm-up.
    while not training.has_failed() and (
        inputs < warm_up + inputs_after or training.calls <= calls_before + 20
    ):
        if inputs == warm_up:
            bytes_before = resident().rss
            calls_before = training.calls
        inputs += 1
        with suppress(LinkLost, OSError):  # the listener was quicker
            opened.append(stranger.connect())
        for _ in range(len(opened) - random.randint(0, 30)):  # some stay for a while
            opened.popleft().close()
    grown = resident().rss - bytes_before
    training.end()
    training.call()
    server.process.send_signal(signal.SIGTERM)  # SIGINT is handled alike
    assert server.process.wait(60) == 0
    for connection in (*opened, *(rank.link for rank in training.ranks)):
        connection.close()
    output = server.output.read_text()
    assert "refusals so far" in output
    assert output.endswith("stopped\n")
    assert "Traceback" not in output
    assert len(output) < 100_000
    assert grown < 20e6
