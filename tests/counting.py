"""Count what a planned step launches, copies and moves, without a GPU: on meta tensors, which have
no numbers.

A whole model runs forward and backward on tensors of the device "meta", or on torch's fake tensors
of CUDA. It is one of several ranks, whose group is c10d's "fake" one. A dispatch mode sees every
operator:

  launches   operators that run on the device: one each, two where they fill with zeros first; none
             without an element
  copies     those of the launches that only move numbers: copy_, clone, cat, index_select, to
             another dtype, …
  views      operators that only describe memory anew; they cost the host a few microseconds
  bytes      what launches read and write, each element of a tensor once; what is broadcast as it
             lies in memory

Matrix products, attention kernels and exchanges are counted apart from other launches. Whatever
would make the host wait for the device raises. An operator belongs to the innermost frame of
hf_distca or transformers; in a backward node of torch's own, to where the node's forward was
called, which has the same sequence number.

Run: python -m tests.counting [--no-ping-pong]
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_distca.dispatch.bound import BoundPlan, Runtime
from hf_distca.dispatch.exchange import Exchange
from hf_distca.dispatch.recorder import Recorder
from hf_distca.dispatch.waits import Waits
from hf_distca.kernels.versions import TorchVarlenKernel
from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

META = torch.device("meta")

WAITS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "_unique2",
}
GEMMS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm"}
COPIES = {
    "copy_",
    "clone",
    "_to_copy",
    "cat",
    "index_select",
    "index_copy_",
    "constant_pad_nd",
    "slice_backward",
}
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
FILLED_FIRST = {"slice_backward", "select_backward", "index_select_backward"}
"""Zeros of the whole shape, then a copy into a part."""
OVERWRITTEN = {"copy_", "fill_", "zero_", "index_copy_"}
"""In place, without reading what was there."""
BY_ROWS = {"index_select", "index_copy_", "embedding"}
"""Touch the rows that an index names, not all of them."""


@dataclass(frozen=True)
class Call:
    """One operator that was called, and the bytes that it moved."""

    name: str
    what: str  # "launch", "copy", "gemm", "attention", "exchange", "view" or "nothing"
    owner: str  # "dispatch" or "model"
    layer: int | None  # number of the decoder layer, None outside
    backward: bool
    launches: int
    moved: int


FIGURES = ("launches", "copies", "views", "attention", "exchanges", "moved")


def figures_of(calls: Sequence[Call]) -> Counter[str]:
    """Launches and bytes besides matrix products, attention kernels and exchanges; and numbers of
    some operators.
    """
    names = {"copy": "copies", "view": "views", "attention": "attention", "exchange": "exchanges"}
    counts = Counter(names[call.what] for call in calls if call.what in names)
    for call in calls:
        if call.what in ("launch", "copy"):
            counts.update(launches=call.launches, moved=call.moved)
    return counts


class Counting(TorchDispatchMode):
    """Records every operator on a device; `layer` is the decoder layer whose forward runs, set by
    `counted`.
    """

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.device = device
        self.calls: list[Call] = []
        self.layer: int | None = None
        self._places: dict[
            int, tuple[str, int | None]
        ] = {}  # owner and layer of nodes, by sequence number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.device.type == "cuda":
            if func is torch.ops.prim.device.default:
                return META  # autograd asks, and would want a stream of the device
            if kwargs.get("device") == META:  # torch has asked to make another tensor there
                kwargs = {**kwargs, "device": self.device}
        if self._is_here((args, kwargs)):
            _check_no_wait(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._is_here((args, kwargs, result)):
            self._record(func, args, kwargs, result)
        return result

    def _is_here(self, tree: Any) -> bool:
        return any(x.device.type == self.device.type for x in _tensors(tree))

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        what, launches = _what(func, name, result, args)
        owner = _owner()
        node = torch._C._current_autograd_node()
        if owner is None and node is not None:  # a node of torch's own
            owner, layer = self._places.get(node._sequence_nr(), ("model", None))
        else:
            owner = owner or "model"
            layer = self.layer
            if node is not None and self.layer is None:
                layer = self._places.get(node._sequence_nr(), (None, None))[1]
            # A node takes its number just before its forward comes here.
            self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, (owner, layer))
        moved = _moved(func, name, args, kwargs, result) if launches else 0
        self.calls.append(Call(name, what, owner, layer, node is not None, launches, moved))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _check_no_wait(func: Any, args: Any, kwargs: Any) -> None:
    name = func._schema.name.split("::")[1]
    source = args[1 if name == "copy_" else 0] if args else None
    target = (
        kwargs.get("device") if name == "_to_copy" else args[0].device if name == "copy_" else None
    )
    goes_to_host = target is not None and target.type == "cpu" != source.device.type
    by_mask = name in ("index", "index_put_") and any(
        x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1])
    )
    if name in WAITS or goes_to_host or by_mask:
        raise AssertionError(f"{func} makes the host wait for the device")


def _what(func: Any, name: str, result: Any, args: Any) -> tuple[str, int]:
    """What an operator is, and how often it launches."""
    if func.namespace == "c10d":
        return "exchange", 0
    if name.startswith(("_flash_attention", "_scaled_dot_product")):
        return "attention", 1
    if func.is_view or name in ("_unsafe_view", "lift_fresh"):
        return "view", 0
    outputs = _tensors(result) or [args[0]]  # ours return nothing and write to their first argument
    if name in ALLOCATIONS or not any(x.numel() for x in outputs):
        return "nothing", 0
    if name in GEMMS:
        return "gemm", 1
    return "copy" if name in COPIES else "launch", 2 if name in FILLED_FIRST else 1


def _moved(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes."""
    if (
        name == "merge_into"
    ):  # the part is read, and as many rows of the result are read and written
        _, _, *part, rows = args
        return 3 * _bytes(*part) + _bytes(*_tensors(rows))
    if (
        name == "sum_rows"
    ):  # each addend is read, and each row that has one is written; read too where it is added to
        out, rows, ends, addends, _, onto = args
        moved_rows = len(addends) + (len(ends) - 1) * (2 if onto else 1)
        return moved_rows * out[:1].numel() * out.itemsize + _bytes(ends, addends, *_tensors(rows))
    written = []
    read = []
    schema = func._schema.arguments
    given = [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += _tensors(value)
        if not is_written or (name not in OVERWRITTEN and argument.name != "out"):
            read += _tensors(value)
    fresh = [x for x in _tensors(result) if not any(x is other for other in written)]
    if (
        name in BY_ROWS
    ):  # as many rows are read as written, those of a result or of the last argument
        rows = fresh or [kwargs.get("out", args[-1])]
        return 2 * _bytes(*rows) + _bytes(*(x for x in read if not x.is_floating_point()))
    if name in FILLED_FIRST:
        return 2 * _bytes(args[0]) + _bytes(*fresh)
    return _bytes(*written, *read, *fresh)


def _bytes(*tensors: Tensor) -> int:
    """As they lie in memory: what is broadcast is there once."""
    return sum(
        math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize
        for x in tensors
    )


def _owner() -> str | None:
    """The package that asked for the operator that is being called; None if it is neither of the
    two.
    """
    frame = sys._getframe(3)
    while frame is not None and _owner_of(frame.f_code.co_filename) is None:
        frame = frame.f_back
    return frame and _owner_of(frame.f_code.co_filename)


@cache
def _owner_of(filename: str) -> str | None:
    folders = Path(filename).parts[:-1]
    return "dispatch" if "hf_distca" in folders else "model" if "transformers" in folders else None


class MetaKernel(TorchVarlenKernel):
    """The kernel of CUDA on meta tensors, whose shapes torch knows; rows have to lie as kernels
    load them.
    """

    def check(self, *_: Any) -> None:
        """It asks for a GPU."""

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        assert all(map(_aligned, args[:3]))  # q, k, v
        return super().forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert all(map(_aligned, args[:5]))  # do, q, k, v, o
        return super().backward(*args)


def _aligned(x: Tensor) -> bool:
    """Whether every row and head begins at a multiple of 16 bytes, and the numbers of a head lie
    side by side.
    """
    steps = [stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and not any(
        step * x.itemsize % 16 for step in (*steps, x.storage_offset())
    )


@contextmanager
def fake_group(ranks: int) -> Iterator[dist.ProcessGroup]:
    """A group of many ranks in one process, whose collectives carry nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def without_numbers(device: torch.device = META) -> Iterator[None]:
    """What is made inside on the device has no numbers; what asks for more than a shape finds an
    answer.
    """
    with ExitStack() as stack:
        # transformers looks at the positions, whether documents are packed: a wait, without an
        # answer here.
        stack.enter_context(
            patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
        )
        if device == META:  # torch has no autocast for it
            stack.enter_context(patch("torch.is_autocast_enabled", lambda _device: False))
            stack.enter_context(patch("torch.get_autocast_dtype", lambda _device: torch.bfloat16))
        else:
            stack.enter_context(patch("hf_distca.dispatch.rows.host_bytes", _with_numbers))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _with_numbers(size: int, *, pinned: bool) -> Tensor:
    """Memory on the host, where numbers of plans are written."""
    with unset_fake_temporarily():
        return torch.empty(size, dtype=torch.uint8)


def empty_model(model_type: str, device: torch.device = META, **config: Any) -> PreTrainedModel:
    """A model without numbers; to be made inside `without_numbers`."""
    settings = AutoConfig.for_model(model_type, **config)
    with device, patch("torch.nn.init.normal_", lambda x, *_, **__: x):
        model = AutoModelForCausalLM.from_config(
            settings, attn_implementation="distca", dtype=torch.bfloat16
        )
    return model.train()


def bound_plan(
    plan: MicroBatchPlan,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device = META,
    **options: Any,
) -> BoundPlan:
    """The plan bound to one of the ranks of a fake group."""
    pods = {len(plan.ranks): group}
    groups = SimpleNamespace(exchange=group, pods=pods, node=group, closed=False, waits=Waits())
    exchange = Exchange(groups)
    return BoundPlan(
        plan, rank, Runtime(device, exchange, MetaKernel(), Recorder(device), **options)
    )


def counted(model: PreTrainedModel, bound: BoundPlan) -> Counting:
    """Count a planned step of the model, forward and backward; to be called inside
    `without_numbers`.
    """
    mode = Counting(bound.runtime.device)
    decoder = base_model(model).base_model
    zeros = torch.zeros((1, bound.rows), dtype=torch.long, device=bound.runtime.device)
    hooks = []
    for number, layer in enumerate(decoder.layers):
        hooks += [
            layer.register_forward_pre_hook(
                lambda *_, number=number: setattr(mode, "layer", number)
            ),
            layer.register_forward_hook(lambda *_: setattr(mode, "layer", None)),
        ]
    with mode:
        output = decoder(input_ids=zeros, position_ids=zeros, use_cache=False, distca_plan=bound)
        output.last_hidden_state.backward(torch.zeros_like(output.last_hidden_state))
    for hook in hooks:
        hook.remove()
    return mode


# The command

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}
INNER_LAYER = 1
"""Neither the first nor the last: those also make the buffers that all layers use."""
RANKS, TOKENS = 8, 32768


def main() -> None:
    """Print, for a document of 100000 tokens among short ones of some 600, what each rank's layer
    takes.
    """
    parser = argparse.ArgumentParser(
        description="Counts what one layer launches and moves, on meta tensors."
    )
    parser.add_argument("--no-ping-pong", dest="ping_pong", action="store_false")
    ping_pong = parser.parse_args().ping_pong
    draw = np.random.default_rng(0)
    lengths = [100_000]
    while left := RANKS * TOKENS - sum(lengths):
        lengths.append(min(int(np.clip(draw.lognormal(6.4, 1.0), 32, 16384)), left))
    with fake_group(RANKS) as group, without_numbers():
        model = empty_model("llama", **LLAMA_3_8B)
        if ping_pong:
            plan_layers(model)
        options = {"row_overhead": MetaKernel.row_overhead, "ping_pong": ping_pong}
        for layout in ("auto", "fixed"):
            settings = PlanSettings(
                RANKS, TOKENS, tuple(layers_by_kind(model)), document_layout=layout, **options
            )
            plan = plan_micro_batch(lengths, settings)
            of_ranks = [
                counted(model, bound_plan(plan, rank, group)).calls for rank in range(RANKS)
            ]
            _print_table(
                layout,
                [[call for call in calls if call.layer == INNER_LAYER] for calls in of_ranks],
            )


def _print_table(layout: str, of_ranks: list[list[Call]]) -> None:
    """Means of the ranks, and in brackets the most of any rank."""
    print(f"{layout + ' layout':28}" + "".join(f"{name:>16}" for name in (*FIGURES[:-1], "GB")))
    for owner in ("dispatch", "model"):
        for title, ways in (("forward", (False,)), ("backward", (True,)), ("both", (False, True))):
            calls_of_part = [
                [call for call in calls if call.owner == owner and call.backward in ways]
                for calls in of_ranks
            ]
            counts_of_ranks = map(figures_of, calls_of_part)
            rows = [[counts[name] for name in FIGURES] for counts in counts_of_ranks]
            figures = np.array(rows) / [1, 1, 1, 1, 1, 1e9]
            columns = zip(figures.mean(0), figures.max(0), strict=True)
            print(
                f"  {owner + ' ' + title:26}"
                + "".join(f"{mean:8.1f} ({most:5.1f})" for mean, most in columns)
            )


if __name__ == "__main__":
    main()
