"""Convolutions and recurrences of a planned step: what a mixing module calls in place of transformers' functions.

Each takes the rows of all segments that a rank holds, and keeps documents apart. Transformers' own functions compute:
they may be kernels. What a segment lacks, since its document was cut, comes from the ranks with its other segments,
see `hf_distca.dispatch.cuts`.

A convolution runs on rows with room before each segment: there are the rows before the segment, or zeros.

A recurrence runs on whole documents as they are, packed if its kernel takes packed documents. Of a cut document, a
segment runs from a state of zeros; the state before it, S_in, adds r·S_in to its rows. For a gated delta rule r and A
come from the same run: further columns of zero values, from a state of ones on the diagonal, turn into r and A. For
Mamba-2 and lightning attention the decay is one number a head, and both are products of decays.

Shape suffixes: T rows, C channels, H heads, G groups of heads, K rows and V columns of a state.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_distca.dispatch.bound import BoundNanoBatch, BoundPlan
from hf_distca.dispatch.cuts import HaloExchange, Packing, StateExchange, Transition
from hf_distca.dispatch.executor import without_autocast
from hf_distca.models.mixing import (
    CONVOLUTION,
    CONVOLUTION_AND_SCAN,
    DELTA_RULE,
    KIMI_DELTA_RULE,
    LIGHTNING,
    SCAN,
    stock_forward,
)

Function = Callable[..., Any]

_call: ContextVar["MixingCall"] = ContextVar("mixing module that runs")


class MixingCall:
    """One call of a mixing module in a planned step.

    Attributes:
        mixed: functions that the module has called, in order.
    """

    def __init__(self, module: nn.Module, plan: BoundPlan) -> None:
        self.module, self.plan = module, plan
        self.mixed: list[str] = []

    @contextmanager
    def runs(self) -> Iterator[Self]:
        """Make the call known to the functions that the module calls."""
        token = _call.set(self)
        try:
            yield self
        finally:
            _call.reset(token)

    def pause(self) -> None:
        """Let the other nano-batch run while rows or states travel."""
        if self.plan.cuts_documents:
            self.plan.pause()

    def exchange(self, nano: BoundNanoBatch) -> dict[str, Any]:
        """Return the arguments of an exchange of the module on a nano-batch."""
        runtime = self.plan.runtime
        return {
            "nano_batch": nano.index,
            "module": self.module,
            "exchange": runtime.exchange,
            "recorder": runtime.recorder,
            "kept": self.plan.kept_results,
            "keep": runtime.keep_core_attention,
        }

    def of_nano_batches(self, x_1T: Tensor) -> Sequence[Tensor]:
        """Divide rows [1, T, ...] between the nano-batches of the call."""
        return torch.split(x_1T, [nano.rows for nano in self.plan.nano_batches], 1)


def planned_functions(stock: dict[str, Any]) -> dict[str, Function]:
    """Return functions for planned steps by the names of those that they replace.

    Args:
        stock: global names of a file of transformers.
    """
    planned: dict[str, Function] = {
        CONVOLUTION: _convolution,
        DELTA_RULE: _delta_rule,
        KIMI_DELTA_RULE: _delta_rule,
        SCAN: _scan,
        CONVOLUTION_AND_SCAN: _convolution_and_scan,
    }
    return {name: _replaced(name, stock[name], function) for name, function in planned.items() if name in stock}


def _replaced(name: str, stock: Function, planned: Function) -> Function:
    """Return the planned function with the function that it replaces as its first argument."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        result = planned(call.plan.runtime.functions.get(name, stock), call, *args, **kwargs)
        if result is not None:
            call.mixed += [CONVOLUTION, SCAN] if name == CONVOLUTION_AND_SCAN else [name]
        return result

    return replaced


def _takes_packed(stock: Function, argument: str) -> bool:
    """Return whether transformers' function is a kernel that keeps packed documents apart.

    Transformers wraps its functions, and drops arguments that the kernel does not know.
    """
    if hasattr(stock, "packed_by"):  # a stand-in
        return bool(stock.packed_by == argument)
    try:
        found = inspect.getclosurevars(stock).nonlocals
    except TypeError:  # a kernel of the Hub
        return False
    return bool(found.get("is_new_implementation")) and argument in found.get("applicable_params", ())


def _convolution(
    stock: Function, call: MixingCall, x_1CT: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a causal convolution over each document."""
    width = weight.shape[-1] - 1
    x_TC = x_1CT.transpose(1, 2)
    parts = []
    for nano, x_1TC in zip(call.plan.nano_batches, call.of_nano_batches(x_TC), strict=True):
        exchange = HaloExchange(nano.cuts.halos(width), **call.exchange(nano))
        rows_TC = x_1TC.squeeze(0)
        parts.append((exchange, rows_TC, exchange.send(rows_TC)))
    call.pause()
    results = []
    for exchange, rows_TC, token in parts:
        x_XC = exchange.receive(token, rows_TC)
        out_1CX = stock(x_XC.T.unsqueeze(0), weight, *args, **kwargs) if len(x_XC) else x_XC.T.unsqueeze(0)
        results.append(out_1CX.squeeze(0).T.index_select(0, exchange.bound.places_T))
    return torch.cat(results).T.unsqueeze(0)


Read = Any
"""What `Recurrence.read` needs of a segment to turn the state before it into rows."""


class _Recurrence(Protocol):
    """A recurrence over the rows of one call of a mixing module.

    Attributes:
        tensors: [1, T, ...] each, what the recurrence reads.
        values: [1, T, H, V], of the shape of the result.
        packed: whether whole documents may be computed in one call.
        shapes: of A and B.
    """

    tensors: tuple[Tensor, ...]
    values: Tensor
    packed: bool
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def run(
        self, rows: Sequence[Tensor], packing: Packing | None, continued: bool = False, continues: bool = False
    ) -> tuple[Tensor, Read, Transition]:
        """Return the result of whole documents, or of a segment from a state of zeros and what it does to a state.

        Args:
            continued: whether earlier segments exist, so that A and r are needed.
            continues: whether later segments exist, so that A and B are needed.
        """

    def read(self, read: Read, state: Tensor) -> Tensor:
        """Return r·S in float32, [T, H, V]."""


class _DeltaRule(_Recurrence):
    """Gated delta rule with a decay for each head, or for each row of a state (Kimi Delta Attention)."""

    def __init__(
        self, stock: Function, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> None:
        self.tensors, self.values = (query, key, value, g, beta), value
        self.packed = _takes_packed(stock, "cu_seqlens")
        self._stock, self._options = stock, options
        heads, self._columns, self._rows = *value.shape[2:], key.shape[3]
        self.shapes = (heads, self._rows, self._rows), (heads, self._rows, self._columns)

    def run(
        self, rows: Sequence[Tensor], packing: Packing | None, continued: bool = False, continues: bool = False
    ) -> tuple[Tensor, Read, Transition]:
        query, key, value, g, beta = rows
        options = {**self._options, "g": g, "beta": beta, "initial_state": None, "output_final_state": continues}
        if packing is not None:
            options["cu_seqlens"] = packing.cu_seqlens
        if continued:  # further columns of zero values, from a state of ones on the diagonal, become r and A
            value = functional.pad(value, (0, self._rows))
            state = functional.pad(torch.eye(self._rows, device=value.device), (self._columns, 0))
            options["initial_state"] = state.expand(1, value.shape[2], -1, -1).contiguous()
        out, final = self._stock(query, key, value, **options)
        read = factor = offset = None
        if continues:
            offset, factor = final[0].float().split([self._columns, final.shape[3] - self._columns], 2)
        if continued:
            out, read = out.split([self._columns, self._rows], 3)
        return out, read, (factor if continued else None, offset)

    def read(self, read: Read, state: Tensor) -> Tensor:
        return torch.einsum("thk,hkv->thv", read[0].float(), state)


class _Scan(_Recurrence):
    """State space of Mamba-2, whose decay is one number a head and row."""

    def __init__(
        self,
        stock: Function,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        **options: Any,
    ) -> None:
        self.tensors, self.values = (hidden_states, dt, B, C), hidden_states
        self.packed = _takes_packed(stock, "seq_idx")
        steps = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        self._stock, self._options = stock, {**options, **steps}
        self._decay_H, self._bias, self._softplus, self._limit = A, dt_bias, dt_softplus, dt_limit
        heads, columns = hidden_states.shape[2:]
        self.shapes = (heads,), (heads, columns, B.shape[3])

    def run(
        self, rows: Sequence[Tensor], packing: Packing | None, continued: bool = False, continues: bool = False
    ) -> tuple[Tensor, Read, Transition]:
        hidden, dt, B, C = rows
        options = self._options if packing is None else {**self._options, "seq_idx": packing.seq_idx}
        out = self._stock(hidden, dt, self._decay_H, B, C, return_final_states=continues, **options)
        read = factor = offset = None
        if continues:
            out, final = out
            offset = final[0].float()
        if continued:
            decays_TH = self._decays(dt[0])
            read, factor = (decays_TH, C[0]), decays_TH[-1] if continues else None
        return out, read, (factor, offset)

    def _decays(self, dt_TH: Tensor) -> Tensor:
        """Return by how much a state has decayed since the segment began, at each row."""
        dt_TH = dt_TH.float()
        if self._bias is not None:
            dt_TH = dt_TH + self._bias.float()
        if self._softplus:
            dt_TH = functional.softplus(dt_TH)
        return (self._decay_H.float() * dt_TH.clamp(*self._limit)).cumsum(0).exp()

    def read(self, read: Read, state: Tensor) -> Tensor:
        decays_TH, C_TGN = read
        of_groups = state.unflatten(0, (C_TGN.shape[1], -1))
        read_TGHV = torch.einsum("tgn,ghvn->tghv", C_TGN.float(), of_groups)
        read_THV: Tensor = read_TGHV.flatten(1, 2) * decays_TH.unsqueeze(-1)
        return read_THV


class _Lightning(_Recurrence):
    """Lightning attention, whose decay is one constant a head.

    Transformers has the recurrence inside the module's forward. Here that forward runs on the projected rows, with
    identities for all modules around the recurrence.

    Args:
        qkv: [1, T, H * 3 * K].
    """

    def __init__(self, module: Any, qkv: Tensor) -> None:
        heads, size = module.num_attention_heads, module.head_dim
        self.tensors, self.packed = (qkv,), False
        self.values = qkv.unflatten(2, (heads, -1))[..., -size:]
        self.shapes = (heads,), (heads, size, size)
        self._stock: Function = stock_forward(module)
        same = nn.Identity()
        inner = {"act_fn": same, "qkv_proj": same, "norm": same, "out_proj": same, "output_gate": self._open_gate}
        names = ("layer_idx", "head_dim", "num_attention_heads", "block_size")
        decays = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        self._inner = SimpleNamespace(**inner, **{name: getattr(module, name) for name in (*names, *decays)})

    @staticmethod
    def _open_gate(rows: Tensor) -> Tensor:
        """Return a gate whose sigmoid is 1."""
        return rows.new_full((), math.inf)

    def run(
        self, rows: Sequence[Tensor], packing: Packing | None, continued: bool = False, continues: bool = False
    ) -> tuple[Tensor, Read, Transition]:
        (qkv,) = rows
        heads, size, _ = self.shapes[1]
        out, final = self._stock(self._inner, qkv, None, None)
        read = factor = None
        if continued:
            places_T = torch.arange(1, qkv.shape[1] + 1, device=qkv.device)
            decays_TH = (-self._inner.slope_rate.float().view(1, heads) * places_T.unsqueeze(1)).exp()
            read, factor = (decays_TH, qkv[0].unflatten(1, (heads, -1))[..., :size]), decays_TH[-1]
        return out.unflatten(2, (heads, size)), read, (factor, final[0].float()) if continues else (None, None)

    def read(self, read: Read, state: Tensor) -> Tensor:
        decays_TH, q_THK = read
        read_THV: Tensor = torch.einsum("thk,hkv->thv", q_THK.float(), state) * decays_TH.unsqueeze(-1)
        return read_THV


def lightning_attention(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Run a module of lightning attention over each document; the rows have no padding that a mask would name."""
    call = _call.get()
    mixed = _recur(call, _Lightning(module, module.act_fn(module.qkv_proj(hidden_states))))
    call.mixed.append(LIGHTNING)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed.flatten(2))), None


def _delta_rule(
    stock: Function,
    call: MixingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a gated delta rule over each document."""
    return _recur(call, _DeltaRule(stock, query, key, value, g, beta, **options)), None


def _scan(
    stock: Function,
    call: MixingCall,
    *tensors: Tensor,
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Compute the state space of Mamba-2 over each document."""
    return _recur(call, _Scan(stock, *tensors, **options))


def _convolution_and_scan(stock: Function, call: MixingCall, *args: Any, **kwargs: Any) -> Tensor | None:
    """Compute a whole Mamba-2 module by one kernel; None if there is no kernel, or documents are cut."""
    sizes = tuple(size for nano in call.plan.nano_batches for size in nano.cuts.sizes)
    if call.plan.cuts_documents or not _takes_packed(stock, "seq_idx"):
        return None
    if packing := call.plan.nano_batches[0].cuts.packing(sizes):
        kwargs["seq_idx"] = packing.seq_idx
    result: Tensor = stock(*args, **kwargs)
    return result


def _recur(call: MixingCall, recurrence: _Recurrence) -> Tensor:
    """Compute a recurrence over each document, [1, T, H, V].

    Cut segments come first: while their states travel, whole documents are computed, those of both nano-batches.
    """
    divided = (call.of_nano_batches(x) for x in recurrence.tensors)
    parts = [Part(call, nano, rows, recurrence) for nano, *rows in zip(call.plan.nano_batches, *divided, strict=True)]
    if call.plan.nano_batches[0].index == 1:  # the first nano-batch is about to wait
        parts[0].compute_whole()
    call.pause()
    return torch.cat([out for part in parts for out in part.finish()], 1)


class Part:
    """A recurrence over the segments of one nano-batch; making it computes cut segments and sends their states."""

    def __init__(self, call: MixingCall, nano: BoundNanoBatch, rows: list[Tensor], recurrence: _Recurrence) -> None:
        self._recurrence, self._cuts = recurrence, nano.cuts
        sizes, chains = nano.cuts.sizes, nano.cuts.chains
        numbers = {segment: number for number, segment in enumerate(chains.cut)}
        # Whole documents between cut segments share a call if the kernel takes them packed.
        groups = [
            (number, [sizes[segment] for segment in group])
            for (number, _), group in groupby(
                range(len(sizes)), lambda segment: (numbers.get(segment), None if recurrence.packed else segment)
            )
        ]
        of_groups = zip(*(torch.split(x, [sum(each) for _, each in groups], 1) for x in rows), strict=True)
        self._calls = [(number, each, of_group) for (number, each), of_group in zip(groups, of_groups, strict=True)]
        self._cut = {
            number: recurrence.run(of_segment, None, bool(chains.earlier[number]), bool(chains.later[number]))
            for number, _, of_segment in self._calls
            if number is not None
        }
        self._exchange = StateExchange(chains, recurrence.shapes, **call.exchange(nano))
        self._transitions = [transition for _, _, transition in self._cut.values()]
        self._token = self._exchange.send(self._transitions, rows)
        self._empty = recurrence.values[:, :0]
        self._whole: list[Tensor] | None = None

    def compute_whole(self) -> None:
        """Compute whole documents."""
        self._whole = [
            self._recurrence.run(rows, self._cuts.packing(tuple(sizes)))[0]
            for number, sizes, rows in self._calls
            if number is None
        ]

    def finish(self) -> list[Tensor]:
        """Return all results, after adding to cut segments what the states before them change."""
        if self._whole is None:
            self.compute_whole()
        whole = iter(self._whole or [])
        outputs = [next(whole) if number is None else self._cut[number][0] for number, _, _ in self._calls]
        # Some result goes through the exchange on every rank, see `StateExchange.receive`.
        passed = outputs or [self._empty]
        passed[0], states = self._exchange.receive(self._token, passed[0], self._transitions)
        for index, (number, _, _) in enumerate(self._calls):
            if number is not None and (state := states[number]) is not None:
                out, read = passed[index], self._cut[number][1]
                with without_autocast(state.device.type):
                    passed[index] = (out.float() + self._recurrence.read(read, state)).to(out.dtype)
        return passed
