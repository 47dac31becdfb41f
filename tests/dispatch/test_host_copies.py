"""Checkpoints go to the host and back, in an order in which no memory is used again too early."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hf_distca.dispatch.host_copies import FULL, ActivationOffload, HostMemory, OffloadedForward
from hf_distca.dispatch.kept_results import is_recomputation
from tests.late_streams import LateStreams

CPU = torch.device("cpu")
WIDTH = 6


def host_of(chunks: int, chunk_bytes: int = 16) -> HostMemory:
    """Host memory of some chunks."""
    return HostMemory(
        chunks * chunk_bytes, pinned=False, chunk_bytes=chunk_bytes, block_bytes=chunk_bytes
    )


class Chain:
    """Checkpointed layers, one after another; the numbers are the same every time."""

    def __init__(self, layers: int, log: list[str] | None = None, shown: int = 0) -> None:
        torch.manual_seed(0)
        self.weights = [torch.rand(WIDTH, WIDTH, requires_grad=True) for _ in range(layers)]
        self.hidden = torch.rand(3, WIDTH, requires_grad=True)
        self.log = [] if log is None else log
        self.shown = shown  # layers whose inputs' memory is looked at
        self.inputs: list[StorageWeakRef] = []

    def layer(self, number: int, x: Tensor, factor: Tensor | None) -> Tensor:
        if not is_recomputation():
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
        alive = sum(not storage.expired() for storage in self.inputs[: self.shown])
        self.log.append(f"layer {number} beside {alive}")
        y = torch.tanh(x @ self.weights[number]) * x
        return y if factor is None else y * factor

    def forward(self, offload: ActivationOffload | None, factor: Tensor | None = None) -> Tensor:
        """The sum of the last layer's output."""
        forward = None if offload is None else OffloadedForward(offload)
        x = self.hidden * 1
        for number in range(len(self.weights)):
            if forward is None:
                x = checkpoint(self.layer, number, x, factor, use_reentrant=False)
                continue
            kept = forward.begin()
            with saved_tensors_hooks(kept.pack, kept.unpack):
                x = checkpoint(self.layer, number, x, factor, use_reentrant=False)
        return x.sum()

    def gradients(self) -> list[Tensor]:
        leaves = [self.hidden, *self.weights]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_same(got: Chain, backwards: int = 1, factor: Tensor | None = None) -> None:
    """Gradients are those without offload."""
    expected = Chain(len(got.weights))
    for _ in range(backwards):
        expected.forward(None, factor).backward()
    for gradient, other in zip(got.gradients(), expected.gradients(), strict=True):
        assert torch.equal(gradient, other)


def test_order_of_copies_waits_and_layers():
    streams = LateStreams(block_bytes=16)
    chain = Chain(5, streams.log, shown=3)
    chain.forward(ActivationOffload(CPU, 3, host_of(99), streams)).backward()
    assert_same(chain)
    # An input has 72 bytes and 5 chunks. Of the three inputs that move, two are on the device.
    out, back = ["copies wait"] + 5 * ["to host"], ["copies wait"] + 5 * ["to device"]
    assert streams.log == [
        *(*out, "copied 0", "layer 0 beside 1"),
        *(*out, "copied 1", "layer 1 beside 2"),
        *("wait for 0", *out, "copied 2", "layer 2 beside 2"),
        *("wait for 1", "layer 3 beside 1"),
        *("wait for 2", "layer 4 beside 0"),
        # The backward.
        "layer 4 beside 0",
        *(*back, "copied 3", "layer 3 beside 0"),
        *("wait for 3", *back, "copied 4", "layer 2 beside 0"),
        *("wait for 4", *back, "copied 5", "layer 1 beside 0"),
        *("wait for 5", "layer 0 beside 0"),
    ]


def test_host_memory_has_a_limit(caplog):
    """And is used again; what does not fit stays on the device."""
    host = host_of(chunks=7)
    streams = LateStreams(block_bytes=16)
    offload = ActivationOffload(CPU, 3, host, streams)
    chain = Chain(5)
    for _ in range(2):
        chain.forward(offload).backward()
    assert_same(chain, backwards=2)
    assert streams.moved == {"host": 2 * 72, "device": 2 * 72}
    assert host.reserved == 7 * 16
    assert [record.message for record in caplog.records] == [FULL % (7 * 16 / 1e9)]
    taken = host.take(7 * 16)
    assert taken is not None
    assert [len(chunk_B) for chunk_B in taken] == [16] * 7
    assert host.take(1) is None


def test_forwards_without_a_backward_and_backwards_that_run_twice():
    host, streams = host_of(chunks=99), LateStreams(block_bytes=16)
    offload = ActivationOffload(CPU, 3, host, streams)
    chain = Chain(5)
    chain.forward(offload)  # ended by an error, say
    first, second = chain.forward(offload), chain.forward(offload)
    second.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert_same(chain, backwards=3)
    del first, second
    assert len(host._free) == host.reserved // 16
    # Of the last forward nothing is left on the device either.
    chain.forward(offload)
    Chain(5).forward(offload).backward()
    assert len(host._free) == host.reserved // 16


def test_what_an_earlier_backward_fetched_and_never_used_has_arrived_before_its_memory_is_freed():
    """The first layers get no gradient, and their checkpoints come back in vain."""
    streams = LateStreams(block_bytes=16)
    offload = ActivationOffload(CPU, 3, host_of(99), streams)
    chain = Chain(5)
    loss = chain.forward(offload)
    torch.autograd.grad(loss, chain.weights[1:])
    assert streams.log.count("to device") == 3 * 5
    assert "wait for 5" not in streams.log
    del loss
    ended = len(streams.log)
    chain.forward(offload)
    assert streams.log[ended] == "wait for 5"


def test_shared_tensors_stay_and_others_keep_their_order_of_memory():
    streams = LateStreams(block_bytes=64)
    host = HostMemory(4096, pinned=False, chunk_bytes=64, block_bytes=64)
    offload = ActivationOffload(CPU, 3, host, streams)
    factor = torch.rand(WIDTH)
    chain = Chain(5)
    chain.forward(offload, factor).backward()
    assert_same(chain, factor=factor)
    assert streams.moved["host"] == 3 * 72 + 24  # of the factor once, by the first layer

    forward = OffloadedForward(offload)
    first = forward.begin()
    made = {
        "transposed": torch.rand(5, 3).t(),
        "with gaps": torch.rand(4, 10)[:, ::2],
        "a part": torch.rand(40)[7:29],
        "a number": torch.tensor(2.5),
        "halves": torch.rand(3, 3).bfloat16(),
        "truths": torch.rand(9) > 0.5,
    }
    copies = {name: tensor.clone() for name, tensor in made.items()}
    packed = {name: first.pack(tensor) for name, tensor in made.items()}
    empty = torch.empty(0, 4)
    assert first.pack(empty) is empty
    strides = {name: tensor.stride() for name, tensor in made.items()}
    del made
    for _ in range(2):
        forward.begin()
    assert {kept.tensor for kept in packed.values()} == {None}
    for name, kept in packed.items():
        back = first.unpack(kept)
        assert torch.equal(back, copies[name]), name
        assert back.dtype == copies[name].dtype
        if name in ("transposed", "a part"):
            assert back.stride() == strides[name]
