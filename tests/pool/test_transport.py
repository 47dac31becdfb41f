"""Rows between a rank and a server: what becomes of memory, of peers that fail, and of places that
nobody may name.
"""

import gc
import os
import signal
import socket
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from threading import Lock
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from hf_distca.pool import nixl, transport
from hf_distca.pool.messages import NixlPeer, Places, RankWelcome, Reply, TensorSpec
from hf_distca.pool.nixl import HOST, NixlAgent, address_towards
from hf_distca.pool.transport import (
    SLAB_BYTES,
    Arena,
    Choice,
    Memory,
    choose,
    make_memory,
    rank_hello,
)
from hf_distca.pool.wire import Channel, LinkLost, MismatchError, ProtocolError
from tests.pool.ends import CPU, channels, ends, make_call, memory_of, needs_nixl, wait_until

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed

ROWS = TensorSpec("q", "queries", (1024,), "float32")
"""4096 bytes a row."""
REPLY = Reply(1, 0.5, 7)


def arena(end):
    """Memory of its own, with the agent of an end."""
    return Arena(memory_of(Choice.NIXL, end).agent, CPU, required=True)


def send(end, rows):
    """Send a call from where its rows are staged; they fit into what the system keeps of a
    connection.
    """
    staged, ready = end.memory.stage(rows)
    ready()
    end.transport.send(make_call(1), staged, 60)


@pytest.mark.parametrize("choice", [Choice.TCP, pytest.param(Choice.NIXL, marks=needs_nixl)])
def test_rows_come_with_their_message_into_slices_and_from_them_and_in_no_other_size(
    choice, monkeypatch
):
    monkeypatch.setattr(nixl, "CHUNK_BYTES", 100)  # rows take several transfers
    q = TensorSpec("q", "queries", (4, 16), "bfloat16")
    few = TensorSpec("lse", "", (4,), "float32")
    with ends(choice) as (left, right):
        sent = torch.randn(4, 10, 16).to(torch.bfloat16).transpose(0, 1)
        lse = torch.randn(3, 4)
        received = right.memory.empty(q, 10).zero_()
        got_lse = right.memory.empty(few, 3)
        assert received.shape == (10, 4, 16)
        assert received.dtype == torch.bfloat16
        assert received.is_contiguous() is True
        send(left, [sent[2:5], sent[7:9], lse, sent[:0]])
        message, size = right.channel.receive(60)
        assert message == make_call(1)
        right.transport.receive(
            message, size, [received[0:3], received[8:10], got_lse, received[:0]], 60
        )
        assert torch.equal(
            torch.cat([received[0:3], received[8:10]]), torch.cat([sent[2:5], sent[7:9]])
        )
        assert torch.equal(got_lse, lse)
        assert not received[3:8].any()
        send(left, [sent[:2]])
        with pytest.raises(ProtocolError, match=r"256\]? bytes, expected \[?384"):
            right.transport.receive(*right.channel.receive(60), [received[3:6]], 60)
        assert not received[3:8].any()


@needs_nixl
def test_memory_is_used_again_once_nobody_has_it_and_no_gpu_reads_it(monkeypatch):
    memory = arena("server")
    rows = memory.empty(ROWS, 8)
    place = rows.data_ptr()
    part = rows[3:5]
    del rows
    assert memory.empty(ROWS, 8).data_ptr() != place  # a part of it is still there
    del part
    assert memory.empty(ROWS, 8).data_ptr() == place
    done = Mock(return_value=False)  # a GPU that is behind by whatever has been asked of it
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    memory.stream = Mock(record_event=lambda: SimpleNamespace(query=done))
    assert memory.empty(ROWS, 8).data_ptr() != place
    done.return_value = True
    assert memory.empty(ROWS, 8).data_ptr() == place
    memory.stream = None
    blocks = {rows: memory.empty(ROWS, rows).fill_(rows) for rows in (1, 100, 7, 5000, 20000)}
    assert all(bool((block == rows).all()) for rows, block in blocks.items())  # they do not overlap
    del blocks
    memory.empty(ROWS, 16000)  # of blocks that were apart
    assert len(memory._slabs) == 2


@needs_nixl
def test_memory_registered_since_the_ends_met_is_reached_and_not_used_again_under_way():
    memory = arena("rank")
    with ends(Choice.NIXL, memory) as (rank, server):
        with channels() as (_, far):  # another end of the same rank
            choose(far, server.memory, rank_hello(0, memory))[0].close()
        rank.transport.send(make_call(0), [memory.empty(ROWS, 1)], 5)
        server.transport.receive(*server.channel.receive(60), [server.memory.empty(ROWS, 1)], 5)
        more = memory.empty(ROWS, SLAB_BYTES // 4096)  # the probe lies in the first slab
        assert len(memory._slabs) == 2
        sent = more[:1].fill_(3)
        answer = more[1:2]
        rank.transport.send(make_call(1), [sent], 5, [answer])
        received = server.memory.empty(ROWS, 1)
        server.transport.receive(*server.channel.receive(60), [received], 5)
        assert (received == 3).all()
        server.transport.send(REPLY, [received.add_(1)], 5)
        rank.transport.receive(*rank.channel.receive(60), [answer], 5)
        assert (answer == 4).all()
        kept, answer, replied = (memory.empty(ROWS, 9) for _ in range(3))
        places = {block.data_ptr() for block in (kept, answer)}
        rank.transport.send(make_call(2), [kept], 5, [answer])
        del kept, answer
    del replied
    free = [memory.empty(ROWS, 9) for _ in range(4)]
    assert not {block.data_ptr() for block in free} & places


@needs_nixl
def test_places_that_are_not_sane_or_not_registered_are_refused(subtests):
    with ends(Choice.NIXL) as (rank, server):
        wild = torch.zeros(1024).data_ptr()
        for places, error in (
            (None, "does not name the memory of its rows"),
            (((4096, 4095),), r"memory of \[4095\] bytes, expected \[4096\]"),
            (((4096, 2048), (8192, 2048)), r"memory of \[2048, 2048\] bytes, expected \[4096\]"),
            (((4096, 1),) * 1000, r"memory of .{80} bytes, expected"),
            (((-1, 4096),), "read failed"),
            (((2**70, 4096),), "read failed"),
            (((wild, 4096),), "read failed"),
        ):
            rank.channel.send(replace(make_call(1), places=places and Places(places, places, "")))
            received = server.channel.receive(60)
            rows = server.memory.empty(ROWS, 1)
            with subtests.test(str(places)[:40]), pytest.raises(LinkLost, match=error):
                server.transport.receive(*received, [rows], 5)
        with pytest.raises(LinkLost, match="write failed"):
            server.transport.send(REPLY, [rows], 5)
        with pytest.raises(
            ProtocolError, match=r"memory of \[\] bytes"
        ):  # no place is left for a reply
            server.transport.send(REPLY, [server.memory.empty(ROWS, 1)], 5)
        place = rows.data_ptr()
        del rows, received
        gc.collect()  # of what the errors hold
        # Rows may still arrive there, as far as anybody knows.
        fresh = [server.memory.empty(ROWS, 1) for _ in range(9)]
        assert place not in {block.data_ptr() for block in fresh}


@needs_nixl
def test_ends_agree_or_say_why_not(subtests):
    memory = memory_of(Choice.NIXL, "server")
    host = Memory(CPU, "no RDMA")
    hello = rank_hello(0, memory_of(Choice.NIXL))
    with channels() as (_, far):
        for own, peer, error in (
            (memory, {"metadata": ""}, "metadata"),
            (memory, {"metadata": "?"}, "metadata"),
            (memory, {"metadata": hello.nixl.metadata[:200]}, "metadata"),
            (memory, {"name": "another"}, "different names"),
            (memory, None, "NIXL only, but this rank cannot: no RDMA"),
            (host, {}, "does not use NIXL: at the server: no RDMA"),
        ):
            of_rank = (
                rank_hello(0, host)
                if peer is None
                else replace(hello, nixl=replace(hello.nixl, **peer))
            )
            with subtests.test(error), pytest.raises(MismatchError, match=error):
                choose(far, own, of_rank)
        assert choose(far, host, replace(hello, required=False))[1] == RankWelcome(
            "TCP", "at the server: no RDMA"
        )
        assert choose(far, host, rank_hello(0, host))[1] == RankWelcome("TCP", "no RDMA")


def test_auto_opens_no_port_of_ucx_and_what_was_asked_for_and_is_not_there_is_said(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)  # the folder may be there without devices
    if nixl.is_installed():
        assert make_memory(Choice.AUTO, CPU, "127.0.0.1").why == "the host has no RDMA device"
        with pytest.raises(ValueError, match="no network interface of this host has the address"):
            make_memory(Choice.NIXL, CPU, "192.0.2.77")
    (tmp_path / "mlx5_0").touch()
    assert nixl.has_rdma()
    monkeypatch.setattr(nixl, "_MODULES", ())
    assert make_memory(Choice.AUTO, CPU, "127.0.0.1").why == "NIXL is not installed"
    with pytest.raises(ValueError, match="install nixl-cu12"):
        make_memory(Choice.NIXL, CPU, "127.0.0.1")
    assert address_towards("127.0.0.9", 0) == "127.0.0.1"


@needs_nixl
def test_an_agent_takes_no_core_while_nothing_moves_and_listens_on_the_named_interface_alone():
    agent = memory_of(Choice.NIXL, "server").agent
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1
    assert agent.listens_on == "lo"
    sockets = [
        connection for connection in psutil.net_connections("tcp") if connection.pid == os.getpid()
    ]
    assert {connection.laddr.ip for connection in sockets if connection.status == "LISTEN"} == {
        "127.0.0.1"
    }


@pytest.mark.parametrize(
    ("state", "gone", "timeout_s", "error"),
    [
        ("ERR", False, 60.0, "a transfer ended as ERR"),
        ("PROC", True, 60.0, "the peer left"),
        ("PROC", False, 0.1, r"no rows moved for 0\.1 s"),
    ],
    ids=["error", "peer that left", "time-out"],
)
def test_a_transfer_that_fails_is_let_go_and_no_further_one_begins(
    monkeypatch, state, gone, timeout_s, error
):
    monkeypatch.setattr(nixl, "CHUNK_BYTES", 100)
    agent = NixlAgent.__new__(NixlAgent)
    agent._errors = (OSError,)
    agent._lock = Lock()
    agent._ends = Counter()
    agent._agent = library = Mock(
        **{"transfer.return_value": "PROC", "check_xfer_state.return_value": state}
    )
    peer = NixlPeer("peer", "", 0, "DRAM", 0)
    with pytest.raises(LinkLost, match=error):
        agent.transfer(
            "READ", [(1000, 250)], HOST, [(5000, 250)], peer, timeout_s, Mock(return_value=gone)
        )
    library.transfer.assert_called_once()
    library.release_xfer_handle.assert_called_once()


def be_a_rank(port):
    """A rank that says hello and does nothing more."""
    memory = make_memory(Choice.NIXL, CPU, "127.0.0.1")
    channel = Channel(socket.create_connection(("127.0.0.1", port)))
    channel.send(rank_hello(0, memory))
    time.sleep(600)


@needs_nixl
@pytest.mark.launches
def test_a_rank_that_stands_still_or_dies_costs_its_time_out(monkeypatch):
    monkeypatch.setattr(transport, "PROBE_S", 0.2)
    memory = memory_of(Choice.NIXL, "server")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = get_context("forkserver").Process(
            target=be_a_rank, args=[listener.getsockname()[1]], daemon=True
        )
        process.start()
        try:
            channel = Channel(listener.accept()[0])
            hello, _ = channel.receive(60)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(ProtocolError, match=r"no rows moved for 0\.2 s"):
                choose(channel, memory, hello)
            os.kill(process.pid, signal.SIGCONT)
            monkeypatch.setattr(transport, "PROBE_S", 20.0)
            end, _ = choose(channel, memory, hello)
            process.kill()
            wait_until(channel.hung_up)
            call = replace(make_call(1), places=Places(((hello.nixl.probe, 16),), (), ""))
            with pytest.raises(LinkLost):
                end.receive(call, 0, [torch.empty(0), memory.probe], 20)
            end.close()
        finally:
            process.kill()
            process.join()
    with ends(Choice.NIXL):
        pass  # others are still reached
