"""What an agent asks of NIXL, of a stand-in that notes it and ends transfers as a test says."""

import socket
import threading
from collections import Counter

import pytest

from hf_distca.pool import nixl as nixl_agent
from hf_distca.pool.nixl import HOST, NixlAgent, Piece, Region, address_towards, has_rdma
from hf_distca.pool.wire import LinkLost


class Library:
    """Stands for NIXL's own agent.

    Attributes:
        asked: what it was asked, in order.
        states: of the transfers, one after another.
    """

    def __init__(self, *states):
        self.asked, self.states = [], iter(states)

    def add_remote_agent(self, metadata):
        return metadata

    def remove_remote_agent(self, peer):
        self.asked.append(("remove", peer))

    def get_xfer_descs(self, pieces, kind):
        return (*pieces, kind)

    def initialize_xfer(self, operation, local, remote, peer):
        self.asked.append((operation, local, remote, peer))
        return len(self.asked)

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        return next(self.states)

    def release_xfer_handle(self, handle):
        self.asked.append(("release", handle))


@pytest.fixture
def make_agent(monkeypatch):
    """Makes an agent on a library."""
    monkeypatch.setattr(nixl_agent, "CHUNK_BYTES", 100)

    def make(library):
        agent = NixlAgent.__new__(NixlAgent)
        agent._agent, agent._errors, agent._lock, agent._ends = library, (OSError,), threading.Lock(), Counter()
        return agent

    return make


def read(agent):
    agent.transfer(
        "READ", Region(HOST, [Piece(1000, 250), Piece(2000, 7)]), Region(HOST, [Piece(5000, 250), Piece(6000, 7)]),
        "peer", 60.0, lambda: False,
    )  # fmt: skip


def test_long_pieces_are_transferred_in_parts_each_of_which_is_let_go(make_agent):
    library = Library(*["DONE"] * 4)
    read(make_agent(library))
    parts = [(1000, 5000, 100), (1100, 5100, 100), (1200, 5200, 50), (2000, 6000, 7)]
    asked = [("READ", ((own, size, 0), "DRAM"), ((other, size, 0), "DRAM"), "peer") for own, other, size in parts]
    assert library.asked[::2] == asked
    assert library.asked[1::2] == [("release", handle) for handle in (1, 3, 5, 7)]


def test_a_transfer_that_fails_is_let_go_and_no_further_one_begins(make_agent):
    library = Library("PROC", "ERR")
    with pytest.raises(LinkLost, match="a transfer ended as ERR"):
        read(make_agent(library))
    assert [asked[0] for asked in library.asked] == ["READ", "release"]


def test_a_peer_is_forgotten_as_often_as_it_was_met(make_agent):
    library = Library()
    agent = make_agent(library)
    for _ in range(2):
        agent.meet(b"peer", "peer")
    agent.forget("peer")
    assert library.asked == []
    agent.forget("peer")
    assert library.asked == [("remove", "peer")]
    agent.meet(b"peer", "peer")
    agent.forget("peer")
    assert library.asked == [("remove", "peer")] * 2


def test_a_host_without_rdma_may_have_the_folder_of_its_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_agent, "_RDMA_DEVICES", tmp_path)
    assert not has_rdma()
    (tmp_path / "mlx5_0").touch()
    assert has_rdma()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_own_address_on_the_way_to_a_host():
    assert address_towards("127.0.0.9", 0) == "127.0.0.1"


@pytest.mark.skipif(not _has_ipv6(), reason="a host without IPv6")
def test_the_own_address_on_the_way_over_ipv6():
    assert address_towards("::1", 29500) == "::1"
