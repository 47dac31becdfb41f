"""Convolutions and recurrences of a planned step.

A mixing module calls them in place of transformers' functions.

Each takes the rows of all segments that a rank holds, and keeps documents apart. Transformers' own
functions compute: they may be kernels. What a segment lacks, since its document was cut, comes from
the ranks with its other segments, see `hf_distca.dispatch.cuts`.

A convolution runs on rows with room before each segment: there are the rows before the segment, or
zeros.

A recurrence runs on whole documents as they are, packed if its kernel takes packed documents. Of a
cut document, a segment runs from a state of zeros; the state before it, S_in, adds r·S_in to its
rows. For a gated delta rule r and A come from the same run: further columns of zero values, from a
state of ones on the diagonal, turn into r and A. For Mamba-2 and lightning attention the decay is
one number a head, and both are products of decays.

Shape suffixes: T rows, C channels, H heads, G groups of heads, K rows and V columns of a state.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_distca.dispatch.bound import BoundNanoBatch, BoundPlan
from hf_distca.dispatch.cuts import HaloExchange, Packing, StateExchange, Transition
from hf_distca.dispatch.executor import without_autocast
from hf_distca.models import mixing
from hf_distca.models.decoder import stock_forward

Function = Callable[..., Any]

_call: ContextVar["MixingCall"] = ContextVar("mixing module that runs")


class MixingCall:
    """One call of a mixing module in a planned step."""

    def __init__(self, module: nn.Module, plan: BoundPlan) -> None:
        self.module, self.plan = module, plan
        self.mixed: list[str] = []  # functions that the module has called, in order

    def run(self, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward whose functions find this call."""
        token = _call.set(self)
        try:
            return forward(*args, **kwargs)
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

    The names are global names of the file of a mixing module.
    """
    planned: dict[str, Function] = {
        mixing.CONVOLUTION: _convolution,
        mixing.DELTA_RULE: _delta_rule,
        mixing.KIMI_DELTA_RULE: _delta_rule,
        mixing.SCAN: _scan,
        mixing.CONVOLUTION_AND_SCAN: _convolution_and_scan,
    }

    def replaced(name: str, *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        result = planned[name](
            call.plan.runtime.functions.get(name, stock[name]), call, *args, **kwargs
        )
        if result is not None:
            call.mixed += (
                [mixing.CONVOLUTION, mixing.SCAN] if name == mixing.CONVOLUTION_AND_SCAN else [name]
            )
        return result

    return {name: partial(replaced, name) for name in planned if name in stock}


def _takes_packed(stock: Function, argument: str) -> bool:
    """Return whether transformers' function is a kernel that keeps packed documents apart."""
    if hasattr(stock, "packed_by"):  # a stand-in
        return bool(stock.packed_by == argument)
    try:  # transformers wraps its functions, and drops arguments that the kernel does not know
        found = inspect.getclosurevars(stock).nonlocals
    except TypeError:  # a kernel of the Hub
        return False
    return bool(found.get("is_new_implementation")) and argument in found.get(
        "applicable_params", ()
    )


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
        out_1CX = (
            stock(x_XC.T.unsqueeze(0), weight, *args, **kwargs)
            if len(x_XC)
            else x_XC.T.unsqueeze(0)
        )
        results.append(out_1CX.squeeze(0).T.index_select(0, exchange.bound.places_T))
    return torch.cat(results).T.unsqueeze(0)


Read = Callable[[Tensor], Tensor]
"""Function that turns the state before a segment into r·S in float32, [T, H, V]."""
Result = tuple[Tensor, Read | None, Transition]
"""Rows [1, T, H, V] of whole documents; or of a segment, with what the segment does to states."""


Run = Callable[[Sequence[Tensor], Packing | None, bool, bool], Result]
"""Function that computes whole documents, or a segment from a state of zeros.

r and A are needed if the segment is continued, with earlier segments; A and B if it continues, with
later segments.
"""


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
    """Compute a gated delta rule over each document.

    The decay is a number for each head, or for each row of a state (Kimi Delta Attention).
    """
    heads, columns, state_rows = *value.shape[2:], key.shape[3]

    def run(
        rows: Sequence[Tensor], packing: Packing | None, continued: bool, continues: bool
    ) -> Result:
        query, key, value, g, beta = rows
        given = {
            **options,
            "g": g,
            "beta": beta,
            "initial_state": None,
            "output_final_state": continues,
        }
        if packing is not None:
            given["cu_seqlens"] = packing.cu_seqlens
        if (
            continued
        ):  # further columns of zero values, from a state of ones on the diagonal, become r and A
            value = functional.pad(value, (0, state_rows))
            state = functional.pad(torch.eye(state_rows, device=value.device), (columns, 0))
            given["initial_state"] = state.expand(1, heads, -1, -1).contiguous()
        out, final = stock(query, key, value, **given)
        factor = offset = None
        if continues:
            offset, factor = final[0].float().split([columns, final.shape[3] - columns], 2)
        if not continued:
            return out, None, (None, offset)
        out, r_1THK = out.split([columns, state_rows], 3)
        return (
            out,
            lambda state: torch.einsum("thk,hkv->thv", r_1THK[0].float(), state),
            (factor, offset),
        )

    shapes = (heads, state_rows, state_rows), (heads, state_rows, columns)
    return _recur(
        call, (query, key, value, g, beta), value, _takes_packed(stock, "cu_seqlens"), shapes, run
    ), None


def _scan(
    stock: Function,
    call: MixingCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Compute the state space of Mamba-2 over each document.

    The decay is one number a head and row.
    """
    options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(
        rows: Sequence[Tensor], packing: Packing | None, continued: bool, continues: bool
    ) -> Result:
        hidden, dt, B, C = rows
        given = options if packing is None else {**options, "seq_idx": packing.seq_idx}
        out = stock(hidden, dt, A, B, C, return_final_states=continues, **given)
        offset = None
        if continues:
            out, final = out
            offset = final[0].float()
        if not continued:
            return out, None, (None, offset)
        # By how much a state has decayed since the segment began, at each row.
        dt_TH = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
        dt_TH = functional.softplus(dt_TH) if dt_softplus else dt_TH
        decays_TH = (A.float() * dt_TH.clamp(*dt_limit)).cumsum(0).exp()
        C_TGN = C[0]

        def read(state: Tensor) -> Tensor:
            of_groups = state.unflatten(0, (C_TGN.shape[1], -1))
            read_TGHV = torch.einsum("tgn,ghvn->tghv", C_TGN.float(), of_groups)
            return read_TGHV.flatten(1, 2) * decays_TH.unsqueeze(-1)

        return out, read, (decays_TH[-1] if continues else None, offset)

    heads, columns = hidden_states.shape[2:]
    shapes = (heads,), (heads, columns, B.shape[3])
    return _recur(
        call, (hidden_states, dt, B, C), hidden_states, _takes_packed(stock, "seq_idx"), shapes, run
    )


def lightning_attention(
    module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run a module of lightning attention over each document.

    The rows have no padding that a mask would name.

    The decay is one constant a head. Transformers has the recurrence inside the module's forward.
    Here that forward runs on the projected rows, with identities for all modules around the
    recurrence.
    """
    call, stock = _call.get(), stock_forward(module)
    heads, size = module.num_attention_heads, module.head_dim
    same = nn.Identity()
    inner = SimpleNamespace(**vars(module), **dict(module.named_buffers(recurse=False)))
    inner.act_fn = inner.qkv_proj = inner.norm = inner.out_proj = same
    inner.output_gate = lambda rows: rows.new_full((), math.inf)  # its sigmoid is 1

    def run(
        rows: Sequence[Tensor], packing: Packing | None, continued: bool, continues: bool
    ) -> Result:
        (qkv,) = rows
        out, final = stock(inner, qkv, None, None)
        out, offset = out.unflatten(2, (heads, size)), final[0].float() if continues else None
        if not continued:
            return out, None, (None, offset)
        places_T1 = torch.arange(1, qkv.shape[1] + 1, device=qkv.device).unsqueeze(1)
        decays_TH = (-inner.slope_rate.float().view(1, heads) * places_T1).exp()
        q_THK = qkv[0].unflatten(1, (heads, -1))[..., :size]
        transition = decays_TH[-1] if continues else None, offset
        return (
            out,
            lambda state: torch.einsum("thk,hkv->thv", q_THK.float(), state) * decays_TH[..., None],
            transition,
        )

    qkv = module.act_fn(module.qkv_proj(hidden_states))
    values = qkv.unflatten(2, (heads, -1))[..., -size:]
    mixed = _recur(call, (qkv,), values, False, ((heads,), (heads, size, size)), run)
    call.mixed.append(mixing.LIGHTNING)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed.flatten(2))), None


def _convolution_and_scan(
    stock: Function, call: MixingCall, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Compute a whole Mamba-2 module by one kernel.

    None if there is no kernel, or documents are cut.
    """
    sizes = tuple(size for nano in call.plan.nano_batches for size in nano.cuts.sizes)
    if call.plan.cuts_documents or not _takes_packed(stock, "seq_idx"):
        return None
    if packing := call.plan.nano_batches[0].cuts.packing(sizes):
        kwargs["seq_idx"] = packing.seq_idx
    result: Tensor = stock(*args, **kwargs)
    return result


def _recur(
    call: MixingCall,
    tensors: Sequence[Tensor],
    values: Tensor,
    packed: bool,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    run: Run,
) -> Tensor:
    """Compute a recurrence over each document, [1, T, H, V].

    Cut segments come first: while their states travel, whole documents are computed, those of both
    nano-batches.

    Args:
        tensors: [1, T, ...] each, what the recurrence reads.
        values: [1, T, H, V], of the shape of the result.
        packed: whether whole documents may be computed in one call.
        shapes: of A and B.
    """

    def of_nano_batch(nano: BoundNanoBatch, rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        # 1. Compute cut segments and send their states.
        chains, rows_of = nano.cuts.chains, nano.cuts.sizes
        numbers = {segment: number for number, segment in enumerate(chains.cut)}
        # Whole documents between cut segments share a call if the kernel takes them packed.
        keys = [
            (numbers.get(segment), None if packed else segment) for segment in range(len(rows_of))
        ]
        calls = [
            (number, tuple(rows_of[segment] for segment in group))
            for (number, _), group in groupby(range(len(rows_of)), keys.__getitem__)
        ]
        inputs = list(
            zip(*(torch.split(x, [sum(sizes) for _, sizes in calls], 1) for x in rows), strict=True)
        )
        results = {
            index: run(
                inputs[index], None, bool(chains.earlier[number]), bool(chains.later[number])
            )
            for index, (number, _) in enumerate(calls)
            if number is not None
        }
        transitions = [transition for _, _, transition in results.values()]
        exchange = StateExchange(chains, shapes, **call.exchange(nano))
        token = exchange.send(transitions, rows)
        yield []

        # 2. Compute whole documents.
        for index, (number, sizes) in enumerate(calls):
            if number is None:
                results[index] = run(inputs[index], nano.cuts.packing(sizes), False, False)
        yield []

        # 3. Add to cut segments what the states before them change.
        # Some result goes through the exchange on every rank, see `StateExchange.receive`.
        outputs = [results[index][0] for index in range(len(calls))] or [values[:, :0]]
        outputs[0], states = exchange.receive(token, outputs[0], transitions)
        for index, (number, _) in enumerate(calls):
            if number is not None and (state := states[number]) is not None:
                _, read, _ = results[index]
                assert read is not None  # the segment has a state before it
                with without_autocast(state.device.type):
                    outputs[index] = (outputs[index].float() + read(state)).to(outputs[index].dtype)
        yield outputs

    nano_batches = call.plan.nano_batches
    divided = zip(nano_batches, *map(call.of_nano_batches, tensors), strict=True)
    parts = [of_nano_batch(nano, rows) for nano, *rows in divided]
    for part in parts:
        next(part)
    if nano_batches[0].index == 1:  # the first nano-batch is about to wait
        next(parts[0])
    call.pause()
    return torch.cat([out for part in parts for out in list(part)[-1]], 1)
