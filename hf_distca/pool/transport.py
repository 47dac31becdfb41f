"""Rows of calls between a rank and a server: their memory, and their transport over TCP or NIXL.

A message travels on the connection between the two (`wire`). Over TCP its rows follow on the same
connection. Over NIXL a rank's call names the places of its rows and of the reply's rows in the
rank's memory: the server reads the former, and writes the latter before it sends the reply. The
rank's end moves nothing.

Shape suffixes: N rows; what follows a row's N is free.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from hf_distca.checks.server_rules import ServerPool
from hf_distca.pool.messages import (
    Call,
    NixlPeer,
    Places,
    RankHello,
    RankWelcome,
    Reply,
    TensorSpec,
)
from hf_distca.pool.nixl import HOST, NixlAgent, Operation, Piece, Space, has_rdma, is_installed
from hf_distca.pool.wire import Buffer, Channel, LinkLost, MismatchError, ProtocolError

SLAB_BYTES = 64 << 20
"""Bytes of the first slab. Each later slab is as large as all before it, so that there are few."""
PROBE_BYTES = 16
"""Bytes that a server reads of a rank's memory to try the link."""
PROBE_S = 5.0
"""Most seconds for the first contact with a rank over NIXL."""

_ALIGNMENT = 4096
"""Blocks of a slab begin at multiples of so many bytes, the size of a page."""

Rows = Sequence[Tensor]
"""Contiguous tensors of some rows, [N, …] each."""
Block = tuple[int, int, int]
"""Part of a slab: the slab's number, start and stop."""


class Choice(StrEnum):
    """Setting that chooses the transport of rows."""

    AUTO = "auto"
    TCP = "tcp"
    NIXL = "nixl"


class Memory:
    """Host memory of one process's rows over TCP, pinned where `device` is a GPU.

    `why` is the reason for TCP.
    """

    def __init__(self, device: torch.device, why: str = "TCP was asked for") -> None:
        self.why = why
        # Rows are copied beside what the GPU computes.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, spec: TensorSpec, rows: int) -> Tensor:
        """Return [rows, *spec.shape] with undefined contents, contiguous, to receive into."""
        return self._tensor((rows, *spec.shape), getattr(torch, spec.dtype))

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copy rows, [N, …] each on the device, to where they can be sent from.

        Returns the contiguous copies, and a function by which any thread waits for them. The caller
        may drop the original rows.
        """
        if self.stream is None:
            return [x_N.detach().contiguous() for x_N in tensors], lambda: None
        staged = [self._tensor(tuple(x_N.shape), x_N.dtype) for x_N in tensors]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for copy_N, x_N in zip(staged, tensors, strict=True):
                copy_N.copy_(x_N.detach(), non_blocking=True)
                x_N.record_stream(self.stream)
        return staged, self.stream.record_event().synchronize

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.stream is not None)


class _Loan:
    """A block of which a tensor can be made; the tensor keeps this object alive."""

    def __init__(self, address: int, size: int, space: Space) -> None:
        # How NumPy or PyTorch makes an array of bytes of memory that is not its own.
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        name = "__array_interface__" if space == HOST else "__cuda_array_interface__"
        setattr(self, name, interface)


class Arena(Memory):
    """Memory registered with NIXL: of the GPU that computes, or of the host.

    It is the GPU's where NIXL can reach that. Registering costs too much for every call, so memory
    comes in few large slabs that are kept until the process ends. A block of a slab is free again
    when the last tensor that shares it is dropped; on a GPU, when the work queued until then is
    done.

    Args:
        required: rows may travel only over NIXL.

    Raises:
        LinkLost: `agent` can register no memory.
    """

    def __init__(self, agent: NixlAgent, device: torch.device, *, required: bool) -> None:
        super().__init__(device)
        self.agent = agent
        self.required = required
        self.metadata = ""  # what a peer needs to reach all memory registered so far
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []
        self._free: list[Block] = []  # in order, neighbours merged
        self._returned: deque[Block] = deque()  # by finalizers, which must not lock
        # Returned blocks with the query that is true when the GPU's queued work is done.
        self._cooling: deque[tuple[Callable[[], bool], list[Block]]] = deque()
        self._unusable: list[Rows] = []
        if device.type == "cuda":
            self._device = device
            self.space = Space("VRAM", device.index or 0)
            with suppress(LinkLost):  # UCX without CUDA
                self._grow(SLAB_BYTES)
        if not self._slabs:
            self._device = torch.device("cpu")
            self.space = HOST
            self._grow(SLAB_BYTES)
        self.probe = self._tensor((PROBE_BYTES,), torch.uint8)

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """See `Memory.stage`; on the host the returned function makes the copies."""
        if self.stream is not None:
            return super().stage(tensors)
        copies = [(self._tensor(tuple(x_N.shape), x_N.dtype), x_N.detach()) for x_N in tensors]

        def ready() -> None:
            while copies:  # the originals are dropped with their pairs
                copy_N, x_N = copies.pop()
                copy_N.copy_(x_N)

        return [copy_N for copy_N, _ in copies], ready

    def keep(self, rows: Rows) -> None:
        """Keep rows out of use for good: after a failed transfer a peer may still write or read."""
        self._unusable.append(tuple(rows))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device=self._device)
        slab, start, stop = self._allocate(-(-size // _ALIGNMENT) * _ALIGNMENT)
        loan = _Loan(self._slabs[slab].data_ptr() + start, size, self.space)
        weakref.finalize(loan, self._returned.append, (slab, start, stop)).atexit = False
        if self.space == HOST:
            return torch.from_numpy(np.asarray(loan)).view(dtype).view(shape)
        return torch.as_tensor(loan, device=self._device).view(dtype).view(shape)

    def _allocate(self, size: int) -> Block:
        """Take a block of so many bytes out of the first free block that is large enough."""
        with self._lock:
            self._merge()
            fitting = None
            for index, (_, start, stop) in enumerate(self._free):
                if stop - start >= size:
                    fitting = index
                    break
            if fitting is None:
                # A new slab doubles the memory: registering is slow, so slabs are few.
                self._grow(max(size, sum(slab.nbytes for slab in self._slabs)))
                fitting = len(self._free) - 1
            slab, start, stop = self._free.pop(fitting)
            if start + size < stop:
                self._free.insert(fitting, (slab, start + size, stop))
            return slab, start, start + size

    def _merge(self) -> None:
        """Free the returned blocks that no GPU reads any more, and merge free neighbours.

        Peers do not wait for the GPU's streams.
        """
        # 1. Blocks that the GPU's stream may still read cool down until it has passed this point.
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if self.stream is None:  # nobody reads what the host has dropped
            self._free += returned
        elif returned:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self._cooling.append((self.stream.record_event().query, returned))
        while self._cooling:
            is_done, blocks = self._cooling[0]
            if not is_done():
                break
            self._free += blocks
            self._cooling.popleft()
        # 2. Neighbours in a slab become one block.
        merged: list[Block] = []
        for slab, start, stop in sorted(self._free):
            if merged:
                last_slab, last_start, last_stop = merged[-1]
                if last_slab == slab and last_stop == start:
                    merged[-1] = (slab, last_start, stop)
                    continue
            merged.append((slab, start, stop))
        self._free = merged

    def _grow(self, size: int) -> None:
        """Register one more slab, and append it to the free blocks."""
        pinned = self.stream is not None and self.space == HOST
        slab = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)
        self.metadata = self.agent.register((slab.data_ptr(), size), self.space)
        self._slabs.append(slab)
        self._free.append((len(self._slabs) - 1, 0, size))


def make_memory(choice: Choice, device: torch.device, address: str) -> Memory:
    """Make the memory of this process's rows: an `Arena` for NIXL, or `Memory` for TCP.

    AUTO takes NIXL only with RDMA devices, where UCX needs no open port. Else UCX listens on the
    interface of `address`. ValueError: NIXL was asked for and cannot be used.
    """
    if choice is Choice.TCP:
        return Memory(device)
    if choice is Choice.AUTO and not is_installed():
        return Memory(device, "NIXL is not installed")
    if choice is Choice.AUTO and not has_rdma():
        return Memory(device, "the host has no RDMA device")
    try:
        return Arena(NixlAgent(address), device, required=choice is Choice.NIXL)
    except (ImportError, ValueError, LinkLost) as error:
        if choice is Choice.AUTO:
            return Memory(device, str(error))
        raise ServerPool.NO_NIXL.error(why=error) from error


class Transport:
    """Either end of TCP, and the interface of every transport.

    The rank's end sends calls, and the server's end sends their replies. One thread may send while
    another receives; after an error a transport is of no more use. Rows lie in the `Memory` of the
    transport, and may stand still for `timeout_s`; then LinkLost.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: Call | Reply, rows: Rows, timeout_s: float, answer: Rows = ()) -> None:
        """Send a message with its rows.

        The rows of a call must not change before its reply has been received. The rows of the reply
        are received into `answer`.
        """
        self._channel.send(message, _buffers(rows), timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Rows, timeout_s: float) -> None:
        """Receive the rows of the last received message, which `size` bytes follow.

        ProtocolError: the rows have another size. After an error nobody writes to the rows any
        more.
        """
        expected = sum(x_N.nbytes for x_N in rows)
        if size != expected:
            raise ProtocolError(
                f"the rows of a {type(message).__name__} have {size} bytes, expected {expected}"
            )
        self._channel.receive_payload(_buffers(rows), timeout_s)

    def close(self) -> None:
        """Let go of the other end; nobody uses this one any more, and its connection is down."""


class _NixlRankEnd(Transport):
    """A rank's end of NIXL, which names places and moves nothing."""

    def __init__(self, channel: Channel, memory: Arena) -> None:
        super().__init__(channel)
        self._memory = memory
        self._sent_metadata = memory.metadata  # in the hello
        # Rows of calls under way, by id of the call. Single operations on a dict are atomic.
        self._open: dict[int, list[Tensor]] = {}

    def send(self, message: Call | Reply, rows: Rows, timeout_s: float, answer: Rows = ()) -> None:
        assert isinstance(message, Call)
        metadata = self._memory.metadata
        new_metadata = "" if metadata == self._sent_metadata else metadata
        self._sent_metadata = metadata
        self._open[message.call_id] = [*rows, *answer]
        places = Places(tuple(_pieces(rows)), tuple(_pieces(answer)), new_metadata)
        self._channel.send(replace(message, places=places), timeout_s=timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Rows, timeout_s: float) -> None:
        # The server has written the rows before it sent the message.
        self._open.pop(message.call_id, None)

    def close(self) -> None:
        for rows in self._open.values():
            self._memory.keep(rows)
        self._open.clear()


class _NixlServerEnd(Transport):
    """A server's end of NIXL, which moves the rows.

    LinkLost where the server cannot reach the rank.
    """

    def __init__(self, channel: Channel, memory: Arena, peer: NixlPeer) -> None:
        super().__init__(channel)
        self._memory = memory
        self._peer = peer
        # Places of the replies, by id of the call. Single operations on a dict are atomic.
        self._answers: dict[int, Sequence[Piece]] = {}
        memory.agent.meet(peer.name, peer.metadata)
        try:
            self._move("READ", [memory.probe], [(peer.probe, PROBE_BYTES)], PROBE_S)
        except BaseException:
            self.close()
            raise

    def send(self, message: Call | Reply, rows: Rows, timeout_s: float, answer: Rows = ()) -> None:
        self._move("WRITE", rows, self._answers.pop(message.call_id, []), timeout_s)
        self._channel.send(message, timeout_s=timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Rows, timeout_s: float) -> None:
        assert isinstance(message, Call)
        places = message.places
        if places is None:
            raise ProtocolError(f"call {message.call_id} does not name the memory of its rows")
        if places.metadata:
            self._memory.agent.learn(self._peer.name, places.metadata)
        self._answers[message.call_id] = places.answer
        self._move("READ", rows, places.rows, timeout_s)

    def close(self) -> None:
        self._memory.agent.forget(self._peer.name)

    def _move(
        self, operation: Operation, rows: Rows, places: Sequence[Piece], timeout_s: float
    ) -> None:
        """Read or write rows.

        `places` are addresses of the rank, which NIXL compares with what it has registered.
        """
        memory = self._memory
        pieces = _pieces(rows)
        expected = [size for _, size in pieces]
        sizes = [size for _, size in places]
        if sizes != expected:
            raise ProtocolError(
                f"the rank names memory of {sizes!s:.80} bytes, expected {expected}"
            )
        try:
            memory.agent.transfer(
                operation,
                pieces,
                memory.space,
                places,
                self._peer,
                timeout_s,
                self._channel.hung_up,
            )
        except BaseException:
            # The peer may still write there: the rows must not be freed.
            memory.keep(rows)
            raise


def rank_hello(rank: int, memory: Memory) -> RankHello:
    """Return the hello of a rank whose rows lie in this memory."""
    if not isinstance(memory, Arena):
        return RankHello(rank, why_tcp=memory.why)
    peer = NixlPeer(memory.agent.name, memory.metadata, memory.probe.data_ptr(), *memory.space)
    return RankHello(rank, peer, required=memory.required)


def choose(channel: Channel, memory: Memory, hello: RankHello) -> tuple[Transport, RankWelcome]:
    """Choose the transport between a server and a rank, and return the server's end.

    NIXL is chosen where both ends have it and it works, else TCP. Returns the welcome to the rank
    too. MismatchError: one end uses NIXL only, and the other end cannot.
    """
    why = hello.why_tcp
    if not isinstance(memory, Arena):
        why = why or f"at the server: {memory.why}"
    elif hello.nixl is not None:
        try:
            end = _NixlServerEnd(channel, memory, hello.nixl)
            return end, RankWelcome("NIXL", "both ends have it")
        except LinkLost as error:
            why = str(error)
    if hello.required:
        raise MismatchError(
            "attention_servers={'transport': 'nixl'} is set, but the server does not use NIXL: "
            f"{why}; serve with --transport nixl, or set transport to 'auto' in attention_servers"
        )
    if isinstance(memory, Arena) and memory.required:
        raise MismatchError(
            f"the server uses NIXL only, but this rank cannot: {why}; serve with --transport auto, "
            "or set transport to 'nixl' in attention_servers"
        )
    return Transport(channel), RankWelcome("TCP", why[:1000])


def rank_end(channel: Channel, memory: Memory, welcome: RankWelcome) -> Transport:
    """Return the rank's end of the transport that a server has chosen."""
    if isinstance(memory, Arena) and welcome.transport == "NIXL":
        return _NixlRankEnd(channel, memory)
    return Transport(channel)


def _buffers(rows: Rows) -> list[Buffer]:
    """Return the host memory of tensors that have rows."""
    # As bytes: NumPy has no bfloat16.
    return [x_N.view(-1).view(torch.uint8).numpy().data for x_N in rows if x_N.numel()]


def _pieces(rows: Rows) -> list[Piece]:
    """Return the pieces of memory of tensors that have rows."""
    return [(x_N.data_ptr(), x_N.nbytes) for x_N in rows if x_N.numel()]
