"""Thousands of things that a server must not be impressed by, while it serves."""

import threading
import time
from dataclasses import replace

import pytest

from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Alive, End, Places, Reply, plan_tables
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import Choice, rank_hello
from hf_distca.pool.wire import SERVER
from tests.pool.server.fake_ranks import SLIM, FakeRank, make_call, make_nano_batch, run_calls
from tests.pool.servers import ServeCommand
from tests.pool.strangers import Strangers, message
from tests.pool.transport.ends import memory_of, needs_nixl


class NixlStrangers(Strangers):
    """Some of them have an agent, and say of it what is not so."""

    def __init__(self, *args, sane, **options):
        super().__init__(*args, **options)
        self.sane = sane
        self.kinds.append(self.changed_agent)

    def changed_agent(self):
        field = self.random.choice(["name", "metadata", "probe", "device"])
        text = self.random.randbytes(self.random.choice([1, 10, 1000])).hex()
        value = self.random.choice([0, -1, 2**62] if field in ("probe", "device") else ["", text])
        return self.authenticated(message(replace(self.sane, nixl=replace(self.sane.nixl, **{field: value}))))


def strangers_at(port, token, nano_batches, memory):
    """Those that know the token claim to be rank 7 of 8, which the plan does not know."""
    plan, tables = plan_tables(0, 2, nano_batches)
    call = make_call(0, 5, 0, SLIM, "forward")
    sane = replace(rank_hello(7, 8, memory), required=False)
    valid = [
        message(sane),
        message(plan, b"".join(table.tobytes() for table in tables)),
        message(Alive()),
        message(call, bytes(1000)),
        message(call, payload_bytes=2**50),
        message(Reply(5, 0.0, 0), bytes(8)),
        message(End()),
    ]
    if sane.nixl:
        valid.append(message(replace(call, places=Places(((4096, 1000),), (), ""))))
        return NixlStrangers(port, token, SERVER, message(sane), valid, seed=0, sane=sane)
    return Strangers(port, token, SERVER, message(sane), valid, seed=0)


@pytest.mark.parametrize(
    ("transport", "warm_up", "inputs_after"),
    [(Choice.TCP, 1000, 4000), pytest.param(Choice.NIXL, 400, 1200, marks=needs_nixl)],
)
def test_random_inputs(tmp_path, transport, warm_up, inputs_after):
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    server = ServeCommand(directory.port, token, tmp_path / "output", "--transport", transport)
    try:
        server.wait_for("joined")
        port = directory.members()[0].port
        nano_batches = [make_nano_batch([120, 37, 1, 90], 2, 1, 1, kinds=(SLIM,))]
        memory = memory_of(transport, "rank")
        ranks = [FakeRank(port, token, rank, 2, 2, memory) for rank in range(2)]
        ranks[0].send_plan(0, nano_batches)
        served, failures, over = [0], [], threading.Event()

        def train():
            try:
                while not over.is_set():
                    served[0] = run_calls(ranks, 0, nano_batches, served[0])
                    time.sleep(0.05)
            except BaseException as error:
                failures.append(error)

        training = threading.Thread(target=train)
        training.start()
        strangers = strangers_at(port, token, nano_batches, memory_of(transport, "stranger"))
        for _ in range(warm_up):
            strangers()
        before, served_before, inputs = server.memory(), served[0], 0
        while training.is_alive() and (inputs < inputs_after or served[0] <= served_before + 20):
            strangers()
            inputs += 1
        grown, served_after = server.memory() - before, served[0]
        over.set()
        training.join()
        assert not failures
        run_calls(ranks, 0, nano_batches, served[0])
        strangers.close()
        for rank in ranks:
            rank.link.close()
        directory.end()
        assert server.process.wait(60) == 0
    finally:
        server.close()
        directory.close()
    said = server.output.read_text()
    print(f"{inputs} inputs, memory grew by {grown / 1e6:.1f} MB, {served_after} calls")
    assert "refused" in said
    assert "refusals so far" in said
    assert "Traceback" not in said
    assert len(said) < 100_000
    assert grown < 20e6
