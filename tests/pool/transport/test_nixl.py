"""Rows over NIXL: what becomes of memory, of peers that fail, and of places that a peer must not name."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_distca.pool import nixl as nixl_agent
from hf_distca.pool import transport as transports
from hf_distca.pool.messages import NixlPeer, Places, RankHello, RankWelcome, Reply, TensorSpec
from hf_distca.pool.nixl import HOST, NixlAgent, address_towards, has_rdma
from hf_distca.pool.transport import SLAB_BYTES, Arena, Choice, Memory, choose, make_memory, rank_end, rank_hello
from hf_distca.pool.wire import Channel, LinkLost, MismatchError, ProtocolError
from tests.pool.server.fake_ranks import FULL, make_call
from tests.pool.servers import wait_until
from tests.pool.transport.ends import CPU, channels, ends, memory_of, needs_nixl

ROWS = TensorSpec("q", "queries", (1024,), "float32")
"""4096 bytes a row."""


def call(number):
    return make_call(0, number, 0, FULL, "forward")


def reply(number):
    return Reply(number, 0.5, 7)


def arena(end):
    """Memory of its own, with the agent of an end."""
    return Arena(memory_of(Choice.NIXL, end).agent, CPU, required=True)


@pytest.fixture
def memory():
    return memory_of(Choice.NIXL, "server")


@pytest.fixture
def both():
    with ends(Choice.NIXL) as made:
        yield made


class Gpu:
    """Stands for the copies of a GPU that is behind by whatever has been asked of it."""

    done = False

    def fence(self):
        return lambda: self.done


@needs_nixl
def test_memory_is_used_again_once_nobody_has_it_and_no_gpu_reads_it():
    memory = arena("server")
    rows = memory.empty(ROWS, 8)
    place, part = rows.data_ptr(), rows[3:5]
    del rows
    assert memory.empty(ROWS, 8).data_ptr() != place  # a part of it is still there
    del part
    assert memory.empty(ROWS, 8).data_ptr() == place
    gpu = memory.copies = Gpu()
    assert memory.empty(ROWS, 8).data_ptr() != place
    gpu.done = True
    assert memory.empty(ROWS, 8).data_ptr() == place


@needs_nixl
def test_blocks_do_not_overlap_and_larger_ones_are_registered_as_needed():
    memory = arena("server")
    blocks = {rows: memory.empty(ROWS, rows).fill_(rows) for rows in (1, 100, 7, 5000, 20000)}
    assert len(memory._slabs) == 2
    assert all(bool((block == rows).all()) for rows, block in blocks.items())
    del blocks
    memory.empty(ROWS, 16000)  # of blocks that were apart
    assert len(memory._slabs) == 2


@needs_nixl
def test_memory_registered_since_the_ends_met_is_reached_too(memory):
    of_rank = arena("rank")
    with channels() as (near, far):
        server, welcome = choose(far, memory, rank_hello(0, 1, of_rank))
        rank = rank_end(near, of_rank, welcome)
        more = of_rank.empty(ROWS, SLAB_BYTES // 4096)  # the probe lies in the first slab
        assert len(of_rank._slabs) == 2
        sent, answer = more[:1].fill_(3), more[1:2]
        rank.send(call(1), [sent], 5, [answer])
        came = memory.empty(ROWS, 1)
        server.receive(*far.receive(), [came], 5)
        assert (came == 3).all()
        server.send(reply(1), [came.add_(1)], 5)
        rank.receive(*near.receive(), [answer], 5)
        assert (answer == 4).all()
        rank.close()
        server.close()


@needs_nixl
def test_an_agent_takes_no_core_while_nothing_moves_and_listens_on_the_named_interface_alone(memory):
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1
    assert memory.agent.listens_on == "lo"
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in descriptors if os.path.islink(path)}
    listening = [
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
    ]
    assert listening
    assert all(address.startswith("0100007F:") for address in listening)  # 127.0.0.1


@needs_nixl
def test_rows_of_calls_under_way_are_not_used_again_when_their_link_ends():
    with ends(Choice.NIXL) as (rank, _):
        rows, answer, replied = (rank.memory.empty(ROWS, 9) for _ in range(3))
        places = [block.data_ptr() for block in (rows, answer)]
        rank.transport.send(call(1), [rows], 5, [answer])
        del rows, answer
    del replied
    free = [rank.memory.empty(ROWS, 9) for _ in range(4)]
    assert not {block.data_ptr() for block in free} & set(places)


@needs_nixl
def test_an_end_that_closes_leaves_another_one_of_the_same_rank_alone(both):
    rank, server = both
    with channels() as (_, far):
        older, _ = choose(far, server.memory, rank_hello(0, 1, rank.memory))
        older.close()
    (rows,), ready = rank.memory.stage([torch.ones(2, 1024)])
    ready()
    rank.transport.send(call(1), [rows], 5)
    came = server.memory.empty(ROWS, 2)
    server.transport.receive(*server.channel.receive(), [came], 5)
    assert (came == 1).all()


@needs_nixl
def test_places_that_are_not_sane_or_not_registered_are_refused(both):
    rank, server = both
    wild = torch.zeros(1024).data_ptr()
    for places, error in (
        (None, "does not name the memory of its rows"),
        (((4096, 4095),), "4095 bytes, expected 4096"),
        (((4096, 2048), (8192, 2048)), "differs in size from the tensors"),
        (((-1, 4096),), "read failed"),
        (((2**70, 4096),), "read failed"),
        (((wild, 4096),), "read failed"),
    ):
        rank.channel.send(replace(call(1), places=places and Places(places, places, "")))
        received, rows = server.channel.receive(), server.memory.empty(ROWS, 1)
        with pytest.raises(LinkLost, match=error):
            server.transport.receive(*received, [rows], 5)
    with pytest.raises(LinkLost, match="write failed"):
        server.transport.send(reply(1), [rows], 5)
    with pytest.raises(ProtocolError, match="differs in size from the tensors"):  # no place is left for a reply
        server.transport.send(reply(1), [server.memory.empty(ROWS, 1)], 5)
    place = rows.data_ptr()
    del rows, received
    gc.collect()  # of what the errors hold
    assert server.memory.empty(ROWS, 1).data_ptr() != place  # it may still arrive there, as far as anybody knows


@needs_nixl
def test_ends_agree_or_say_why_not(memory):
    host, hello = Memory(CPU, "no RDMA"), rank_hello(0, 1, memory_of(Choice.NIXL, "rank"))
    with channels() as (_, far):
        for name, value, error in (
            ("metadata", "", "metadata"),
            ("metadata", "?", "metadata"),
            ("metadata", hello.nixl.metadata[:200], "metadata"),
            ("name", "another", "different names"),
        ):
            with pytest.raises(MismatchError, match=error):
                choose(far, memory, replace(hello, nixl=replace(hello.nixl, **{name: value})))
        with pytest.raises(MismatchError, match="NIXL only, but this rank cannot: no RDMA"):
            choose(far, memory, rank_hello(0, 1, host))
        with pytest.raises(MismatchError, match="does not use NIXL: at the server: no RDMA"):
            choose(far, host, hello)
        assert choose(far, host, replace(hello, required=False))[1] == RankWelcome("TCP", "at the server: no RDMA")
        assert choose(far, host, rank_hello(0, 1, host))[1] == RankWelcome("TCP", "no RDMA")


def test_what_was_asked_for_and_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_MODULES", ())
    assert make_memory(Choice.AUTO, CPU, "127.0.0.1").why == "NIXL is not installed"
    with pytest.raises(ValueError, match="install nixl-cu12"):
        make_memory(Choice.NIXL, CPU, "127.0.0.1")
    assert address_towards("127.0.0.9", 0) == "127.0.0.1"


@needs_nixl
def test_auto_opens_no_port_of_ucx(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_agent, "_RDMA_DEVICES", tmp_path)  # the folder may be there without devices
    assert make_memory(Choice.AUTO, CPU, "127.0.0.1").why == "the host has no RDMA device"
    with pytest.raises(ValueError, match="no network interface of this host has the address"):
        make_memory(Choice.NIXL, CPU, "192.0.2.77")
    (tmp_path / "mlx5_0").touch()
    assert has_rdma()


class Library:
    """Stands for NIXL's own agent, one of whose transfers ends in an error; notes what it is asked."""

    def __init__(self):
        self.asked = []

    def get_xfer_descs(self, pieces, kind):
        return pieces

    def initialize_xfer(self, operation, local, remote, peer):
        self.asked.append(operation)
        return len(self.asked)

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        return "ERR"

    def release_xfer_handle(self, handle):
        self.asked.append("release")


def test_a_transfer_that_fails_is_let_go_and_no_further_one_begins(monkeypatch):
    monkeypatch.setattr(nixl_agent, "CHUNK_BYTES", 100)
    agent = NixlAgent.__new__(NixlAgent)
    agent._agent, agent._errors, agent._lock, agent._ends = Library(), (OSError,), threading.Lock(), Counter()
    peer = NixlPeer("peer", "", 0, "DRAM", 0)
    with pytest.raises(LinkLost, match="a transfer ended as ERR"):
        agent.transfer("READ", [(1000, 250)], HOST, [(5000, 250)], peer, 60.0, lambda: False)
    assert agent._agent.asked == ["READ", "release"]


def be_a_rank(port):
    """A rank that makes two calls of 20 MB each and does nothing more."""
    memory = make_memory(Choice.NIXL, CPU, "127.0.0.1")
    channel = Channel(socket.create_connection(("127.0.0.1", port)))
    end = rank_end(channel, memory, channel.ask(rank_hello(0, 1, memory), RankWelcome, 60))
    (rows,), ready = memory.stage([torch.full((5000, 1024), 3.0)])
    ready()
    for number in (1, 2):
        end.send(call(number), [rows], 60, [memory.empty(ROWS, 5000)])
    time.sleep(600)


@needs_nixl
def test_a_rank_that_stands_still_or_dies_costs_its_time_out(memory, monkeypatch):
    monkeypatch.setattr(transports, "PROBE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=be_a_rank, args=listener.getsockname()[1:2], daemon=True)
        process.start()
        try:
            channel = Channel(listener.accept()[0])
            hello, _ = channel.receive()
            assert isinstance(hello, RankHello)
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with monkeypatch.context() as patched:
                patched.setattr(channel, "hung_up", lambda: True)
                with pytest.raises(ProtocolError, match="the peer left"):
                    choose(channel, memory, hello)
            with pytest.raises(ProtocolError, match=r"no rows moved for 0\.2 s"):
                choose(channel, memory, hello)
            assert time.monotonic() - begin < 10
            os.kill(process.pid, signal.SIGCONT)
            monkeypatch.setattr(transports, "PROBE_S", 20.0)
            end, welcome = choose(channel, memory, hello)
            channel.send(welcome)
            first, rows = channel.receive(), memory.empty(ROWS, 5000)
            end.receive(*first, [rows], 20)
            assert (rows == 3).all()
            end.send(reply(1), [rows], 20)
            second = channel.receive()
            process.kill()
            wait_until(channel.hung_up)
            with pytest.raises(LinkLost):
                end.receive(*second, [rows], 20)
            end.close()
        finally:
            process.kill()
            process.join()
    with ends(Choice.NIXL):
        pass  # others are still reached
